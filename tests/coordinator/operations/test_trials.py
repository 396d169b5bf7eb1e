"""Trials of new adapters: one board is asked, once for each content, before any may load it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rkserve.control.operations import OperationState
from rkserve.coordinator.operations.trials import candidates
from rkserve.core.board_report import BoardReport, BoardState, TrialVerdict
from rkserve.core.desired_state import Desired
from rkserve.core.errors import AdapterTrialFailed, BoardFailed, BoardOutOfOrder
from tests.support.boards.fake_boards import eventually
from tests.support.cluster.fake_cluster import (
    CONTENT,
    MODEL,
    Control,
    FakeBoard,
    served,
    serving,
)

pytestmark = pytest.mark.virtual_time

CRASH = (TrialVerdict.CRASHED, "the engine process ended (killed by SIGSEGV)")


def tried(it: Control) -> dict[str, int]:
    return {name: len(board.tried) for name, board in it.cluster.boards.items()}


def all_fail(it: Control, digest: str) -> None:
    for board in it.cluster.boards.values():
        board.verdicts[digest] = CRASH


@pytest.mark.promise("Adapters", "One board tries a new file before any other may load it")
async def test_one_board_tries_a_version_before_the_others_get_it(tmp_path: Path) -> None:
    async with serving(tmp_path) as it:
        others: list[str] = []
        it.cluster.before = lambda board, method: (
            others.append(board.board_id)
            if method.startswith("stage") and not tried(it)["a"]
            else None
        )
        version = it.store.add("v1", CONTENT["v1"])
        outcome = await it.stage(version)
        assert outcome.status == 200
        assert tried(it) == {"a": 1, "b": 0, "c": 0}
        assert set(others) == {"a"}, "no other board had a byte of it before"
        assert outcome.operation.results["a"].details["trial"] == "passed"
        assert [name for name, _ in outcome.operation.phases] == ["trying", "staging", "releasing"]
        found = it.desired.trial(MODEL, version.digest)
        assert found is not None
        assert (found.passed, found.board_id, found.title) == (True, "a", "tone@v1")
        assert all(board.whole for board in it.cluster.boards.values())


@pytest.mark.promise("Adapters", "A file that failed its trial is served nowhere, nor tried again")
@pytest.mark.parametrize("verdict", [one for one in TrialVerdict if one.value != "passed"])
async def test_a_version_that_fails_is_on_no_board_and_is_not_tried_again(
    tmp_path: Path, verdict: TrialVerdict
) -> None:
    async with serving(tmp_path, "v1") as it:
        before = tried(it)
        version = it.store.add("v2", CONTENT["v2"])
        it.cluster["a"].verdicts[version.digest] = (verdict, "killed by SIGSEGV")
        outcome = await it.stage(version)
        error = outcome.operation.error
        assert error is not None
        assert (outcome.status, outcome.operation.state) == (422, OperationState.FAILED)
        assert error.code == "adapter_trial_failed"
        assert f"board a ({verdict.value}): killed by SIGSEGV" in error.message
        assert served(it) == "v1"
        await eventually(
            lambda: not any(version.key in board.whole for board in it.cluster.boards.values())
        )
        with pytest.raises(AdapterTrialFailed):
            await it.stage(version)
        with pytest.raises(AdapterTrialFailed):
            await it.stage(it.store.add("v3", CONTENT["v2"]))  # the same content by another name
        assert {name: n - before[name] for name, n in tried(it).items()} == {"a": 1, "b": 0, "c": 0}


@pytest.mark.parametrize(("lost", "passes"), [(2, True), (99, False)])
async def test_a_lost_connection_is_no_result_of_a_trial(
    tmp_path: Path, lost: int, passes: bool
) -> None:
    async with serving(tmp_path) as it:
        left = lost

        def lose(board: FakeBoard, method: str) -> None:
            nonlocal left
            if method == "try_adapter" and left:
                left -= 1
                raise BoardFailed(board.replica, "the connection ended")

        it.cluster.before = lose
        version = it.store.add("v1", CONTENT["v1"])
        outcome = await it.stage(version)
        assert outcome.operation.state is (
            OperationState.SUCCEEDED if passes else OperationState.FAILED
        )
        found = it.desired.trial(MODEL, version.digest)
        assert (found is not None and found.passed) is passes
        left = 0
        if not passes:
            assert found is None
            assert (await it.stage(version)).status == 200


async def test_force_tries_a_content_again_on_one_board(tmp_path: Path) -> None:
    async with serving(tmp_path) as it:
        version = it.store.add("v1", CONTENT["v1"])
        all_fail(it, version.digest)
        assert (await it.stage(version)).status == 422
        assert (await it.stage(version, force=True)).status == 422
        assert sum(tried(it).values()) == 2
        it.cluster["a"].verdicts.clear()
        assert (await it.stage(version, force=True)).status == 200
        found = it.desired.trial(MODEL, version.digest)
        assert found is not None
        assert found.passed
        assert len(it.desired.trials) == 1


async def test_twenty_pushes_at_once_of_a_file_that_crashes_cost_one_engine(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as it:
        versions = [it.store.add(f"v{n}", CONTENT["v1"]) for n in range(20)]
        all_fail(it, versions[0].digest)
        for board in it.cluster.boards.values():
            board.slow_s["try_adapter"] = 0.5
        outcomes = await asyncio.gather(*map(it.stage, versions))
        assert {one.status for one in outcomes} == {422}
        assert sum(tried(it).values()) == 1


@pytest.mark.parametrize("why", ["out of order", "its disk"])
async def test_a_board_that_cannot_try_it_leaves_it_to_the_next(tmp_path: Path, why: str) -> None:
    async with serving(tmp_path) as it:
        method = "try_adapter" if why == "out of order" else "stage_begin"
        it.cluster["a"].refuses[method] = BoardOutOfOrder("a", why)
        outcome = await it.stage(it.store.add("v1", CONTENT["v1"]))
        assert tried(it) == {"a": 0, "b": 1, "c": 0}
        if method == "try_adapter":
            assert outcome.status == 200
            return
        assert outcome.status == 503, "the version must be on every board"
        assert it.desired.lines == ()


async def test_where_no_board_can_try_it_nothing_is_changed(tmp_path: Path) -> None:
    async with serving(tmp_path) as it:
        for name, board in it.cluster.boards.items():
            board.refuses["try_adapter"] = BoardOutOfOrder(name, "it is on fire")
        outcome = await it.stage(it.store.add("v1", CONTENT["v1"]))
        assert outcome.status == 503
        assert outcome.operation.error is not None
        assert "it is on fire" in outcome.operation.error.message
        assert (it.desired.lines, it.desired.trials) == ((), ())


async def test_a_replica_that_ends_in_the_trial_is_the_only_one(tmp_path: Path) -> None:
    async with serving(tmp_path) as it:
        for board in it.cluster.boards.values():
            board.dies_in = "try_adapter"
        version = it.store.add("v1", CONTENT["v1"])
        outcome = await it.stage(version)
        assert outcome.status == 422
        assert [board.dead for board in it.cluster.boards.values()] == [True, False, False]
        found = it.desired.trial(MODEL, version.digest)
        assert found is not None
        assert (found.verdict, found.board_id) == (TrialVerdict.CRASHED, "a")


async def test_results_outlive_the_coordinator(tmp_path: Path) -> None:
    async with serving(tmp_path) as it:
        version = it.store.add("v1", CONTENT["v1"])
        all_fail(it, version.digest)
        assert (await it.stage(version)).status == 422
        await it.again()
        with pytest.raises(AdapterTrialFailed):
            await it.stage(version)
        assert sum(tried(it).values()) == 1


async def test_a_version_that_is_served_is_not_tried_again(tmp_path: Path) -> None:
    async with serving(tmp_path, "v1") as it:
        before = tried(it)
        assert (await it.stage(it.store.add("v1", CONTENT["v1"]))).status == 200
        assert tried(it) == before


async def test_trials_can_be_switched_off(tmp_path: Path) -> None:
    async with serving(tmp_path, try_adapters=False) as it:
        assert (await it.stage(it.store.add("v1", CONTENT["v1"]))).status == 200
        assert sum(tried(it).values()) == 0
        assert it.desired.trials == ()


def test_a_drained_board_tries_first_then_the_one_with_the_least_work() -> None:
    ready = BoardState.READY
    reports = [
        BoardReport("a", MODEL, ready, running=1),
        BoardReport("b", MODEL, ready, queued=3),
        BoardReport("c", MODEL, BoardState.RECOVERING),
        BoardReport("d", MODEL, ready, running=1, queued=5),
        BoardReport("e", MODEL, ready),
        BoardReport("f", MODEL, BoardState.ASLEEP),
    ]
    assert candidates(reports, Desired(drained=("d",))) == ["d", "e", "a", "b", "c"]
