"""Base weights on the head: their compatibility with a model's boards, and identity with the file
in the model's own folder.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rkserve.core.desired_state import BaseVersion
from rkserve.core.errors import ArtifactNotFound, ArtifactRefused, ConfigError
from rkserve.core.file_digests import CachedDigest
from rkserve.models.folder import weights_in
from rkserve.models.weights import UnfitWeights, weights_facts

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

        Only a board that loads it can tell whether it works.
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
