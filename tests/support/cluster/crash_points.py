"""Everything that a process did to the files of a folder, and the disks that a crash could leave.

``recorded`` runs a program with ``write_log.c`` preloaded. ``disks`` replays the log: after each
record it yields what would be there if the process was killed then, and what could be there after a
power cut, where data that was not flushed may be lost, and so may names in folders that were not.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from tests.support.paths import PROJECT

SOURCE = PROJECT / "tests" / "support" / "c" / "write_log.c"
HEAD = struct.Struct("<BQQIHH")
ACKS = "acks"  # in this file the program notes what it was told to be done; no part of the disk
# SQLite maps it into memory, and makes it anew after a crash.
LEFT_OUT = ("-shm",)


@dataclass(frozen=True)
class Record:
    """One change: its kind as in ``write_log.c``, and what it needs."""

    kind: str
    inode: int
    offset: int
    path: str
    other: str
    data: bytes


class Loss(enum.Enum):
    """What a crash takes with it."""

    NOTHING = "the process is killed"
    DATA = "a power cut loses data that was not flushed"
    NAMES = "a power cut loses names in folders that were not flushed"
    BOTH = "a power cut loses both"
    HALF = "a power cut leaves half of the last write"


@dataclass(eq=False)
class _File:
    now: bytearray = field(default_factory=bytearray)
    flushed: bytes = b""


@dataclass(frozen=True)
class Disk:
    """A disk after a crash: folders, files by their paths, and what had been confirmed."""

    at: int
    loss: Loss
    folders: frozenset[str]
    files: dict[str, bytes]
    acks: tuple[str, ...]

    @property
    def digest(self) -> str:
        """The same for disks that are the same, with the same confirmations."""
        found = hashlib.sha256(repr((sorted(self.folders), self.acks)).encode())
        for path, data in sorted(self.files.items()):
            found.update(f"{path} {len(data)} ".encode())
            found.update(data)
        return found.hexdigest()

    def write(self, target: Path) -> None:
        """Make it at ``target``."""
        target.mkdir(mode=0o700)
        for folder in sorted(self.folders):
            (target / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, data in self.files.items():
            place = target / path
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            place.write_bytes(data)
            place.chmod(0o600)


class Replay:
    """The folder as the log has it, with what a power cut would leave."""

    def __init__(self) -> None:
        self._by_inode: dict[int, _File] = {}
        self._names: dict[str, _File] = {}
        self._flushed_names: dict[str, _File] = {}
        self._folders: set[str] = set()
        self._flushed_folders: set[str] = set()
        self._half: tuple[_File, bytes] | None = None  # the last write, where only half was made
        self.acks: tuple[str, ...] = ()

    def apply(self, one: Record) -> None:
        """Do what the record says was done."""
        self._half = None
        if one.path == ACKS:
            if one.kind == "w":
                self.acks += (one.data.decode().rstrip("\n"),)
            return
        getattr(self, f"_{one.kind}")(one)

    def _c(self, one: Record) -> None:
        if one.path not in self._names:
            self._names[one.path] = self._by_inode[one.inode] = _File()

    def _t(self, one: Record) -> None:
        file = self._by_inode[one.inode]
        del file.now[one.offset :]
        file.now.extend(bytes(one.offset - len(file.now)))

    def _w(self, one: Record) -> None:
        file = self._by_inode[one.inode]
        file.now.extend(bytes(max(0, one.offset - len(file.now))))
        half = bytearray(file.now)
        middle = len(one.data) // 2
        half[one.offset : one.offset + middle] = one.data[:middle]
        self._half = file, bytes(half)
        file.now[one.offset : one.offset + len(one.data)] = one.data

    def _s(self, one: Record) -> None:
        file = self._by_inode.get(one.inode)
        if file is not None and (one.path in self._names or one.path.endswith(" (deleted)")):
            file.flushed = bytes(file.now)
            return
        inside = functools.partial(_is_in, one.path)
        kept = {path: file for path, file in self._flushed_names.items() if not inside(path)}
        now = {path: file for path, file in self._names.items() if inside(path)}
        self._flushed_names = kept | now
        gone = {path for path in self._flushed_folders if inside(path)} - self._folders
        self._flushed_folders -= gone
        self._flushed_folders |= {path for path in self._folders if inside(path)}

    def _r(self, one: Record) -> None:
        if one.path in self._folders:
            for path in [one.path, *(p for p in self._folders if p.startswith(f"{one.path}/"))]:
                self._folders.remove(path)
                self._folders.add(one.other + path[len(one.path) :])
            for path in [p for p in self._names if p.startswith(f"{one.path}/")]:
                self._names[one.other + path[len(one.path) :]] = self._names.pop(path)
            return
        self._names[one.other] = self._names.pop(one.path)

    def _l(self, one: Record) -> None:
        self._names[one.other] = self._names[one.path]

    def _u(self, one: Record) -> None:
        self._names.pop(one.path, None)
        self._folders.discard(one.path)

    def _d(self, one: Record) -> None:
        self._folders.add(one.path)

    def disk(self, at: int, loss: Loss) -> Disk:
        """Return what a crash leaves now."""
        lost_names = loss in (Loss.NAMES, Loss.BOTH)
        lost_data = loss in (Loss.DATA, Loss.BOTH)
        names = self._flushed_names if lost_names else self._names
        folders = self._flushed_folders if lost_names else self._folders
        half = dict([self._half] if self._half and loss is Loss.HALF else [])
        files = {
            path: file.flushed if lost_data else half.get(file, bytes(file.now))
            for path, file in names.items()
            if not path.endswith(LEFT_OUT) and _is_reached(path, folders, self._folders)
        }
        return Disk(at, loss, frozenset(folders), files, self.acks)


def _is_in(folder: str, path: str) -> bool:
    parent = str(PurePosixPath(path).parent)
    return (parent if parent != "." else "") == folder


def _is_reached(path: str, folders: set[str], known: set[str]) -> bool:
    """Whether all folders above are there; those from before the log are."""
    parents = [str(one) for one in PurePosixPath(path).parents if str(one) != "."]
    return all(one in folders or one not in known for one in parents)


@functools.cache
def library(folder: Path) -> Path:
    """Compile what is preloaded."""
    made = folder / "write_log.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(made)]
    subprocess.run([*command, str(SOURCE), "-ldl"], check=True)
    return made


def recorded(folder: Path, module: str, *arguments: str) -> list[Record]:
    """Run a module of the tests on an empty folder; return all that it did there, in order."""
    root, log = folder / "root", folder / "log"
    root.mkdir(mode=0o700)
    environ = {
        **os.environ,
        "LD_PRELOAD": str(library(folder)),
        "RKSERVE_WRITES_ROOT": str(root),
        "RKSERVE_WRITES_LOG": str(log),
    }
    command = [sys.executable, "-m", module, str(root), *arguments]
    subprocess.run(command, cwd=PROJECT, env=environ, check=True, timeout=300)
    return list(_read(log.read_bytes()))


def _read(log: bytes) -> Iterator[Record]:
    at = 0
    while at < len(log):
        kind, inode, offset, length, first, second = HEAD.unpack_from(log, at)
        at += HEAD.size
        path, other = log[at : at + first].decode(), log[at + first : at + first + second].decode()
        at += first + second
        data = log[at : at + length] if kind == ord("w") else b""
        at += length
        yield Record(chr(kind), inode, offset, path, other, data)


def disks(records: list[Record]) -> Iterator[Disk]:
    """Yield every different disk that a crash after one of the records could leave."""
    replay, seen = Replay(), set[str]()
    for at, one in enumerate(records):
        replay.apply(one)
        for loss in Loss:
            disk = replay.disk(at, loss)
            if disk.digest not in seen:
                seen.add(disk.digest)
                yield disk
