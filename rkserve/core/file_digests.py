"""Digests of large files, cached until the file changes.

A file counts as unchanged while its device, inode, size and both of its times are. An account that
can forge those can replace the file anyway.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path

from rkserve.core.durable_files import sync

log = logging.getLogger(__name__)

DIGEST = re.compile(r"[0-9a-f]{64}")  # a sha256 in hexadecimal
BLOCK_BYTES = 64 * 1024
BLOCKS = 64
# Adapters, weights and prompt caches of one process; a digest that is forgotten is computed anew.
REMEMBERED = 4096

Stamp = tuple[int, int, int, int, int]


def file_digest(path: Path) -> str:
    """Return the sha256 of a whole file, in hexadecimal. Raises ``OSError``."""
    return _of_unchanged(path, _whole)


def content_digest(path: Path) -> str:
    """Return a digest of a file's size and of blocks spread evenly over it, both ends included.

    It distinguishes files of gigabytes without reading them whole: models differ everywhere, or in
    size. It does not protect against changes between the blocks. Raises ``OSError``.
    """
    return _of_unchanged(path, _sampled)


def _of_unchanged(path: Path, digest: Callable[[str, Stamp], str]) -> str:
    before = stamp(path)
    found = digest(str(path), before)
    if stamp(path) != before:
        raise OSError(f"{path} was changed while it was read")
    return found


def stamp(path: Path) -> Stamp:
    """Return a value that changes with the file. Raises ``OSError`` if it is no regular file."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is not a regular file")
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def ids_digest(ids: Iterable[int]) -> str:
    """Return a digest of token ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:32]


class CachedDigest:
    """The sha256 of one large file, cached in ``record`` across processes while the file is
    unchanged; without a record it is cached in memory only.

    Any thread may use it; concurrent callers share one computation.
    """

    def __init__(self, file: Path, record: Path | None) -> None:
        self.file = file
        self._record = record
        self._known: tuple[Stamp, str] | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    @property
    def known(self) -> str | None:
        """The digest as last computed; None before that. It reads nothing."""
        return None if self._known is None else self._known[1]

    def get(self) -> str:
        """Return the digest of the file as it is now; a changed file is read again.

        Raises ``OSError``: the file cannot be read, or ``stop`` was called.
        """
        with self._lock:
            stamped = stamp(self.file)
            if self._known is None:
                self._known = self._read()
            if self._known is None or self._known[0] != stamped:
                digest = _hash(str(self.file), self._stopped)
                if stamp(self.file) != stamped:
                    raise OSError(f"{self.file} was changed while it was read")
                self._known = stamped, digest
                self._write(stamped, digest)
            return self._known[1]

    def stop(self) -> None:
        """Cancel a running computation, because the process is about to end."""
        self._stopped.set()

    def _read(self) -> tuple[Stamp, str] | None:
        if self._record is None:
            return None
        try:
            found = json.loads(self._record.read_text(encoding="utf-8"))
            device, inode, size, mtime, ctime = (int(one) for one in found["stamp"])
            digest = _checked(found["digest"])
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as exc:
            log.warning("the record %s is ignored: %s", self._record, exc)
            return None
        return (device, inode, size, mtime, ctime), digest

    def _write(self, stamped: Stamp, digest: str) -> None:
        if self._record is None:
            return
        fresh = self._record.with_name(f"{self._record.name}.new")
        try:
            fresh.write_text(json.dumps({"stamp": stamped, "digest": digest}), encoding="utf-8")
            sync(fresh)
            fresh.replace(self._record)
        except OSError as exc:  # the next process reads the file once more, and nothing else
            log.warning("%s could not be written: %s", self._record, exc)


def _checked(digest: str) -> str:
    if not DIGEST.fullmatch(digest):
        raise ValueError("it holds no sha256")
    return digest


@lru_cache(maxsize=REMEMBERED)
def _whole(path: str, _stamp: Stamp) -> str:
    return _hash(path)


def _hash(path: str, stopped: threading.Event | None = None) -> str:
    digest = hashlib.sha256()
    # 1 MiB at a time: hashlib lets other threads run while it works on pieces of this size.
    with Path(path).open("rb") as file:
        while piece := file.read(1 << 20):
            if stopped is not None and stopped.is_set():
                raise OSError(f"reading {path} was cancelled because the process is ending")
            digest.update(piece)
    return digest.hexdigest()


@lru_cache(maxsize=REMEMBERED)
def _sampled(path: str, stamped: Stamp) -> str:
    size = stamped[2]
    digest = hashlib.sha256(str(size).encode())
    last = max(0, size - BLOCK_BYTES)
    with Path(path).open("rb") as file:
        for n in range(BLOCKS):
            file.seek(last * n // (BLOCKS - 1), os.SEEK_SET)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
