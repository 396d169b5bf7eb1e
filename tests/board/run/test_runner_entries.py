"""Requests that run at the same time, each in an entry of its own: with real inference.

Whatever the others do, an answer is the one that it is alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.board import Board
from rkserve.board.engine.process import EngineProcess
from rkserve.board.engine.protocol import EngineSpec
from rkserve.board.run.settings import BoardSettings
from rkserve.core.board_report import BoardState, GenerationState
from rkserve.core.desired_state import ActivePause, Desired, PauseMode, Scope
from rkserve.core.errors import EngineDied, StateConflict
from rkserve.core.messages import AdapterRef, ControlAction, FinishReason, GenerateRequest, Kv
from rkserve.core.run_params import Sampling, Stepwise
from rkserve.native.library_file import llama_cpp_library
from rkserve.native.runtime import LoadParams
from tests.support.boards.board_bench import Listener, until
from tests.support.values.tiny_gguf import tiny_folder, write_lora

pytestmark = pytest.mark.engine
ENTRIES, CONTEXT, LENGTH = 4, 2048, 24
LONG = 900  # an answer that goes on while others come and go
GREEDY = Sampling(temperature=0, repeat_penalty=1.0)
PROMPTS = tuple(tuple(range(at, at + 20 + at % 90)) for at in range(300, 900, 83))
LIMIT = FinishReason.LENGTH
_S = GenerationState


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def tone(folder: Path) -> AdapterRef:
    file = folder / "adapters" / "tone" / "1" / "adapter.rkllm"
    file.parent.mkdir(parents=True)
    write_lora(file)
    return AdapterRef("tone", "1", hashlib.sha256(file.read_bytes()).hexdigest())


class Bench:
    """A board with a real engine."""

    def __init__(self, folder: Path, place: Path, entries: int = ENTRIES) -> None:
        params = LoadParams(
            str(folder / "model.gguf"), CONTEXT, CONTEXT, GREEDY, cpus=(0,), n_batch=entries
        )
        spec = EngineSpec(
            str(llama_cpp_library()), params, str(place / f"fence{entries}"), cpu=True
        )
        settings = BoardSettings(
            "b",
            "m",
            CONTEXT,
            frozenset(),
            n_batch=entries,
            model_dir=folder,
            tokenizer_file=folder / "tokenizer.json",
        )
        # No token ends an answer, so that each has its whole length.
        settings = replace(settings, eos_ids=frozenset({CONTEXT << 16}))

        async def start(_: Path | None) -> EngineProcess:
            return await EngineProcess.start("b", replace(spec, params=_endless(params)))

        self.board = Board(settings, start)
        self._number = 0

    def ask(self, prompt: int, length: int = LENGTH, **more: Any) -> Listener:
        self._number += 1
        ids = PROMPTS[prompt]
        given = {"sampling": GREEDY, **more}
        asked = GenerateRequest(f"c{self._number}/0", "m", ids, length, **given)
        return Listener(self.board, asked)

    async def answer(self, prompt: int, length: int = LENGTH, **more: Any) -> list[int]:
        listener = self.ask(prompt, length, **more)
        await listener.end()
        return listener.ids

    @property
    def running(self) -> int:
        return self.board.report().running


def _endless(params: LoadParams) -> LoadParams:
    return replace(params, ignore_eos_token=True)


@asynccontextmanager
async def bench_of(folder: Path, place: Path, entries: int = ENTRIES) -> AsyncIterator[Bench]:
    made = Bench(folder, place, entries)
    await made.board.start()
    try:
        yield made
        if made.board.report().state is BoardState.READY:
            await until(lambda: made.running == 0)
    finally:
        await made.board.stop()


async def alone(folder: Path, place: Path, *prompts: int, **more: Any) -> list[list[int]]:
    """Return the answers to prompts where nothing else runs."""
    async with bench_of(folder, place, 1) as bench:
        return [await bench.answer(prompt, **more) for prompt in prompts]


async def test_answers_at_the_same_time_are_those_alone(folder: Path, tmp_path: Path) -> None:
    every = range(6)
    wanted = await alone(folder, tmp_path, *every)
    async with bench_of(folder, tmp_path) as bench:
        listeners = [bench.ask(prompt) for prompt in every]  # two of them wait
        await until(lambda: bench.running == ENTRIES)
        assert [await one.end() for one in listeners] == [(one.text, LIMIT) for one in listeners]
        assert [one.ids for one in listeners] == wanted
        again = bench.ask(5)
        await again.end()
        assert again.finished is not None
        assert again.finished.usage.cached_tokens >= len(PROMPTS[5]) - 1  # its entry was found


async def test_a_short_answer_joins_a_long_one_and_ends_first(folder: Path, tmp_path: Path) -> None:
    long_ids, short_ids = await alone(folder, tmp_path, 0, 1, length=LENGTH)
    async with bench_of(folder, tmp_path) as bench:
        # As long as fits, so that a wait of this process for a core is no end of the long answer.
        long = bench.ask(0, CONTEXT - 2 * len(PROMPTS[0]))
        await until(lambda: len(long.ids) > 2)
        assert await bench.answer(1, 3) == short_ids[:3]
        assert long.finished is None
        await until(lambda: len(long.ids) >= LENGTH)
        await long.hang_up()
        assert long.ids[:LENGTH] == long_ids


async def test_each_has_its_own_way_of_choosing_tokens(folder: Path, tmp_path: Path) -> None:
    (greedy,) = await alone(folder, tmp_path, 0)
    hot = Sampling(temperature=1.5, repeat_penalty=1.0)
    (seeded,) = await alone(folder, tmp_path, 1, sampling=hot, stepwise=Stepwise(seed=4))
    async with bench_of(folder, tmp_path) as bench:
        plain, drawn, other = bench.ask(0), bench.ask(2, sampling=hot), bench.ask(2, sampling=hot)
        steps = bench.ask(1, sampling=hot, stepwise=Stepwise(seed=4))
        for one in (plain, drawn, other, steps):
            await one.end()
        assert (plain.ids, steps.ids) == (greedy, seeded)
        assert drawn.ids != other.ids


async def test_a_paused_answer_leaves_its_entry_and_keeps_its_kv_cache(
    folder: Path, tmp_path: Path
) -> None:
    first, second = await alone(folder, tmp_path, 0, 1, length=LONG)
    async with bench_of(folder, tmp_path) as bench:
        one, other = bench.ask(0, LONG), bench.ask(1, LONG)
        await until(lambda: min(len(one.ids), len(other.ids)) > 3)
        (info,) = await bench.board.control("c1", ControlAction.PAUSE)
        assert (info.state, info.kv) == (_S.PAUSED, Kv.KEPT)
        await other.end()
        assert other.ids == second
        assert one.finished is None
        await bench.board.control("c1", ControlAction.RESUME)
        await one.end()
        assert one.ids == first
        assert one.finished is not None
        # Only the last token and the interrupted step are computed again.
        assert one.finished.timings.prefill_tokens <= len(PROMPTS[0]) + 4


async def test_a_hold_stops_all_and_its_release_continues_them(
    folder: Path, tmp_path: Path
) -> None:
    wanted = await alone(folder, tmp_path, 0, 1, 2, length=LONG)
    async with bench_of(folder, tmp_path) as bench:
        listeners = [bench.ask(prompt, LONG) for prompt in range(3)]
        await until(lambda: all(len(one.ids) > 2 for one in listeners))
        hold = ActivePause("op", Scope(), PauseMode.KEEP)
        held = await bench.board.adopt(Desired(epoch=1, pauses=(hold,)))
        assert (held.stopped, held.kept) == (3, 3)
        given = [len(one.ids) for one in listeners]
        waits = bench.ask(3, 4)
        await until(lambda: waits.accepted)
        assert [len(one.ids) for one in listeners] == given
        await bench.board.adopt(Desired(epoch=2))
        for one in (*listeners, waits):
            await one.end()
        assert [one.ids for one in listeners] == wanted


async def test_an_adapter_waits_until_the_others_have_ended(
    folder: Path, tmp_path: Path, tone: AdapterRef
) -> None:
    (base,) = await alone(folder, tmp_path, 0, length=LONG)
    (toned,) = await alone(folder, tmp_path, 0, adapter=tone)
    async with bench_of(folder, tmp_path) as bench:
        long = bench.ask(0, LONG)
        await until(lambda: len(long.ids) > 1)
        waits, behind = bench.ask(0, adapter=tone), bench.ask(0)
        await until(lambda: waits.accepted and behind.accepted)
        assert bench.running == 1
        for one in (long, waits, behind):
            await one.end()
        assert (long.ids, waits.ids, behind.ids) == (base, toned, base[:LENGTH])
        both = bench.ask(0, adapter=tone), bench.ask(0, adapter=tone)
        for one in both:
            await one.end()
            assert one.ids == toned


async def test_its_speed_is_that_of_all_entries_and_a_clear_empties_all(
    folder: Path, tmp_path: Path
) -> None:
    async with bench_of(folder, tmp_path) as bench:
        for one in [bench.ask(prompt) for prompt in range(ENTRIES)]:
            await one.end()
        assert min(bench.board.kv().entries) >= LENGTH
        cleared = await bench.board.clear_kv(keep_system_prompt=False)
        assert cleared.entries == (0,) * ENTRIES
        speed = await bench.board.measure(0.1, wait=False)
        assert speed.tokens >= ENTRIES * 2
        assert min(speed.decode_tokens_per_s, speed.prefill_tokens_per_s) > 0
        assert len(await bench.answer(0)) == LENGTH


async def test_the_loss_of_the_engine_fails_all_and_the_next_answers(
    folder: Path, tmp_path: Path
) -> None:
    (wanted,) = await alone(folder, tmp_path, 0)
    async with bench_of(folder, tmp_path) as bench:
        listeners = [bench.ask(prompt, LONG) for prompt in range(3)]
        await until(lambda: all(one.ids for one in listeners))
        os.kill(bench.board.report().engine_pid, signal.SIGKILL)
        for one in listeners:
            with pytest.raises(EngineDied):
                await one.end()
        assert await bench.answer(0) == wanted
        assert bench.running == 0


@pytest.mark.parametrize("seed", range(4))
async def test_answers_of_a_random_schedule_are_those_alone(
    folder: Path, tmp_path: Path, seed: int
) -> None:
    """Clients come at random times; each waits for the end, hangs up, aborts, or pauses and
    resumes, at a random token.
    """
    every = range(len(PROMPTS))
    wanted = await alone(folder, tmp_path, *every)
    draw = random.Random(seed)
    ways = [draw.choice(("end", "hang up", "abort", "pause")) for _ in range(16)]

    async def client(bench: Bench, way: str, seed: str) -> None:
        mine = random.Random(seed)
        await asyncio.sleep(mine.random() * 0.3)
        prompt, at = mine.choice(every), mine.randint(1, LENGTH - 1)
        listener = bench.ask(prompt)
        name = listener.asked.request_id.removesuffix("/0")
        await until(lambda: len(listener.ids) >= at or listener.task.done())
        if way == "hang up":
            await listener.hang_up()
        elif way in ("abort", "pause"):
            action = ControlAction.ABORT if way == "abort" else ControlAction.PAUSE
            try:
                await bench.board.control(name, action)
                if way == "pause":
                    await asyncio.sleep(mine.random() * 0.1)
                    await bench.board.control(name, ControlAction.RESUME)
            except StateConflict:
                await listener.end()  # it ended first
        if way != "hang up":
            await listener.end()
        expected = wanted[prompt]
        assert listener.ids == expected[: len(listener.ids)]
        assert len(listener.ids) == LENGTH or way in ("hang up", "abort")

    async with bench_of(folder, tmp_path) as bench:
        clients = [client(bench, way, f"{seed} {n}") for n, way in enumerate(ways)]
        await asyncio.wait_for(asyncio.gather(*clients), 120)
        for prompt in (0, 1):
            assert await bench.answer(prompt) == wanted[prompt]
        assert len(bench.board.kv().entries) == ENTRIES
