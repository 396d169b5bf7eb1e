"""A tiny llama of random weights as a GGUF file, with the tokenizer of the simulated chat model.

Its answers are nonsense, and depend on every token before them: a position that is wrong, left over
or twice in the KV cache changes the answer.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from tests.support.paths import PROJECT

CHAT = PROJECT / "models" / "sim-chat"
_UINT32, _FLOAT32, _BOOL, _STRING, _ARRAY, _INT32 = 4, 6, 7, 8, 9, 5
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5
_ALIGNMENT = 32
_F32 = 0
Tensor = NDArray[np.float32]


def write_gguf(path: Path, pairs: dict[str, tuple[int, Any]], tensors: dict[str, Tensor]) -> None:
    """Write version 3 of the format; ``pairs`` are types and values by key."""
    head = [struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs))]
    for key, (kind, value) in pairs.items():
        head += [_text(key), struct.pack("<I", kind), _value(kind, value)]
    offset = 0
    for name, tensor in tensors.items():
        shape = tensor.shape[::-1]  # the fastest dimension first
        head += [_text(name), struct.pack(f"<I{len(shape)}Q", len(shape), *shape)]
        head.append(struct.pack("<IQ", _F32, offset))
        offset += _padded(tensor.nbytes)
    whole = b"".join(head)
    with path.open("wb") as file:
        file.write(whole.ljust(_padded(len(whole)), b"\0"))
        for tensor in tensors.values():
            file.write(tensor.tobytes().ljust(_padded(tensor.nbytes), b"\0"))


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


def write_tiny(
    path: Path,
    *,
    seed: int = 0,
    context: int = 4096,
    more: Mapping[str, tuple[int, Any]] | None = None,
) -> None:
    """Write a llama of two layers and 32 dimensions with the vocabulary of ``models/sim-chat``.

    ``more`` are further pairs of metadata.
    """
    tokenizer = json.loads((CHAT / "tokenizer.json").read_text(encoding="utf-8"))
    tokens, kinds = _vocabulary(tokenizer)
    merges = [
        one if isinstance(one, str) else " ".join(one) for one in tokenizer["model"]["merges"]
    ]
    settings = yaml.safe_load((CHAT / "rkserve.yaml").read_text(encoding="utf-8"))
    size, heads, wide, layers = 32, 4, 64, 2
    pairs: dict[str, tuple[int, Any]] = {
        "general.architecture": (_STRING, "llama"),
        "general.name": (_STRING, "tiny"),
        "llama.context_length": (_UINT32, context),
        "llama.embedding_length": (_UINT32, size),
        "llama.block_count": (_UINT32, layers),
        "llama.feed_forward_length": (_UINT32, wide),
        "llama.attention.head_count": (_UINT32, heads),
        "llama.attention.head_count_kv": (_UINT32, heads),
        "llama.attention.layer_norm_rms_epsilon": (_FLOAT32, 1e-5),
        "llama.rope.dimension_count": (_UINT32, size // heads),
        "llama.vocab_size": (_UINT32, len(tokens)),
        "tokenizer.ggml.model": (_STRING, "gpt2"),
        "tokenizer.ggml.pre": (_STRING, "qwen2"),
        "tokenizer.ggml.tokens": (_ARRAY, (_STRING, tokens)),
        "tokenizer.ggml.token_type": (_ARRAY, (_INT32, kinds)),
        "tokenizer.ggml.merges": (_ARRAY, (_STRING, merges)),
        "tokenizer.ggml.eos_token_id": (_UINT32, settings["eos_token_ids"][0]),
        "tokenizer.ggml.add_bos_token": (_BOOL, False),
    }
    pairs |= more or {}
    random = np.random.default_rng(seed)

    def weights(*shape: int, scale: float = 0.25) -> Tensor:
        return (random.standard_normal(shape) * scale).astype(np.float32)

    ones = np.ones(size, np.float32)
    tensors = {"token_embd.weight": weights(len(tokens), size), "output_norm.weight": ones}
    tensors["output.weight"] = weights(len(tokens), size)
    for layer in range(layers):
        block = f"blk.{layer}."
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensors[f"{block}{name}.weight"] = weights(size, size)
        tensors[f"{block}ffn_gate.weight"] = weights(wide, size)
        tensors[f"{block}ffn_up.weight"] = weights(wide, size)
        tensors[f"{block}ffn_down.weight"] = weights(size, wide)
        tensors |= {f"{block}{name}.weight": ones for name in ("attn_norm", "ffn_norm")}
    write_gguf(path, pairs, tensors)


def write_lora(
    path: Path, *, seed: int = 1, size: int = 32, layers: int = 2, scale: float = 1.0
) -> None:
    """Write a LoRA adapter of rank 2 for the tiny model, or one of other dimensions."""
    random = np.random.default_rng(seed)
    pairs = {
        "general.architecture": (_STRING, "llama"),
        "general.type": (_STRING, "adapter"),
        "adapter.type": (_STRING, "lora"),
        "adapter.lora.alpha": (_FLOAT32, 4.0),
    }
    tensors: dict[str, Tensor] = {}
    for layer in range(layers):
        for part, shape in (("lora_a", (2, size)), ("lora_b", (size, 2))):
            name = f"blk.{layer}.attn_q.weight.{part}"
            tensors[name] = (random.standard_normal(shape) * scale).astype(np.float32)
    write_gguf(path, pairs, tensors)


def _vocabulary(tokenizer: dict[str, Any]) -> tuple[list[str], list[int]]:
    known: dict[str, int] = tokenizer["model"]["vocab"]
    added = {one["id"]: one["content"] for one in tokenizer["added_tokens"]}
    count = max(*known.values(), *added) + 1
    tokens, kinds = [f"[PAD{i}]" for i in range(count)], [_UNUSED] * count
    for text, i in known.items():
        tokens[i], kinds[i] = text, _NORMAL
    for i, text in added.items():
        tokens[i], kinds[i] = text, _CONTROL
    return tokens, kinds


def tiny_folder(folder: Path, *, seed: int = 0) -> Path:
    """Make a model folder with the tiny model and the tokenizer files of ``models/sim-chat``."""
    folder.mkdir(parents=True)
    for name in ("rkserve.yaml", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(CHAT / name, folder / name)
    write_tiny(folder / "model.gguf", seed=seed)
    return folder
