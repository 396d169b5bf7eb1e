"""The adapters that were sent to one board: how a file comes onto its disk whole, or not at all.

A file grows in ``.parts`` under its digest, chunk by chunk, and survives a restart there; once its
sha256 is right it is renamed to ``<name>/<version>/adapter.rkllm`` and gets its manifest, which
makes it present. It knows files, and neither who sends them nor what they are loaded into.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rkserve.adapterfolder import ADAPTER_FILE, MANIFEST_FILE, Adapter, Shelf, shelved
from rkserve.desired import AdapterVersion
from rkserve.digests import DIGEST, file_digest
from rkserve.disk import FULL, free_bytes, sync
from rkserve.errors import ConfigError, StageFailed
from rkserve.names import NAME

log = logging.getLogger(__name__)

PARTS = ".parts"
# Left of the disk, so that logs and lock files of everything else on the board can be written.
RESERVE_BYTES = 32 << 20
# A staging that nobody has taken up again for a day is nobody's.
PART_AGE_S = 86_400.0


class Staged:
    """The folder of one board. It may be used by several threads.

    Its calls touch the disk, except for ``present`` and ``shelf``. Two who send the same version at
    once do no harm: what one has sent, the other need not.
    """

    def __init__(
        self,
        folder: Path | None,
        board_id: str,
        model: str,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        """Without a ``folder`` nothing can be staged; ``free`` says what the disk has left."""
        self._folder = folder
        self._board_id = board_id
        self._model = model
        self._free = free
        self._lock = threading.RLock()
        self._begun: dict[str, int] = {}  # the size that the file of a digest will have
        self._present: tuple[AdapterVersion, ...] = ()

    @property
    def shelf(self) -> Shelf | None:
        """Where the engine finds what is present."""
        return None if self._folder is None else Shelf.of_board(self._folder, self._model)

    def present(self) -> tuple[AdapterVersion, ...]:
        """Return the versions that are there whole, by name. It costs nothing."""
        return self._present

    def open(self) -> None:
        """Read all that is there, and keep as present what is what its manifest says.

        Raises:
            ConfigError: the folder cannot be used.
        """
        if self._folder is None:
            return
        with self._lock:
            try:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                _own_folder(self._folder / PARTS)
                self._remove_old_parts(time.time())
            except OSError as exc:
                raise ConfigError(
                    f"The folder of staged adapters {self._folder} cannot be used: "
                    f"{exc.strerror or exc}"
                ) from exc
            self._look()

    def begin(self, version: AdapterVersion) -> int:
        """Return how many bytes of the version are there: all of them where it is present.

        Raises:
            StageFailed: it cannot be staged here, or there is no room for the rest of it.
        """
        with self._lock, self._told("it cannot be begun"):
            folder = self._checked(version)
            if self._settled(version):
                return version.size_bytes
            self._present = tuple(one for one in self._present if not _same_place(one, version))
            part = self._part(version.ref.digest)
            size = _size(part)
            if size > version.size_bytes:
                part.unlink()
                size = 0
            rest = version.size_bytes - size
            if rest and (free := self._free(folder)) < rest + RESERVE_BYTES:
                raise self._failed(
                    f"its disk is full: {free >> 20} MiB are free, and {rest >> 20} MiB besides "
                    f"{RESERVE_BYTES >> 20} MiB in reserve are needed"
                )
            self._begun[version.ref.digest] = version.size_bytes
            return size

    def chunk(self, digest: str, offset: int, data: bytes) -> int:
        """Add what ``data`` has beyond what is there; return how many bytes are there then.

        Bytes that would leave a gap are not taken: the answer says where to go on.

        Raises:
            StageFailed: nothing was begun (since the board's start), the file would be too long,
                or the disk is full, which also removes what was there of it.
        """
        with self._lock, self._told("a chunk cannot be written"):
            if digest not in self._begun:
                raise self._failed(f"no staging of {digest[:12]} has been begun")
            limit, part = self._begun[digest], self._part(digest)
            size = _size(part)
            if offset < 0 or offset > size:
                return size
            if offset + len(data) > limit:
                raise self._failed(f"more bytes come than the {limit} of the whole file")
            news = memoryview(data)[size - offset :]
            if news:
                self._append(part, size, news)
            return size + len(news)

    def commit(self, version: AdapterVersion) -> None:
        """Make the version present, once its content is known to be right.

        Raises:
            StageFailed: it is not whole yet; or the content is another one, and was removed.
        """
        with self._lock, self._told("it cannot be put in its place"):
            folder = self._checked(version)
            place, settled = self._place(version), self._settled(version)
            if settled and version in self._present:
                return
            if not settled:
                part = self._verified(version)
                _own_folder(place.parent)
                _own_folder(place)
                # No manifest may stand beside a file that it does not describe.
                (place / MANIFEST_FILE).unlink(missing_ok=True)
                part.replace(place / ADAPTER_FILE)
            self._write_manifest(place, version)
            for parent in (place.parent, folder):
                sync(parent)
            self._begun.pop(version.ref.digest, None)
            others = (one for one in self._present if not _same_place(one, version))
            self._present = _ordered((*others, version))
        log.info("adapter %s@%s is staged", version.ref.name, version.ref.version)

    def remove(self, version: AdapterVersion) -> bool:
        """Take a version, or what there is of it, off the disk; False where there is nothing.

        Another content that has the same name by now stays. Raises ``StageFailed``.
        """
        with self._lock, self._told("it cannot be removed"):
            self._checked(version)
            part = self._part(version.ref.digest)
            found = part.exists()
            part.unlink(missing_ok=True)
            self._begun.pop(version.ref.digest, None)
            if not self._settled(version):
                return found
            self._present = tuple(one for one in self._present if not _same_place(one, version))
            place = self._place(version)
            (place / MANIFEST_FILE).unlink(missing_ok=True)
            (place / ADAPTER_FILE).unlink()
            _remove_if_empty(place, place.parent)
        log.info("adapter %s@%s is removed", version.ref.name, version.ref.version)
        return True

    # -- inside, with the lock held -----------------------------------------------------------

    def _look(self) -> None:
        """Find what is present. What is not is left to be staged anew."""
        shelf = self.shelf
        assert shelf is not None
        found: list[AdapterVersion] = []
        for one in shelved(shelf):
            if one.broken or one.path is None or not _has_manifest(shelf, one):
                log.warning("staged adapter %s is not used: %s", one.label, one.broken or "unready")
                continue
            found.append(AdapterVersion(one.ref(), one.size_bytes))
        self._present = _ordered(found)

    def _checked(self, version: AdapterVersion) -> Path:
        """Return the folder if ``version`` can be staged there."""
        ref = version.ref
        if self._folder is None:
            raise self._failed("this board keeps no adapters")
        if not NAME.fullmatch(ref.name) or not NAME.fullmatch(ref.version):
            raise self._failed(f"{ref.name!r}, {ref.version!r} is not the name of an adapter")
        if not DIGEST.fullmatch(ref.digest):
            raise self._failed("its digest is no sha256")
        if version.size_bytes < 1:
            raise self._failed("it is empty")
        return self._folder

    def _part(self, digest: str) -> Path:
        assert self._folder is not None
        parts = self._folder / PARTS
        _own_folder(parts)  # whoever tidies temporary folders may have taken it away
        return parts / f"{digest}.part"

    def _place(self, version: AdapterVersion) -> Path:
        assert self._folder is not None
        return self._folder / version.ref.name / version.ref.version

    def _settled(self, version: AdapterVersion) -> bool:
        """Whether the file is in its place with the right content, though perhaps unannounced."""
        place = self._place(version)
        file = place / ADAPTER_FILE
        if place.is_symlink() or place.parent.is_symlink() or file.is_symlink():
            raise self._failed("a link is where its folder should be")
        if not file.is_file() or file.stat().st_size != version.size_bytes:
            return False
        return file_digest(file) == version.ref.digest

    def _verified(self, version: AdapterVersion) -> Path:
        part = self._part(version.ref.digest)
        size = _size(part)
        if size < version.size_bytes:
            raise self._failed(f"only {size} of {version.size_bytes} bytes are there")
        sync(part)
        found = file_digest(part)
        if size != version.size_bytes or found != version.ref.digest:
            part.unlink()
            raise self._failed(
                f"what came has the sha256 {found[:12]}... and not {version.ref.digest[:12]}..., "
                "and was removed"
            )
        return part

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
                raise self._failed(f"its disk is full ({exc.strerror})") from exc
            os.ftruncate(descriptor, size)
            raise
        finally:
            os.close(descriptor)

    def _write_manifest(self, place: Path, version: AdapterVersion) -> None:
        body = {
            "scale": version.ref.scale,
            "sha256": version.ref.digest,
            "size": version.size_bytes,
            "base_model": self._model,
        }
        fresh = place / f".{MANIFEST_FILE}.new"
        fresh.unlink(missing_ok=True)
        fresh.write_text(json.dumps(body), encoding="utf-8")
        sync(fresh)
        fresh.replace(place / MANIFEST_FILE)
        sync(place)

    def _remove_old_parts(self, now_s: float) -> None:
        assert self._folder is not None
        for part in (self._folder / PARTS).iterdir():
            if part.suffix == ".part" and now_s - part.lstat().st_mtime > PART_AGE_S:
                log.info("a staging that was given up is removed: %s", part)
                part.unlink()

    def _failed(self, reason: str) -> StageFailed:
        return StageFailed(self._board_id, reason)

    @contextmanager
    def _told(self, what: str) -> Iterator[None]:
        """Have the system's errors reach the sender as words about this board."""
        try:
            yield
        except OSError as exc:
            full = ", its disk is full" if exc.errno in FULL else ""
            raise self._failed(f"{what}{full}: {exc.strerror or exc}") from exc


def _same_place(one: AdapterVersion, other: AdapterVersion) -> bool:
    return (one.ref.name, one.ref.version) == (other.ref.name, other.ref.version)


def _ordered(versions: Iterable[AdapterVersion]) -> tuple[AdapterVersion, ...]:
    return tuple(sorted(versions, key=lambda one: (one.ref.name, one.ref.version)))


def _has_manifest(shelf: Shelf, found: Adapter) -> bool:
    return (shelf.folder / found.name / found.version / MANIFEST_FILE).is_file()


def _own_folder(folder: Path) -> None:
    """Make a folder that nobody else reads. Raises ``OSError`` where it is a link."""
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "it is a link", str(folder))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def _size(part: Path) -> int:
    try:
        return part.lstat().st_size
    except FileNotFoundError:
        return 0


def _remove_if_empty(*folders: Path) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return
