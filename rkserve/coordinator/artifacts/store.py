"""The head's store of weight files, adapters and base weights, by the sha256 of their content.

Each file is written once. Boards get them by ``transfer``.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rkserve.control.calls import ArtifactMetadata, DeclaredArtifact
from rkserve.coordinator.artifacts.metadata import FOLDER as FACTS
from rkserve.coordinator.artifacts.metadata import (
    FolderModels,
    MetadataFolder,
    checked,
    compare,
    compare_size,
    manifest_beside,
    model_in,
    read_manifest,
    require_size,
)
from rkserve.coordinator.artifacts.sources import Source, check_prefixes, open_path, open_url
from rkserve.core.desired_state import AdapterVersion, Artifact, BaseVersion
from rkserve.core.errors import ArtifactNotFound, ArtifactRefused, BodyTooLarge, ConfigError
from rkserve.core.files import DIGEST, FULL, file_digest, free_bytes, make_folder, sync
from rkserve.core.messages import AdapterRef

log = logging.getLogger(__name__)

UPLOADS = ".uploads"
OWN = ".own"  # the digests of the files in the model folders
VERSION_DIGITS = 12


@dataclass(frozen=True, slots=True)
class ArtifactRules:
    """The limits of the store and its allowed sources. Times in seconds.

    An upload without data for ``upload_idle_s`` is removed. ``reserve_bytes`` of the disk stay
    free, for the Coordinator's own records.
    """

    max_bytes: int = 2 << 30
    max_model_bytes: int = 16 << 30
    allowed_paths: tuple[Path, ...] = ()
    allowed_urls: tuple[str, ...] = ()
    upload_idle_s: float = 300.0
    max_uploads: int = 16
    fetch_timeout_s: float = 600.0
    reserve_bytes: int = 64 << 20


@dataclass
class _Upload:
    """A file that is being uploaded."""

    declared: DeclaredArtifact
    path: Path
    touched_s: float
    size_bytes: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    # Held during a write; a part that is sent twice at once must not be counted twice.
    lock: threading.Lock = field(default_factory=threading.Lock)


class ArtifactStore:
    """The store in one folder, of one process. Its methods block; any thread may call them.

    Files are ``<folder>/<sha256>``. Uploads do not survive the process: their senders get an error
    and start again.
    """

    def __init__(
        self,
        folder: Path,
        rules: ArtifactRules,
        *,
        now_s: Callable[[], float] = time.monotonic,
        free: Callable[[Path], int] = free_bytes,
        own: Mapping[str, Path] | None = None,
    ) -> None:
        """``free`` returns the disk's free bytes, and ``own`` the path of a model folder's file if
        this machine has it.
        """
        self._folder = folder
        self._facts = MetadataFolder(folder / FACTS)
        self._own = FolderModels(own or {}, folder / OWN)
        self._rules = rules
        self._now_s = now_s
        self._free = free
        # Called with each file that came with a checked manifest, and its digest, after their
        # comparison and before the file is kept; it may raise.
        self.accept: Callable[[DeclaredArtifact, str], None] | None = None
        self._lock = threading.RLock()
        self._uploads: dict[str, _Upload] = {}
        self._kept_s: dict[str, float] = {}  # the time of a file's last upload, or of the start

    def open(self) -> None:
        """Prepare the folder. Raises ``ConfigError`` if it, or an allow-list, cannot be used."""
        check_prefixes(self._rules.allowed_urls)
        for allowed in self._rules.allowed_paths:
            if not allowed.expanduser().is_absolute():
                raise ConfigError(f"coordinator.allowed_paths: '{allowed}' must be absolute.")
        try:
            make_folder(self._folder)
            uploads = self._folder / UPLOADS
            uploads.mkdir(mode=0o700, exist_ok=True)
            for left in uploads.iterdir():
                left.unlink()
            self._own.records.mkdir(mode=0o700, exist_ok=True)
            self._kept_s = dict.fromkeys(self.digests(), self._now_s())
            self._facts.open(tuple(self._kept_s))
        except OSError as exc:
            raise ConfigError(
                f"The folder of adapter files {self._folder} cannot be used: {exc.strerror or exc}"
            ) from exc

    # -- uploads ------------------------------------------------------------------------------

    def upload_begin(self, declared: DeclaredArtifact) -> str:
        """Return the ID of a new upload. The default version is derived from the content.

        Raises:
            ArtifactRefused: the declaration is invalid, the disk is full, or there are too many
                uploads.
            BodyTooLarge: it is declared larger than allowed.
        """
        self.sweep()
        return self._begin(checked(declared))

    def upload_part(self, upload: str, offset: int, data: bytes) -> int:
        """Write the next bytes; return the total so far. Parts come in order.

        Raises:
            ArtifactNotFound: the upload was removed, or there was a restart.
            ArtifactRefused: the part does not follow, or the disk is full.
            BodyTooLarge: it is larger than allowed, and was removed.
        """
        coming = self._coming(upload)
        with coming.lock:
            self._coming(upload)  # it may have been removed while another thread wrote
            if offset != coming.size_bytes:
                raise ArtifactRefused(
                    f"The part begins at byte {offset}, and {coming.size_bytes} are there.",
                    "offset",
                )
            self._write(upload, coming, data)
            return coming.size_bytes

    def upload_end(self, upload: str, manifest: Mapping[str, Any] | None = None) -> Artifact:
        """Keep the file if it matches its declaration; ``Manifest`` has the fields that may be
        added now.

        Raises:
            ArtifactNotFound: the upload was removed, or there was a restart.
            ArtifactRefused: it differs from its declaration, and was removed.
        """
        return _artifact(*self._end(upload, manifest))

    def _end(self, upload: str, manifest: Mapping[str, Any] | None) -> tuple[_Upload, str, float]:
        """Store the file; return the declaration, its digest, and the declared scale."""
        coming = self._coming(upload)
        with coming.lock:
            self._coming(upload)  # it may have been ended while another thread wrote
            try:
                found = read_manifest(manifest)
                digest = coming.digest.hexdigest()
                compare(coming.declared, found, coming.size_bytes, digest)
                if coming.declared.accepted is not None and self.accept is not None:
                    self.accept(coming.declared, digest)
                return coming, self._keep(coming), found.scale
            finally:
                self.upload_abort(upload)

    def declared(self, upload: str) -> DeclaredArtifact | None:
        """Return the declaration of an upload that goes on."""
        with self._lock:
            coming = self._uploads.get(upload)
        return None if coming is None else coming.declared

    def upload_abort(self, upload: str) -> bool:
        """Remove an upload; False if there is none."""
        with self._lock:
            coming = self._uploads.pop(upload, None)
        if coming is None:
            return False
        coming.path.unlink(missing_ok=True)
        return True

    def sweep(self) -> int:
        """Remove abandoned uploads; return their number. Call it regularly."""
        before_s = self._now_s() - self._rules.upload_idle_s
        with self._lock:
            given_up = [key for key, one in self._uploads.items() if one.touched_s < before_s]
        for key in given_up:
            log.warning("upload %s got nothing for %.0f s", key, self._rules.upload_idle_s)
        return sum(self.upload_abort(key) for key in given_up)

    # -- files from elsewhere -----------------------------------------------------------------

    def register(
        self, kind: str, place: str, declared: DeclaredArtifact, scale: float = 1.0
    ) -> Artifact | None:
        """Copy a file from a ``path`` in one of the allowed folders, or fetch it from a ``url``
        below one of the allowed ones; a folder stands for the file in it. None is base weights in
        the model's own folder, which are not copied.

        Raises:
            ArtifactRefused, ArtifactNotFound, BodyTooLarge: as ``open_path``, ``open_url`` and an
                upload do; and for base weights that certainly are no model.
        """
        checked(declared)
        rules = self._rules
        if kind == "url":
            opened = open_url(place, rules.allowed_urls, rules.fetch_timeout_s)
        elif not declared.base:
            opened = open_path(place, rules.allowed_paths)
        elif self._own.leads_there(place, declared.model):
            return None
        else:
            opened = open_path(place, rules.allowed_paths, model_in)
        with opened as source:
            made = _artifact(*self._take(source, declared, scale))
        return self._own.unless_own(made) if isinstance(made, BaseVersion) else made

    def located(self, kind: str, place: str, declared: DeclaredArtifact) -> DeclaredArtifact | None:
        """Return the declaration of a file to register, with the manifest that lies beside it
        (``FILE.manifest.json``) if it has none; None is base weights in the model's own folder.

        Raises:
            ArtifactRefused: as ``open_path`` does for the file, or the manifest is too large.
        """
        if kind != "path":
            return declared
        if declared.base and self._own.leads_there(place, declared.model):
            return None
        if declared.manifest is not None:
            return declared
        text = manifest_beside(place, self._rules.allowed_paths, base=declared.base)
        return replace(declared, manifest=text)

    # -- what is there ------------------------------------------------------------------------

    def digests(self) -> tuple[str, ...]:
        """Return the digests of all files."""
        names = (file.name for file in self._folder.iterdir())
        return tuple(sorted(name for name in names if DIGEST.fullmatch(name)))

    def has(self, digest: str) -> bool:
        """Return whether a file is there."""
        return self._path(digest).is_file()

    def facts(self, digest: str) -> ArtifactMetadata:
        """Return the metadata of a content, without disk access."""
        return self._facts.of(digest)

    def model(self, model: str, version: str) -> BaseVersion:
        """Return the base weights of that name. Raises ``ArtifactNotFound``."""
        digest = self._facts.labelled(f"{model}@{version}")
        if digest is None or not self.has(digest):
            raise ArtifactNotFound(
                f"The head has no base weights '{model}@{version}'; send them anew.", "artifact"
            )
        return BaseVersion(model, version, digest, self._path(digest).stat().st_size)

    def own_digest(self, model: str) -> str | None:
        """Return the sha256 of the file in a model's own folder; None if it is not on this machine.

        The first call reads all of the file. Raises ``OSError``.
        """
        return self._own.digest(model)

    def known_own_digest(self, model: str) -> str | None:
        """Return the same if it was computed before; it reads nothing."""
        return self._own.known(model)

    def stop(self) -> None:
        """Cancel running reads, because the process is about to end."""
        self._own.stop()

    def check(self, version: Artifact) -> None:
        """Verify a file before it is sent; an unmodified one is read once only.

        Raises:
            ArtifactNotFound: it is not there, or was damaged and is now removed.
        """
        path = self._path(version.digest)
        try:
            sound = file_digest(path) == version.digest
        except OSError as exc:
            raise ArtifactNotFound(
                f"The head has no file of {version.title}; send it anew."
            ) from exc
        if not sound or path.stat().st_size != version.size_bytes:
            if not sound:
                log.error("%s has a checksum mismatch, and is removed", path)
                path.unlink(missing_ok=True)
            raise ArtifactNotFound(f"The head's file of {version.title} is damaged; send it anew.")

    def read(self, digest: str, offset: int, size: int) -> bytes:
        """Return a part of a file. Raises ``ArtifactNotFound``, ``OSError``."""
        try:
            descriptor = os.open(self._path(digest), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as exc:
            raise ArtifactNotFound(f"The head has no file of the digest {digest[:12]}.") from exc
        try:
            return os.pread(descriptor, size, offset)
        finally:
            os.close(descriptor)

    def remove(self, digest: str, idle_s: float = 0.0) -> bool:
        """Remove a file that no version needs; False if it was not removed.

        A file that arrived within ``idle_s`` stays: its sender is about to use it.
        """
        path = self._path(digest)
        with self._lock:
            if not path.is_file():
                return False
            if self._now_s() - self._kept_s.setdefault(digest, self._now_s()) < idle_s:
                return False
            path.unlink()
            self._facts.forget(digest)
            self._kept_s.pop(digest, None)
        return True

    # -- inside -------------------------------------------------------------------------------

    def _path(self, digest: str) -> Path:
        if not DIGEST.fullmatch(digest):
            raise ArtifactNotFound("That is not the sha256 of a file.")
        return self._folder / digest

    def _coming(self, upload: str) -> _Upload:
        with self._lock:
            found = self._uploads.get(upload)
        if found is None:
            raise _given_up(upload)
        return found

    def _begin(self, declared: DeclaredArtifact) -> str:
        self._require_size(declared.size_bytes or 0, declared)
        with self._lock:
            if len(self._uploads) >= self._rules.max_uploads:
                raise ArtifactRefused(
                    f"{len(self._uploads)} files come in at once, which is the limit."
                )
            self._require_room(declared.size_bytes or 0)
            key = secrets.token_hex(8)
            path = self._folder / UPLOADS / key
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.touch(mode=0o600, exist_ok=False)
            except OSError as exc:
                raise _not_written(exc) from exc
            self._uploads[key] = _Upload(declared, path, self._now_s())
        return key

    def _take(
        self, source: Source, declared: DeclaredArtifact, scale: float = 1.0
    ) -> tuple[_Upload, str, float]:
        """Store the file of a source, as an upload by this process."""
        if declared.accepted is not None and source.size_bytes is not None:
            compare_size(declared, source.size_bytes)
        sized = declared if declared.accepted else replace(declared, size_bytes=source.size_bytes)
        key = self._begin(sized)
        try:
            for block in source.blocks:
                coming = self._coming(key)
                self.upload_part(key, coming.size_bytes, block)
            return self._end(key, {"scale": scale})
        except OSError as exc:
            raise ArtifactRefused(f"The file cannot be read: {exc.strerror or exc}.") from exc
        finally:
            self.upload_abort(key)

    def _write(self, key: str, coming: _Upload, data: bytes) -> None:
        size = coming.size_bytes + len(data)
        try:
            self._require_size(size, coming.declared)
            require_size(coming.declared, size)
            if coming.declared.size_bytes is None:
                self._require_room(len(data))
            # It exists already: creating it here could leave a file that is never removed, if
            # the upload is removed at this moment.
            with coming.path.open("r+b") as file:
                file.seek(coming.size_bytes)
                file.write(data)
        except OSError as exc:
            if not self.upload_abort(key):
                raise _given_up(key) from exc
            raise _not_written(exc) from exc
        except (ArtifactRefused, BodyTooLarge):
            self.upload_abort(key)
            raise
        coming.digest.update(data)
        coming.size_bytes = size
        coming.touched_s = self._now_s()

    def _require_size(self, size: int, declared: DeclaredArtifact) -> None:
        limit = self._rules.max_model_bytes if declared.base else self._rules.max_bytes
        if size > limit:
            raise BodyTooLarge(
                f"The {declared.what} is larger than {limit} bytes, which is the limit "
                f"(`coordinator.max_{declared.what}_bytes`)."
            )

    def _require_room(self, more: int) -> None:
        """Raise unless ``more`` bytes fit besides the announced bytes of open uploads."""
        with self._lock:
            awaited = sum(
                max(0, (one.declared.size_bytes or 0) - one.size_bytes)
                for one in self._uploads.values()
            )
        try:
            free = self._free(self._folder)
        except OSError as exc:
            raise _not_written(exc) from exc
        if free < more + awaited + self._rules.reserve_bytes:
            raise ArtifactRefused(
                f"The head's disk is full: {free >> 20} MiB are free, and the file needs "
                f"{(more + awaited) >> 20} MiB besides {self._rules.reserve_bytes >> 20} MiB in "
                "reserve."
            )

    def _keep(self, coming: _Upload) -> str:
        """Move a file to its final path; return its digest."""
        digest: str = coming.digest.hexdigest()
        declared = coming.declared
        try:
            if declared.base:
                self._own.require_alike(coming.path, declared.model)
            else:
                self._own.require_adapter(coming.path, declared.model)
            sync(coming.path)
            with self._lock:
                labels = (
                    (f"{declared.model}@{_version_of(declared, digest)}",) if declared.base else ()
                )
                accepted = () if declared.accepted is None else (declared.accepted,)
                self._facts.add(
                    digest,
                    ArtifactMetadata(declared.parameters, declared.base_digest, labels, accepted),
                )
                coming.path.replace(self._path(digest))
                self._kept_s[digest] = self._now_s()
            sync(self._folder)
        except OSError as exc:
            raise _not_written(exc) from exc
        log.info(
            "%s %s@%s is here (%d bytes)",
            declared.what,
            declared.name,
            _version_of(declared, digest),
            coming.size_bytes,
        )
        return digest


def _artifact(coming: _Upload, digest: str, scale: float) -> Artifact:
    """Return what a file has been declared to be."""
    declared, version = coming.declared, _version_of(coming.declared, digest)
    if declared.base:
        return BaseVersion(declared.model, version, digest, coming.size_bytes)
    ref = AdapterRef(declared.name, version, digest, scale)
    return AdapterVersion(ref, coming.size_bytes)


def _version_of(declared: DeclaredArtifact, digest: str) -> str:
    return declared.version or digest[:VERSION_DIGITS]


def _given_up(upload: str) -> ArtifactNotFound:
    return ArtifactNotFound(f"There is no upload '{upload}' any more; begin again.")


def _not_written(exc: OSError) -> ArtifactRefused:
    if exc.errno in FULL:
        return ArtifactRefused(f"The head's disk is full ({exc.strerror}).")
    return ArtifactRefused(f"The file cannot be written on the head: {exc.strerror or exc}.")
