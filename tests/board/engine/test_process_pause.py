"""Pausing, cutting and resuming in a real engine process over the simulated runtime."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.engine.process import EngineProcess
from rkserve.board.engine.protocol import RunEnded
from rkserve.core.errors import CallFailed, EngineDied, Misuse
from rkserve.core.run_params import Sampling
from rkserve.native.runtime import RunEnd
from tests.support.boards.engine_bench import Recorder, command, interrupted, paused_at
from tests.support.sim.sim_board import Sim, both_releases, chat

# A token takes 7 ms: an answer of 3000 lasts longer than any word needs to reach the engine.
PACE = 0.1
SPEECH = chat("Repeat after me: 1 Grüße, 2 你好, 3 🍵, 4 and so on!")
COUNT = chat("Count to 16")
LONG = chat("Write 3000 tokens")
ROUNDS = 20  # the engine may take a pause in a token late; within so many it hits every one
GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def sim(tmp_path: Path) -> Sim:
    """Return a place for one simulated board."""
    return Sim(tmp_path)


class Telling:
    """One answer, over all the runs that it took."""

    def __init__(self, sim: Sim, engine: EngineProcess, prompt: tuple[int, ...]) -> None:
        self.sim = sim
        self.engine = engine
        self.ids: list[int] = []
        self.data = b""
        self.ended: RunEnded | None = None
        self._next = prompt
        self._runs = 0

    async def go_on(
        self, pause_at: int | None = None, cut: tuple[tuple[int, int], ...] = ()
    ) -> RunEnded:
        """Start, or go on; ask for a pause at that token of the run, 0 being its prefill."""
        self._runs += 1
        asked = command(self._next, 1000 + self._runs, resume=self._runs > 1, cut=cut)
        got = Recorder()
        if pause_at is None:
            self.ended = await self.engine.run(asked, got)
        else:
            self.sim.gate(f"token:{pause_at}" if pause_at else "prefill")
            running = self.engine.run(asked, got)
            pause = partial(self.engine.pause, asked.run_id)
            self.ended = await interrupted(self.sim, running, pause)
        self.ids += got.ids
        self.data += got.data
        self._next = tuple(self.ids[-1:])
        return self.ended


async def whole(sim: Sim, engine: EngineProcess, prompt: tuple[int, ...]) -> Telling:
    """Return the answer as it is without any interruption."""
    told = Telling(sim, engine, prompt)
    assert (await told.go_on()).end is RunEnd.FINISHED
    return told


# -- nothing is lost --------------------------------------------------------------------------


@both_releases
async def test_an_answer_that_is_paused_at_every_token_is_byte_for_byte_the_same(
    sim: Sim, release: str
) -> None:
    sim.release = release
    async with sim.engine() as engine:
        got = Recorder()
        await engine.run(command(SPEECH), got)
        assert got.data.decode() == "1 Grüße, 2 你好, 3 🍵, 4 and so on!"
        # Within a character the library holds text back, and cannot pause.
        wanted = set(range(1, len(got.ids) + 1)) - got.held_back
        assert len(wanted) >= 20
        seen: set[int] = set()
        for _ in range(ROUNDS):
            seen |= await _step_by_step(sim, engine, got)
            if seen == wanted:
                break
        assert seen == wanted


async def _step_by_step(sim: Sim, engine: EngineProcess, plain: Recorder) -> set[int]:
    """Tell it with a pause at every token that the engine allows; return at which ones."""
    told, places = Telling(sim, engine, SPEECH), set()
    while told.ids[-1:] != plain.ids[-1:]:
        before = len(told.ids)
        ended = await told.go_on(pause_at=0)
        if ended.end is RunEnd.FINISHED:  # there was no token left when the engine heard of it
            break
        assert ended.end is RunEnd.PAUSED
        assert len(told.ids) > before
        # The last token was given out before anything was computed with it.
        assert ended.kv_positions == (len(SPEECH) + len(told.ids) - 1,)
        places.add(len(told.ids))
    else:
        await engine.call("drain")
    assert (told.ids, told.data) == (plain.ids, plain.data)
    return places


@both_releases
async def test_an_answer_that_is_paused_once_is_byte_for_byte_the_same_wherever_that_is(
    sim: Sim, release: str
) -> None:
    sim.release = release
    async with sim.engine() as engine:
        plain = await whole(sim, engine, SPEECH)
        for at in range(20):
            told = Telling(sim, engine, SPEECH)
            assert (await told.go_on(pause_at=at)).end is RunEnd.PAUSED, at
            assert at <= len(told.ids) < len(plain.ids)
            assert (await told.go_on()).end is RunEnd.FINISHED
            assert (told.ids, told.data) == (plain.ids, plain.data), at


@both_releases
async def test_a_cut_goes_on_as_if_what_was_cut_had_never_been_said(sim: Sim, release: str) -> None:
    sim.release = release
    params = replace(sim.spec().params, sampling=GREEDY)
    async with sim.engine(params=params) as engine:
        told = Telling(sim, engine, COUNT)
        ended = await told.go_on(pause_at=9)
        assert ended.end is RunEnd.PAUSED
        context, said = [*COUNT, *told.ids[:-1]], len(told.ids)
        assert ended.kv_positions == (len(context),)
        first, second = (len(COUNT) + 1, len(COUNT) + 3), (len(COUNT) + 2, len(COUNT) + 5)
        for start, end in (first, second):  # the second counts what the first has left
            del context[start:end]
        await told.go_on(cut=(first, second))
        pending = told.ids[said - 1]
        fresh = await whole(sim, engine, (*context, pending))
        assert told.ids[said:] == fresh.ids
        assert fresh.ids != (await whole(sim, engine, (*COUNT, *told.ids[:said]))).ids


# -- what may happen to a pause ---------------------------------------------------------------


@both_releases
@pytest.mark.parametrize("abort_first", [False, True], ids=["pause, abort", "abort, pause"])
async def test_an_abort_while_a_pause_is_wanted_ends_the_run(
    sim: Sim, release: str, abort_first: bool
) -> None:
    sim.release = release
    sim.pace(PACE)
    async with sim.engine() as engine:
        interrupts: list[Callable[[int], None]] = [engine.pause, engine.abort]
        for run_id in range(1, 11):

            def both(n: int, run_id: int = run_id) -> None:
                for interrupt in interrupts[:: -1 if abort_first else 1]:
                    if n == run_id:
                        interrupt(run_id)

            got = Recorder(both)
            ended = await engine.run(command(LONG, run_id), got)
            if ended.end is RunEnd.PAUSED:
                # The pause was granted between the two, and the abort came too late for it.
                assert not abort_first
                await engine.call("drain")
            else:
                assert ended.end is RunEnd.FINISHED
            assert len(got.ids) < 3000
        sim.pace(0)
        got = Recorder()
        await engine.run(command(chat("Count to 3"), 99), got)
        assert got.data == b"1, 2, 3."


async def test_a_resumption_that_is_aborted_before_it_begins_leaves_the_pause_in_place(
    sim: Sim,
) -> None:
    async with sim.engine() as engine:
        plain = await whole(sim, engine, COUNT)
        got, _ = await paused_at(sim, engine, command(COUNT, 2001), 5)
        gate = engine.call("kv_sizes")  # the abort overtakes what waits behind a call
        resumed = Recorder()
        asked = command(tuple(got.ids[-1:]), 2002, resume=True)
        engine.abort(2002)
        assert (await engine.run(asked, resumed)).end is None
        assert (await gate, resumed.ids) == ((len(COUNT) + len(got.ids) - 1,), [])
        asked = command(tuple(got.ids[-1:]), 2003, resume=True)
        assert (await engine.run(asked, resumed)).end is RunEnd.FINISHED
        assert got.data + resumed.data == plain.data


@pytest.mark.parametrize(
    "cut",
    [
        pytest.param((5, 5000), id="beyond the end"),
        pytest.param((9, 5), id="backwards"),
        pytest.param((-3, 5), id="before the beginning"),
    ],
)
async def test_a_cut_that_is_refused_leaves_the_pause_in_place(
    sim: Sim, cut: tuple[int, int]
) -> None:
    async with sim.engine() as engine:
        plain = await whole(sim, engine, COUNT)
        got, paused = await paused_at(sim, engine, command(COUNT, 2001), 5)
        resumed = Recorder()
        asked = command(tuple(got.ids[-1:]), 2002, resume=True, cut=(cut,))
        ended = await engine.run(asked, resumed)
        assert (ended.end, resumed.ids) == (RunEnd.FAILED, [])
        assert ended.error is not None
        assert str(abs(cut[0])) in ended.error
        assert await engine.call("kv_sizes") == paused.kv_positions
        asked = command(tuple(got.ids[-1:]), 2003, resume=True)
        assert (await engine.run(asked, resumed)).end is RunEnd.FINISHED
        assert got.data + resumed.data == plain.data


async def test_a_run_that_does_not_resume_is_refused_while_the_handle_is_paused(sim: Sim) -> None:
    async with sim.engine() as engine:
        await paused_at(sim, engine, command(COUNT, 1), 3)
        ended = await engine.run(command(COUNT, 2), Recorder())
        assert (ended.end, ended.error) == (
            RunEnd.FAILED,
            "'run' is not allowed while the handle is paused",
        )
        for method in ("clear_kv", "load_adapter", "release_cache"):
            adapter: dict[str, Any] = {"path": "/a", "name": "n"}
            args = adapter if method == "load_adapter" else {}
            with pytest.raises(Misuse, match="paused"):
                await engine.call(method, **args)


@both_releases
async def test_a_paused_run_is_drained_and_the_next_conversation_knows_nothing_of_it(
    sim: Sim, release: str
) -> None:
    sim.release = release
    async with sim.engine() as engine:
        for run_id in (1, 2, 3):
            await paused_at(sim, engine, command(COUNT, run_id), 3)
            assert await engine.call("drain") is None
            await engine.call("clear_kv")
            assert await engine.call("kv_sizes") == (0,)
        with pytest.raises(Misuse, match="idle"):
            await engine.call("drain")
        got = Recorder()
        ended = await engine.run(command(chat("Count to 3"), 9), got)
        assert got.data == b"1, 2, 3."
        assert ended.perf.prefill_tokens == len(chat("Count to 3"))


# -- the end of a paused engine ---------------------------------------------------------------


@both_releases
async def test_a_paused_engine_stops_in_order(sim: Sim, release: str) -> None:
    sim.release = release
    async with sim.engine() as engine:
        await paused_at(sim, engine, command(COUNT), 3)
        await engine.stop()
        assert engine.died.result() == "the engine process ended (exit code 0)"


async def test_an_engine_killed_while_paused_says_so_to_whoever_asks_and_frees_the_npu(
    sim: Sim,
) -> None:
    async with sim.engine() as engine:
        got, _ = await paused_at(sim, engine, command(COUNT), 3)
        os.kill(engine.pid, signal.SIGSTOP)
        waiting = engine.call("drain")
        resumed = engine.run(command(tuple(got.ids[-1:]), 2, resume=True), Recorder())
        os.kill(engine.pid, signal.SIGKILL)
        assert "SIGKILL" in await engine.died
        late = engine.call("kv_sizes")
        for unanswered in (waiting, resumed, late):
            with pytest.raises(EngineDied, match="SIGKILL"):
                await unanswered
        engine.pause(2)  # both are lost with it, and raise nothing
        engine.abort(2)
        with (sim.place / "npu.fence").open() as fence:
            fcntl.flock(fence, fcntl.LOCK_EX | fcntl.LOCK_NB)


# -- calls ------------------------------------------------------------------------------------


async def test_a_call_waits_for_the_run_before_it(sim: Sim) -> None:
    async with sim.engine() as engine:
        got = Recorder()
        sim.gate("token:1")
        running = engine.run(command(COUNT, keep_history=True), got)
        await sim.at_gate()
        asked = engine.call("kv_sizes")
        _, late = await asyncio.wait({running, asked}, timeout=0.2)
        assert late == {running, asked}
        sim.pace(0)
        sizes = await asked
        assert running.done()
        assert sizes == (await running).kv_positions == (len(COUNT) + len(got.ids) - 1,)


async def test_a_call_that_the_library_refuses_is_explained_in_its_own_words(sim: Sim) -> None:
    broken = sim.place / "broken.rkllm"
    broken.write_bytes(b"no adapter at all")
    async with sim.engine() as engine:
        with pytest.raises(CallFailed, match=r"rkllm_load_lora returned -1 .*logged: E rk") as no:
            await engine.call("load_adapter", path=str(broken), name="broken")
        assert (no.value.function, no.value.return_code) == ("rkllm_load_lora", -1)
        with pytest.raises(Misuse, match="known are drain"):
            await engine.call("destroy")
        got = Recorder()
        await engine.run(command(chat("Count to 3")), got)
        assert got.data == b"1, 2, 3."
