/**
 * One message of the conversation as the page shows it: what was asked, or an answer while it comes.
 * It knows elements and times, and nothing of the server.
 */

import { Prose } from "./draw.js";
import { copy_text, make } from "./elements.js";
import { shown } from "./images.js";
import { fit } from "./panels.js";

/** Return the element of a user's message; `edit` takes the message and its new text. */
export function question(message, edit) {
  const { text, images = [], lost = 0 } = message;
  const pieces = [...shown(images, lost), ...(text ? [text] : [])];
  const words = make("div", { class: "words" }, ...pieces);
  const name = make("h2", { class: "unseen" }, "You");
  const begin = make("button", { type: "button", class: "quiet" }, "Edit");
  const actions = make("div", { class: "actions" }, begin);
  begin.addEventListener("click", () => {
    const form = editor(text, {
      send: (changed) => edit(message, changed),
      cancel: () => {
        form.replaceWith(words);
        actions.hidden = false;
        begin.focus();
      },
    });
    words.replaceWith(form);
    actions.hidden = true;
    form.area.focus();
    fit(form.area);
  });
  return make("article", { class: "asked", "aria-label": "You" }, name, words, actions);
}

/** Return a form to edit a message in. Enter sends it, Escape closes it. */
function editor(text, { send, cancel }) {
  const area = make("textarea", { rows: "1", "aria-label": "Edit your message" });
  const submit = make("button", { class: "primary" }, "Send");
  const back = make("button", { type: "button" }, "Cancel");
  const form = make("form", { class: "editor" }, area, make("div", { class: "actions" }, submit, back));
  area.value = text;
  form.area = area;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    send(area.value);
  });
  area.addEventListener("input", () => fit(area));
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation(); // it does not stop an answer, too
      cancel();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send(area.value);
    }
  });
  back.addEventListener("click", cancel);
  return form;
}

/** An answer: its state while nothing comes, thoughts folded, words, figures and what to do with it. */
export class Answer {
  constructor(model) {
    this.thinking = "";
    this.text = "";
    this.stale = false;
    this.state = make("p", { class: "state", hidden: "" });
    this.thought = make("div", { class: "words" });
    const fold = make("summary", {}, "Thinking");
    this.fold = make("details", { class: "thoughts", hidden: "" }, fold, this.thought);
    this.words = make("div", { class: "words" });
    this.figures = make("p", { class: "figures" });
    this.failure = make("p", { class: "failure", role: "alert", hidden: "" });
    this.actions = make("div", { class: "actions", hidden: "" });
    const name = make("h2", { class: "name" }, model);
    this.element = make("article", { class: "answer", "aria-label": `Answer of ${model}` }, name);
    this.element.append(this.state, this.fold, this.words, this.failure, this.figures, this.actions);
    this.prose = { thought: new Prose(this.thought), words: new Prose(this.words) };
  }

  /** Say what is being waited for, with the seconds since then; nothing ends that. */
  wait(words) {
    clearInterval(this.clock);
    this.state.hidden = !words;
    if (!words) return;
    const began = performance.now();
    const tell = () => {
      const seconds = Math.floor((performance.now() - began) / 1000);
      this.state.textContent = seconds < 2 ? `${words} …` : `${words} … ${seconds} s`;
    };
    tell();
    this.clock = setInterval(tell, 500);
  }

  /** Take words and thoughts, after so many characters at the end of both were taken back. */
  add({ text, thinking, retract, unthought }) {
    if (retract) this.text = without(this.text, retract);
    if (unthought) this.thinking = without(this.thinking, unthought);
    this.text += text;
    this.thinking += thinking;
    if (this.stale) return;
    this.stale = true; // drawn once for all that comes until the next frame
    requestAnimationFrame(() => this.draw());
  }

  /** Show all there is. */
  draw() {
    this.stale = false;
    this.fold.hidden = !this.thinking;
    if (this.thinking) this.prose.thought.show(this.thinking);
    this.prose.words.show(this.text);
    this.element.dispatchEvent(new Event("grown", { bubbles: true }));
  }

  /** Show a message as it was kept: its words, how it ended, its figures. */
  restore({ text, thinking = "", figures = [], failure = "" }) {
    Object.assign(this, { text, thinking });
    this.end(figures, failure);
  }

  /** The answer is over: tell its figures, and what went wrong. */
  end(figures, failure = "") {
    this.wait("");
    this.draw();
    this.figures.replaceChildren(...figures.map((one) => make("span", {}, one)));
    this.failure.hidden = !failure;
    this.failure.textContent = failure;
    const copy = make("button", { type: "button", class: "quiet" }, "Copy");
    copy.addEventListener("click", () => copy_text(this.text, copy));
    this.actions.replaceChildren(...(this.text ? [copy] : []));
    this.actions.hidden = !this.text;
  }

  /** Offer to ask again, and to take the question back. */
  offer(again, undo) {
    this.offered = [offer("Ask again", again), offer("Undo", undo)];
    this.actions.append(...this.offered);
    this.actions.hidden = false;
  }

  /** Withdraw the offers: the conversation goes on behind the answer. */
  withdraw() {
    for (const button of this.offered ?? []) button.remove();
  }
}

function offer(words, act) {
  const button = make("button", { type: "button", class: "quiet" }, words);
  button.addEventListener("click", act);
  return button;
}

function without(text, count) {
  return Array.from(text).slice(0, -count).join("");
}

const REASONS = {
  length: "cut at the longest length",
  abort: "ended by the operator",
  left: "stopped",
};

/** Return what is told of an answer that ended, as short sentences. */
export function figures_of({ reason, timings, usage, board, first_ms }) {
  const found = [];
  if (REASONS[reason]) found.push(REASONS[reason]);
  if (timings?.tokens_per_s) found.push(`${timings.tokens_per_s.toFixed(1)} tokens/s`);
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
    found.push(`${usage.completion_tokens} tokens`);
    found.push(`${cached} of ${usage.prompt_tokens} prompt tokens cached`);
  }
  if (first_ms) found.push(`first word after ${(first_ms / 1000).toFixed(1)} s`);
  if (timings?.queue_ms >= 100) found.push(`waited ${(timings.queue_ms / 1000).toFixed(1)} s`);
  if (timings?.continued) found.push("continued on another board");
  if (board) found.push(`board ${board}`);
  return found;
}
