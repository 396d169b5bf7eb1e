/** Tables whose rows are kept by key, so that an update touches changed cells only. */

import { make, put } from "../elements.js";
import { place } from "./verdict.js";

/**
 * A table by `columns`: `{ head, text }` or `{ head, fill }`, which puts elements into the cell of a
 * new row; `numeric` ones are aligned at the right. The first column is each row's head.
 */
export class Table {
  constructor(caption, columns, empty) {
    this.columns = columns;
    this.rows = new Map();
    const heads = columns.map(({ head, numeric }) => make("th", { scope: "col", class: numeric && "number" }, head));
    this.body = make("tbody");
    this.table = make("table", {}, make("caption", { class: "unseen" }, caption), make("thead", {}, make("tr", {}, ...heads)), this.body);
    this.none = make("p", { class: "empty" }, empty);
    const scroller = { class: "table", tabindex: "0", role: "region", "aria-label": caption };
    this.scroller = make("div", scroller, this.table);
    this.element = make("div", {}, this.scroller, this.none);
  }

  /** Show these rows: pairs of a key and a value, in order. */
  show(entries) {
    const shown = new Map(entries.map(([key, value]) => [key, this.row(key, value)]));
    this.rows = shown;
    place(this.body, [...shown.values()].map((row) => row.element));
    this.none.hidden = entries.length > 0;
    this.scroller.hidden = !entries.length;
  }

  row(key, value) {
    const row = this.rows.get(key) ?? this.make_row(key, value);
    row.value = value;
    this.columns.forEach(({ text, update }, index) => {
      if (text) put(row.cells[index], text(value, key));
      else update?.(row.cells[index], value, key);
    });
    return row;
  }

  make_row(key, value) {
    const row = { value };
    row.cells = this.columns.map(({ fill, numeric }, index) => {
      const cell = make(index ? "td" : "th", { scope: index ? undefined : "row", class: numeric && "number" });
      if (fill) cell.append(...fill(() => row.value, key));
      return cell;
    });
    row.element = make("tr", {}, ...row.cells);
    return row;
  }
}

/** Return a button in a row, with the name of what it is about for those who do not see the row. */
export function row_button(words, about, press) {
  const button = make("button", { type: "button", class: "small", "aria-label": `${words} ${about}` }, words);
  button.addEventListener("click", press);
  return button;
}

/** Return the heading of a view. */
export function heading(words) {
  return make("h1", { tabindex: "-1" }, words);
}
