/** The live log of a board: lines of JSON that the server sends as they come. */

import { make } from "../elements.js";
import { path_of } from "./actions.js";
import { time } from "./words.js";

const MOST_LINES = 500;

/** Yield the lines of a stream as objects. */
async function* entries(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.trim()) yield JSON.parse(line);
  }
}

export class Log {
  constructor(name, app) {
    Object.assign(this, { name, app, abort: null });
    this.button = make("button", { type: "button" }, "Follow the log");
    this.button.addEventListener("click", () => (this.abort ? this.stop() : void this.follow()));
    this.state = make("p", { class: "hint", role: "status" });
    this.lines = make("ol", {});
    const words = { class: "log", tabindex: "0", role: "region", "aria-label": `Log of ${name}`, hidden: "" };
    this.box = make("div", words, this.lines);
    const head = make("div", { class: "titled" }, make("h2", {}, "Log"), this.button);
    this.element = make("section", {}, head, this.state, this.box);
  }

  stop() {
    this.abort?.abort();
    this.abort = null;
    this.button.textContent = "Follow the log";
  }

  async follow() {
    const abort = new AbortController();
    this.abort = abort;
    this.button.textContent = "Stop";
    this.state.textContent = "";
    this.lines.replaceChildren();
    try {
      const path = path_of("v1/boards", this.name, "/logs?follow=true&tail=100");
      const response = await this.app.open(path, { signal: abort.signal });
      this.box.hidden = false;
      for await (const entry of entries(response.body)) this.add(entry);
      this.state.textContent = "The log has ended.";
    } catch (error) {
      if (abort.signal.aborted) return;
      this.state.textContent =
        error.status === 404 ? `This server has no live log of ${this.name}.` : `The log cannot be read: ${error.message}`;
    } finally {
      if (this.abort === abort) this.stop();
    }
  }

  add({ time_s, level, logger, message, request_id }) {
    const { box } = this;
    const following = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
    const about = [level, logger, request_id].filter(Boolean).join(" ");
    const line = make("li", { "data-level": level }, make("time", {}, time(time_s)), make("b", {}, about), make("span", {}, message));
    this.lines.append(line);
    if (this.lines.children.length > MOST_LINES) this.lines.firstElementChild.remove();
    if (following) box.scrollTop = box.scrollHeight;
  }
}
