"""A Coordinator that is killed at any moment leaves nobody paused, nothing half-done, no mixture.

Each operation is run once to count the moments at which it writes or asks, and then once for each
of them with a kill there: before it, when nothing has gone out, or after it, when the answer is
lost. From that moment on nothing of the killed one reaches a board or the disk.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rkserve.control.calls import OperationKind
from rkserve.control.operations import UPDATES, OperationOutcome, OperationState, Phase
from rkserve.coordinator.state.ledger import Ledger
from rkserve.core.board_report import BoardReport
from rkserve.core.errors import BoardStartFailed, RkserveError
from rkserve.core.messages import Event, GenerateRequest
from tests.support.boards.fake_boards import eventually
from tests.support.cluster.fake_cluster import MODEL, Control, FakeBoard, FakeCluster, Killed
from tests.support.sampler import Sampler

pytestmark = [pytest.mark.virtual_time, pytest.mark.slow]

K, S = OperationKind, OperationState
NEVER = 10**9
BOARDS = ("a", "b")


@dataclass
class Fuse:
    """Burns at the moment ``at``; after that nothing of the Coordinator goes out any more."""

    at: int = NEVER
    passed: int = 0
    burnt: bool = False

    def moment(self) -> None:
        self.burnt = self.burnt or self.passed == self.at
        self.passed += 1
        if self.burnt:
            raise Killed


@dataclass
class FusedLedger:
    """The ledger of a process that can be killed before and after it writes."""

    real: Ledger
    fuse: Fuse

    def write(self, **what: Any) -> None:
        self.fuse.moment()
        self.real.write(**what)
        self.fuse.moment()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@dataclass
class FusedLink:
    """The boards of a process that can be killed before it asks and before it hears."""

    real: FakeCluster
    fuse: Fuse

    async def open(
        self, request: GenerateRequest, replica: str, take: object = None
    ) -> AsyncGenerator[Event, None]:
        raise AssertionError(f"the Coordinator generates nothing: {request} {replica}")
        yield

    async def ask(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        self.fuse.moment()
        said = await self.real.ask(replica, method, *args, timeout_s=timeout_s)
        self.fuse.moment()
        return said

    def cache_source(self, replica: str, tokens: int) -> None:
        return None

    async def ask_all(
        self, method: str, *args: Any, timeout_s: float, take: Callable[[Any], None]
    ) -> None:
        async def one(replica: str) -> None:
            with suppress(RkserveError):
                take(await self.ask(replica, method, *args, timeout_s=timeout_s))

        await asyncio.gather(*(one(board.replica) for board in self.real.boards.values()))

    @property
    def complete(self) -> bool:
        return self.real.complete

    async def reports(self) -> list[BoardReport]:
        return await self.real.reports()

    def has_new(self) -> bool:
        return self.real.has_new()

    async def has_running(self) -> bool:
        return await self.real.has_running()

    async def start_failure(self) -> BoardStartFailed | None:
        return None


async def paused(it: Control) -> None:
    await it.pause()


async def slept(it: Control) -> None:
    await it.sleep()


async def two_versions(it: Control) -> None:
    for version in ("v1", "v2"):
        await it.stage(it.store.add(version, version.encode() * 40))
    await it.roll("v1")


async def second_served(it: Control) -> None:
    await two_versions(it)
    await it.roll("v2")


async def nothing(_it: Control) -> None:
    """It begins with an empty cluster."""


async def stage_v1(it: Control) -> OperationOutcome:
    return await it.stage(it.store.add("v1", b"v1" * 40))


async def promoted_canary(it: Control) -> OperationOutcome:
    rolling = asyncio.create_task(it.roll("v2", strategy="canary", auto=False))
    await eventually(
        lambda: rolling.done() or any(one.phase is Phase.OBSERVING for one in it.it._state.running)
    )
    if not rolling.done():
        await asyncio.gather(rolling, it.call(K.ADAPTER_PROMOTE, model=MODEL, name="tone"))
    return await rolling


ONE, TWO = b"base one" * 30, b"base two" * 31


async def on_base_one(it: Control) -> None:
    await it.rebase(it.store.add_base("one", ONE))


async def base_two_at_once(it: Control) -> OperationOutcome:
    return await it.update(it.store.add_base("two", TWO), 5)


async def base_two_in_turn(it: Control) -> OperationOutcome:
    return await it.rebase(it.store.add_base("two", TWO))


async def update_of_an_adapter(it: Control) -> OperationOutcome:
    return await it.update(it.store.add("v2", b"v2" * 40), 5)


Scene = Callable[[Control], Awaitable[object]]
Act = Callable[[Control], Awaitable[OperationOutcome]]

SCENES: dict[str, tuple[Scene, Act]] = {
    "pause": (nothing, lambda it: it.pause()),
    "pause with a lease": (nothing, lambda it: it.pause(lease_s=1000)),
    "resume": (paused, lambda it: it.resume()),
    "sleep": (nothing, lambda it: it.sleep()),
    "deeper sleep": (slept, lambda it: it.sleep(level=2)),
    "wake": (slept, lambda it: it.wake()),
    "wake for a request": (
        lambda it: it.sleep(models=[MODEL], wakes=True),
        lambda it: it.wake(models=[MODEL], requested=True),
    ),
    "label": (nothing, lambda it: it.call(K.LABEL, model=MODEL, label="x")),
    "reset": (nothing, lambda it: it.call(K.CACHE_RESET, reset_running_requests=True)),
    "stage": (nothing, stage_v1),
    "atomic": (two_versions, lambda it: it.roll("v2")),
    "atomic that switches": (two_versions, lambda it: it.roll("v2", in_flight="switch")),
    "canary": (two_versions, promoted_canary),
    "pause of an adapter": (two_versions, lambda it: it.pause(adapter="tone")),
    "abort": (nothing, lambda it: it.call(K.ABORT)),
    "rolling": (two_versions, lambda it: it.roll("v2", strategy="rolling")),
    "rollback": (
        second_served,
        lambda it: it.call(K.ADAPTER_ROLLBACK, model=MODEL, name="tone"),
    ),
    "update of an adapter": (two_versions, update_of_an_adapter),
    "update of an adapter that pins": (
        two_versions,
        lambda it: it.update(it.store.add("v2", b"v2" * 40), 5, in_flight="pin"),
    ),
    "update of base weights": (on_base_one, base_two_at_once),
    "base weights in turn": (on_base_one, base_two_in_turn),
    "back to the folder's own": (on_base_one, lambda it: it.rebase(None)),
    "retire": (two_versions, lambda it: it.call(K.ADAPTER_RETIRE, model=MODEL, name="tone")),
}


SLEEPS = ("sleep", "deeper sleep", "wake", "wake for a request")
ROLLOUTS = ("atomic", "atomic that switches", "rolling", "canary")
# In these, boards change one by one: for a while they differ, as they are meant to.
MIXED = ("rolling", "canary", "base weights in turn", "back to the folder's own")


def bare(board: FakeBoard) -> str | None:
    """Return what a board gives to a request by the bare name."""
    line = None if board.target is None else board.target.line("tone")
    ref = None if line is None else line.serves(board.board_id, "session")
    return None if ref is None else ref.version


async def prepared(folder: Path, name: str) -> Control:
    """Return a Coordinator, not started, on what a scene begins with; it is played on copies."""
    it = Control(folder, FakeCluster.of(*BOARDS))
    await it.open()
    await eventually(lambda: it.follows)
    await SCENES[name][0](it)
    await eventually(lambda: it.follows)
    await it.close()
    return it


def copied(before: Control, folder: Path) -> Control:
    """Return one that finds the same on its disk, its boards and in its store."""
    shutil.copytree(before.folder, folder)
    return Control(folder, copy.deepcopy(before.cluster), copy.deepcopy(before.store))


async def play(it: Control, name: str, fuse: Fuse) -> list[str]:
    """Play a scene to its end, or to the kill, so that ``it`` is the successor, not yet started;
    return every moment in which boards that emit would have answered with different versions.
    """
    armed = Fuse()
    it.wrap_link = lambda link: FusedLink(link, armed)
    it.wrap_ledger = lambda ledger: FusedLedger(ledger, armed)
    await it.open()
    await eventually(lambda: it.follows)
    mixtures: list[str] = []

    def look(board: FakeBoard, method: str) -> None:
        versions = {bare(one) for one in it.cluster.boards.values() if one.serves} - {None}
        bases = {one.base for one in it.cluster.boards.values() if one.serves}
        if len(versions) > 1 or len(bases) > 1:
            mixtures.append(f"{versions}, {bases} after {method} on {board.board_id}")

    it.cluster.after = look
    armed.passed, armed.at = 0, fuse.at
    with suppress(Killed):
        await SCENES[name][1](it)
    fuse.passed, fuse.burnt = armed.passed, armed.burnt
    armed.at, armed.burnt = armed.passed, True
    await it.close()
    it.wrap_link = lambda link: link
    it.wrap_ledger = lambda ledger: ledger
    return mixtures


async def expect_order(it: Control, name: str, mixtures: list[str]) -> None:
    """Check all that must hold whatever became of the operation."""
    await eventually(lambda: it.follows)
    assert not it.it._state.running
    assert name in MIXED or mixtures == []
    assert all(line.candidate is None for line in it.desired.lines)
    versions = {bare(board) for board in it.cluster.boards.values()}
    assert len(versions) == 1
    weights = it.desired.weights_of(MODEL)
    assert weights.rebase is None
    base = "" if weights.base is None else weights.base.digest
    assert {board.base for board in it.cluster.boards.values()} == {base}


async def count(it: Control, name: str) -> int:
    """Return how many moments a scene has when nobody is killed."""
    fuse = Fuse()
    mixtures = await play(it, name, fuse)
    assert name in MIXED or mixtures == []
    await it.open()
    await it.close()
    return fuse.passed


@pytest.mark.parametrize("name", SCENES)
async def test_killed_at_any_moment_its_successor_finds_or_makes_order(
    tmp_path: Path, name: str, sampled: Sampler
) -> None:
    before = await prepared(tmp_path / "before", name)
    moments = await count(copied(before, tmp_path / "whole"), name)
    assert moments >= 4
    killed = 0
    tried = sampled(range(moments))
    for at in tried:
        fuse = Fuse(at)
        it = copied(before, tmp_path / str(at))
        mixtures = await play(it, name, fuse)
        await it.open()
        try:
            await expect_order(it, name, mixtures)
            check(it, name, at)
            if it.asleep:
                assert (await it.wake()).status == 200
                assert it.asleep == []
            assert (await it.pause(key="after")).status == 200
            assert it.held == list(BOARDS)
            assert (await it.resume()).status == 200
            assert it.held == []
        finally:
            await it.close()
        killed += fuse.burnt
    assert killed >= sum(
        at < moments - 4 for at in tried
    )  # the last ones may not come: reports come when they come


def check(it: Control, name: str, at: int) -> None:
    """Check what is special to a scene: what was acknowledged holds, all else does not."""
    operation = it.it.operations(1)[0] if it.it.operations(1) else None
    state = None if operation is None else operation.state
    stands = state in (S.SUCCEEDED, S.PARTIAL)
    version = bare(it.cluster["a"])
    if name.startswith("pause"):
        paused = operation is not None and operation.kind is K.PAUSE and state is S.SUCCEEDED
        assert it.held == (list(BOARDS) if paused else []), (at, state)
    elif name in SLEEPS:
        asked = K.SLEEP if "sleep" in name else K.WAKE
        done = operation is not None and operation.kind is asked and stands
        if done and "deeper" in name:  # and not the one before
            done = operation is not None and operation.params.get("level") == 2
        asleep = done if asked is K.SLEEP else not done
        # One that slept before sleeps on, less deep, where it is not to sleep deeper.
        assert it.asleep == (list(BOARDS) if asleep or "deeper" in name else []), (at, operation)
        level = it.desired.target("a", MODEL).level
        assert level == ((2 if done else 1) if "deeper" in name else int(asleep) or None), at
    elif name == "resume":
        resumed = operation is not None and operation.kind is K.RESUME and stands
        assert it.held == ([] if resumed else list(BOARDS)), (at, state)
    else:
        assert it.held == [], (at, state)
    if name in ROLLOUTS:
        came_in = any(
            one.kind is K.ADAPTER_ROLLOUT
            and one.params["version"] == "v2"
            and one.state in (S.SUCCEEDED, S.PARTIAL)
            for one in it.it.operations(10)
        )
        assert version == ("v2" if came_in else "v1"), (at, operation)
    check_weights(it, name, at)
    if name == "rollback":
        back = operation is not None and operation.kind is K.ADAPTER_ROLLBACK and stands
        assert version == ("v1" if back else "v2"), (at, operation)
    if name == "retire":
        gone = operation is not None and operation.kind is K.ADAPTER_RETIRE and stands
        assert (it.desired.lines == ()) is gone, (at, operation)


def check_weights(it: Control, name: str, at: int) -> None:
    """Check that an update came in as a whole, or not at all."""
    weights, done = it.desired.weights_of(MODEL), updated(it)
    if name.startswith("update of"):
        assert weights.step == (5 if done else None), at
    if "adapter" in name:
        assert bare(it.cluster["a"]) == ("v2" if done else "v1"), at
    labels = {"update of base weights": "two", "base weights in turn": "two"}
    labels["back to the folder's own"] = "default"
    if name in labels:
        assert weights.label == (labels[name] if done else "one"), at


def updated(it: Control) -> bool:
    """Whether the last update of weights, after those that a scene begins with, came in."""
    last = next((one for one in it.it.operations(10) if one.kind in UPDATES), None)
    first = last is None or last.params.get("label") == "one"
    return not first and last is not None and last.state in (S.SUCCEEDED, S.PARTIAL)
