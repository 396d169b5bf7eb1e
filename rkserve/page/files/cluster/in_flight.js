/** The views of what goes on: requests in flight, and rollouts, operations and pauses. */

import { make, mark, put } from "../elements.js";
import { abort_request, change_rollout, end_pause, pause_cluster } from "./actions.js";
import { heading, row_button, Table } from "./tables.js";
import { board_address } from "./verdict.js";
import { count, measure, percent, rate, several, span, time } from "./words.js";

/** The view of requests in flight. */
export class Requests {
  constructor(app) {
    this.app = app;
    this.title = "Requests";
    this.heading = heading("Requests in flight");
    this.summary = make("p", { class: "hint" });
    const link = (cell, { board }) => {
      const address = board ? board_address(board) : "";
      if (cell.dataset.board === (board ?? "")) return;
      cell.dataset.board = board ?? "";
      cell.replaceChildren(board ? make("a", { href: address }, board) : "–");
    };
    this.table = new Table(
      "Requests in flight",
      [
        { head: "Request", text: (_, id) => id },
        { head: "Phase", text: ({ phase }) => phase },
        { head: "Age", numeric: true, text: ({ since_s }) => span(app.cluster.now_s() - since_s) },
        { head: "Model", text: (one) => one.model ?? app.cluster.view.boards[one.board]?.model ?? "–" },
        { head: "Board", update: link },
        { head: "Key", text: ({ key }) => key ?? "–" },
        { head: "Failovers", numeric: true, text: ({ failovers = 0 }) => count(failovers) },
        { head: "Action", fill: (value, id) => [row_button("Abort", `request ${id}`, () => abort_request(id, value(), app))] },
      ],
      "No request is in flight.",
    );
    this.element = make("div", {}, this.heading, this.summary, this.table.element);
  }

  update({ view }, change) {
    if (change.has("requests")) this.draw(view);
  }

  /** Ages grow without events. */
  tick() {
    if (this.app.cluster.view) this.draw(this.app.cluster.view);
  }

  draw(view) {
    const entries = Object.entries(view.requests).sort(([, a], [, b]) => a.since_s - b.since_s);
    this.table.show(entries);
    const hidden = view.operator ? "" : " Names of keys are shown with a key of the scope operate: enter one in the settings.";
    put(this.summary, `${several(entries.length, "request")}, the oldest first.${hidden}`);
  }
}

function took(seconds) {
  return seconds < 10 ? measure(seconds, "s", rate) : span(seconds);
}

/** Return a column of bars with their words: so many of so many boards. */
function progress_cell(figures) {
  return {
    fill: () => [make("progress", { max: "1", value: "0", "aria-hidden": "true" }), make("span", {})],
    update: (cell, value) => {
      const [bar, words] = cell.children;
      const { done, failed = 0, total } = figures(value);
      mark(bar, "max", String(total || 1));
      mark(bar, "value", String(done));
      put(words, ` ${count(done)} of ${count(total)}${failed ? `, ${count(failed)} failed` : ""}`);
    },
  };
}

/** Return whether a pause is one of the whole cluster, and no sleep. */
function is_of_cluster({ models, boards, adapter, level }) {
  return !models.length && !boards.length && !adapter && level === undefined;
}

/** The view of what changes the cluster: rollouts, operations, and pauses in force. */
export class Operations {
  constructor(app) {
    this.title = "Operations";
    this.heading = heading("Operations");
    this.hint = make("p", { class: "hint" });
    this.rollouts = new Table(
      "Rollouts",
      [
        { head: "Adapter", text: ({ adapter, model }) => `${adapter} of ${model}` },
        { head: "Serves", text: ({ active }) => active ?? "–" },
        { head: "Candidate", text: ({ candidate }) => candidate },
        { head: "Boards", ...progress_cell(({ switched, total }) => ({ done: switched, total })) },
        { head: "Sessions", numeric: true, text: ({ weight }) => (weight ? percent(100 * weight) : "–") },
        {
          head: "Action",
          fill: (value) => {
            const { adapter } = value();
            const promote = row_button("Promote", adapter, () => change_rollout("promote", value(), app));
            return [row_button("Roll back", adapter, () => change_rollout("rollback", value(), app)), promote];
          },
          update: (cell, { weight }) => (cell.lastElementChild.hidden = !weight),
        },
      ],
      "No adapter version is on its way.",
    );
    this.operations = new Table(
      "Operations of the last minutes",
      [
        { head: "Operation", text: (_, id) => id },
        { head: "Kind", text: ({ kind, subject }) => (subject ? `${kind}: ${subject}` : kind) },
        { head: "State", text: ({ state, phase }) => (phase && state === "running" ? `${state}: ${phase}` : state) },
        { head: "Boards", ...progress_cell((one) => one) },
        { head: "Began", text: ({ created_s }) => time(created_s) },
        { head: "Took", numeric: true, text: ({ created_s, finished_s }) => took((finished_s ?? app.cluster.now_s()) - created_s) },
        { head: "By", text: ({ who }) => who ?? "–" },
        { head: "Error", text: ({ error }) => error ?? "" },
      ],
      "No operation in the last minutes.",
    );
    this.pauses = new Table(
      "Pauses and sleeps in force",
      [
        { head: "Scope", text: ({ models, boards, adapter }) => [...models, ...boards, adapter].filter(Boolean).join(", ") || "whole cluster" },
        { head: "Mode", text: ({ mode, level }) => (level === undefined ? `pause, ${mode}` : `sleep level ${level}, ${mode}`) },
        { head: "Since", text: ({ since_s }) => time(since_s) },
        { head: "Ends", text: ({ expires_s }) => (expires_s ? time(expires_s) : "not by itself") },
        { head: "By", text: (_, id) => id },
        { head: "Action", fill: (value, id) => [row_button("End", id, () => end_pause(value(), app))] },
      ],
      "No board, model or adapter is paused.",
    );
    const section = (words, table, ...rest) => make("section", {}, make("div", { class: "titled" }, make("h2", {}, words), ...rest), table.element);
    this.pause = make("button", { type: "button" }, "Pause the cluster");
    this.pause.addEventListener("click", () => pause_cluster(app));
    this.element = make(
      "div",
      {},
      this.heading,
      section("Rollouts", this.rollouts),
      section("Pauses and sleeps", this.pauses, this.pause),
      section("Operations", this.operations),
      this.hint,
    );
  }

  show_pauses(pauses) {
    this.pauses.show(Object.entries(pauses));
    const all = Object.values(pauses).some(is_of_cluster);
    if (all && document.activeElement === this.pause) this.heading.focus(); // its button goes
    this.pause.hidden = all;
  }

  update({ view }, change) {
    if (change.has("rollouts")) this.rollouts.show(Object.entries(view.rollouts));
    if (change.has("pauses")) this.show_pauses(view.pauses);
    if (change.has("operations")) {
      const latest_first = ([, a], [, b]) => b.created_s - a.created_s;
      this.operations.show(Object.entries(view.operations ?? {}).sort(latest_first));
    }
    const words = view.operator ? "" : "Operations are shown with a key of the scope operate: enter one in the settings.";
    put(this.hint, words);
  }
}
