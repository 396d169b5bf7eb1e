"""Senders' statements about artifacts: their check on arrival, and their storage per sha256.

Stored are those that the files themselves do not contain: tensor names, the base weights that an
adapter was trained on, and the versions under which base weights are served.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rkserve.config.explain import explain
from rkserve.core.desired_state import Artifact
from rkserve.core.durable_files import sync, write_private
from rkserve.core.errors import ArtifactRefused, RequestError
from rkserve.core.file_digests import DIGEST
from rkserve.core.name_rules import NAME
from rkserve.models.adapters import Manifest
from rkserve.models.weights import Parameter, read_parameters

log = logging.getLogger(__name__)

FOLDER = ".facts"
SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class ArtifactMetadata:
    """The metadata of one content. An empty tuple, or None, means not stated.

    ``labels`` are the ``<model>@<version>`` names under which it is base weights.
    """

    parameters: tuple[Parameter, ...] = ()
    base_digest: str | None = None
    labels: tuple[str, ...] = ()

    def with_more(self, other: ArtifactMetadata) -> ArtifactMetadata:
        """Return it with later statements, which take precedence."""
        return ArtifactMetadata(
            other.parameters or self.parameters,
            other.base_digest or self.base_digest,
            tuple(dict.fromkeys((*self.labels, *other.labels))),
        )


@dataclass(frozen=True, slots=True)
class StoredArtifact:
    """An artifact that can be served: its content, and the declared tensors in it."""

    version: Artifact
    parameters: tuple[Parameter, ...] = ()


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

    def add(self, digest: str, said: ArtifactMetadata) -> None:
        """Store statements about a content.

        Raises:
            ArtifactRefused: a label stands for another content.
            OSError: it cannot be written, and is not stored.
        """
        with self._lock:
            for label in said.labels:
                other = self.labelled(label)
                if other not in (None, digest):
                    raise ArtifactRefused(
                        f"'{label}' is another content (sha256 {str(other)[:12]}...): give the new "
                        "one another version.",
                        "version",
                    )
            facts = self.of(digest).with_more(said)
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
    )
    if not all(isinstance(one, str) for one in found.labels):
        raise TypeError("a label is no string")
    return replace(found, base_digest=None if found.base_digest is None else str(found.base_digest))


@dataclass(frozen=True, slots=True)
class DeclaredArtifact:
    """A sender's declaration of a file before its upload; None is not declared.

    It is an adapter of ``model``, or with ``base`` other base weights of it, whose ``name`` is the
    model's. ``parameters`` are the tensors in it, and ``base_digest`` is the sha256 of the base
    weights that it was trained on.
    """

    name: str
    version: str | None
    model: str
    size_bytes: int | None = None
    sha256: str | None = None
    base: bool = False
    parameters: tuple[Parameter, ...] = ()
    base_digest: str | None = None

    @property
    def what(self) -> str:
        """Its kind in messages."""
        return "model" if self.base else "adapter"

    def require_size(self, size_bytes: int) -> None:
        """Raise ``ArtifactRefused`` if more bytes arrived than declared."""
        if self.size_bytes is not None and size_bytes > self.size_bytes:
            raise ArtifactRefused(
                f"More bytes come than the {self.size_bytes} that were announced.", "size_bytes"
            )

    def compare(self, said: Manifest, size_bytes: int, digest: str) -> None:
        """Raise ``ArtifactRefused`` unless the file is as declared, before or after its upload."""
        if size_bytes == 0:
            raise ArtifactRefused(f"The {self.what} is empty.", "size_bytes")
        for key, claimed, found in (
            ("size_bytes", self.size_bytes, size_bytes),
            ("size", said.size, size_bytes),
            ("sha256", self.sha256, digest),
            ("sha256", said.sha256, digest),
            ("base_model", said.base_model, self.model),
        ):
            if claimed is not None and claimed != found:
                raise ArtifactRefused(f"{key} is said to be {claimed}, and it is {found}.", key)


def checked(claim: DeclaredArtifact) -> DeclaredArtifact:
    """Return a valid declaration. Raises ``ArtifactRefused``."""
    named = (("name", None if claim.base else claim.name), ("version", claim.version))
    for param, word in named:
        if word is not None and not NAME.fullmatch(word):
            raise ArtifactRefused(
                f"Invalid '{param}': it begins with a letter or a digit and has at most 64 "
                "letters, digits, '.', '_' and '-'.",
                param,
            )
    if claim.size_bytes is not None and claim.size_bytes < 1:
        raise ArtifactRefused(f"The {claim.what} is empty.", "size_bytes")
    for param, digest in (("sha256", claim.sha256), ("base_digest", claim.base_digest)):
        if digest is not None and not DIGEST.fullmatch(digest):
            raise ArtifactRefused(f"'{param}' must be 64 lower-case hexadecimal digits.", param)
    return claim


def read_manifest(given: Mapping[str, Any] | None) -> Manifest:
    """Return the manifest sent at the end. Raises ``ArtifactRefused``."""
    try:
        return Manifest.model_validate(dict(given or {}))
    except ValidationError as exc:
        raise ArtifactRefused(f"The manifest: {explain(exc, Manifest)}", "manifest") from exc
