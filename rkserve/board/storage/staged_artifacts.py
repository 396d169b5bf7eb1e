"""The artifacts transferred to one board: each file is published on its disk whole, or not at all.

A complete partial file with the right sha256 is renamed. An adapter becomes
``<name>/<version>/adapter.rkllm`` and gets its manifest, which makes it present. Base weights
become ``<sha256>.rkllm``; they have gigabytes, so they are hashed once: a stamp beside the file
records its state at that time, and only a file that has changed since is hashed again. The module
knows files, and neither their sender nor their use.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from rkserve.board.storage.ledger_copies import LedgerCopies
from rkserve.board.storage.partial_files import PartialFiles, own_folder
from rkserve.core.board_report import LedgerCopy
from rkserve.core.desired_state import AdapterVersion, Artifact, BaseVersion
from rkserve.core.errors import StageFailed
from rkserve.core.files import (
    DIGEST,
    NAME,
    Stamp,
    file_digest,
    free_bytes,
    replace_private,
    stamp,
    sync,
)
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
        with self._lock, self._parts.disk_errors("it cannot be begun"):
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
        with self._lock, self._parts.disk_errors("it cannot be put in its place"):
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
        with self._lock, self._parts.disk_errors("it cannot be removed"):
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

    def read(self, version: AdapterVersion, offset: int, size: int) -> bytes:
        """Return a part of a present version's file. Raises ``StageFailed``."""
        if version not in self._present:
            raise self._parts.failed(f"it has no {version.title}")
        return self._parts.read(self._place(version) / ADAPTER_FILE, offset, size)

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
        replace_private(place / MANIFEST_FILE, json.dumps(body))


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


FILE, STAMP = ".rkllm", ".json"


class StagedWeights:
    """The folder of one board. It may be used by several threads.

    Its calls touch the disk, except for ``path`` and ``keys``.
    """

    def __init__(
        self,
        folder: Path | None,
        board_id: str,
        model: str,
        free: Callable[[Path], int] = free_bytes,
        digest: Callable[[Path], str] = file_digest,
    ) -> None:
        """Without a ``folder`` nothing can be staged; ``free`` returns the free bytes of the disk.

        ``digest`` reads a whole file, for its sha256.
        """
        self._folder = folder
        self._model = model
        self._digest = digest
        self._parts = PartialFiles(folder, board_id, "weights", free)
        self._lock = self._parts.lock
        # Digest to size. Never changed in place: it is read without the lock.
        self._present: dict[str, int] = {}

    def path(self, base: BaseVersion) -> Path | None:
        """Return the file of a complete version, without touching the disk."""
        if self._folder is None or self._present.get(base.digest) != base.size_bytes:
            return None
        return self._place(base.digest)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of the complete versions; see ``BaseVersion.key``."""
        digests = sorted(self._present)
        return tuple(BaseVersion(self._model, "", digest, 0).key for digest in digests)

    def open(self) -> None:
        """Read the folder; hash the files that have changed since they were verified.

        Raises:
            ConfigError: the folder cannot be used.
        """
        if self._folder is None:
            return
        self._parts.open()
        with self._lock:
            self._present = dict(self._found(self._folder))

    def begin(self, base: BaseVersion) -> int:
        """Return the number of bytes already there: all of them where the version is present.

        Raises:
            StageFailed: it cannot be staged here, or the disk is full.
        """
        with self._lock, self._parts.disk_errors("it cannot be begun"):
            self._check(base)
            if self._settled(base):
                return base.size_bytes
            self._forget(base.digest)
            return self._parts.begin(base.digest, base.size_bytes)

    def chunk(self, digest: str, offset: int, data: bytes) -> int:
        """Add a chunk to a file that was begun; see ``PartialFiles.chunk``."""
        return self._parts.chunk(digest, offset, data)

    def commit(self, base: BaseVersion) -> None:
        """Make the version present, after a check of its content.

        Raises:
            StageFailed: it is incomplete; or its content is wrong, and was removed.
        """
        with self._lock, self._parts.disk_errors("it cannot be put in its place"):
            self._check(base)
            if self._settled(base):
                return
            place = self._place(base.digest)
            part = self._parts.verified(base.digest, base.size_bytes)
            before = stamp(part)
            place.with_suffix(STAMP).unlink(missing_ok=True)
            part.replace(place)
            found = stamp(place)
            if found[:4] != before[:4]:  # the rename itself alters the last part only
                place.unlink()
                raise self._parts.failed("the file was changed while it was put in its place")
            self._note(place, found)
            self._parts.done(base.digest)
            self._present = {**self._present, base.digest: base.size_bytes}
        log.info("%s is staged (%s)", base.title, base.digest[:12])

    def remove(self, base: BaseVersion) -> bool:
        """Remove a version, or a part of it, from the disk; False where there is none.

        Raises ``StageFailed``. The caller has to know whether it is in use.
        """
        with self._lock, self._parts.disk_errors("it cannot be removed"):
            self._check(base)
            found = self._parts.discard(base.digest)
            place = self._place(base.digest)
            there = place.is_symlink() or place.exists()
            self._forget(base.digest)
            place.with_suffix(STAMP).unlink(missing_ok=True)
            place.unlink(missing_ok=True)
        if there:
            log.info("%s is removed (%s)", base.title, base.digest[:12])
        return found or there

    def read(self, base: BaseVersion, offset: int, size: int) -> bytes:
        """Return a part of a present version's file. Raises ``StageFailed``."""
        if (path := self.path(base)) is None:
            raise self._parts.failed(f"it has no {base.title}")
        return self._parts.read(path, offset, size)

    def failed(self, reason: str) -> StageFailed:
        """Return the error for the sender."""
        return self._parts.failed(reason)

    # -- internal: the caller holds the lock ------------------------------------------------------

    def _forget(self, digest: str) -> None:
        self._present = {one: size for one, size in self._present.items() if one != digest}

    def _check(self, base: BaseVersion) -> None:
        self._parts.check(base.digest, base.size_bytes)
        if base.model != self._model:
            raise self._parts.failed(f"it serves {self._model}; the weights are of {base.model}")

    def _place(self, digest: str) -> Path:
        return self._parts.folder / f"{digest}{FILE}"

    def _settled(self, base: BaseVersion) -> bool:
        """Return whether the file is in its place, complete and unchanged."""
        place = self._place(base.digest)
        if place.is_symlink():
            raise self._parts.failed("a link is where its file should be")
        return self._present.get(base.digest) == base.size_bytes == self._proven(place)

    def _found(self, folder: Path) -> Iterator[tuple[str, int]]:
        for file in sorted(folder.glob(f"*{FILE}")):
            if not DIGEST.fullmatch(file.stem) or file.is_symlink() or not file.is_file():
                log.warning("%s is no staged model, and is left alone", file)
                continue
            try:
                size = self._proven(file) or self._prove(file)
            except OSError as exc:
                log.warning("staged model %s is not used: %s", file, exc.strerror or exc)
                continue
            if size is None:
                log.warning("staged model %s has another content by now: it is removed", file)
                file.with_suffix(STAMP).unlink(missing_ok=True)
                file.unlink()
                continue
            yield file.stem, size

    def _proven(self, file: Path) -> int | None:
        """Return the size of a file that is unchanged since it was verified, else None."""
        try:
            record = json.loads(file.with_suffix(STAMP).read_text(encoding="utf-8"))
            found: Stamp = tuple(record["stamp"])
            return found[2] if found == stamp(file) else None
        except (FileNotFoundError, ValueError, KeyError, TypeError, IndexError):
            return None

    def _prove(self, file: Path) -> int | None:
        """Hash the whole file; return its size where its content fits its name, else None."""
        found = stamp(file)
        if self._digest(file) != file.stem:
            return None
        self._note(file, found)
        return found[2]

    def _note(self, file: Path, found: Stamp) -> None:
        replace_private(file.with_suffix(STAMP), json.dumps({"stamp": found}))


class Intake:
    """Receives the files sent to a board, each into its folder: adapters, base weights, and copies
    of the ledger.
    """

    def __init__(
        self,
        adapters: StagedAdapters,
        weights: StagedWeights,
        in_use: Callable[[BaseVersion], bool],
        ledgers: LedgerCopies | None = None,
    ) -> None:
        """``in_use`` returns whether the board may still load its model from these weights.
        Without ``ledgers`` no copies of ledgers are kept.
        """
        self._adapters = adapters
        self._weights = weights
        self._ledgers = LedgerCopies(None, "") if ledgers is None else ledgers
        self._in_use = in_use
        self._comes: dict[
            str, StagedAdapters | StagedWeights | LedgerCopies
        ] = {}  # the folder in which a digest was begun last

    def begin(self, version: Artifact | LedgerCopy) -> int:
        """Return the number of bytes already there. Raises ``StageFailed``."""
        if isinstance(version, LedgerCopy):
            self._comes[version.digest] = self._ledgers
            return self._ledgers.begin(version)
        if isinstance(version, AdapterVersion):
            self._comes[version.digest] = self._adapters
            return self._adapters.begin(version)
        self._comes[version.digest] = self._weights
        return self._weights.begin(version)

    def chunk(self, digest: str, offset: int, data: bytes) -> int:
        """Write a chunk of a file that was begun. Raises ``StageFailed``."""
        return self._comes.get(digest, self._adapters).chunk(digest, offset, data)

    def commit(self, version: Artifact | LedgerCopy) -> None:
        """Make the version present. Raises ``StageFailed``."""
        if isinstance(version, LedgerCopy):
            self._ledgers.commit(version)
        elif isinstance(version, AdapterVersion):
            self._adapters.commit(version)
        else:
            self._weights.commit(version)
        self._comes.pop(version.digest, None)

    def read(self, version: Artifact, offset: int, size: int) -> bytes:
        """Return a part of a present version's file, for the head. Raises ``StageFailed``."""
        if isinstance(version, AdapterVersion):
            return self._adapters.read(version, offset, size)
        return self._weights.read(version, offset, size)

    def remove(self, version: Artifact) -> bool:
        """Remove a version from the disk, unless it is in use. Raises ``StageFailed``."""
        folder: StagedAdapters | StagedWeights
        if isinstance(version, AdapterVersion):
            folder, found = self._adapters, self._adapters.remove(version)
        elif self._in_use(version):
            raise self._weights.failed("the board has loaded it, or is about to load it")
        else:
            folder, found = self._weights, self._weights.remove(version)
        if self._comes.get(version.digest) is folder:
            del self._comes[version.digest]
        return found
