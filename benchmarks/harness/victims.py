"""Ways to lose boards under load, and the cluster's state between them.

A working board is chosen, hit in one of the ways, and watched until that has happened.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.control.faults_site import Site, kill, wait_for
from benchmarks.harness.board_nodes import BoardNodes
from rkserve.bench.processes import (
    PROC,
    BenchFailed,
    Json,
    ProcessIdentity,
    identity_of,
    is_alive,
)

HIT_S = 20.0
BACK_S = 600.0  # where several boards restart on few busy cores
BETWEEN_S = (0.02, 0.3)
EARLIEST, LATEST = 4, 24  # token of a run at which the library fails


@dataclass(frozen=True, slots=True)
class Victim:
    """A board that serves, and where it is."""

    board: str
    replica: ProcessIdentity
    engine: ProcessIdentity
    node: int
    control: Path


class Ground:
    """The cluster, whose boards are lost and come back."""

    def __init__(self, site: Site, cluster: BoardNodes, boards: int, rng: random.Random) -> None:
        self._site, self._cluster = site, cluster
        self._boards = boards
        self._rng = rng
        # Processes that were killed, which reports may still name. In a long run their pids come
        # back to others.
        self._gone: set[ProcessIdentity] = set()
        self._to_outlive: set[ProcessIdentity] = set()  # replicas whose library has failed

    def victim(self) -> Victim:
        """Wait until more than half of the boards are sent requests, and choose one of them.

        One whose circuit is open gets none: it would only be lost by its probe, again and again.
        """

        def look() -> Victim | None:
            ready = [one for one in self._ready() if one["circuit"]["state"] == "closed"]
            if 2 * len(ready) <= self._boards:
                return None
            return _located(self._rng.choice(ready))

        return wait_for("boards to come back", look, BACK_S)

    def breathe(self) -> None:
        """Let a moment pass, so that kills come at any moment of what the last one led to."""
        time.sleep(self._rng.uniform(*BETWEEN_S))

    def all_back(self) -> None:
        """Wait until every board serves."""
        wait_for("all boards", lambda: len(self._ready()) == self._boards, BACK_S)

    def replicas_ended(self) -> int:
        """Return how many replicas have ended of those whose library failed since the last call."""
        ended = sum(not is_alive(PROC, one) for one in self._to_outlive)
        self._to_outlive.clear()
        return ended

    def _ready(self) -> list[Json]:
        told = (self._site.get("/v1/boards") or {"data": []})["data"]
        return [
            one
            for one in told
            if one["state"] == "ready"
            and self._lives(one["pid"])
            and self._lives(one["engine_pid"])
        ]

    def _lives(self, pid: int) -> bool:
        who = identity_of(PROC, pid)
        return who is not None and who not in self._gone

    # -- the ways -----------------------------------------------------------------------------

    def kill_replica(self, victim: Victim) -> bool:
        """End the board's replica by SIGKILL; its engine ends with it."""
        return self._killed(victim.replica)

    def kill_engine(self, victim: Victim) -> bool:
        """End the board's engine by SIGKILL in the middle of a run; its replica is to outlive it.

        A request whose run ends two boards without a token in between is given up on purpose.
        """
        return self._in_a_run(victim) and self._ended_engine(victim, signal.SIGKILL)

    def freeze_engine(self, victim: Victim) -> bool:
        """Stop the board's engine with SIGSTOP in the middle of a run: it answers nothing more."""
        return self._in_a_run(victim) and self._ended_engine(victim, signal.SIGSTOP)

    def _ended_engine(self, victim: Victim, by: signal.Signals) -> bool:
        self._to_outlive.add(victim.replica)
        return self._killed(victim.engine, by)

    def _in_a_run(self, victim: Victim) -> bool:
        """Wait until the board has added a token to an answer; False if it does not."""
        deadline_s = time.monotonic() + HIT_S
        before: dict[str, int] = {}
        while time.monotonic() < deadline_s and is_alive(PROC, victim.engine):
            told = (self._site.get("/v1/generations") or {"data": []})["data"]
            now = {one["id"]: one["tokens"] for one in told if one["board"] == victim.board}
            if any(tokens > before.get(name, tokens) for name, tokens in now.items()):
                return True
            before = now
        return False

    def abort_library(self, victim: Victim) -> bool:
        """Let the library call abort() in the middle of a run."""
        return self._struck(victim, "abort_at_token")

    def hang_library(self, victim: Victim) -> bool:
        """Let the library never call back again, deaf to aborts, in the middle of a run."""
        return self._struck(victim, "hang_at_token")

    def break_run(self, victim: Victim) -> bool:
        """Let the library end a run with an error; its engine lives."""
        return self._struck(victim, "error_at_token", ends=False)

    def lose_node(self, victim: Victim) -> bool:
        """Cut the board's node off as a power failure would, and join another one in its place."""
        self._gone |= {victim.replica, victim.engine}
        self._cluster.replace(victim.node)
        return True

    def _killed(self, who: ProcessIdentity, by: signal.Signals = signal.SIGKILL) -> bool:
        there = is_alive(PROC, who)
        self._gone.add(who)
        if there:
            kill(who.pid, by)
        return there

    def _struck(self, victim: Victim, fault: str, *, ends: bool = True) -> bool:
        """Arm a fault and wait until it has struck; False where the engine ended without it."""
        fired = victim.control.with_name(f"{victim.control.name}.fired")
        before = _stamp(fired)
        fresh = victim.control.with_name("control.new")
        at = self._rng.randint(EARLIEST, LATEST)
        fresh.write_text(f"fault={fault}:{at}\n", encoding="utf-8")
        fresh.replace(victim.control)
        deadline_s = time.monotonic() + HIT_S
        while _stamp(fired) == before:
            if time.monotonic() > deadline_s or not is_alive(PROC, victim.engine):
                victim.control.unlink()
                return _stamp(fired) != before
            time.sleep(0.01)
        self._to_outlive.add(victim.replica)
        if ends:
            self._gone.add(victim.engine)
        return True


def _located(board: Json) -> Victim | None:
    """Return where a board is; None where one of its processes is gone already."""
    replica, engine = (identity_of(PROC, int(board[name])) for name in ("pid", "engine_pid"))
    if replica is None or engine is None:
        return None
    try:
        pairs = (PROC / str(engine.pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return None
    environ = dict(pair.decode().partition("=")[::2] for pair in pairs if pair)
    if "RKSIM_CONTROL" not in environ:
        return None  # of a process that is ending nothing can be read
    control = Path(environ["RKSIM_CONTROL"])
    node = int(control.parent.name.rpartition("-")[2])
    return Victim(board["id"], replica, engine, node, control)


def _stamp(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def ways_of_any_kind(ground: Ground) -> dict[str, Callable[[Victim], bool]]:
    """Return the ways that need no simulated library, by what is killed."""
    return {
        "engine, SIGKILL": ground.kill_engine,
        "engine, SIGSTOP": ground.freeze_engine,
        "replica, SIGKILL": ground.kill_replica,
        "node": ground.lose_node,
    }


def ways(ground: Ground) -> dict[str, Callable[[Victim], bool]]:
    """Return all ways to lose simulated boards, by what is killed."""
    return {
        "abort() in the library": ground.abort_library,
        "replica, SIGKILL": ground.kill_replica,
        "library hangs": ground.hang_library,
        "node": ground.lose_node,
    }


def strike(ground: Ground, way: Callable[[Victim], bool], times: int) -> Iterator[int]:
    """Lose so many boards, and yield how many it have been after each.

    The next one does not wait until the last is back: several are away at a time, as long as more
    than half of them serve. Raises ``BenchFailed`` where none can be hit.
    """
    missed = done = 0
    while done < times:
        if way(ground.victim()):
            done += 1
            yield done
            ground.breathe()
        elif (missed := missed + 1) > times + HIT_S:
            raise BenchFailed("boards cannot be hit")
