"""Metadata of the head's artifacts: senders' statements, checked on arrival and stored per sha256;
and the compatibility of base weights with a model's boards.

Stored are those that the files themselves do not contain: tensor names, the base weights that an
adapter was trained on, and the versions under which base weights are served.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rkserve.config.serve_config import explain
from rkserve.control.calls import AcceptedManifest, ArtifactMetadata, DeclaredArtifact
from rkserve.coordinator.artifacts.sources import adapter_in, open_path
from rkserve.core.desired_state import BaseVersion
from rkserve.core.errors import (
    ArtifactNotFound,
    ArtifactRefused,
    ConfigError,
    ManifestInvalid,
    ManifestMismatch,
    RequestError,
)
from rkserve.core.files import (
    DIGEST,
    MANIFEST_MAX_CHARS,
    NAME,
    SIGNED_SUFFIX,
    CachedDigest,
    sync,
    write_private,
)
from rkserve.models.adapters import Manifest
from rkserve.models.files import (
    UnfitWeights,
    adapter_flaw,
    read_parameters,
    weights_facts,
)
from rkserve.models.folder import weights_in

log = logging.getLogger(__name__)

FOLDER = ".facts"
SUFFIX = ".json"


@dataclass
class MetadataFolder:
    """The metadata of all contents, in ``folder``. Any thread may use it; reading costs no disk
    access.
    """

    folder: Path
    _known: dict[str, ArtifactMetadata] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def open(self, present: tuple[str, ...]) -> None:
        """Read the metadata of the present contents, and delete the rest.

        Raises ``OSError`` if the folder cannot be used. An unreadable file in it is logged and
        deleted; the sender states its metadata again.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for file in self.folder.iterdir():
            digest = file.name.removesuffix(SUFFIX)
            if digest not in present or not file.name.endswith(SUFFIX):
                _discard(file)
                continue
            try:
                self._known[digest] = _read(json.loads(file.read_text(encoding="utf-8")))
            except (OSError, RecursionError, ValueError, KeyError, TypeError, RequestError) as exc:
                log.warning("%s is damaged and is deleted: %s", file, exc)
                _discard(file)

    def of(self, digest: str) -> ArtifactMetadata:
        """Return the metadata of a content."""
        return self._known.get(digest, ArtifactMetadata())

    def labelled(self, label: str) -> str | None:
        """Return the digest of the base weights of that ``<model>@<version>``."""
        known = list(self._known.items())
        return next((digest for digest, facts in known if label in facts.labels), None)

    def add(self, digest: str, metadata: ArtifactMetadata) -> None:
        """Store statements about a content.

        Raises:
            ArtifactRefused: a label stands for another content.
            OSError: it cannot be written, and is not stored.
        """
        with self._lock:
            for label in metadata.labels:
                other = self.labelled(label)
                if other not in (None, digest):
                    raise ArtifactRefused(
                        f"'{label}' is another content (sha256 {str(other)[:12]}...): give the new "
                        "one another version.",
                        "version",
                    )
            facts = self.of(digest).with_more(metadata)
            if facts == self.of(digest):
                return
            self._write(digest, facts)
            self._known[digest] = facts

    def forget(self, digest: str) -> None:
        """Delete the metadata of a removed content, also if its file is damaged."""
        with self._lock:
            self._known.pop(digest, None)
            _discard(self.folder / f"{digest}{SUFFIX}")

    def _write(self, digest: str, facts: ArtifactMetadata) -> None:
        place = self.folder / f"{digest}{SUFFIX}"
        fresh = place.with_suffix(".new")
        write_private(fresh, json.dumps(asdict(facts)))
        sync(fresh)
        fresh.replace(place)
        sync(self.folder)


def _discard(file: Path) -> None:
    """Remove a file; if that fails it stays, and belongs to no present content."""
    try:
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        else:
            file.unlink(missing_ok=True)
    except OSError as exc:
        log.warning("%s cannot be removed: %s", file, exc.strerror or exc)


def _read(content: Any) -> ArtifactMetadata:
    found = ArtifactMetadata(
        read_parameters(content["parameters"], "parameters"),
        content["base_digest"],
        tuple(content["labels"]),
        tuple(AcceptedManifest(**one) for one in content.get("manifests", ())),  # of an earlier one
    )
    if not all(isinstance(one, str) for one in found.labels):
        raise TypeError("a label is no string")
    return replace(found, base_digest=None if found.base_digest is None else str(found.base_digest))


def checked(declared: DeclaredArtifact) -> DeclaredArtifact:
    """Return a valid declaration. Raises ``ArtifactRefused``."""
    named = (("name", None if declared.base else declared.name), ("version", declared.version))
    for param, word in named:
        if word is not None and not NAME.fullmatch(word):
            raise ArtifactRefused(
                f"Invalid '{param}': it begins with a letter or a digit and has at most 64 "
                "letters, digits, '.', '_' and '-'.",
                param,
            )
    if declared.size_bytes is not None and declared.size_bytes < 1:
        raise ArtifactRefused(f"The {declared.what} is empty.", "size_bytes")
    for param, digest in (("sha256", declared.sha256), ("base_digest", declared.base_digest)):
        if digest is not None and not DIGEST.fullmatch(digest):
            raise ArtifactRefused(f"'{param}' must be 64 lower-case hexadecimal digits.", param)
    return declared


def read_manifest(given: Mapping[str, Any] | None) -> Manifest:
    """Return the manifest sent at the end. Raises ``ArtifactRefused``."""
    try:
        return Manifest.model_validate(dict(given or {}))
    except ValidationError as exc:
        raise ArtifactRefused(f"The manifest: {explain(exc, Manifest)}", "manifest") from exc


def require_size(declared: DeclaredArtifact, size_bytes: int) -> None:
    """Raise ``ArtifactRefused`` if more bytes arrived than declared."""
    if declared.size_bytes is not None and size_bytes > declared.size_bytes:
        raise _refusal(declared)(
            f"More bytes come than the {declared.size_bytes} that were announced.", "size_bytes"
        )


def compare_size(declared: DeclaredArtifact, size_bytes: int) -> None:
    """Raise ``ArtifactRefused`` for a file of another size than declared."""
    if declared.size_bytes not in (None, size_bytes):
        raise _refusal(declared)(
            f"size_bytes is declared as {declared.size_bytes}, but is {size_bytes}.", "size_bytes"
        )


def _refusal(declared: DeclaredArtifact) -> type[ArtifactRefused]:
    """Return the error for a file that is not as declared, by its manifest if it has one."""
    return ArtifactRefused if declared.accepted is None else ManifestMismatch


def compare(declared: DeclaredArtifact, manifest: Manifest, size_bytes: int, digest: str) -> None:
    """Raise ``ArtifactRefused`` unless the file is as declared, before or after its upload."""
    if size_bytes == 0:
        raise ArtifactRefused(f"The {declared.what} is empty.", "size_bytes")
    for key, claimed, found in (
        ("size_bytes", declared.size_bytes, size_bytes),
        ("size", manifest.size, size_bytes),
        ("sha256", declared.sha256, digest),
        ("sha256", manifest.sha256, digest),
        ("base_model", manifest.base_model, declared.model),
    ):
        if claimed is not None and claimed != found:
            raise _refusal(declared)(f"{key} is declared as {claimed}, but is {found}.", key)


log = logging.getLogger(__name__)

# Metadata that must be equal for the same boards and requests.
_ALIKE = ("simulated", "platform", "model_id")
ANY = "any"  # the platform name that matches every platform


@dataclass(frozen=True)
class FolderModels:
    """The files in the models' own folders, by model, as far as this machine has them.

    Their digests are cached in ``records``, so that a file of gigabytes is read once.
    """

    files: Mapping[str, Path]
    records: Path
    _digests: dict[str, CachedDigest] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for model, file in self.files.items():
            name = hashlib.sha256(model.encode()).hexdigest()[:16]
            self._digests[model] = CachedDigest(file, self.records / f"{name}.json")

    def known(self, model: str) -> str | None:
        """Return the sha256 of a model's own file as last computed; it reads nothing."""
        own = self._digests.get(model)
        return None if own is None else own.known

    def stop(self) -> None:
        """Cancel running computations, because the process is about to end."""
        for own in self._digests.values():
            own.stop()

    def digest(self, model: str) -> str | None:
        """Return the sha256 of a model's own file; None if it is not on this machine. Raises
        ``OSError``.

        The first call reads all of the file.
        """
        own = self._digests.get(model)
        return None if own is None else own.get()

    def require_alike(self, file: Path, model: str) -> None:
        """Raise ``ArtifactRefused`` for a file that certainly is no model for the boards of
        ``model``.

        Only a board that loads it shows whether it works.
        """
        try:
            found = weights_facts(file)
            own = weights_facts(self.files[model]) if model in self.files else None
        except UnfitWeights as exc:
            raise ArtifactRefused(f"It cannot be base weights: {exc}.", "model_path") from exc
        for what in _ALIKE:
            theirs, ours = getattr(found, what), getattr(own, what, None)
            if not {None, ANY} & {theirs, ours} and theirs != ours:
                raise ArtifactRefused(
                    f"It cannot be base weights of '{model}': its '{what}' is {theirs}, and that "
                    f"of the model's own file is {ours}.",
                    "model_path",
                )
        if own is not None and (found.max_context or 0) < (own.max_context or 0):
            raise ArtifactRefused(
                f"It cannot be base weights of '{model}': its longest context is "
                f"{found.max_context}, and requests may be as long as {own.max_context}.",
                "model_path",
            )

    def require_adapter(self, file: Path, model: str) -> None:
        """Raise ``ArtifactRefused`` for a file that certainly is no adapter of ``model``; a trial
        on one board shows whether it works.
        """
        own = None
        if model in self.files:
            with suppress(UnfitWeights):  # the board reports a model that it cannot load
                own = weights_facts(self.files[model]).model_id
        if flaw := adapter_flaw(file, own):
            raise ArtifactRefused(f"It cannot be an adapter of '{model}': {flaw}.", "lora_path")

    def leads_there(self, path: str, model: str) -> bool:
        """Return whether a path leads to the model's own file, or to its folder."""
        own = self.files.get(model)
        try:
            return own is not None and Path(path).resolve() in (own.resolve(), own.parent.resolve())
        except (OSError, RuntimeError, ValueError):
            return False

    def unless_own(self, version: BaseVersion) -> BaseVersion | None:
        """Return None for a copy of the model's own file."""
        try:
            return None if version.digest == self.digest(version.model) else version
        except OSError as exc:
            log.warning("the file of model %s cannot be read here: %s", version.model, exc)
            return version


def model_in(folder: Path) -> Path:
    """Return the model's file in a folder. Raises ``ArtifactRefused``, ``ArtifactNotFound``."""
    try:
        found = weights_in(folder)
    except ConfigError as exc:
        raise ArtifactRefused(str(exc), "model_path") from exc
    if found is None:
        raise ArtifactNotFound("That folder holds no *.rkllm file.", "model_path")
    return found


def manifest_beside(place: str, allowed: tuple[Path, ...], *, base: bool) -> str | None:
    """Return the envelope beside a file that a path leads to, None if there is none.

    Raises:
        ArtifactRefused: it lies in no allowed folder, or is too large or no text.
    """
    file_in = model_in if base else adapter_in
    path = Path(place)
    if path.is_absolute() and _is_folder(path, allowed):
        path = file_in(path)
    try:
        with open_path(f"{path}{SIGNED_SUFFIX}", allowed, file_in) as source:
            if (source.size_bytes or 0) > MANIFEST_MAX_CHARS:
                raise ManifestInvalid(
                    f"{path.name}{SIGNED_SUFFIX} has {source.size_bytes} bytes; the limit is "
                    f"{MANIFEST_MAX_CHARS}.",
                    "manifest",
                )
            return b"".join(source.blocks).decode("utf-8").strip()
    except ArtifactNotFound:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise ManifestInvalid(
            f"{path.name}{SIGNED_SUFFIX} cannot be read: {exc}.", "manifest"
        ) from exc


def _is_folder(path: Path, allowed: tuple[Path, ...]) -> bool:
    """Return whether a path leads to a folder within an allowed one; others stay unknown."""
    try:
        real = path.resolve()
        within = any(real.is_relative_to(one.expanduser().resolve()) for one in allowed)
        return within and real.is_dir()
    except (OSError, RuntimeError, ValueError):  # a link to itself, or a name that is none
        return False
