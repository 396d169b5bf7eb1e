/** What stands around the conversation: the list of others, models, settings and notices. */

import { icon, make, wear } from "./elements.js";
import * as store from "./store.js";

const at = (id) => document.getElementById(id);
const side = at("side");
const shade = at("shade");
const dialog = at("settings");
const FIELDS = ["system", "temperature", "limit", "theme"];
const TALLEST = 200; // of the message, in pixels; a longer one scrolls

/** Let a text area be as high as its text. */
export function fit(area) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight, TALLEST)}px`;
}

/** Tell those who cannot see the page. */
export function say(words) {
  at("said").textContent = words;
}

/** Tell what keeps the page from working; nothing takes it away. */
export function notice(words) {
  at("notice").hidden = !words;
  at("notice").textContent = words;
}

/** An answer comes, or none does: what can be done changes. */
export function set_busy(busy) {
  const [send, stop] = [at("send"), at("stop")];
  const focused = [send, stop].includes(document.activeElement);
  send.hidden = busy;
  stop.hidden = !busy;
  if (focused) (busy ? stop : at("input")).focus();
}

// -- models --------------------------------------------------------------------------------------

/** List models, each with its adapters behind it; `usual` is what was chosen last. */
export function list_models(found, usual) {
  const picker = at("model");
  const options = found.map((one) => {
    const state = one.broken ? "broken" : one.state === "ready" ? "" : one.state;
    const name = one.parent ? `– ${one.id.slice(one.parent.length + 1)}` : one.id;
    const option = make("option", { value: one.id }, state ? `${name} (${state})` : name);
    option.disabled = Boolean(one.broken);
    option.dataset.sees = one.sees ? "yes" : "";
    return option;
  });
  picker.replaceChildren(...options);
  picker.disabled = !found.length;
  if (!found.length) picker.append(make("option", {}, "No models"));
  if (found.some((one) => one.id === usual && !one.broken)) picker.value = usual;
}

// -- conversations -------------------------------------------------------------------------------

/** List the conversations; `actions` open and forget one. */
export function list_chats(chats, current, actions) {
  const items = chats.map((one) => {
    const open = make("button", { type: "button", class: "open" }, one.title);
    if (one.id === current.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => actions.open(one));
    const label = `Delete “${one.title}”`;
    const forget = make("button", { type: "button", class: "quiet forget", "aria-label": label });
    forget.append(cross());
    forget.addEventListener("click", () => {
      actions.forget(one);
      at("new").focus();
    });
    return make("li", {}, open, forget);
  });
  at("chats").replaceChildren(...items);
}

/** Return the drawing of a cross. */
export function cross() {
  return icon("M6 6l8 8M14 6l-8 8");
}

/** Close the list where it covers the page; return whether it did. */
export function close_side() {
  const open = side.classList.contains("shown");
  show_side(false);
  return open;
}

function show_side(shown) {
  side.classList.toggle("shown", shown);
  shade.hidden = !shown;
  at("side-open").setAttribute("aria-expanded", String(shown));
  at("room").inert = shown;
}

at("side-open").addEventListener("click", () => {
  show_side(true);
  at("side-close").focus();
});
at("side-close").addEventListener("click", () => {
  show_side(false);
  at("side-open").focus();
});
shade.addEventListener("click", () => show_side(false));
matchMedia("(min-width: 48rem)").addEventListener("change", () => show_side(false));

// -- settings ------------------------------------------------------------------------------------

function open_settings(focused) {
  const known = store.settings();
  for (const name of FIELDS) at(name).value = known[name];
  at("key").value = store.key();
  if (!dialog.open) dialog.showModal();
  at(focused).focus();
}

/** Open the settings at the key, which the server asks for. */
export function ask_key() {
  open_settings("key");
}

/** Let the settings be opened; `changed` is called where there is another key. */
export function open_settings_with(changed) {
  at("settings-open").addEventListener("click", () => open_settings("system"));
  dialog.addEventListener("close", () => {
    const valid = FIELDS.filter((name) => at(name).checkValidity());
    store.set(Object.fromEntries(valid.map((name) => [name, at(name).value])));
    const key = at("key").value.trim();
    const another = key !== store.key();
    store.set_key(key);
    if (another) changed();
  });
  at("theme").addEventListener("change", () => wear(at("theme").value));
}

wear(store.settings().theme);
