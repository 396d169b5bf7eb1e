"""Readers of the files in a model folder: headers of weight files and adapters, and the bytes of
token IDs from tokenizer.json. Lists of tensors as trainers give them are read here, too.

A token may end inside a character, so ``read_vocabulary`` reads the vocabulary itself instead of
decoded text. It supports the two ways in which vocabularies write bytes, and refuses any other.
"""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkserve.core.errors import ConfigError, RequestError
from rkserve.models.gguf_tokenizer import BLANK, NORMAL

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
    dtype: str | None = None


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
    if flaw := _foreign(head):
        raise UnfitWeights(flaw)
    if head.startswith(SIM_MAGIC):
        return _simulated(head, found.st_size)
    return WeightsMetadata(found.st_size)


def _foreign(head: bytes) -> str:
    """Return the kind of a file that certainly is none of RKLLM, by its beginning, or \"\"."""
    if not head.strip(b"\0"):
        return "it is empty" if not head else "it begins with nothing but zeros"
    for magic, at, kind in FOREIGN:
        if head[at : at + len(magic)] == magic:
            return f"it is {kind}"
    if head.lstrip()[:1] == b"<":
        return "it is a page of HTML or XML, perhaps what a server answered instead"
    return ""


def _simulated(head: bytes, size_bytes: int) -> WeightsMetadata:
    if len(head) < SIM_HEADER.size:
        raise UnfitWeights("it is a simulated model that was cut off")
    _, form, said_bytes, model_id, platform, _, toolkit, dtype, max_context, *_ = SIM_HEADER.unpack(
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
        for field in (model_id, platform, toolkit, dtype)
    ]
    names = dict(zip(("model_id", "platform", "toolkit", "dtype"), texts, strict=True))
    return WeightsMetadata(size_bytes, True, max_context=max_context, **names)


# The header of a simulated adapter: magic, format, CRC-32 of everything after it; size, seed, and
# the names of the base model and of the adapter.
ADAPTER_MAGIC, ADAPTER_FORMAT = b"RKSIMLRA", 1
ADAPTER_HEAD, ADAPTER_REST = struct.Struct("<8sII"), struct.Struct("<QQ64s64s")
ANY_BASE = b"any"
_BLOCK = 1 << 20


def adapter_flaw(path: Path, model_id: str | None = None) -> str:
    """Return why a file certainly is no adapter of that model, or an empty string.

    As with base weights, a real file is unknown until a board loads it. A simulated one is checked
    completely. Raises ``OSError``: it cannot be read.
    """
    with path.open("rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return "it is no regular file"
        head = file.read(max(SIM_HEADER.size, ADAPTER_HEAD.size + ADAPTER_REST.size))
    if head.startswith(ADAPTER_MAGIC):
        return simulated_adapter_flaw(path, model_id)
    if head.startswith(SIM_MAGIC):
        return "it is a base model for simulated boards, and no adapter"
    return _foreign(head)


def simulated_adapter_flaw(path: Path, model_id: str | None = None) -> str:
    """Return why the simulated runtime refuses an adapter of its format, or an empty string."""
    with path.open("rb") as file:
        begin = file.read(ADAPTER_HEAD.size + ADAPTER_REST.size)
        found, length = zlib.crc32(begin[ADAPTER_HEAD.size :]), len(begin)
        while piece := file.read(_BLOCK):
            found, length = zlib.crc32(piece, found), length + len(piece)
    if length < ADAPTER_HEAD.size + ADAPTER_REST.size:
        return f"a simulated adapter that was cut after {length} bytes"
    _, form, crc = ADAPTER_HEAD.unpack_from(begin)
    size, _, base, title = ADAPTER_REST.unpack_from(begin, ADAPTER_HEAD.size)
    if form != ADAPTER_FORMAT:
        return f"a simulated adapter of format {form}, and the simulator reads {ADAPTER_FORMAT}"
    if size != length:
        return f"a simulated adapter of {size} bytes of which {length} are there"
    if crc != found or b"\0" not in base or b"\0" not in title:
        return "a simulated adapter with a wrong checksum"
    name = base.partition(b"\0")[0]
    if model_id is not None and name not in (ANY_BASE, model_id.encode()):
        return f"an adapter for the base model {name.decode(errors='replace')!r}, not {model_id!r}"
    return ""


MAX_PARAMETERS = 20_000
MAX_NAME_CHARS = 256
MAX_DIMENSIONS = 16
_NUMBERED = re.compile(r"0{0,9}([1-9]\d{0,4})(?:/|-of-)0{0,9}([1-9]\d{0,4})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One tensor. ``dtype`` is without the prefix of the library that wrote it."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def named(cls, name: str, shape: Iterable[int], dtype: str) -> Parameter:
        """Return it with the type's plain name: ``torch.bfloat16`` is ``bfloat16``."""
        return cls(name, tuple(shape), dtype.rpartition(".")[2])


@dataclass(frozen=True, slots=True)
class _Shard:
    """The part of a tensor in an entry: number ``index`` of ``count``, cut along ``dim``."""

    index: int
    count: int | None = None
    dim: int = 0


def read_parameters(given: Any, param: str) -> tuple[Parameter, ...]:
    """Return a list of ``{"name", "shape", "dtype"}`` as it came in JSON; None is an empty one.

    Entries with a ``shard`` are parts of one tensor, which is returned whole.

    Raises ``RequestError`` that names ``param`` for anything else, and for a tensor of which a
    shard is missing: a board loads one whole file.
    """
    if given is None:
        return ()
    if not isinstance(given, list) or len(given) > MAX_PARAMETERS:
        raise RequestError(
            f"Invalid '{param}': expected a list of at most {MAX_PARAMETERS} tensors.", param
        )
    parts: dict[str, list[tuple[Parameter, _Shard | None]]] = {}
    for n, one in enumerate(given):
        found, shard = _read(one, f"{param}[{n}]", param)
        parts.setdefault(found.name, []).append((found, shard))
    return tuple(_whole(name, of, param) for name, of in parts.items())


def _read(given: Any, at: str, param: str) -> tuple[Parameter, _Shard | None]:
    if not isinstance(given, dict) or set(given) - {"shard"} != {"name", "shape", "dtype"}:
        raise RequestError(
            f"Invalid '{at}': expected name, shape and dtype of a tensor, and shard where it is a "
            "part of one.",
            param,
        )
    name, shape, dtype = given["name"], given["shape"], given["dtype"]
    for word, text in (("name", name), ("dtype", dtype)):
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_NAME_CHARS:
            raise RequestError(
                f"Invalid '{at}.{word}': expected 1 to {MAX_NAME_CHARS} characters.", param
            )
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise RequestError(f"Invalid '{at}.shape': expected a list of sizes.", param)
    if not all(type(size) is int and size >= 0 for size in shape):
        raise RequestError(f"Invalid '{at}.shape': expected whole numbers, 0 or more.", param)
    return Parameter.named(name, shape, dtype), _read_shard(given.get("shard"), at, param)


def _read_shard(given: Any, at: str, param: str) -> _Shard | None:
    """Read an index from 0, ``{"index", "count", "dim"}``, or ``"1/4"`` as files are numbered."""
    if given is None:
        return None
    found: dict[str, Any] = {}
    if type(given) is int:
        found = {"index": given}
    elif isinstance(given, dict) and "index" in given and set(given) <= {"index", "count", "dim"}:
        found = {"dim": 0, **{key: value for key, value in given.items() if value is not None}}
    elif isinstance(given, str) and (numbered := _NUMBERED.fullmatch(given)):
        found = {"index": int(numbered[1]) - 1, "count": int(numbered[2])}
    values = list(found.values())
    if values and all(type(one) is int and 0 <= one <= MAX_PARAMETERS for one in values):
        shard = _Shard(**found)
        if shard.count is None or shard.index < shard.count:
            return shard
    raise RequestError(
        f"Invalid '{at}.shard': expected an index from 0, {{'index', 'count', 'dim'}}, or '1/4'.",
        param,
    )


def _whole(name: str, parts: Sequence[tuple[Parameter, _Shard | None]], param: str) -> Parameter:
    """Return a tensor put together from its shards. Raises ``RequestError`` unless it is whole."""
    first, shard = parts[0]
    shards = {one.index: (part, one) for part, one in parts if one is not None}
    if shard is None and len(parts) == 1:
        return first
    if len(shards) != len(parts):
        raise RequestError(f"Invalid '{param}': '{name}' is in it twice.", param)
    count = max(len(parts), *(one.count or one.index + 1 for _, one in shards.values()))
    missing = [index for index in range(count) if index not in shards]
    if missing:
        raise RequestError(
            f"Invalid '{param}': '{name}' has {len(shards)} of {count} shards, and shard "
            f"{missing[0]} (counted from 0) is missing; boards load one whole file, so name every "
            "shard of a tensor.",
            param,
        )
    ordered = [shards[index] for index in range(count)]
    dim = ordered[0][1].dim
    rests = {(p.dtype, one.count or count, one.dim, _without(p.shape, dim)) for p, one in ordered}
    if len(rests) > 1 or dim >= len(first.shape):
        raise RequestError(
            f"Invalid '{param}': the shards of '{name}' do not fit together: they need one dtype, "
            f"one count, and the same sizes but for dimension {dim}.",
            param,
        )
    size = sum(part.shape[dim] for part, _ in ordered)
    shape = (*first.shape[:dim], size, *first.shape[dim + 1 :])
    return Parameter(name, shape, first.dtype)


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], -1, *shape[dim + 1 :])


def difference(asked: Sequence[Parameter], known: Sequence[Parameter]) -> str | None:
    """Return the first difference between ``asked`` and ``known`` in one sentence; None if equal.

    Their order is irrelevant.
    """
    have = {one.name: one for one in known}
    for one in asked:
        other = have.pop(one.name, None)
        if other is None:
            return f"'{one.name}' is not in the manifest."
        if other.shape != one.shape:
            return f"'{one.name}' has the shape {[*one.shape]}, and {[*other.shape]} there."
        if other.dtype != one.dtype:
            return f"'{one.name}' has the dtype {one.dtype}, and {other.dtype} there."
    if have:
        return f"'{next(iter(have))}' of the manifest is missing."
    return None


_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """``pieces`` by ID, None if there is none; those in ``special`` are markup and not text."""

    pieces: tuple[bytes | None, ...]
    special: frozenset[int]

    def __len__(self) -> int:
        return len(self.pieces)

    def piece(self, token_id: int) -> bytes:
        """Return an ID's bytes, also if it is markup; empty for an ID without any."""
        if not 0 <= token_id < len(self.pieces):
            return b""
        return self.pieces[token_id] or b""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that an ID adds to a text."""
        return b"" if token_id in self.special else self.piece(token_id)

    def difference(self, other: Vocabulary) -> int | None:
        """Return the first ID that has other bytes in the other one; None if there is none.

        IDs that only one of them has do not count: vocabularies are padded.
        """
        pairs = enumerate(zip(self.pieces, other.pieces, strict=False))
        return next((i for i, (a, b) in pairs if None not in (a, b) and a != b), None)


def gguf_vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    """Return the ordinary tokens of a GGUF file's metadata; markup is written in several ways."""
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    kinds = metadata.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if metadata.get("tokenizer.ggml.model") == "gpt2":
        alphabet = _byte_alphabet()
        pieces = [_byte_level(token, alphabet) for token in tokens]
    else:
        pieces = [_sentence_piece(token) for token in tokens]
    both = zip(pieces, kinds, strict=False)
    return Vocabulary(tuple(one if kind == NORMAL else None for one, kind in both), frozenset())


def read_vocabulary(file: Path) -> Vocabulary:
    """Read a tokenizer.json; one with 150,000 tokens takes some tenths of a second.

    Raises:
        ConfigError: it cannot be read, or writes bytes in an unsupported way.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return _vocabulary(found, file)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        raise ConfigError(f"{file} is not a tokenizer whose tokens can be read: {exc!r}") from exc


def _vocabulary(found: dict[str, Any], file: Path) -> Vocabulary:
    listed = found["model"]["vocab"]
    # Unigram models have a list of pairs with scores.
    pairs = (
        listed.items() if isinstance(listed, dict) else ((p, i) for i, (p, _) in enumerate(listed))
    )
    decoders = _types(found.get("decoder"))
    pieces: dict[int, bytes]
    if "ByteLevel" in decoders:
        alphabet = _byte_alphabet()
        pieces = {i: _byte_level(piece, alphabet) for piece, i in pairs}
    elif decoders & {"ByteFallback", "Metaspace"}:
        pieces = {i: _sentence_piece(piece) for piece, i in pairs}
    else:
        raise ConfigError(
            f"{file} has a decoder of {', '.join(sorted(decoders)) or 'no type'}: what its tokens "
            "say in bytes is known of ByteLevel, ByteFallback and Metaspace only"
        )
    added = found.get("added_tokens") or []
    pieces.update((token["id"], token["content"].encode()) for token in added)
    special = frozenset(token["id"] for token in added if token["special"])
    size = max(pieces, default=-1) + 1
    return Vocabulary(tuple(pieces.get(i) for i in range(size)), special)


def _types(decoder: Any) -> frozenset[str]:
    """Return the types of a decoder and of the decoders in its sequence."""
    if not isinstance(decoder, dict):
        return frozenset()
    inner = [_types(one) for one in decoder.get("decoders") or []]
    return frozenset({str(decoder.get("type"))}).union(*inner)


def _byte_alphabet() -> Mapping[str, int]:
    """Return the printable character for each byte of a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = (byte for byte in range(256) if byte not in printable)
    shifted = {chr(256 + place): byte for place, byte in enumerate(hidden)}
    return {**{chr(byte): byte for byte in printable}, **shifted}


def _byte_level(piece: str, alphabet: Mapping[str, int]) -> bytes:
    # A token outside the alphabet was added verbatim.
    if all(character in alphabet for character in piece):
        return bytes(alphabet[character] for character in piece)
    return piece.encode()


def _sentence_piece(piece: str) -> bytes:
    if (byte := _BYTE.fullmatch(piece)) is not None:
        return bytes([int(byte.group(1), 16)])
    return piece.replace(BLANK, " ").encode()
