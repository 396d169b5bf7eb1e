"""A model folder as a frozen value: weights, tokenizer files, and the folder's own settings.

Files are read and checked here; tokenizing and loading are elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    ValidationError,
    field_validator,
    model_validator,
)

from rkserve.config.explain import explain
from rkserve.core.errors import ConfigError
from rkserve.core.file_digests import content_digest
from rkserve.core.run_params import EncoderShape, Sampling
from rkserve.models.rerank import RerankSettings
from rkserve.models.vision import VisionSettings

SETTINGS_FILE = "rkserve.yaml"
CONTEXT_STEP = 32  # the vendor's converter demands a multiple of 32
CONTEXT_MAX = 16384
MODEL_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
# Families, by name, whose runtime logs that it "does not support saving prompt cache".
WITHOUT_PROMPT_CACHE = re.compile(r"qwen[-_ ]?3[._]?5(?!\d)", re.IGNORECASE)

# Files mistaken for a .rkllm: their first bytes, the offset of these, and their kind.
FOREIGN = (
    (b"GGUF", 0, "a GGUF model, which has to be converted with rkllm-toolkit"),
    (b"RKNN", 0, "an RKNN model, which belongs to librknnrt and not to librkllmrt"),
    (b"RKSIMLRA", 0, "an adapter for simulated boards, and no base model"),
    (b"PK\x03\x04", 0, "a ZIP archive or a PyTorch checkpoint"),
    (b"\x1f\x8b", 0, "a gzip archive"),
    (b"(\xb5/\xfd", 0, "a Zstandard archive"),
    (b"\xfd7zXZ", 0, "an xz archive"),
    (b"ustar", 257, "a tar archive"),
    (b"\x7fELF", 0, "a program or a library"),
    (b"\x89HDF", 0, "an HDF5 file"),
    (b'{"', 8, "a safetensors file, which has to be converted with rkllm-toolkit"),
    (b"version https://git-lfs", 0, "a pointer of Git LFS; fetch the file itself"),
)
# The header of rkserve.native.sim.models and the simulated runtime: magic, format, size, names.
SIM_MAGIC, SIM_FORMAT = b"RKSIMLLM", 1
SIM_HEADER = struct.Struct("<8sII64s16s64s16s16s4I6I5i")


class SamplingDefaults(BaseModel):
    """Default sampling of requests; on RKLLM 1.2.x, the fixed sampling of every request."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    temperature: float = Field(
        0.8, ge=0, le=2, description="How freely tokens are chosen; 0 always takes the likeliest."
    )
    top_p: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Choose among the likeliest tokens that reach this sum; 1: all.",
    )
    top_k: int = Field(40, ge=1, description="Choose among this many of the likeliest tokens.")
    repeat_penalty: float = Field(
        1.1, gt=0, le=10, description="Factor against tokens that were there before; 1 is off."
    )
    frequency_penalty: float = Field(
        0.0, ge=-2, le=2, description="Held against a token each time that it was there; 0 is off."
    )
    presence_penalty: float = Field(
        0.0, ge=-2, le=2, description="Held once against a token that was there; 0 is off."
    )
    mirostat: int = Field(
        0,
        ge=0,
        le=2,
        description="Mirostat in place of `top_k` and `top_p`: its version, 0 is off. It cannot "
        "serve requests with a seed, logprobs or a grammar, which have to send 0.",
    )
    mirostat_tau: float = Field(
        5.0, gt=0, le=20, description="The surprise per token that Mirostat aims at."
    )
    mirostat_eta: float = Field(0.1, gt=0, le=1, description="How fast Mirostat corrects itself.")

    def values(self) -> Sampling:
        """Return them as the value used in requests."""
        return Sampling(**self.model_dump())


class ThinkingSettings(BaseModel):
    """A model's reasoning marks, if its template does not show them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    marks: tuple[str, str] | None = Field(
        None,
        description="What begins and ends its thoughts. Empty: `<think>` and `</think>`, if its "
        "template or its tokenizer knows them.",
    )
    separate: bool = Field(
        True,
        description="Whether answers give thoughts as `reasoning_content`. Otherwise they are part "
        "of the answer's text, with their marks, and cannot be limited.",
    )
    enabled: bool | None = Field(
        None,
        description="Whether it thinks for requests that do not say. Empty: as its template has "
        "it.",
    )
    history: Literal["template", "strip", "keep"] = Field(
        "template",
        description="What becomes of thoughts in earlier turns: left to the template, taken out, "
        "or put before the turn's words, as the model's card demands.",
    )
    budgets: dict[str, NonNegativeInt] = Field(
        {},
        description="Tokens of thoughts by `reasoning_effort`, for requests without "
        "`max_reasoning_tokens`; for example `{low: 256, medium: 1024}`.",
    )

    @field_validator("marks")
    @classmethod
    def _say_something(cls, marks: tuple[str, str] | None) -> tuple[str, str] | None:
        if marks is not None and not all(mark.strip() for mark in marks):
            raise ValueError("a mark must not be blank")
        return marks


class EmbeddingSettings(BaseModel):
    """The computation of embeddings from a model's hidden states."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    pooling: Literal["last", "mean", "cls"] = Field(
        "last",
        description="Which hidden state it is: `last` that of the last token, as decoders are "
        "trained, `mean` of all, `cls` that of the first token. The model's card says which.",
    )
    normalize: bool = Field(True, description="Whether vectors are given the length 1.")
    dimensions: int | None = Field(
        None,
        ge=1,
        description="How many dimensions the model's vectors have; a request that asks for just "
        "those is served then. Empty: not known before a text is computed.",
    )
    matryoshka: bool = Field(
        False,
        description="Whether the model was trained so that the first dimensions of its vectors are "
        "of use alone, and requests may ask for fewer.",
    )
    query_prefix: str = Field(
        "",
        max_length=4096,
        description="What is put before a query in `/v1/rerank`, and before the first text in "
        "`/score`: many models were trained with an instruction there.",
    )
    document_prefix: str = Field(
        "", max_length=4096, description="What is put before a document there."
    )


class CrossAttentionSettings(BaseModel):
    """Dimensions of the decoder's cross-attention, as in the model's config.json."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: int = Field(ge=1, le=1024, description="Layers of the decoder with cross-attention.")
    kv_heads: int = Field(ge=1, le=1024, description="K and V heads of each of these layers.")
    head_dim: int = Field(ge=1, le=4096, description="Numbers of a head.")
    max_tokens: int = Field(
        ge=1,
        le=CONTEXT_MAX,
        description="The most tokens of the encoder's output that the model was converted for.",
    )

    @property
    def shape(self) -> EncoderShape:
        """The dimensions of the caches in requests."""
        return EncoderShape(self.layers, self.kv_heads, self.head_dim)


class FolderSettings(BaseModel):
    """Settings of a model in rkserve.yaml; every key is optional."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    context_length: int = Field(
        4096,
        ge=CONTEXT_STEP,
        le=CONTEXT_MAX,
        multiple_of=CONTEXT_STEP,
        description="Tokens of prompt and answer together; at most what the model was converted "
        "for.",
    )
    eos_token_ids: tuple[NonNegativeInt, ...] = Field(
        (),
        description="Ids of tokens that end an answer, also where the runtime reads a wrong one "
        "from the model's file.",
    )
    chat_template: str | None = Field(
        None,
        description="A built-in chat template in the place of the folder's own; "
        "docs/reference/api.md lists their names.",
    )
    tool_format: Literal["hermes", "llama", "mistral", "mistral-args", "pythonic"] | None = Field(
        None,
        description="The form in which the model calls tools; docs/reference/api.md describes "
        "them. Empty: guessed from its chat template.",
    )
    max_adapters: int = Field(
        4,
        ge=1,
        description="LoRA adapters that a board holds at once. The runtime cannot unload one: a "
        "request for one more than that makes the board load its model anew.",
    )
    max_adapter_bytes: int | None = Field(
        None,
        ge=1,
        description="What these adapters may take together, by the sizes of their files, as "
        "`max_adapters` limits their number. Empty: no limit.",
    )
    hidden_size: int | None = Field(
        None,
        ge=1,
        description="Numbers in the embedding of a token, `hidden_size` of the model's "
        "config.json. Without it the model takes no `prompt_embeds`, since the runtime reads as "
        "many as the model has, unchecked.",
    )
    kv_bytes_per_token: int | None = Field(
        None,
        ge=1,
        description="What one position of the KV cache takes in memory, for the reports; usually "
        "2 x layers x KV heads x head size x 2 bytes.",
    )
    prompt_cache: bool | None = Field(
        None,
        description="Whether prompt caches may be kept on disk. Empty: not for Qwen3.5, known by "
        "the names of the folder and of the model's file, whose runtime cannot save them; for all "
        "others.",
    )
    n_keep: int = Field(
        -1,
        ge=-1,
        description="Positions at the beginning that the runtime keeps when a context that is full "
        "is shifted; -1 leaves it to the runtime.",
    )
    ignore_eos_token: bool = Field(
        False,
        description="Whether the runtime is told to go on past the token that it takes for the "
        "end. Answers then end at their `max_tokens`, or at one of `eos_token_ids`, should the "
        "model still come to it: for a model whose end the runtime reads wrongly, and for answers "
        "of a fixed length. RKLLM 1.3.0 and later; older releases refuse to load with it.",
    )
    sampling: SamplingDefaults = SamplingDefaults()
    thinking: ThinkingSettings = ThinkingSettings()
    embedding: EmbeddingSettings | None = Field(
        None, description="How texts become vectors. Without it the model makes none."
    )
    vision: VisionSettings | None = Field(
        None, description="How the model sees images. Without it it takes none."
    )
    rerank: RerankSettings | None = Field(
        None,
        description="How documents are judged in `/v1/rerank` and `/score`. Without it they are "
        "compared by their vectors; `{}` is right for Qwen3-Reranker.",
    )
    cross_attention: CrossAttentionSettings | None = Field(
        None,
        description="Sizes of the cross-attention of an encoder-decoder model, whose decoder is "
        "loaded with `use_cross_attn`. Every prompt of it needs `cross_attention`, the encoder's "
        "output, in `/v1/completions`. RKLLM 1.2.1 and later, which are all that rkserve accepts.",
    )

    @model_validator(mode="after")
    def _decode_only(self) -> FolderSettings:
        if self.cross_attention is not None:
            for name in ("embedding", "vision", "rerank"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"cross_attention and {name} do not go together: only completions can "
                        "bring the encoder's output"
                    )
        return self


class ModelFolder(BaseModel):
    """One servable model. ``id`` is its name in requests: the folder's name.

    ``weights`` is None if the folder holds tokenizer files only, as on a head node.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    path: Path
    weights: Path | None
    settings: FolderSettings

    def require_weights(self) -> Path:
        """Return the model's file. Raises ``ConfigError`` if this machine does not have it."""
        if self.weights is None:
            raise ConfigError(f"{self.path} holds no *.rkllm file. Copy the converted model there.")
        return self.weights

    def content_digest(self) -> str:
        """Return a digest of this model's file, for data that is valid only with it.

        Raises:
            ConfigError: this machine does not have the file, or it cannot be read.
        """
        weights = self.require_weights()
        try:
            return content_digest(weights)
        except OSError as exc:
            raise ConfigError(f"{weights} cannot be read: {exc}") from exc

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


class UnfitWeights(ValueError):
    """The reason why a file certainly is no model for RKLLM; callers put it into their message."""


@dataclass(frozen=True, slots=True)
class WeightsMetadata:
    """The metadata in the header of a model file; None is unknown.

    The vendor has not published the ``.rkllm`` format, so nothing is known about a real file before
    it is loaded, and only files that certainly are something else are refused. ``platform`` is the
    SoC that it was converted for (``any``: all), ``max_context`` the longest context.
    """

    size_bytes: int
    simulated: bool = False
    model_id: str | None = None
    platform: str | None = None
    toolkit: str | None = None
    max_context: int | None = None


def weights_facts(path: Path) -> WeightsMetadata:
    """Return the metadata of a model's file without loading it.

    Raises:
        UnfitWeights: it certainly is no model for RKLLM, or is damaged.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise UnfitWeights("it is no regular file")
        head = file.read(SIM_HEADER.size)
    if not head.strip(b"\0"):
        raise UnfitWeights("it is empty" if not head else "it begins with nothing but zeros")
    for magic, at, kind in FOREIGN:
        if head[at : at + len(magic)] == magic:
            raise UnfitWeights(f"it is {kind}")
    if head.lstrip()[:1] == b"<":
        raise UnfitWeights("it is a page of HTML or XML, perhaps what a server answered instead")
    if head.startswith(SIM_MAGIC):
        return _simulated(head, found.st_size)
    return WeightsMetadata(found.st_size)


def _simulated(head: bytes, size_bytes: int) -> WeightsMetadata:
    if len(head) < SIM_HEADER.size:
        raise UnfitWeights("it is a simulated model that was cut off")
    _, form, said_bytes, model_id, platform, _, toolkit, _, max_context, *_ = SIM_HEADER.unpack(
        head
    )
    if form != SIM_FORMAT:
        raise UnfitWeights(f"it is a simulated model of the unknown format {form}")
    if said_bytes != size_bytes:
        raise UnfitWeights(
            f"it is a simulated model of {said_bytes} bytes, of which {size_bytes} are there"
        )
    texts = [
        field.partition(b"\0")[0].decode(errors="replace")
        for field in (model_id, platform, toolkit)
    ]
    return WeightsMetadata(size_bytes, True, texts[0], texts[1], texts[2], max_context)


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
        id=path.name, path=path, weights=weights_in(path), settings=_settings(path / SETTINGS_FILE)
    )


def weights_in(path: Path) -> Path | None:
    """Return the model's file in a folder. Raises ``ConfigError`` if there are several."""
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
        raise ConfigError(f"{file}: {explain(exc, FolderSettings)}") from exc
