"""What the sender of an adapter's file says of it, and whether that can be and is so.

It knows words and figures, and no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rkserve.config.explain import explain
from rkserve.core.errors import ArtifactRefused
from rkserve.core.file_digests import DIGEST
from rkserve.core.name_rules import NAME
from rkserve.models.adapters import Manifest
from rkserve.models.tensors import Parameter


@dataclass(frozen=True, slots=True)
class Claim:
    """What a sender says of a file before it comes; None is not said.

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
        """What to call it in words to people."""
        return "model" if self.base else "adapter"

    def require_size(self, size_bytes: int) -> None:
        """Raise ``ArtifactRefused`` where more has come than was announced."""
        if self.size_bytes is not None and size_bytes > self.size_bytes:
            raise ArtifactRefused(
                f"More bytes come than the {self.size_bytes} that were announced.", "size_bytes"
            )

    def compare(self, said: Manifest, size_bytes: int, digest: str) -> None:
        """Raise ``ArtifactRefused`` unless what came is what was said, before or after."""
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


def checked(claim: Claim) -> Claim:
    """Return what a sender says if it can be."""
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
    """Return what is said at the end. Raises ``ArtifactRefused``."""
    try:
        return Manifest.model_validate(dict(given or {}))
    except ValidationError as exc:
        raise ArtifactRefused(f"The manifest: {explain(exc, Manifest)}", "manifest") from exc
