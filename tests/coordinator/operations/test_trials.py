"""Trials of new adapters: one board is asked, once for each content, before any may load it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rkserve.control.operations import OperationState
from rkserve.coordinator.operations import adapters, trials
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

pytestmark = [pytest.mark.virtual_time, pytest.mark.slow]

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
        found = it.desired.trial(MODEL, version)
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
        found = it.desired.trial(MODEL, version)
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
        found = it.desired.trial(MODEL, version)
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
            board.dies_in, board.slow_s["try_adapter"] = "try_adapter", 1.0
        version = it.store.add("v1", CONTENT["v1"])
        outcome = await it.stage(version)
        assert outcome.status == 422
        assert [board.dead for board in it.cluster.boards.values()] == [True, False, False]
        found = it.desired.trial(MODEL, version)
        assert found is not None
        assert (found.verdict, found.board_id) == (TrialVerdict.CRASHED, "a")


@pytest.mark.parametrize("boards", [1, 3])
async def test_a_replica_that_ends_before_the_trial_has_an_engine_is_no_result(
    tmp_path: Path, boards: int
) -> None:
    async with serving(tmp_path) as it:
        for board in list(it.cluster.boards.values())[:boards]:
            board.dies_in, board.slow_s["try_adapter"] = "try_adapter", 1.0
            board.busy = True
        version = it.store.add("v1", CONTENT["v1"])
        outcome = await it.stage(version)
        if boards == 1:
            assert outcome.status == 200
            assert tried(it) == {"a": 0, "b": 1, "c": 0}
            return
        assert outcome.status == 503
        assert it.desired.trials == ()
        assert (await it.stage(version)).status == 503, "no board is there"
        it.cluster["b"].restart()
        it.cluster["b"].dies_in, it.cluster["b"].busy = "", False
        await eventually(lambda: it.follows)
        assert (await it.stage(version)).status == 200


@pytest.mark.parametrize("busy", [True, False])
async def test_a_limit_that_is_too_short_for_a_trial_is_no_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    for module in (trials, adapters):
        monkeypatch.setattr(module, "TRIAL_S", 4.0)
    async with serving(tmp_path) as it:
        for board in it.cluster.boards.values():
            board.slow_s["try_adapter"], board.busy = 6.0, busy
        version = it.store.add("v1", CONTENT["v1"])
        assert (await it.stage(version, timeout_s=2.0)).status == 503
        assert it.desired.trials == ()
        outcome = await it.stage(version)
        assert (outcome.status, len(it.desired.trials)) == ((503, 0) if busy else (422, 1))


async def test_pushes_that_wait_for_other_trials_have_all_their_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (trials, adapters):
        monkeypatch.setattr(module, "TRIAL_S", 4.0)
    async with serving(tmp_path) as it:
        for board in it.cluster.boards.values():
            board.slow_s["try_adapter"] = 3.9
        versions = [it.store.add(f"v{n}", bytes([n]) * 100) for n in range(4)]
        outcomes = await asyncio.gather(*map(it.stage, versions))
        assert [one.status for one in outcomes] == [200] * 4
        late = [it.stage(it.store.add(f"w{n}", b"w%d" % n), timeout_s=6.0) for n in range(3)]
        assert [one.status for one in await asyncio.gather(*late)] == [200, 503, 504]
        assert all(one.passed for one in it.desired.trials)


async def test_a_caller_that_leaves_ends_no_trial_of_the_others(tmp_path: Path) -> None:
    async with serving(tmp_path) as it:
        for board in it.cluster.boards.values():
            board.slow_s["try_adapter"] = 5.0
        calls = [
            asyncio.ensure_future(it.stage(it.store.add(f"v{n}", CONTENT["v1"]), force=True))
            for n in range(4)
        ]
        await asyncio.sleep(1.0)
        for one in calls[:2]:  # that of the trial, and one that waits for it
            one.cancel()
        assert [one.status for one in await asyncio.gather(*calls[2:])] == [200, 200]
        assert sum(tried(it).values()) == 1


async def test_forced_pushes_at_once_of_a_file_that_crashes_cost_one_engine(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as it:
        versions = [it.store.add(f"v{n}", CONTENT["v1"]) for n in range(5)]
        all_fail(it, versions[0].digest)
        assert (await it.stage(versions[0])).status == 422
        for board in it.cluster.boards.values():
            board.slow_s["try_adapter"] = 0.5
            board.asked.clear()

        async def later() -> None:
            await asyncio.sleep(0.1)
            it.now_s += 1.0

        outcomes = await asyncio.gather(*(it.stage(one, force=True) for one in versions), later())
        assert {one.status for one in outcomes if one is not None} == {422}
        assert sum(board.asked["try_adapter"] for board in it.cluster.boards.values()) == 1


async def test_a_result_is_of_one_scale_one_base_and_one_release(tmp_path: Path) -> None:
    async with serving(tmp_path) as it:
        for board in it.cluster.boards.values():
            board.release = "1.2.3"
        await it.heard()
        version = it.store.add("v1", CONTENT["v1"])
        all_fail(it, version.digest)
        assert (await it.stage(version)).status == 422
        with pytest.raises(AdapterTrialFailed):
            await it.stage(version)
        assert (await it.stage(version, scale=0.5)).status == 422, "tried again"
        assert (await it.rebase(it.store.add_base("b2", b"base" * 50))).status == 200
        assert (await it.stage(version)).status == 422, "tried on the other base weights"
        with pytest.raises(AdapterTrialFailed):
            await it.stage(version)
        for board in it.cluster.boards.values():
            board.release = "1.3.1"
            board.verdicts.clear()
        await it.heard()
        assert (await it.stage(version)).status == 200
        assert sum(tried(it).values()) == 4
        kept = [(one.scale, bool(one.base), one.release) for one in it.desired.trials]
        assert kept == [
            (1.0, False, "1.2.3"),
            (0.5, False, "1.2.3"),
            (1.0, True, "1.2.3"),
            (1.0, True, "1.3.1"),
        ]


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
