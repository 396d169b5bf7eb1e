"""Sleep, wake-up and idle unload on boards without models: who sleeps when, and what is undone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rkserve.api.admin.operations import operation_entry
from rkserve.control.calls import OperationKind
from rkserve.control.operations import OperationState, Phase, ResultStatus
from rkserve.control.sleep import SleepPolicy
from rkserve.coordinator.operations import sleep as sleep_operations
from rkserve.core.desired_state import AdapterVersion
from rkserve.core.errors import (
    BoardNotFound,
    EngineDied,
    ModelNotFound,
    OperationConflict,
    RequestError,
)
from tests.support.boards.fake_boards import eventually
from tests.support.cluster.fake_cluster import MODEL, Control, FakeBoard, FakeCluster

K, S = OperationKind, OperationState
HERE = {"models": [MODEL]}
IDLE_S = 60.0


@asynccontextmanager
async def control(
    folder: Path, *boards: str, policy: SleepPolicy | None = None, **settings: Any
) -> AsyncIterator[Control]:
    """A Coordinator that every board follows, and that ends in order."""
    policies = {MODEL: policy or SleepPolicy(load_s=0.5)}
    cluster = FakeCluster.of(*(boards or ("a", "b", "c")))
    it = Control(folder, cluster, settings=settings, policies=policies)
    await it.open()
    try:
        await eventually(lambda: it.follows)
        yield it
    finally:
        await it.close()


def metric(it: Control, name: str, **labels: str) -> float:
    return it.it._registry.get_sample_value(name, labels) or 0.0


# -- sleep ----------------------------------------------------------------------------------------


async def test_a_sleep_is_answered_when_every_board_sleeps_and_a_wake_up_when_none_does(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as it:
        it.cluster["b"].slow_s["adopt"] = 0.1
        asleep = await it.sleep()
        assert (asleep.status, asleep.applied, asleep.operation.state) == (
            200,
            True,
            S.SUCCEEDED,
        )
        assert it.asleep == ["a", "b", "c"]
        assert asleep.operation.epoch == it.desired.epoch
        assert [name for name, _ in asleep.operation.phases] == ["sleeping"]
        await eventually(lambda: metric(it, "rkserve_sleeps_in_force") == 1)
        assert metric(it, "rkserve_pauses_in_force") == 0
        woken = await it.wake()
        assert (woken.status, woken.applied, woken.operation.state) == (200, True, S.SUCCEEDED)
        assert it.asleep == []
        assert metric(it, "rkserve_operation_seconds_count", kind="sleep") == 1
        assert metric(it, "rkserve_operation_seconds_count", kind="wake") == 1


@pytest.mark.promise("Sleep", "Level 1 parks the KV cache, or reports that it is dropped")
@pytest.mark.parametrize(
    ("level", "context", "parks", "told"),
    [
        pytest.param(0, 100, 0, ("kept", 0, 0), id="paused, all of it stays"),
        pytest.param(1, 4125, 4096, ("parked", 4096, 29), id="99 % can be restored"),
        pytest.param(1, 100, 98, ("discarded", 98, 2), id="less than that"),
        pytest.param(1, 0, 0, ("parked", 0, 0), id="nothing to lose"),
        pytest.param(2, 100, 98, ("discarded", 0, 100), id="dropped"),
    ],
)
async def test_the_record_says_what_became_of_each_kv_cache(
    tmp_path: Path, level: int, context: int, parks: int, told: tuple[str, int, int]
) -> None:
    async with control(tmp_path, "a") as it:
        it.cluster["a"].context, it.cluster["a"].parks = context, parks
        done = await it.sleep(level=level)
        details = done.operation.results["a"].details
        assert details["level"] == level
        assert (details["kv"], details["kept_tokens"], details["dropped_tokens"]) == told
        assert it.asleep == (["a"] if level else [])


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        pytest.param({"models": ["none"]}, ModelNotFound, id="a model that is not served"),
        pytest.param({"boards": ["z"]}, BoardNotFound, id="a board that is not there"),
        pytest.param({"adapter": "tone"}, RequestError, id="an adapter"),
        pytest.param({"lease_s": 0}, RequestError, id="a lease of no time"),
    ],
)
async def test_an_invalid_sleep_is_refused(
    tmp_path: Path, params: dict[str, Any], expected: type[Exception]
) -> None:
    async with control(tmp_path) as it:
        with pytest.raises(expected):
            await it.sleep(**params)
        assert (it.desired.epoch, it.it.operations(10)) == (0, [])


async def test_a_sleep_that_a_silent_board_does_not_confirm_is_undone_everywhere(
    tmp_path: Path,
) -> None:
    async with control(tmp_path, operation_timeout_s=0.3) as it:
        it.cluster["b"].frozen = True
        failed = await it.sleep(timeout_s=0.3)
        assert (failed.status, failed.operation.state) == (504, S.UNDONE)
        assert failed.operation.error is not None
        assert "no board is left asleep" in failed.operation.error.message
        assert it.desired.pauses == ()
        it.cluster["b"].frozen = False
        await eventually(lambda: it.follows)
        assert it.asleep == []


async def test_a_sleep_that_a_board_refuses_is_undone_everywhere(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        it.cluster["b"].refuses["adopt"] = EngineDied("b", "its engine does not end")
        failed = await it.sleep()
        assert (failed.status, failed.operation.state) == (503, S.UNDONE)
        it.cluster["b"].refuses.clear()
        await eventually(lambda: it.follows and not it.asleep)


async def test_a_board_that_dies_while_it_goes_to_sleep_counts_as_gone(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        it.cluster["b"].dies_in = "adopt"
        done = await it.sleep()
        assert (done.status, done.operation.state) == (200, S.SUCCEEDED)
        assert done.operation.results["b"].status is ResultStatus.GONE
        assert it.asleep == ["a", "c"]


async def test_boards_that_come_back_or_join_sleep_before_they_serve(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        await it.sleep()
        served: list[str] = []

        def look(board: FakeBoard, _method: str) -> None:
            if board.serves:
                served.append(board.board_id)

        it.cluster.after = look
        it.cluster["b"].restart()
        it.cluster.boards["d"] = FakeBoard("d")
        await eventually(lambda: it.asleep == ["a", "b", "c", "d"])
        assert served == []


async def test_the_same_sleep_twice_is_one_and_a_deeper_one_deepens(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        assert (await it.sleep()).applied
        again = await it.sleep()
        assert (again.status, again.applied) == (200, False)
        deeper = await it.sleep(level=2)
        assert (deeper.status, deeper.applied) == (200, True)
        levels = {one.details["level"] for one in deeper.operation.results.values()}
        assert levels == {2}
        assert not (await it.sleep(level=1)).applied
        assert (await it.wake()).applied
        assert it.asleep == []


async def test_a_pause_and_a_sleep_end_each_by_its_own(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        await it.sleep()
        paused = await it.pause()
        assert (paused.status, paused.applied) == (200, True)
        resumed = await it.resume()
        assert (resumed.status, resumed.applied) == (200, True)
        assert it.asleep == it.held == ["a", "b", "c"]
        assert not (await it.resume()).applied
        await it.pause()
        woken = await it.wake()
        assert (woken.status, it.asleep, it.held) == (200, [], ["a", "b", "c"])


async def test_a_lease_wakes_what_its_holder_forgot(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        assert (await it.sleep(lease_s=5)).status == 200
        it.now_s += 4.9
        await asyncio.sleep(0.3)
        assert it.asleep == ["a", "b", "c"]
        it.now_s += 0.2
        await eventually(lambda: it.asleep == [] and it.follows)
        assert it.it.audit(1)[0].kind == "wake"


async def test_a_sleep_whose_lease_ends_before_all_sleep_is_no_sleep(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        it.cluster["b"].frozen = True
        going = asyncio.create_task(it.sleep(lease_s=5, timeout_s=60))
        await eventually(lambda: it.asleep == ["a", "c"])
        it.now_s += 6
        await eventually(lambda: it.desired.pauses == ())
        it.cluster["b"].frozen = False
        ended = await going
        assert (ended.status, ended.operation.state) == (409, S.UNDONE)
        await eventually(lambda: it.asleep == [] and it.follows)


# -- wake-up --------------------------------------------------------------------------------------


async def test_to_wake_what_is_not_asleep_changes_nothing(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        woken = await it.wake()
        assert (woken.status, woken.applied, it.desired.epoch) == (200, False, 0)


async def test_a_part_of_a_sleep_is_not_woken_and_the_answer_says_which_is(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        asleep = await it.sleep(wakes=False)
        with pytest.raises(OperationConflict, match=asleep.operation.id):
            await it.wake(**HERE)
        assert it.asleep == ["a", "b", "c"]


async def test_weights_alone_leave_boards_held(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        await it.sleep()
        with pytest.raises(OperationConflict):
            await it.wake(tags=["kv_cache"])
        loaded = await it.wake(tags=["weights"])
        assert (loaded.status, it.asleep, it.held) == (200, [], ["a", "b", "c"])
        assert {one.details["level"] for one in loaded.operation.results.values()} == {0}
        assert not (await it.wake(tags=["weights"])).applied
        assert (await it.wake(tags=["kv_cache"])).applied
        assert it.held == []


async def test_a_board_that_does_not_wake_in_time_wakes_later_and_the_operation_succeeds_then(
    tmp_path: Path,
) -> None:
    async with control(tmp_path, operation_timeout_s=0.3) as it:
        await it.sleep()
        it.cluster["b"].frozen = True
        woken = await it.wake(timeout_s=0.3)
        assert (woken.status, woken.operation.state) == (207, S.PARTIAL)
        assert it.asleep == ["b"]
        it.cluster["b"].frozen = False
        await eventually(lambda: it.asleep == [])
        await eventually(lambda: it.it.operation(woken.operation.id).state is S.SUCCEEDED)


async def test_a_board_that_dies_of_its_load_makes_a_wake_up_partial_until_another_one_serves(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as it:
        await it.sleep()
        it.cluster["b"].dies_in = "adopt"
        woken = await it.wake()
        assert (woken.status, woken.operation.state) == (207, S.PARTIAL)
        assert woken.operation.results["b"].status is ResultStatus.GONE
        it.cluster["b"].dies_in = ""
        it.cluster["b"].restart()
        await eventually(lambda: it.it.operation(woken.operation.id).state is S.SUCCEEDED)
        assert it.follows


async def test_a_board_that_sleeps_where_it_should_not_is_told_again(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        it.cluster["b"].asleep = True  # its load failed, say, after it had answered
        await eventually(lambda: it.asleep == [])
        await it.sleep()
        it.cluster["b"].asleep = False
        await eventually(lambda: it.asleep == ["a", "b", "c"])


async def test_the_record_shows_how_many_boards_have_loaded(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        await it.sleep()
        it.cluster["b"].frozen = True
        begun = await it.wake(background=True, timeout_s=60)
        name = begun.operation.id

        def shown() -> tuple[str, int, int, int]:
            told = operation_entry(it.it.operation(name))
            return told["state"], told["total"], told["succeeded"], len(told["failed"])

        await eventually(lambda: shown() == ("running", 3, 2, 0))
        it.cluster["b"].frozen = False
        await eventually(lambda: shown() == ("succeeded", 3, 3, 0))


# -- operations that meet -------------------------------------------------------------------------


async def test_boards_on_their_way_to_sleep_are_not_woken_before_they_arrive(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as it:
        it.cluster["b"].frozen = True
        going = asyncio.create_task(it.sleep(timeout_s=60))
        await eventually(lambda: "a" in it.asleep)
        with pytest.raises(OperationConflict, match="going to sleep"):
            await it.wake()
        it.cluster["b"].frozen = False
        assert (await going).status == 200
        it.cluster["b"].frozen = True
        going = asyncio.create_task(it.wake(timeout_s=60))
        await eventually(lambda: "a" not in it.asleep)
        with pytest.raises(OperationConflict, match="waking up"):
            await it.sleep()
        again = asyncio.create_task(it.wake(timeout_s=60))
        await eventually(lambda: len(it.it._state.running) == 2)
        assert not again.done()  # it changes nothing, and waits for the same boards
        it.cluster["b"].frozen = False
        outcomes = [await going, await again]
        assert [(one.status, one.applied) for one in outcomes] == [(200, True), (200, False)]
        assert it.asleep == []


async def served(it: Control) -> tuple[AdapterVersion, AdapterVersion]:
    versions = [it.store.add(name, name.encode() * 40) for name in ("v1", "v2")]
    for version in versions:
        assert (await it.stage(version)).status == 200
    assert (await it.roll("v1")).status == 200
    return versions[0], versions[1]


@pytest.mark.parametrize("strategy", ["atomic", "rolling"])
@pytest.mark.parametrize("asleep", [("b",), ("a", "b", "c")], ids=["one board", "all boards"])
async def test_an_adapter_is_rolled_out_to_boards_that_sleep_without_a_trial(
    tmp_path: Path, strategy: str, asleep: tuple[str, ...]
) -> None:
    async with control(tmp_path) as it:
        _, second = await served(it)
        await it.sleep(boards=list(asleep))
        before = {name: it.cluster[name].asked["load_adapter"] for name in asleep}
        rolled = await it.roll("v2", strategy=strategy)
        assert (rolled.status, rolled.operation.state) == (200, S.SUCCEEDED)
        assert it.asleep == list(asleep)
        for name in asleep:
            assert rolled.operation.results[name].details["loaded"] == "asleep"
            assert it.cluster[name].asked["load_adapter"] == before[name]
            assert second.ref.key in it.cluster[name].whole
        for board in it.cluster.boards.values():
            assert board.target is not None
            line = board.target.line("tone")
            assert line is not None
            assert line.active == second
        assert (await it.wake()).status == 200


async def test_a_board_that_falls_asleep_before_its_trial_is_passed_over(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        await served(it)

        def fall(board: FakeBoard, method: str) -> None:
            board.asleep = board.asleep or (method, board.board_id) == ("load_adapter", "b")

        it.cluster.before = fall
        rolled = await it.roll("v2")
        assert rolled.status == 200
        assert rolled.operation.results["b"].details["loaded"] == "asleep"


async def test_a_model_does_not_sleep_while_it_changes_but_a_lease_is_renewed(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as it:
        await served(it)
        assert (await it.sleep(boards=["b"], lease_s=5)).status == 200
        rolling = asyncio.create_task(it.roll("v2", strategy="canary", auto=False))
        await eventually(lambda: any(o.phase is Phase.OBSERVING for o in it.it._state.running))
        with pytest.raises(OperationConflict, match="changes what the model serves"):
            await it.sleep()
        renewed = await it.sleep(boards=["b"], lease_s=50)
        assert (renewed.status, renewed.applied) == (200, True)
        assert (await it.wake()).status == 200  # a canary needs requests
        await it.call(K.ADAPTER_PROMOTE, model=MODEL, name="tone")
        assert (await rolling).status == 200


async def test_a_lease_that_is_being_renewed_keeps_no_change_of_the_model_from_beginning(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as it:
        await served(it)
        assert (await it.sleep(lease_s=5)).status == 200
        it.cluster["b"].slow_s["adopt"] = 0.4
        renewing = asyncio.create_task(it.sleep(lease_s=50))
        await eventually(lambda: it.it._state.running)
        assert (await it.roll("v2")).status == 200
        assert (await renewing).status == 200
        it.now_s += 6
        await asyncio.sleep(0.3)
        assert it.asleep == ["a", "b", "c"]


# -- requests -------------------------------------------------------------------------------------


async def test_a_request_wakes_once_however_many_routers_ask(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        await it.sleep(**HERE, wakes=True)
        it.cluster["a"].slow_s["adopt"] = 0.1
        asked = [it.wake(**HERE, requested=True, who="request") for _ in range(5)]
        outcomes = await asyncio.gather(*asked)
        assert [one.status for one in outcomes] == [200] * 5
        assert sum(one.applied for one in outcomes) == 1
        assert len({one.operation.epoch for one in outcomes if one.applied}) == 1
        assert it.asleep == []
        labels = {"model": MODEL, "state": "succeeded"}
        assert metric(it, "rkserve_requested_wakes_total", **labels) == 1


async def test_a_request_that_comes_while_its_model_falls_asleep_wakes_it_right_after(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as it:
        it.cluster["b"].frozen = True
        going = asyncio.create_task(it.sleep(**HERE, wakes=True, timeout_s=60))
        await eventually(lambda: "a" in it.asleep)
        waking = asyncio.create_task(it.wake(**HERE, requested=True, timeout_s=60))
        await asyncio.sleep(0.1)
        assert not waking.done()
        assert "a" in it.asleep
        it.cluster["b"].frozen = False
        assert (await going).status == 200
        woken = await waking
        assert (woken.status, woken.applied, it.asleep) == (200, True, [])


async def test_a_request_does_not_wait_for_ever_for_its_turn(tmp_path: Path) -> None:
    async with control(tmp_path, operation_timeout_s=0.2) as it:
        it.cluster["b"].frozen = True
        going = asyncio.create_task(it.sleep(**HERE, wakes=True, timeout_s=30))
        await eventually(lambda: "a" in it.asleep)
        with pytest.raises(OperationConflict, match="going to sleep"):
            await it.wake(**HERE, requested=True, timeout_s=1.2)
        it.cluster["b"].frozen = False
        assert (await going).status == 200


async def test_what_an_operator_put_to_sleep_no_request_wakes(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        await it.sleep(**HERE, wakes=False)
        woken = await it.wake(**HERE, requested=True)
        assert (woken.status, woken.applied) == (200, False)
        assert it.asleep == ["a", "b", "c"]


@pytest.mark.parametrize("configured", [True, False])
async def test_whether_a_request_wakes_is_as_configured_unless_it_is_said(
    tmp_path: Path, configured: bool
) -> None:
    async with control(tmp_path, policy=SleepPolicy(wakes=configured)) as it:
        await it.sleep(**HERE, wakes=None)
        assert [pause.wakes for pause in it.desired.pauses] == [configured]
        await it.wake()
        await it.sleep(**HERE, wakes=not configured)
        assert [pause.wakes for pause in it.desired.pauses] == [not configured]


# -- nobody ---------------------------------------------------------------------------------------

POLICY = SleepPolicy(idle_s=IDLE_S, load_s=0.5)


def idle(it: Control, idle_s: float = IDLE_S) -> None:
    for board in it.cluster.boards.values():
        board.idle_s = idle_s


def slept_by(it: Control) -> list[str]:
    return [one.who for one in it.it.operations(10) if one.kind is K.SLEEP]


async def test_a_model_that_nobody_uses_is_unloaded_and_the_next_request_loads_it(
    tmp_path: Path,
) -> None:
    async with control(tmp_path, policy=POLICY) as it:
        idle(it)
        await eventually(lambda: slept_by(it) == ["idle"] and it.asleep == ["a", "b", "c"])
        (pause,) = it.desired.pauses
        assert (pause.mode.value, pause.wakes, pause.scope.models) == ("keep", True, (MODEL,))
        labels = {"model": MODEL, "state": "succeeded"}
        await eventually(lambda: metric(it, "rkserve_idle_unloads_total", **labels) == 1)
        idle(it, 0.0)  # they are asked for something
        assert (await it.wake(**HERE, requested=True, who="request")).applied
        assert (it.asleep, it.desired.pauses) == ([], ())
        await asyncio.sleep(0.1)
        assert slept_by(it) == ["idle"]


def _one_is_busy(it: Control) -> None:
    it.cluster["b"].jobs = 1


def _one_is_silent(it: Control) -> None:
    it.cluster["b"].frozen = True


def _one_was_used_lately(it: Control) -> None:
    it.cluster["b"].idle_s = IDLE_S - 1


@pytest.mark.parametrize(
    "but",
    [
        pytest.param(_one_is_busy, id="one has a request"),
        pytest.param(_one_is_silent, id="one is not heard"),
        pytest.param(_one_was_used_lately, id="one was used lately"),
    ],
)
async def test_a_model_of_which_one_board_may_be_in_use_stays_loaded(
    tmp_path: Path, but: Callable[[Control], None]
) -> None:
    async with control(tmp_path, policy=POLICY) as it:
        for board in it.cluster.boards.values():
            board.jobs = 1
        await asyncio.sleep(0.05)
        idle(it)
        for board in it.cluster.boards.values():
            board.jobs = 0
        but(it)
        # Reports from before are used up: from now on nothing but this keeps it awake.
        await asyncio.sleep(0.3)
        assert slept_by(it) == []


@pytest.mark.parametrize("adapter", [None, "tone"], ids=["as a whole", "for an adapter"])
async def test_what_somebody_paused_is_not_idle(tmp_path: Path, adapter: str | None) -> None:
    async with control(tmp_path, policy=POLICY) as it:
        await it.pause(boards=["b"], adapter=adapter)
        idle(it)
        await asyncio.sleep(0.3)
        assert slept_by(it) == []
        await it.resume()
        await eventually(lambda: slept_by(it) == ["idle"])


async def test_a_request_that_reached_a_board_the_moment_it_slept_wakes_it(tmp_path: Path) -> None:
    async with control(tmp_path, policy=POLICY) as it:

        def come(board: FakeBoard, method: str) -> None:
            # It was sent while the board was awake, and waits there now.
            if method == "adopt" and board.board_id == "b" and board.asleep:
                board.jobs = 1

        it.cluster.after = come
        idle(it)
        await eventually(lambda: slept_by(it) == ["idle"])

        def answered() -> bool:
            if not it.cluster["b"].asleep:
                it.cluster["b"].jobs, it.cluster["b"].idle_s = 0, 0.0
            return it.asleep == [] and it.it.operations(1)[0].kind is K.WAKE

        await eventually(answered)
        assert it.it.operations(1)[0].who == "request"


async def test_streams_that_an_operator_put_to_sleep_do_not_wake_their_model_and_new_ones_do(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as it:
        it.cluster["b"].jobs = 3
        await it.sleep(**HERE, wakes=True)
        await asyncio.sleep(0.2)
        assert it.asleep == ["a", "b", "c"]
        it.cluster["b"].jobs = 2  # a client leaves
        await asyncio.sleep(0.2)
        assert it.asleep == ["a", "b", "c"]
        it.cluster["b"].jobs = 3
        await eventually(lambda: it.asleep == [])


async def test_where_no_request_wakes_an_idle_model_requests_are_told_at_once(
    tmp_path: Path,
) -> None:
    policy = SleepPolicy(idle_s=IDLE_S, wakes=False, load_s=0.5)
    async with control(tmp_path, policy=policy) as it:
        idle(it)
        await eventually(lambda: it.asleep == ["a", "b", "c"])
        (pause,) = it.desired.pauses
        assert (pause.mode.value, pause.wakes) == ("wait", False)


async def test_an_idle_model_that_cannot_sleep_is_left_alone_for_a_while(tmp_path: Path) -> None:
    async with control(tmp_path, policy=POLICY) as it:
        it.cluster["b"].refuses["adopt"] = EngineDied("b", "its engine does not end")
        idle(it)
        await eventually(lambda: [o.state for o in it.it.operations(5)] == [S.UNDONE])
        it.cluster["b"].refuses.clear()
        await eventually(lambda: it.follows and it.asleep == [])
        await asyncio.sleep(0.2)
        assert slept_by(it) == ["idle"]
        assert sleep_operations.AGAIN_S > 1
        labels = {"model": MODEL, "state": "undone"}
        assert metric(it, "rkserve_idle_unloads_total", **labels) == 1


async def test_an_idle_model_sleeps_on_when_the_coordinator_is_replaced(tmp_path: Path) -> None:
    async with control(tmp_path, policy=POLICY) as it:
        idle(it)
        await eventually(lambda: it.asleep == ["a", "b", "c"] and not it.it._state.running)
        await it.again()
        await eventually(lambda: it.follows)
        assert it.asleep == ["a", "b", "c"]
        it.cluster["a"].jobs = 1  # and what nobody told the new one of still wakes it
        await eventually(lambda: it.asleep == [])
