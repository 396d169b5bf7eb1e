/** What an operator may do to a board: the call, and the sentence that says what will come of it. */

import { make } from "../elements.js";
import { confirm } from "./frame.js";
import { several, standing } from "./words.js";

const JSON_POST = (body) => ({ method: "POST", body: JSON.stringify(body) });

/** Return a path with a name in it, whose slashes are its own. */
export function path_of(before, name, after = "") {
  return `${before}/${name.split("/").map(encodeURIComponent).join("/")}${after}`;
}

function of_board(verb, body = {}) {
  return (name) => [path_of("v1/boards", name, `/${verb}`), JSON_POST(body)];
}

/** The actions in the order of their buttons; `fits` decides which of a pair is offered. */
const ACTIONS = [
  {
    verb: "Drain",
    fits: (board) => !board.drained,
    consequence: (running) => `It takes no new requests until you end the drain. ${running} What it has begun ends there; other boards get the rest.`,
    // The answer of a call without async comes when the board is empty.
    call: (name) => ["v1/boards/drain", JSON_POST({ boards: [name], async: true })],
    done: (name) => `${name} takes no new requests.`,
  },
  {
    verb: "End drain",
    fits: (board) => board.drained,
    consequence: () => "It takes new requests again.",
    call: (name) => ["v1/boards/undrain", JSON_POST({ boards: [name] })],
    done: (name) => `${name} takes requests again.`,
  },
  {
    verb: "Pause",
    fits: (board) => !board.hold && board.level === undefined,
    consequence: (running) => `It stops generating at the next token. ${running} Requests on it wait, and lose nothing.`,
    call: (name) => ["pause", JSON_POST({ boards: [name], mode: "keep", clear_cache: false })],
    done: (name) => `${name} is paused.`,
  },
  {
    verb: "Resume",
    fits: (board) => board.hold && board.level === undefined,
    consequence: () => "Its requests go on where they stopped.",
    call: (name) => ["resume", JSON_POST({ boards: [name] })],
    done: (name) => `${name} goes on.`,
  },
  {
    verb: "Sleep",
    fits: (board) => board.level === undefined,
    consequence: (running) => `It unloads its model to free the memory. ${running} Its requests wait until it is woken, which takes as long as a load.`,
    call: (name) => ["sleep", JSON_POST({ boards: [name], level: 1, mode: "keep" })],
    done: (name) => `${name} is asleep.`,
  },
  {
    verb: "Wake",
    fits: (board) => board.level !== undefined,
    consequence: () => "It loads its model again; requests that waited for it go on.",
    call: (name) => ["wake_up", JSON_POST({ boards: [name] })],
    done: (name) => `${name} is awake.`,
  },
  {
    verb: "Restart engine",
    fits: () => true,
    consequence: (running) => `Its engine process is replaced and loads the model again. ${running} They go on when it is back, computed again; its KV cache is lost.`,
    call: of_board("restart"),
    done: (name) => `The engine of ${name} is restarted.`,
  },
  {
    verb: "Clear KV",
    fits: () => true,
    consequence: () => "Cached prefixes are dropped: the next request of each conversation has its whole prompt computed again.",
    call: (name) => ["v1/cache/kv/clear", JSON_POST({ boards: [name] })],
    done: (name) => `The KV cache of ${name} is cleared.`,
  },
  {
    verb: "Measure",
    fits: () => true,
    consequence: (running) => `It generates for ten seconds to find its speed, and requests that come meanwhile wait. ${running} A busy board refuses.`,
    call: of_board("measure", { seconds: 10 }),
    done: (name, answer) => answer?.sentence ?? `${name} is measured.`,
  },
];

/** The buttons for one board. */
export class Actions {
  constructor(name, app) {
    this.name = name;
    this.buttons = ACTIONS.map((action) => {
      const button = make("button", { type: "button" }, action.verb);
      button.addEventListener("click", () => this.ask(action, app));
      return button;
    });
    this.element = make("div", { class: "actions", role: "group", "aria-label": `Actions on ${name}` }, ...this.buttons);
  }

  show(entry) {
    ACTIONS.forEach((action, index) => {
      const fits = Boolean(action.fits(entry));
      // A button that goes while it has the focus leaves it to the one that comes.
      const focused = document.activeElement === this.buttons[index];
      this.buttons[index].hidden = !fits;
      if (focused && !fits) this.buttons.find((one) => !one.hidden)?.focus();
    });
  }

  ask(action, app) {
    const { name } = this;
    const running = app.cluster.figure(name, "running") ?? 0;
    const now = running ? `${several(running, "request")} in progress.` : "No request is in progress.";
    const entry = app.cluster.view.boards[name];
    const state = entry ? standing(entry).word.toLowerCase() : "gone";
    confirm({
      question: `${action.verb}: ${name}?`,
      consequence: `${action.consequence(now)} ${name} is ${state} now.`,
      verb: action.verb,
      act: () => app.call(...action.call(name)),
      done: (answer) => action.done(name, answer),
    });
  }
}

/** Return the confirmation that ends a request. */
export function abort_request(id, entry, app) {
  const board = entry.board ? ` on ${entry.board}` : "";
  confirm({
    question: "Abort this request?",
    consequence: `${id} (${entry.phase}${board}) ends with what it has; its client gets an aborted answer. This cannot be taken back.`,
    verb: "Abort request",
    act: () => app.call(path_of("v1/generations", id, "/abort"), JSON_POST({})),
    done: () => `Request ${id} is aborted.`,
  });
}

/** Ask before a rollout goes back (`rollback`) or a canary is served to all (`promote`). */
export function change_rollout(verb, rollout, app) {
  const { adapter, model, active, previous, candidate } = rollout;
  const back = active === candidate ? previous : active;
  const consequence =
    verb === "rollback"
      ? `All boards of ${model} serve ${back ?? "no version"} of ${adapter} instead of ${candidate}.`
      : `All boards of ${model} serve ${candidate} of ${adapter} to all sessions.`;
  const title = verb === "rollback" ? "Roll back" : "Promote";
  confirm({
    question: `${title} ${adapter} of ${model}?`,
    consequence,
    verb: title,
    act: () => app.call(path_of("v1/lora_adapters", adapter, `/${verb}`), JSON_POST({ model })),
    done: () => `${title}: ${adapter} of ${model} is done.`,
  });
}

/** Ask before all boards stop generating. */
export function pause_cluster(app) {
  const running = app.cluster.total("running");
  const now = running ? `${several(running, "request")} in progress.` : "No request is in progress.";
  confirm({
    question: "Pause the whole cluster?",
    consequence: `All boards stop generating at the next token. ${now} Requests wait until you end the pause, and lose nothing.`,
    verb: "Pause the cluster",
    act: () => app.call("pause", JSON_POST({ mode: "keep", clear_cache: false })),
    done: () => "The whole cluster is paused.",
  });
}

/** Ask before a pause or sleep that an operation made is ended. */
export function end_pause(pause, app) {
  const { models, boards, adapter, level } = pause;
  const scope = Object.fromEntries(
    Object.entries({ models, boards, adapter }).filter(([, value]) => value?.length),
  );
  const where = [...models, ...boards, ...(adapter ? [adapter] : [])].join(", ") || "the whole cluster";
  const asleep = level !== undefined;
  confirm({
    question: `${asleep ? "Wake" : "Resume"} ${where}?`,
    consequence: asleep ? "Models are loaded again, and requests that waited go on." : "Requests go on where they stopped.",
    verb: asleep ? "Wake" : "Resume",
    act: () => app.call(asleep ? "wake_up" : "resume", JSON_POST(scope)),
    done: () => `${where}: ${asleep ? "awake" : "resumed"}.`,
  });
}
