/** Marks of a state: each tone has a shape of its own, so that colour never tells alone. */

import { draw, mark } from "../elements.js";

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
