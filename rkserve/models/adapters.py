"""The LoRA adapters of a model, and the resolution of a request's model name.

An adapter is ``<name>/<version>/adapter.rkllm`` in an adapter folder, optionally with a
``manifest.json``. An adapter folder is the folder ``adapters`` of a model folder, or a board's own
folder of staged versions. Files are read and checked here, not loaded. An adapter is identified by
the sha256 of its file: a machine that has only the manifest (a head node) uses the digest stated
there, and a board compares before it loads.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rkserve.config.serve_config import explain
from rkserve.core.errors import (
    AdapterBroken,
    AdapterNotFound,
    ConfigError,
    ModelNotFound,
    RequestError,
)
from rkserve.core.files import DIGEST, NAME, file_digest
from rkserve.core.messages import AdapterRef

log = logging.getLogger(__name__)

FOLDER = "adapters"
ADAPTER_FILE = "adapter.rkllm"
MANIFEST_FILE = "manifest.json"
MANIFEST_MAX_BYTES = 64 * 1024


class Manifest(BaseModel):
    """The contents of manifest.json; every key is optional."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    scale: float = Field(1.0, gt=0, le=100)
    sha256: str | None = None
    size: int | None = Field(None, ge=1)
    base_model: str | None = None

    @field_validator("sha256")
    @classmethod
    def _is_a_digest(cls, given: str | None) -> str | None:
        if given is not None and not DIGEST.fullmatch(given):
            raise ValueError("must be 64 lower-case hexadecimal digits")
        return given


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """A folder with adapters of ``model``; no link in it may lead out of ``within``."""

    folder: Path
    model: str
    within: Path

    @classmethod
    def of_model(cls, folder: Path) -> AdapterFolder:
        """Return the adapter folder of a model folder."""
        return cls(folder / FOLDER, folder.name, folder)

    @classmethod
    def of_board(cls, folder: Path, model: str) -> AdapterFolder:
        """Return the adapter folder of a board, whose ``folder`` holds the adapters of one model
        only.
        """
        return cls(folder, model, folder)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One version of an adapter in a folder.

    ``path`` is None if this machine has only its manifest. ``broken`` is the reason why it cannot
    be used; its digest is empty then.
    """

    name: str
    version: str
    path: Path | None = None
    size_bytes: int = 0
    digest: str = ""
    scale: float = 1.0
    broken: str = ""

    @property
    def label(self) -> str:
        """The name by which a request can address exactly this version."""
        return f"{self.name}@{self.version}"

    def ref(self) -> AdapterRef:
        """Return its reference for requests. Raises ``AdapterBroken``."""
        if self.broken:
            raise AdapterBroken(self.label, self.broken)
        return AdapterRef(self.name, self.version, self.digest, self.scale)


@dataclass(frozen=True, slots=True)
class AdapterName:
    """The parts of a request's model name that names an adapter; None is absent.

    ``title`` is the adapter's name, with the version if there is one.
    """

    base: str | None
    title: str
    name: str
    version: str | None

    def ambiguous(self, models: Iterable[str]) -> RequestError:
        """Return the error if several models have an adapter of that name."""
        choices = ", ".join(f"'{model}:{self.title}'" for model in models)
        return RequestError(
            f"Several models have an adapter '{self.title}': ask for {choices}.", "model"
        )


@dataclass(frozen=True, slots=True)
class AdapterChoice:
    """The model and the adapter of a request."""

    model: str
    adapter: AdapterRef | None


def adapters(folder: Path) -> tuple[Adapter, ...]:
    """Return the adapters of a model folder; see ``shelved``."""
    return shelved(AdapterFolder.of_model(folder))


def shelved(shelf: AdapterFolder) -> tuple[Adapter, ...]:
    """Return the adapters in a folder, by name and then by version, the newest last.

    The first call reads every file in full. Unusable ones are included, ``broken``.

    Raises:
        ConfigError: the folder of adapters, or one in it, cannot be listed.
    """
    return tuple(
        _judge(shelf, name, version)
        for name in _names(shelf.folder)
        for version in sorted(_names(shelf.folder / name), key=version_order)
    )


def open_adapter(shelves: Sequence[AdapterFolder], ref: AdapterRef) -> Adapter:
    """Return the adapter of ``ref`` for loading: its file is present and has the right digest.

    The first folder takes precedence. The file may still change before the runtime has read it;
    operators avoid that with a new version for new content.

    Raises:
        AdapterBroken: the file is missing, broken or another one, everywhere.
    """
    if not NAME.fullmatch(ref.name) or not NAME.fullmatch(ref.version):
        raise AdapterBroken(ref.label, "its name is not one of an adapter")
    wrong, absent = "", "this board serves no adapters"
    for shelf in shelves:
        found = _judge(shelf, ref.name, ref.version)
        reason = _unusable(found, ref)
        if not reason:
            return found
        # A defect of a present version is more informative than its absence elsewhere.
        if (shelf.folder / ref.name / ref.version).is_dir():
            wrong = wrong or reason
        else:
            absent = reason
    raise AdapterBroken(ref.label, wrong or absent)


def _unusable(found: Adapter, ref: AdapterRef) -> str:
    """Return why a board cannot load ``found`` for ``ref``, or an empty string."""
    if found.broken:
        return found.broken
    if found.path is None:
        return f"{ADAPTER_FILE} is missing on this board"
    if found.digest != ref.digest:
        return (
            f"the file on this board has the sha256 {found.digest[:12]}..., and the request means "
            f"{ref.digest[:12]}...; copy the same file everywhere"
        )
    return ""


def parts_of(asked: str) -> AdapterName:
    """Parse ``adapter``, ``base:adapter``, ``adapter@version`` or ``base:adapter@version``."""
    base, colon, rest = asked.partition(":")
    title = rest if colon else asked
    name, at, version = title.partition("@")
    return AdapterName(base if colon else None, title, name, version if at else None)


def resolve(asked: str, catalog: Mapping[str, Sequence[Adapter]]) -> AdapterChoice:
    """Return the model and adapter of a request; ``catalog`` has the adapters of each model.

    The name is that of a model, or of an adapter as ``parts_of`` parses it. A model takes
    precedence over an adapter of the same name. Without a version the newest one is chosen; if that
    is broken the request fails, rather than use an older version without notice.

    Raises:
        ModelNotFound: there is no such model.
        AdapterNotFound: there is no such adapter of an existing model.
        AdapterBroken: it exists and cannot be used.
        RequestError: several models have an adapter of that name.
    """
    if asked in catalog:
        return AdapterChoice(asked, None)
    parts = parts_of(asked)
    bases = sorted(catalog) if parts.base is None else [parts.base]
    found = {
        model: matching[-1]
        for model in bases
        if (matching := _matching(catalog.get(model, ()), parts.name, parts.version))
    }
    if not found:
        of_model = parts.base in catalog or (parts.base is None and parts.version is not None)
        raise AdapterNotFound(asked) if of_model else ModelNotFound(asked)
    if len(found) > 1:
        raise parts.ambiguous(found)
    ((model, adapter),) = found.items()
    return AdapterChoice(model, adapter.ref())


def _matching(found: Sequence[Adapter], name: str, version: str | None) -> list[Adapter]:
    named = [a for a in found if a.name == name and version in (None, a.version)]
    return sorted(named, key=lambda adapter: version_order(adapter.version))


def version_order(version: str) -> tuple[tuple[tuple[bool, int, str], ...], str]:
    """Order ``v9`` before ``v10`` and ``1.9`` before ``1.10``. No suffix is a pre-release."""
    parts = re.findall(r"[0-9]+|[^0-9]+", version)
    # 1.0 and 1.00 are equal as numbers; the text makes the order deterministic.
    # Not isdigit: it accepts characters that int() refuses, such as a superscript two.
    return tuple((not p.isdecimal(), int(p) if p.isdecimal() else 0, p) for p in parts), version


def _names(folder: Path) -> list[str]:
    """Return the names of the folders in ``folder``, without hidden ones; invalid names are
    logged.
    """
    try:
        found = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise ConfigError(f"The adapters in {folder} cannot be listed: {exc}") from exc
    fit = [name for name in found if NAME.fullmatch(name)]
    for name in found:
        if name not in fit and not name.startswith("."):
            log.warning(
                "%s: %r is no name of an adapter or a version; only letters, digits, '.', '_' and "
                "'-' may be in it",
                folder,
                name,
            )
    return fit


def _judge(shelf: AdapterFolder, name: str, version: str) -> Adapter:
    """Return one adapter on this machine, usable or broken."""
    place = shelf.folder / name / version
    try:
        manifest = _manifest(shelf, place / MANIFEST_FILE)
        file = _inside(shelf, place / ADAPTER_FILE)
        if file is None:
            return _announced(name, version, manifest)
        size_bytes, digest = file.stat().st_size, file_digest(file)
        _compare(shelf, manifest, size_bytes, digest)
    except _Unfit as exc:
        return Adapter(name, version, broken=str(exc))
    except OSError as exc:
        return Adapter(name, version, broken=f"its files cannot be read: {exc.strerror or exc}")
    return Adapter(name, version, file, size_bytes, digest, manifest.scale)


class _Unfit(Exception):
    """The reason why an adapter cannot be used; it never leaves this module."""


def _announced(name: str, version: str, manifest: Manifest) -> Adapter:
    if manifest.sha256 is None:
        raise _Unfit(f"{ADAPTER_FILE} is missing, and no {MANIFEST_FILE} gives its sha256")
    return Adapter(name, version, None, manifest.size or 0, manifest.sha256, manifest.scale)


def _inside(shelf: AdapterFolder, file: Path) -> Path | None:
    """Return the resolved path of ``file``; None if it does not exist."""
    try:
        real = file.resolve()
    except RuntimeError as exc:  # raised by Python up to 3.12
        raise _Unfit(f"{file.name} is a link to itself") from exc
    if not real.is_relative_to(shelf.within.resolve()):
        raise _Unfit(f"{file.name} leads out of {shelf.within.name}, its folder, to {real}")
    return real if real.exists() else None


def _manifest(shelf: AdapterFolder, file: Path) -> Manifest:
    real = _inside(shelf, file)
    if real is None:
        return Manifest()
    if real.stat().st_size > MANIFEST_MAX_BYTES:
        raise _Unfit(f"{MANIFEST_FILE} is larger than {MANIFEST_MAX_BYTES} bytes")
    try:
        content = real.read_bytes()
        found = Manifest.model_validate_json(content)
        # Which of two values is meant, parsers decide differently.
        json.loads(content, object_pairs_hook=_no_key_twice)
    except ValidationError as exc:
        raise _Unfit(f"{MANIFEST_FILE}: {_message_of(exc)}") from exc
    return found


def _no_key_twice(pairs: list[tuple[str, object]]) -> None:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise _Unfit(f"{MANIFEST_FILE} has {name!r} twice")


def _message_of(error: ValidationError) -> str:
    if any(problem["type"] == "json_invalid" for problem in error.errors(include_url=False)):
        return "it is not valid JSON"
    return explain(error, Manifest).rstrip(".")


def _compare(shelf: AdapterFolder, manifest: Manifest, size_bytes: int, digest: str) -> None:
    claims: tuple[tuple[str, str | int | None, str | int], ...] = (
        ("base_model", manifest.base_model, shelf.model),
        ("size", manifest.size, size_bytes),
        ("sha256", manifest.sha256, digest),
    )
    for key, stated, found in claims:
        if stated is not None and stated != found:
            raise _Unfit(f"{MANIFEST_FILE} says {key} {stated}, and it is {found}")
