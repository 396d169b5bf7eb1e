"""The catalogue: a folder of model folders, the manifests of their additions, and their use."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from rkserve.catalog.recognise import ModelTraits, traits_of
from rkserve.config.board_group import CATALOG
from rkserve.config.serve_config import resolve_folder
from rkserve.core.errors import ConfigError
from rkserve.core.files import file_digest
from rkserve.models.files import UnfitWeights, weights_facts
from rkserve.models.folder import MODEL_ID, SETTINGS_FILE, ModelFolder, open_model_folder
from rkserve.models.shelf import (
    MANIFEST_FILE,
    discard,
    model_path,
    partial_bytes,
    staging,
    staging_of,
)

MANIFEST_MAX_BYTES = 64 * 1024


class ModelManifest(BaseModel):
    """The manifest.json of a model folder: what was added, and from where."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    source: str
    weights: str
    bytes: int
    sha256: str
    platform: str | None = None
    dtype: str | None = None
    toolkit: str | None = None
    max_context: int | None = None
    tokenizer: str | None = None
    base_model: str | None = None

    def as_json(self) -> str:
        """Return the text of the file."""
        return self.model_dump_json(indent=2, exclude_none=True) + "\n"


@dataclass(frozen=True, slots=True)
class GroupUse:
    """A board group of a serve_config.yaml, and its model folder."""

    group: str
    model: Path
    config: Path


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """A model of the catalogue.

    ``problem`` is the reason why it cannot be served, ``partial_bytes`` the size of an addition
    that has not ended. ``sha256`` is None where no manifest has it, or the file has changed since.
    """

    id: str
    path: Path
    size_bytes: int = 0
    partial_bytes: int = 0
    problem: str = ""
    context_length: int | None = None
    traits: ModelTraits | None = None
    manifest: ModelManifest | None = None
    sha256: str | None = None
    used_by: tuple[GroupUse, ...] = ()


def group_uses(configs: Iterable[Path]) -> tuple[GroupUse, ...]:
    """Return the board groups of serve_config.yaml files. Raises ``ConfigError``."""
    found = []
    for config in configs:
        try:
            content = yaml.safe_load(config.read_text(encoding="utf-8"))
            groups = [
                group
                for application in content["applications"]
                for group in (application.get("args") or {}).get("boards") or ()
            ]
            found += [GroupUse(str(one["name"]), Path(one["model"]), config) for one in groups]
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
            raise ConfigError(f"{config} cannot be read: {exc}") from exc
        except (KeyError, TypeError, AttributeError) as exc:
            raise ConfigError(f"{config} is no serve_config.yaml: {exc!r}") from exc
    return tuple(found)


def entries(models: Path, uses: Sequence[GroupUse] = ()) -> tuple[CatalogEntry, ...]:
    """Return the models of a catalogue by id, also those that are broken or not wholly added.

    Raises:
        ConfigError: the folder cannot be listed.
    """
    try:
        names = sorted(one.name for one in models.iterdir() if one.is_dir())
    except OSError as exc:
        raise ConfigError(f"{models} cannot be listed: {exc.strerror or exc}") from exc
    ids = [name for name in names if MODEL_ID.fullmatch(name)]
    begun = [name[1:-7] for name in names if name.startswith(".") and name.endswith(".adding")]
    # An addition without a partial file has just begun, or has just ended.
    only_begun = [
        name
        for name in begun
        if MODEL_ID.fullmatch(name) and name not in ids and partial_bytes(models / name)
    ]
    return tuple(entry(models, name, uses) for name in sorted((*ids, *only_begun)))


def entry(models: Path, name: str, uses: Sequence[GroupUse] = ()) -> CatalogEntry:
    """Return one model of a catalogue. Raises ``ConfigError`` if there is none."""
    path = model_path(models, name)
    partial = partial_bytes(path)
    if not path.is_dir():
        if not partial:
            raise ConfigError(f"{models} has no model {name!r}")
        return CatalogEntry(name, path, partial_bytes=partial, problem="its download is incomplete")
    used = tuple(use for use in uses if _is_used(path, use))
    try:
        folder = open_model_folder(path)
        return _entry(folder, used, partial)
    except ConfigError as exc:
        return CatalogEntry(name, path, partial_bytes=partial, problem=str(exc), used_by=used)
    except (UnfitWeights, OSError) as exc:
        problem = f"its weights cannot be used: {exc}"
        return CatalogEntry(name, path, partial_bytes=partial, problem=problem, used_by=used)


def _entry(folder: ModelFolder, used: tuple[GroupUse, ...], partial: int) -> CatalogEntry:
    """Return the entry of a folder. Raises ``UnfitWeights``, ``OSError``."""
    manifest = _manifest(folder.path / MANIFEST_FILE)
    traits, problem = None, "there is no .rkllm file, as on a head" if not folder.weights else ""
    sha256 = None
    if folder.weights is not None:
        names = ((folder.weights.name, "the file's name"), (folder.id, "the name of its folder"))
        traits = traits_of(weights_facts(folder.weights), names)
        same = manifest is not None and (manifest.weights, manifest.bytes) == (
            folder.weights.name,
            traits.size_bytes,
        )
        sha256 = manifest.sha256 if manifest is not None and same else None
    return CatalogEntry(
        id=folder.id,
        path=folder.path,
        size_bytes=traits.size_bytes if traits is not None else 0,
        partial_bytes=partial,
        problem=problem,
        context_length=folder.settings.context_length,
        traits=traits,
        manifest=manifest,
        sha256=sha256,
        used_by=used,
    )


def _manifest(file: Path) -> ModelManifest | None:
    """Return a folder's manifest, None if it is missing or foreign: it is no part of serving."""
    try:
        if file.stat().st_size > MANIFEST_MAX_BYTES:
            return None
        return ModelManifest.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def _is_used(path: Path, use: GroupUse) -> bool:
    """Return True if a group serves a folder, or one of its name at a path of the boards."""
    if str(use.model).startswith(CATALOG):
        return str(use.model) == f"{CATALOG}{path.name}"
    try:
        folder = resolve_folder(use.model)
    except ConfigError:
        return use.model.name == path.name
    return folder.resolve() == path.resolve() if folder.exists() else folder.name == path.name


def details(found: CatalogEntry, *, verify: bool) -> dict[str, Any]:
    """Return everything about an entry, with the sha256 of its file as it is now.

    With ``verify`` the file is read even if a manifest has its sha256.

    Raises:
        ConfigError: the file cannot be read, or is not that of the manifest.
    """
    sha256, weights = found.sha256, None
    if found.traits is not None:
        weights = open_model_folder(found.path).require_weights()
        if verify or sha256 is None:
            try:
                sha256 = file_digest(weights)
            except OSError as exc:
                raise ConfigError(f"{weights} cannot be read: {exc}") from exc
        manifest = found.manifest
        if verify and manifest is not None and manifest.sha256 != sha256:
            raise ConfigError(
                f"{weights}: checksum mismatch: the sha256 is {sha256}, and {MANIFEST_FILE} has "
                f"{manifest.sha256}"
            )
    settings = found.path / SETTINGS_FILE
    return {
        **summary(found),
        "sha256": sha256,
        "weights": None if weights is None else weights.name,
        "source": None if found.manifest is None else found.manifest.source,
        "settings": settings.read_text(encoding="utf-8") if settings.is_file() else "",
    }


def summary(found: CatalogEntry) -> dict[str, Any]:
    """Return an entry's properties in a row of the list."""
    traits = found.traits

    def value(name: str) -> Any:
        property_ = None if traits is None else getattr(traits, name)
        stated = None if found.manifest is None else getattr(found.manifest, name)
        return stated if property_ is None else property_.value

    return {
        "id": found.id,
        "path": str(found.path),
        "soc": value("platform"),
        "quantization": value("dtype"),
        "toolkit": value("toolkit"),
        "context_length": found.context_length,
        "bytes": found.size_bytes,
        "sha256": found.sha256,
        "used_by": [use.group for use in found.used_by],
        "partial_bytes": found.partial_bytes,
        "problem": found.problem,
    }


def remove(models: Path, name: str, uses: Sequence[GroupUse] = ()) -> int:
    """Remove a model and what is left of its download; return the bytes of its files.

    Raises:
        ConfigError: there is none, a group of ``uses`` serves it, or it is being added.
    """
    path = model_path(models, name)
    used = [use for use in uses if _is_used(path, use)]
    if used:
        groups = ", ".join(f"{use.group} ({use.config})" for use in used)
        raise ConfigError(f"{name} is served by {groups}; remove it there first, or use --force")
    partial = staging_of(path)
    if not os.path.lexists(path) and not partial.exists():
        raise ConfigError(f"{models} has no model {name!r}")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is no folder; remove it yourself")
    with staging(path):
        freed = _bytes_of(path) if not path.is_symlink() else 0
        freed += _bytes_of(partial)
        for left in partial.rglob("*.part"):
            left.unlink()
        discard(path)
    return freed


def _bytes_of(folder: Path) -> int:
    return sum(one.lstat().st_size for one in folder.rglob("*") if one.is_file())
