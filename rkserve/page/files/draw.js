/**
 * Markdown's tree as elements of the page. Text only ever becomes text: there is no way from an
 * answer to markup, and nothing of it makes the browser fetch something.
 */

import { copy_text, make } from "./elements.js";
import { parse } from "./markdown.js";

/** Shows a text that grows. Blocks that stay as they were keep their elements. */
export class Prose {
  constructor(element) {
    this.element = element;
    this.raws = [];
  }

  show(text) {
    const blocks = parse(text);
    let same = 0;
    while (same < blocks.length && this.raws[same] === blocks[same].raw) same += 1;
    while (this.element.children.length > same) this.element.lastElementChild.remove();
    this.element.append(...blocks.slice(same).map(block));
    this.raws = blocks.map((one) => one.raw);
  }
}

const BLOCKS = {
  paragraph: (node) => make("p", {}, ...inner(node)),
  // Answers begin with any level; among the headings of the page all of theirs are of one.
  heading: (node) => make("h3", { class: `level-${node.level}` }, ...inner(node)),
  rule: () => make("hr"),
  quote: (node) => make("blockquote", {}, ...node.blocks.map(block)),
  code,
  list,
  table,
};

function block(node) {
  return BLOCKS[node.kind](node);
}

function code(node) {
  const copy = make("button", { type: "button", class: "quiet copy" }, "Copy");
  copy.addEventListener("click", () => copy_text(node.text, copy));
  const words = make("code", {}, node.text);
  const head = make("div", { class: "code-head" }, make("span", {}, node.language || "code"), copy);
  const label = `Code${node.language ? `, ${node.language}` : ""}`;
  const text = make("pre", { tabindex: "0", role: "group", "aria-label": label }, words);
  return make("div", { class: "code" }, head, text);
}

function list(node) {
  const items = node.items.map((blocks) => {
    const [first, ...rest] = blocks;
    const head = first?.kind === "paragraph" ? inner(first) : first ? [block(first)] : [];
    return make("li", {}, ...head, ...rest.map(block));
  });
  const start = node.ordered && node.start !== 1 ? node.start : undefined;
  return make(node.ordered ? "ol" : "ul", { start }, ...items);
}

const SIDES = [undefined, "left", "right", "center"];

function table(node) {
  const row = (tag, cells) =>
    make("tr", {}, ...cells.map((pieces, at) => {
      const side = SIDES[node.sides[at]];
      const scope = tag === "th" ? "col" : undefined;
      return make(tag, { scope, class: side && `to-${side}` }, ...pieces.map(piece));
    }));
  const head = make("thead", {}, row("th", node.head));
  const body = make("tbody", {}, ...node.rows.map((cells) => row("td", cells)));
  const attributes = { class: "table", tabindex: "0", role: "region", "aria-label": "Table" };
  return make("div", attributes, make("table", {}, head, body));
}

function inner(node) {
  return node.inner.map(piece);
}

const PIECES = {
  text: (node) => node.text,
  break: () => make("br"),
  codespan: (node) => make("code", {}, node.text),
  span: (node) => make("span", {}, ...inner(node)),
  em: (node) => make("em", {}, ...inner(node)),
  strong: (node) => make("strong", {}, ...inner(node)),
  strike: (node) => make("s", {}, ...inner(node)),
  link: (node) =>
    make("a", { href: node.target, target: "_blank", rel: "noopener noreferrer" }, ...inner(node)),
};

function piece(node) {
  return PIECES[node.kind](node);
}
