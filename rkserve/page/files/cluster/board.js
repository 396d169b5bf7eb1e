/** The view of one board: its reasons, actions, 30 minutes of figures, its engine and its log. */

import { make, mark, put } from "../elements.js";
import { Actions, path_of } from "./actions.js";
import { Chart, tone_mark } from "./charts.js";
import { FIGURES, figure_text, is_wanting } from "./figures.js";
import { Log } from "./log.js";
import { place, Reason } from "./verdict.js";
import { count, loaded, megabytes, rate, several, span, standing } from "./words.js";

const POINTS = 360; // 30 minutes of samples every 5 s

const CHARTS = [
  { title: "Decoding", unit: "tokens/s", lines: [{ name: "Decoding", column: "decode_tokens_per_s" }], expected: true },
  { title: "Prefill", unit: "tokens/s", lines: [{ name: "Prefill", column: "prefill_tokens_per_s" }] },
  { title: "Requests", unit: "", form: count, lines: [{ name: "running", column: "running" }, { name: "queued", column: "queued" }] },
  { title: "KV cache", unit: "%", form: count, ceiling: 100, lines: [{ name: "filled", column: "kv_percent" }, { name: "prompt tokens cached", column: "cached_percent" }] },
  { title: "NPU load", unit: "%", form: count, ceiling: 100, lines: [{ name: "NPU load", column: "npu_percent" }] },
  { title: "Clocks", unit: "MHz", form: count, lines: [{ name: "DDR", column: "ddr_mhz" }, { name: "NPU", column: "npu_mhz" }] },
  { title: "Temperature", unit: "°C", form: count, lines: [{ name: "Temperature", column: "temperature_c" }] },
  { title: "Memory used", unit: "MB", form: count, lines: [{ name: "Memory used", column: "memory_mb" }] },
];

/** Facts that change rarely: `[name, text of the board's entry]`; those without a text are left out. */
const FACTS = [
  ["Model", (one) => `${one.model} · ${loaded(one)}`],
  ["State since", (one, now_s) => span(now_s - one.state_since_s)],
  ["Epoch", (one) => (one.epoch === undefined ? "" : one.behind ? `${one.epoch}, ${several(one.behind, "epoch")} behind` : `${one.epoch}, current`)],
  ["Expected speed", (one) => (one.expected_tokens_per_s ? `${rate(one.expected_tokens_per_s)} tokens/s: ${one.basis}` : "")],
  ["SoC", (one) => one.soc],
  ["Runtime", (one) => one.runtime],
  ["NPU driver", (one) => one.driver],
  ["rkserve", (one) => one.version],
  ["Node", (one) => one.node],
  ["Context", (one) => `${count(one.kv_capacity)} tokens`],
  ["Queue limit", (one) => count(one.queue_limit)],
  ["Disk free", (one) => (one.disk_free_mb === undefined ? "" : `${megabytes(one.disk_free_mb)} of ${megabytes(one.disk_total_mb)}`)],
  ["Prompt caches", (one) => (one.prompt_cache_mb === undefined ? "" : megabytes(one.prompt_cache_mb))],
];

/** What the engine left behind: its last recovery, and the kinds of its ends. */
const ENGINE = [
  ["Engine starts", (one) => count(one.engine_starts)],
  ["Ends out of order", (one) => Object.entries(one.crashes ?? {}).map(([kind, times]) => `${kind}: ${times}`).join(", ") || "none"],
  ["Last words", (one) => one.last_recovery || "none since its start"],
  ["Circuit breaker", (one) => (one.circuit ? `${one.circuit.state}: ${one.circuit.reason}` : "")],
];

/** A list of names and texts. */
class Facts {
  constructor(facts) {
    this.facts = facts.map(([name, text]) => {
      const value = make("dd");
      return { text, value, row: make("div", {}, make("dt", {}, name), value) };
    });
    this.element = make("dl", { class: "facts" }, ...this.facts.map(({ row }) => row));
  }

  show(entry, now_s) {
    for (const { text, value, row } of this.facts) {
      const words = text(entry, now_s) ?? "";
      put(value, words);
      row.hidden = !words;
    }
  }
}

export class Board {
  constructor(app) {
    this.app = app;
    this.title = "Board";
    this.element = make("div", { class: "board" });
  }

  show(name) {
    const { app } = this;
    this.hide();
    Object.assign(this, { name, title: name, columns: null });
    this.heading = make("h1", { tabindex: "-1" }, name);
    this.mark = tone_mark();
    this.word = make("span", {});
    this.told = make("p", { class: "told" });
    this.actions = new Actions(name, app);
    this.reasons = make("ul", { class: "board-reasons" });
    this.known = new Map();
    this.values = FIGURES.map(({ label }) => ({ value: make("dd"), label }));
    const figures = this.values.map(({ label, value }) => make("div", {}, make("dt", {}, label), value));
    this.charts = CHARTS.map((one) => new Chart(one));
    this.failure = make("p", { class: "failure", role: "alert", hidden: "" });
    [this.facts, this.engine] = [new Facts(FACTS), new Facts(ENGINE)];
    this.log = new Log(name, app);
    const back = make("a", { href: "#/boards" }, "All boards");
    const state = make("p", { class: "state" }, this.mark.element, this.word);
    const section = (words, ...inside) => make("section", {}, make("h2", {}, words), ...inside);
    this.body = [
      this.told,
      this.reasons,
      this.actions.element,
      make("dl", { class: "figures" }, ...figures),
      section("Last 30 minutes", this.failure, make("div", { class: "charts" }, ...this.charts.map((one) => one.element))),
      make("div", { class: "halves" }, section("Engine", this.engine.element), section("Facts", this.facts.element)),
      this.log.element,
    ];
    this.gone = make("p", { class: "empty", hidden: "" }, `No board named ${name} is in this cluster.`);
    this.element.replaceChildren(make("p", {}, back), make("div", { class: "titled" }, this.heading, state), this.gone, ...this.body);
  }

  hide() {
    this.log?.stop();
  }

  update(cluster, change) {
    const { view } = cluster;
    const entry = view.boards[this.name];
    this.gone.hidden = Boolean(entry);
    for (const one of this.body) one.hidden = !entry;
    if (!entry) return;
    const { word, tone, told } = standing(entry);
    this.mark.set(tone);
    put(this.word, word);
    put(this.told, told);
    this.told.hidden = !told;
    this.actions.show(entry);
    const now = (column) => cluster.figure(this.name, column);
    FIGURES.forEach((figure, index) => {
      const { value } = this.values[index];
      put(value, figure_text(figure, entry, now, true));
      mark(value, "data-wanting", is_wanting(figure, entry) ? "yes" : null);
    });
    this.facts.show(entry, cluster.now_s());
    this.engine.show(entry);
    if (change.has("verdict")) this.show_reasons(view.verdict.reasons);
    if (change.ticked) this.append(cluster, entry);
    if (change.all) void this.load(); // the stream was lost, and so were the samples meanwhile
  }

  tick() {
    const entry = this.app.cluster.view?.boards[this.name];
    if (entry) this.facts.show(entry, this.app.cluster.now_s());
  }

  show_reasons(reasons) {
    const mine = reasons.filter(({ boards }) => boards.includes(this.name));
    const shown = new Map(mine.map((entry) => [entry.rule, this.known.get(entry.rule) ?? new Reason(entry)]));
    for (const entry of mine) shown.get(entry.rule).show(entry);
    this.known = shown;
    place(this.reasons, [...shown.values()].map((one) => one.element));
  }

  async load() {
    const { name } = this;
    try {
      const history = await this.app.call(path_of("v1/boards", name, "/history"));
      if (name !== this.name) return; // another board is shown by now
      this.columns = history.columns;
      this.every_s = history.every_s;
      this.failure.hidden = true;
      this.draw(this.app.cluster.view?.boards[name]);
    } catch (error) {
      if (name !== this.name) return;
      this.failure.textContent = `The history cannot be read: ${error.message}`;
      this.failure.hidden = false;
    }
  }

  append(cluster, entry) {
    if (!this.columns) return;
    for (const [column, points] of Object.entries(this.columns)) {
      points.push(cluster.figure(this.name, column));
      if (points.length > POINTS) points.shift();
    }
    this.draw(entry);
  }

  draw(entry) {
    this.charts.forEach((chart, index) => {
      const expected = CHARTS[index].expected ? (entry?.expected_tokens_per_s ?? null) : null;
      chart.show(this.columns, POINTS, this.every_s, expected);
    });
  }
}

