/**
 * The server as this page sees it: its models, and answers as streams of events. It knows the API of
 * OpenAI with what is rkserve's own in it, and nothing of the page.
 */

const BASE = new URL(".", document.baseURI); // the application may stand below a prefix

/** What the server refused, or where an answer broke off. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retry_after_s = null } = {}) {
    super(message);
    Object.assign(this, { status, code, retry_after_s });
  }
}

/** Call the server, and return its answer unless it refuses; a string in `body` is JSON. */
export async function call(path, key, options = {}) {
  const headers = { "content-type": "application/json" };
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(new URL(path, BASE), { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (response.ok) return response;
  throw await refusal(response);
}

async function refusal(response) {
  const told = await response.json().catch(() => null);
  const error = told?.error ?? {};
  const seconds = Number.parseInt(response.headers.get("retry-after") ?? "", 10);
  return new ApiError(error.message ?? `The server answered with status ${response.status}.`, {
    status: response.status,
    code: error.code ?? null,
    retry_after_s: Number.isNaN(seconds) ? null : seconds,
  });
}

/** Return models and adapters: what can be asked, each with its `id`, `parent`, `state` and whether it `sees`. */
export async function models(key) {
  const listed = await (await call("v1/models", key)).json();
  const seeing = new Set(listed.data.filter((one) => one.rkserve?.vision).map((one) => one.id));
  return listed.data.map((one) => ({
    id: one.id,
    sees: seeing.has(one.parent ?? one.id),
    parent: one.parent ?? null,
    state: one.rkserve?.state ?? "ready",
    broken: one.rkserve?.broken ?? null,
  }));
}

/**
 * Ask for an answer, and yield what becomes of it: `taken` (with the board and how many are before
 * this one), `alive`, `paused`, `delta` (`text` and `thinking`, before which `retract` and `unthought`
 * characters at the end of both are void) and `end` (`reason`, `timings`, `usage`). Aborting the
 * signal hangs up, which frees the board.
 */
export async function* answer(body, key, signal) {
  const asked = { ...body, stream: true, stream_options: { include_usage: true } };
  const options = { method: "POST", body: JSON.stringify(asked), signal };
  const response = await call("v1/chat/completions", key, options);
  const headers = response.headers;
  if (headers.has("x-rkserve-board")) {
    const ahead = Number.parseInt(headers.get("x-rkserve-queued-ahead") ?? "0", 10);
    yield { kind: "taken", board: headers.get("x-rkserve-board"), ahead };
  }
  const end = { kind: "end", reason: null, timings: null, usage: null };
  for await (const event of events(response.body)) {
    if (event === "done") {
      yield end;
      return;
    }
    if (event === "alive" || event === "paused") {
      yield { kind: event };
      continue;
    }
    if (event.error) throw new ApiError(event.error.message, { code: event.error.code });
    Object.assign(end, event.usage && { usage: event.usage });
    const [choice] = event.choices;
    if (!choice) continue;
    Object.assign(end, event.timings && { timings: event.timings });
    if (choice.finish_reason) end.reason = choice.finish_reason;
    yield delta_of(choice.delta, event.rkserve ?? {});
  }
  throw new ApiError("The connection ended before the answer did.");
}

function delta_of(delta, { retract = 0, retract_reasoning = 0 }) {
  const thinking = delta.reasoning_content ?? delta.reasoning ?? "";
  const text = delta.content ?? "";
  return { kind: "delta", text, thinking, retract, unthought: retract_reasoning };
}

/** Yield server-sent events: parsed data, "alive" and "paused" for comments, "done" at the end. */
async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith(":")) yield part.includes("paused") ? "paused" : "alive";
      else if (part === "data: [DONE]") yield "done";
      else if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
    }
  }
}
