"""Faults of a soak, drawn by a seed; each proves that it happened, and waits for its part.

The boards' ones are those of the kill run, with a run error and a stop of two seconds. Those of the
head kill a Router, HAProxy, the Coordinator or Serve's controller.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import quote

from benchmarks.control.faults_site import Site, kill, wait_for
from benchmarks.harness.victims import BACK_S, Ground, Victim
from benchmarks.soak.judge import Judge
from rkserve.bench.processes import (
    PROC,
    BenchFailed,
    Json,
    ProcessIdentity,
    identity_of,
    is_alive,
    snapshot,
)

STOP_S = 2.0
STAYS_S = 4.0  # within which a board that only stood still would have been replaced
GONE_S = 10.0
GIVEN_UP = "a board that stood still for 2 s was given up"
TRIES = 3  # boards of which one has a run that the library can be hit in
# How often each is drawn, relative to the others.
WEIGHTS: Mapping[str, int] = MappingProxyType(
    {
        "abort() in the library": 3,
        "library hangs": 3,
        "run error": 2,
        "replica, SIGKILL": 2,
        "replica, SIGSTOP for 2 s": 3,
        "node": 2,
        "Router, SIGKILL": 3,
        "HAProxy, SIGKILL": 2,
        "Coordinator, SIGKILL": 2,
        "Serve controller, SIGKILL": 2,
    }
)
FRONT = frozenset({"Router, SIGKILL", "HAProxy, SIGKILL"})


@dataclass(frozen=True, slots=True)
class HeadPart:
    """A part of the head by the name of its processes, of which there must be ``number``."""

    part: str
    number: int
    program: str = ""


class Faults:
    """Makes one fault after the other, of those with a word of ``only`` in their name."""

    def __init__(
        self,
        site: Site,
        ground: Ground,
        judge: Judge,
        rng: random.Random,
        *,
        routers: int,
        only: Sequence[str] = (),
    ) -> None:
        self._site, self._ground, self._judge, self._rng = site, ground, judge, rng
        self._weights = chosen(only)
        self._made: dict[str, Callable[[], bool]] = {
            "abort() in the library": self._on_board(ground.abort_library),
            "library hangs": self._on_board(ground.hang_library),
            "run error": self._on_board(ground.break_run),
            "replica, SIGKILL": self._on_board(self._kill_replica),
            "replica, SIGSTOP for 2 s": self._on_board(self._stop_replica),
            "node": self._on_board(self._lose_node),
            "Router, SIGKILL": self._on_head(HeadPart("router", routers)),
            "HAProxy, SIGKILL": self._on_head(HeadPart("proxy", 1, "haproxy")),
            "Coordinator, SIGKILL": self._on_head(HeadPart("coordinator", 1)),
            "Serve controller, SIGKILL": self._on_head(HeadPart("controller", 1)),
        }

    def draw(self) -> str:
        """Return the next fault's name."""
        return self._rng.choices([*self._weights], [*self._weights.values()])[0]

    def make(self, name: str) -> bool:
        """Make a fault; return whether it happened. Raises ``BenchFailed``.

        A part that does not come back in time is a flaw, and ends the run.
        """
        window = self._judge.fault_begins(name, front=name in FRONT, at_s=time.monotonic())
        fired = False
        try:
            fired = self._made[name]()
        finally:
            self._judge.fault_ends(window, time.monotonic(), fired=fired)
        return fired

    # -- boards -------------------------------------------------------------------------------

    def _on_board(self, way: Callable[[Victim], bool]) -> Callable[[], bool]:
        def make() -> bool:
            return any(way(self._ground.victim()) for _ in range(TRIES))

        return make

    def _kill_replica(self, victim: Victim) -> bool:
        return self._ground.kill_replica(victim) and _gone(victim.replica)

    def _lose_node(self, victim: Victim) -> bool:
        self._ground.lose_node(victim)
        return _gone(victim.replica) and _gone(victim.engine)

    def _stop_replica(self, victim: Victim) -> bool:
        """Let a replica stand still: it stays, and it blames no engine.

        An engine may end in order meanwhile, by a sleep or for the trial of an adapter.
        """
        pid = victim.replica.pid
        before = self._crashes(victim.board)
        if not is_alive(PROC, victim.replica):
            return False
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(STOP_S)
            stopped = _state(pid) == "T"
        finally:
            if is_alive(PROC, victim.replica):
                os.kill(pid, signal.SIGCONT)
        time.sleep(STAYS_S)
        after = self._crashes(victim.board)
        if stopped and not is_alive(PROC, victim.replica):
            self._judge.flaw(GIVEN_UP, f"{victim.board}: its replica was replaced")
        elif stopped and None not in (before, after) and before != after:
            self._judge.flaw(GIVEN_UP, f"{victim.board}: engines ended by {after}, after {before}")
        return stopped

    def _crashes(self, board: str) -> Json | None:
        """Return the engines of a board that ended out of order, by kind; None if not known."""
        found = self._site.get(f"/v1/boards/{quote(board)}")
        return None if found is None else found.get("crashes")

    # -- the head -----------------------------------------------------------------------------

    def _on_head(self, part: HeadPart) -> Callable[[], bool]:
        def make() -> bool:
            victims = wait_for(
                f"{part.part}: {part.number} of them", lambda: self._whole(part), BACK_S
            )
            # Of several HAProxys all but one end their last answers: all are hit, as by a crash.
            chosen = victims if part.program else [self._rng.choice(victims)]
            for one in chosen:
                kill(one.pid)
            if not all(_gone(one) for one in chosen):
                return False
            try:
                wait_for(f"{part.part} again", lambda: self._again(part, chosen), BACK_S)
            except BenchFailed as exc:
                self._judge.flaw("a part of the head did not come back", str(exc))
                raise
            return True

        return make

    def _whole(self, part: HeadPart) -> list[ProcessIdentity]:
        """Return the processes of a part if all are there, sorted; else an empty list."""
        found = sorted(self._processes(part), key=lambda one: (one.started, one.pid))
        return found if len(found) >= part.number else []

    def _again(self, part: HeadPart, killed: list[ProcessIdentity]) -> bool:
        fresh = [one for one in self._processes(part) if one not in killed]
        return len(fresh) >= part.number and self._site.get("/is_paused") is not None

    def _processes(self, part: HeadPart) -> list[ProcessIdentity]:
        found = snapshot(PROC, self._site.roots())
        return [
            one
            for one, (name, stat) in found.items()
            if name == part.part
            and not stat.zombie
            and (not part.program or _program(one.pid) == part.program)
        ]


def chosen(only: Sequence[str]) -> dict[str, int]:
    """Return the faults with one of these in their name, by how often they are drawn."""
    return {name: n for name, n in WEIGHTS.items() if not only or any(w in name for w in only)}


def _gone(one: ProcessIdentity) -> bool:
    deadline_s = time.monotonic() + GONE_S
    while is_alive(PROC, one) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return identity_of(PROC, one.pid) != one


def _state(pid: int) -> str:
    try:
        text = (PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return text.rpartition(")")[2].split()[0]


def _program(pid: int) -> str:
    try:
        return (PROC / str(pid) / "comm").read_text(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""
