/**
 * The stream of the cluster's events. It is read by fetch, because EventSource sends no key. The server
 * ends it from time to time; a lost stream is opened again after pauses that grow, and one without a
 * byte for a while counts as lost.
 */

import { call } from "../api.js";

const PAUSES_S = [1, 2, 4, 8, 15];
const WHOLE_MS = 10_000; // a stream that lasted so long and ended in order is opened again at once
const REFUSED = new Set([401, 403, 404]); // another attempt with the same key would fare no better

/** Yield server-sent events as `{ event, data }` with parsed data; `heard` is called for each piece. */
export async function* server_events(stream, heard = () => {}) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    heard();
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const fields = { event: "message", data: "" };
      for (const line of part.split("\n")) {
        const colon = line.indexOf(":");
        if (colon > 0) fields[line.slice(0, colon)] = line.slice(colon + 1).trimStart();
      }
      if (fields.data) yield { event: fields.event, data: JSON.parse(fields.data) };
    }
  }
}

/** Reads the stream until it is stopped. `handle` has `event`, `live`, `lost` and `refused`. */
export class Stream {
  constructor(key, handle) {
    Object.assign(this, { key, handle, failures: 0, silent_s: 30, stopped: false });
    void this.run();
  }

  /** Leave the stream for good. */
  stop() {
    this.stopped = true;
    this.abort?.abort();
    this.wake?.();
  }

  /** Do not wait for the next attempt. */
  retry() {
    this.wake?.();
  }

  async run() {
    while (!this.stopped) {
      let failure = null;
      const began = Date.now();
      try {
        await this.read();
      } catch (error) {
        failure = error;
      }
      if (this.stopped) return;
      if (!failure && Date.now() - began > WHOLE_MS) continue;
      if (REFUSED.has(failure?.status)) {
        this.handle.refused(failure);
        return;
      }
      const pause_s = PAUSES_S[Math.min(this.failures, PAUSES_S.length - 1)];
      this.failures += 1;
      this.handle.lost(failure, Date.now() + 1000 * pause_s);
      await this.pause(1000 * pause_s);
    }
  }

  async read() {
    this.abort = new AbortController();
    const { signal } = this.abort;
    this.listen();
    try {
      const response = await call("v1/cluster/events", this.key(), { signal });
      for await (const { event, data } of server_events(response.body, () => this.listen())) {
        if (this.stopped) return;
        // Whoever is handed only deltas has missed the document that they change.
        if (event === "snapshot") {
          this.failures = 0;
          this.silent_s = Math.max(15, 4 * data.view.every_s);
          this.handle.live();
        }
        this.handle.event(event, data);
      }
    } finally {
      clearTimeout(this.timer);
      this.abort.abort(); // what is still open of an answer that could not be read
    }
  }

  /** Start the time again after which silence means that the stream is lost. */
  listen() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.abort.abort(), 1000 * this.silent_s);
  }

  pause(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}
