"""The folder of prompt cache files, and the validation of its content.

``<folder>/<seal>/<id>.kv`` is written by the runtime, ``<id>.json`` beside it is its manifest. The
manifest is written last and removed first: a ``.kv`` without one does not count. Which files are
worth keeping is decided by the store.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rkserve.board.answer.transcript import Ids
from rkserve.core.errors import ConfigError
from rkserve.core.files import NAME, Stamp, file_digest, sync
from rkserve.core.files import stamp as stamp_of

log = logging.getLogger(__name__)

VERSION = 2  # of the manifest; version 1 had no salt
MANIFEST_MAX_BYTES = 1 << 20  # the ids of the largest context need a seventh of it
LOCK_FILE = "lock"
MEASURED_BYTES = 16 << 20  # enough for a rate: an SD card of 20 MB/s takes 0.8 s
SPARE_BYTES = 256 << 20  # a disk that prompt caches leave to others, or a twentieth of it
# Other files in the folder are foreign, and left alone.
OUR_FOLDER = re.compile(r"kv-[0-9a-f]{16}")
OUR_FILE = re.compile(r"([0-9a-f]{16})\.(kv|json)(\.tmp)?")


class UnusableCacheFile(Exception):
    """A file that cannot be used, with the reason. It never leaves the room."""


@dataclass(frozen=True, slots=True)
class CacheFingerprint:
    """The validity of a KV cache, apart from its origin: digests, or names with versions.

    ``load`` covers the load parameters that shape the cache: its context length, its batch.
    """

    model: str
    release: str
    template: str = ""
    tokenizer: str = ""
    load: str = ""

    @property
    def digest(self) -> str:
        """The fingerprint as a string of hexadecimal digits."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class CachedFile:
    """One prompt cache file. ``name`` is None for a parked conversation.

    It contains the positions of ``ids``, computed under ``origin``; None is the base model. Times
    are of the day, in seconds.
    """

    id: str
    path: Path
    name: str | None
    origin: str | None
    ids: Ids
    file_bytes: int
    sha256: str
    created_s: float
    used_s: float

    @property
    def tokens(self) -> int:
        """The number of its positions."""
        return len(self.ids)

    @property
    def manifest(self) -> Path:
        """The path of its manifest."""
        return self.path.with_suffix(".json")


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file written by the runtime."""

    file_bytes: int
    sha256: str
    stamp: Stamp


@dataclass(frozen=True, slots=True)
class FolderSpace:
    """The file system of a folder: its kind, such as ``ext4``, its size and its free bytes."""

    kind: str
    total_bytes: int
    free_bytes: int

    @property
    def in_memory(self) -> bool:
        """True where files take the machine's memory."""
        return self.kind in ("tmpfs", "ramfs")

    def limit(self, budget_bytes: int, used_bytes: int) -> int:
        """Return the part of a budget that the folder has room for, with ``used_bytes`` in use."""
        share = self.total_bytes // (16 if self.in_memory else 20)
        spare = 0 if self.in_memory else max(SPARE_BYTES, share)
        room = max(0, used_bytes + self.free_bytes - spare)
        return min(budget_bytes, room, share) if self.in_memory else min(budget_bytes, room)


def _file_system(folder: Path) -> str:
    """Return the type of the file system of a folder; empty where the kernel does not tell."""
    best, kind, own = "", "", str(folder.resolve())
    try:
        lines = Path("/proc/self/mounts").read_text("utf-8", "replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        _, point, found, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        inside = own == point or own.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, kind = point, found
    return kind


class CacheFolder:
    """The files of one board with one fingerprint at a time. Every method touches the disk."""

    def __init__(self, folder: Path, seal: CacheFingerprint) -> None:
        self._root = folder
        self.seal(seal)
        self._lock: int | None = None
        # Entry id to the state in which its content was verified.
        self._proven: dict[str, Stamp] = {}

    def open(self) -> list[CachedFile]:
        """Lock the folder, tidy it up and return its entries. Raises ``ConfigError``."""
        try:
            # The cached prompts are private: other users of the machine must not read them.
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock()
            self._take_folder()
            self._remove_other_seals()
            return list(self._read_all())
        except OSError as exc:
            self.close()
            raise ConfigError(
                f"The folder of prompt caches {self._root} cannot be used: {exc.strerror or exc}"
            ) from exc
        except ConfigError:
            self.close()
            raise

    def measure(self) -> tuple[float, float]:
        """Return the rates of writing and of reading a file here, in bytes/s.

        Raises ``OSError``. What is read comes from the disk, where the kernel lets go of the pages.
        """
        path, data = self._root / "measure.tmp", os.urandom(MEASURED_BYTES)
        try:
            with path.open("wb", buffering=0) as file:
                begun_s = time.perf_counter()
                file.write(data)
                os.fsync(file.fileno())
                written_s = time.perf_counter() - begun_s
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            with path.open("rb", buffering=0) as file:
                begun_s = time.perf_counter()
                file.readall()
                read_s = time.perf_counter() - begun_s
        finally:
            path.unlink(missing_ok=True)
        return len(data) / max(written_s, 1e-9), len(data) / max(read_s, 1e-9)

    def space(self) -> FolderSpace:
        """Return the space where the folder is. Raises ``OSError``."""
        usage = shutil.disk_usage(self._root)
        return FolderSpace(_file_system(self._root), usage.total, usage.free)

    def seal(self, seal: CacheFingerprint) -> None:
        """Set the fingerprint of a folder that is not open."""
        self._seal = seal.digest
        self._folder = self._root / f"kv-{seal.digest[:16]}"

    @property
    def fingerprint(self) -> str:
        """The digest of the current fingerprint."""
        return self._seal

    def differs(self, seal: CacheFingerprint) -> bool:
        """Return whether the folder is open, with another fingerprint."""
        return self._lock is not None and self._seal != seal.digest

    def turn_to(self, seal: CacheFingerprint) -> list[CachedFile]:
        """Switch the fingerprint; return its entries. Raises ``ConfigError``, ``OSError``."""
        self.seal(seal)
        self._proven.clear()
        self._take_folder()
        return list(self._read_all())

    def bytes_elsewhere(self) -> int:
        """Return the size of the files of other fingerprints."""
        others = (one for one in self._root.iterdir() if OUR_FOLDER.fullmatch(one.name))
        files = (f for one in others if one != self._folder and one.is_dir() for f in one.iterdir())
        return sum(file.lstat().st_size for file in files if OUR_FILE.fullmatch(file.name))

    def is_current(self, path: Path) -> bool:
        """Return whether a reserved path has the current fingerprint."""
        return path.parent == self._folder

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def reserve(self, entry_id: str) -> Path:
        """Return the path of a new file."""
        # With all parents: a cleaner of temporary folders may have removed them.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._folder / f"{entry_id}.kv.tmp"

    def reserved(self, path: Path) -> Path:
        """Return ``path`` if it came from ``reserve``: no other file is ever published or removed.

        Raises ``ValueError``, because such a path comes only from the board itself.
        """
        folder = path.parent  # of an earlier fingerprint, where that has changed since
        ours = folder.parent == self._root and OUR_FOLDER.fullmatch(folder.name)
        if not ours or not re.fullmatch(r"[0-9a-f]{16}\.kv\.tmp", path.name):
            raise ValueError(f"{path} was not reserved")
        return path

    def examine(self, path: Path, sha256: str | None = None) -> WrittenFile:
        """Return size, sha256 and stamp of ``path``; the file is not read if ``sha256`` is known.

        Raises ``UnusableCacheFile``.
        """
        file_bytes = _regular(path)
        if file_bytes == 0:
            raise UnusableCacheFile("the file is empty")
        # Taken before the file is read, so that `publish` detects a change meanwhile.
        stamp = stamp_of(path)
        return WrittenFile(file_bytes, sha256 or file_digest(path), stamp)

    def publish(
        self, path: Path, entry: CachedFile, written: WrittenFile, *, durable: bool = True
    ) -> None:
        """Make ``path`` the file of ``entry``, completely or not at all.

        One that is not ``durable`` may be damaged by a power cut, which ``check`` finds.
        """
        manifest = entry.manifest.with_suffix(".json.tmp")
        try:
            path.chmod(0o600)
            if durable:
                sync(path)
            path.rename(entry.path)
            self._proven[entry.id] = _unchanged(entry.path, written.stamp)
            manifest.write_bytes(_dump(entry, self._seal))
            manifest.chmod(0o600)
            if durable:
                sync(manifest)
            manifest.rename(entry.manifest)
            os.utime(entry.manifest, (entry.used_s, entry.used_s))
            if durable:
                sync(self._folder)
        except OSError:
            self.discard(manifest)
            self.remove(entry)
            raise

    def check(self, entry: CachedFile) -> None:
        """Verify the file. Raises ``UnusableCacheFile``, ``OSError``: changed or missing."""
        file_bytes = _regular(entry.path)
        if file_bytes != entry.file_bytes:
            raise UnusableCacheFile(f"it has {file_bytes} bytes and not {entry.file_bytes}")
        stamp = stamp_of(entry.path)
        if stamp == self._proven.get(entry.id):
            return
        if file_digest(entry.path) != entry.sha256:
            raise UnusableCacheFile("checksum mismatch")
        self._proven[entry.id] = stamp

    def touch(self, entry: CachedFile) -> None:
        """Note the time of use for the next process."""
        try:
            os.utime(entry.manifest, (entry.used_s, entry.used_s))
        except OSError as exc:
            # The file itself is good; it may only be evicted too early.
            log.warning("the use of prompt cache %s cannot be noted: %s", entry.path, exc)

    def remove(self, entry: CachedFile) -> None:
        """Remove an entry from the disk, the manifest first."""
        self._proven.pop(entry.id, None)
        self.discard(entry.manifest)
        self.discard(entry.path)

    def discard(self, path: Path) -> None:
        """Remove one of the board's files, if it exists."""
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            log.warning("%s cannot be removed: %s", path, exc)

    def _take_lock(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        self._lock = os.open(self._root / LOCK_FILE, flags, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise ConfigError(
                f"The folder of prompt caches {self._root} is used by another process"
            ) from exc

    def _take_folder(self) -> None:
        if self._folder.is_symlink():
            raise ConfigError(f"{self._folder} is a link; prompt caches are kept in no other place")
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._folder.chmod(0o700)

    def _remove_other_seals(self) -> None:
        """Remove the files of an earlier model, runtime or template, which cannot be used again."""
        for other in sorted(self._root.iterdir()):
            ours = OUR_FOLDER.fullmatch(other.name) and other != self._folder
            if ours and other.is_dir() and not other.is_symlink():
                log.info(
                    "prompt caches of another model, runtime or template are removed: %s", other
                )
                self._remove_folder(other)

    def _remove_folder(self, other: Path) -> None:
        try:
            for file in list(other.iterdir()):
                if OUR_FILE.fullmatch(file.name):
                    self.discard(file)
            other.rmdir()
        except OSError as exc:
            log.warning("%s cannot be removed: %s", other, exc)

    def _read_all(self) -> Iterator[CachedFile]:
        names = sorted(file.name for file in self._folder.iterdir())
        for name in names:
            ours = OUR_FILE.fullmatch(name)
            if ours is None:
                continue
            entry_id, kind, unfinished = ours.groups()
            if unfinished or (kind == "kv" and f"{entry_id}.json" not in names):
                self.discard(self._folder / name)
            elif kind == "json" and (entry := self._read(entry_id)) is not None:
                yield entry

    def _read(self, entry_id: str) -> CachedFile | None:
        path = self._folder / f"{entry_id}.kv"
        try:
            return _read_entry(path, self._seal)
        except (UnusableCacheFile, OSError) as exc:
            log.warning("prompt cache %s is not used, and removed: %s", path, exc)
            self.discard(path.with_suffix(".json"))
            self.discard(path)
            return None


def _read_entry(path: Path, seal: str) -> CachedFile:
    manifest = path.with_suffix(".json")
    if (size_bytes := _regular(manifest)) > MANIFEST_MAX_BYTES:
        raise UnusableCacheFile(f"its manifest has {size_bytes} bytes")
    entry = _load(manifest.read_bytes(), seal, path, manifest.stat().st_mtime)
    if (found := _regular(path)) != entry.file_bytes:
        raise UnusableCacheFile(f"it has {found} bytes and not {entry.file_bytes}")
    return entry


def _regular(path: Path) -> int:
    """Return the size of a regular file. Raises ``UnusableCacheFile`` for all else."""
    try:
        found = path.lstat()
    except FileNotFoundError as exc:
        raise UnusableCacheFile(f"{path.name} is missing") from exc
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1:
        raise UnusableCacheFile(f"{path.name} is not a plain file of its own")
    return found.st_size


def _unchanged(path: Path, before: Stamp) -> Stamp:
    """Return the stamp of a file that was renamed meanwhile, which alters its last part only."""
    now = stamp_of(path)
    if now[:-1] != before[:-1]:
        raise OSError(f"{path} was changed while it was published")
    return now


# -- the manifest ---------------------------------------------------------------------------------


KINDS: dict[str, tuple[type, ...]] = {
    "name": (str, type(None)),
    "origin": (str, type(None)),
    "ids": (list,),
    "file_bytes": (int,),
    "sha256": (str,),
    "created_s": (float, int),
}


def _dump(entry: CachedFile, seal: str) -> bytes:
    body = {"version": VERSION, "seal": seal, "id": entry.id}
    body |= {key: getattr(entry, key) for key in KINDS}
    return json.dumps(body | {"manifest_sha256": _own_digest(body)}).encode()


def _load(data: bytes, seal: str, path: Path, used_s: float) -> CachedFile:
    """Parse a manifest. Raises ``UnusableCacheFile``."""
    try:
        body: dict[str, Any] = json.loads(data)
        recorded = body.pop("manifest_sha256")
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as exc:
        raise UnusableCacheFile("its manifest cannot be read") from exc
    if recorded != _own_digest(body):
        raise UnusableCacheFile("its manifest is damaged")
    if body.get("version") != VERSION or body.get("seal") != seal:
        raise UnusableCacheFile("it was made with another model, runtime or template")
    if body.get("id") != path.stem:
        raise UnusableCacheFile("its manifest belongs to another file")
    try:
        return _entry(body, path, used_s)
    except (KeyError, TypeError, ValueError) as exc:
        raise UnusableCacheFile("its manifest has invalid values") from exc


def _entry(body: dict[str, Any], path: Path, used_s: float) -> CachedFile:
    """Check the types of a manifest's values: the digest is no signature."""
    for key, kinds in KINDS.items():
        if not isinstance(body[key], kinds):
            raise TypeError(key)
    if not math.isfinite(body["created_s"]) or not NAME.fullmatch(body["name"] or "parked"):
        raise ValueError
    if not all(isinstance(token_id, int) for token_id in body["ids"]):
        raise TypeError("ids")
    values = {key: body[key] for key in KINDS} | {"ids": tuple(body["ids"])}
    return CachedFile(id=path.stem, path=path, used_s=used_s, **values)


def _own_digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
