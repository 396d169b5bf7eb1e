"""The desired state in memory is that of the ledger; recovery leaves no operation unfinished."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.control import state_changes
from rkserve.control.calls import OperationKind
from rkserve.control.operations import ControlOperation, OperationState, Phase
from rkserve.coordinator.state.ledger import AuditEntry, Ledger
from rkserve.coordinator.state.state_store import INTERRUPTED, LEAP, StateStore, recover
from rkserve.core.desired_state import ActivePause, Desired, PauseMode, Scope
from rkserve.core.errors import LedgerFailed
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
STANDING = {K.RESUME, K.WAKE, K.LABEL, K.ADAPTER_STAGE, K.DRAIN, K.UNDRAIN}


PAUSED = state_changes.pause(Desired(), "op-1", Scope(), PauseMode.KEEP, 5.0, lease_s=2.0)
RESUMED = state_changes.expire(PAUSED, 9.0)[0]


class FullLedger:
    """A ledger whose disk is full as long as ``full`` is set."""

    def __init__(self, real: Ledger) -> None:
        self.real = real
        self.full = False

    def write(self, **what: Any) -> None:
        if self.full:
            raise LedgerFailed("the disk is full")
        self.real.write(**what)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[FullLedger]:
    with closing(Ledger.open(tmp_path)) as real:
        yield FullLedger(real)


@pytest.fixture
def state(ledger: FullLedger) -> StateStore:
    return StateStore(ledger)  # type: ignore[arg-type]


def test_a_change_is_in_the_ledger_before_it_is_in_effect(
    state: StateStore, ledger: FullLedger
) -> None:
    begun = recorded("op-1", K.PAUSE)
    ledger.full = True
    with pytest.raises(LedgerFailed):
        state.write(PAUSED, begun)
    assert (state.desired, state.running, state.operation("op-1")) == (Desired(), (), None)
    ledger.full = False
    state.write(PAUSED, begun)
    assert (state.desired, state.running) == (PAUSED, (begun,))
    assert ledger.desired() == PAUSED


def test_an_ended_operation_is_no_longer_running(state: StateStore) -> None:
    begun = recorded("op-1", K.PAUSE, key="k")
    state.write(PAUSED, begun)
    ended = begun.end(S.SUCCEEDED, 9.0)
    state.write(None, ended)
    assert (state.running, state.by_key("k"), state.operation("op-1")) == ((), ended, ended)
    assert state.unsettled() == [ended], "its pause is in effect"
    state.show(ended)
    assert state.running == ()


def test_a_consequence_is_in_effect_without_the_ledger_and_written_with_the_next_change(
    state: StateStore, ledger: FullLedger
) -> None:
    begun = recorded("op-1", K.PAUSE)
    state.write(PAUSED, begun)
    ledger.full = True
    ended = begun.end(S.UNDONE, 9.0)
    line = AuditEntry(9.0, "lease", "resume")
    state.derive(RESUMED, ended, audit=[line])
    assert state.desired.pauses == ()
    assert state.desired.epoch == RESUMED.epoch + LEAP
    assert (state.running, state.operation("op-1")) == ((), ended)
    assert ledger.desired() == PAUSED
    with pytest.raises(LedgerFailed):
        state.catch_up()
    ledger.full = False
    state.catch_up()
    assert ledger.desired() == state.desired
    assert ledger.operation("op-1") == ended
    assert ledger.audit() == [line]
    state.catch_up()
    assert len(ledger.audit()) == 1


def test_an_epoch_in_use_elsewhere_is_not_used_again(state: StateStore) -> None:
    state.write(PAUSED)
    state.jump(PAUSED.epoch)
    assert state.desired == PAUSED
    state.jump(40)
    assert (state.desired.epoch, state.desired.pauses) == (41, PAUSED.pauses)


async def test_a_reader_waits_for_the_next_state(state: StateStore) -> None:
    assert await state.after(-1, 60.0) == Desired()
    assert await state.after(0, 0.001) == Desired()
    waiting = asyncio.create_task(state.after(0, 60.0))
    await asyncio.sleep(0)
    state.write(PAUSED)
    assert await waiting == PAUSED


def test_stagings_and_partial_operations_are_found(state: StateStore) -> None:
    staged = recorded("op-1", K.ADAPTER_STAGE).end(S.SUCCEEDED, 1.0)
    partial = recorded("op-2", K.REBASE).end(S.PARTIAL, 2.0)
    other = recorded("op-3", K.LABEL).end(S.SUCCEEDED, 3.0)
    state.write(None, staged, partial, other)
    assert {one.id for one in state.stagings()} == {"op-1", "op-2"}
    assert state.partial() == [partial]
    assert [one.id for one in state.operations(2)] == ["op-3", "op-2"]
