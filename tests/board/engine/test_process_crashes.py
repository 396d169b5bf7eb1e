"""Crashes, hangs and kills of a real engine process, and clients that leave: the board lives on."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import aclosing
from pathlib import Path

import pytest

from rkserve.board.board import Board
from rkserve.board.rules.hang_limits import RunTimeouts
from rkserve.core.board_report import BoardState, TrialVerdict
from rkserve.core.errors import (
    EngineDied,
    EngineHung,
    RunFailed,
)
from rkserve.core.messages import Delta, Finished, GenerateRequest
from tests.support.boards.board_bench import text_of, until
from tests.support.boards.fakes import run_loop
from tests.support.sim.sim_board import FOLDER, Sim, ask, both_releases, chat

# Longer than a busy machine keeps the engine's heartbeat from being sent.
SILENCE_S = 2.0
FREED_WITHIN_S = 30.0
# As long, where the library really hangs.
PATIENCE = RunTimeouts(first_token_s=2.0, token_s=2.0, abort_s=0.5)


@pytest.fixture
def sim(tmp_path: Path) -> Sim:
    """Return a place for one simulated board."""
    return Sim(tmp_path)


# -- crashes and hangs ------------------------------------------------------------------------


@both_releases
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        pytest.param("segv_at_token:5", "SIGSEGV", id="SIGSEGV"),
        pytest.param("abort_at_token:3", "SIGABRT: .*GGML_ASSERT", id="GGML_ASSERT"),
    ],
)
async def test_a_crash_in_the_library_costs_one_answer_and_no_replica(
    sim: Sim, release: str, fault: str, cause: str
) -> None:
    sim.release = release
    async with sim.board() as board:
        before = board.report()
        sim.fault(fault)
        with pytest.raises(EngineDied, match=cause):
            await ask(board, chat("Count to 50"))
        assert text_of(await ask(board, chat("Count to 3"))) == "1, 2, 3."
        after = board.report()
        assert after.pid == before.pid == os.getpid()
        assert after.engine_pid != before.engine_pid
        assert (after.state, after.engine_starts) == (BoardState.READY, 2)
        assert fault.startswith("abort") == ("GGML_ASSERT" in after.last_recovery)
        board.check()


HANGS = [
    pytest.param("1.2.3", "hang_in_prefill", "the first token", id="in prefill"),
    pytest.param("1.2.3", "hang_at_token:4", "the next token", id="in decode, 1.2.3"),
    pytest.param("1.3.0", "hang_at_token:4", "the next token", id="in decode, 1.3.0"),
    pytest.param("1.3.0", "hang_after_finish", "the next token", id="after FINISH"),
]


@pytest.mark.parametrize(("release", "fault", "missing"), HANGS)
async def test_a_hang_in_the_library_is_ended_and_the_board_serves_again(
    sim: Sim, release: str, fault: str, missing: str
) -> None:
    sim.release = release
    async with sim.board(patience=PATIENCE) as board:
        sim.fault(fault)
        with pytest.raises(EngineHung, match=missing):
            await ask(board, chat("Count to 5"))
        await until(lambda: board.report().state is BoardState.READY)
        assert missing in board.report().last_recovery
        assert text_of(await ask(board, chat("Count to 3"))) == "1, 2, 3."
        assert board.report().engine_starts == 2


@both_releases
@pytest.mark.parametrize("fault", ["no_callback", "error_at_token:2"])
async def test_a_run_that_returns_without_an_answer_leaves_the_engine_in_place(
    sim: Sim, release: str, fault: str
) -> None:
    sim.release = release
    async with sim.board() as board:
        sim.fault(fault)
        with pytest.raises(RunFailed):
            await ask(board, chat("Count to 50"))
        assert text_of(await ask(board, chat("Count to 3"))) == "1, 2, 3."
        assert board.report().engine_starts == 1


async def test_the_words_of_an_old_failure_do_not_explain_a_new_one(sim: Sim) -> None:
    async with sim.board(context_len=100_000) as board:
        with pytest.raises(RunFailed, match="E rkllm"):
            await ask(board, chat("far too long " * 4000))
        os.kill(board.report().engine_pid, signal.SIGKILL)
        await until(lambda: board.report().state is BoardState.RECOVERING)
        assert board.report().reason == "the engine process ended (killed by SIGKILL)"


async def test_an_engine_killed_while_idle_is_replaced(sim: Sim) -> None:
    async with sim.board() as board:
        os.kill(board.report().engine_pid, signal.SIGKILL)
        await until(lambda: board.report().state is BoardState.RECOVERING)
        assert "SIGKILL" in board.report().reason
        assert text_of(await ask(board, chat("Count to 3"))) == "1, 2, 3."


async def test_an_engine_killed_in_a_run_fails_that_run_only(sim: Sim) -> None:
    async with sim.board() as board:
        sim.fault("hang_at_token:4")
        running = asyncio.create_task(ask(board, chat("Count to 50")))
        await until((sim.place / "control.fired").exists)
        queued = asyncio.create_task(ask(board, chat("Count to 3")))
        await until(lambda: board.report().queued == 1)
        os.kill(board.report().engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="SIGKILL"):
            await running
        assert text_of(await queued) == "1, 2, 3."


async def test_a_frozen_engine_is_noticed_without_a_run(sim: Sim) -> None:
    async with sim.board(silence_timeout_s=SILENCE_S) as board:
        os.kill(board.report().engine_pid, signal.SIGSTOP)
        await until(lambda: board.report().engine_starts >= 2)
        assert "no sign of life" in board.report().last_recovery
        assert text_of(await ask(board, chat("Count to 3"))) == "1, 2, 3."


async def test_a_loop_that_slept_does_not_blame_its_engine(sim: Sim) -> None:
    async with sim.board(silence_timeout_s=SILENCE_S) as board:
        time.sleep(1.3 * SILENCE_S)  # noqa: ASYNC251 - blocking the loop is the point
        await asyncio.sleep(0.5)  # both looks, of which the first finds nothing read yet
        assert board.report().engine_starts == 1


# -- throttling -------------------------------------------------------------------------------

THROTTLED_S = 300.0
STOPPED_S = 2.0


@pytest.mark.long
def test_throttling_and_stops_in_real_time_end_no_engine(sim: Sim) -> None:
    """A third of the speed for half of the time, and every 12 s the engine stands still."""

    async def main() -> None:
        sim.environ = {"RKSIM_TIME_SCALE": "1"}
        async with sim.board(patience=RunTimeouts()) as board:
            until_s, answers = time.monotonic() + THROTTLED_S, 0

            async def disturb() -> None:
                while True:
                    for scale in (1.0, 3.0):
                        sim.pace(scale)
                        for _ in range(2):
                            await asyncio.sleep(10.0)
                            pid = board.report().engine_pid
                            os.kill(pid, signal.SIGSTOP)
                            await asyncio.sleep(STOPPED_S)
                            os.kill(pid, signal.SIGCONT)

            disturbing = asyncio.create_task(disturb())
            while time.monotonic() < until_s:
                assert text_of(await ask(board, chat(f"Count to {5 + answers % 20}")))
                answers += 1
            disturbing.cancel()
            await asyncio.wait({disturbing})
            assert not disturbing.done() or disturbing.cancelled()
            report = board.report()
            assert (report.engine_starts, report.crashes, report.failed) == (1, (), 0)
            print(f"{answers} answers in {THROTTLED_S:g} s")  # noqa: T201 - for the docs

    run_loop(main(), 2 * THROTTLED_S)


# -- adapters ---------------------------------------------------------------------------------


@both_releases
@pytest.mark.parametrize(
    ("fault", "verdict", "reason"),
    [
        ("lora_segv", TrialVerdict.CRASHED, "SIGSEGV"),
        ("lora_fail", TrialVerdict.REFUSED, "a fault that was asked for"),
        ("lora_hang", TrialVerdict.HUNG, "did not return"),
    ],
)
async def test_an_adapter_that_the_library_cannot_stand_costs_no_engine_that_serves(
    sim: Sim, release: str, fault: str, verdict: TrialVerdict, reason: str
) -> None:
    sim.release = release
    ref = sim.adapter("pirate")
    patience = RunTimeouts(first_token_s=30.0, token_s=1.0, abort_s=0.5)
    async with sim.board(patience=patience, adapter_load_s=0.5) as board:
        served = board.report().engine_pid
        sim._order(f"fault={fault}", "sticky=1", "time_scale=0")  # any load of an adapter meets it
        found = await board.try_adapter(ref, chat("Count to 3"), 4)
        assert found.verdict is verdict
        assert reason in found.reason
        assert text_of(await ask(board, chat("Count to 3"))) == "1, 2, 3."
        report = board.report()
        assert (report.state, report.crashes, report.adapters) == (BoardState.READY, (), ())
        assert (report.engine_starts, report.engine_pid != served) == (2, True)
        sim.pace(0)
        again = await board.try_adapter(ref, chat("Count to 3"), 4)
        assert again.passed
        assert board.report().adapters == (ref.key,)


# -- hang-ups ---------------------------------------------------------------------------------


async def _leave(board: Board, after_deltas: int, may: asyncio.Event) -> float:
    """Ask for a long answer, close it in mid-stream, and return when that was."""
    request = GenerateRequest("leaves", FOLDER.id, chat("Write 2000 tokens"), 2000)
    async with aclosing(board.generate(request)) as events:
        async for event in events:
            after_deltas -= isinstance(event, Delta)
            if after_deltas <= 0 and may.is_set():
                break
    return time.monotonic()


@both_releases
async def test_a_client_that_leaves_in_mid_stream_makes_room_for_the_next_run(
    sim: Sim, release: str
) -> None:
    """At a real board's speed; what is left of the answer would take two minutes."""

    sim.release, sim.environ = release, {"RKSIM_TIME_SCALE": "1"}
    async with sim.board() as board:
        may = asyncio.Event()
        leaving = asyncio.create_task(_leave(board, after_deltas=4, may=may))
        await until(lambda: board.report().running == 1)
        waiting = asyncio.create_task(ask(board, chat("Count to 2")))
        await until(lambda: board.report().queued == 1)
        may.set()
        left_s = await leaving
        await until(lambda: board.report().queued == 0)
        freed_s = time.monotonic() - left_s
        events = await waiting
        finished, report = events[-1], board.report()
        assert isinstance(finished, Finished)
        assert text_of(events) == "1, 2."
        assert finished.timings.prefill_tokens == len(chat("Count to 2"))
        assert (report.aborted, report.failed, report.engine_starts) == (1, 0, 1)
        print(f"{release}: the next run began {freed_s * 1e3:.0f} ms after the hang-up")  # noqa: T201
        assert freed_s < FREED_WITHIN_S
