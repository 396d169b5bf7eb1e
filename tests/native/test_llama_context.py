"""Entries of one model whose runs are computed together, with real inference on a tiny model.

An answer beside others is the one that it is alone: weights and arithmetic are float32, and the
likeliest token of random weights leads by far more than the rounding that differs with the number
of tokens in a step.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rkserve.core.errors import CallFailed, Misuse
from rkserve.core.run_params import Sampling
from rkserve.native.library_file import llama_cpp_library
from rkserve.native.llama_context import TokenPart
from rkserve.native.llama_cpp import LlamaCppRuntime, open_llama_cpp
from rkserve.native.runtime import (
    EvaluateMode,
    LoadParams,
    RunEnd,
    RunOutcome,
    RunParams,
    SinkAction,
    Step,
    TokenInput,
)
from rkserve.native.shared_steps import MOST_PROMPT
from tests.support.values.tiny_gguf import write_lora, write_tiny

pytestmark = pytest.mark.engine
GREEDY = Sampling(temperature=0, repeat_penalty=1.0)
CONTEXT, ENTRIES, WAIT_S = 256, 4, 120.0
PROMPTS = tuple(tuple(range(at, at + 20 + at % 90)) for at in range(300, 800, 83))
LENGTH = 16
Ids = tuple[int, ...]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny(path)
    return path


def loaded(model: Path, entries: int) -> LlamaCppRuntime:
    runtime = open_llama_cpp(llama_cpp_library())
    params = LoadParams(
        str(model), CONTEXT, CONTEXT, GREEDY, cpus=(0,), n_batch=entries, ignore_eos_token=True
    )
    runtime.load(params)
    return runtime


@pytest.fixture
def runtime(model: Path) -> Iterator[LlamaCppRuntime]:
    runtime = loaded(model, ENTRIES)
    yield runtime
    runtime.destroy()


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[Ids, Ids]:
    """Return the answer to each prompt where nothing else runs."""
    runtime = loaded(model, 1)
    answers = {ids: Run(runtime, ids).made() for ids in PROMPTS}
    runtime.destroy()
    return answers


class Run:
    """A run on a thread of its own. It meets others at the ``barrier`` with its token ``at``."""

    def __init__(
        self,
        runtime: LlamaCppRuntime,
        ids: Ids,
        limit: int = LENGTH,
        *,
        at: int = 0,
        then: SinkAction | None = None,
        barrier: threading.Barrier | None = None,
        **more: Any,
    ) -> None:
        self.ids: list[int] = []
        self.outcome: RunOutcome | None = None
        self.error: Exception | None = None
        self._runtime, self._at, self._then, self._barrier = runtime, at, then, barrier
        params = RunParams((TokenInput(ids),), max_new_tokens=limit, **more)
        self._thread = threading.Thread(target=self._run, args=(params,))
        self._thread.start()

    def _run(self, params: RunParams) -> None:
        try:
            self.outcome = self._runtime.run(params, self._take)
        except (CallFailed, Misuse) as exc:
            self.error = exc

    def _take(self, step: Step) -> SinkAction:
        (piece,) = step
        assert piece is not None
        self.ids.append(piece.token_id)
        if len(self.ids) != self._at:
            return SinkAction.CONTINUE
        if self._barrier is not None:
            self._barrier.wait(WAIT_S)
        if self._then is None:
            self._runtime.abort()
        return self._then or SinkAction.CONTINUE

    def made(self) -> Ids:
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        return tuple(self.ids)


GO_ON, PAUSE = SinkAction.CONTINUE, SinkAction.PAUSE


def test_a_handle_has_as_many_entries_as_it_was_loaded_for(runtime: LlamaCppRuntime) -> None:
    assert len(runtime.entries) == ENTRIES
    assert runtime.entries[0] is runtime
    assert [one.kv_cache_sizes() for one in runtime.entries] == [(0,)] * ENTRIES


def test_a_run_joins_one_that_goes_on_and_ends_before_it(
    runtime: LlamaCppRuntime, alone: dict[Ids, Ids]
) -> None:
    one, other = runtime.entries[:2]
    joined = threading.Barrier(2)
    long = Run(one, PROMPTS[0], at=3, then=GO_ON, barrier=joined)
    # The first has its third token, and goes on once the second has its first.
    short = Run(other, PROMPTS[1], 4, at=1, then=GO_ON, barrier=joined)
    assert short.made() == alone[PROMPTS[1]][:4]
    assert long.made() == alone[PROMPTS[0]]
    assert one.kv_cache_sizes() == (len(PROMPTS[0]) + LENGTH - 1,)
    assert other.kv_cache_sizes() == (len(PROMPTS[1]) + 3,)


def test_each_leaves_by_itself(runtime: LlamaCppRuntime, alone: dict[Ids, Ids]) -> None:
    met = threading.Barrier(ENTRIES)  # all are decoded at the same time
    ways: Sequence[tuple[int, SinkAction | None]] = ((2, None), (3, PAUSE), (1, GO_ON), (2, GO_ON))
    runs = [
        Run(entry, ids, at=at, then=then, barrier=met)
        for entry, ids, (at, then) in zip(runtime.entries, PROMPTS, ways, strict=False)
    ]
    wanted = [alone[ids] for ids in PROMPTS]
    assert [run.made() for run in runs] == [wanted[0][:2], wanted[1][:3], wanted[2], wanted[3]]
    ends = [run.outcome.end for run in runs if run.outcome is not None]
    assert ends == [RunEnd.FINISHED, RunEnd.PAUSED, RunEnd.FINISHED, RunEnd.FINISHED]
    paused = runtime.entries[1]
    beside = Run(runtime, PROMPTS[0])
    rest = Run(paused, wanted[1][2:3], LENGTH - 3, resume=True)
    assert (rest.made(), beside.made()) == (wanted[1][3:], wanted[0])


@pytest.mark.parametrize("seed", range(6))
def test_answers_of_a_random_schedule_are_those_of_runs_alone(
    runtime: LlamaCppRuntime, alone: dict[Ids, Ids], seed: int
) -> None:
    """Each entry has some runs, one after the other, and each of these ends, is aborted, or is
    paused and resumed or drained, at a random token.
    """
    wrong: list[str] = []

    def serve(entry: LlamaCppRuntime, draw: random.Random) -> None:
        for _ in range(6):
            ids, way = draw.choice(PROMPTS), draw.choice(("end", "abort", "resume", "drain"))
            at, limit, whole = draw.randint(1, 6), draw.randint(7, LENGTH), alone[ids]
            then = {"end": GO_ON, "abort": None}.get(way, PAUSE)
            got = Run(entry, ids, limit, at=at, then=then).made()
            expected = whole[:limit] if way == "end" else whole[:at]
            if way == "resume":
                got += Run(entry, got[-1:], limit - at, resume=True).made()
                expected = whole[:limit]
            elif way == "drain":
                entry.drain()
            if got != expected or entry.kv_cache_sizes() != (len(ids) + len(expected) - 1,):
                wrong.append(f"{way} of {len(ids)} ids at {at} to {limit}: {got} not {expected}")

    threads = [
        threading.Thread(target=serve, args=(entry, random.Random(f"{seed} {number}")))
        for number, entry in enumerate(runtime.entries)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert wrong == []


def test_a_prompt_that_joins_is_computed_in_short_parts(
    runtime: LlamaCppRuntime, alone: dict[Ids, Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    context, sizes = runtime._context, list[list[int]]()
    assert context is not None
    assert context.steps is not None

    def noted(parts: Sequence[TokenPart]) -> None:
        sizes.append([len(part.ids) for part in parts])
        context.compute(parts)

    monkeypatch.setattr(context.steps, "_compute", noted)
    met = threading.Barrier(2)
    long = max(PROMPTS, key=len)
    first = Run(runtime, PROMPTS[1], 60, at=3, then=GO_ON, barrier=met)
    second = threading.Thread(target=met.wait, args=(WAIT_S,))
    second.start()
    other = Run(runtime.entries[1], long, 2)
    assert other.made() == alone[long][:2]
    second.join(WAIT_S)
    first.made()
    joint = [step for step in sizes if len(step) > 1]
    assert joint
    assert all(sum(one for one in step if one > 1) <= MOST_PROMPT for step in joint)


def test_a_step_is_in_the_order_of_sequences(
    runtime: LlamaCppRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library computes sequences that follow each other in one pass, and others in several."""
    context, orders = runtime._context, list[list[int]]()
    assert context is not None
    fill = context._fill

    def noted(parts: Sequence[TokenPart]) -> None:
        orders.append([part.sequence.number for part in parts])
        fill(parts)

    monkeypatch.setattr(context, "_fill", noted)
    met = threading.Barrier(ENTRIES)
    runs = [
        Run(entry, ids, at=2, then=GO_ON, barrier=met)
        for entry, ids in zip(reversed(runtime.entries), PROMPTS, strict=False)
    ]
    for run in runs:
        run.made()
    assert max(map(len, orders)) == ENTRIES
    assert all(order == sorted(order) for order in orders)


def test_entries_share_an_adapter_or_wait(runtime: LlamaCppRuntime, tmp_path: Path) -> None:
    write_lora(tmp_path / "a.gguf")
    runtime.load_adapter(str(tmp_path / "a.gguf"), "a")
    alone = Run(runtime, PROMPTS[0], adapter="a").made()
    met = threading.Barrier(2)
    going = Run(runtime, PROMPTS[0], adapter="a", at=2, then=GO_ON, barrier=met)
    same = Run(runtime.entries[1], PROMPTS[0], adapter="a", at=2, then=GO_ON, barrier=met)
    assert (going.made(), same.made()) == (alone, alone)
    going = Run(runtime, PROMPTS[0], adapter="a", at=2, then=GO_ON, barrier=met)
    while not going.ids:
        threading.Event().wait(0.001)
    refused = Run(runtime.entries[1], PROMPTS[0])
    assert refused.made() == ()
    assert isinstance(refused.error, Misuse)
    with pytest.raises(Misuse, match="a run is going on"):
        runtime.entries[1].load_adapter(str(tmp_path / "a.gguf"), "b")
    with pytest.raises(Misuse, match="a run is going on"):
        runtime.entries[1].destroy()
    met.wait(WAIT_S)
    assert going.made() == alone
    base = Run(runtime.entries[1], PROMPTS[0])
    assert base.made() != alone
    # Positions of the adapter, which the other entry has still, are not used without it.
    assert Run(runtime, PROMPTS[0]).made() == base.made()


def test_a_failure_of_the_library_ends_all_runs_and_the_next_begin_anew(
    runtime: LlamaCppRuntime, alone: dict[Ids, Ids], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = runtime._context
    assert context is not None
    lib = context._lib

    class Fails:
        """The library, whose next step fails."""

        def __getattr__(self, name: str) -> Any:
            return (lambda *_: -3) if name == "llama_decode" else getattr(lib, name)

    met = threading.Barrier(3)
    runs = [
        Run(entry, ids, at=2, then=GO_ON, barrier=met)
        for entry, ids in zip(runtime.entries[:2], PROMPTS, strict=False)
    ]
    while any(len(run.ids) < 2 for run in runs):
        threading.Event().wait(0.001)
    monkeypatch.setattr(context, "_lib", Fails())
    met.wait(WAIT_S)
    for run in runs:
        run.made()
        assert isinstance(run.error, CallFailed)
    assert [one.kv_cache_sizes() for one in runtime.entries[:2]] == [(0,), (0,)]
    monkeypatch.setattr(context, "_lib", lib)
    for entry, ids in zip(runtime.entries, PROMPTS, strict=False):
        assert Run(entry, ids).made() == alone[ids]


def test_logits_beside_other_runs_are_those_alone(model: Path, runtime: LlamaCppRuntime) -> None:
    single = loaded(model, 1)
    expected = single.evaluate(TokenInput(PROMPTS[2]), EvaluateMode.LOGITS)
    single.destroy()
    beside = Run(runtime, PROMPTS[0], 60)
    found = runtime.entries[3].evaluate(TokenInput(PROMPTS[2]), EvaluateMode.LOGITS)
    beside.made()
    assert (found.rows, found.columns) == (expected.rows, expected.columns)
    got, alone = (np.frombuffer(one.data, np.float32) for one in (found, expected))
    np.testing.assert_allclose(got, alone, rtol=1e-3, atol=1e-3)
    with pytest.raises(Misuse, match="without a batch"):
        runtime.evaluate(TokenInput(PROMPTS[2]), EvaluateMode.HIDDEN)


def test_the_kv_cache_of_an_entry_is_its_own(runtime: LlamaCppRuntime, tmp_path: Path) -> None:
    one, other = runtime.entries[:2]
    answer = Run(one, PROMPTS[0]).made()
    Run(other, PROMPTS[1]).made()
    size = other.kv_cache_sizes()
    one.clear_kv_cache()
    assert (one.kv_cache_sizes(), other.kv_cache_sizes()) == ((0,), size)
    Run(one, PROMPTS[0], 1, save_cache=str(tmp_path / "cache")).made()
    other.load_prompt_cache(str(tmp_path / "cache"))
    again = Run(other, PROMPTS[0])
    assert again.made() == answer
    assert again.outcome is not None
    assert again.outcome.perf.prefill_tokens == 1
