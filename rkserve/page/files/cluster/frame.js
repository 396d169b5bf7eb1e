/** What stands around the views: announcements, a lost stream, confirmations and settings. */

import { put, wear } from "../elements.js";
import * as store from "../store.js";
import { span } from "./words.js";

const at = (id) => document.getElementById(id);

/** Tell those who cannot see the page. */
export function say(words) {
  at("said").textContent = words;
}

// -- a lost stream -------------------------------------------------------------------------------

/** Show since when the figures are old, and when the next attempt comes. */
export class Staleness {
  constructor(retry) {
    at("retry").addEventListener("click", retry);
    setInterval(() => this.show(), 1000);
  }

  live() {
    this.since_ms = null;
    this.failure = null;
    this.show();
  }

  lost(failure, next_ms) {
    this.since_ms ??= Date.now();
    Object.assign(this, { failure, next_ms });
    this.show();
  }

  /** The server does not let this page read. */
  refused(failure) {
    this.lost(failure, null);
  }

  show() {
    const lost = Boolean(this.since_ms);
    at("stale").hidden = !lost;
    document.body.classList.toggle("stale", lost);
    if (!lost) return;
    const age = span((Date.now() - this.since_ms) / 1000);
    const why = this.failure?.message ?? "The connection has ended.";
    const next = this.next_ms ? Math.ceil((this.next_ms - Date.now()) / 1000) : 0;
    const then = next > 0 ? ` Next attempt in ${next} s.` : "";
    put(at("stale-words"), `Stale since ${age}. ${why}${then}`);
  }
}

// -- confirmations -------------------------------------------------------------------------------

let pending = null;

/**
 * Ask before something is done: `question`, its `consequence`, and the `verb` of the button. `act` is
 * awaited, and a refusal of the server is shown where it was asked; then `done` is announced. Without
 * a key that may act, one is asked for instead.
 */
export function confirm({ question, consequence, verb, act, done }) {
  if (!may_operate()) {
    const entered = store.admin_key() ? "; the entered one may only read" : "";
    ask_key(`“${verb}” needs a key with the scope operate${entered}.`);
    return;
  }
  pending = { act, done, verb };
  put(at("confirm-title"), question);
  put(at("confirm-words"), consequence);
  put(at("confirm-yes"), verb);
  at("confirm-yes").disabled = false;
  at("confirm-failure").hidden = true;
  at("confirm").showModal();
  at("confirm-no").focus(); // Enter must not be enough to stop a board
}

async function carry_out() {
  const asked = pending;
  at("confirm-yes").disabled = true;
  at("confirm-failure").hidden = true;
  put(at("confirm-yes"), "Working …");
  at("confirm-no").focus(); // a disabled button has none
  try {
    const answer = await asked.act();
    const words = typeof asked.done === "function" ? asked.done(answer) : asked.done;
    if (pending === asked) at("confirm").close();
    say(words);
  } catch (error) {
    if (pending !== asked) {
      say(error.message); // the dialog was closed meanwhile
      return;
    }
    at("confirm-failure").textContent = error.message;
    at("confirm-failure").hidden = false;
    at("confirm-yes").disabled = false;
    put(at("confirm-yes"), asked.verb);
  }
}

at("confirm-yes").addEventListener("click", () => void carry_out());
at("confirm-no").addEventListener("click", () => at("confirm").close());
at("confirm").addEventListener("close", () => {
  pending = null;
  // What was pressed may be gone by now, such as the button of a request that has ended.
  if (document.activeElement === document.body) at("view").focus();
});

// -- settings ------------------------------------------------------------------------------------

let may_operate = () => true;

/** Open the settings at the key; `failure` is why the server wants another one. */
export function ask_key(failure = "") {
  at("key").value = store.admin_key();
  at("theme").value = store.settings().theme;
  at("key-failure").textContent = failure;
  at("key-failure").hidden = !failure;
  if (!at("settings").open) at("settings").showModal();
  at("key").focus();
  at("key").select(); // what is typed replaces the key that was refused
}

/**
 * Let the settings be opened; `changed` is called where there is another key, and `operates` returns
 * whether the key in use may act.
 */
export function wire_settings({ changed, operates }) {
  may_operate = operates;
  at("settings-open").addEventListener("click", () => ask_key());
  at("theme").addEventListener("change", () => wear(at("theme").value));
  at("settings").addEventListener("close", () => {
    store.set({ theme: at("theme").value });
    const key = at("key").value.trim();
    if (key === store.admin_key()) return;
    store.set_admin_key(key);
    changed();
  });
  wear(store.settings().theme);
}
