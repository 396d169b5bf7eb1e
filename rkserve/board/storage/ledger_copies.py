"""Copies of the backups of ledgers on one board, from which a head whose disk died is restored.

Each cluster's copies have a folder of its own: a board that served another cluster before keeps the
copies of that one, and lists them to no other head. The module knows files, and not the content.
"""

from __future__ import annotations

import logging
import re
import time
from calendar import timegm
from collections.abc import Callable
from pathlib import Path

from rkserve.board.storage.partial_files import PartialFiles
from rkserve.core.board_report import LedgerCopy
from rkserve.core.files import file_digest, free_bytes, private_folder, sync

log = logging.getLogger(__name__)

FOLDER = "ledgers"  # in the state folder, with a folder for each board in it
KEPT = 3
CLUSTER = re.compile(r"[0-9a-f]{16}")
_STAMP = "%Y%m%dT%H%M%SZ"
_NAME = re.compile(r"ledger-(\d{6,})-(\d{8}T\d{6}Z)\.sqlite3\.gz")


class LedgerCopies:
    """The copies on one board. Its calls touch the disk, and any thread may make them.

    Nothing is prepared before the first copy comes: a folder that cannot be used fails the sender,
    and not the board's start.
    """

    def __init__(
        self,
        folder: Path | None,
        board_id: str,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        """Without a ``folder`` no copies are kept; ``free`` returns the disk's free bytes."""
        self._parts = PartialFiles(folder, board_id, "copies of ledgers", free)

    def begin(self, copy: LedgerCopy) -> int:
        """Return the number of bytes already there: all of them where the copy is present.

        Raises:
            StageFailed: it cannot be kept here, or the disk is full.
        """
        with self._parts.lock, self._parts.disk_errors("a copy of the ledger cannot be begun"):
            place = self._place(copy)
            private_folder(self._parts.folder.parent)
            private_folder(self._parts.folder)
            self._parts.prepare()
            if self._is_there(copy, place):
                return copy.size_bytes
            return self._parts.begin(copy.digest, copy.size_bytes)

    def chunk(self, digest: str, offset: int, data: bytes) -> int:
        """Add a chunk to a file that was begun; see ``PartialFiles.chunk``."""
        return self._parts.chunk(digest, offset, data)

    def commit(self, copy: LedgerCopy) -> None:
        """Keep the copy, after a check of its content, and remove the oldest of its cluster.

        Raises:
            StageFailed: it is incomplete; or its content is wrong, and was removed.
        """
        with self._parts.lock, self._parts.disk_errors("a copy of the ledger cannot be kept"):
            place = self._place(copy)
            if not self._is_there(copy, place):
                part = self._parts.verified(copy.digest, copy.size_bytes)
                private_folder(place.parent)
                part.replace(place)
                sync(place.parent)
                self._parts.done(copy.digest)
                log.info("%s is kept at %s", copy.title, place)
            others = [path for path in copies_in(place.parent) if path != place]
            for path in others[KEPT - 1 :]:
                path.unlink(missing_ok=True)

    def of(self, cluster: str) -> tuple[LedgerCopy, ...]:
        """Return the copies of one cluster, the newest first. Raises ``StageFailed``."""
        with self._parts.lock, self._parts.disk_errors("its copies of the ledger cannot be read"):
            found = []
            for path in copies_in(self._folder_of(cluster)):
                number, made_s = named(path)
                size = path.stat().st_size
                found.append(LedgerCopy(cluster, number, made_s, file_digest(path), size))
            return tuple(found)

    def _folder_of(self, cluster: str) -> Path:
        if not CLUSTER.fullmatch(cluster):
            raise self._parts.failed(f"{cluster!r} is not the name of a cluster")
        return self._parts.folder / cluster

    def _place(self, copy: LedgerCopy) -> Path:
        self._parts.check(copy.digest, copy.size_bytes)
        stamp = time.strftime(_STAMP, time.gmtime(copy.made_s))
        return self._folder_of(copy.cluster) / f"ledger-{copy.number:06}-{stamp}.sqlite3.gz"

    def _is_there(self, copy: LedgerCopy, place: Path) -> bool:
        return place.is_file() and not place.is_symlink() and file_digest(place) == copy.digest


def named(path: Path) -> tuple[int, int]:
    """Return number and time in the name of a copy. Raises ``ValueError`` for another file."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path.name} is not the name of a copy")
    return int(match[1]), timegm(time.strptime(match[2], _STAMP))


def copies_in(folder: Path) -> list[Path]:
    """Return the files of copies in a cluster's folder, the newest first. Raises ``OSError``."""
    found = []
    try:
        names = list(folder.iterdir())
    except FileNotFoundError:
        return []
    for path in names:
        try:
            found.append((named(path), path))
        except ValueError:
            log.debug("%s is no copy of a ledger, and is left alone", path)
    return [path for _, path in sorted(found, reverse=True)]


def copies_of_node(state_dir: Path) -> dict[str, list[Path]]:
    """Return the copies of a node's boards by cluster, the newest first. Raises ``OSError``."""
    found: dict[str, list[Path]] = {}
    for folder in sorted((state_dir / FOLDER).glob("*/*")):
        if CLUSTER.fullmatch(folder.name) and (copies := copies_in(folder)):
            found.setdefault(folder.name, []).extend(copies)
    return {one: sorted(paths, key=named, reverse=True) for one, paths in found.items()}
