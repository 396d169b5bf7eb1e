/**
 * The cluster's view as the server describes it: a document that events replace (`snapshot`) or
 * change (`delta`, a JSON Merge Patch), and the histories that its figures make.
 */

const KEPT_S = 1800;
const USUAL = ["decode_tokens_per_s"]; // where the first board is still to come

/** Return a document with a JSON Merge Patch (RFC 7396) applied; objects are changed in place. */
export function merged(target, patch) {
  if (!is_object(patch)) return patch;
  const result = is_object(target) ? target : {};
  for (const [key, value] of Object.entries(patch)) {
    if (value === null) delete result[key];
    else result[key] = merged(result[key], value);
  }
  return result;
}

function is_object(value) {
  return value !== null && typeof value === "object" && !Array.isArray(value);
}

/** What events have changed since it was last asked for. */
export class Change {
  constructor() {
    this.all = false; // a snapshot: everything may be another
    this.keys = new Set(); // of the document
    this.boards = new Set(); // by name, those whose facts or figures are others
    this.ticked = false;
  }

  has(...keys) {
    return this.all || keys.some((key) => this.keys.has(key));
  }
}

/** The document, its histories, and the changes that are still to be shown. */
export class ClusterDocument {
  constructor() {
    this.view = null;
    this.change = new Change();
  }

  snapshot({ view, history }) {
    this.view = view;
    this.history = new History(history, view);
    this.offset_s = view.at_s - Date.now() / 1000;
    this.place();
    this.change.all = true;
  }

  delta(patch) {
    const { view, change } = this;
    for (const key of Object.keys(patch)) change.keys.add(key);
    for (const name of Object.keys(patch.boards ?? {})) change.boards.add(name);
    this.mark(patch.now ?? {});
    merged(view, patch);
    if (patch.order) this.place();
    if (patch.at_s) this.offset_s = patch.at_s - Date.now() / 1000;
    if ("tick" in patch) {
      this.history.append(view);
      change.ticked = true;
    }
  }

  /** Mark the boards whose figures are others than before. */
  mark(columns) {
    const { now, order } = this.view;
    for (const [name, values] of Object.entries(columns)) {
      for (let at = 0; at < order.length; at += 1) {
        if (now[name]?.[at] !== values?.[at]) this.change.boards.add(order[at]);
      }
    }
  }

  place() {
    this.places = new Map(this.view.order.map((name, at) => [name, at]));
  }

  /** Return what changed since the last call. */
  take() {
    const { change } = this;
    this.change = new Change();
    return change;
  }

  /** Return a figure of a board as it is now, or null where it is unknown. */
  figure(board, column) {
    return this.view.now[column]?.[this.places.get(board)] ?? null;
  }

  /** Return the sum of a figure over all boards. */
  total(column) {
    return (this.view.now[column] ?? []).reduce((sum, value) => sum + (value ?? 0), 0);
  }

  /** Return the server's time in seconds since 1970. */
  now_s() {
    return Date.now() / 1000 + this.offset_s;
  }
}

/** Points of all boards, each the mean of some samples; the last one is of those so far. */
class History {
  constructor({ every_s, columns }, view) {
    this.points = columns;
    this.samples = Math.max(1, Math.round(every_s / view.every_s)); // of a point
    this.taken = 0; // samples in the last point, 0 where the next sample begins another
    this.sums = {};
    const [any] = Object.values(columns);
    this.columns = any ? Object.keys(any) : USUAL;
    this.length = Math.round(KEPT_S / every_s);
  }

  append({ order, now }) {
    order.forEach((board, at) => {
      const kept = (this.points[board] ??= {});
      for (const column of this.columns) {
        this.add((kept[column] ??= []), `${board} ${column}`, now[column]?.[at] ?? null);
      }
    });
    this.taken = (this.taken + 1) % this.samples;
    if (this.taken === 0) this.sums = {};
  }

  add(points, name, value) {
    if (this.taken === 0) {
      points.push(null);
      if (points.length > this.length) points.shift();
      this.sums[name] = [0, 0];
    }
    if (value === null) return;
    const sum = (this.sums[name] ??= [0, 0]);
    sum[0] += value;
    sum[1] += 1;
    points[points.length - 1] = sum[0] / sum[1];
  }

  /** Return the points of a board's column, the latest last. */
  of(board, column) {
    return this.points[board]?.[column] ?? [];
  }
}
