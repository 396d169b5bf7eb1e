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

from benchmarks.harness.exchange import Exchange
from benchmarks.serving.oneboard_figures import BatchRun
from rkserve.bench.processes import BenchFailed, Json, OnProgress, serve_commands
from rkserve.core.run_params import Guide, GuideKind, Sampling, Stepwise
from rkserve.models.folder import open_model_folder
from rkserve.native import engine_frames
from rkserve.native.binding.runtime import open_runtime
from rkserve.native.engine_frames import StepParams
from rkserve.native.runtime import (
    LoadParams,
    RunEnd,
    RunParams,
    Runtime,
    SinkAction,
    Step,
    TokenInput,
)

GREEDY = Sampling(temperature=0.0, top_k=1, repeat_penalty=1.0)


def load(command: Json) -> Runtime:
    """Open the library and load the model, with what a board would load it with."""
    folder = open_model_folder(Path(command["model"]))
    runtime = open_runtime(Path(command["library"]), command["quirks"])
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

    def sink(step: Step) -> SinkAction:
        nonlocal tokens
        (piece,) = step
        tokens += 1
        if piece is not None and piece.text:
            content_s.append(time.monotonic())
        return SinkAction.CONTINUE

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

    def sink(_step: Step) -> SinkAction:
        nonlocal steps, first_s, last_s
        last_s = now_s()
        if not steps:
            first_s = last_s
        steps += 1
        return SinkAction.CONTINUE

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


class Guided:
    """Answers that follow a grammar, as an engine makes them."""

    def __init__(self) -> None:
        from rkserve.native.engine.stepwise import (
            StepwiseRuns,  # late, as in an engine: no other case needs it
        )

        self._told: list[tuple[float, bytes]] = []
        self._steps = StepwiseRuns(lambda frame: self._told.append((time.monotonic(), frame)))

    def run(self, runtime: Runtime, command: Json) -> Json:
        """Make one on an empty context; without a guide the library's own."""
        runtime.clear_kv_cache()
        sent_s, cpu_s = time.monotonic(), time.process_time()
        if command["guide"] is None:
            said = self._free(runtime, command)
        else:
            said = self._held(runtime, command)
        end_s = time.monotonic()
        return {
            "tokens": len(said),
            "first_s": said[0][0] - sent_s,
            "whole_s": end_s - sent_s,
            "cpu_s": time.process_time() - cpu_s,
            "text": b"".join(text for _, text in said).decode(errors="replace"),
        }

    def _free(self, runtime: Runtime, command: Json) -> list[tuple[float, bytes]]:
        said: list[tuple[float, bytes]] = []

        def sink(step: Step) -> SinkAction:
            said.append((time.monotonic(), b"" if step[0] is None else step[0].text))
            return SinkAction.CONTINUE

        given = (TokenInput(tuple(command["ids"])),)
        runtime.run(RunParams(given, sampling=GREEDY, max_new_tokens=command["max_tokens"]), sink)
        return said

    def _held(self, runtime: Runtime, command: Json) -> list[tuple[float, bytes]]:
        steps = StepParams(
            tokenizer=Path(command["tokenizer"]),
            sampling=GREEDY,
            wanted=Stepwise(1, guide=Guide(GuideKind.JSON_SCHEMA, command["guide"]), free=True),
            eos=frozenset(command["eos"]),
            limit=command["max_tokens"],
            optimistic=command["optimistic"],
        )
        asked = {"steps": steps.as_json(), "keep_history": command["history"], "adapter": None}
        self._told.clear()
        self._steps.run(runtime, 1, asked, tuple(command["ids"]), lambda: False)
        return [
            (at_s, engine_frames.unpack_token(data)[3])
            for at_s, frame in self._told
            for kind, data in engine_frames.FrameReader().feed(frame)
            if kind is engine_frames.FrameKind.TOKEN
        ]


def main() -> None:
    """Serve the benchmark."""
    loaded: list[Runtime] = []
    guided: list[Guided] = []

    def carry_out(command: Json, _: OnProgress) -> dict[str, Any]:
        if command["do"] == "load":
            loaded.append(load(command))
            return {"release": loaded[0].release}
        if command["do"] == "guided":
            guided.append(guided.pop() if guided else Guided())
            return guided[0].run(loaded[0], command)
        if command["do"] == "batch":
            return asdict(run_batch(loaded[0], command["prompts"], command["max_tokens"]))
        return run(loaded[0], tuple(command["ids"]), command["max_tokens"]).to_json()

    serve_commands(carry_out)


if __name__ == "__main__":
    main()
