"""A Coordinator that starts leaves nothing half-done, and finds nothing to do a second time."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkserve.control import state_changes
from rkserve.control.calls import OperationKind
from rkserve.control.operations import ControlOperation, OperationState, Phase
from rkserve.control.recovery import INTERRUPTED, recover
from rkserve.core.desired_state import ActivePause, Desired, PauseMode, Scope
from tests.support.values.control_values import SERVING, desires, operations, recorded, version

K: TypeAlias = OperationKind
P: TypeAlias = Phase
S: TypeAlias = OperationState
V1, V2 = version("law", "v1"), version("law", "v2")
LAW: dict[str, Any] = {"model": "m", "name": "law", "version": "v2"}


def served(*versions: str) -> Desired:
    desired = Desired()
    for one in versions:
        begun = state_changes.begin(desired, "m", version("law", one))
        desired = state_changes.commit(begun, "m", "law")
    return desired


def held(desired: Desired, operation: str = "op") -> Desired:
    return state_changes.hold(
        desired, ActivePause(operation, Scope(("m",), (), "law"), PauseMode.KEEP)
    )


def found(kind: K, phase: P, epoch: int = 0, state: S = S.RUNNING) -> ControlOperation:
    return recorded("op", kind, state=state, phase=phase, params=LAW, epoch=epoch)


@pytest.mark.parametrize(
    ("desired", "operation", "state"),
    [
        pytest.param(held(Desired()), found(K.PAUSE, P.STOPPING, 1), S.UNDONE, id="a pause"),
        pytest.param(Desired(), found(K.PAUSE, P.ACCEPTED), S.FAILED, id="a pause not made yet"),
        pytest.param(Desired(2), found(K.PAUSE, P.UNDOING, 2), S.UNDONE, id="a pause being undone"),
        pytest.param(Desired(2), found(K.RESUME, P.RELEASING, 2), S.PARTIAL, id="a resume"),
        pytest.param(Desired(2), found(K.RESUME, P.ACCEPTED), S.FAILED, id="a resume not made yet"),
        pytest.param(Desired(2), found(K.LABEL, P.RELEASING, 2), S.PARTIAL, id="a label"),
        pytest.param(served("v1"), found(K.ADAPTER_STAGE, P.STAGING), S.FAILED, id="staging"),
        pytest.param(
            state_changes.add_version(served("v1"), "m", V2),
            found(K.ADAPTER_STAGE, P.RELEASING, 3),
            S.PARTIAL,
            id="staged",
        ),
        pytest.param(
            served("v1"), found(K.ADAPTER_RETIRE, P.RELEASING, 2), S.PARTIAL, id="retired"
        ),
        pytest.param(Desired(), found(K.CACHE_RESET, P.STOPPING), S.FAILED, id="a cache reset"),
        pytest.param(Desired(), found(K.ABORT, P.STOPPING), S.FAILED, id="an abort"),
        pytest.param(
            served("v1"), found(K.ADAPTER_ROLLOUT, P.STAGING), S.FAILED, id="a rollout, staging"
        ),
        pytest.param(
            held(served("v1")),
            found(K.ADAPTER_ROLLOUT, P.STOPPING, 3),
            S.UNDONE,
            id="a rollout that holds",
        ),
        pytest.param(
            state_changes.switch(state_changes.begin(served("v1"), "m", V2), "m", "law", ["b1"]),
            found(K.ADAPTER_ROLLOUT, P.SWITCHING, 4),
            S.UNDONE,
            id="a rolling one half-way",
        ),
        pytest.param(
            state_changes.begin(served("v1"), "m", V2, weight=0.5),
            found(K.ADAPTER_ROLLOUT, P.OBSERVING, 3),
            S.UNDONE,
            id="a canary",
        ),
        pytest.param(
            served("v1", "v2"),
            found(K.ADAPTER_ROLLOUT, P.RELEASING, 4),
            S.PARTIAL,
            id="a rollout that has committed",
        ),
        pytest.param(
            served("v1"),
            found(K.ADAPTER_ROLLOUT, P.UNDOING, 4),
            S.UNDONE,
            id="a rollout that was going back",
        ),
        pytest.param(
            held(served("v1", "v2")),
            found(K.ADAPTER_ROLLBACK, P.STOPPING, 5),
            S.UNDONE,
            id="a rollback that holds",
        ),
        pytest.param(
            state_changes.rollback(served("v1", "v2"), "m", "law"),
            found(K.ADAPTER_ROLLBACK, P.RELEASING, 5),
            S.PARTIAL,
            id="a rollback that has committed",
        ),
        pytest.param(
            held(served("v1")),
            found(K.ADAPTER_ROLLOUT, P.DONE, 3, S.UNDONE),
            None,
            id="a pause that a dead rollout left",
        ),
        pytest.param(
            held(served("v1")), found(K.PAUSE, P.DONE, 3, S.FAILED), None, id="of a failed pause"
        ),
    ],
)
def test_what_was_going_on_is_undone_or_stands(
    desired: Desired, operation: ControlOperation, state: S | None
) -> None:
    after, changed = recover(desired, [operation], 50.0)
    assert after.pauses == ()
    assert all(line.candidate is None for line in after.lines)
    before, now = desired.line("m", "law"), after.line("m", "law")
    assert (before and before.active) == (now and now.active)
    if state is None:
        assert changed == ()
        return
    (one,) = changed
    assert (one.state, one.finished_s, one.epoch) == (state, 50.0, operation.epoch)
    assert one.error is None if state is S.PARTIAL else one.error is not None
    assert one.error is None or (one.error.code, one.error.status) == (INTERRUPTED, 503)


def test_a_pause_that_was_acknowledged_stays() -> None:
    desired = held(Desired())
    done = found(K.PAUSE, P.DONE, 1, S.SUCCEEDED)
    assert recover(desired, [done], 50.0) == (desired, ())
    assert recover(desired, [], 50.0) == (desired, ()), "its record was forgotten long ago"


def test_a_lease_that_ended_meanwhile_is_over() -> None:
    desired = state_changes.pause(Desired(), "op", Scope(), PauseMode.KEEP, 10.0, lease_s=5)
    done = found(K.PAUSE, P.DONE, 1, S.SUCCEEDED)
    assert recover(desired, [done], 14.9)[0] is desired
    assert recover(desired, [done], 15.0)[0] == Desired(2)


def test_all_that_is_taken_back_is_one_epoch() -> None:
    desired = held(state_changes.begin(served("v1"), "m", V2, weight=0.5), "a")
    desired = held(state_changes.pause(desired, "b", Scope(), PauseMode.KEEP, 0.0, lease_s=1), "op")
    rollout = recorded("a", K.ADAPTER_ROLLOUT, params=LAW, epoch=3)
    after, changed = recover(desired, [found(K.PAUSE, P.STOPPING, 5), rollout], 9.0)
    assert (after.epoch, after.pauses, len(changed)) == (desired.epoch + 1, (), 2)


def test_a_record_without_its_parameters_does_not_keep_the_coordinator_from_starting() -> None:
    (one,) = recover(Desired(1), [recorded("op", K.ADAPTER_ROLLOUT, epoch=1)], 9.0)[1]
    assert one.state is S.UNDONE


@settings(deadline=None, max_examples=150)
@given(desires, st.lists(operations, max_size=4, unique_by=lambda one: one.id), st.floats(0, 1e10))
def test_whatever_is_found_nothing_half_done_is_left_and_twice_is_once(
    desired: Desired, these: list[ControlOperation], now_s: float
) -> None:
    after, changed = recover(desired, these, now_s)
    known = {one.id: one for one in (*these, *changed)}
    assert all(one.over for one in known.values())
    assert {one.id for one in changed} == {one.id for one in these if not one.over}
    assert all(line.candidate is None for line in after.lines)
    assert after is desired or after.epoch == desired.epoch + 1
    assert {*after.pauses} <= {*desired.pauses}
    for pause in after.pauses:
        assert pause.expires_s is None or pause.expires_s > now_s
        by = known.get(pause.operation)
        assert by is None or (by.kind not in SERVING and by.state not in (S.FAILED, S.UNDONE))
    assert recover(after, known.values(), now_s) == (after, ())


@settings(deadline=None, max_examples=200)
@given(
    st.lists(st.sampled_from(("op-1", "op-2", "op-3", "op-4")), min_size=1, max_size=8),
    st.dictionaries(
        st.sampled_from(("op-1", "op-2", "op-3")),
        st.tuples(st.sampled_from(K), st.sampled_from(S)),
        min_size=1,
    ),
)
def test_of_pauses_those_stay_that_were_acknowledged(
    makers: list[str], known: dict[str, tuple[K, S]]
) -> None:
    desired = Desired()
    for maker in makers:
        desired = held(desired, maker)
    these = [
        recorded(name, kind, state=state, params=LAW, epoch=1)
        for name, (kind, state) in known.items()
    ]
    after, _ = recover(desired, these, 0.0)
    acknowledged = {
        name
        for name, (kind, state) in known.items()
        if kind not in SERVING
        and (state in (S.SUCCEEDED, S.PARTIAL) or (state is S.RUNNING and kind in STANDING))
    }
    left = {one for one in makers if one in acknowledged or one not in known}
    assert {one.operation for one in after.pauses} == left


# Kinds that make no pause, so that a pause under their name is none that they would leave behind.
STANDING = {K.RESUME, K.WAKE, K.LABEL, K.ADAPTER_STAGE}
