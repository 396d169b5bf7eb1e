"""The processes of one node: a record of them by pid and start time, and their end.

Only recorded processes are ever signalled. Pids are reused, so that a process counts as the
recorded one only with the same start time.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from rkserve.bench.processes import PROC, ProcessIdentity, identity_of, is_alive, snapshot
from rkserve.core.errors import ConfigError
from rkserve.core.files import private_folder, replace_private, write_private

log = logging.getLogger(__name__)

HEAD, BOARD = "head", "board"  # kinds of nodes
ADMIN_KEY = "admin_key"  # the file with the secret of the first key, in the head's state folder
SERVICE_STATE = Path("/var/lib/rkserve/node")
ROOM_BYTES = 1_000_000
POLL_S = 0.2
# The time to end in order, then after SIGTERM: Ray drains its node and ends its workers.
ORDERLY_S, FORCED_S = 90.0, 10.0
ENDS_S = 60.0  # the time of a child to end in order

# The longest path of a socket is 107 bytes; Ray's own part is `/session_2026-11-28_10-02-21_443112_
# 1234567/sockets/plasma_store.999`.
RAY_FOLDER_BYTES = 107 - 68
# With the account's number; what is in it is private. The state folder itself is too long for a
# socket's path, and no other folder is both short and there on every machine.
SHORT_FOLDER = Path("/tmp/rkserve")  # noqa: S108
KEPT_SESSIONS = 3


@dataclass(frozen=True)
class NodeRecord:
    """A running node: its supervisor, every process below it, its URLs, and the certificate that
    they show.
    """

    supervisor: ProcessIdentity
    processes: tuple[ProcessIdentity, ...] = ()
    ready: bool = False
    url: str = ""
    join_url: str = ""
    control_url: str = ""
    certificate: str = ""

    @property
    def running(self) -> bool:
        """True while the supervisor runs."""
        return is_alive(PROC, self.supervisor)

    def all_alive(self) -> list[ProcessIdentity]:
        """Return every process of the node that runs, with those started since the record."""
        known = {self.supervisor, *self.processes}
        alive = {one for one in known if is_alive(PROC, one)}
        return [*(alive | set(snapshot(PROC, [one.pid for one in alive])))]


def default_state() -> Path:
    """Return the default folder of a node's record and logs."""
    return SERVICE_STATE if os.geteuid() == 0 else user_state()


def user_state() -> Path:
    """Return the folder of a node that this account's home has."""
    return Path.home() / ".local" / "state" / "rkserve"


class StateFolder:
    """The private folder of a node's record, token, and logs."""

    def __init__(self, folder: Path, kind: str) -> None:
        """Raises ``ConfigError`` if the folder is not private or cannot be made."""
        self.folder, self.kind = folder, kind
        try:
            private_folder(folder)
        except OSError as exc:
            raise ConfigError(f"The state folder cannot be used: {exc}.") from exc

    @property
    def file(self) -> Path:
        """The record's file."""
        return self.folder / f"{self.kind}.json"

    def log(self, name: str) -> Path:
        """Return the path of a log."""
        return self.folder / f"{name}.log"

    def read(self) -> NodeRecord | None:
        """Return the record, None without one. Raises ``ConfigError`` if it is damaged."""
        try:
            found: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
            return NodeRecord(
                ProcessIdentity(**found.pop("supervisor")),
                tuple(ProcessIdentity(**one) for one in found.pop("processes")),
                **found,
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as exc:
            raise ConfigError(f"{self.file} is no record of a node: {exc!r}. Remove it.") from exc

    def write(self, record: NodeRecord) -> None:
        """Replace the record."""
        replace_private(self.file, json.dumps(asdict(record), indent=1) + "\n")

    def refuse_second(self, end: str) -> None:
        """Check that a node can start here; ``end`` is the command that ends one.

        Raises:
            ConfigError: a recorded process runs, or the disk has no room for a record and its logs.
        """
        record = self.read()
        if record is not None and (alive := record.all_alive()):
            raise ConfigError(
                f"{self.file} has {len(alive)} running processes, such as pid {alive[0].pid}. "
                f"`{end}` ends them; --state names the folder of another one."
            )
        room = self.folder / "room"
        try:
            write_private(room, " " * ROOM_BYTES)
        except OSError as exc:
            raise ConfigError(
                f"The state folder {self.folder} cannot be written: {exc.strerror}."
            ) from exc
        finally:
            room.unlink(missing_ok=True)

    def end(self, note: Any) -> bool:
        """End the recorded node, and remove its record; False if none was running."""
        record = self.read()
        alive = record.all_alive() if record is not None else []
        if record is not None and record.running:
            note(f"Stopping pid {record.supervisor.pid} ...")
            signal_process(record.supervisor, signal.SIGTERM)
            _await([record.supervisor], ORDERLY_S)
        end_processes(alive)
        self.file.unlink(missing_ok=True)
        return bool(alive)


def own_control(state: Path, kind: str) -> tuple[str, Path | None] | None:
    """Return the URL of the control port of the head with this state folder, and the certificate
    that it shows; None if it has none, does not run, or this account may not read that.
    """
    try:
        record = json.loads((state / f"{kind}.json").read_text(encoding="utf-8"))
        supervisor = ProcessIdentity(**record["supervisor"])
        url, certificate = str(record["control_url"]), str(record["certificate"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not url or not is_alive(PROC, supervisor):
        return None
    return url, Path(certificate) if certificate else None


def own_secret(state: Path, url: str) -> str | None:
    """Return the secret of the first key if ``url`` is that of the head with this state folder.

    None as well if this account may not read it; a refused call states the missing key.
    """
    try:
        record = json.loads((state / f"{HEAD}.json").read_text(encoding="utf-8"))
        secret = (state / ADMIN_KEY).read_text(encoding="utf-8").strip()
        urls = {record["url"], record["join_url"], record.get("control_url")}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return secret if url in urls else None


def ray_folder(state: Path, given: Path | None, environ: Mapping[str, str]) -> Path:
    """Return the folder for Ray's sessions: the one that the operator names, or a private one.

    Ray opens it, and the folder of its sockets in it, to every account (mode 0777): another one
    could put a socket of its own there, and run code in the workers that connect to it. Sessions
    are kept for their logs, and the oldest removed.

    Raises:
        ConfigError: the private folder cannot be made, or belongs to another account.
    """
    if given is not None:
        return given
    if named := environ.get("RAY_TMPDIR"):
        return Path(named) / "ray"
    folder = state.absolute() / "ray"
    if len(os.fsencode(folder)) > RAY_FOLDER_BYTES:
        # One for each state folder: of another node's sessions the oldest may be in use.
        own = SHORT_FOLDER.with_name(f"{SHORT_FOLDER.name}-{os.geteuid()}")
        folder = own / hashlib.sha256(os.fsencode(folder)).hexdigest()[:8] / "ray"
    try:
        private_folder(folder.parent)
        sessions = sorted(folder.glob("session_2*"))
    except OSError as exc:
        raise ConfigError(f"Ray's folder {folder} cannot be used: {exc}.") from exc
    for old in sessions[:-KEPT_SESSIONS]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


@contextlib.contextmanager
def forgotten_address(ray_address: str, folder: Path) -> Iterator[None]:
    """Remove Ray's note of this cluster from its folder before it starts and after it has ended.

    Ray leaves it, and takes the cluster for one that runs. Where a board of a killed head runs on
    the same machine, that goes as far as to refuse the start, though the port is free.
    """
    note = folder / "ray_current_cluster"

    def forget() -> None:
        with contextlib.suppress(OSError):
            if note.read_text(encoding="utf-8").strip() == ray_address:
                note.unlink()

    forget()
    try:
        yield
    finally:
        forget()


class RayStore:
    """Ray's own tables on the head's disk, in RocksDB: a head that is started again after a crash
    recovers its boards' processes from them, and no board loads its model anew.

    They hold nothing that rkserve needs: its state is the Coordinator's. So they are set aside
    where Ray does not start with them, and removed at an end in order.
    """

    def __init__(self, folder: Path, release: str, environ: Mapping[str, str]) -> None:
        """``release`` is Ray's, which reads no other's tables. An operator's ``RAY_gcs_storage``
        turns them off.
        """
        self._folder, self._place = folder / "gcs", folder / "gcs" / release
        self._failed, self._earlier = False, self._place.exists()
        self.used = "RAY_gcs_storage" not in environ and "RAY_gcs_storage_path" not in environ

    def environ(self) -> dict[str, str]:
        """Return the variables of Ray's start with them. Raises ``ConfigError``."""
        if not self.used:
            return {}
        try:
            private_folder(self._folder)
            private_folder(self._place)
        except OSError as exc:
            raise ConfigError(f"Ray's tables cannot be stored: {exc}.") from exc
        return {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self._place)}

    def set_aside(self) -> bool:
        """Move the tables away, and turn them off the second time or if they cannot be moved.

        Returns whether those of an earlier run were moved.
        """
        aside = self._folder.with_name("gcs.aside")
        if not self.used:
            return False
        self.used = not self._failed
        if self._failed or not self._place.exists():
            return False
        self._failed = True
        shutil.rmtree(aside, ignore_errors=True)
        try:
            self._folder.replace(aside)
        except OSError:
            self.used = False  # a start without them is better than none
            return False
        return self._earlier

    def remove(self) -> None:
        """Remove the tables."""
        shutil.rmtree(self._folder, ignore_errors=True)


def signal_process(process: ProcessIdentity, number: int) -> None:
    """Send a signal to a process if it is the recorded one and runs."""
    if is_alive(PROC, process):
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            return  # it has ended since


def end_processes(processes: Iterable[ProcessIdentity]) -> None:
    """End processes by SIGTERM, and by SIGKILL where that is not enough."""
    left = list(processes)
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = [one for one in left if is_alive(PROC, one)]
        for one in left:
            signal_process(one, number)
        _await(left, FORCED_S)


def _await(processes: Sequence[ProcessIdentity], limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    while any(is_alive(PROC, one) for one in processes) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)


class NodeSupervisor:
    """The children of this process that make a node, recorded while they run.

    A context manager: at its end all of them, and everything below them, have ended.
    """

    def __init__(self, state: StateFolder, **about: Any) -> None:
        own = identity_of(PROC, os.getpid())
        assert own is not None, "this process runs"
        self._state, self._record = state, NodeRecord(own, **about)
        self._children: list[tuple[subprocess.Popen[bytes], int]] = []
        self._unwritten = False

    def __enter__(self) -> NodeSupervisor:
        self._state.write(self._record)
        return self

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C must not leave half behind. What is ignored would be so in later children.
        ends = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, signal.SIG_IGN) for number in ends}
        try:
            everything = set(self._record.processes) | set(self._below())
            for child, number in reversed(self._children):
                end_child(child, number)
            end_processes(everything)
            self._state.file.unlink(missing_ok=True)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def start(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        log: IO[bytes],
        ends_by: int,
        *,
        waits: bool = False,
    ) -> subprocess.Popen[bytes]:
        """Start a child, which the signal ``ends_by`` ends in order.

        With ``waits`` it is one that reads a line before it goes on; see ``release``.
        """
        child = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE if waits else subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches it through this process, once
        )
        self._children.append((child, ends_by))
        self.record()
        return child

    def release(self, child: subprocess.Popen[bytes], *, ends_first: bool = False) -> None:
        """Let a child go on that waits, once. With ``ends_first`` it is ended before all that were
        started so far.
        """
        assert child.stdin is not None, "started with waits"
        with contextlib.suppress(BrokenPipeError):  # it has ended, which its watch notices
            if not child.stdin.closed:
                child.stdin.write(b"\n")
                child.stdin.close()
        if ends_first:
            self._children.sort(key=lambda one: one[0] is child)

    def drop(self, child: subprocess.Popen[bytes], patience_s: float = ENDS_S) -> None:
        """End a child that failed to start, with everything below it; see ``end_child``."""
        number = next(number for one, number in self._children if one is child)
        self._children = [one for one in self._children if one[0] is not child]
        fallen = {*self._record.processes, *snapshot(PROC, [child.pid])} - {*self._below()}
        end_child(child, number, patience_s)
        end_processes(fallen)
        self.record()

    def record(self, **changes: Any) -> None:
        """Write the record with all processes that run now.

        A full disk ends nothing that runs: the record before stays, and names this process, below
        which the others are found.
        """
        fields = {**self._record.__dict__, **changes, "processes": tuple(self._below())}
        self._record = NodeRecord(**fields)
        try:
            self._state.write(self._record)
        except OSError as exc:
            if not self._unwritten:
                log.warning("rkserve: %s cannot be written: %s", self._state.file, exc)
            self._unwritten = True
        else:
            self._unwritten = False

    def pids(self) -> set[int]:
        """Return the processes of the node as last recorded."""
        return {one.pid for one in self._record.processes}

    def _below(self) -> list[ProcessIdentity]:
        return [*snapshot(PROC, [child.pid for child, _ in self._children])]


def end_child(
    child: subprocess.Popen[bytes], number: int = signal.SIGINT, patience_s: float = ENDS_S
) -> None:
    """End a child in order by a signal within ``patience_s``, and by force if that does not end
    it.
    """
    forced_s = min(20.0, patience_s)
    for each, limit_s in ((number, patience_s), (signal.SIGTERM, forced_s), (signal.SIGKILL, 5)):
        if child.poll() is None:
            child.send_signal(each)
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            continue
        return
