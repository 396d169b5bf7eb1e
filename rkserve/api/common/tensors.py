"""Tensors in request bodies: base64 of a safetensors file or a NumPy array, to float32.

Neither format can carry code, as ``torch.save``'s pickle can. No numerics library is needed.
"""

from __future__ import annotations

import ast
import base64
import binascii
import json
import math
import struct
from array import array
from collections.abc import Callable

from rkserve.api.json.fields import Fields
from rkserve.core.errors import RequestError, UnsupportedParameter
from rkserve.core.run_params import Embeds, EncoderShape, EncoderStates
from rkserve.models.settings import CrossAttentionSettings

# One run's embeddings cross to the engine in one frame; as float32.
MAX_TENSOR_BYTES = 12 * 1024 * 1024
_FLOAT = 4
_SHAPE = ("tokens", "hidden size")
_K_SHAPE = ("layers", "tokens", "KV heads", "head size")
_V_SHAPE = ("layers", "KV heads", "head size", "tokens")
_INT32 = 2**31
_NPY = b"\x93NUMPY"
_NPY_LENGTHS = {1: "<H", 2: "<I", 3: "<I"}  # of the header, by major version
_NPY_KINDS = {"<f4": "F32", "<f2": "F16"}
_NPY_KEYS = {"descr", "fortran_order", "shape"}
_FLOAT_MAX = 3.4028234663852886e38  # of float32
_MAX_HEADER = 64 * 1024
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"


def read_embeds(value: object, path: str) -> Embeds:
    """Read one tensor of shape ``[tokens, hidden size]``.

    Raises ``RequestError``: naming ``path``.
    """
    (rows, columns), data = _tensor(value, path, _SHAPE)
    return Embeds(rows, columns, data)


def check_embeds(embeds: Embeds, hidden_size: int | None, path: str) -> None:
    """Check that embeddings have the size of the model's, None if that is not configured.

    Raises ``UnsupportedParameter``, ``RequestError``.
    """
    if hidden_size is None:
        raise UnsupportedParameter(
            "Unsupported parameter: this model takes no 'prompt_embeds': the rkserve.yaml of its "
            "folder has no 'hidden_size'.",
            "prompt_embeds",
        )
    if embeds.columns != hidden_size:
        raise RequestError(
            f"Invalid '{path}': its rows have {embeds.columns} numbers, and embeddings of this "
            f"model {hidden_size}.",
            path,
        )


def check_encoder(states: EncoderStates | None, needs: CrossAttentionSettings | None) -> None:
    """Check that an encoder's output is present and fits, exactly if the model needs one.

    Raises ``UnsupportedParameter``, ``RequestError``.
    """
    path = "cross_attention"
    if needs is None:
        raise UnsupportedParameter(
            "Unsupported parameter: this model takes no 'cross_attention': the rkserve.yaml of its "
            "folder has no such section.",
            path,
        )
    if states is None:
        raise RequestError(
            "This is an encoder-decoder model: send a prompt with 'cross_attention', the "
            "encoder's output, to /v1/completions.",
            path,
        )
    if states.shape != needs.shape:
        own, given = (
            f"{one.layers} layers, {one.kv_heads} KV heads and head size {one.head_dim}"
            for one in (needs.shape, states.shape)
        )
        raise RequestError(f"Invalid '{path}': it is of {given}, and this model has {own}.", path)
    if states.tokens > needs.max_tokens:
        raise RequestError(
            f"Invalid '{path}': it has {states.tokens} tokens, and this model takes "
            f"{needs.max_tokens} at most.",
            path,
        )


def read_encoder(fields: Fields) -> EncoderStates | None:
    """Read ``cross_attention``, the optional output of an encoder. Raises ``RequestError``."""
    found = fields.child("cross_attention")
    if found is None:
        return None
    found.only(("k_cache", "v_cache", "mask", "positions"))
    k, k_cache = _tensor(found.get("k_cache"), found.path("k_cache"), _K_SHAPE)
    v, v_cache = _tensor(found.get("v_cache"), found.path("v_cache"), _V_SHAPE)
    layers, tokens, heads, size = k
    if v != (layers, heads, size, tokens):
        path = found.path("v_cache")
        raise RequestError(
            f"Invalid '{path}': its shape is {[*v]}, and that of the K cache asks for "
            f"{[layers, heads, size, tokens]} ({', '.join(_V_SHAPE)}).",
            path,
        )
    if len(k_cache) + len(v_cache) > MAX_TENSOR_BYTES:
        raise RequestError(
            f"Invalid 'cross_attention': its caches take {len(k_cache) + len(v_cache)} bytes as "
            f"float32; {MAX_TENSOR_BYTES} are the most.",
            "cross_attention",
        )
    mask, positions = _each(found, "mask", tokens), _each(found, "positions", tokens)
    if not all(isinstance(one, int) and 0 <= one < _INT32 for one in positions):
        path = found.path("positions")
        raise RequestError(f"Invalid '{path}': expected whole numbers of at least 0.", path)
    return EncoderStates(
        EncoderShape(layers, heads, size),
        tokens,
        k_cache,
        v_cache,
        array("f", mask).tobytes(),
        array("i", map(int, positions)).tobytes(),
    )


def _each(fields: Fields, name: str, tokens: int) -> list[float]:
    """Read a list of one number for each token of the encoder."""
    values, path = fields.get(name), fields.path(name)
    if not isinstance(values, list) or len(values) != tokens:
        raise RequestError(
            f"Invalid '{path}': expected a list of {tokens} numbers, one for each token.", path
        )
    if not all(type(one) in (int, float) and abs(one) <= _FLOAT_MAX for one in values):
        raise RequestError(f"Invalid '{path}': it holds what is no float32.", path)
    return values


def _tensor(value: object, path: str, dims: tuple[str, ...]) -> tuple[tuple[int, ...], bytes]:
    if not isinstance(value, str):
        raise RequestError(f"Invalid '{path}': expected base64 of a tensor.", path)
    try:
        data = base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as exc:
        raise RequestError(f"Invalid '{path}': it is not base64.", path) from exc
    try:
        kind, shape, raw = _npy(data) if data.startswith(_NPY) else _safetensors(data)
        return shape, _floats(kind, shape, raw, dims)
    except _Unreadable as exc:
        raise RequestError(f"Invalid '{path}': {exc}.", path) from exc


class _Unreadable(Exception):
    """The reason why bytes are no tensor; private to this module."""


def _floats(kind: str, shape: tuple[int, ...], raw: bytes, dims: tuple[str, ...]) -> bytes:
    if kind not in _WIDTHS:
        raise _Unreadable(f"its dtype is {kind}; send {', '.join(_WIDTHS)}")
    if len(shape) != len(dims) or min(shape) < 1:
        raise _Unreadable(f"its shape is {[*shape]}; send [{', '.join(dims)}]")
    size = math.prod(shape)
    if size * _FLOAT > MAX_TENSOR_BYTES:
        raise _Unreadable(
            f"it takes {size * _FLOAT} bytes as float32; {MAX_TENSOR_BYTES} are the most"
        )
    width, turn = _WIDTHS[kind]
    if len(raw) != size * width:
        sizes = " x ".join(map(str, shape))
        raise _Unreadable(f"it has {len(raw)} bytes for {sizes} values of {width} bytes")
    data = turn(raw)
    values = array("f")
    values.frombytes(data)
    if not all(map(math.isfinite, values)):
        raise _Unreadable("it holds what is no number (NaN or infinite)")
    return data


def _bfloat16(raw: bytes) -> bytes:
    wide = bytearray(2 * len(raw))
    wide[2::4], wide[3::4] = raw[0::2], raw[1::2]
    return bytes(wide)


def _float16(raw: bytes) -> bytes:
    return array("f", struct.unpack(f"<{len(raw) // 2}e", raw)).tobytes()


_WIDTHS: dict[str, tuple[int, Callable[[bytes], bytes]]] = {
    "F32": (4, bytes),
    "F16": (2, _float16),
    "BF16": (2, _bfloat16),
}


def _safetensors(data: bytes) -> tuple[str, tuple[int, ...], bytes]:
    if data.startswith((_ZIP, _PICKLE)):
        raise _Unreadable(
            "it is a file of torch.save, whose pickle can run code and is not read; send "
            "safetensors.torch.save({'prompt_embeds': tensor}), or numpy.save(file, array)"
        )
    if len(data) < struct.calcsize("<Q"):
        raise _Unreadable("it is neither safetensors nor a NumPy array")
    (length,) = struct.unpack_from("<Q", data)
    begin = struct.calcsize("<Q")
    if length > min(_MAX_HEADER, len(data) - begin):
        raise _Unreadable("it is neither safetensors nor a NumPy array")
    try:
        header = json.loads(data[begin : begin + length])
        tensors = {name: one for name, one in header.items() if name != "__metadata__"}
        ((_, entry),) = tensors.items()
        start, end = entry["data_offsets"]
        kind, shape = entry["dtype"], tuple(entry["shape"])
        whole = all(type(one) is int and one >= 0 for one in (*shape, start, end))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as exc:
        raise _Unreadable("it is not a safetensors file of one tensor") from exc
    body = data[begin + length :]
    if not whole or not isinstance(kind, str) or not start <= end <= len(body):
        raise _Unreadable("its safetensors header does not fit its bytes")
    return kind, shape, body[start:end]


def _npy(data: bytes) -> tuple[str, tuple[int, ...], bytes]:
    header, raw = _npy_header(data)
    if not isinstance(header, dict) or set(header) != _NPY_KEYS:
        raise _Unreadable("it has no NumPy header")
    descr, shape = str(header["descr"]), header["shape"]
    if descr not in _NPY_KINDS:
        raise _Unreadable(f"its dtype is {descr[:40]}; send float32 or float16")
    if header["fortran_order"] is not False:
        raise _Unreadable("it is in Fortran order; send numpy.ascontiguousarray(array)")
    if not isinstance(shape, tuple) or not all(type(one) is int and one >= 0 for one in shape):
        raise _Unreadable("its NumPy header has no shape")
    return _NPY_KINDS[descr], shape, raw


def _npy_header(data: bytes) -> tuple[object, bytes]:
    """Return the header of an array, a Python literal, and the bytes after it."""
    at = len(_NPY) + 2
    try:
        form = _NPY_LENGTHS[data[len(_NPY)]]
        (length,) = struct.unpack_from(form, data, at)
        at += struct.calcsize(form)
        text = data[at : at + min(length, _MAX_HEADER)].decode("latin-1").strip()
        return ast.literal_eval(text), data[at + length :]
    except (LookupError, ValueError, SyntaxError, RecursionError, MemoryError, struct.error) as exc:
        raise _Unreadable("it has no NumPy header") from exc
