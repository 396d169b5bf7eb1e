"""A GGUF file: the metadata in its header, its size, and a model folder made of both.

No tensor is read. Everything else of rkserve knows model folders, so the metadata becomes one:
tokenizer.json, tokenizer_config.json and rkserve.yaml in a folder of the node's state, named by
their contents, which any process may make again.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
import struct
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from rkserve.core.errors import ConfigError
from rkserve.core.files import private_folder, stamp
from rkserve.models.gguf_tokenizer import UnknownTokenizer, eos_token_ids, tokenizer_json
from rkserve.models.settings import CONTEXT_STEP

SUFFIX = ".gguf"
FOLDER = "gguf"  # in the state folder
# Settings of a bare file, beside it: the keys of a folder's rkserve.yaml.
SIDECAR = ".rkserve.yaml"
# Positions of a context without a setting, at most: models are trained for up to a million, whose
# KV cache no board holds.
CONTEXT_DEFAULT = 8192
FORMAT = 1  # of the made folders
MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMENSIONS = 8
_SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
_NOT_IN_IDS = re.compile(r"[^A-Za-z0-9._-]+")
_SCALARS: Mapping[int, struct.Struct] = MappingProxyType(
    {kind: struct.Struct(f"<{code}") for kind, code in enumerate("BbHhIif?")}
    | {10: struct.Struct("<Q"), 11: struct.Struct("<q"), 12: struct.Struct("<d")}
)
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
# Numbers and bytes of a block, by ggml's number of the type. A type that is not here is a later
# one, and the file's size is not checked.
_BLOCKS: Mapping[int, tuple[int, int]] = MappingProxyType(
    {0: (1, 4), 1: (1, 2), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2)}
    | {2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36), 20: (32, 18)}
    | {39: (32, 17), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210)}
    | {15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 21: (256, 110)}
    | {22: (256, 82), 23: (256, 136), 29: (256, 56), 34: (256, 54), 35: (256, 66)}
)
_POOLING = {1: "mean", 2: "cls", 3: "last"}  # llama.cpp's numbers; 0 is none
_RANKING = 4
# What llama.cpp gives a vocabulary that does not name its own.
_TOKEN_KEYS = MappingProxyType(
    {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
    }
)


@dataclass(frozen=True)
class GgufFile:
    """The header of a file. ``promised_bytes`` is the size that its tensors need it to have."""

    path: Path
    metadata: Mapping[str, Any]
    size_bytes: int
    promised_bytes: int

    @property
    def architecture(self) -> str:
        """The name of the model's architecture, such as ``llama``."""
        return str(self.metadata.get("general.architecture", ""))

    def number(self, key: str) -> int | None:
        """Return a whole number of the architecture's own keys; the largest one of a list."""
        found = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(found, list):
            found = max((one for one in found if type(one) is int), default=None)
        return found if type(found) is int else None

    def check(self) -> None:
        """Raise ``ConfigError`` for a file that llama.cpp cannot load as a language model."""
        if self.promised_bytes > self.size_bytes:
            raise ConfigError(
                f"{self.path} is cut short: it has {self.size_bytes} bytes, and its tensors need "
                f"{self.promised_bytes}. Download it again."
            )
        kind = self.metadata.get("general.type", "model")
        if kind != "model" or self.architecture in ("", "clip"):
            kind = kind if kind != "model" else self.architecture or "no architecture"
            raise ConfigError(
                f"{self.path} is no language model ({kind}). Name the model's own file."
            )


class _Header:
    """A cursor over the header. Reading behind the file's end raises ``struct.error``."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def scalar(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def text(self) -> str:
        raw = self._taken(self.scalar(_U64))
        return raw.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.scalar(_form(kind))
        of, count = self.scalar(_U32), self.scalar(_U64)
        if of == _STRING:
            if count > len(self.data):
                raise struct.error("a list is longer than the file")
            return [self.text() for _ in range(count)]
        form = _form(of)
        raw = self._taken(count * form.size)
        return [one for (one,) in form.iter_unpack(raw)]

    def _taken(self, size: int) -> bytes:
        begin, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise struct.error("a value is longer than the file")
        return self.data[begin : self.at]


def _form(kind: int) -> struct.Struct:
    if kind not in _SCALARS:
        raise ValueError(f"type {kind} of a value is not known")
    return _SCALARS[kind]


def read_gguf(path: Path) -> GgufFile:
    """Read a file's header; one with a vocabulary of 150,000 tokens takes some tenths of a second.

    Raises:
        ConfigError: it cannot be read, is no GGUF file, or ends inside of its header.
    """
    try:
        with path.open("rb") as file:
            magic = file.read(8)
            if not magic.startswith(MAGIC):
                raise ConfigError(f"{path} is no GGUF file: it begins with {magic[:4]!r}.")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(path, data)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror or exc}.") from exc
    except struct.error as exc:
        size = path.stat().st_size
        raise ConfigError(
            f"{path} is cut short: it ends inside of its header, after {size} bytes. Download it "
            "again."
        ) from exc
    except ValueError as exc:
        raise ConfigError(f"{path} is a damaged GGUF file: {exc}.") from exc


def _read(path: Path, data: mmap.mmap) -> GgufFile:
    header = _Header(data)
    header.at = len(MAGIC)
    version = header.scalar(_U32)
    if version not in VERSIONS:
        raise ValueError(f"version {version} of the format is not known, or it is big-endian")
    tensors, pairs = header.scalar(_U64), header.scalar(_U64)
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = header.text()
        metadata[key] = header.value(header.scalar(_U32))
    ends = [_tensor_end(header) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    begin = -(-header.at // alignment) * alignment
    return GgufFile(
        path=path,
        metadata=metadata,
        size_bytes=len(data),
        promised_bytes=begin + max(ends) if ends else header.at,
    )


def _tensor_end(header: _Header) -> int:
    """Read the next tensor's description; return where it ends behind the beginning of all."""
    header.text()
    dimensions = header.scalar(_U32)
    if dimensions > MAX_DIMENSIONS:
        raise ValueError(f"a tensor has {dimensions} dimensions")
    count = math.prod(header.scalar(_U64) for _ in range(dimensions))
    kind, offset = header.scalar(_U32), header.scalar(_U64)
    numbers, size = _BLOCKS.get(kind, (1, 0))
    return int(offset + -(-count // numbers) * size)


# -- names and parts ------------------------------------------------------------------------------


def model_id(path: Path) -> str:
    """Return the model's id: the file's name, without its suffix and its number as a part.

    ``general.name`` of the metadata is the same for all quantizations of a model, and often an
    author's path.
    """
    split = _SPLIT.fullmatch(path.stem)
    found = _NOT_IN_IDS.sub("-", split[1] if split else path.stem).lstrip("._-")[:128]
    return found or "model"


def parts_of(path: Path) -> tuple[Path, ...]:
    """Return all files of a model, of which llama.cpp loads the others by the first one's name.

    Raises:
        ConfigError: one is missing, or ``path`` is not the first.
    """
    split = _SPLIT.fullmatch(path.stem)
    if split is None:
        return (path,)
    names = [f"{split[1]}-{n:05}-of-{split[3]}{SUFFIX}" for n in range(1, int(split[3]) + 1)]
    if path.name != names[0]:
        raise ConfigError(f"{path} is part {int(split[2])} of a model; name its first, {names[0]}.")
    parts = tuple(path.with_name(name) for name in names)
    for part in parts:
        if not part.is_file():
            raise ConfigError(f"{part} is missing: {path.name} is one of {len(parts)} files.")
    return parts


def is_later_part(path: Path) -> bool:
    """Return whether a file is the second or a later part of a model."""
    split = _SPLIT.fullmatch(path.stem)
    return split is not None and int(split[2]) > 1


# -- a model folder -------------------------------------------------------------------------------


def kv_bytes_per_token(gguf: GgufFile) -> int | None:
    """Return the bytes of a position in the KV cache of 16-bit numbers; None if not known."""
    layers, heads = gguf.number("block_count"), gguf.number("attention.head_count")
    size, kv_heads = gguf.number("embedding_length"), gguf.number("attention.head_count_kv")
    if not layers or not heads or not size:
        return None
    key = gguf.number("attention.key_length") or size // heads
    value = gguf.number("attention.value_length") or size // heads
    return layers * (kv_heads or heads) * (key + value) * 2


def settings_of(gguf: GgufFile) -> dict[str, Any]:
    """Return the settings of a model folder that the metadata tells.

    Raises:
        ConfigError: the model cannot be served.
    """
    trained = gguf.number("context_length") or CONTEXT_DEFAULT
    context = min(trained, CONTEXT_DEFAULT) // CONTEXT_STEP * CONTEXT_STEP
    found: dict[str, Any] = {
        "context_length": max(context, CONTEXT_STEP),
        "eos_token_ids": list(eos_token_ids(gguf.metadata)),
        "hidden_size": gguf.number("embedding_length"),
        "kv_bytes_per_token": kv_bytes_per_token(gguf),
    }
    pooling = gguf.number("pooling_type") or 0
    if pooling == _RANKING:
        raise ConfigError(
            f"{gguf.path} is a reranker with a head of its own (pooling_type {pooling}), which is "
            "not supported. Rerankers that answer yes or no are."
        )
    if pooling in _POOLING:
        found["embedding"] = {"pooling": _POOLING[pooling], "dimensions": found["hidden_size"]}
    return {key: value for key, value in found.items() if value is not None}


def tokenizer_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of a tokenizer_config.json: named tokens, and chat templates."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    config: dict[str, Any] = {}
    for name, key in _TOKEN_KEYS.items():
        number = metadata.get(key)
        if type(number) is int and 0 <= number < len(tokens):
            config[name] = tokens[number]
    key = "tokenizer.chat_template"
    templates = {"default": metadata.get(key), "tool_use": metadata.get(f"{key}.tool_use")}
    named = [{"name": n, "template": t} for n, t in templates.items() if isinstance(t, str)]
    if len(named) == 1 and named[0]["name"] == "default":
        config["chat_template"] = named[0]["template"]
    elif named:
        config["chat_template"] = named
    return config


def sidecar_of(path: Path) -> Path:
    """Return the path of a file's settings: ``model.rkserve.yaml`` beside ``model.gguf``."""
    return path.with_name(f"{path.stem}{SIDECAR}")


def made_folder(path: Path, state_dir: Path) -> Path:
    """Return the model folder of a GGUF file, which is made if it is not there yet.

    Its path has a digest of everything that it is made of, so that processes that make it at once
    make the same, and a changed file gets another. The weights stay where they are.

    Raises:
        ConfigError: the file cannot be served, or the folder cannot be written.
    """
    parts_of(path)
    given = _given_settings(path)
    try:
        stamped = stamp(path)
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror or exc}.") from exc
    key = json.dumps([FORMAT, str(path), stamped, given], sort_keys=True, default=str)
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    target = state_dir.expanduser() / FOLDER / digest / model_id(path)
    if target.is_dir():
        return target
    gguf = read_gguf(path)
    gguf.check()
    try:
        contents = dict(_contents(gguf, given))
    except UnknownTokenizer as exc:
        raise ConfigError(
            f"{path}: {exc}. Make a folder of the model's name with this file and the "
            "tokenizer.json, tokenizer_config.json and, if there is one, chat_template.jinja of "
            "the model's original repository, and name that folder as `model`."
        ) from exc
    try:
        _publish(target, contents)
    except OSError as exc:
        raise ConfigError(f"{target} cannot be written: {exc.strerror or exc}.") from exc
    return target


def _given_settings(path: Path) -> dict[str, Any]:
    file = sidecar_of(path)
    if not file.is_file():
        return {}
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as exc:
        raise ConfigError(f"{file} cannot be read: {exc}") from exc
    if not isinstance(found or {}, dict):
        raise ConfigError(f"{file} must be a block of keys, as in a folder's rkserve.yaml")
    return found or {}


def _contents(gguf: GgufFile, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    tokenizer = tokenizer_json(gguf.metadata)
    yield "tokenizer.json", json.dumps(tokenizer, ensure_ascii=False)
    config = tokenizer_config(gguf.metadata)
    yield "tokenizer_config.json", json.dumps(config, ensure_ascii=False, indent=2)
    settings = {**settings_of(gguf), **given}
    yield "rkserve.yaml", yaml.safe_dump(settings, allow_unicode=True, sort_keys=False)


def _publish(target: Path, contents: Mapping[str, str]) -> None:
    """Write a folder whole, or not at all; another process may have done so meanwhile."""
    private_folder(target.parent.parent.parent)
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as made:
        new = Path(made) / target.name
        new.mkdir()
        for name, content in contents.items():
            (new / name).write_text(content, encoding="utf-8")
        try:
            new.rename(target)
        except OSError:
            if not target.is_dir():
                raise
