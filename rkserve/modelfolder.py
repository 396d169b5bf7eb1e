"""A model folder as a frozen value: weights, tokenizer files, and the folder's own settings.

It reads files and judges them; it neither tokenizes nor loads weights, and knows no other room.
"""

from __future__ import annotations

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rkserve.errors import ConfigError
from rkserve.messages import Sampling

SETTINGS_FILE = "rkserve.yaml"
CONTEXT_STEP = 32  # the vendor's converter demands a multiple of 32
CONTEXT_MAX = 16384
MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


class SamplingDefaults(BaseModel):
    """The ``sampling`` block of rkserve.yaml; see ``Sampling`` for the meanings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    temperature: float = Field(0.8, ge=0, le=2)
    top_p: float = Field(0.9, gt=0, le=1)
    top_k: int = Field(40, ge=1)
    repeat_penalty: float = Field(1.1, gt=0, le=10)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    presence_penalty: float = Field(0.0, ge=-2, le=2)

    def values(self) -> Sampling:
        """Return them as the value that requests carry."""
        return Sampling(**self.model_dump())


class FolderSettings(BaseModel):
    """rkserve.yaml of a model folder; every key is optional.

    ``context_length`` is in tokens. ``eos_token_ids`` end an answer even where the runtime reads a
    wrong EOS from the file. ``chat_template`` names a built-in template, which then takes the place
    of the folder's own.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    context_length: int = Field(4096, ge=CONTEXT_STEP, le=CONTEXT_MAX, multiple_of=CONTEXT_STEP)
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    sampling: SamplingDefaults = SamplingDefaults()
    family: str | None = None


class ModelFolder(BaseModel):
    """One servable model. ``id`` is the name that requests use: the folder's name.

    ``weights`` is None where the folder holds tokenizer files only, as on a head node.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    path: Path
    weights: Path | None
    settings: FolderSettings

    def require_weights(self) -> Path:
        """Return the model's file. Raises ``ConfigError`` where this machine does not have it."""
        if self.weights is None:
            raise ConfigError(f"{self.path} holds no *.rkllm file. Copy the converted model there.")
        return self.weights

    @property
    def tokenizer_file(self) -> Path | None:
        """tokenizer.json, or None in text mode."""
        file = self.path / "tokenizer.json"
        return file if file.is_file() else None

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """tokenizer_config.json as it stands, empty where there is none."""
        file = self.path / "tokenizer_config.json"
        if not file.is_file():
            return {}
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as exc:
            raise ConfigError(f"{file} is not valid JSON: {exc}") from exc
        if not isinstance(found, dict):
            raise ConfigError(f"{file} must hold a JSON object")
        return found

    @cached_property
    def chat_template(self) -> str | None:
        """The folder's own Jinja chat template, or None."""
        separate = self.path / "chat_template.jinja"
        if separate.is_file():
            return separate.read_text(encoding="utf-8")
        template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):  # several named ones; "default" is the plain chat
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        return template if isinstance(template, str) else None


def open_model_folder(path: Path) -> ModelFolder:
    """Read a model folder.

    Raises:
        ConfigError: no such folder, several ``*.rkllm`` in it, or bad settings; the message names
            the file and the key.
    """
    if not path.is_dir():
        raise ConfigError(f"The model folder {path} does not exist. Check `model` in the config.")
    if not MODEL_ID.fullmatch(path.name):
        raise ConfigError(
            f"The model folder's name {path.name!r} is the model's id and may hold only letters, "
            "digits, '.', '_' and '-'."
        )
    return ModelFolder(
        id=path.name, path=path, weights=_weights(path), settings=_settings(path / SETTINGS_FILE)
    )


def _weights(path: Path) -> Path | None:
    preferred = path / "model.rkllm"
    if preferred.is_file():
        return preferred
    found = sorted(path.glob("*.rkllm"))
    if len(found) == 1:
        return found[0]
    if not found:
        return None
    names = ", ".join(f.name for f in found)
    raise ConfigError(f"{path} holds several models ({names}); name one of them model.rkllm.")


def _settings(file: Path) -> FolderSettings:
    if not file.is_file():
        return FolderSettings()
    try:
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as exc:
        raise ConfigError(f"{file} cannot be read: {exc}") from exc
    try:
        return FolderSettings.model_validate(loaded or {})
    except ValidationError as exc:
        raise ConfigError(f"{file}: {explain(exc)}") from exc


def explain(error: ValidationError) -> str:
    """Say a pydantic error as ``key: what is wrong``, one per problem, separated by semicolons."""
    return "; ".join(
        f"{'.'.join(str(part) for part in problem['loc']) or 'value'}: {problem['msg']}"
        for problem in error.errors(include_url=False)
    )
