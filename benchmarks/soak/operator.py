"""Control of the cluster during a soak: pauses, adapters, sleeps and drains, one after the other.

Every change has a key and is repeated until it is known to be done. What the adapter must be is
known at every moment: one version, or either of two while a change is on its way.
"""

from __future__ import annotations

import http.client
import json
import random
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from urllib.parse import urlencode

from benchmarks.control.faults_site import ADAPTERS, KEEP, Site
from benchmarks.soak.judge import CALLS_DONE, TRIAL_FAILED, CallOutcome, Judge
from benchmarks.soak.questions import ADAPTER
from rkserve.bench.processes import BenchFailed, Json
from rkserve.native.sim.models import render_adapter

SEEDS = 3  # contents of the adapter whose answers are known from the start
FIRST_NEW = 1000
NEW_SHARE = 0.5
BETWEEN_S = (2.0, 8.0)
PAUSE_S, SLEEP_S, DRAIN_S = (0.3, 2.0), (0.5, 3.0), (0.5, 3.0)
LEASE_S = 20.0
SHORT_LEASE_S = 2.0
DONE_S = 300.0  # until which a change is to be done, whatever dies meanwhile
RETRY_S = 1.0
LONGEST_RETRY_S = 5.0
DRAIN_LIMIT_S = 10.0
JSON, BYTES = "application/json", "application/octet-stream"


@dataclass
class AdapterHistory:
    """Versions of the adapter that were sent, and those of which one is to be served."""

    seeds: dict[str, int] = field(default_factory=dict)
    active: tuple[str, ...] = ()
    previous: tuple[str, ...] = ()
    _last: tuple[str, ...] = ()

    def seed_of(self, version: str) -> int | None:
        """Return the content's seed of a version, as answers name it."""
        return self.seeds.get(version.partition("@")[2])

    def push_begins(self, version: str, seed: int) -> None:
        """Record a version that may be served from now on."""
        self.seeds[version] = seed
        self._last = self.active
        self.previous = tuple({*self.previous, *self.active})
        self.active = (*self.active, version)

    def push_ends(self, version: str) -> None:
        """Record that it is served."""
        self.active, self.previous = (version,), self._last

    def rollback_begins(self) -> None:
        """Record that the version before may be served from now on, or the present one."""
        self.active = self.previous = tuple({*self.active, *self.previous})

    def rollback_ends(self, version: str) -> None:
        """Record the version that is served."""
        self.active = (version,)


@dataclass(frozen=True, slots=True)
class Change:
    """A call that changes the cluster."""

    what: str
    path: str
    content: bytes = b"{}"
    kind: str = JSON

    @classmethod
    def of(cls, what: str, path: str, body: Json) -> Change:
        """Return one with a body of JSON."""
        return cls(what, path, json.dumps(body).encode())


RELEASES = (
    Change("resume", "/resume"),
    Change("wake", "/wake_up"),
    Change("undrain", "/v1/boards/undrain"),
)


class Operator:
    """One that changes the cluster in a thread, from ``start`` to ``stop``."""

    def __init__(self, site: Site, judge: Judge, seed: int) -> None:
        self._site, self._judge = site, judge
        self._rng = random.Random(f"operator {seed}")
        self._thread = threading.Thread(target=self._run, name="operator", daemon=True)
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._pushes = 0
        self.adapters = AdapterHistory()

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End after the change that has begun, and undo all that holds boards back.

        Raises ``BenchFailed`` where that fails, or where the thread has failed.
        """
        self._over.set()
        self._thread.join(4 * DONE_S)
        if self._failure is not None:
            raise self._failure
        for release in RELEASES:
            if not self.change(release):
                raise BenchFailed(f"{release.what} was not done within {DONE_S:.0f} s")

    def push(self, strategy: str = "atomic", *, new: bool = False) -> bool:
        """Send the next version of the adapter; return whether it is certain to be served.

        A content that is ``new`` is tried on a board; the others were served before.
        """
        self._pushes += 1
        version = f"v{self._pushes}"
        seed = FIRST_NEW + self._pushes if new else self._pushes % SEEDS
        content = render_adapter("Pirate", seed=seed + 1)
        query = {"name": ADAPTER, "version": version, "strategy": strategy, "size": len(content)}
        self.adapters.push_begins(version, seed)
        path = f"{ADAPTERS}?{urlencode(query)}"
        done = self.change(Change(f"push, {strategy}", path, content, BYTES))
        if done:
            self.adapters.push_ends(version)
        return done

    def change(self, wanted: Change) -> bool:
        """Make a change until it is done; return whether it is certain to be.

        An adapter whose trial failed, in which a fault may have hit its board, is tried again.
        """
        deadline_s = time.monotonic() + DONE_S
        key = secrets.token_hex(12)
        while time.monotonic() < deadline_s:
            status, body, retry_s = self._called(wanted, key)
            if status in CALLS_DONE:
                return True
            code = _error(body).get("code")
            if status and code not in ("coordinator_unavailable", "no_router"):
                key = secrets.token_hex(12)  # the answer to the first key stays what it is
            if code == TRIAL_FAILED[1] and "force=" not in wanted.path:
                wanted = replace(wanted, path=f"{wanted.path}&force=true")
            time.sleep(min(retry_s, LONGEST_RETRY_S))
        return False

    def _called(self, wanted: Change, key: str) -> tuple[int, Json, float]:
        """Make a call once; return its status, its body, and how long to wait for the next one."""
        headers, asked_s = {"idempotency-key": key}, time.monotonic()
        try:
            status, body, given = self._site.call(
                "POST", wanted.path, wanted.content, wanted.kind, headers=headers
            )
        except (OSError, http.client.HTTPException) as exc:
            lost = CallOutcome(wanted.what, asked_s, time.monotonic(), 0, repr(exc))
            self._judge.take_call(lost)
            return 0, {}, RETRY_S
        error = _error(body)
        self._judge.take_call(
            CallOutcome(
                wanted.what,
                asked_s,
                time.monotonic(),
                status,
                str(error.get("code") or ""),
                str(error.get("message") or "")[:200],
                error_object="message" in error and "type" in error,
                retry_after="retry-after" in given,
            )
        )
        return status, body, float(given.get("retry-after", RETRY_S))

    # -- the changes --------------------------------------------------------------------------

    def _run(self) -> None:
        steps: list[tuple[Callable[[], None], int]] = [
            (self._pause, 4),
            (self._lease, 2),
            (lambda: self._pushes_with("rolling"), 2),
            (lambda: self._pushes_with("atomic"), 2),
            (self._rollback, 2),
            (self._sleep, 3),
            (self._drain, 3),
        ]
        try:
            while not self._over.wait(self._rng.uniform(*BETWEEN_S)):
                step = self._rng.choices([one for one, _ in steps], [share for _, share in steps])
                step[0]()
        except Exception as exc:  # noqa: BLE001 - it is raised where the operator is stopped
            self._failure = exc

    def _pushes_with(self, strategy: str) -> None:
        if not self.push(strategy, new=self._rng.random() < NEW_SHARE):
            self._judge.flaw("a change was not done in time", f"push, {DONE_S:.0f} s")

    def _pause(self) -> None:
        """Pause all boards for a moment, under a lease that is longer."""
        self._once(Change.of("pause", "/pause", {**KEEP, "lease_s": LEASE_S}))
        self._over.wait(self._rng.uniform(*PAUSE_S))
        self._surely(RELEASES[0])

    def _lease(self) -> None:
        """Pause all boards and let the lease end it."""
        self._once(Change.of("pause with a lease", "/pause", {**KEEP, "lease_s": SHORT_LEASE_S}))
        self._over.wait(SHORT_LEASE_S)

    def _rollback(self) -> None:
        """Roll back, once: a repeat of one that was done would be another one."""
        if not self.adapters.previous:
            return
        self.adapters.rollback_begins()
        status, body = self._once(Change("rollback", f"{ADAPTERS}/{ADAPTER}/rollback"))
        if status in CALLS_DONE and body.get("version"):
            self.adapters.rollback_ends(str(body["version"]))

    def _sleep(self) -> None:
        board = self._board()
        if board is None:
            return
        level = self._rng.choice((0, 1, 2))
        body = {"boards": [board], "mode": "keep", "level": level, "lease_s": LEASE_S}
        self._once(Change.of(f"sleep, level {level}", "/sleep", body))
        self._over.wait(self._rng.uniform(*SLEEP_S))
        self._surely(RELEASES[1])

    def _drain(self) -> None:
        board = self._board()
        if board is None:
            return
        mode = self._rng.choice(("wait", "move"))
        body = {"boards": [board], "mode": mode, "timeout_s": DRAIN_LIMIT_S}
        self._once(Change.of(f"drain, {mode}", "/v1/boards/drain", body))
        self._over.wait(self._rng.uniform(*DRAIN_S))
        self._surely(RELEASES[2])

    def _once(self, wanted: Change) -> tuple[int, Json]:
        """Make a change that is not repeated: it is undone right after."""
        status, body, _ = self._called(wanted, secrets.token_hex(12))
        return status, body

    def _surely(self, wanted: Change) -> None:
        if not self.change(wanted):
            self._judge.flaw("a change was not done in time", f"{wanted.what}, {DONE_S:.0f} s")

    def _board(self) -> str | None:
        """Return a board that serves."""
        found = (self._site.get("/v1/boards") or {"data": []})["data"]
        ready = sorted(str(one["id"]) for one in found if one["state"] == "ready")
        return self._rng.choice(ready) if len(ready) > 1 else None


def _error(body: Json) -> Json:
    error = body.get("error")
    return error if isinstance(error, dict) else {}
