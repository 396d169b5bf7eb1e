"""Files in transfer to a board's disk: each grows under its digest, chunk by chunk.

A partial file survives a restart, and is handed out once its sha256 is right. It does not know the
purpose of the files or their final places.
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

from rkserve.core.errors import ConfigError, StageFailed
from rkserve.core.files import DIGEST, FULL, file_digest, free_bytes, make_folder, sync

log = logging.getLogger(__name__)

PARTS = ".parts"
# Reserve of the disk for logs and lock files of everything else on the board.
RESERVE_BYTES = 32 << 20
MOST_READ = 4 << 20
# A transfer that was not continued for a day is given up.
PART_AGE_S = 86_400.0


class PartialFiles:
    """The partial files of one folder of a board, in ``.parts`` there.

    ``lock`` also guards the final places; it is reentrant, and may be held during calls. Two
    concurrent senders of a file do no harm: each sends only bytes that are still missing.
    """

    def __init__(
        self,
        folder: Path | None,
        board_id: str,
        kind: str,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        """Without a ``folder`` nothing can be transferred. ``kind`` names the files in messages;
        ``free`` returns the disk's free bytes.
        """
        self._folder = folder
        self._board_id = board_id
        self._kind = kind
        self._free = free
        self.lock = threading.RLock()
        self._begun: dict[str, int] = {}  # the final size of each digest's file

    @property
    def folder(self) -> Path:
        """The folder of the files. Raises ``StageFailed`` where there is none."""
        if self._folder is None:
            raise self.failed(f"this board keeps no {self._kind}")
        return self._folder

    def open(self) -> None:
        """Create the folders, and remove old transfers. Raises ``ConfigError``."""
        folder = self.folder
        with self.lock:
            try:
                make_folder(folder)
                self.prepare()
            except OSError as exc:
                raise ConfigError(
                    f"The folder of staged {self._kind} {folder} cannot be used: "
                    f"{exc.strerror or exc}"
                ) from exc

    def prepare(self) -> None:
        """Create the folder of partial files, and remove old ones. Raises ``OSError``."""
        own_folder(self.folder / PARTS)
        self._remove_old(time.time())

    def check(self, digest: str, size_bytes: int) -> None:
        """Raise ``StageFailed`` where digest or size are invalid."""
        if not DIGEST.fullmatch(digest):
            raise self.failed("its digest is not a sha256")
        if size_bytes < 1:
            raise self.failed("it is empty")

    def begin(self, digest: str, size_bytes: int) -> int:
        """Return the number of bytes already there.

        Raises:
            StageFailed: the disk has no room for the rest.
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
        """Add the bytes of ``data`` beyond the current end; return the new size.

        Bytes that would leave a gap are not taken: the returned size is where to continue.

        Raises:
            StageFailed: the transfer was not begun since the board's start, the file would be too
                long, or the disk is full, which also removes the partial file.
        """
        with self.lock, self.disk_errors("a chunk cannot be written"):
            if digest not in self._begun:
                raise self.failed(f"no transfer of {digest[:12]} has been begun")
            limit, part = self._begun[digest], self._part(digest)
            size = size_of(part)
            if offset < 0 or offset > size:
                return size
            if offset + len(data) > limit:
                raise self.failed(f"the chunk ends beyond the file's {limit} bytes")
            news = memoryview(data)[size - offset :]
            if news:
                self._append(part, size, news)
            return size + len(news)

    def verified(self, digest: str, size_bytes: int) -> Path:
        """Return the complete file, to be moved to its final place.

        Raises:
            StageFailed: it is incomplete; or its content is wrong, and was removed.
        """
        with self.lock:
            part = self._part(digest)
            size = size_of(part)
            if size < size_bytes:
                raise self.failed(f"the file has {size} of {size_bytes} bytes")
            sync(part)
            found = file_digest(part)
            if size != size_bytes or found != digest:
                part.unlink()
                raise self.failed(
                    f"the file has the sha256 {found[:12]}..., expected {digest[:12]}..., "
                    "and was removed"
                )
            return part

    def done(self, digest: str) -> None:
        """Note that the file is in its final place."""
        self._begun.pop(digest, None)

    def discard(self, digest: str) -> bool:
        """Remove a partial file; False where there is none."""
        with self.lock:
            part = self._part(digest)
            found = part.exists()
            part.unlink(missing_ok=True)
            self._begun.pop(digest, None)
            return found

    def read(self, file: Path, offset: int, size: int) -> bytes:
        """Return a part of a file in its final place, at most ``MOST_READ`` bytes.

        Raises ``StageFailed``.
        """
        with self.disk_errors("its file cannot be read"):
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                return os.pread(descriptor, min(size, MOST_READ), offset)
            finally:
                os.close(descriptor)

    def failed(self, reason: str) -> StageFailed:
        """Return the error for the sender."""
        return StageFailed(self._board_id, reason)

    @contextmanager
    def disk_errors(self, what: str) -> Iterator[None]:
        """Convert system errors to errors for the sender."""
        try:
            yield
        except OSError as exc:
            full = ", its disk is full" if exc.errno in FULL else ""
            raise self.failed(f"{what}{full}: {exc.strerror or exc}") from exc

    def _part(self, digest: str) -> Path:
        parts = self.folder / PARTS
        own_folder(parts)  # a cleaner of temporary folders may have removed it
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
                log.info("an abandoned transfer is removed: %s", part)
                part.unlink()


def own_folder(folder: Path) -> None:
    """Create a private folder. Raises ``OSError`` where it is a link."""
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "it is a link", str(folder))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def size_of(part: Path) -> int:
    """Return the size of a file, 0 where there is none."""
    try:
        return part.lstat().st_size
    except FileNotFoundError:
        return 0
