"""Drains end when boards are empty and outlive everything else; errands go to one board, once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from rkserve.control.calls import OperationKind
from rkserve.control.operations import OperationOutcome, OperationState, Phase, ResultStatus
from rkserve.core.desired_state import Desired
from rkserve.core.errors import BoardNotFound, EngineDied, OperationConflict
from tests.support.boards.fake_boards import eventually
from tests.support.cluster.fake_cluster import MODEL, Control, controlled

pytestmark = pytest.mark.virtual_time

K: TypeAlias = OperationKind
S: TypeAlias = OperationState


async def drain(it: Control, *boards: str, **params: Any) -> OperationOutcome:
    return await it.call(K.DRAIN, boards=boards, **params)


async def undrain(it: Control, *boards: str, **params: Any) -> OperationOutcome:
    return await it.call(K.UNDRAIN, boards=boards, **params)


def drained(it: Control) -> list[str]:
    """The boards that are drained by the ledger."""
    return [*it.desired.drained]


def told(it: Control) -> list[str]:
    """The boards that know that they are drained."""
    targets = {name: board.target for name, board in it.cluster.boards.items()}
    return [name for name, target in targets.items() if target is not None and target.drained]


@pytest.mark.promise("Single boards", "It is answered when the boards have no requests left")
async def test_a_drain_is_answered_when_the_board_has_no_requests_left(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["a"].jobs = 2
        going = asyncio.create_task(drain(it, "a"))
        await eventually(lambda: told(it) == ["a"])
        await it.heard()
        assert not going.done()
        [running] = it.it._state.running
        assert running.phase is Phase.DRAINING
        it.cluster["a"].jobs = 0
        done = await going
        assert (done.status, done.operation.state, done.applied) == (200, S.SUCCEEDED, True)
        assert drained(it) == ["a"]
        assert it.desired.moved == ()
        assert it.follows


@pytest.mark.promise("Single boards", "After the time limit it is a 207, and the drain stays")
async def test_what_is_not_done_in_time_stays_drained_and_succeeds_later(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["a"].jobs = 1
        done = await drain(it, "a", "b", timeout_s=0.2)
        assert (done.status, done.operation.state) == (207, S.PARTIAL)
        result = done.operation.results["a"]
        assert result.message == "It still has 1 request; it takes no new ones."
        assert (result.error, result.status) == ("board_busy", ResultStatus.FAILED)
        assert done.operation.results["b"].good
        assert drained(it) == ["a", "b"]
        await it.heard()
        assert it.it.operation(done.operation.id).state is S.PARTIAL
        it.cluster["a"].jobs = 0
        await eventually(lambda: it.it.operation(done.operation.id).state is S.SUCCEEDED)


async def test_requests_are_moved_at_once_where_another_board_takes_them(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["a"].jobs = 3
        await it.heard()
        done = await drain(it, "a", mode="move")
        assert done.operation.state is S.SUCCEEDED
        assert (it.desired.drained, it.desired.moved) == (("a",), ("a",))
        before = it.desired
        with pytest.raises(OperationConflict, match="No other board serves"):
            await drain(it, "b", "c", mode="move")
        assert it.desired == before
        [line, *_] = it.it.audit(10)
        assert (line.kind, line.outcome, line.status) == ("drain", "operation_conflict", 409)


@pytest.mark.promise("Single boards", "Drained stays drained over restarts")
async def test_a_drain_outlives_the_coordinator_and_the_replica(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        await drain(it, "a")
        it.cluster["a"].restart()
        await it.again()
        await eventually(lambda: it.follows)
        assert told(it) == ["a"]
        assert b"rkserve_boards_drained 1.0" in it.it.metrics()
        done = await undrain(it, "a")
        assert (done.operation.state, done.applied) == (S.SUCCEEDED, True)
        assert (told(it), it.desired.drained) == ([], ())
        assert not (await undrain(it, "a")).applied


async def test_a_coordinator_that_ends_during_a_drain_leaves_the_board_drained(
    tmp_path: Path,
) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["a"].jobs = 1
        going = asyncio.create_task(drain(it, "a"))
        await eventually(lambda: told(it) == ["a"])
        await it.close()
        going.cancel()
        await it.open()
        [one] = [one for one in it.it.operations(5) if one.kind is K.DRAIN]
        assert one.state is S.PARTIAL
        it.cluster["a"].jobs = 0
        await eventually(lambda: it.it.operation(one.id).state is S.SUCCEEDED)
        assert drained(it) == ["a"]


async def test_a_drain_that_is_ended_before_the_board_is_empty_is_undone(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["a"].jobs = 1
        going = asyncio.create_task(drain(it, "a"))
        await eventually(lambda: told(it) == ["a"])
        assert (await undrain(it, "a")).operation.state is S.SUCCEEDED
        done = await going
        assert (done.operation.state, done.status) == (S.UNDONE, 409)
        assert drained(it) == []


async def test_all_boards_of_a_model_are_undrained_together_and_those_that_have_left_too(
    tmp_path: Path,
) -> None:
    async with controlled(tmp_path) as it:
        await it.call(K.DRAIN, models=[MODEL])
        assert drained(it) == ["a", "b", "c"]
        it.cluster["c"].dead = True
        await eventually(lambda: len(it.it._roster.addresses()) == 2)
        await it.call(K.UNDRAIN, models=[MODEL])
        assert drained(it) == ["c"]
        await undrain(it)
        assert drained(it) == []


@pytest.mark.promise("Single boards", "A drained board follows pauses, sleeps and new versions")
async def test_a_drained_board_is_paused_and_gets_new_versions(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        await drain(it, "a")
        assert (await it.pause()).status == 200
        assert it.held == ["a", "b", "c"]
        assert (await it.resume()).status == 200
        await it.stage(it.store.add("v1", b"one"))
        assert (await it.roll("v1", strategy="rolling")).status == 200
        assert it.cluster["a"].whole
        assert drained(it) == ["a"]


async def test_a_restart_goes_to_one_board(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        before = it.desired
        done = await it.call(K.RESTART, models=[MODEL], boards=["a"])
        assert done.operation.state is S.SUCCEEDED
        assert [*done.operation.results] == ["a"]
        asked = {name: board.asked["restart_engine"] for name, board in it.cluster.boards.items()}
        assert asked == {"a": 1, "b": 0, "c": 0}
        assert it.desired == before == Desired(before.epoch)
        [line, *_] = it.it.audit(1)
        assert (line.kind, line.outcome) == ("restart", "succeeded")


async def test_a_restart_that_fails_is_failed_with_the_board_s_words(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["a"].refuses["restart_engine"] = EngineDied("a", "SIGSEGV")
        done = await it.call(K.RESTART, boards=["a"])
        assert (done.operation.state, done.status) == (S.FAILED, 503)
        assert done.operation.error is not None
        assert "SIGSEGV" in done.operation.error.message
        assert it.cluster["a"].asked["restart_engine"] == 1
        with pytest.raises(BoardNotFound, match="no board 'z'"):
            await it.call(K.RESTART, boards=["z"])


async def test_a_measurement_has_its_figures_in_the_board_s_result(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        done = await it.call(K.MEASURE, boards=["b"], seconds=2.0)
        assert done.operation.results["b"].details == {
            "prefill_tokens_per_s": 80.0,
            "decode_tokens_per_s": 12.5,
            "tokens": 64,
        }
        it.cluster["b"].jobs = 1
        refused = await it.call(K.MEASURE, boards=["b"])
        assert (refused.operation.state, refused.status) == (S.FAILED, 409)
        assert (await it.call(K.MEASURE, boards=["b"], wait=True)).status == 200
        it.cluster["b"].jobs = 0
        await it.sleep(boards=["b"])
        await it.heard()
        with pytest.raises(OperationConflict, match="asleep"):
            await it.call(K.MEASURE, boards=["b"])
