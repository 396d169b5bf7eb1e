/** The cluster's page: one stream of events, and the view that the address names. */

import { call } from "../api.js";
import { make } from "../elements.js";
import * as store from "../store.js";
import { Board } from "./board.js";
import { ClusterDocument } from "./document.js";
import { Fleet } from "./fleet.js";
import { ask_key, say, Staleness, wire_settings } from "./frame.js";
import { audit, usage } from "./listings.js";
import { Operations, Requests } from "./in_flight.js";
import { Stream } from "./stream.js";
import { Connect, Runbook } from "./texts.js";
import { Verdict } from "./verdict.js";

const at = (id) => document.getElementById(id);

const cluster = new ClusterDocument();

/** What views know of the page: the cluster, and how the server is called. */
const app = {
  cluster,
  say,
  key: () => store.admin_key(),

  /** Return an open answer, and ask for a key where the server wants one. */
  async open(path, options = {}) {
    try {
      return await call(path, store.admin_key(), options);
    } catch (error) {
      if (error.status === 401) ask_key(error.message);
      throw error;
    }
  },

  /** Return the JSON of an answer. */
  async call(path, options) {
    return (await app.open(path, options)).json();
  },
};

const verdict = new Verdict(say);
const views = {
  boards: new Fleet(app),
  board: new Board(app),
  requests: new Requests(app),
  operations: new Operations(app),
  audit: audit(app),
  usage: usage(app),
  connect: new Connect(app),
  runbook: new Runbook(),
};
let shown = null;

// -- drawing -------------------------------------------------------------------------------------

let drawing = false;

/** Draw once for all events until the next frame; a page in the background draws nothing. */
function draw_soon() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    if (cluster.view) draw(cluster.take());
  });
}

function draw(change) {
  verdict.update(cluster, change);
  shown.update(cluster, change);
}

function name_page() {
  const word = cluster.view?.verdict.verdict;
  document.title = [word && word !== "READY" ? word : "", shown.title, "rkserve cluster"].filter(Boolean).join(" · ");
}

// -- views ---------------------------------------------------------------------------------------

const FETCHED = new Set(["audit", "usage", "connect", "runbook"]); // these need no event
const EVERYTHING = { all: true, ticked: false, keys: new Set(), boards: new Set(), has: () => true };

function navigate(moved) {
  const [, name = "", argument = ""] = location.hash.split("/");
  const view = views[name] ?? views.boards;
  if (shown !== view) shown?.hide?.();
  shown = view;
  view.show?.(decodeURIComponent(argument));
  const ready = cluster.view || FETCHED.has(name);
  at("view").replaceChildren(ready ? view.element : waiting);
  if (cluster.view) draw(EVERYTHING);
  document.body.dataset.view = view === views.boards ? "boards" : "other";
  for (const link of document.querySelectorAll("nav a")) {
    const current = link.hash.slice(2) === (name || "boards");
    if (current) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  name_page();
  if (moved) {
    scrollTo(0, 0);
    view.heading?.focus({ preventScroll: true });
  }
}

const waiting = make("p", { class: "empty" }, "Waiting for the cluster …");

addEventListener("hashchange", () => navigate(true));
at("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the view
  at("view").focus();
});
setInterval(() => {
  if (!document.hidden && cluster.view) shown.tick?.();
}, 1000);

// -- the stream ----------------------------------------------------------------------------------

const staleness = new Staleness(() => (stream.stopped_for_good ? start() : stream.retry()));
let stream;

function start() {
  stream?.stop();
  stream = new Stream(store.admin_key, {
    event(kind, data) {
      const first = !cluster.view;
      if (kind === "snapshot") cluster.snapshot(data);
      else if (kind === "delta" && cluster.view) cluster.delta(data);
      else return;
      if (first) navigate(false);
      name_page();
      draw_soon();
    },
    live() {
      staleness.live();
    },
    lost(failure, next_ms) {
      staleness.lost(failure, next_ms);
    },
    refused(failure) {
      stream.stopped_for_good = true;
      staleness.refused(failure);
      if (failure.status !== 404) ask_key(failure.message);
    },
  });
}

wire_settings({
  operates: () => cluster.view?.operator !== false,
  changed() {
    cluster.view = null; // another key may show another document
    start();
  },
});
navigate(false);
start();
