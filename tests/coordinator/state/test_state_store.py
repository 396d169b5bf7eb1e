"""The desired state in memory is that of the ledger, or a consequence of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rkserve.control import state_changes
from rkserve.control.calls import OperationKind
from rkserve.control.operations import OperationState
from rkserve.coordinator.state.ledger import AuditEntry, Ledger
from rkserve.coordinator.state.state_store import LEAP, StateStore
from rkserve.core.desired_state import Desired, PauseMode, Scope
from rkserve.core.errors import LedgerFailed
from tests.support.values.control_values import recorded

K, S = OperationKind, OperationState
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
