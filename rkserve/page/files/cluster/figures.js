/** The figures of a board: each with its name, its text, and the rules that find it wanting. */

import { count, loaded, measure, megabytes, NONE, percent, rate } from "./words.js";

function share_of(value, whole) {
  return value === null || !whole ? null : (100 * value) / whole;
}

function pair(value, whole, form = count) {
  return whole === undefined ? form(value) : `${form(value)}/${form(whole)}`;
}

/**
 * All figures, in their order. `short` heads a column, `card` is the name on a card where the label is
 * too long; `text` is for a column under that head, and
 * `long` for a card, with units. `of` is `(board's entry, figure by column)`.
 */
export const FIGURES = [
  {
    name: "speed",
    label: "Tokens per second",
    short: "tok/s",
    rules: ["BoardSlowerThanItsKind"],
    text: (board, now) => rate(now("decode_tokens_per_s")),
  },
  {
    name: "share",
    label: "Of the expected speed",
    short: "of exp.",
    rules: ["BoardSlowerThanItsKind"],
    text: (board, now) => percent(share_of(now("speed_tokens_per_s"), board.expected_tokens_per_s)),
  },
  {
    name: "load",
    label: "Running / queued",
    short: "run/q",
    rules: ["QueueWaitP95"],
    text: (board, now) => `${count(now("running"))}/${count(now("queued"))}`,
    long: (board, now) => `${count(now("running"))} / ${count(now("queued"))}`,
  },
  {
    name: "kv",
    label: "KV cache filled",
    short: "KV",
    text: (board, now) => percent(now("kv_percent")),
  },
  {
    name: "cached",
    label: "Prompt tokens cached",
    card: "Prompts cached",
    short: "cached",
    rules: ["PrefixExpectedNotFound"],
    text: (board, now) => percent(now("cached_percent")),
  },
  {
    name: "npu",
    label: "NPU load",
    short: "NPU",
    rules: ["NpuClockBelowMaxUnderLoad"],
    text: (board, now) => percent(now("npu_percent")),
    long: (board, now) =>
      `${percent(now("npu_percent"))}${board.npu_cores ? ` · ${board.npu_cores} cores` : ""}`,
  },
  {
    name: "temperature",
    label: "Temperature",
    short: "°C",
    rules: ["Hot"],
    text: (board, now) => count(now("temperature_c")),
    long: (board, now) => measure(now("temperature_c"), "°C"),
  },
  {
    name: "ddr",
    label: "DDR clock, MHz",
    card: "DDR MHz",
    short: "DDR MHz",
    rules: ["DdrBelowMax"],
    text: (board, now) => pair(now("ddr_mhz"), board.ddr_max_mhz, plain),
  },
  {
    name: "memory",
    label: "Memory used",
    short: "mem",
    rules: ["MemoryLow"],
    text: (board, now) => percent(share_of(now("memory_mb"), board.memory_total_mb)),
    long: (board, now) => {
      const used = now("memory_mb");
      if (used === null) return NONE;
      return board.memory_total_mb
        ? `${(used / 1000).toFixed(1)}/${megabytes(board.memory_total_mb)}`
        : megabytes(used);
    },
  },
];

/** Clocks without a separator of thousands: their columns are narrow. */
function plain(value) {
  return value === null || value === undefined ? NONE : String(Math.round(value));
}

/** Facts that boards of a model usually share; where one differs, its row has it. */
export const FACTS = [
  { name: "soc", text: (board) => board.soc ?? "" },
  { name: "runtime", text: (board) => (board.runtime ? `runtime ${board.runtime}` : "") },
  { name: "driver", text: (board) => (board.driver ? `driver ${board.driver}` : "") },
];

/** Return what a board has loaded, and the facts in which it differs from `usual`. */
export function particulars(board, usual = {}) {
  const other = FACTS.map(({ name, text }) => (board[name] === usual[name] ? "" : text(board)));
  return [loaded(board), ...other].filter(Boolean).join(" · ");
}

/** Return the value of each fact that most of these boards share. */
export function usual_facts(boards) {
  return Object.fromEntries(FACTS.map(({ name }) => [name, commonest(boards, name)]));
}

function commonest(boards, name) {
  const counts = new Map();
  for (const board of boards) counts.set(board[name], (counts.get(board[name]) ?? 0) + 1);
  return [...counts].sort((a, b) => b[1] - a[1])[0]?.[0];
}

/** Return the text of a figure in a column, or on a card. */
export function figure_text(figure, entry, now, long = false) {
  return (long && figure.long ? figure.long : figure.text)(entry, now);
}

/** Return whether a rule that fires for the board is about this figure. */
export function is_wanting(figure, board) {
  return Boolean(board.rules?.some((rule) => figure.rules?.includes(rule)));
}
