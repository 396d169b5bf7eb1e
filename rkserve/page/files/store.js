/**
 * What this browser keeps: conversations and settings, and the key for as long as the tab is open.
 * Each conversation has a place of its own, so that two tabs do not overwrite each other's.
 */

const PREFIX = `rkserve ${new URL(".", document.baseURI).pathname}`; // one for each application
const CHAT = `${PREFIX} chat `;
const SETTINGS = `${PREFIX} settings`;
const KEY = `${PREFIX} key`;
const ADMIN_KEY = `${PREFIX} admin key`;
const DEFAULTS = { theme: "auto", system: "", temperature: "", limit: "", model: "" };

function read(storage, name) {
  try {
    return JSON.parse(storage.getItem(name));
  } catch {
    return null; // of another release, or the browser keeps nothing
  }
}

function write(storage, name, value) {
  try {
    storage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false; // full, or the browser keeps nothing
  }
}

/** Return all conversations, the latest first. */
export function chats() {
  const names = Object.keys(localStorage).filter((name) => name.startsWith(CHAT));
  const found = names.map((name) => read(localStorage, name)).filter((chat) => chat?.messages);
  return found.sort((a, b) => b.at - a.at);
}

/** Return a conversation without messages, which is kept once it has some. */
export function new_chat() {
  // randomUUID is only there with TLS.
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  const id = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return { id, at: Date.now(), title: "New chat", messages: [] };
}

/**
 * Keep a conversation. Where there is no room, others lose their images first, the oldest one before
 * the others, then its own are not kept, and then the oldest others go.
 */
export function keep(chat) {
  chat.at = Date.now();
  const kept = (one) => write(localStorage, CHAT + one.id, one);
  const others = chats().filter((one) => one.id !== chat.id);
  const seeing = others.filter((one) => one.messages.some((message) => message.images));
  while (!kept(chat)) {
    const oldest = seeing.pop();
    if (oldest) kept(blind(oldest));
    else if (kept(blind(chat)) || !others.length) return;
    else localStorage.removeItem(CHAT + others.pop().id);
  }
}

/** A conversation without its images, which remembers how many there were. */
function blind(chat) {
  const messages = chat.messages.map(({ images, ...rest }) =>
    images ? { ...rest, lost: (rest.lost ?? 0) + images.length } : rest,
  );
  return { ...chat, messages };
}

/** Forget a conversation. */
export function forget(chat) {
  localStorage.removeItem(CHAT + chat.id);
}

/** Return the settings. */
export function settings() {
  return { ...DEFAULTS, ...read(localStorage, SETTINGS) };
}

/** Change some settings. */
export function set(changes) {
  write(localStorage, SETTINGS, { ...settings(), ...changes });
}

/** Return the API key, empty without one. */
export function key() {
  return read(sessionStorage, KEY) ?? "";
}

/** Keep the API key until the tab is closed. */
export function set_key(value) {
  write(sessionStorage, KEY, value);
}

/** Return the admin key, or without one the API key; empty without either. */
export function admin_key() {
  return read(sessionStorage, ADMIN_KEY) || key();
}

/** Keep the admin key until the tab is closed. */
export function set_admin_key(value) {
  write(sessionStorage, ADMIN_KEY, value);
}
