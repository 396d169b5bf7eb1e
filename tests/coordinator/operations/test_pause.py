"""Leases end, whatever the head's disk does, and a successor agrees with what was said."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rkserve.control.calls import OperationKind, OperationRequest, PauseAction
from rkserve.control.operations import Phase
from rkserve.coordinator.state.ledger import Ledger
from rkserve.core.desired_state import PauseMode
from rkserve.core.errors import LedgerFailed, OperationTimeout
from rkserve.core.files import boot_id
from tests.support.boards.fake_boards import eventually
from tests.support.boards.own_time import Loop
from tests.support.cluster.fake_cluster import MODEL, Control, FakeBoard, FakeCluster, started

pytestmark = pytest.mark.virtual_time

K = OperationKind
LEASE_S = 30.0


@dataclass
class Disk:
    """Whether anything can be written on it."""

    full: bool = False
    refused: int = 0


@dataclass
class OnDisk:
    """A ledger that fails while its disk is full."""

    real: Ledger
    disk: Disk = field(default_factory=Disk)

    def write(self, **what: Any) -> None:
        if self.disk.full:
            self.disk.refused += 1
            raise LedgerFailed("the disk is full")
        self.real.write(**what)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@asynccontextmanager
async def control(folder: Path) -> AsyncIterator[tuple[Control, Disk]]:
    """A Coordinator that every board follows, and the disk of its ledger."""
    disk = Disk()
    it = Control(folder, FakeCluster.of("a", "b", "c"))
    it.wrap_ledger = lambda ledger: OnDisk(ledger, disk)
    async with started(it):
        yield it, disk


async def test_a_lease_ends_while_the_disk_is_full_and_that_is_written_down_later(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as (it, disk):
        paused = await it.pause(lease_s=LEASE_S)
        router = asyncio.create_task(it.it.desired(it.desired.epoch, 60.0))
        disk.full = True
        it.now_s += LEASE_S + 1
        await eventually(lambda: it.held == [])
        assert (await router).pauses == ()
        assert len(it.desired.pauses) == 1  # so says the disk
        with pytest.raises(LedgerFailed):
            await it.call(K.LABEL, model=MODEL, label="new")  # nobody else may go on like that
        assert it.cluster["a"].desired == await it.it.desired(0, 0.0)
        disk.full = False
        await eventually(lambda: it.desired.pauses == ())
        await eventually(lambda: it.follows)
        lines = [line for line in it.it.audit(10) if line.who == "lease"]
        assert [line.operation for line in lines] == [paused.operation.id]
        assert b"rkserve_leases_expired_total 1.0" in it.it.metrics()


async def test_what_is_asked_next_writes_the_end_of_a_lease_down_with_it(tmp_path: Path) -> None:
    async with control(tmp_path) as (it, disk):
        await it.pause(lease_s=LEASE_S)
        disk.full = True
        it.now_s += LEASE_S + 1
        await eventually(lambda: it.held == [])
        disk.full = False
        await it.call(K.LABEL, model=MODEL, label="new")
        assert it.desired.pauses == ()
        assert it.desired.weights_of(MODEL).label == "new"
        assert it.held == []


async def test_a_successor_that_does_not_know_what_boards_were_told_moves_them_all_on(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as (it, disk):
        for version in ("v1", "v2"):
            await it.stage(it.store.add(version, version.encode() * 40))
        await it.roll("v1")
        rolling = asyncio.create_task(it.roll("v2", strategy="canary", auto=False))
        await eventually(lambda: any(one.phase is Phase.OBSERVING for one in it.it._state.running))
        await it.pause(lease_s=LEASE_S)
        disk.full = True
        it.now_s += LEASE_S + 1
        await eventually(lambda: it.held == [])
        await it.close()
        rolling.cancel()
        disk.full = False
        await it.open()  # it finds a lease that has ended, and a canary that nobody observes
        await eventually(lambda: it.follows)
        assert it.held == []
        [line] = it.desired.lines
        assert line.candidate is None


@pytest.mark.promise("Pause", "A lease ends it if its caller is gone")
async def test_a_lease_that_ends_while_there_is_no_coordinator_has_ended_for_the_next_one(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as (it, _):
        await it.pause(lease_s=LEASE_S)
        it.now_s += LEASE_S + 1
        await it.again()
        await eventually(lambda: it.follows)
        assert it.held == []


async def test_a_pause_whose_coordinator_was_frozen_beyond_its_limit_fails_and_is_undone(
    tmp_path: Path,
) -> None:
    """Its caller has the error of a timeout already, and believes that nothing is paused."""
    it = Control(tmp_path, FakeCluster.of("a", "b", "c"))
    async with started(it):
        stopped: set[str] = set()

        def freeze(board: FakeBoard, method: str) -> None:
            if method == "adopt" and board.is_held:
                stopped.add(board.board_id)
                if len(stopped) == 3:
                    put_forward(60.0)

        it.cluster.after = freeze
        outcome = await it.pause(timeout_s=5.0)
        assert stopped == {"a", "b", "c"}
        assert outcome.status == 504
        assert outcome.operation.error is not None
        assert outcome.operation.error.code == "operation_timeout"
        await eventually(lambda: it.follows)
        assert it.held == []
        assert it.desired.pauses == ()
        it.cluster.after = lambda _board, _method: None
        assert (await it.pause(timeout_s=5.0)).status == 200


@pytest.mark.parametrize(
    ("boot", "status"),
    [
        pytest.param(boot_id(), 504, id="sent on this machine"),
        pytest.param("another", 200, id="sent on a machine with another clock"),
    ],
)
async def test_a_pause_that_reaches_the_coordinator_after_its_limit_is_not_begun(
    tmp_path: Path, boot: str, status: int
) -> None:
    it = Control(tmp_path, FakeCluster.of("a"))
    async with started(it):
        call = OperationRequest(
            PauseAction(mode=PauseMode.KEEP),
            timeout_s=5.0,
            boot=boot,
            sent_s=time.monotonic() - 6.0,
        )
        try:
            found = (await it.it.perform(call)).status
        except OperationTimeout as exc:
            found = exc.http_status
        assert found == status
        assert bool(it.held) is (status == 200)


def put_forward(seconds: float) -> None:
    """Have this process be frozen for a while, as by SIGSTOP."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, Loop)
    loop.clock.now_s += seconds
