"""The binding alone: a process with the runtime and nothing else, as the yardstick of the cluster.

It loads and runs as the engine does, and counts time at the same places as a client would: from
asking to the first text, and to the end. Of a batch it counts steps and CPU time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rkserve.bench.batches import BatchRun
from rkserve.bench.child import BenchFailed, Json, Tell, serve_commands
from rkserve.bench.stream import Exchange
from rkserve.messages import Sampling
from rkserve.modelfolder import open_model_folder
from rkserve.native.binding import open_runtime
from rkserve.native.runtime import (
    LoadParams,
    RunEnd,
    RunParams,
    Runtime,
    Step,
    TokenInput,
    Verdict,
)


def load(command: Json) -> Runtime:
    """Open the library and load the model, with what a board would load it with."""
    folder = open_model_folder(Path(command["model"]))
    runtime = open_runtime(Path(command["library"]))
    context_len = folder.settings.context_length
    runtime.load(
        LoadParams(
            model_path=str(folder.require_weights()),
            max_context_len=context_len,
            max_new_tokens=context_len,
            sampling=folder.settings.sampling.values(),
            n_batch=command["n_batch"],
        )
    )
    return runtime


def run(runtime: Runtime, ids: tuple[int, ...], max_tokens: int) -> Exchange:
    """Make one run on an empty context, as a board does for a new conversation."""
    content_s: list[float] = []
    tokens = 0

    def sink(step: Step) -> Verdict:
        nonlocal tokens
        (piece,) = step
        tokens += 1
        if piece is not None and piece.text:
            content_s.append(time.monotonic())
        return Verdict.CONTINUE

    params = RunParams(
        (TokenInput(ids),),
        keep_history=runtime.quirks["append_tokens_with_history"],
        sampling=Sampling(temperature=0.0),
        max_new_tokens=max_tokens,
    )
    sent_s = time.monotonic()
    runtime.clear_kv_cache()
    outcome = runtime.run(params, sink)
    end_s = time.monotonic()
    if outcome.end is not RunEnd.FINISHED:
        raise BenchFailed(f"a run of the binding ended as {outcome.end.value}")
    return Exchange(
        sent_s=sent_s,
        content_s=tuple(content_s),
        end_s=end_s,
        prompt_tokens=len(ids),
        completion_tokens=tokens,
        prefill_ms=outcome.perf.prefill_ms,
        prefill_tokens=outcome.perf.prefill_tokens,
    )


def run_batch(runtime: Runtime, prompts: Sequence[Sequence[int]], max_tokens: int) -> BatchRun:
    """Make one run with an entry for each of ``prompts``, all on empty contexts."""
    steps, first_s, last_s = 0, 0.0, 0.0
    now_s = time.monotonic

    def sink(_step: Step) -> Verdict:
        nonlocal steps, first_s, last_s
        last_s = now_s()
        if not steps:
            first_s = last_s
        steps += 1
        return Verdict.CONTINUE

    params = RunParams(
        tuple(TokenInput(tuple(ids)) for ids in prompts),
        sampling=Sampling(temperature=0.0),
        max_new_tokens=max_tokens,
    )
    began_s = time.process_time()  # all threads: the simulated library's are among them
    outcome = runtime.run(params, sink)
    cpu_s = time.process_time() - began_s
    if outcome.end is not RunEnd.FINISHED:
        raise BenchFailed(f"a batch of the binding ended as {outcome.end.value}")
    return BatchRun(steps, outcome.perf.decode_tokens, first_s, last_s, cpu_s)


def main() -> None:
    """Serve the benchmark."""
    loaded: list[Runtime] = []

    def carry_out(command: Json, _: Tell) -> dict[str, Any]:
        if command["do"] == "load":
            loaded.append(load(command))
            return {"release": loaded[0].release}
        if command["do"] == "batch":
            return asdict(run_batch(loaded[0], command["prompts"], command["max_tokens"]))
        return run(loaded[0], tuple(command["ids"]), command["max_tokens"]).to_json()

    serve_commands(carry_out)


if __name__ == "__main__":
    main()
