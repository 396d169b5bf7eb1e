"""Faults of boards and their disks: kills, full disks and late starts at moments of operations.

Each returns its effects as ``Done``; its caller checks that the cluster recovers. The moments are
read from operations and boards. For a short moment, a board is stopped (SIGSTOP) at it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from http import HTTPStatus

from benchmarks.control.faults import Done, behind
from benchmarks.control.faults_site import (
    ADAPTERS,
    KEEP,
    REPLICA,
    Scene,
    Site,
    Weapon,
    done_by,
    frozen,
    full_disk,
    named,
    operations_of,
    wait_for,
)
from rkserve.bench.connection import OK
from rkserve.bench.processes import BenchFailed, Json

MIB = 1 << 20
CHUNK_BYTES = 4 * MIB  # of staging
DISK_BYTES = 6 * MIB  # what a full disk has room for
SHORT_S = 3.0
READ_S = 0.25  # what came before a pause's answer may be read after it, by another thread


# -- boards that die ------------------------------------------------------------------------------


def while_staging(scene: Scene, part: str) -> Done:
    weapon, since_s = Weapon(scene, part), time.time()
    with frozen(scene.still):
        pushing = scene.push()
        name = scene.site.newest("adapter_stage", since_s)
        scene.site.until_phase(name, "staging")
        struck = weapon.strike()
        hit = scene.site.ledger_phase(name) == "staging"
    operations = tuple(dict.fromkeys((name, *operations_of(pushing))))
    return done_by(struck, hit=hit, operations=operations, version=scene.fresh)


def in_rollout(scene: Scene, part: str, phase: str) -> Done:
    weapon, version = Weapon(scene, part), scene.staged[0]
    name = scene.roll_out(version, **{"async": True}).operation
    scene.site.until_phase(name, phase)
    struck = weapon.strike()
    hit = scene.site.ledger_phase(name) == phase
    return done_by(struck, hit=hit, operations=(name,), version=version)


def while_paused(scene: Scene, part: str) -> Done:
    site, weapon = scene.site, Weapon(scene, part)
    paused = site.post("/pause", **KEEP)
    struck = weapon.strike()

    def back() -> bool:
        one = (site.get(f"/v1/boards/{scene.victim}")) or {"pid": 0, "hold": ""}
        is_new = not {one["pid"], one.get("engine_pid")} & set(struck.dead)
        return bool(is_new and one["hold"] == "keep")

    flaws = []
    try:
        wait_for("the board to come back paused", back)
    except BenchFailed as exc:
        flaws.append(str(exc))
    resumed = site.post("/resume")
    operations = (paused.operation, resumed.operation)
    done = done_by(struck, hit=paused.status == OK, operations=operations)
    return replace(
        done,
        over_s=resumed.asked_s,
        quiet_s=(paused.answered_s + READ_S, resumed.asked_s),
        flaws=tuple(flaws),
    )


# -- what comes onto disks ------------------------------------------------------------------------


def corrupted_chunk(scene: Scene) -> Done:
    site, digest, since_s = scene.site, hashlib.sha256(scene.content).hexdigest(), time.time()
    replica = int(site.board(scene.victim)["pid"])
    pushing = scene.push()
    hit = False
    while not hit and not pushing.done():
        size = site.part_size(scene.victim, digest)
        if CHUNK_BYTES <= size < len(scene.content):
            with frozen(replica):
                size = site.part_size(scene.victim, digest)
                if hit := CHUNK_BYTES <= size < len(scene.content):
                    site.spoil_part(scene.victim, digest, size // 2)
        time.sleep(0.0005)
    over_s = time.monotonic()
    name = site.newest("adapter_stage", since_s)
    operations = tuple(dict.fromkeys((name, *operations_of(pushing))))
    flaws = [] if not hit or _noticed(site.operation(name), scene.victim) else ["not noticed"]
    return Done(hit, over_s, operations, version=scene.fresh, flaws=tuple(flaws))


def _noticed(record: Json | None, board: str) -> bool:
    """Return whether a staging reports more than one try for a board, or a failure there."""
    if record is None:
        return False
    again = record["results"].get(board, {}).get("tries", 1) > 1
    return again or any(one["board"] == board for one in record["failed"])


def full_disk_on_one(scene: Scene) -> Done:
    """The second time, with room again, the same version must go through."""
    site = scene.site
    with full_disk(int(site.board(scene.victim)["pid"]), DISK_BYTES):
        first = scene.push().result()
        hit = "disk is full" in json.dumps(first.body)
        flaws = _not_whole_within(scene, named(first))
        settled_s = time.monotonic() - first.answered_s
    if first.status == OK:
        flaws.append("a version that is not on all disks is served")
    second = scene.push().result()
    if second.status != OK:
        flaws.append(f"with room again: HTTP {second.status}: {second.body.get('error')}")
    names = (*named(first), *named(second))
    return Done(
        hit, first.answered_s, names, version=scene.fresh, flaws=tuple(flaws), settled_s=settled_s
    )


def _not_whole_within(scene: Scene, operations: Sequence[str]) -> list[str]:
    left: list[str] = []

    def whole() -> bool:
        left[:] = behind(scene.site.sight(operations), scene.boards)
        return not left

    with suppress(BenchFailed):
        wait_for("the cluster to be whole", whole)
    return left


# -- boards that come late ------------------------------------------------------------------------


def _joins_while_staging(scene: Scene) -> Done:
    """A board with an empty disk joins while a push waits for one that stands still."""
    site, weapon, since_s = scene.site, Weapon(scene, REPLICA), time.time()
    still = scene.still
    struck = weapon.strike()
    site.wipe(scene.victim)
    with frozen(still):
        pushing = scene.push()
        name = site.newest("adapter_stage", since_s)
        site.until_phase(name, "staging")
        wait_for("the board to join", lambda: _is_new(site, scene.victim, struck.dead))
        hit = site.ledger_phase(name) == "staging"
    over_s = time.monotonic()
    operations = tuple(dict.fromkeys((name, *operations_of(pushing))))
    done = done_by(struck, hit=hit, operations=operations, version=scene.fresh)
    return replace(done, over_s=over_s)


def _joins_canary(scene: Scene) -> Done:
    """A board with an empty disk joins while a canary is observed, which is then promoted."""
    site, weapon, version = scene.site, Weapon(scene, REPLICA), scene.staged[0]
    asked = {"strategy": "canary", "weight": 0.5, "observe_s": 600, "auto": False, "async": True}
    name = scene.roll_out(version, **asked).operation
    site.until_phase(name, "observing")
    struck = weapon.strike()
    site.wipe(scene.victim)
    wait_for("the board to join", lambda: _is_new(site, scene.victim, struck.dead))
    hit = site.ledger_phase(name) == "observing"
    promoted = site.post(f"{ADAPTERS}/{scene.line}/promote")
    done = done_by(struck, hit=hit, operations=(name, *named(promoted)), version=version)
    return replace(done, over_s=promoted.asked_s)


def _is_new(site: Site, board: str, dead: Sequence[int]) -> bool:
    one = site.get(f"/v1/boards/{board}")
    return one is not None and one["pid"] not in dead and one["state"] in ("joining", "ready")


def joins(scene: Scene) -> Done:
    return (_joins_while_staging, _joins_canary)[scene.number % 2](scene)


def _restarts_old(scene: Scene) -> Done:
    """A board dies, and is back only after the others have the new version."""
    site, weapon, version = scene.site, Weapon(scene, REPLICA), scene.staged[0]
    known = site.pids(REPLICA)
    struck = weapon.strike()
    (late,) = wait_for("its next replica", lambda: site.pids(REPLICA) - known, every_s=0.01)
    with frozen(late):
        reply = scene.roll_out(version)
    over_s = time.monotonic()
    hit = reply.status == OK and reply.body["results"].get(scene.victim, {}).get("status") in (
        None,
        "gone",
    )
    done = done_by(struck, hit=hit, operations=named(reply), version=version)
    return replace(done, over_s=over_s)


def _freezes(scene: Scene) -> Done:
    """A board stands still during an update, which is undone for it, and then goes on."""
    told, version = scene.site.board(scene.victim), scene.staged[0]
    with frozen(int(told["pid"]), int(told["engine_pid"])):
        reply = scene.roll_out(version, timeout_s=SHORT_S)
    hit = reply.status >= HTTPStatus.BAD_REQUEST
    return Done(hit, time.monotonic(), named(reply), version=version)


def _misses_label(scene: Scene) -> Done:
    """A board stands still while the weights get another label, and then goes on with the old."""
    told = scene.site.board(scene.victim)
    asked = {"new_version": scene.fresh, "model": scene.model, "timeout_s": SHORT_S}
    with frozen(int(told["pid"])):
        reply = scene.site.post("/update_weight_version", **asked)
    hit = reply.status == HTTPStatus.MULTI_STATUS
    return Done(hit, time.monotonic(), named(reply))


def comes_back_old(scene: Scene) -> Done:
    return (_restarts_old, _freezes, _misses_label)[scene.number % 3](scene)
