/** Drawings as inline SVG: the mark of a state, a sparkline, and a chart with its range and summary. */

import { draw, make, mark } from "../elements.js";
import { NONE, rate, span } from "./words.js";

const [WIDTH, HEIGHT] = [300, 80];

// Each tone has a shape of its own, so that colour never tells alone.
const SHAPES = {
  ok: "M10 4a6 6 0 1 0 .01 0z",
  wait: "M10 4a6 6 0 1 0 .01 0zM10 7v3.4l2.2 1.4",
  warn: "M10 3l8 14H2zM10 8.5v4M10 14.6v.1",
  bad: "M6.5 3h7L17 6.5v7L13.5 17h-7L3 13.5v-7zM7.5 7.5l5 5M12.5 7.5l-5 5",
  idle: "M6.5 4.5v11M13.5 4.5v11",
};

/** Return a mark as `{ element, set(tone) }`; the word for its tone stands beside it. */
export function tone_mark() {
  const path = draw("path", { d: "" });
  const element = draw("svg", { class: "mark", viewBox: "0 0 20 20", "aria-hidden": "true" }, path);
  const set = (tone) => {
    mark(element, "data-tone", tone);
    mark(path, "d", SHAPES[tone]);
  };
  return { element, set };
}

/** Return the `d` of a path through points; unknown ones (null) are gaps. */
export function path_of(points, width, height, [low, high], slots = points.length) {
  const range = high - low || 1;
  const step = width / Math.max(1, slots - 1);
  const first = slots - points.length; // the latest point is at the right edge
  let path = "";
  let open = false;
  points.forEach((value, at) => {
    if (value === null || value === undefined) {
      open = false;
      return;
    }
    const x = ((first + at) * step).toFixed(1);
    const y = (height - ((value - low) / range) * height).toFixed(1);
    path += `${open ? "L" : "M"}${x} ${y}`;
    if (!open) path += "h0.01"; // a point between two gaps can be seen, too
    open = true;
  });
  return path;
}

/** Return the `d` of the area between a path and the bottom. */
function area_below(path, height) {
  const runs = path.split("M").filter(Boolean);
  return runs
    .map((run) => {
      const first = run.split(" ")[0];
      const last = run.includes("L") ? run.slice(run.lastIndexOf("L") + 1).split(" ")[0] : first;
      return `M${run}L${last} ${height}L${first} ${height}Z`;
    })
    .join("");
}

/** A line of the last 30 minutes without axes, beside the figure that it is about. */
export class Spark {
  constructor(label) {
    this.label = label;
    this.path = draw("path", { d: "" });
    this.area = draw("path", { class: "area", d: "" });
    this.limit = draw("path", { class: "limit", d: "" });
    const view = { class: "spark", viewBox: "-1 -1 62 18", preserveAspectRatio: "none", role: "img" };
    this.element = draw("svg", { ...view, "aria-label": label }, this.area, this.limit, this.path);
  }

  /** Show up to 60 points, and below or above them the `limit` that is expected. */
  show(points, limit) {
    const known = points.filter((value) => value !== null);
    const high = Math.max(limit ?? 0, ...known, 0.001);
    const path = path_of(points, 60, 16, [0, high], 60);
    if (path === this.drawn) return;
    this.drawn = path;
    this.path.setAttribute("d", path);
    this.area.setAttribute("d", area_below(path, 16));
    const y = (16 - (16 * (limit ?? 0)) / high).toFixed(1);
    this.limit.setAttribute("d", limit ? `M0 ${y}H60` : "");
    const words = known.length
      ? `${rate(Math.min(...known))} to ${rate(Math.max(...known))} in 30 minutes`
      : "no figures yet";
    this.element.setAttribute("aria-label", `${this.label}: ${words}`);
  }
}

/**
 * A chart of one or two lines, told apart by strokes and by words. `lines` are `{ name, column }`;
 * `limit` draws what is expected. Its label is the summary for those who do not see it.
 */
export class Chart {
  constructor({ title, unit, lines, floor = 0, ceiling = null, form = rate }) {
    Object.assign(this, { title, unit, lines, floor, ceiling, form });
    this.paths = lines.map((_, at) => draw("path", { class: `line line-${at}`, d: "" }));
    this.limit = draw("path", { class: "limit", d: "" });
    const edges = draw("path", { class: "edges", d: `M0 0H${WIDTH}M0 ${HEIGHT / 2}H${WIDTH}M0 ${HEIGHT}H${WIDTH}` });
    const view = { viewBox: `0 -2 ${WIDTH} ${HEIGHT + 4}`, preserveAspectRatio: "none", role: "img" };
    this.drawing = draw("svg", view, edges, this.limit, ...this.paths);
    this.value = make("output", {});
    this.range = make("span", { class: "range", "aria-hidden": "true" });
    this.bottom = make("span", {});
    this.top = make("span", {});
    this.range.append(this.top, this.bottom);
    this.keys = make("p", { class: "keys" });
    if (lines.length > 1) {
      lines.forEach(({ name }, at) => this.keys.append(make("span", { class: `key key-${at}` }, name)));
    }
    const head = make("figcaption", {}, make("span", {}, title), this.value);
    const plot = make("div", { class: "plot" }, this.range, this.drawing);
    const axis = make("p", { class: "axis", "aria-hidden": "true" }, make("span", {}, "30 min ago"), make("span", {}, "now"));
    this.element = make("figure", { class: "chart" }, head, plot, axis, this.keys);
  }

  /** Show columns of points, every `every_s` seconds; `slots` points fill the width. */
  show(columns, slots, every_s, limit = null) {
    const series = this.lines.map(({ column }) => columns[column] ?? []);
    const known = series.flat().filter((value) => value !== null && value !== undefined);
    const highest = Math.max(limit ?? 0, ...known, 0);
    const high = this.ceiling ?? rounded_up(highest);
    series.forEach((points, at) => {
      this.paths[at].setAttribute("d", path_of(points, WIDTH, HEIGHT, [this.floor, high], slots));
    });
    const y = HEIGHT - ((limit ?? 0) / high) * HEIGHT;
    this.limit.setAttribute("d", limit ? `M0 ${y.toFixed(1)}H${WIDTH}` : "");
    this.top.textContent = rate_short(high);
    this.bottom.textContent = rate_short(this.floor);
    this.value.textContent = this.now_of(series);
    this.drawing.setAttribute("aria-label", this.summary(series, every_s, limit));
  }

  now_of(series) {
    const values = series.map((points) => points.at(-1));
    const known = values.map((value) => (value === null || value === undefined ? NONE : this.form(value)));
    return `${known.join(" / ")} ${this.unit}`.trim();
  }

  summary(series, every_s, limit) {
    const parts = series.map((points, at) => {
      const known = points.filter((value) => value !== null && value !== undefined);
      const name = this.lines[at].name;
      if (!known.length) return `${name}: no figures`;
      const mean = known.reduce((sum, value) => sum + value, 0) / known.length;
      const words = [Math.min(...known), Math.max(...known), mean, known.at(-1)].map(this.form);
      return `${name} between ${words[0]} and ${words[1]}, ${words[2]} on average, now ${words[3]} ${this.unit}`;
    });
    const wanted = limit ? `; expected ${rate(limit)}` : "";
    const length = span(every_s * Math.max(...series.map((points) => points.length)));
    return `${this.title}, last ${length}: ${parts.join("; ")}${wanted}.`;
  }
}

function rounded_up(value) {
  if (value <= 1) return 1;
  const unit = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10].map((step) => step * unit).find((step) => step >= value);
}

function rate_short(value) {
  return value >= 1000 ? `${value / 1000}k` : String(value);
}
