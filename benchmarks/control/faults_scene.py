"""One trial of a fault, as the faults see it: the cluster, its boards, and versions to bring in.

It knows which calls change the cluster and which process of a board can be killed, and no fault.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.control.faults import Done
from benchmarks.control.faults_site import ADAPTERS, ENGINE, Reply, Site, kill
from rkserve.bench.child import BenchFailed, Json

KEEP: Json = {"mode": "keep", "clear_cache": False}


@dataclass(frozen=True)
class Scene:
    """One trial: a cluster that is whole and serves, and versions that it does not serve yet.

    ``staged`` of them are on all disks; ``fresh`` is on none, with its content. The boards are in
    another order each time.
    """

    site: Site
    number: int
    boards: Sequence[str]
    line: str
    model: str
    staged: Sequence[str]
    fresh: str
    content: bytes
    pool: ThreadPoolExecutor

    @property
    def victim(self) -> str:
        """The board that something happens to."""
        return self.boards[0]

    @property
    def still(self) -> int:
        """The replica of another board, which may have to stand still."""
        return int(self.site.board(self.boards[1])["pid"])

    def push(self, **more: object) -> Future[Reply]:
        """Send the fresh version, to be staged and served."""
        query = {"name": self.line, "version": self.fresh, "strategy": "atomic", **more}
        return self.pool.submit(self.site.upload, query, self.content)

    def roll_out(self, version: str, **more: object) -> Reply:
        """Have a staged version served. Raises ``BenchFailed``."""
        asked = {"version": version, "strategy": "atomic", **more}
        return self.site.post(f"{ADAPTERS}/{self.line}/rollout", **asked)


@dataclass(frozen=True, slots=True)
class Struck:
    """What was killed, and when that was over."""

    killed: tuple[str, ...]
    dead: tuple[int, ...]
    over_s: float = 0.0


class Weapon:
    """What kills one process of a board: which it is is found out before the moment."""

    def __init__(self, scene: Scene, part: str) -> None:
        told = scene.site.board(scene.victim)
        engine, replica = int(told["engine_pid"]), int(told["pid"])
        self._pid = engine if part == ENGINE else replica
        self._struck = Struck((scene.victim,), (engine,) if part == ENGINE else (replica, engine))

    def strike(self) -> Struck:
        """Kill it."""
        kill(self._pid)
        return replace(self._struck, over_s=time.monotonic())


def done_by(struck: Struck, *, hit: bool, **more: Any) -> Done:
    """Return what was done with it."""
    plain = Done(hit, struck.over_s, killed=struck.killed, dead=struck.dead)
    return replace(plain, **more)


def operations_of(pushing: Future[Reply]) -> tuple[str, ...]:
    """Wait for a push to end, which may have lost the one that carries it out."""
    with suppress(BenchFailed):
        return named(pushing.result())
    return ()


def named(reply: Reply) -> tuple[str, ...]:
    """Return the operations that an answer names: the staging first, where there was one."""
    found = (reply.body.get("staging", {}).get("operation_id"), reply.body.get("operation_id"))
    return tuple(dict.fromkeys(one for one in found if one))
