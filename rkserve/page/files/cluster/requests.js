/** The view of requests in flight. */

import { make, put } from "../elements.js";
import { abort_request } from "./actions.js";
import { heading, row_button, Table } from "./tables.js";
import { board_address } from "./verdict.js";
import { count, several, span } from "./words.js";

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
        { head: "Model", text: ({ model }) => model },
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
    const hidden = view.operator ? "" : " Names of keys are for the operator: enter the admin key in the settings.";
    put(this.summary, `${several(entries.length, "request")}, the oldest first.${hidden}`);
  }
}
