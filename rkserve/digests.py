"""Digests of large files, computed once for as long as a file stays what it was.

It knows files and sha256, and nothing of what the files are for. A file counts as unchanged while
its device, inode, size and both of its times are: whoever can forge those can forge more.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

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

    It tells files of gigabytes apart without reading them: models differ from end to end, or by
    their size. It is no protection against someone who changes a file between the blocks.
    Raises ``OSError``.
    """
    return _of_unchanged(path, _sampled)


def _of_unchanged(path: Path, digest: Callable[[str, Stamp], str]) -> str:
    before = stamp(path)
    found = digest(str(path), before)
    if stamp(path) != before:
        raise OSError(f"{path} was changed while it was read")
    return found


def stamp(path: Path) -> Stamp:
    """Return what tells a file from a changed one. Raises ``OSError`` where it is no file."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is not a regular file")
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


@lru_cache(maxsize=REMEMBERED)
def _whole(path: str, _stamp: Stamp) -> str:
    digest = hashlib.sha256()
    # 1 MiB at a time: hashlib lets other threads run while it works on pieces of this size.
    with Path(path).open("rb") as file:
        while piece := file.read(1 << 20):
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
