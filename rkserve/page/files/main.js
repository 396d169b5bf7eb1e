/** The chat page: what is asked, what is shown, and what is kept. */

import { answer, models } from "./api.js";
import { make } from "./elements.js";
import * as images from "./images.js";
import * as panels from "./panels.js";
import * as store from "./store.js";
import { Answer, figures_of, question } from "./talk.js";

const at = (id) => document.getElementById(id);
const [log, input, picker] = [at("log"), at("input"), at("model")];

let chat = store.new_chat();
let last = null; // the answer at the end, which may be asked for again
let running = null; // the answer that comes, with what hangs up on it
const forgotten = new Set(); // conversations that are not to be kept, though an answer still comes
let following = true; // the end of the conversation is kept in view

// -- the conversation ----------------------------------------------------------------------------

function show_chat(chosen) {
  hang_up();
  chat = chosen;
  last = null;
  log.replaceChildren();
  for (const message of chat.messages) {
    if (message.role === "user") {
      log.append(question(message, edit));
    } else {
      last = new Answer(message.model);
      log.append(last.element);
      last.restore(message);
    }
  }
  last?.offer(again, undo);
  greet();
  following = true;
  follow();
  list_chats();
  panels.close_side();
}

function greet() {
  if (chat.messages.length) return;
  const words = make("p", {}, "Whatever you ask, a board of this cluster answers.");
  log.append(make("div", { class: "greeting" }, make("h2", {}, "A new conversation"), words));
}

function list_chats() {
  panels.list_chats(store.chats(), chat, {
    open: show_chat,
    forget: (one) => {
      forgotten.add(one.id);
      store.forget(one);
      if (one.id === chat.id) show_chat(store.new_chat());
      else list_chats();
    },
  });
}

function follow() {
  if (following) log.scrollTop = log.scrollHeight;
}

// -- asking --------------------------------------------------------------------------------------

function ask(text, seen) {
  if (!chat.messages.length) {
    log.replaceChildren();
    chat.title = text.trim().replace(/\s+/g, " ").slice(0, 60) || "An image";
  }
  const message = { role: "user", text, ...(seen.length && { images: seen }) };
  chat.messages.push(message);
  log.append(question(message, edit));
  store.keep(chat);
  list_chats();
  void respond();
}

function body() {
  const { system, temperature, limit } = store.settings();
  const asked = { model: picker.value, messages: turns(sees()), prompt_cache_key: chat.id };
  if (system.trim()) asked.messages.unshift({ role: "system", content: system });
  if (temperature !== "") asked.temperature = Number(temperature);
  if (limit !== "") asked.max_tokens = Number(limit);
  return asked;
}

function sees() {
  return Boolean(picker.selectedOptions[0]?.dataset.sees);
}

/**
 * The conversation as models want it: answers that never came leave no gap between two turns, and a
 * model that sees nothing is shown nothing.
 */
function turns(seeing) {
  const found = [];
  for (const { role, text, images: uris = [] } of chat.messages) {
    const seen = seeing ? uris.map((url) => ({ type: "image_url", image_url: { url } })) : [];
    if (!text && !seen.length) continue;
    let turn = found.at(-1);
    if (turn?.role !== role) found.push((turn = { role, words: "", seen: [] }));
    turn.words += turn.words && text ? `\n\n${text}` : text;
    turn.seen.push(...seen);
  }
  return found.map(({ role, words, seen }) => {
    const text = words ? [{ type: "text", text: words }] : [];
    return { role, content: seen.length ? [...seen, ...text] : words };
  });
}

/** Ask for the answer to the conversation as it is, and show it while it comes. */
async function respond() {
  const shown = new Answer(picker.value);
  const call = { hung_up: false, abort: new AbortController(), chat, model: picker.value };
  running = call;
  last?.withdraw();
  last = shown;
  log.append(shown.element);
  following = true;
  follow();
  panels.set_busy(true);
  log.dataset.busy = "yes";
  const told = { reason: null, timings: null, usage: null, board: "", first_ms: 0 };
  let failure = null;
  try {
    await read(shown, told, call.abort.signal);
  } catch (error) {
    failure = error;
  }
  settle(shown, told, call, failure);
}

async function read(shown, told, signal) {
  const began = performance.now();
  shown.wait("Waiting for a board");
  panels.say("Waiting for a board.");
  for await (const event of answer(body(), store.key(), signal)) {
    if (event.kind === "taken") {
      told.board = event.board;
      const { ahead } = event;
      shown.wait(ahead ? `Queued: ${ahead} before you on ${event.board}` : "Reading the prompt");
    } else if (event.kind === "paused") {
      shown.wait("Paused by the operator");
    } else if (event.kind === "end") {
      const { reason, timings, usage } = event;
      Object.assign(told, { reason, timings, usage });
    } else if (event.kind === "delta") {
      if (event.text || event.thinking || event.retract || event.unthought) {
        told.first_ms ||= performance.now() - began;
        shown.wait(event.text ? "" : "Thinking");
        shown.add(event);
      } else if (!told.board) {
        shown.wait("Reading the prompt"); // it waited so long that its headers came before a board
      }
    }
  }
}

/** An answer is over, in whichever way: show and keep what became of it. */
function settle(shown, told, call, failure) {
  if (call.hung_up) told.reason = "left";
  const words = failure && !call.hung_up ? sentence(failure) : "";
  const figures = figures_of(told);
  shown.end(figures, words);
  const { text, thinking } = shown;
  const { model } = call;
  call.chat.messages.push({ role: "assistant", model, text, thinking, figures, failure: words });
  if (!forgotten.has(call.chat.id)) store.keep(call.chat);
  running = null;
  panels.set_busy(false);
  delete log.dataset.busy;
  list_chats();
  if (call.chat !== chat) return; // another conversation is open by now
  panels.say(words || (call.hung_up ? "Stopped." : "The answer is complete."));
  if (failure?.status === 401) panels.ask_key();
  shown.offer(again, undo);
  follow();
}

function again() {
  if (running) return;
  chat.messages.pop();
  last.element.remove();
  last = null;
  input.focus(); // the button is gone
  void respond();
}

/** Ask an earlier question in other words; the messages behind it are dropped. */
function edit(message, text) {
  const seen = message.images ?? [];
  if (running) panels.say("An answer is still coming: stop it first.");
  if (running || (!text.trim() && !seen.length)) return;
  cut(message);
  ask(text, seen);
  input.focus(); // the form is gone
}

/** Take the last question back into the composer, and drop its answer. */
function undo() {
  if (running) return;
  const message = chat.messages.filter((one) => one.role === "user").at(-1);
  if (!message) return;
  cut(message);
  if (chat.messages.length) store.keep(chat);
  else store.forget(chat);
  list_chats();
  input.value = [message.text, input.value].filter(Boolean).join("\n");
  images.put(message.images ?? []);
  panels.fit(input);
  input.focus();
  panels.say("Your last message is back in the field.");
}

/** Drop a message and all behind it. */
function cut(message) {
  chat.messages.length = chat.messages.indexOf(message);
  show_chat(chat);
}

function sentence(error) {
  if (error.status === 401) return "The server asks for an API key: enter it in the settings.";
  if (error.retry_after_s) return `${error.message} (Worth another try in ${error.retry_after_s} s.)`;
  return error.message;
}

/** Leave an answer that comes: its board becomes free. */
function hang_up() {
  if (!running) return;
  const call = running;
  call.hung_up = true;
  call.abort.abort();
}

// -- models --------------------------------------------------------------------------------------

async function find_models() {
  try {
    panels.list_models(await models(store.key()), store.settings().model);
    images.allow(sees());
    panels.notice("");
  } catch (error) {
    panels.notice(sentence(error));
    if (error.status === 401) panels.ask_key();
    else setTimeout(() => void find_models(), 5000);
  }
}

// -- wiring --------------------------------------------------------------------------------------

function send() {
  const text = input.value;
  if (running || picker.disabled) return;
  const seen = sees() ? images.take() : [];
  if (!text.trim() && !seen.length) return;
  input.value = "";
  panels.fit(input);
  ask(text, seen);
}

at("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
input.addEventListener("keydown", (event) => {
  // While an input method composes, Enter is its own.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  send();
});
input.addEventListener("input", () => panels.fit(input));
at("stop").addEventListener("click", () => {
  hang_up();
  input.focus();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || at("settings").open) return;
  if (!panels.close_side()) hang_up();
});
at("new").addEventListener("click", () => {
  show_chat(store.new_chat());
  input.focus();
});
picker.addEventListener("change", () => {
  store.set({ model: picker.value });
  images.allow(sees());
});
log.addEventListener("scroll", () => {
  following = log.scrollHeight - log.scrollTop - log.clientHeight < 48;
});
log.addEventListener("grown", follow);
new ResizeObserver(follow).observe(log);
window.addEventListener("pagehide", hang_up);

panels.open_settings_with(find_models);
images.wire(panels.say);
show_chat(store.chats()[0] ?? chat);
void find_models();
input.focus();
