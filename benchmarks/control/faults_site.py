"""The cluster under faults: its routes, its processes, its disks and its ledger.

These are the means: calls, kills, stops, a full disk, a damaged file. The faults use them.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import shutil
import signal
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

from benchmarks.control.faults import Done, Sight
from rkserve.bench.processes import PROC, BenchFailed, Json, snapshot
from rkserve.control.codec import read_operation

T = TypeVar("T")
CALL_S = 150.0
WAIT_S = 60.0
LOOK_S, ASK_S = 0.001, 0.01
ADAPTERS = "/v1/lora_adapters"
REPLICA, ENGINE = "board replica", "engine"
KEEP: Json = {"mode": "keep", "clear_cache": False}


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a call, and when it was asked and answered on the monotonic clock."""

    status: int
    body: Json
    asked_s: float
    answered_s: float

    @property
    def operation(self) -> str:
        """The operation that it became. Raises ``BenchFailed`` where it is none."""
        if "operation_id" not in self.body:
            raise BenchFailed(f"no operation: HTTP {self.status}: {self.body}")
        return str(self.body["operation_id"])


class Site:
    """One cluster of this machine, below the process ``root``, with its files in ``folder``.

    Use it from any thread: each call has a connection of its own, and names ``key`` if there is
    one.
    """

    key = ""

    def __init__(
        self, address: tuple[str, int], folder: Path, root: Callable[[], list[int]], key: str = ""
    ) -> None:
        self.address = address
        self.key = key
        self._folder = folder
        self._root = root

    # -- its routes ---------------------------------------------------------------------------

    def get(self, path: str, **query: str | int) -> Json | None:
        """Return what a route says; None where it does not answer, or not with a 200."""
        where = f"{path}?{urlencode(query)}" if query else path
        try:
            status, body, _ = self._call("GET", where, None, 10.0)
        except (OSError, http.client.HTTPException):
            return None
        return body if status == http.client.OK else None

    def post(self, path: str, **body: object) -> Reply:
        """Make a call, which need not succeed. Raises ``BenchFailed`` where no server answers."""
        return self._changed("POST", path, json.dumps(body).encode(), "application/json")

    def upload(self, query: Json, content: bytes) -> Reply:
        """Send an adapter's file. Raises ``BenchFailed`` where no server answers."""
        where = f"{ADAPTERS}?{urlencode({**query, 'size': len(content)})}"
        return self._changed("POST", where, content, "application/octet-stream")

    def delete(self, path: str) -> Reply:
        """Take something away. Raises ``BenchFailed`` where no server answers."""
        return self._changed("DELETE", path, b"", "application/json")

    def call(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        kind: str = "",
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[int, Json, Mapping[str, str]]:
        """Make any call; return its status, body and headers. Raises as ``http.client`` does."""
        return self._call(method, path, content, CALL_S, kind, headers=headers)

    def _changed(self, method: str, path: str, content: bytes, kind: str) -> Reply:
        asked_s = time.monotonic()
        try:
            status, body, _ = self._call(method, path, content, CALL_S, kind)
        except (OSError, http.client.HTTPException) as exc:
            raise BenchFailed(f"{method} {path}: {exc!r}") from exc
        return Reply(status, body, asked_s, time.monotonic())

    def _call(
        self,
        method: str,
        path: str,
        content: bytes | None,
        timeout_s: float,
        kind: str = "",
        *,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[int, Json, Mapping[str, str]]:
        named = {**headers, **({"content-type": kind} if kind else {})}
        if self.key:
            named["authorization"] = f"Bearer {self.key}"
        connection = http.client.HTTPConnection(*self.address, timeout=timeout_s)
        with contextlib.closing(connection):
            connection.request(method, path, content, named)
            answer = connection.getresponse()
            words = answer.read()
        try:
            body = json.loads(words)
        except json.JSONDecodeError:
            body = {"error": {"message": words.decode(errors="replace")}}
        return answer.status, body, {n.lower(): value for n, value in answer.getheaders()}

    # -- what it says of itself ---------------------------------------------------------------

    def sight(self, operations: Iterable[str]) -> Sight:
        """Look at all of it."""
        return Sight(
            boards=self.get("/v1/boards"),
            paused=self.get("/is_paused"),
            adapters=self.get(ADAPTERS),
            operations={one: self.operation(one) for one in operations},
        )

    def operation(self, name: str) -> Json | None:
        """Return the record of an operation; None where it is not known."""
        return self.get(f"/v1/operations/{quote(name)}")

    def board(self, board: str) -> Json:
        """Return what a board last said of itself. Raises ``BenchFailed`` where it is unknown."""
        found = self.get(f"/v1/boards/{quote(board)}")
        if found is None:
            raise BenchFailed(f"{board} is not known")
        return found

    def until_phase(self, name: str, phase: str, timeout_s: float = WAIT_S) -> bool:
        """Wait for an operation to be at a phase; False where it ended without having been seen.

        A phase may last for some milliseconds, in which a route is hardly asked once.
        """
        deadline_s = time.monotonic() + timeout_s
        while (now := self.ledger_phase(name)) and time.monotonic() < deadline_s:
            if now == phase:
                return True
            time.sleep(LOOK_S)
        return False

    def newest(self, kind: str, since_s: float, timeout_s: float = WAIT_S) -> str:
        """Wait for an operation of a kind that began after ``since_s`` (seconds since 1970)."""

        def look() -> str | None:
            found = (self.get("/v1/operations", limit=3) or {"data": []})["data"]
            fitting = (one for one in found if one["kind"] == kind and one["created_s"] >= since_s)
            return next((str(one["id"]) for one in fitting), None)

        return wait_for(f"an operation {kind}", look, timeout_s, ASK_S)

    def ledger_phase(self, name: str) -> str:
        """Return the phase at which the ledger has an operation that runs; empty otherwise.

        Of a Coordinator that was killed it is where that was: no other process writes it.
        """
        file = self._folder / "data" / "ledger.sqlite3"
        with contextlib.closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
            rows = database.execute("SELECT value FROM operations WHERE id = ?", (name,)).fetchall()
        one = read_operation(rows[0][0]) if rows else None
        return "" if one is None or one.over else one.phase.value

    # -- its processes ------------------------------------------------------------------------

    def roots(self) -> list[int]:
        """Return the roots of its process trees."""
        return self._root()

    def pids(self, part: str) -> set[int]:
        """Return the processes that play a part."""
        found = snapshot(PROC, self._root())
        return {one.pid for one, (name, stat) in found.items() if name == part and not stat.zombie}

    @property
    def coordinator(self) -> int:
        """The process of the Coordinator. To find it takes longer than some phases."""
        pids = self.pids("coordinator")
        if len(pids) != 1:
            raise BenchFailed(f"there are {len(pids)} Coordinators")
        return pids.pop()

    # -- its boards' disks --------------------------------------------------------------------

    def part_size(self, board: str, digest: str) -> int:
        """Return how much of a file is on its way to a board's disk; 0 where nothing is."""
        try:
            return self._part(board, digest).stat().st_size
        except FileNotFoundError:
            return 0

    def spoil_part(self, board: str, digest: str, offset: int) -> None:
        """Flip the bits of one byte of it."""
        with self._part(board, digest).open("r+b") as file:
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes([byte ^ 0xFF]))

    def wipe(self, board: str) -> None:
        """Empty a board's disk of adapters, as a new one's is."""
        shutil.rmtree(self._adapters(board), ignore_errors=True)

    def _part(self, board: str, digest: str) -> Path:
        return self._adapters(board) / ".parts" / f"{digest}.part"

    def _adapters(self, board: str) -> Path:
        return self._folder / "state" / "adapters" / board


def kill(pid: int, by: signal.Signals = signal.SIGKILL) -> None:
    """End a process at once, or send another signal; it may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, by)


@contextlib.contextmanager
def frozen(*pids: int) -> Iterator[None]:
    """Have processes stand still for as long as the block lasts."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def full_disk(pid: int, limit_bytes: int) -> Iterator[None]:
    """Let a process write no file beyond a size for as long as the block lasts.

    A write beyond it fails with EFBIG, as one on a full disk does with ENOSPC; no file system has
    to be filled for it, without root's rights.
    """
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def wait_for(
    what: str, look: Callable[[], T | None], timeout_s: float = WAIT_S, every_s: float = 0.05
) -> T:
    """Return what ``look`` returns once that is true. Raises ``BenchFailed``."""
    deadline_s = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() > deadline_s:
            raise BenchFailed(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(every_s)
    return found


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
    """The process that was killed, and when it had ended."""

    killed: tuple[str, ...]
    dead: tuple[int, ...]
    over_s: float = 0.0


class Weapon:
    """A kill of one process of a board, which is looked up before the moment."""

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
