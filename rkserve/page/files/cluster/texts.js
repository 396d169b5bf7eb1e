/** The views of texts: how a client reaches this cluster, and the runbook. */

import { call } from "../api.js";
import { Prose } from "../draw.js";
import { copy_text, make, put } from "../elements.js";
import { heading } from "./tables.js";

const CLIENTS = [
  {
    name: "curl",
    words: "In any shell.",
    text: ({ url, model, key }) =>
      `curl ${url}/v1/chat/completions -H 'content-type: application/json'${key ? " \\\n  -H 'authorization: Bearer YOUR_KEY'" : ""} -d '{
  "model": "${model}", "messages": [{"role": "user", "content": "Hello!"}]}'`,
  },
  {
    name: "OpenAI Python",
    words: "pip install openai",
    text: ({ url, model, key }) => `from openai import OpenAI

client = OpenAI(base_url="${url}/v1", api_key="${key ? "YOUR_KEY" : "unused"}")
answer = client.chat.completions.create(
    model="${model}", messages=[{"role": "user", "content": "Hello!"}]
)
print(answer.choices[0].message.content)`,
  },
  {
    name: "Anthropic",
    words: "For Anthropic's Python package and Claude Code, which read these variables.",
    text: ({ url, model, key }) => `export ANTHROPIC_BASE_URL=${url}
export ANTHROPIC_AUTH_TOKEN=${key ? "YOUR_KEY" : "unused"}
export ANTHROPIC_MODEL=${model}`,
  },
  {
    name: "Ollama",
    words: "For Ollama's command and libraries, which read this variable.",
    text: ({ url, model }) => `export OLLAMA_HOST=${url}
ollama run ${model}`,
  },
  {
    name: "Open WebUI",
    words: "A page with users and history; it asks the cluster for its models. For a container, set the same variables.",
    text: ({ url, key }) => `export OPENAI_API_BASE_URL=${url}/v1
export OPENAI_API_KEY=${key ? "YOUR_KEY" : "unused"}
open-webui serve`,
  },
];

/** The view of the lines for clients. */
export class Connect {
  constructor(app) {
    this.app = app;
    this.title = "Connect";
    this.heading = heading("Connect a client");
    this.url = new URL(".", document.baseURI).href.replace(/\/$/, "");
    this.picker = make("select", { id: "connect-model" });
    this.picker.addEventListener("change", () => this.draw());
    this.keyed = make("input", { id: "connect-key", type: "checkbox" });
    this.keyed.checked = Boolean(app.key());
    this.keyed.addEventListener("change", () => this.draw());
    const field = make("p", { class: "field" }, make("label", { for: "connect-model" }, "Model"), this.picker);
    const check = make("p", { class: "field" }, this.keyed, make("label", { for: "connect-key" }, "This cluster asks for an API key"));
    this.texts = CLIENTS.map(() => make("code", {}));
    const sections = CLIENTS.map(({ name, words }, index) => {
      const copy = make("button", { type: "button", class: "small", "aria-label": `Copy the lines for ${name}` }, "Copy");
      copy.addEventListener("click", () => copy_text(this.texts[index].textContent, copy));
      const head = make("div", { class: "titled" }, make("h2", {}, name), copy);
      const lines = make("pre", { tabindex: "0", role: "region", "aria-label": `Lines for ${name}` }, this.texts[index]);
      return make("section", { class: "client" }, head, make("p", { class: "hint" }, words), lines);
    });
    const where = make("p", {}, "The address of this cluster is ", make("code", {}, this.url), ".");
    this.element = make("div", {}, this.heading, where, make("div", { class: "fields" }, field, check), ...sections);
    this.draw();
  }

  update({ view }, change) {
    if (!change.has("models")) return;
    const names = Object.keys(view.models);
    if (names.join() === this.names) return;
    this.names = names.join();
    const chosen = this.picker.value;
    this.picker.replaceChildren(...names.map((name) => make("option", { value: name }, name)));
    if (names.includes(chosen)) this.picker.value = chosen;
    this.draw();
  }

  draw() {
    const facts = { url: this.url, model: this.picker.value || "MODEL", key: this.keyed.checked };
    CLIENTS.forEach(({ text }, index) => put(this.texts[index], text(facts)));
  }
}

const FILE = "page/cluster/runbook.md";

/** Return the heading with this anchor in a Markdown text, and the text below it, or null. */
export function section_of(text, anchor) {
  const lines = text.split("\n");
  const heads = headings(lines);
  const first = heads.find(({ words }) => slug(words) === anchor);
  if (!first) return null;
  const next = heads.find(({ line, level }) => line > first.line && level <= first.level);
  return { words: first.words, text: lines.slice(first.line + 1, next?.line).join("\n") };
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

/** The view of the runbook: the section of a rule, as the documentation has it. */
export class Runbook {
  constructor() {
    this.title = "Runbook";
    this.heading = heading("Runbook");
    this.whole = make("h2", {});
    this.words = make("div", { class: "words" });
    const all = make("p", {}, make("a", { href: "#/runbook" }, "The whole runbook"));
    this.element = make("div", {}, this.heading, this.whole, this.words, all);
  }

  update() {} // it is a text

  async show(anchor) {
    this.words.replaceChildren();
    const prose = new Prose(this.words);
    put(this.heading, "Runbook");
    try {
      const text = await (await call(FILE, "")).text();
      const section = section_of(text, anchor);
      put(this.heading, section ? `Runbook: ${section.words}` : "Runbook");
      put(this.whole, section ? "" : "All rules"); // the level between the view's and the rules' headings
      prose.show(section?.text ?? text);
    } catch (error) {
      prose.show(`The runbook cannot be read: ${error.message}`);
    }
  }
}
