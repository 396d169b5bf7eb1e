"""Crashes, hangs and kills of a real engine process: the board lives on and says what it was."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from board_bench import text_of, until
from fakes import run_loop
from sim_board import Sim, ask, both_releases, chat, in_loop

from rkserve.errors import (
    EngineDied,
    EngineHung,
    RunFailed,
)
from rkserve.messages import BoardState


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
def test_a_crash_in_the_library_costs_one_answer_and_no_replica(
    sim: Sim, release: str, fault: str, cause: str
) -> None:
    async def main() -> None:
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
            assert fault.startswith("abort") == ("GGML_ASSERT" in after.reason)
            board.check()

    sim.release = release
    run_loop(main())


HANGS = [
    pytest.param("1.2.3", "hang_in_prefill", "the first token", id="in prefill"),
    pytest.param("1.2.3", "hang_at_token:4", "the next token", id="in decode, 1.2.3"),
    pytest.param("1.3.0", "hang_at_token:4", "the next token", id="in decode, 1.3.0"),
    pytest.param("1.3.0", "hang_after_finish", "the next token", id="after FINISH"),
]


@pytest.mark.parametrize(("release", "fault", "missing"), HANGS)
def test_a_hang_in_the_library_is_ended_and_the_board_serves_again(
    sim: Sim, release: str, fault: str, missing: str
) -> None:
    async def main() -> None:
        async with sim.board() as board:
            sim.fault(fault)
            with pytest.raises(EngineHung, match=missing):
                await ask(board, chat("Count to 5"))
            await until(lambda: board.report().state is BoardState.READY)
            assert missing in board.report().reason
            assert text_of(await ask(board, chat("Count to 3"))) == "1, 2, 3."
            assert board.report().engine_starts == 2

    sim.release = release
    run_loop(main())


@both_releases
@pytest.mark.parametrize("fault", ["no_callback", "error_at_token:2"])
def test_a_run_that_returns_without_an_answer_leaves_the_engine_in_place(
    sim: Sim, release: str, fault: str
) -> None:
    async def main() -> None:
        async with sim.board() as board:
            sim.fault(fault)
            with pytest.raises(RunFailed):
                await ask(board, chat("Count to 50"))
            assert text_of(await ask(board, chat("Count to 3"))) == "1, 2, 3."
            assert board.report().engine_starts == 1

    sim.release = release
    run_loop(main())


@in_loop
async def test_the_words_of_an_old_failure_do_not_explain_a_new_one(sim: Sim) -> None:
    async with sim.board(context_len=100_000) as board:
        with pytest.raises(RunFailed, match="E rkllm"):
            await ask(board, chat("far too long " * 4000))
        os.kill(board.report().engine_pid, signal.SIGKILL)
        await until(lambda: board.report().state is BoardState.RECOVERING)
        assert board.report().reason == "the engine process ended (killed by SIGKILL)"


@in_loop
async def test_an_engine_killed_while_idle_is_replaced(sim: Sim) -> None:
    async with sim.board() as board:
        os.kill(board.report().engine_pid, signal.SIGKILL)
        await until(lambda: board.report().state is BoardState.RECOVERING)
        assert "SIGKILL" in board.report().reason
        assert text_of(await ask(board, chat("Count to 3"))) == "1, 2, 3."


@in_loop
async def test_an_engine_killed_in_a_run_fails_that_run_only(sim: Sim) -> None:
    async with sim.board() as board:
        sim.fault("hang_at_token:4")
        running = asyncio.create_task(ask(board, chat("Count to 50")))
        await asyncio.sleep(0.1)
        queued = asyncio.create_task(ask(board, chat("Count to 3")))
        await asyncio.sleep(0.1)
        os.kill(board.report().engine_pid, signal.SIGKILL)
        with pytest.raises(EngineDied, match="SIGKILL"):
            await running
        assert text_of(await queued) == "1, 2, 3."


@in_loop
async def test_a_frozen_engine_is_noticed_without_a_run(sim: Sim) -> None:
    async with sim.board(silence_timeout_s=0.5) as board:
        os.kill(board.report().engine_pid, signal.SIGSTOP)
        await until(lambda: board.report().engine_starts == 2)
        assert "no sign of life" in board.report().reason
        assert text_of(await ask(board, chat("Count to 3"))) == "1, 2, 3."


@in_loop
async def test_a_loop_that_slept_does_not_blame_its_engine(sim: Sim) -> None:
    async with sim.board(silence_timeout_s=0.5) as board:
        time.sleep(1.0)  # noqa: ASYNC251 - blocking the loop is the point
        await asyncio.sleep(0.5)
        assert board.report().engine_starts == 1
