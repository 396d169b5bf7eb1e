/** Figures and states as people read them. */

export const NONE = "–"; // an unknown figure

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenths = new Intl.NumberFormat("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

/** Return a count or a large figure without decimals. */
export function count(value) {
  return value === null || value === undefined ? NONE : whole.format(value);
}

/** Return a figure with one decimal, and from 100 without. */
export function rate(value) {
  if (value === null || value === undefined) return NONE;
  return value >= 99.95 ? whole.format(value) : tenths.format(value);
}

/** Return a figure with its unit, which unknown ones lack. */
export function measure(value, unit, form = count) {
  return value === null || value === undefined ? NONE : `${form(value)}\u00a0${unit}`;
}

export function percent(value) {
  return value === null || value === undefined ? NONE : `${whole.format(value)}%`;
}

/** Return megabytes, from a thousand as gigabytes. */
export function megabytes(value) {
  if (value === null || value === undefined) return NONE;
  return value < 1000 ? `${whole.format(value)}\u00a0MB` : `${tenths.format(value / 1000)}\u00a0GB`;
}

/** Return a length of time in its two largest units. */
export function span(seconds) {
  const s = Math.max(0, seconds);
  if (s < 60) return `${Math.floor(s)}\u00a0s`;
  if (s < 3600) return `${Math.floor(s / 60)}\u00a0min ${Math.floor(s % 60)}\u00a0s`;
  if (s < 86400) return `${Math.floor(s / 3600)}\u00a0h ${Math.floor((s % 3600) / 60)}\u00a0min`;
  return `${Math.floor(s / 86400)}\u00a0d ${Math.floor((s % 86400) / 3600)}\u00a0h`;
}

const clock = new Intl.DateTimeFormat(undefined, { timeStyle: "medium" });
const moment = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });

/** Return a time of today, or with its date an earlier one; `at_s` is in seconds since 1970. */
export function time(at_s) {
  const at = new Date(1000 * at_s);
  const today = at.toDateString() === new Date().toDateString();
  return (today ? clock : moment).format(at);
}

/** Return `3 boards`, or `1 board`. */
export function several(number, noun) {
  return `${whole.format(number)} ${noun}${number === 1 ? "" : "s"}`;
}

const STATES = {
  ready: ["Ready", "ok"],
  fetching: ["Fetching", "wait"],
  loading: ["Loading", "wait"],
  joining: ["Joining", "wait"],
  recovering: ["Recovering", "warn"],
  hung: ["Hung", "bad"],
  quarantined: ["Quarantined", "bad"],
  failed: ["Failed", "bad"],
  lost: ["Lost", "bad"],
  stopped: ["Stopped", "idle"],
  asleep: ["Asleep", "idle"],
};

/** What becomes of requests while a board is paused, by the mode of the pause. */
const HOLDS = {
  keep: "Its requests wait until the pause ends.",
  wait: "It ends what it has begun, and refuses new requests.",
  abort: "Its requests were ended, and new ones are refused.",
};

/**
 * Return a board's state as a word, its tone (`ok`, `wait`, `warn`, `bad` or `idle`, each with a
 * mark of its own shape), and the sentence that explains it, if there is one.
 */
export function standing(board) {
  const [word, tone] = STATES[board.state] ?? [board.state, "warn"];
  const told = board.reason ?? "";
  if (board.state !== "ready") return { word, tone, told: told || fetched(board.fetch) };
  if (board.circuit) {
    return { word: "Avoided", tone: "warn", told: told || board.circuit.reason };
  }
  if (board.drained) return { word: "Drained", tone: "idle", told: told || "It takes no new requests." };
  if (board.hold) return { word: "Paused", tone: "idle", told: told || HOLDS[board.hold] || `Paused (${board.hold}).` };
  if (board.rules?.length) return { word, tone: "warn", told };
  return { word, tone, told };
}

function fetched(fetch) {
  if (!fetch?.total_bytes) return "";
  const share = percent((100 * fetch.fetched_bytes) / fetch.total_bytes);
  return `${share} of ${megabytes(fetch.total_bytes / 1e6)} from ${fetch.source}, ${rate(fetch.bytes_per_s / 1e6)} MB/s.`;
}

/** Return the model with what is loaded in it: adapters with their versions, or else the weights. */
export function loaded(board) {
  if (board.adapters?.length) return board.adapters.join(", ");
  return board.weights;
}
