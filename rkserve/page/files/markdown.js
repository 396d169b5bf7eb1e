/**
 * The common subset of Markdown as a tree of plain objects. It knows no DOM, and never makes HTML of
 * a text: what it does not understand stays text. Whatever comes takes time in proportion to its
 * length: nesting and look-ahead are limited.
 */

const DEEPEST = 8; // quotes and lists inside each other
const OPEN_MARKS = 40; // emphasis inside emphasis
const LINK_CHARS = 2000;

const FENCE = /^ {0,3}(`{3,}(?!.*`)|~{3,})[ \t]*(\S*)/;
const ITEM = /^( {0,9})([-*+]|\d{1,9}[.)])( +|$)/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const RULE = /^ {0,3}(?:-[ \t]*){3,}$|^ {0,3}(?:\*[ \t]*){3,}$|^ {0,3}(?:_[ \t]*){3,}$/;
const QUOTE = /^ {0,3}> ?/;
const CELL = /^:?-+:?$/;

/**
 * Return the blocks of a text, in order. A block has the `raw` lines that it was made of: one with
 * equal lines is an equal block.
 */
export function parse(text) {
  return blocks(text.replace(/\r\n?/g, "\n").replace(/\t/g, "    ").split("\n"), 0);
}

function blocks(lines, depth) {
  const found = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const [block, next] = block_at(lines, at, depth);
    block.raw = lines.slice(at, next).join("\n");
    found.push(block);
    at = next;
  }
  return found;
}

function block_at(lines, at, depth) {
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return code_at(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return [heading_of(line, heading[1].length), at + 1];
  if (RULE.test(line)) return [{ kind: "rule" }, at + 1];
  if (depth < DEEPEST) {
    if (QUOTE.test(line)) return quote_at(lines, at, depth);
    if (ITEM.test(line)) return list_at(lines, at, depth);
  }
  if (is_table(lines, at)) return table_at(lines, at);
  return paragraph_at(lines, at, depth);
}

function code_at(lines, at, fence) {
  const mark = fence[1];
  const inner = [];
  let next = at + 1;
  for (; next < lines.length; next += 1) {
    const line = lines[next].trim();
    if (line.length >= mark.length && line === mark[0].repeat(line.length)) {
      return [{ kind: "code", language: fence[2], text: inner.join("\n") }, next + 1];
    }
    inner.push(lines[next]);
  }
  return [{ kind: "code", language: fence[2], text: inner.join("\n") }, next]; // still growing
}

function heading_of(line, level) {
  let text = line.trim().slice(level).trim();
  const end = text.replace(/#+$/, "");
  if (end !== text && (end === "" || end.endsWith(" "))) text = end.trim();
  return { kind: "heading", level, inner: inline(text) };
}

function quote_at(lines, at, depth) {
  const inner = [];
  let next = at;
  while (next < lines.length && QUOTE.test(lines[next])) {
    inner.push(lines[next].replace(QUOTE, ""));
    next += 1;
  }
  return [{ kind: "quote", blocks: blocks(inner, depth + 1) }, next];
}

function list_at(lines, at, depth) {
  const first = ITEM.exec(lines[at]);
  const ordered = /\d/.test(first[2]);
  const list = { kind: "list", ordered, start: ordered ? Number.parseInt(first[2], 10) : 1 };
  list.items = [];
  let next = at;
  while (next < lines.length) {
    const item = ITEM.exec(lines[next]);
    const another = item && /\d/.test(item[2]) === ordered && item[1].length <= first[1].length + 1;
    if (!another || RULE.test(lines[next])) break;
    const [inner, after] = item_at(lines, next, item);
    list.items.push(blocks(inner, depth + 1));
    next = after;
  }
  return [list, next];
}

function item_at(lines, at, item) {
  const width = item[1].length + item[2].length + Math.max(1, Math.min(item[3].length, 4));
  const inner = [lines[at].slice(Math.min(width, item[0].length))];
  let next = at + 1;
  while (next < lines.length) {
    const line = lines[next];
    const indent = line.length - line.trimStart().length;
    if (!line.trim()) {
      // A blank line is the item's if what follows is.
      const after = next_words(lines, next);
      if (after === lines.length || indent_of(lines[after]) <= item[1].length + 1) {
        return [inner, after < lines.length && ITEM.test(lines[after]) ? after : next];
      }
      inner.push("");
    } else if (indent > item[1].length + 1) {
      inner.push(line.slice(Math.min(indent, width)));
    } else if (ITEM.test(line) || interrupts(line) || !inner.at(-1).trim()) {
      break;
    } else {
      inner.push(line.trim()); // a paragraph that goes on without its indent
    }
    next += 1;
  }
  return [inner, next];
}

function next_words(lines, at) {
  let next = at;
  while (next < lines.length && !lines[next].trim()) next += 1;
  return next;
}

/** Whether a line in a paragraph begins a list: a year at its beginning does not. */
function begins_list(line) {
  const item = ITEM.exec(line);
  return item !== null && item[0].length < line.length && !/^(?!1[.)])\d/.test(item[2]);
}

function indent_of(line) {
  return line.length - line.trimStart().length;
}

function interrupts(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line);
}

function cells(line) {
  const found = [];
  let cell = "";
  const text = line.trim();
  for (let at = 0; at < text.length; at += 1) {
    if (text[at] === "\\" && text[at + 1] === "|") {
      cell += "|";
      at += 1;
    } else if (text[at] === "|") {
      if (at > 0) found.push(cell.trim());
      cell = "";
    } else {
      cell += text[at];
    }
  }
  if (cell.trim() || !text.endsWith("|")) found.push(cell.trim());
  return found;
}

function is_table(lines, at) {
  if (!lines[at].includes("|") || !(lines[at + 1] ?? "").includes("-")) return false;
  const under = cells(lines[at + 1]);
  return under.length === cells(lines[at]).length && under.every((cell) => CELL.test(cell));
}

function table_at(lines, at) {
  const sides = cells(lines[at + 1]).map(
    (cell) => (cell.startsWith(":") ? 1 : 0) + (cell.endsWith(":") ? 2 : 0),
  );
  const table = { kind: "table", sides, head: cells(lines[at]).map(inline), rows: [] };
  let next = at + 2;
  while (next < lines.length && lines[next].trim() && lines[next].includes("|")) {
    const row = cells(lines[next]).slice(0, sides.length);
    while (row.length < sides.length) row.push("");
    table.rows.push(row.map(inline));
    next += 1;
  }
  return [table, next];
}

function paragraph_at(lines, at, depth) {
  let next = at + 1;
  while (next < lines.length && lines[next].trim() && !interrupts(lines[next])) {
    if (is_table(lines, next) || (depth < DEEPEST && begins_list(lines[next]))) break;
    next += 1;
  }
  const text = lines.slice(at, next).map((line) => line.trimStart()).join("\n");
  return [{ kind: "paragraph", inner: inline(text.trimEnd()) }, next];
}

// -- inside of blocks ----------------------------------------------------------------------------

/** Return the pieces of a text: words, code, links, breaks and emphasis. */
export function inline(text) {
  return pieces_of(text, false);
}

function pieces_of(text, linked) {
  const pieces = [];
  const marks = new Map(); // open marks by their character: where they are in `pieces`
  let at = 0;
  while (at < text.length) {
    at = piece_at(text, at, pieces, marks, linked);
  }
  return joined(pieces);
}

function piece_at(text, at, pieces, marks, linked) {
  const sign = text[at];
  if (sign === "\\" && /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "")) {
    pieces.push({ kind: "text", text: text[at + 1] });
    return at + 2;
  }
  if (sign === "`") return code_span(text, at, pieces);
  if (sign === "\n") {
    pieces.push({ kind: "break" });
    return at + 1;
  }
  if (!linked) {
    if (sign === "[" || (sign === "!" && text[at + 1] === "[")) return link_at(text, at, pieces);
    if (sign === "h" || sign === "<") return address_at(text, at, pieces);
  }
  if (sign === "*" || sign === "_" || sign === "~") return mark_at(text, at, pieces, marks);
  const next = text.slice(at + 1).search(/[\\`\n[!h<*_~]/);
  const end = next < 0 ? text.length : at + 1 + next;
  pieces.push({ kind: "text", text: text.slice(at, end) });
  return end;
}

function code_span(text, at, pieces) {
  let width = 1;
  while (text[at + width] === "`") width += 1;
  const mark = "`".repeat(width);
  let end = text.indexOf(mark, at + width);
  while (end >= 0 && text[end + width] === "`") {
    let over = end;
    while (text[over] === "`") over += 1;
    end = text.indexOf(mark, over);
  }
  if (end < 0) {
    pieces.push({ kind: "text", text: mark });
    return at + width;
  }
  const inner = text.slice(at + width, end).replaceAll("\n", " ");
  const padded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim();
  pieces.push({ kind: "codespan", text: padded ? inner.slice(1, -1) : inner });
  return end + width;
}

function link_at(text, at, pieces) {
  const picture = text[at] === "!";
  const from = at + (picture ? 2 : 1);
  const to = closing(text, from, "[", "]");
  const open = to + 1;
  const end = to < 0 || text[open] !== "(" ? -1 : closing(text, open + 1, "(", ")");
  if (end < 0) {
    pieces.push({ kind: "text", text: text.slice(at, from) });
    return from;
  }
  const target = text.slice(open + 1, end).trim().split(/\s/, 1)[0].replace(/^<|>$/g, "");
  const words = text.slice(from, to);
  const inner = picture ? [{ kind: "text", text: words || target }] : pieces_of(words, true);
  pieces.push(safe(target) ? { kind: "link", target, inner } : { kind: "span", inner });
  return end + 1;
}

function closing(text, from, open, close) {
  let depth = 1;
  const last = Math.min(text.length, from + LINK_CHARS);
  for (let at = from; at < last; at += 1) {
    if (text[at] === "\\") at += 1;
    else if (text[at] === open) depth += 1;
    else if (text[at] === close) depth -= 1;
    if (depth === 0) return at;
  }
  return -1;
}

function address_at(text, at, pieces) {
  const before = text[at - 1] ?? " ";
  const found = /^<?(https?:\/\/[^\s<>"`]{1,2000})>?/.exec(text.slice(at, at + LINK_CHARS));
  if (!found || /\w/.test(before)) {
    pieces.push({ kind: "text", text: text[at] });
    return at + 1;
  }
  const bracketed = found[0].startsWith("<") && found[0].endsWith(">");
  const target = bracketed ? found[1] : found[1].replace(/[.,;:!?'*_~)\]]+$/, "");
  pieces.push({ kind: "link", target, inner: [{ kind: "text", text: target }] });
  return bracketed ? at + found[0].length : at + found[0].indexOf(found[1]) + target.length;
}

/** Whether a link may lead there: never to a script. */
export function safe(target) {
  return /^(https?:\/\/|mailto:)/i.test(target);
}

function mark_at(text, at, pieces, marks) {
  const sign = text[at];
  let width = 1;
  while (text[at + width] === sign) width += 1;
  const before = text[at - 1] ?? " ";
  const after = text[at + width] ?? " ";
  const inside = sign === "_" && /\w/.test(before) && /\w/.test(after); // snake_case
  const size = sign === "~" ? 2 : Math.min(width, 2);
  if (inside || width > 3 || (sign === "~" && width !== 2)) {
    pieces.push({ kind: "text", text: sign.repeat(width) });
    return at + width;
  }
  const open = marks.get(sign) ?? [];
  marks.set(sign, open);
  const own = open.at(-1);
  if (own !== undefined && !/\s/.test(before) && pieces[own].text.length >= size) {
    close_mark(pieces, marks, open.pop(), size);
    return at + size; // what remains of a longer mark may close another one
  }
  pieces.push({ kind: "text", text: sign.repeat(width) });
  if (!/\s/.test(after) && open.length < OPEN_MARKS) open.push(pieces.length - 1);
  return at + width;
}

const EMPHASIS = { "~": ["strike", "strike"], "*": ["em", "strong"], _: ["em", "strong"] };

function close_mark(pieces, marks, from, size) {
  const sign = pieces[from].text[0];
  const rest = pieces[from].text.length - size;
  const inner = joined(pieces.splice(from + 1));
  const whole = { kind: EMPHASIS[sign][size - 1], inner };
  if (rest > 0) {
    pieces[from].text = sign.repeat(rest);
    pieces.push(whole);
    marks.get(sign).push(from);
  } else {
    pieces[from] = whole;
  }
  for (const open of marks.values()) {
    while (open.length && open.at(-1) > from) open.pop(); // they are inside now
  }
}

function joined(pieces) {
  const found = [];
  for (const piece of pieces) {
    const last = found.at(-1);
    if (piece.kind === "text" && last?.kind === "text") last.text += piece.text;
    else found.push({ ...piece });
  }
  return found;
}
