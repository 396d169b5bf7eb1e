/** The view of the runbook: the section of a rule, as the documentation has it. */

import { call } from "../api.js";
import { Prose } from "../draw.js";
import { make } from "../elements.js";
import { heading } from "./tables.js";

const FILE = "page/cluster/runbook.md";

/** Return the part of a Markdown text below the heading with this anchor, or null. */
export function section_of(text, anchor) {
  const lines = text.split("\n");
  const heads = headings(lines);
  const first = heads.find(({ words }) => slug(words) === anchor);
  if (!first) return null;
  const next = heads.find(({ line, level }) => line > first.line && level <= first.level);
  return lines.slice(first.line, next?.line).join("\n");
}

function headings(lines) {
  let fenced = false; // in code, where a hash begins a remark
  return lines.flatMap((text, line) => {
    if (/^\s*```/.test(text)) fenced = !fenced;
    const found = fenced ? null : /^(#+) (.*)$/.exec(text);
    return found ? [{ line, level: found[1].length, words: found[2] }] : [];
  });
}

function slug(words) {
  return words.toLowerCase().replace(/[^\w\- ]/g, "").trim().replace(/ /g, "-");
}

export class Runbook {
  constructor() {
    this.title = "Runbook";
    this.heading = heading("Runbook");
    this.words = make("div", { class: "words" });
    this.element = make("div", {}, this.heading, this.words);
  }

  update() {} // it is a text

  async show(anchor) {
    this.words.replaceChildren();
    const prose = new Prose(this.words);
    try {
      const text = await (await call(FILE, "")).text();
      prose.show(anchor ? (section_of(text, anchor) ?? `The runbook has no section for \`${anchor}\`.\n\n${text}`) : text);
    } catch (error) {
      prose.show(`The runbook cannot be read: ${error.message}`);
    }
  }
}
