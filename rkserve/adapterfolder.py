"""The LoRA adapters of a model folder, and which one the model name of a request means.

An adapter is ``adapters/<name>/<version>/adapter.rkllm``, where a ``manifest.json`` may stand
beside it. It reads and judges files, and loads none. An adapter is known by the sha256 of its
file: a machine that has only the manifest (a head node) takes the word of that, and a board
compares before it loads.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rkserve.digests import file_digest
from rkserve.errors import AdapterBroken, ConfigError, ModelNotFound, RequestError
from rkserve.messages import AdapterRef
from rkserve.names import NAME
from rkserve.settingwords import explain

log = logging.getLogger(__name__)

FOLDER = "adapters"
ADAPTER_FILE = "adapter.rkllm"
MANIFEST_FILE = "manifest.json"
MANIFEST_MAX_BYTES = 64 * 1024


class Manifest(BaseModel):
    """What manifest.json says of the adapter beside it; every key is optional."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, strict=True)

    scale: float = Field(1.0, gt=0, le=100)
    sha256: str | None = None
    size: int | None = Field(None, ge=1)
    base_model: str | None = None

    @field_validator("sha256")
    @classmethod
    def _is_a_digest(cls, given: str | None) -> str | None:
        if given is not None and not re.fullmatch(r"[0-9a-f]{64}", given):
            raise ValueError("must be 64 lower-case hexadecimal digits")
        return given


@dataclass(frozen=True, slots=True)
class Adapter:
    """One version of an adapter, as it was found.

    ``path`` is None where this machine has no more of it than its manifest. ``broken`` says why it
    cannot be used; its digest is empty then.
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
        """The name by which a request can ask for exactly this one."""
        return f"{self.name}@{self.version}"

    def ref(self) -> AdapterRef:
        """Return it as requests carry it. Raises ``AdapterBroken``."""
        if self.broken:
            raise AdapterBroken(self.label, self.broken)
        return AdapterRef(self.name, self.version, self.digest, self.scale)


@dataclass(frozen=True, slots=True)
class Chosen:
    """What the model name of a request means."""

    model: str
    adapter: AdapterRef | None


def adapters(folder: Path) -> tuple[Adapter, ...]:
    """Return the adapters of a model folder, by name and then by version, the newest last.

    The first time it reads all of every file. What cannot be used is there too, ``broken``.

    Raises:
        ConfigError: the folder of adapters, or one in it, cannot be listed.
    """
    return tuple(
        _judge(folder, name, version)
        for name in _names(folder / FOLDER)
        for version in sorted(_names(folder / FOLDER / name), key=_natural)
    )


def open_adapter(folder: Path, ref: AdapterRef) -> Adapter:
    """Return the adapter of ``ref`` for loading: its file is here, and it is the one that is meant.

    The file may still change before the runtime has read it; that is the operator's to avoid, by a
    new version for a new content.

    Raises:
        AdapterBroken: the file is missing, broken or another one.
    """
    if not NAME.fullmatch(ref.name) or not NAME.fullmatch(ref.version):
        raise AdapterBroken(f"{ref.name}@{ref.version}", "its name is not one of an adapter")
    found = _judge(folder, ref.name, ref.version)
    if found.broken:
        raise AdapterBroken(found.label, found.broken)
    if found.path is None:
        raise AdapterBroken(found.label, f"{ADAPTER_FILE} is missing on this board")
    if found.digest != ref.digest:
        raise AdapterBroken(
            found.label,
            f"the file on this board has the sha256 {found.digest[:12]}..., and the request means "
            f"{ref.digest[:12]}...; copy the same file everywhere",
        )
    return found


def resolve(asked: str, catalog: Mapping[str, Sequence[Adapter]]) -> Chosen:
    """Return what the model of a request means, where ``catalog`` has the adapters of each model.

    ``base``, ``adapter``, ``base:adapter``, ``adapter@version`` and ``base:adapter@version`` are
    understood. A model goes before an adapter of the same name. Without a version the newest one
    is meant; if that is broken the request fails, rather than get an older answer unasked.

    Raises:
        ModelNotFound: there is no such model or adapter.
        AdapterBroken: it is there and cannot be used.
        RequestError: several models have an adapter of that name.
    """
    if asked in catalog:
        return Chosen(asked, None)
    base, colon, rest = asked.partition(":")
    if not colon:
        base, rest = "", asked
    name, at, version = rest.partition("@")
    bases = [base] if colon else sorted(catalog)
    found = {
        model: matching[-1]
        for model in bases
        if (matching := _matching(catalog.get(model, ()), name, version if at else None))
    }
    if not found:
        raise ModelNotFound(asked)
    if len(found) > 1:
        choices = ", ".join(f"'{model}:{rest}'" for model in found)
        raise RequestError(f"Several models have an adapter '{rest}': ask for {choices}.", "model")
    ((model, adapter),) = found.items()
    return Chosen(model, adapter.ref())


def _matching(found: Sequence[Adapter], name: str, version: str | None) -> list[Adapter]:
    named = [a for a in found if a.name == name and version in (None, a.version)]
    return sorted(named, key=lambda adapter: _natural(adapter.version))


def _natural(version: str) -> tuple[tuple[tuple[bool, int, str], ...], str]:
    """Order ``v9`` before ``v10`` and ``1.9`` before ``1.10``. No suffix is a pre-release."""
    parts = re.findall(r"[0-9]+|[^0-9]+", version)
    # 1.0 and 1.00 are equal as numbers; the text makes the order certain.
    return tuple((not p.isdigit(), int(p) if p.isdigit() else 0, p) for p in parts), version


def _names(folder: Path) -> list[str]:
    """The names of the folders in ``folder``, without hidden ones; other names are logged."""
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


def _judge(folder: Path, name: str, version: str) -> Adapter:
    """Return one adapter as it stands on this machine, usable or broken."""
    place = folder / FOLDER / name / version
    try:
        manifest = _manifest(folder, place / MANIFEST_FILE)
        file = _inside(folder, place / ADAPTER_FILE)
        if file is None:
            return _announced(name, version, manifest)
        size_bytes, digest = file.stat().st_size, file_digest(file)
        _compare(folder, manifest, size_bytes, digest)
    except _Unfit as exc:
        return Adapter(name, version, broken=str(exc))
    except OSError as exc:
        return Adapter(name, version, broken=f"its files cannot be read: {exc.strerror or exc}")
    return Adapter(name, version, file, size_bytes, digest, manifest.scale)


class _Unfit(Exception):
    """Why an adapter cannot be used; it never leaves this module."""


def _announced(name: str, version: str, manifest: Manifest) -> Adapter:
    if manifest.sha256 is None:
        raise _Unfit(f"{ADAPTER_FILE} is missing, and no {MANIFEST_FILE} gives its sha256")
    return Adapter(name, version, None, manifest.size or 0, manifest.sha256, manifest.scale)


def _inside(folder: Path, file: Path) -> Path | None:
    """Return where ``file`` really is; None if it is not there at all."""
    try:
        real = file.resolve()
    except RuntimeError as exc:  # so says Python up to 3.12
        raise _Unfit(f"{file.name} is a link to itself") from exc
    if not real.is_relative_to(folder.resolve()):
        raise _Unfit(f"{file.name} leads out of the model folder, to {real}")
    return real if real.exists() else None


def _manifest(folder: Path, file: Path) -> Manifest:
    real = _inside(folder, file)
    if real is None:
        return Manifest()
    if real.stat().st_size > MANIFEST_MAX_BYTES:
        raise _Unfit(f"{MANIFEST_FILE} is larger than {MANIFEST_MAX_BYTES} bytes")
    try:
        return Manifest.model_validate_json(real.read_bytes())
    except ValidationError as exc:
        raise _Unfit(f"{MANIFEST_FILE}: {_said(exc)}") from exc


def _said(error: ValidationError) -> str:
    if any(problem["type"] == "json_invalid" for problem in error.errors(include_url=False)):
        return "it is not valid JSON"
    return explain(error, Manifest).rstrip(".")


def _compare(folder: Path, manifest: Manifest, size_bytes: int, digest: str) -> None:
    for key, said, found in _claims(folder, manifest, size_bytes, digest):
        if said is not None and said != found:
            raise _Unfit(f"{MANIFEST_FILE} says {key} {said}, and it is {found}")


def _claims(
    folder: Path, manifest: Manifest, size_bytes: int, digest: str
) -> Iterator[tuple[str, str | int | None, str | int]]:
    yield "base_model", manifest.base_model, folder.name
    yield "size", manifest.size, size_bytes
    yield "sha256", manifest.sha256, digest
