"""Files that are on their way to a board's disk: each grows under its digest, chunk by chunk.

What is there of one survives a restart, and is handed out once its sha256 is right. What the files
are for, and where they go then, it does not know.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rkserve.core.durable_files import FULL, free_bytes, sync
from rkserve.core.errors import ConfigError, StageFailed
from rkserve.core.file_digests import DIGEST, file_digest

log = logging.getLogger(__name__)

PARTS = ".parts"
# Left of the disk, so that logs and lock files of everything else on the board can be written.
RESERVE_BYTES = 32 << 20
# A staging that nobody has taken up again for a day is nobody's.
PART_AGE_S = 86_400.0


class Parts:
    """The files that come into one folder of a board, in ``.parts`` there.

    ``lock`` is for whoever puts them in their places, too: its calls take it, and may be made with
    it held. Two who send the same file at once do no harm: what one has sent, the other need not.
    """

    def __init__(
        self,
        folder: Path | None,
        board_id: str,
        kind: str,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        """Without a ``folder`` nothing can come. ``kind`` names the files in words; ``free`` says
        what the disk has left.
        """
        self._folder = folder
        self._board_id = board_id
        self._kind = kind
        self._free = free
        self.lock = threading.RLock()
        self._begun: dict[str, int] = {}  # the size that the file of a digest will have

    @property
    def folder(self) -> Path:
        """Where the files go. Raises ``StageFailed`` where there is no such place."""
        if self._folder is None:
            raise self.failed(f"this board keeps no {self._kind}")
        return self._folder

    def open(self) -> None:
        """Make the folders, and remove what was given up. Raises ``ConfigError``."""
        folder = self.folder
        with self.lock:
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                own_folder(folder / PARTS)
                self._remove_old(time.time())
            except OSError as exc:
                raise ConfigError(
                    f"The folder of staged {self._kind} {folder} cannot be used: "
                    f"{exc.strerror or exc}"
                ) from exc

    def check(self, digest: str, size_bytes: int) -> None:
        """Raise ``StageFailed`` unless there can be such a file."""
        if not DIGEST.fullmatch(digest):
            raise self.failed("its digest is no sha256")
        if size_bytes < 1:
            raise self.failed("it is empty")

    def begin(self, digest: str, size_bytes: int) -> int:
        """Return how many bytes of the file are there.

        Raises:
            StageFailed: there is no room for the rest of it.
        """
        with self.lock:
            part = self._part(digest)
            size = size_of(part)
            if size > size_bytes:
                part.unlink()
                size = 0
            rest = size_bytes - size
            if rest and (free := self._free(self.folder)) < rest + RESERVE_BYTES:
                raise self.failed(
                    f"its disk is full: {free >> 20} MiB are free, and {rest >> 20} MiB besides "
                    f"{RESERVE_BYTES >> 20} MiB in reserve are needed"
                )
            self._begun[digest] = size_bytes
            return size

    def chunk(self, digest: str, offset: int, data: bytes) -> int:
        """Add what ``data`` has beyond what is there; return how many bytes are there then.

        Bytes that would leave a gap are not taken: the answer says where to go on.

        Raises:
            StageFailed: nothing was begun (since the board's start), the file would be too long,
                or the disk is full, which also removes what was there of it.
        """
        with self.lock, self.told("a chunk cannot be written"):
            if digest not in self._begun:
                raise self.failed(f"no staging of {digest[:12]} has been begun")
            limit, part = self._begun[digest], self._part(digest)
            size = size_of(part)
            if offset < 0 or offset > size:
                return size
            if offset + len(data) > limit:
                raise self.failed(f"more bytes come than the {limit} of the whole file")
            news = memoryview(data)[size - offset :]
            if news:
                self._append(part, size, news)
            return size + len(news)

    def verified(self, digest: str, size_bytes: int) -> Path:
        """Return the whole file, for a place of its own.

        Raises:
            StageFailed: it is not whole yet; or the content is another one, and was removed.
        """
        with self.lock:
            part = self._part(digest)
            size = size_of(part)
            if size < size_bytes:
                raise self.failed(f"only {size} of {size_bytes} bytes are there")
            sync(part)
            found = file_digest(part)
            if size != size_bytes or found != digest:
                part.unlink()
                raise self.failed(
                    f"what came has the sha256 {found[:12]}... and not {digest[:12]}..., "
                    "and was removed"
                )
            return part

    def done(self, digest: str) -> None:
        """The file is in its place."""
        self._begun.pop(digest, None)

    def discard(self, digest: str) -> bool:
        """Remove what there is of a file; False where there is nothing."""
        with self.lock:
            part = self._part(digest)
            found = part.exists()
            part.unlink(missing_ok=True)
            self._begun.pop(digest, None)
            return found

    def failed(self, reason: str) -> StageFailed:
        """Return the error that tells the sender so."""
        return StageFailed(self._board_id, reason)

    @contextmanager
    def told(self, what: str) -> Iterator[None]:
        """Have the system's errors reach the sender as words about this board."""
        try:
            yield
        except OSError as exc:
            full = ", its disk is full" if exc.errno in FULL else ""
            raise self.failed(f"{what}{full}: {exc.strerror or exc}") from exc

    def _part(self, digest: str) -> Path:
        parts = self.folder / PARTS
        own_folder(parts)  # whoever tidies temporary folders may have taken it away
        return parts / f"{digest}.part"

    def _append(self, part: Path, size: int, news: memoryview) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(part, flags, 0o600)
        try:
            while news:
                news = news[os.write(descriptor, news) :]
        except OSError as exc:
            if exc.errno in FULL:
                # What is left of the disk is needed more than the beginning of a file.
                part.unlink(missing_ok=True)
                raise self.failed(f"its disk is full ({exc.strerror})") from exc
            os.ftruncate(descriptor, size)
            raise
        finally:
            os.close(descriptor)

    def _remove_old(self, now_s: float) -> None:
        for part in (self.folder / PARTS).iterdir():
            if part.suffix == ".part" and now_s - part.lstat().st_mtime > PART_AGE_S:
                log.info("a staging that was given up is removed: %s", part)
                part.unlink()


def own_folder(folder: Path) -> None:
    """Make a folder that nobody else reads. Raises ``OSError`` where it is a link."""
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "it is a link", str(folder))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def size_of(part: Path) -> int:
    """Return what a file has, 0 where there is none."""
    try:
        return part.lstat().st_size
    except FileNotFoundError:
        return 0
