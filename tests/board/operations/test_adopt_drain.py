"""A drained board ends what it has, or hands it over; and errands to its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.board_report import BoardState, GenerationState
from rkserve.core.desired_state import ActivePause, PauseMode, Scope, SleepLevel
from rkserve.core.errors import (
    BoardAsleep,
    BoardDrained,
    BoardFailed,
    OperationConflict,
)
from rkserve.core.messages import ControlAction, FinishReason
from tests.support.boards.board_bench import until
from tests.support.boards.fakes import run_loop
from tests.support.boards.holding import Governed, Oracle, governed, in_turn

pytestmark = pytest.mark.slow

PACED = 0.2  # ten times slower than ``Governed.pace``


def play(
    place: Path, body: Callable[[Governed], Coroutine[Any, Any, None]], *args: Any, **extra: Any
) -> None:
    async def main() -> None:
        async with governed(place, *args, **extra) as told:
            await body(told)

    run_loop(main(), 120.0)


def idle(told: Governed) -> bool:
    report = told.board.report()
    return (report.running, report.queued, report.paused) == (0, 0, 0)


async def drain(told: Governed, *, move: bool = False) -> None:
    mine = (told.board.board_id,)
    await told.tell(drained=mine, moved=mine if move else ())


@in_turn
def test_requests_of_a_drained_board_run_to_their_end_and_new_ones_are_refused(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed) -> None:
        clients = [told.ask(f"The tide {n}", 30) for n in range(4)]
        await told.said(clients[0], 3)
        await drain(told)
        assert told.board.report().drained
        late = told.ask()
        with pytest.raises(BoardDrained):
            await late.end()
        told.pace()
        for client in clients:
            assert (await client.end())[1] in (FinishReason.LENGTH, FinishReason.STOP)
        await until(lambda: idle(told))
        await told.tell(drained=())
        await told.ask(max_tokens=4).end()
        assert not told.board.report().drained

    play(tmp_path, body, release, n_batch)


@pytest.mark.promise("Single boards", "`move`: other boards continue what runs, and lose nothing")
@in_turn
@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
def test_requests_are_handed_over_wherever_they_are_with_all_text_so_far(
    tmp_path: Path, release: str, n_batch: int, native: bool
) -> None:
    async def body(told: Governed) -> None:
        oracle = Oracle()
        clients = [told.ask(f"The tide {n}", 200, native_pause=native) for n in range(5)]
        await told.said(clients[0], 5)
        paused = clients[0].asked.request_id.partition("/")[0]
        done = await told.board.control(paused, ControlAction.PAUSE)
        assert done[0].state is GenerationState.PAUSED
        failed = told.board.report().failed
        await drain(told, move=True)
        for client in clients:
            with pytest.raises(BoardDrained):
                await client.end()
            if client.ids:
                assert client.ids == oracle.says(client.asked.prompt_ids, len(client.ids))
        assert len(clients[0].ids) >= 5
        await until(lambda: idle(told))
        report = told.board.report()
        assert (report.state, report.failed) == (BoardState.READY, failed)
        await told.tell(drained=(), moved=())
        told.pace()
        await told.ask(max_tokens=4).end()

    play(tmp_path, body, release, n_batch)


def test_a_drain_under_a_pause_hands_over_what_the_pause_holds(tmp_path: Path) -> None:
    async def body(told: Governed) -> None:
        clients = [told.ask(f"The tide {n}", 200) for n in range(2)]
        await told.said(clients[0], 5)
        await told.hold()
        before = [list(client.ids) for client in clients]
        await drain(told, move=True)
        for client, ids in zip(clients, before, strict=True):
            with pytest.raises(BoardDrained):
                await client.end()
            assert client.ids == ids  # a pause is in force: nothing comes after it
        assert told.board.report().hold == "keep"
        await until(lambda: idle(told))

    play(tmp_path, body)


@in_turn
def test_an_engine_is_restarted_under_running_requests_which_go_on(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed) -> None:
        oracle = Oracle()
        clients = [told.ask(f"The tide {n}", 60) for n in range(4)]
        await told.said(clients[0], 5)
        before = told.board.report()
        restarting = asyncio.create_task(told.board.restart("a test"))
        await until(lambda: told.board.report().engine_pid != before.engine_pid)
        told.pace()
        await restarting
        for client in clients:
            assert (await client.end())[1] in (FinishReason.LENGTH, FinishReason.STOP)
            oracle.check(client, told.versions)
        report = told.board.report()
        assert report.engine_renewals == before.engine_renewals + 1
        assert (report.state, report.crashes) == (BoardState.READY, ())

    play(tmp_path, body, release, n_batch, load_patience_s=0.05)


def test_a_restart_ends_a_quarantine(tmp_path: Path) -> None:
    async def body(told: Governed) -> None:
        told.kill()
        await until(lambda: told.board.report().state is BoardState.QUARANTINED)
        with pytest.raises(BoardFailed):
            await told.ask().end()
        await told.board.restart("a test")
        assert told.board.report().state is BoardState.READY
        await told.ask(max_tokens=4).end()

    play(tmp_path, body, crash_limit=1, quarantine_s=3600.0)


@in_turn
def test_a_board_is_measured_while_it_is_idle_or_after_its_present_run(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed) -> None:
        client = told.ask(max_tokens=30)
        await told.said(client, 3)
        with pytest.raises(OperationConflict, match="has 1 request;"):
            await told.board.measure(0.1, wait=False)
        waiting = asyncio.create_task(told.board.measure(0.1, wait=True))
        told.pace()
        found = await waiting
        await client.end()
        assert found.decode_tokens_per_s > 0
        assert found.prefill_tokens_per_s > 0
        assert found.tokens >= 8 * n_batch
        told.sim.pace(PACED)
        slow = await told.board.measure(0.1, wait=False)
        assert slow.decode_tokens_per_s < found.decode_tokens_per_s
        assert idle(told)
        oracle, after = Oracle(), told.ask(max_tokens=8)
        await after.end()
        oracle.check(after, told.versions)

    play(tmp_path, body, release, n_batch)


def test_a_board_that_is_paused_or_asleep_is_not_measured(tmp_path: Path) -> None:
    async def body(told: Governed) -> None:
        await told.hold()
        with pytest.raises(OperationConflict, match="is paused"):
            await told.board.measure(0.1, wait=True)
        asleep = ActivePause("op", Scope(), PauseMode.KEEP, level=SleepLevel.UNLOADED)
        await told.tell(pauses=(asleep,))
        with pytest.raises(BoardAsleep):
            await told.board.measure(0.1, wait=True)

    play(tmp_path, body)
