"""The faults of the Coordinator and of controllers, and the list of all faults.

Each returns its effects as ``Done``; its caller checks that the cluster recovers.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus

from benchmarks.control.faults import Done
from benchmarks.control.faults_boards import (
    comes_back_old,
    corrupted_chunk,
    full_disk_on_one,
    in_rollout,
    joins,
    while_paused,
    while_staging,
)
from benchmarks.control.faults_site import (
    ENGINE,
    KEEP,
    REPLICA,
    Scene,
    Site,
    frozen,
    kill,
    operations_of,
    wait_for,
)

LEASE_S = 2.0
UNDO_AFTER_S = 2.0
_CONTROLLER = """
import sys, time
from rkserve.client import Client
with Client(sys.argv[1]) as client, client.paused(lease_s=float(sys.argv[2])):
    time.sleep(600)
"""
Make = Callable[[Scene], Done]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault by its name; it needs ``staged`` versions."""

    name: str
    make: Make
    staged: int = 1


# -- the Coordinator dies -------------------------------------------------------------------------


def _coordinator_staging(scene: Scene) -> Done:
    site, coordinator, since_s = scene.site, scene.site.coordinator, time.time()
    with frozen(scene.still):
        pushing = scene.push()
        name = site.newest("adapter_stage", since_s)
        done = _killed_in(site, coordinator, name, "staging")
    operations = tuple(dict.fromkeys((name, *operations_of(pushing))))
    return replace(done, operations=operations, version=scene.fresh)


def _coordinator_in_rollout(scene: Scene, phase: str, strategy: str) -> Done:
    coordinator, version = scene.site.coordinator, scene.staged[0]
    name = scene.roll_out(version, strategy=strategy, **{"async": True}).operation
    return replace(_killed_in(scene.site, coordinator, name, phase), version=version)


def _coordinator_pausing(scene: Scene) -> Done:
    coordinator = scene.site.coordinator
    with frozen(scene.still):
        name = scene.site.post("/pause", **KEEP, **{"async": True}).operation
        return _killed_in(scene.site, coordinator, name, "stopping")


def _coordinator_undoing(scene: Scene) -> Done:
    """One board never stops, so that the pause is undone; another does not hear of that at once."""
    site, coordinator = scene.site, scene.site.coordinator
    other = int(site.board(scene.boards[2])["pid"])
    with frozen(scene.still):
        asked = {**KEEP, "timeout_s": UNDO_AFTER_S, "async": True}
        name = site.post("/pause", **asked).operation
        time.sleep(UNDO_AFTER_S / 2)  # the others have stopped by then
        with frozen(other):
            return _killed_in(site, coordinator, name, "undoing")


def _holding(site: Site) -> int:
    told = site.get("/is_paused") or {"boards": {}}
    return sum(bool(one["reported"]) for one in told["boards"].values())


def _coordinator_resuming(scene: Scene) -> Done:
    coordinator = scene.site.coordinator
    paused = scene.site.post("/pause", **KEEP)
    with frozen(scene.still):
        name = scene.site.post("/resume", **{"async": True}).operation
        done = _killed_in(scene.site, coordinator, name, "releasing")
    return replace(done, operations=(paused.operation, name))


def _killed_in(site: Site, coordinator: int, name: str, phase: str) -> Done:
    """Kill the Coordinator as soon as an operation is at a phase."""
    site.until_phase(name, phase)
    kill(coordinator)
    over_s = time.monotonic()
    return Done(site.ledger_phase(name) == phase, over_s, (name,))


# -- controllers ----------------------------------------------------------------------------------


def _gone_controller(scene: Scene) -> Done:
    host, port = scene.site.address
    since_s = time.time()
    command = [sys.executable, "-c", _CONTROLLER, f"http://{host}:{port}", f"{LEASE_S:g}"]
    with subprocess.Popen(command) as controller:
        try:
            wait_for("the pause", lambda: _holding(scene.site) == len(scene.boards))
            name = scene.site.newest("pause", since_s)
            time.sleep(random.Random(scene.number).uniform(0.0, LEASE_S))  # it renews its lease
        finally:
            controller.kill()
    over_s = time.monotonic()
    hit = _holding(scene.site) == len(scene.boards)
    return Done(hit, over_s, (name,))


def _two_updates(scene: Scene) -> Done:
    both = [
        scene.pool.submit(partial(scene.roll_out, version, **{"async": True}))
        for version in scene.staged
    ]
    replies = [one.result() for one in both]
    over_s = max(one.answered_s for one in replies)
    pairs = zip(replies, scene.staged, strict=True)
    taken = [(r, v) for r, v in pairs if r.status == HTTPStatus.ACCEPTED]
    refused = [one for one in replies if one.status == HTTPStatus.CONFLICT]
    flaws = [] if len(refused) == 1 else [f"answered by {sorted(r.status for r in replies)}"]
    if not taken:
        return Done(False, over_s, flaws=tuple(flaws))
    reply, version = taken[-1]
    if len(taken) > 1 and taken[0][0].operation != reply.operation:
        return Done(False, over_s, tuple(r.operation for r, _ in taken), flaws=tuple(flaws))
    return Done(True, over_s, (reply.operation,), version=version, flaws=tuple(flaws))


# -- all of them -----------------------------------------------------------------------------------

FAULTS: tuple[Fault, ...] = (
    *(
        fault
        for part, word in ((ENGINE, "engine"), (REPLICA, "board"))
        for fault in (
            Fault(f"{word} killed, staging", partial(while_staging, part=part), 0),
            Fault(f"{word} killed, loading", partial(in_rollout, part=part, phase="loading")),
            Fault(f"{word} killed, paused", partial(while_paused, part=part), 0),
            Fault(
                f"{word} killed, verified and not committed",
                partial(in_rollout, part=part, phase="stopping"),
            ),
        )
    ),
    Fault("corrupted chunk", corrupted_chunk, 0),
    Fault("full disk on one board", full_disk_on_one, 0),
    Fault("Coordinator killed, staging", _coordinator_staging, 0),
    *(
        Fault(
            f"Coordinator killed, {phase}",
            partial(_coordinator_in_rollout, phase=phase, strategy=strategy),
        )
        for phase, strategy in (
            ("loading", "atomic"),
            ("stopping", "atomic"),
            ("switching", "rolling"),
            ("releasing", "atomic"),
        )
    ),
    Fault("Coordinator killed, pausing", _coordinator_pausing, 0),
    Fault("Coordinator killed, undoing a pause", _coordinator_undoing, 0),
    Fault("Coordinator killed, resuming", _coordinator_resuming, 0),
    Fault("controller gone for good", _gone_controller, 0),
    Fault("two updates at once", _two_updates, 2),
    Fault("board joins in mid-update", joins),
    Fault("board comes back with an old version", comes_back_old),
)
