"""The adapters transferred to one board: a file is published on its disk whole, or not at all.

Once a partial file is complete with the right sha256, it is renamed to
``<name>/<version>/adapter.rkllm`` and gets its manifest, which makes it present. It knows files,
and neither their sender nor their use.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from rkserve.board.storage.partial_files import PartialFiles, own_folder
from rkserve.core.desired_state import AdapterVersion
from rkserve.core.durable_files import free_bytes, sync, write_private
from rkserve.core.file_digests import file_digest
from rkserve.core.name_rules import NAME
from rkserve.models.adapters import ADAPTER_FILE, MANIFEST_FILE, Adapter, AdapterFolder, shelved

log = logging.getLogger(__name__)


class StagedAdapters:
    """The folder of one board. It may be used by several threads.

    Its calls touch the disk, except for ``present`` and ``shelf``. Two concurrent senders of a
    version do no harm: each sends only bytes that are still missing.
    """

    def __init__(
        self,
        folder: Path | None,
        board_id: str,
        model: str,
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        """Without a ``folder`` nothing can be staged; ``free`` returns the disk's free bytes."""
        self._folder = folder
        self._model = model
        self._parts = PartialFiles(folder, board_id, "adapters", free)
        self._lock = self._parts.lock
        self._present: tuple[AdapterVersion, ...] = ()

    @property
    def shelf(self) -> AdapterFolder | None:
        """The folder as a shelf for the engine's adapters."""
        return None if self._folder is None else AdapterFolder.of_board(self._folder, self._model)

    def present(self) -> tuple[AdapterVersion, ...]:
        """Return the complete versions, by name, without touching the disk."""
        return self._present

    def open(self) -> None:
        """Read the folder; versions that fit their manifests are present.

        Raises:
            ConfigError: the folder cannot be used.
        """
        if self._folder is None:
            return
        self._parts.open()
        with self._lock:
            self._look()

    def begin(self, version: AdapterVersion) -> int:
        """Return the number of bytes already there: all of them where the version is present.

        Raises:
            StageFailed: it cannot be staged here, or the disk is full.
        """
        with self._lock, self._parts.told("it cannot be begun"):
            self._checked(version)
            if self._settled(version):
                return version.size_bytes
            self._present = tuple(one for one in self._present if not _same_place(one, version))
            return self._parts.begin(version.digest, version.size_bytes)

    def chunk(self, digest: str, offset: int, data: bytes) -> int:
        """Add a chunk to a file that was begun; see ``PartialFiles.chunk``."""
        return self._parts.chunk(digest, offset, data)

    def commit(self, version: AdapterVersion) -> None:
        """Make the version present, after a check of its content.

        Raises:
            StageFailed: it is incomplete; or its content is wrong, and was removed.
        """
        with self._lock, self._parts.told("it cannot be put in its place"):
            folder = self._checked(version)
            place, settled = self._place(version), self._settled(version)
            if settled and version in self._present:
                return
            if not settled:
                part = self._parts.verified(version.digest, version.size_bytes)
                own_folder(place.parent)
                own_folder(place)
                # No manifest may stand beside a file that it does not describe.
                (place / MANIFEST_FILE).unlink(missing_ok=True)
                part.replace(place / ADAPTER_FILE)
            self._write_manifest(place, version)
            for parent in (place.parent, folder):
                sync(parent)
            self._parts.done(version.digest)
            others = (one for one in self._present if not _same_place(one, version))
            self._present = _ordered((*others, version))
        log.info("adapter %s@%s is staged", version.ref.name, version.ref.version)

    def remove(self, version: AdapterVersion) -> bool:
        """Remove a version, or a part of it, from the disk; False where there is none.

        A version of the same name with another content stays. Raises ``StageFailed``.
        """
        with self._lock, self._parts.told("it cannot be removed"):
            self._checked(version)
            found = self._parts.discard(version.digest)
            if not self._settled(version):
                return found
            self._present = tuple(one for one in self._present if not _same_place(one, version))
            place = self._place(version)
            (place / MANIFEST_FILE).unlink(missing_ok=True)
            (place / ADAPTER_FILE).unlink()
            _remove_if_empty(place, place.parent)
        log.info("adapter %s@%s is removed", version.ref.name, version.ref.version)
        return True

    # -- internal: the caller holds the lock ------------------------------------------------------

    def _look(self) -> None:
        """Find the present versions; the others can be staged again."""
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
        ref, folder = version.ref, self._parts.folder
        if not NAME.fullmatch(ref.name) or not NAME.fullmatch(ref.version):
            raise self._parts.failed(f"{ref.name!r}, {ref.version!r} is not the name of an adapter")
        self._parts.check(version.digest, version.size_bytes)
        return folder

    def _place(self, version: AdapterVersion) -> Path:
        assert self._folder is not None
        return self._folder / version.ref.name / version.ref.version

    def _settled(self, version: AdapterVersion) -> bool:
        """Return whether the file is in its place with the right content, even unannounced."""
        place = self._place(version)
        file = place / ADAPTER_FILE
        if place.is_symlink() or place.parent.is_symlink() or file.is_symlink():
            raise self._parts.failed("a link is where its folder should be")
        if not file.is_file() or file.stat().st_size != version.size_bytes:
            return False
        return file_digest(file) == version.ref.digest

    def _write_manifest(self, place: Path, version: AdapterVersion) -> None:
        body = {
            "scale": version.ref.scale,
            "sha256": version.ref.digest,
            "size": version.size_bytes,
            "base_model": self._model,
        }
        fresh = place / f".{MANIFEST_FILE}.new"
        fresh.unlink(missing_ok=True)
        write_private(fresh, json.dumps(body))
        sync(fresh)
        fresh.replace(place / MANIFEST_FILE)
        sync(place)


def _same_place(one: AdapterVersion, other: AdapterVersion) -> bool:
    return (one.ref.name, one.ref.version) == (other.ref.name, other.ref.version)


def _ordered(versions: Iterable[AdapterVersion]) -> tuple[AdapterVersion, ...]:
    return tuple(sorted(versions, key=lambda one: (one.ref.name, one.ref.version)))


def _has_manifest(shelf: AdapterFolder, found: Adapter) -> bool:
    return (shelf.folder / found.name / found.version / MANIFEST_FILE).is_file()


def _remove_if_empty(*folders: Path) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError as exc:
            if exc.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            return
