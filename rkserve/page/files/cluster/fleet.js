/** All boards: as cards up to 12, and above as rows, by model and in two columns where there is room. */

import { make, mark, put } from "../elements.js";
import { Spark, tone_mark } from "./charts.js";
import { FACTS, FIGURES, figure_text, is_wanting, particulars, usual_facts } from "./figures.js";
import { Table } from "./tables.js";
import { board_address, MOST_CARDS, place } from "./verdict.js";
import { count, loaded, measure, NONE, percent, rate, several, standing } from "./words.js";

/** The name, the state and the figures of one board; subclasses place them. */
class BoardItem {
  constructor(name) {
    this.name = name;
    this.mark = tone_mark();
    this.word = make("span", {});
    this.link = make("a", { href: board_address(name), title: name }, name);
    this.spark = new Spark(`Tokens per second of ${name}`);
    this.cells = FIGURES.map(() => make("span", { class: "value" }));
  }

  /** Show the board as it is; `usual` are the facts that its neighbours share. */
  show(cluster, usual, long) {
    const entry = cluster.view.boards[this.name];
    if (!entry) return;
    const { word, tone, told } = standing(entry);
    const behind = entry.behind ? `, ${several(entry.behind, "epoch")} behind` : "";
    this.mark.set(tone);
    mark(this.element, "data-tone", tone);
    put(this.word, long ? `${word}${behind}` : word + (entry.behind ? ` −${entry.behind}` : ""));
    mark(this.word, "title", `${word}${behind}${told ? `: ${told}` : ""}`);
    const now = (column) => cluster.figure(this.name, column);
    FIGURES.forEach((figure, index) => {
      put(this.cells[index], figure_text(figure, entry, now, long));
      mark(this.cells[index], "data-wanting", is_wanting(figure, entry) ? "yes" : null);
    });
    const points = cluster.history.of(this.name, "decode_tokens_per_s");
    this.spark.show(points, entry.expected_tokens_per_s);
    this.details(entry, usual, told, now);
  }
}

class Row extends BoardItem {
  constructor(name) {
    super(name);
    this.about = make("span", { role: "cell", class: "about" });
    const head = make("span", { role: "rowheader", class: "name" }, this.link);
    const state = make("span", { role: "cell", class: "state" }, this.mark.element, this.word);
    const spark = make("span", { role: "cell", class: "trend" }, this.spark.element);
    this.cells.forEach((cell, index) => {
      mark(cell, "role", "cell");
      mark(cell, "data-short", FIGURES[index].short); // shown where rows have no head
    });
    this.element = make("div", { role: "row", class: "row" }, head, state, this.about, spark, ...this.cells);
  }

  details(entry, usual) {
    const words = particulars(entry, usual);
    put(this.about, words);
    mark(this.about, "title", words);
  }
}

class Card extends BoardItem {
  constructor(name) {
    super(name);
    const state = make("p", { class: "state" }, this.mark.element, this.word);
    this.model = make("p", { class: "model" });
    this.told = make("p", { class: "told" });
    const [speed] = this.cells;
    const figure = make("p", { class: "speed" }, speed, make("span", { class: "unit" }, "tokens/s"));
    this.share = make("p", { class: "share" });
    this.bar = make("progress", { max: "100", value: "0", "aria-hidden": "true" });
    const fact = (name, value) => make("div", {}, make("dt", {}, name), make("dd", {}, value));
    const facts = FIGURES.slice(2).map((one, index) => fact(one.card ?? one.label, this.cells[index + 2]));
    [this.runtime, this.driver] = [make("span", {}), make("span", {})];
    facts.push(fact("Runtime", this.runtime), fact("Driver", this.driver));
    const head = make("div", { class: "head" }, make("h2", {}, this.link), state);
    const pace = make("div", { class: "pace" }, make("div", {}, figure, this.share, this.bar), this.spark.element);
    this.element = make("li", { class: "card" }, head, this.model, this.told, pace, make("dl", {}, ...facts));
  }

  details(entry, _, told, now) {
    put(this.model, [entry.model, loaded(entry), entry.soc].filter(Boolean).join(" · "));
    put(this.told, told);
    this.told.hidden = !told;
    const expected = entry.expected_tokens_per_s;
    const speed = now("speed_tokens_per_s");
    const known = Boolean(expected) && speed !== null;
    this.bar.hidden = !known;
    if (known) mark(this.bar, "value", String(Math.min(100, Math.round((100 * speed) / expected))));
    const share = known ? percent((100 * speed) / expected) : "";
    put(this.share, known ? `${share} of ${measure(expected, "expected", rate)}` : "expected speed unknown");
    mark(this.share, "title", known ? `While decoding, ${rate(speed)} tokens/s; ${entry.basis ?? ""}` : "");
    put(this.runtime, entry.runtime ?? NONE);
    put(this.driver, entry.driver ?? NONE);
  }
}

/** The boards of one model as rows, under what they share. */
class Group {
  constructor(model) {
    this.model = model;
    this.title = make("strong", {}, model);
    this.facts = make("span", {});
    const cell = make("span", { role: "cell", "aria-colspan": String(FIGURES.length + 4) }, this.title, this.facts);
    this.head = make("div", { role: "row", class: "group" }, cell);
  }

  show(view, names) {
    const boards = names.map((name) => view.boards[name]).filter(Boolean);
    this.usual = usual_facts(boards);
    const facts = FACTS.map(({ text }) => text(this.usual)).filter(Boolean);
    const ready = boards.filter((one) => one.state === "ready").length;
    const parts = [...facts, `${ready} of ${boards.length} ready`, traffic(view.models[this.model])];
    put(this.facts, ` · ${parts.filter(Boolean).join(" · ")}`);
  }
}

/** Return the traffic of a model in the last five minutes, as a sentence. */
function traffic(model) {
  const window = model?.traffic["5m"];
  if (!window) return "";
  const { good, late, failed, turned_away, ttft_p95_s } = window;
  const counts = { good, late, failed, "turned away": turned_away };
  const told = Object.entries(counts).filter(([name, number]) => number || name === "good");
  const parts = told.map(([name, number]) => `${count(number)} ${name}`);
  const first = ttft_p95_s === undefined ? "" : `, TTFT p95 ${rate(ttft_p95_s)} s`;
  return `5 min: ${parts.join(", ")}${first}`;
}

/** The models below the cards; above rows each heads its own. */
class Models {
  constructor() {
    const window = (name, form) => ({ traffic: of }) => form(of["5m"]?.[name]);
    const seconds = (value) => measure(value, "s", rate);
    const figure = (head, text) => ({ head, numeric: true, text });
    this.table = new Table(
      "Models, traffic of the last 5 minutes",
      [
        { head: "Model", text: (_, name) => name },
        { head: "Weights", text: ({ weights }) => weights },
        figure("Boards ready", ({ ready, boards }) => `${ready} of ${boards}`),
        figure("Waiting", ({ waiting }) => count(waiting)),
        figure("Good", window("good", count)),
        figure("Late", window("late", count)),
        figure("Failed", window("failed", count)),
        figure("Turned away", window("turned_away", count)),
        figure("First token p95", window("ttft_p95_s", seconds)),
        figure("Queue wait p95", window("queue_wait_p95_s", seconds)),
      ],
      "No model is served.",
    );
    const title = make("h2", {}, "Models, last 5 minutes");
    this.element = make("section", {}, title, this.table.element);
  }

  show(view) {
    this.table.show(Object.entries(view.models));
  }
}

/** The view of all boards. */
export class Fleet {
  constructor() {
    this.title = "Boards";
    this.heading = make("h1", { class: "unseen", tabindex: "-1" }, "Boards");
    this.models = new Models();
    this.element = make("div", { class: "fleet" }, this.heading, this.models.element);
    this.items = new Map();
  }

  update(cluster, change) {
    const { view } = cluster;
    const names = view.order.filter((name) => view.boards[name]);
    this.models.element.hidden = names.length > MOST_CARDS;
    const layout = names.length > MOST_CARDS ? "rows" : "cards";
    const shape = `${layout} ${names.map((name) => `${name}\n${view.boards[name].model}`).join("\t")}`;
    const rebuilt = shape !== this.shape;
    if (rebuilt) this.arrange(layout, names, view);
    this.shape = shape;
    const all = change.all || rebuilt;
    if (layout === "rows" && (all || change.has("boards", "models"))) this.groups.forEach((names_of, one) => one.show(view, names_of));
    if (layout === "cards" && (all || change.has("models"))) this.models.show(view);
    for (const [name, item] of this.items) {
      if (all || change.boards.has(name) || change.ticked) {
        item.show(cluster, this.group_of.get(name)?.usual, layout === "cards");
      }
    }
  }

  arrange(layout, names, view) {
    const Item = layout === "rows" ? Row : Card;
    const kept = (name) => (this.items.get(name) instanceof Item ? this.items.get(name) : new Item(name));
    this.items = new Map(names.map((name) => [name, kept(name)]));
    this.group_of = new Map();
    this.groups = new Map();
    const elements = layout === "rows" ? this.grouped(names, view) : [...this.items.values()].map((one) => one.element);
    if (!names.length) {
      this.body?.remove();
      this.body = make("p", { class: "empty" }, "No board has reported yet. rkserve boards lists those that wait to join.");
      this.models.element.before(this.body);
      this.drawn = "none";
      return;
    }
    if (this.drawn !== layout) {
      this.body?.remove();
      this.body = layout === "rows" ? table() : make("ul", { class: "cards" });
      this.models.element.before(this.body);
      this.drawn = layout;
    }
    place(layout === "rows" ? this.body.lastElementChild : this.body, elements);
  }

  grouped(names, view) {
    const by_model = new Map();
    for (const name of names) {
      const { model } = view.boards[name];
      by_model.set(model, [...(by_model.get(model) ?? []), name]);
    }
    return [...by_model].flatMap(([model, names_of]) => {
      const group = new Group(model);
      this.groups.set(group, names_of);
      for (const name of names_of) this.group_of.set(name, group);
      return [group.head, ...names_of.map((name) => this.items.get(name).element)];
    });
  }
}

function table() {
  const heads = (tags) =>
    ["Board", "State", "Loaded", "30 min", ...FIGURES.map(({ short }) => short)].map((text, index) =>
      make("span", { ...tags, title: FIGURES[index - 4]?.label }, text),
    );
  const first = make("div", { role: "row", class: "row heads" }, ...heads({ role: "columnheader" }));
  const second = make("div", { class: "row heads second", "aria-hidden": "true" }, ...heads({}));
  const head = make("div", { role: "rowgroup", class: "head" }, first, second);
  const body = make("div", { role: "rowgroup", class: "body" });
  return make("div", { role: "table", class: "rows", "aria-label": "Boards" }, head, body);
}
