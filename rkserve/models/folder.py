"""A model folder as a frozen value: weights, tokenizer files, and the folder's own settings.

Files are read and checked here; tokenizing and loading are elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from rkserve.config.serve_config import default_state_dir, explain
from rkserve.core.errors import ConfigError
from rkserve.core.files import content_digest
from rkserve.models import gguf
from rkserve.models.files import gguf_vocabulary, read_vocabulary
from rkserve.models.settings import FolderSettings

SETTINGS_FILE = "rkserve.yaml"
RKLLM, GGUF = ".rkllm", gguf.SUFFIX
MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Families, by name, whose runtime logs that it "does not support saving prompt cache".
WITHOUT_PROMPT_CACHE = re.compile(r"qwen[-_ ]?3[._]?5(?!\d)", re.IGNORECASE)


class ModelFolder(BaseModel):
    """One servable model. ``id`` is its name in requests: the folder's name.

    ``weights`` is the model for NPUs; None if the folder holds none, as on a head node. ``file`` is
    a GGUF file that the folder was made of and does not hold.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    path: Path
    weights: Path | None
    settings: FolderSettings
    file: Path | None = None

    def require_weights(self, *, cpu: bool = False) -> Path:
        """Return the model's file for NPUs, or with ``cpu`` for CPUs.

        Raises:
            ConfigError: this machine does not have it, or several for CPUs.
        """
        found = (self.file or weights_in(self.path, GGUF)) if cpu else self.weights
        if found is None and cpu:
            raise ConfigError(f"{self.path} holds no *.gguf file. Copy the model for CPUs there.")
        if found is None and self.file is not None:
            raise ConfigError(
                f"`model` is the file {self.file}, which CPUs compute: set `cpu: {{}}` in the "
                "group, or name a folder with a converted *.rkllm file."
            )
        if found is None:
            raise ConfigError(f"{self.path} holds no *.rkllm file. Copy the converted model there.")
        return found

    def check_cpu(self) -> None:
        """Raise ``ConfigError`` if no CPU can serve it, whose runtime takes token ids alone."""
        if self.tokenizer_file is None:
            raise ConfigError(
                f"{self.path} has no tokenizer.json, without which llama.cpp gets no prompts here. "
                "Copy it from the model's original repository."
            )
        if self.settings.vision is not None or self.settings.cross_attention is not None:
            raise ConfigError(
                f"{self.path} is a model with images or an encoder, for NPUs only: llama.cpp takes "
                "token ids. Take 'vision' or 'cross_attention' out of rkserve.yaml."
            )
        self._check_tokens(self.tokenizer_file)

    def _check_tokens(self, tokenizer: Path) -> None:
        """Raise ``ConfigError`` if the GGUF file, where it is here, has another vocabulary."""
        weights = weights_in(self.path, GGUF)
        if weights is None:
            return  # the tokenizer of a file was made of it; boards elsewhere compare their own
        known = read_vocabulary(tokenizer)
        found = gguf_vocabulary(gguf.read_gguf(weights).metadata)
        if (token := known.difference(found)) is not None:
            raise ConfigError(
                f"{weights} and {tokenizer} are of different models: token {token} is "
                f"{found.piece(token)!r} and {known.piece(token)!r}. Copy the tokenizer.json of "
                "the original repository of the file's model."
            )

    def content_digest(self, *, cpu: bool = False) -> str:
        """Return a digest of this model's file, for data that is valid only with it.

        Raises:
            ConfigError: this machine does not have the file, or it cannot be read.
        """
        parts = self.parts(cpu=cpu)
        try:
            digests = [content_digest(part) for part in parts]
        except OSError as exc:
            raise ConfigError(f"{parts[0]} cannot be read: {exc}") from exc
        whole = hashlib.sha256("".join(digests).encode()).hexdigest()
        return digests[0] if len(digests) == 1 else whole

    def parts(self, *, cpu: bool = False) -> tuple[Path, ...]:
        """Return the model's files: several of a model for CPUs that was split.

        Raises:
            ConfigError: this machine does not have them.
        """
        weights = self.require_weights(cpu=cpu)
        return gguf.parts_of(weights) if cpu else (weights,)

    @property
    def prompt_cache(self) -> bool:
        """True if prompt caches are allowed: by the folder's setting, or else by the family's
        name.
        """
        if self.settings.prompt_cache is not None:
            return self.settings.prompt_cache
        names = (self.id, self.weights.name if self.weights is not None else "")
        return not any(WITHOUT_PROMPT_CACHE.search(name) for name in names)

    @property
    def tokenizer_file(self) -> Path | None:
        """tokenizer.json, or None in text mode."""
        file = self.path / "tokenizer.json"
        return file if file.is_file() else None

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        """The contents of tokenizer_config.json, empty if there is none."""
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
        return self._named_template("default")

    @cached_property
    def tool_template(self) -> str | None:
        """The folder's own template for conversations with tools, if it is another one."""
        separate = self.path / "additional_chat_templates" / "tool_use.jinja"
        if separate.is_file():
            return separate.read_text(encoding="utf-8")
        several = isinstance(self.tokenizer_config.get("chat_template"), list)
        return self._named_template("tool_use") if several else None

    def _named_template(self, name: str) -> str | None:
        """Return the template of tokenizer_config.json, or one of several there by its name."""
        template = self.tokenizer_config.get("chat_template")
        if isinstance(template, list):
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get(name)
        return template if isinstance(template, str) else None


def open_model_folder(path: Path, state_dir: Path | None = None) -> ModelFolder:
    """Read a model folder, or that of a GGUF file, which is made in ``state_dir`` if it is new.

    Raises:
        ConfigError: no such folder, several ``*.rkllm`` in it, bad settings, or a GGUF file that
            cannot be served; the message names the file and the key.
    """
    if path.suffix == GGUF and not path.is_dir():
        made = gguf.made_folder(path.absolute(), state_dir or default_state_dir())
        return _opened(made, path.absolute())
    if not path.is_dir():
        raise ConfigError(f"The model folder {path} does not exist. Check `model` in the config.")
    if not MODEL_ID.fullmatch(path.name):
        raise ConfigError(
            f"The model folder's name {path.name!r} is the model's id and may hold only letters, "
            "digits, '.', '_' and '-'."
        )
    return _opened(path)


def by_id(folders: Iterable[ModelFolder]) -> dict[str, ModelFolder]:
    """Return the models of several folders, of which the first of an id stands for its others.

    Raises:
        ConfigError: two folders of one id have different vocabularies, so that an answer cannot go
            on from the boards of one to those of the other.
    """
    found: dict[str, ModelFolder] = {}
    for folder in folders:
        known = found.setdefault(folder.id, folder)
        files = known.tokenizer_file, folder.tokenizer_file
        if files[0] == files[1]:
            continue
        if None in files:
            with_it, without = (known, folder) if files[0] else (folder, known)
            raise ConfigError(
                f"{with_it.path} and {without.path} are one model by their name, and only the "
                "first has a tokenizer.json. Copy it into the second, or rename that."
            )
        first, second = (read_vocabulary(file) for file in files if file is not None)
        if (token := first.difference(second)) is not None:
            raise ConfigError(
                f"{known.path} and {folder.path} are one model by their name, and token {token} is "
                f"{first.piece(token)!r} in the first and {second.piece(token)!r} in the second. "
                "Rename one of them."
            )
    return found


def _opened(path: Path, file: Path | None = None) -> ModelFolder:
    return ModelFolder(
        id=path.name,
        path=path,
        weights=weights_in(path),
        settings=_settings(path / SETTINGS_FILE),
        file=file,
    )


def weights_in(path: Path, suffix: str = RKLLM) -> Path | None:
    """Return the model's file in a folder. Raises ``ConfigError`` if there are several."""
    preferred = path / f"model{suffix}"
    if preferred.is_file():
        return preferred
    found = sorted(one for one in path.glob(f"*{suffix}") if not gguf.is_later_part(one))
    if len(found) == 1:
        return found[0]
    if not found:
        return None
    names = ", ".join(f.name for f in found)
    raise ConfigError(f"{path} holds several models ({names}); name one of them model{suffix}.")


def _settings(file: Path) -> FolderSettings:
    if not file.is_file():
        return FolderSettings()
    try:
        loaded = yaml.safe_load(file.read_text(encoding="utf-8"))
    except RecursionError as exc:
        raise ConfigError(f"{file} cannot be read: it is nested too deeply") from exc
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        raise ConfigError(f"{file} cannot be read: {exc}") from exc
    try:
        return FolderSettings.model_validate(loaded or {})
    except ValidationError as exc:
        raise ConfigError(f"{file}: {explain(exc, FolderSettings)}") from exc
