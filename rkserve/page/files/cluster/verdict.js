/** The verdict: READY, DEGRADED or NOT READY, and the reasons, each with the command that mends it. */

import { copy_text, make, mark, put } from "../elements.js";
import { tone_mark } from "./charts.js";
import { count, measure, rate, several, time } from "./words.js";

export const MOST_CARDS = 12; // more boards are shown densely
const TONES = { READY: "ok", DEGRADED: "warn", "NOT READY": "bad" };

const at = (id) => document.getElementById(id);

/** Return an address of the documentation (`docs/how-to/runbook.md#anchor`) on this page. */
export function runbook_address(runbook) {
  return `#/runbook/${encodeURIComponent(runbook.split("#")[1] ?? "")}`;
}

export function board_address(name) {
  return `#/board/${encodeURIComponent(name)}`;
}

/** One reason; `entry` may become another with the same rule, model and boards. */
export class Reason {
  constructor(entry) {
    this.mark = tone_mark();
    this.severity = make("span", { class: "unseen" });
    this.sentence = make("span", {});
    [this.figure, this.wanted] = [make("span", {}), make("span", { class: "wanted" })];
    const figure = make("span", { class: "figure" }, this.figure, this.wanted);
    this.evidence = make("p", { class: "evidence" });
    this.command = make("code", {});
    const copy = make("button", { type: "button", class: "small" }, "Copy");
    copy.setAttribute("aria-label", `Copy the command for ${entry.rule}`);
    copy.addEventListener("click", () => copy_text(this.command.textContent, copy));
    this.copy = copy;
    this.where = make("span", { class: "where" });
    const runbook = make("a", { href: runbook_address(entry.runbook) }, "Runbook");
    runbook.setAttribute("aria-label", `Runbook: ${entry.rule}`);
    const cause = make("p", { class: "cause" }, this.severity, this.sentence, " ", figure);
    const remedy = make("p", { class: "remedy" }, this.command, copy, this.where, runbook);
    this.element = make("li", { class: "reason" }, this.mark.element, make("div", {}, cause, this.evidence, remedy));
    this.show(entry);
  }

  show(entry) {
    const tone = entry.severity === "critical" ? "bad" : "warn";
    this.mark.set(tone);
    mark(this.element, "data-tone", tone);
    put(this.severity, entry.severity === "critical" ? "Critical: " : "Warning: ");
    put(this.sentence, entry.sentence);
    const form = Number.isInteger(entry.figure) && entry.figure >= 100 ? count : rate;
    put(this.figure, entry.figure === undefined ? "" : measure(entry.figure, entry.unit ?? "", form).trim());
    put(this.wanted, entry.limit === undefined ? "" : ` (limit ${form(entry.limit)})`);
    put(this.evidence, entry.evidence.join(" · "));
    put(this.command, entry.command);
    this.copy.hidden = entry.command.startsWith("#"); // a remark: there is no command
    put(this.where, place_of(entry));
  }
}

function place_of({ run_on, boards }) {
  if (run_on === "head") return "on the head";
  if (run_on === "anywhere" || !boards.length) return "anywhere";
  if (boards.length > 3) return `on each of ${boards.length} boards`;
  return `on ${boards.join(", ")}`;
}

function identity({ rule, model, boards }) {
  return [rule, model, ...boards].join(" ");
}

/** Return how many of the boards are kept from their work on purpose, in words. */
function withheld(boards) {
  const asleep = boards.filter(({ state }) => state === "asleep").length;
  const awake = boards.filter(({ state }) => state === "ready");
  const drained = awake.filter((one) => one.drained).length;
  const paused = awake.filter((one) => one.hold && !one.drained).length;
  return Object.entries({ paused, drained, asleep }).flatMap(([word, number]) => (number ? [`${count(number)} ${word}`] : []));
}

/**
 * Return the sentence about models of which no board takes requests because an operator paused or drained
 * them, empty if there is none: the verdict calls such a cluster READY, and its clients wait. Models that
 * sleep are woken by a request.
 */
function held({ boards, models, pauses }) {
  const all = Object.entries(boards).map(([name, one]) => ({ name, ...one }));
  const stands = (model) => {
    const own = all.filter((one) => one.model === model && ["ready", "asleep"].includes(one.state));
    return own.length > 0 && own.every((one) => one.state === "ready" && (one.hold || one.drained));
  };
  const names = Object.keys(models).filter(stands);
  if (!names.length) return "";
  const about = all.filter((one) => names.includes(one.model));
  const covers = (one) =>
    (!one.models.length && !one.boards.length) ||
    one.models.some((name) => names.includes(name)) ||
    about.some(({ name }) => one.boards.includes(name));
  const pausing = Object.values(pauses).filter((one) => !one.adapter && one.level === undefined && covers(one));
  const since = pausing.length ? `, since ${time(Math.min(...pausing.map((one) => one.since_s)))}` : "";
  const what = names.length < Object.keys(models).length ? names.join(", ") : "The whole cluster";
  return `${what} serves nothing, on purpose: ${withheld(about).join(", ")}${since}.`;
}

/** The verdict at the head of the page; `say` announces one that changes. */
export class Verdict {
  constructor(say) {
    Object.assign(this, { say, reasons: new Map(), announced: "" });
    this.mark = tone_mark();
    this.word = make("span", {});
    at("verdict-word").append(this.mark.element, this.word);
    [this.held_mark, this.held] = [tone_mark(), make("span", {})];
    this.held_mark.set("idle");
    at("held").append(this.held_mark.element, this.held, make("a", { href: "#/operations" }, "Operations"));
  }

  update(cluster, change) {
    const { view } = cluster;
    at("verdict").hidden = false;
    put(this.held, held(view));
    at("held").hidden = !this.held.textContent;
    if (change.has("verdict")) this.show(view.verdict);
    this.announce(view.verdict);
    mark(at("verdict"), "data-dense", String(view.order.length > MOST_CARDS));
    const boards = Object.values(view.boards);
    const ready = Object.values(view.models).reduce((sum, model) => sum + model.ready, 0);
    const waiting = Object.values(view.models).reduce((sum, model) => sum + model.waiting, 0);
    const silent = view.routers.silent.length;
    const parts = [
      `${ready} of ${several(boards.length, "board")} ready`,
      ...withheld(boards),
      `${rate(cluster.total("decode_tokens_per_s"))} tokens/s`,
      `${count(cluster.total("running"))} running`,
      `${count(cluster.total("queued") + waiting)} queued`,
      ...(silent ? [`${several(silent, "Router")} silent`] : []),
      ...(view.coordinator === "reachable" ? [] : ["Coordinator unreachable"]),
      `epoch ${view.epoch}`,
      ...(view.verdict.more ? [several(view.verdict.more, "more reason")] : []),
    ];
    put(at("verdict-summary"), parts.join(" · "));
  }

  show({ verdict, reasons }) {
    mark(at("verdict"), "data-tone", TONES[verdict]);
    this.mark.set(TONES[verdict]);
    put(this.word, verdict);
    const shown = new Map();
    for (const entry of reasons) {
      const key = identity(entry);
      const one = this.reasons.get(key) ?? new Reason(entry);
      one.show(entry);
      shown.set(key, one);
    }
    this.reasons = shown;
    place(at("reasons"), [...shown.values()].map((one) => one.element));
    at("reasons").hidden = !reasons.length;
  }

  /** Announce another verdict, or another first reason; figures that move are no news. */
  announce({ verdict, reasons }) {
    const news = [verdict, ...reasons.map(identity), this.held.textContent].join("|");
    if (news === this.announced) return;
    this.announced = news;
    const sentences = [`The cluster is ${verdict}.`, this.held.textContent, reasons[0]?.sentence];
    this.say(sentences.filter(Boolean).join(" "));
  }
}

/** Let an element have these children in this order; those that stay are not touched. */
export function place(parent, children) {
  const wanted = new Set(children);
  for (const child of [...parent.children]) if (!wanted.has(child)) child.remove();
  children.forEach((child, index) => {
    if (parent.children[index] !== child) parent.insertBefore(child, parent.children[index] ?? null);
  });
}
