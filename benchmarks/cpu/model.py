"""A llama of random weights in q8_0 as a GGUF file: as large as small real ones, so that the memory
limits its speed as it limits theirs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_UINT32, _INT32, _FLOAT32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9
_F32, _Q8_0 = 0, 8
_ALIGNMENT, _BLOCK = 32, 32
_NORMAL = 1


@dataclass(frozen=True)
class Shape:
    """The sizes of a llama."""

    size: int = 1024
    wide: int = 4096
    layers: int = 16
    heads: int = 16
    kv_heads: int = 4
    vocabulary: int = 32000
    context: int = 4096


def write_model(path: Path, shape: Shape) -> None:
    """Write the file. No token of it ends an answer."""
    tokens = [f"<{i}>" for i in range(shape.vocabulary)]
    pairs: list[tuple[str, int, Any]] = [
        ("general.architecture", _STRING, "llama"),
        ("general.name", _STRING, "random"),
        ("llama.context_length", _UINT32, shape.context),
        ("llama.embedding_length", _UINT32, shape.size),
        ("llama.block_count", _UINT32, shape.layers),
        ("llama.feed_forward_length", _UINT32, shape.wide),
        ("llama.attention.head_count", _UINT32, shape.heads),
        ("llama.attention.head_count_kv", _UINT32, shape.kv_heads),
        ("llama.attention.layer_norm_rms_epsilon", _FLOAT32, 1e-5),
        ("llama.rope.dimension_count", _UINT32, shape.size // shape.heads),
        ("llama.vocab_size", _UINT32, shape.vocabulary),
        ("tokenizer.ggml.model", _STRING, "llama"),
        ("tokenizer.ggml.tokens", _ARRAY, (_STRING, tokens)),
        ("tokenizer.ggml.scores", _ARRAY, (_FLOAT32, [0.0] * shape.vocabulary)),
        ("tokenizer.ggml.token_type", _ARRAY, (_INT32, [_NORMAL] * shape.vocabulary)),
        ("tokenizer.ggml.add_bos_token", _BOOL, False),
    ]
    tensors = _tensors(shape)
    head = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs))]
    head += [
        _text(key) + struct.pack("<I", kind) + _value(kind, value) for key, kind, value in pairs
    ]
    offset = 0
    for name, rows, columns in tensors:
        sizes = (columns, rows) if rows else (columns,)
        head += [_text(name), struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)]
        head.append(struct.pack("<IQ", _Q8_0 if rows else _F32, offset))
        offset += _padded(_bytes(rows, columns))
    whole, random = b"".join(head), np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(whole.ljust(_padded(len(whole)), b"\0"))
        for _, rows, columns in tensors:
            raw = _weights(random, rows, columns).tobytes()
            file.write(raw.ljust(_padded(len(raw)), b"\0"))


def _tensors(shape: Shape) -> list[tuple[str, int, int]]:
    """Return name, rows and columns of each tensor; a vector has no rows."""
    size, kv_size = shape.size, shape.size * shape.kv_heads // shape.heads
    found = [
        ("token_embd.weight", shape.vocabulary, size),
        ("output_norm.weight", 0, size),
        ("output.weight", shape.vocabulary, size),
    ]
    for layer in range(shape.layers):
        block = f"blk.{layer}."
        found += [
            (f"{block}attn_norm.weight", 0, size),
            (f"{block}attn_q.weight", size, size),
            (f"{block}attn_k.weight", kv_size, size),
            (f"{block}attn_v.weight", kv_size, size),
            (f"{block}attn_output.weight", size, size),
            (f"{block}ffn_norm.weight", 0, size),
            (f"{block}ffn_gate.weight", shape.wide, size),
            (f"{block}ffn_up.weight", shape.wide, size),
            (f"{block}ffn_down.weight", size, shape.wide),
        ]
    return found


def _weights(random: np.random.Generator, rows: int, columns: int) -> NDArray[Any]:
    if not rows:
        return np.ones(columns, np.float32)
    blocks = rows * columns // _BLOCK
    raw = np.empty((blocks, 2 + _BLOCK), np.uint8)
    raw[:, :2] = np.full((blocks, 1), 5e-4, np.float16).view(np.uint8)  # the scale of a block
    raw[:, 2:] = random.integers(-90, 90, (blocks, _BLOCK), dtype=np.int8).view(np.uint8)
    return raw


def _bytes(rows: int, columns: int) -> int:
    return rows * columns // _BLOCK * (2 + _BLOCK) if rows else 4 * columns


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _text(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind == _STRING:
        return _text(value)
    if kind == _ARRAY:
        of, items = value
        return struct.pack("<IQ", of, len(items)) + b"".join(_value(of, one) for one in items)
    return struct.pack({_UINT32: "<I", _INT32: "<i", _FLOAT32: "<f", _BOOL: "<?"}[kind], value)
