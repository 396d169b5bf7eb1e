/** Views of lists that are fetched when they are opened: the audit log, and usage per key and day. */

import { make, put } from "../elements.js";
import { heading, Table } from "./tables.js";
import { count, span, time } from "./words.js";

/** A view of one list of the server. */
class Listing {
  constructor(app, { title, words, path, columns, empty, key }) {
    Object.assign(this, { app, title, path, key });
    this.heading = heading(title);
    this.table = new Table(title, columns, empty);
    this.failure = make("p", { class: "failure", role: "alert", hidden: "" });
    this.note = make("p", { class: "hint" });
    const again = make("button", { type: "button" }, "Refresh");
    again.addEventListener("click", () => void this.load(true));
    const head = make("div", { class: "titled" }, this.heading, again);
    this.element = make("div", {}, head, make("p", { class: "hint" }, words), this.failure, this.table.element, this.note);
    this.table.element.hidden = true;
  }

  show() {
    void this.load(false);
  }

  update() {} // events have no lists

  async load(asked) {
    try {
      const { data, routers, unstored = [] } = await this.app.call(this.path);
      this.table.show(data.map((one, index) => [this.key(one, index), one]));
      this.table.element.hidden = false;
      this.failure.hidden = true;
      const silent = routers?.silent ?? [];
      const notes = [];
      if (silent.length) notes.push(`Without the figures of Router ${silent.join(", ")}: no answer in time.`);
      if (unstored.length) notes.push(`Router ${unstored.join(", ")} cannot store usage: only since its start.`);
      put(this.note, notes.join(" "));
      if (asked) this.app.say(`${this.title}: ${data.length} lines.`);
    } catch (error) {
      this.failure.textContent = error.message;
      this.failure.hidden = false;
    }
  }
}

/** Return a parameter's value: names in a row, and other structures as JSON. */
function plain(value) {
  if (Array.isArray(value) && value.every((one) => typeof one !== "object")) return value.join(" ");
  return typeof value === "object" ? JSON.stringify(value) : value;
}

function parameters(params = {}) {
  const shown = Object.entries(params).filter(([, value]) => value !== null && value !== "" && value?.length !== 0);
  return shown.map(([name, value]) => `${name} ${plain(value)}`).join(", ");
}

/** Return the view of the audit log. */
export function audit(app) {
  return new Listing(app, {
    title: "Audit",
    words: "The last 100 changes and refused ones, the latest first.",
    path: "v1/audit?limit=100",
    key: (one, index) => `${one.at_s} ${one.kind} ${index}`,
    empty: "Nothing was changed yet.",
    columns: [
      { head: "Time", text: ({ at_s }) => time(at_s) },
      { head: "By", text: ({ who }) => who },
      { head: "Change", text: ({ kind }) => kind },
      { head: "Outcome", text: ({ outcome, status }) => `${outcome ?? ""} (${status})`.trim() },
      { head: "Operation", text: ({ operation }) => operation ?? "–" },
      { head: "Epoch", numeric: true, text: ({ epoch }) => (epoch ? String(epoch) : "–") },
      { head: "Parameters", text: ({ params }) => parameters(params) },
    ],
  });
}

/** Return the view of usage. */
export function usage(app) {
  return new Listing(app, {
    title: "Usage",
    words: "The last 8 days (UTC) by API key; calls without a key are anonymous.",
    path: "v1/usage?days=8",
    key: (one, index) => `${one.day} ${one.key} ${index}`,
    empty: "No request was counted yet.",
    columns: [
      { head: "Day", text: ({ day }) => day },
      { head: "Key", text: ({ key }) => key },
      { head: "Requests", numeric: true, text: ({ requests }) => count(requests) },
      { head: "Prompt tokens", numeric: true, text: ({ prompt_tokens }) => count(prompt_tokens) },
      { head: "Completion tokens", numeric: true, text: ({ completion_tokens }) => count(completion_tokens) },
      { head: "Board time", numeric: true, text: ({ board_s }) => span(board_s) },
    ],
  });
}
