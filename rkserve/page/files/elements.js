/** Elements of the page. Text only ever becomes text: there is no way from a string to markup. */

const SVG = "http://www.w3.org/2000/svg";

/** Make an element with attributes and children; strings among them become text. */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Make an element of a drawing. */
export function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Return a decorative drawing of 20 by 20 units, of one path. */
export function icon(path) {
  return draw("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" }, draw("path", { d: path }));
}

/** Show a text in an element; one that it shows already touches nothing. */
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Set an attribute, or remove it (null); one that is so already touches nothing. */
export function mark(element, name, value) {
  if (value === null) element.removeAttribute(name);
  else if (element.getAttribute(name) !== value) element.setAttribute(name, value);
}

/** Show the page in light or dark colours, or in those of the system (`auto`). */
export function wear(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

/** Put a text into the clipboard, and say so on the button for a moment. */
export async function copy_text(text, button) {
  const usual = button.textContent;
  button.textContent = (await to_clipboard(text)) ? "Copied" : "Cannot copy";
  setTimeout(() => {
    button.textContent = usual;
  }, 1500);
}

async function to_clipboard(text) {
  if (navigator.clipboard) {
    return navigator.clipboard.writeText(text).then(() => true, () => false);
  }
  // Without TLS, except on this machine, browsers have only the old way.
  const holder = make("textarea", { class: "unseen", "aria-hidden": "true" });
  const focused = document.activeElement;
  holder.value = text;
  document.body.append(holder);
  holder.select();
  const done = document.execCommand("copy");
  holder.remove();
  focused?.focus();
  return done;
}
