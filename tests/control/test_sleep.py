"""Sleep and wake-up as changes of the desired state, and the rules for both."""

from __future__ import annotations

import json
from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkserve.control import sleep as sleep_changes
from rkserve.control import state_changes
from rkserve.control.calls import OperationKind
from rkserve.control.codec import SCHEMA, read_desired, read_operation, write_desired
from rkserve.control.operations import ControlOperation, OperationState, Phase, conflict
from rkserve.control.sleep import SleepPolicy, unused, wakeable
from rkserve.coordinator.state.state_store import recover
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import (
    ActivePause,
    Desired,
    EffectivePause,
    PauseMode,
    Scope,
    SleepLevel,
)
from rkserve.core.errors import LedgerFailed, OperationConflict, RequestError
from tests.support.values.control_values import (
    BOARDS,
    MODELS,
    SERVING,
    action,
    desires,
    recorded,
    scopes,
)

KEEP, WAIT, ABORT = PauseMode.KEEP, PauseMode.WAIT, PauseMode.ABORT
PAUSED, UNLOADED, DROPPED = SleepLevel
K: TypeAlias = OperationKind
S: TypeAlias = OperationState
M, B1 = Scope(("m",)), Scope((), ("b1",))


def slept(
    desired: Desired = Desired(),  # noqa: B008 - frozen
    scope: Scope = Scope(),  # noqa: B008
    level: SleepLevel = UNLOADED,
    operation: str = "op",
    mode: PauseMode = KEEP,
    **how: object,
) -> Desired:
    return sleep_changes.sleep(desired, operation, scope, mode, level, now_s=0.0, **how)  # type: ignore[arg-type]


# Changes


def test_a_sleep_holds_and_unloads_its_scope_until_it_is_woken() -> None:
    asleep = sleep_changes.sleep(Desired(4), "op", B1, WAIT, UNLOADED, now_s=10.0, lease_s=5)
    assert asleep.epoch == 5
    target = asleep.target("b1", "m")
    assert (target.level, target.hold) == (UNLOADED, EffectivePause(WAIT, expires_s=15.0))
    assert asleep.target("b2", "m").level is None
    woken, gone = sleep_changes.wake(asleep)
    assert (woken, gone) == (Desired(6), asleep.pauses)


@pytest.mark.parametrize(
    ("first", "second", "adds"),
    [
        pytest.param({}, {}, False, id="the same"),
        pytest.param({"level": UNLOADED}, {"level": DROPPED}, True, id="deeper"),
        pytest.param({"level": DROPPED}, {"level": UNLOADED}, False, id="less deep"),
        pytest.param({}, {"mode": ABORT}, True, id="another mode"),
        pytest.param({}, {"lease_s": 5.0}, False, id="for less long"),
        pytest.param({"lease_s": 5.0}, {}, True, id="for longer"),
        pytest.param({}, {"scope": M}, True, id="a part by itself"),
        pytest.param(
            {"scope": M}, {"scope": M, "wakes": True}, False, id="one that a request ends"
        ),
        pytest.param(
            {"scope": M, "wakes": True}, {"scope": M}, True, id="one that no request ends"
        ),
    ],
)
def test_a_sleep_that_adds_nothing_changes_nothing(
    first: dict[str, object], second: dict[str, object], adds: bool
) -> None:
    once = slept(operation="op-1", **first)  # type: ignore[arg-type]
    twice = slept(once, operation="op-2", **second)  # type: ignore[arg-type]
    assert (twice is not once) is adds
    assert twice.epoch == once.epoch + adds


def test_a_deeper_sleep_deepens_and_is_undone_alone() -> None:
    deeper = slept(slept(operation="op-1"), level=DROPPED, operation="op-2", running=("op-2",))
    assert deeper.target("b1", "m").level is DROPPED
    assert state_changes.withdraw(deeper, "op-2").target("b1", "m").level is UNLOADED


def test_no_resume_wakes_and_no_wake_up_resumes() -> None:
    both = slept(state_changes.pause(Desired(), "pause", Scope(), KEEP, 0.0), operation="sleep")
    resumed, _ = state_changes.resume(both)
    assert (resumed.target("b1", "m").level, len(resumed.pauses)) == (UNLOADED, 1)
    woken, _ = sleep_changes.wake(both)
    assert (woken.target("b1", "m").level, woken.target("b1", "m").hold) == (
        None,
        EffectivePause(KEEP),
    )
    only = slept()
    assert state_changes.resume(only) == (only, ())
    assert state_changes.resume(only, M) == (only, ())  # nor is it told to resume what is no pause
    paused = state_changes.pause(Desired(), "pause", Scope(), KEEP, 0.0)
    assert sleep_changes.wake(paused) == (paused, ())


@pytest.mark.parametrize(
    ("asleep", "woken", "said"),
    [
        pytest.param([Scope()], M, "the whole cluster", id="a model of all"),
        pytest.param([M], B1, "model m", id="a board of a model"),
        pytest.param([M, Scope()], M, "the whole cluster", id="a model that sleeps twice"),
    ],
)
def test_half_a_sleep_cannot_be_woken(asleep: list[Scope], woken: Scope, said: str) -> None:
    desired = Desired()
    for n, scope in enumerate(asleep):
        desired = slept(desired, scope, operation=f"op-{n}")
    with pytest.raises(OperationConflict, match=said) as failure:
        sleep_changes.wake(desired, woken)
    assert f"op-{len(asleep) - 1}" in failure.value.message


def test_an_adapter_cannot_sleep() -> None:
    with pytest.raises(RequestError, match="adapter"):
        slept(scope=Scope((), (), "law"))


def test_weights_are_woken_before_the_kv_cache() -> None:
    asleep = slept(mode=ABORT)
    with pytest.raises(OperationConflict, match="weights"):
        sleep_changes.wake(asleep, only_kv=True)
    loaded, _ = sleep_changes.wake(asleep, only_weights=True)
    assert loaded.target("b1", "m").level is PAUSED
    assert loaded.target("b1", "m").hold == EffectivePause(ABORT)
    assert loaded.epoch == asleep.epoch + 1
    assert sleep_changes.wake(loaded, only_weights=True) == (loaded, ())
    assert sleep_changes.wake(loaded, only_kv=True)[0].pauses == ()


def test_a_request_wakes_its_own_model_and_only_what_a_request_shall_wake() -> None:
    asleep = slept(wakes=True, models=MODELS)
    assert asleep.epoch == 1
    woken, gone = sleep_changes.wake_for_request(asleep, "small")
    assert {pause.scope.models for pause in gone} == {("small",)}
    assert woken.target("b1", "small").level is None
    assert woken.target("b1", "large").level is UNLOADED
    assert sleep_changes.wake_for_request(woken, "small") == (woken, ())
    assert state_changes.withdraw(asleep, "op").pauses == ()
    by_hand = slept(asleep, Scope(("small",)), operation="by hand")
    assert (
        sleep_changes.wake_for_request(by_hand, "small")[0].target("b1", "small").level is UNLOADED
    )


def test_a_lease_ends_a_sleep() -> None:
    asleep = slept(lease_s=5.0)
    assert state_changes.expire(asleep, 4.9) == (asleep, ())
    assert state_changes.expire(asleep, 5.0)[0].target("b1", "m").level is None


def test_a_renewal_is_told_from_a_sleep_that_changes_more() -> None:
    asleep = slept(scope=M, lease_s=5.0)
    both = ("m", "n")
    assert sleep_changes.renews(asleep, M, KEEP, UNLOADED, both)
    assert sleep_changes.renews(asleep, Scope(("m",), ("b1",)), KEEP, UNLOADED, both)
    assert sleep_changes.renews(asleep, Scope(), KEEP, UNLOADED, ("m",))
    assert not sleep_changes.renews(asleep, Scope(), KEEP, UNLOADED, both)
    assert not sleep_changes.renews(asleep, M, ABORT, UNLOADED, both)
    assert not sleep_changes.renews(asleep, M, KEEP, DROPPED, both)
    assert sleep_changes.renews(slept(wakes=True, models=both), Scope(), KEEP, UNLOADED, both)
    assert sleep_changes.renews(slept(), Scope(), KEEP, UNLOADED, both)
    paused = state_changes.pause(Desired(), "op", M, KEEP, 0.0)
    assert not sleep_changes.renews(paused, M, KEEP, UNLOADED, both)


rests = st.tuples(
    st.sampled_from(("op-1", "op-2", "op-3")),
    st.tuples(scopes, st.none() | st.sampled_from(SleepLevel), st.sampled_from(PauseMode)),
    st.booleans(),
    st.none() | st.integers(1, 20).map(float),
)


@settings(deadline=None)
@given(
    st.lists(rests, max_size=12),
    st.frozensets(st.sampled_from(("op-1", "op-2"))),
    st.integers(0, 40).map(float),
)
def test_what_is_forgotten_of_sleeps_changes_nothing_for_any_board_at_any_time(
    calls: list[tuple[str, tuple[Scope, SleepLevel | None, PauseMode], bool, float | None]],
    running: frozenset[str],
    later_s: float,
) -> None:
    desired, naive = Desired(), Desired()
    for n, (who, (scope, level, mode), wakes, lease_s) in enumerate(calls):
        scope = Scope(scope.models or MODELS[:1], scope.boards)  # noqa: PLW2901
        now_s, ends_s = float(n), None if lease_s is None else n + lease_s
        if level is None:
            desired = state_changes.pause(
                desired, who, scope, mode, now_s, lease_s=lease_s, running=running
            )
            naive = state_changes.hold(naive, ActivePause(who, scope, mode, False, now_s, ends_s))
            continue
        how = {"lease_s": lease_s, "wakes": wakes, "running": running}
        desired = sleep_changes.sleep(desired, who, scope, mode, level, now_s=now_s, **how)  # type: ignore[arg-type]
        for model in scope.models:
            part = Scope((model,), scope.boards)
            naive = state_changes.hold(
                naive, ActivePause(who, part, mode, False, now_s, ends_s, level, wakes)
            )
    for undo in (None, *sorted(running)):
        ours = desired if undo is None else state_changes.withdraw(desired, undo)
        theirs = naive if undo is None else state_changes.withdraw(naive, undo)
        ours, theirs = (
            state_changes.expire(ours, later_s)[0],
            state_changes.expire(theirs, later_s)[0],
        )
        for board in BOARDS:
            for model in MODELS:
                one, other = ours.target(board, model), theirs.target(board, model)
                assert (one.hold, one.level) == (other.hold, other.level)
                there = [report(board, model)]
                assert wakeable(ours, model, there) == wakeable(theirs, model, there)
    assert all(pause.level is None for pause in sleep_changes.wake(desired)[0].pauses)
    assert all(pause.level is not None for pause in state_changes.resume(desired)[0].pauses)


# Operations


ROLL: dict[str, Any] = {"model": "m", "name": "law", "version": "v2", "strategy": "rolling"}
CANARY: dict[str, Any] = {**ROLL, "strategy": "canary"}
HELD: dict[str, Any] = {**ROLL, "strategy": "atomic"}
HERE: dict[str, Any] = {"models": ["m"]}
THERE: dict[str, Any] = {"models": ["n"]}


def going(kind: K, params: dict[str, Any], phase: Phase = Phase.ACCEPTED) -> ControlOperation:
    return recorded("op-1", kind, phase=phase, params=params)


@pytest.mark.parametrize(
    ("one", "kind", "params", "meet"),
    [
        (going(K.SLEEP, HERE), K.WAKE, {}, False),
        (going(K.WAKE, HERE), K.SLEEP, HERE, False),
        (going(K.SLEEP, {"boards": ["b1"]}), K.WAKE, {"boards": ["b2"]}, True),
        (going(K.SLEEP, HERE), K.SLEEP, HERE, True),
        (going(K.WAKE, HERE), K.WAKE, HERE, True),
        (going(K.SLEEP, HERE), K.ADAPTER_ROLLOUT, ROLL, False),
        (going(K.WAKE, {}), K.ADAPTER_ROLLBACK, ROLL, False),
        (going(K.SLEEP, THERE), K.ADAPTER_ROLLOUT, ROLL, True),
        (going(K.ADAPTER_ROLLOUT, CANARY, Phase.OBSERVING), K.SLEEP, {}, False),
        (going(K.ADAPTER_ROLLOUT, ROLL, Phase.SWITCHING), K.SLEEP, THERE, True),
        (going(K.ADAPTER_ROLLOUT, CANARY, Phase.OBSERVING), K.WAKE, HERE, True),
        (going(K.ADAPTER_ROLLOUT, HELD, Phase.STOPPING), K.WAKE, HERE, False),
        (going(K.ADAPTER_STAGE, ROLL), K.SLEEP, HERE, True),
        (going(K.SLEEP, HERE), K.ADAPTER_STAGE, ROLL, True),
        (going(K.SLEEP, {}), K.RESUME, {}, True),
        (going(K.SLEEP, {}), K.PAUSE, {}, True),
        (going(K.PAUSE, {}), K.SLEEP, {}, True),
        (going(K.SLEEP, {}), K.ABORT, {}, True),
    ],
)
def test_operations_beside_a_sleep_or_a_wake_up(
    one: ControlOperation, kind: K, params: dict[str, Any], meet: bool
) -> None:
    why = conflict([one], action(kind, params))
    assert (why is None) is meet, why


@pytest.mark.parametrize("kind", sorted(SERVING), ids=lambda kind: kind.value)
def test_whatever_changes_what_a_model_serves_keeps_it_from_sleeping(kind: K) -> None:
    params = {**ROLL, **HERE}
    assert conflict([going(kind, params)], action(K.SLEEP, HERE)) is not None
    assert conflict([going(K.SLEEP, HERE)], action(kind, params)) is not None


@pytest.mark.parametrize(
    ("kind", "desired", "state", "asleep"),
    [
        pytest.param(K.SLEEP, slept(), S.UNDONE, False, id="a sleep"),
        pytest.param(K.WAKE, Desired(2), S.PARTIAL, False, id="a wake-up"),
    ],
)
def test_a_coordinator_that_starts_takes_a_sleep_back_and_finishes_a_wake_up(
    kind: K, desired: Desired, state: S, asleep: bool
) -> None:
    one = recorded("op", kind, phase=Phase.SLEEPING, params={}, epoch=desired.epoch)
    after, (ended,) = recover(desired, [one], 1.0)
    assert ended.state is state
    assert (after.target("b1", "m").level is not None) is asleep
    assert recover(after, [ended], 2.0) == (after, ())


def test_a_sleep_that_was_acknowledged_outlives_the_coordinator() -> None:
    done = recorded("op", K.SLEEP, state=S.SUCCEEDED, epoch=1)
    assert recover(slept(), [done], 1.0) == (slept(), ())


# What is kept


def test_a_state_of_the_first_schema_is_read() -> None:
    before = state_changes.pause(
        state_changes.set_label(Desired(), "m", "base"), "op", M, KEEP, 3.0
    )
    text = json.loads(write_desired(before))
    for pause in text["desired"]["pauses"]:
        del pause["level"], pause["wakes"]
    for weights in text["desired"]["weights"]:
        for name in weights.keys() - {"model", "label", "step"}:
            del weights[name]
    assert read_desired(json.dumps({**text, "schema": 1})) == before
    with pytest.raises(LedgerFailed, match="fields"):
        read_desired(json.dumps({**text, "schema": SCHEMA}))


def test_what_is_no_state_of_the_first_schema_is_refused() -> None:
    for damaged in ({"pauses": 3}, {"pauses": [7], "weights": []}, {}):
        with pytest.raises(LedgerFailed):
            read_desired(json.dumps({"schema": 1, "desired": damaged}))
    with pytest.raises(LedgerFailed):
        read_operation(json.dumps({"schema": 1, "operation": {}}))


@pytest.mark.parametrize("level", [True, 1.0, "1", 3], ids=repr)
def test_a_level_that_would_not_have_been_written_is_not_read(level: object) -> None:
    text = json.loads(write_desired(slept()))
    text["desired"]["pauses"][0]["level"] = level
    with pytest.raises(LedgerFailed, match="level"):
        read_desired(json.dumps(text))


@settings(deadline=None)
@given(desires)
def test_what_sleeps_comes_back_as_it_was_written(desired: Desired) -> None:
    back = read_desired(write_desired(desired))
    assert back == desired
    assert [type(pause.level) for pause in back.pauses] == [type(p.level) for p in desired.pauses]


# Who sleeps, and who may


def report(
    board: str = "b1", model: str = "m", state: BoardState = BoardState.READY, **figures: object
) -> BoardReport:
    return BoardReport(board, model, state, **figures)  # type: ignore[arg-type]


ON_REQUEST = slept(scope=M, wakes=True)
LOST = BoardState.LOST


@pytest.mark.parametrize(
    ("desired", "boards", "wakes"),
    [
        pytest.param(Desired(), [report()], False, id="awake"),
        pytest.param(ON_REQUEST, [report(), report("b2")], True, id="all sleep"),
        pytest.param(ON_REQUEST, [], True, id="no board was heard yet"),
        pytest.param(slept(scope=M), [report()], False, id="until somebody wakes it"),
        pytest.param(slept(ON_REQUEST, operation="x"), [report()], False, id="one of two sleeps"),
        pytest.param(
            slept(scope=B1, wakes=True, models=("m",)),
            [report(), report("b2")],
            False,
            id="another board is awake",
        ),
        pytest.param(
            slept(scope=B1, wakes=True, models=("m",)),
            [report(), report("b2", state=LOST)],
            True,
            id="the other board is lost",
        ),
        pytest.param(
            state_changes.pause(Desired(), "op", M, KEEP, 0.0), [report()], False, id="only paused"
        ),
    ],
)
def test_when_a_request_wakes_its_model(
    desired: Desired, boards: list[BoardReport], wakes: bool
) -> None:
    assert wakeable(desired, "m", boards) is wakes


IDLE = report(idle_s=60.0)


@pytest.mark.parametrize(
    ("desired", "boards", "idle"),
    [
        pytest.param(Desired(), [IDLE], True, id="long enough"),
        pytest.param(Desired(), [report(idle_s=59.0)], False, id="not long enough"),
        pytest.param(Desired(), [IDLE, report("b2", idle_s=1.0)], False, id="one of two"),
        pytest.param(Desired(), [], False, id="no board"),
        pytest.param(Desired(), [report(idle_s=60.0, paused=1)], False, id="a paused generation"),
        pytest.param(Desired(), [report(idle_s=60.0, queued=1)], False, id="a queue"),
        pytest.param(
            Desired(), [report(state=BoardState.RECOVERING, idle_s=60.0)], False, id="recovering"
        ),
        pytest.param(slept(), [IDLE], False, id="asleep already"),
        pytest.param(
            state_changes.pause(Desired(), "op", M, KEEP, 0.0),
            [IDLE],
            False,
            id="somebody paused it",
        ),
        pytest.param(
            state_changes.pause(Desired(), "op", Scope((), (), "law"), KEEP, 0.0),
            [IDLE],
            False,
            id="somebody paused an adapter of it",
        ),
        pytest.param(
            state_changes.pause(Desired(), "op", Scope(("n",)), KEEP, 0.0),
            [IDLE],
            True,
            id="another",
        ),
    ],
)
def test_when_nobody_uses_a_model(desired: Desired, boards: list[BoardReport], idle: bool) -> None:
    assert unused(desired, "m", boards, 60.0) is idle


@pytest.mark.parametrize(
    ("groups", "together"),
    [
        pytest.param([SleepPolicy()], SleepPolicy(), id="never"),
        pytest.param(
            [SleepPolicy(5.0, load_s=10.0), SleepPolicy(9.0, load_s=20.0)],
            SleepPolicy(9.0, load_s=20.0),
            id="the longest",
        ),
        pytest.param(
            [SleepPolicy(5.0), SleepPolicy(wakes=False)], SleepPolicy(wakes=False), id="one never"
        ),
        pytest.param([], SleepPolicy(), id="none"),
    ],
)
def test_groups_that_serve_one_model_sleep_together(
    groups: list[SleepPolicy], together: SleepPolicy
) -> None:
    assert SleepPolicy.of(groups) == together
