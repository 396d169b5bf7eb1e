"""The Coordinator on boards without models: calls, leases, keys, and boards that do not follow."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from rkserve.control.calls import OperationKind
from rkserve.control.operations import OperationState, ResultStatus
from rkserve.core.desired_state import PauseMode, Scope
from rkserve.core.errors import (
    BoardFailed,
    BoardNotFound,
    EngineDied,
    LedgerFailed,
    ModelNotFound,
    OperationConflict,
    OperationNotFound,
    RequestError,
    RkserveError,
    StaleEpoch,
)
from rkserve.core.logs import LogQuery, LogRing
from tests.support.boards.fake_boards import eventually
from tests.support.cluster.fake_cluster import MODEL, Control, FakeCluster, controlled, started
from tests.support.values.control_values import recorded

pytestmark = pytest.mark.virtual_time

K, S = OperationKind, OperationState


# -- pause and resume --------------------------------------------------------------------------


async def test_a_pause_is_answered_when_every_board_holds_and_a_resume_when_none_does(
    tmp_path: Path,
) -> None:
    async with controlled(tmp_path) as it:
        paused = await it.pause()
        assert (paused.status, paused.applied, paused.operation.state) == (
            200,
            True,
            S.SUCCEEDED,
        )
        assert it.held == ["a", "b", "c"]
        assert {r.status for r in paused.operation.results.values()} == {ResultStatus.OK}
        assert paused.operation.epoch == it.desired.epoch
        resumed = await it.resume()
        assert (resumed.status, resumed.applied) == (200, True)
        assert it.held == []
        assert resumed.operation.epoch > paused.operation.epoch


@pytest.mark.promise(
    "Every call that changes something",
    "It takes `model`, `selector`, `timeout_s`, `lease_s` and an idempotency key",
)
@pytest.mark.promise("Pause", "Per cluster, model, boards or adapter")
@pytest.mark.parametrize(
    ("scope", "held"),
    [
        pytest.param({"boards": ["b"]}, ["b"], id="one board"),
        pytest.param({"models": [MODEL]}, ["a", "b", "c"], id="a model"),
        pytest.param({"adapter": "tone"}, ["a", "b", "c"], id="an adapter"),
        pytest.param({"adapter": "other"}, [], id="another adapter"),
    ],
)
async def test_a_pause_holds_what_it_names_and_nothing_else(
    tmp_path: Path, scope: dict[str, Any], held: list[str]
) -> None:
    async with controlled(tmp_path) as it:
        assert (await it.pause(**scope)).status == 200
        await eventually(lambda: it.follows)  # also those that nobody waited for
        assert it.held == held


@pytest.mark.promise(
    "Every call that changes something", "Every call is audited, without prompts and answers"
)
@pytest.mark.parametrize(
    ("params", "expected"),
    [
        pytest.param({"models": ["none"]}, ModelNotFound, id="a model that is not served"),
        pytest.param({"boards": ["z"]}, BoardNotFound, id="a board that is not there"),
        pytest.param({"lease_s": -1}, RequestError, id="a lease of the past"),
    ],
)
async def test_an_invalid_pause_is_refused_and_audited(
    tmp_path: Path, params: dict[str, Any], expected: type[Exception]
) -> None:
    async with controlled(tmp_path) as it:
        with pytest.raises(expected):
            await it.pause(who="trainer", **params)
        assert it.desired.epoch == 0
        assert it.it.operations(10) == []
        (line,) = it.it.audit(10)
        assert (line.who, line.kind, line.operation) == ("trainer", "pause", None)
        assert line.status in (400, 404)


@pytest.mark.promise(
    "Every call that changes something", "After the time limit it is undone, and a 504"
)
@pytest.mark.promise("Pause", "A pause that fails leaves nothing paused")
@pytest.mark.parametrize("silent", [("b",), ("a", "b", "c")], ids=["one board", "all boards"])
async def test_a_pause_that_a_silent_board_does_not_confirm_is_undone_everywhere(
    tmp_path: Path, silent: tuple[str, ...]
) -> None:
    async with controlled(tmp_path) as it:
        for name in silent:
            it.cluster[name].frozen = True
        outcome = await it.pause(timeout_s=0.3)
        assert outcome.status == 504
        assert outcome.operation.state is S.UNDONE
        assert outcome.operation.error is not None
        assert silent[0] in outcome.operation.error.message
        assert it.desired.pauses == ()
        # It wakes up, and must not stay as it never was told to be.
        for name in silent:
            it.cluster[name].frozen = False
        await eventually(lambda: it.follows)
        assert it.held == []


@pytest.mark.promise("Pause", "A pause that fails leaves nothing paused")
async def test_a_board_that_refuses_fails_the_pause_long_before_the_time_limit(
    tmp_path: Path,
) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["b"].refuses["adopt"] = EngineDied("b", "SIGSEGV")
        outcome = await it.pause(timeout_s=20.0)
        assert (outcome.status, outcome.operation.state) == (503, S.UNDONE)
        assert outcome.operation.results["b"].status is ResultStatus.FAILED
        assert it.cluster["a"].is_held is it.cluster["c"].is_held is False


async def test_a_call_that_did_not_arrive_is_made_again(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        board = it.cluster["b"]
        board.refuses["adopt"] = BoardFailed("b/0", "Ray could not reach it")
        pausing = asyncio.create_task(it.pause())
        await eventually(lambda: board.asked["adopt"] >= 3)
        board.refuses.clear()
        assert (await pausing).status == 200
        assert board.is_held


async def test_a_board_that_dies_in_a_pause_counts_as_stopped_and_comes_back_paused(
    tmp_path: Path,
) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["b"].dies_in = "adopt"
        outcome = await it.pause()
        assert outcome.status == 200
        assert outcome.operation.results["b"].status is ResultStatus.GONE
        it.cluster["b"].dies_in = ""
        it.cluster["b"].restart()
        assert not it.cluster["b"].serves
        await eventually(lambda: it.follows)
        assert it.held == ["a", "b", "c"]


async def test_a_frozen_board_is_not_forgotten_however_long_it_is_silent(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["b"].frozen = True
        await eventually(lambda: len(it.it._context.roster.reports()) == 2)  # a Router's view
        assert (await it.pause(timeout_s=0.2)).status == 504


async def test_to_pause_what_is_paused_changes_nothing_and_still_asks_the_boards(
    tmp_path: Path,
) -> None:
    async with controlled(tmp_path) as it:
        first = await it.pause()
        again = await it.pause()
        assert (again.status, again.applied) == (200, False)
        assert it.desired.epoch == first.operation.epoch
        it.cluster["b"].frozen = True
        failed = await it.pause(timeout_s=0.2)
        assert (failed.status, failed.operation.state) == (504, S.FAILED)
        assert len(it.desired.pauses) == 1  # the first one holds


@pytest.mark.promise(
    "Every call that changes something", "Some boards but not all are a 207, never a 200"
)
async def test_a_resume_that_not_all_boards_hear_is_partial_until_they_have(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        await it.pause()
        it.cluster["b"].frozen = True
        outcome = await it.resume(timeout_s=0.2)
        assert (outcome.status, outcome.operation.state) == (207, S.PARTIAL)
        assert it.cluster["a"].is_held is False
        it.cluster["b"].frozen = False
        name = outcome.operation.id
        await eventually(lambda: it.it.operation(name).state is S.SUCCEEDED)
        assert it.held == []
        assert all(result.good for result in it.it.operation(name).results.values())


async def test_a_resume_of_nothing_that_not_all_boards_hear_is_settled_as_well(
    tmp_path: Path,
) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["b"].frozen = True
        outcome = await it.resume(timeout_s=0.1)
        assert (outcome.operation.state, outcome.applied) == (S.PARTIAL, False)
        it.cluster["b"].frozen = False
        name = outcome.operation.id
        await eventually(lambda: it.it.operation(name).state is S.SUCCEEDED)


@pytest.mark.parametrize(
    ("ids", "asked"),
    [pytest.param(None, 1, id="all"), pytest.param(["x"], 2, id="named ones")],
)
async def test_an_abort_of_all_is_not_repeated_where_its_answer_may_be_lost(
    tmp_path: Path, ids: list[str] | None, asked: int
) -> None:
    async with controlled(tmp_path, "a") as it:
        it.cluster["a"].refuses["abort_all"] = BoardFailed("a/0", "Ray lost the answer")
        await it.call(K.ABORT, request_ids=ids, timeout_s=0.25)
        assert min(it.cluster["a"].asked["abort_all"], 2) == asked


# -- leases ------------------------------------------------------------------------------------


async def test_a_lease_that_nobody_renews_resumes_by_itself(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        await it.pause(lease_s=30)
        it.now_s += 29
        await asyncio.sleep(0.5)
        assert it.held == ["a", "b", "c"]
        it.now_s += 2
        await eventually(lambda: it.held == [])
        assert it.desired.pauses == ()
        assert it.it.audit(1)[0].who == "lease"
        assert b"rkserve_leases_expired_total 1.0" in it.it.metrics()


@pytest.mark.parametrize("step_s", [3600.0, -3600.0, 30.0])
async def test_a_lease_keeps_its_rest_when_the_clock_is_set(tmp_path: Path, step_s: float) -> None:
    async with controlled(tmp_path) as it:
        await it.pause(lease_s=30)
        await it.call(K.SLEEP, models=[MODEL])
        it.now_s += 10
        it.set_by_s += step_s
        await eventually(lambda: it.desired.pauses[0].expires_s == 1_000_030.0 + step_s)
        assert it.desired.pauses[1].expires_s is None
        await it.again()
        it.now_s += 19
        await asyncio.sleep(0.5)
        assert len(it.desired.pauses) == 2
        it.now_s += 2
        await eventually(lambda: len(it.desired.pauses) == 1)


async def test_a_correction_of_the_clock_moves_no_lease(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        await it.pause(lease_s=30)
        epoch = it.desired.epoch
        it.set_by_s += 0.5
        await asyncio.sleep(0.5)
        assert it.desired.epoch == epoch


async def test_a_lease_that_ends_while_boards_stop_is_no_success(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["b"].slow_s["adopt"] = 0.6
        pausing = asyncio.create_task(it.pause(lease_s=5))
        await eventually(lambda: it.cluster["a"].is_held)
        it.now_s += 6
        outcome = await pausing
        assert (outcome.status, outcome.operation.state) == (409, S.UNDONE)
        await eventually(lambda: it.follows)
        assert it.held == []


# -- idempotency, epochs, conflicts ------------------------------------------------------------


@pytest.mark.promise(
    "Every call that changes something", "A repeat of a key answers the same, with `applied: false`"
)
async def test_a_key_that_comes_again_gets_the_first_answer_and_changes_nothing(
    tmp_path: Path,
) -> None:
    async with controlled(tmp_path) as it:
        first = await it.pause(key="k")
        await it.resume()
        epoch = it.desired.epoch
        again = await it.pause(key="k")
        assert again.operation == first.operation
        assert (again.status, again.applied) == (200, False)
        assert it.desired.epoch == epoch
        assert it.held == []
        with pytest.raises(RequestError, match="used for another call"):
            await it.pause(key="k", boards=["a"])


async def test_a_key_that_comes_again_while_the_first_goes_on_waits_for_it(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["b"].slow_s["adopt"] = 0.2
        first, again = await asyncio.gather(it.pause(key="k"), it.pause(key="k"))
        assert first.operation == again.operation
        assert (first.applied, again.applied) == (True, False)
        assert len(it.it.operations(10)) == 1


@pytest.mark.promise(
    "Every call that changes something", "A repeat of a key answers the same, with `applied: false`"
)
async def test_a_key_is_remembered_by_the_next_coordinator_also_of_what_failed(
    tmp_path: Path,
) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["b"].frozen = True
        assert (await it.pause(key="k", timeout_s=0.2)).status == 504
        it.cluster["b"].frozen = False
        await it.again()
        again = await it.pause(key="k", timeout_s=0.2)
        assert (again.status, again.applied) == (504, False)
        assert it.held == []


@pytest.mark.promise("Every call that changes something", "A conflict, and a stale epoch, is a 409")
async def test_a_stale_epoch_is_refused(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        await it.pause(expected_epoch=0)
        with pytest.raises(StaleEpoch):
            await it.resume(expected_epoch=0)
        assert it.held == ["a", "b", "c"]


async def test_a_resume_must_not_meet_a_pause_that_still_stops_boards(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["b"].slow_s["adopt"] = 0.3
        pausing = asyncio.create_task(it.pause())
        await eventually(lambda: it.cluster["a"].is_held)
        with pytest.raises(OperationConflict):
            await it.resume()
        assert (await pausing).status == 200


@pytest.mark.promise("Every call that changes something", "`async` is a 202 with an operation")
async def test_a_call_in_background_is_answered_when_it_is_written_down(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["b"].slow_s["adopt"] = 0.2
        begun = await it.pause(background=True)
        assert (begun.status, begun.operation.state) == (202, S.RUNNING)
        name = begun.operation.id
        await eventually(lambda: it.it.operation(name).state is S.SUCCEEDED)
        with pytest.raises(ModelNotFound):
            await it.pause(background=True, models=["none"])


async def test_a_caller_that_leaves_ends_nothing(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["b"].slow_s["adopt"] = 0.2
        pausing = asyncio.create_task(it.pause())
        await eventually(lambda: it.cluster["a"].is_held)
        pausing.cancel()
        await eventually(lambda: it.it.operations(1)[0].state is S.SUCCEEDED)


# -- other operations --------------------------------------------------------------------------


async def test_caches_are_cleared_and_requests_aborted_on_the_boards_that_are_meant(
    tmp_path: Path,
) -> None:
    async with controlled(tmp_path) as it:
        cleared = await it.call(K.CACHE_RESET, boards=["a", "b"])
        assert (cleared.status, sorted(cleared.operation.results)) == (200, ["a", "b"])
        aborted = await it.call(K.ABORT, request_ids=["x", "y"])
        assert [r.details["aborted"] for r in aborted.operation.results.values()] == [2, 2, 2]
        everything = await it.call(K.ABORT)
        assert everything.operation.results["a"].details["aborted"] == 7
        assert it.desired.epoch == 0


class Routers:
    """Routers that are asked to abort; ``fails`` is what becomes of it."""

    def __init__(self, cluster: FakeCluster, fails: RkserveError | None = None) -> None:
        self._cluster, self._fails = cluster, fails
        self.asked: list[tuple[Scope, list[str] | None, int]] = []

    async def abort(self, scope: Scope, request_ids: list[str] | None, timeout_s: float) -> int:
        boards = sum(one.asked["abort_all"] for one in self._cluster.boards.values())
        self.asked.append((scope, request_ids, boards))
        if self._fails is not None:
            raise self._fails
        return 3


async def test_an_abort_reaches_the_routers_before_the_boards(tmp_path: Path) -> None:
    cluster = FakeCluster.of("a", "b")
    routers = Routers(cluster)
    async with started(Control(tmp_path, cluster, routers=routers)) as it:
        done = await it.call(K.ABORT, request_ids=["x"], models=[MODEL])
        assert routers.asked == [(Scope(models=(MODEL,)), ["x"], 0)]
        assert done.operation.results["queue"].details == {"aborted": 3}
        assert (done.status, done.operation.succeeded) == (200, 3)


async def test_an_abort_that_some_router_did_not_hear_of_is_partial(tmp_path: Path) -> None:
    cluster = FakeCluster.of("a", "b")
    routers = Routers(cluster, BoardFailed("other Routers", "no answer"))
    async with started(Control(tmp_path, cluster, routers=routers)) as it:
        done = await it.call(K.ABORT)
        assert (done.status, done.operation.state) == (207, S.PARTIAL)
        (behind,) = [b for b, one in done.operation.results.items() if not one.good]
        assert behind == "Routers"
        assert done.operation.results["a"].details["aborted"] == 7


async def test_a_reset_of_running_requests_stops_clears_and_goes_on(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        seen: list[tuple[str, bool]] = []

        def look(board: Any, method: str) -> None:
            hold = board.target.hold
            seen.append((method, hold is not None and hold.clear_cache))

        it.cluster.after = look
        reset = await it.call(K.CACHE_RESET, reset_running_requests=True)
        assert reset.status == 200
        assert seen == [("adopt", True)] * 3 + [("adopt", False)] * 3


async def test_a_reset_of_running_requests_that_fails_leaves_nobody_held(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        it.cluster["c"].frozen = True
        reset = await it.call(K.CACHE_RESET, reset_running_requests=True, timeout_s=0.2)
        assert (reset.status, reset.operation.state) == (504, S.UNDONE)
        it.cluster["c"].frozen = False
        await eventually(lambda: it.follows)
        assert it.held == []


@pytest.mark.parametrize(
    ("failing", "status", "state"),
    [
        pytest.param(["a"], 207, S.PARTIAL, id="some"),
        pytest.param(["a", "b", "c"], 503, S.FAILED, id="all"),
    ],
)
async def test_boards_that_fail_to_clear_are_named(
    tmp_path: Path, failing: list[str], status: int, state: OperationState
) -> None:
    async with controlled(tmp_path) as it:
        for name in failing:
            it.cluster[name].refuses["clear_kv"] = EngineDied(name, "SIGSEGV")
        cleared = await it.call(K.CACHE_RESET)
        assert (cleared.status, cleared.operation.state) == (status, state)
        bad = [b for b, r in sorted(cleared.operation.results.items()) if not r.good]
        assert bad == failing


async def test_a_label_reaches_every_board(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        assert (await it.call(K.LABEL, model=MODEL, label="step 7")).status == 200
        targets = [board.target for board in it.cluster.boards.values()]
        assert [target and target.label for target in targets] == ["step 7"] * 3
        assert (await it.call(K.LABEL, model=MODEL, label="step 7")).applied is False


async def test_an_unknown_operation_is_not_found(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        with pytest.raises(OperationNotFound):
            it.it.operation("op-none")


# -- boards that do not follow -----------------------------------------------------------------


@pytest.mark.promise("Pause", "A board that joins or restarts is paused before it serves")
async def test_a_board_that_joins_or_comes_back_is_told_before_it_serves(tmp_path: Path) -> None:
    async with controlled(tmp_path, "a") as it:
        await it.pause(mode=PauseMode.ABORT.value)
        it.cluster["a"].restart()
        it.cluster.boards["new"] = type(it.cluster["a"])("new")
        assert not it.cluster["a"].serves
        await eventually(lambda: it.follows)
        assert it.held == ["a", "new"]


async def test_a_failing_board_is_retried_with_growing_delays_and_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with controlled(tmp_path) as it:
        board = it.cluster["b"]
        board.restart()
        board.refuses["adopt"] = EngineDied("b", "SIGSEGV")
        await eventually(lambda: board.asked["adopt"] >= 3)
        asked = board.asked["adopt"]
        await asyncio.sleep(0.5)  # 50 rounds of reports
        assert board.asked["adopt"] - asked <= 2
        assert caplog.text.count("board b does not follow") == 1
        board.refuses.clear()
        await eventually(lambda: it.follows)


async def test_every_board_that_followed_late_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rkserve")
    async with controlled(tmp_path) as it:
        caplog.clear()
        await it.pause()
        await asyncio.sleep(0.1)
        assert "follows" not in caplog.text
        it.cluster["b"].restart()
        await eventually(lambda: it.follows)
        await asyncio.sleep(0.1)
        assert caplog.text.count("board b obeys epoch 1") == 1


async def test_a_line_about_an_operation_has_the_id_of_its_request(tmp_path: Path) -> None:
    ring, logger = LogRing(), logging.getLogger("rkserve.coordinator.coordinator")
    logger.addHandler(ring)
    logger.setLevel(logging.INFO)
    try:
        async with controlled(tmp_path) as it:
            await it.pause(request_id="req-1")
            await it.resume()
    finally:
        logger.removeHandler(ring)
        logger.setLevel(logging.NOTSET)
    lines = ring.page(LogQuery()).lines
    found = {line.message.split()[0]: line.request_id for line in lines if " is " in line.message}
    assert found == {"pause": "req-1", "resume": ""}


async def test_a_lost_ledger_goes_on_after_what_the_boards_obey(tmp_path: Path) -> None:
    async with controlled(tmp_path / "one") as it:
        for label in ("x", "y", "z"):
            await it.call(K.LABEL, model=MODEL, label=label)
        await it.pause()
        fresh = Control(tmp_path / "two", it.cluster)
        await it.it.stop()
        await fresh.open()
        try:
            await eventually(lambda: fresh.follows)
            assert fresh.desired.epoch > 4
            assert it.held == []
            assert (await fresh.pause()).status == 200
            assert it.held == ["a", "b", "c"]
        finally:
            await fresh.close()


async def test_a_router_that_knows_a_later_epoch_is_believed(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        assert (await it.it.desired(41, 0.01)).epoch == 42


async def test_a_wait_for_a_change_ends_at_once_or_in_time(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        assert (await it.it.desired(0, 0.01)).epoch == 0
        waiting = asyncio.create_task(it.it.desired(0, 20.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await it.pause()
        assert (await waiting).epoch == 1
        assert (await it.it.desired(0, 20.0)).epoch == 1


# -- what a predecessor left -------------------------------------------------------------------


async def test_what_went_on_is_ended_however_many_operations_came_after_it(tmp_path: Path) -> None:
    async with controlled(tmp_path, max_operations=100) as it:
        await it.it.stop()
        old = recorded("op-old", K.ADAPTER_ROLLOUT, params={"model": MODEL, "name": "tone"})
        it.ledger.write(operations=[old])
        it.ledger.write(
            operations=[recorded(f"op-{n}", K.LABEL, state=S.SUCCEEDED) for n in range(101)]
        )
        it.ledger.close()
        await it.open()
        assert it.it.operation("op-old").state is S.FAILED
        assert not it.it._state.running


# -- the ledger --------------------------------------------------------------------------------


async def test_a_change_that_cannot_be_stored_is_not_made(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        database = it.ledger._database
        pages = database.execute("PRAGMA page_count").fetchone()[0]
        database.execute(f"PRAGMA max_page_count = {pages}")
        asked = it.cluster["a"].asked["adopt"]
        with pytest.raises(LedgerFailed, match="full"):
            await it.call(K.LABEL, model=MODEL, label="x" * 200_000)
        assert it.cluster["a"].asked["adopt"] == asked
        assert it.desired.epoch == 0
        database.execute(f"PRAGMA max_page_count = {pages + 1000}")
        assert (await it.pause()).status == 200


@pytest.mark.promise("Pause", "Paused stays paused over restarts")
async def test_paused_stays_paused_over_a_restart(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        paused = await it.pause()
        await it.again()
        assert it.held == ["a", "b", "c"]
        assert it.it.operation(paused.operation.id) == paused.operation
        it.cluster["c"].restart()
        await eventually(lambda: it.follows)
        assert it.held == ["a", "b", "c"]
        await it.resume()
        assert it.held == []


async def test_the_metrics_count_operations_boards_and_failures(tmp_path: Path) -> None:
    async with controlled(tmp_path) as it:
        await it.pause()
        it.cluster["b"].frozen = True
        await it.pause(boards=["b"], timeout_s=0.1)
        with pytest.raises(ModelNotFound):
            await it.pause(models=["none"])
        await asyncio.sleep(0.05)
        said = it.it.metrics().decode()
        for line in (
            'rkserve_operations_total{kind="pause",state="succeeded"} 1.0',
            'rkserve_operations_total{kind="pause",state="undone"} 1.0',
            'rkserve_operations_refused_total{code="model_not_found",kind="pause"} 1.0',
            'rkserve_operation_phase_seconds_count{kind="pause",phase="stopping"} 2.0',
            'rkserve_control_failures_total{code="board_failed",method="adopt"}',
            "rkserve_pauses_in_force 1.0",
        ):
            assert line in said, said


async def test_each_operation_is_one_line_of_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with controlled(tmp_path, "a", "b") as it:
        with caplog.at_level(logging.INFO, "rkserve"):
            done = await it.pause()
            await it.resume()
        lines = [one.getMessage() for one in caplog.records]
        found = [line for line in lines if line.startswith("operation ")]
        assert len(found) == 2
        assert found[0].startswith(f"operation {done.operation.id}: pause succeeded in ")
        assert "2 of 2 boards, epoch 1, stopping " in found[0]
        assert found[1].split(": ")[1].startswith("resume succeeded in ")
