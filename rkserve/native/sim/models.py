"""Files for the simulated runtime: base weights that give other answers, and LoRA adapters."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

from rkserve.models.weights import SIM_HEADER, SIM_MAGIC

_FILE_BYTES, _MODEL_ID, _PLATFORM = 2, 3, 4
_STRINGS_AT, _STRINGS_BYTES = 16, 17


def reseed(
    content: bytes, seed: int, *, model_id: str | None = None, platform: str | None = None
) -> bytes:
    """Return a model with the same vocabulary and other answers, which the seed determines.

    With another ``model_id`` the adapters of the first model no longer load; ``platform`` is the
    SoC of the new one.

    Raises:
        ValueError: ``content`` is no simulated model, or a name does not fit its field.
    """
    if not content.startswith(SIM_MAGIC) or len(content) < SIM_HEADER.size:
        raise ValueError("not a model of the simulated runtime")
    header = list(SIM_HEADER.unpack_from(content))
    at, size = header[_STRINGS_AT], header[_STRINGS_BYTES]
    kept = [one for one in content[at : at + size].split(b"\0") if one]
    strings = b"".join(
        one + b"\0"
        for one in (*(one for one in kept if not one.startswith(b"seed=")), b"seed=%d" % seed)
    )
    # The strings cannot grow in place, so they are appended.
    body = content[SIM_HEADER.size :] + bytes(-len(content) % 4)
    header[_STRINGS_AT], header[_STRINGS_BYTES] = SIM_HEADER.size + len(body), len(strings)
    header[_FILE_BYTES] = header[_STRINGS_AT] + len(strings)
    if model_id is not None:
        header[_MODEL_ID] = _field(model_id, 64)
    if platform is not None:
        header[_PLATFORM] = _field(platform, 16)
    return SIM_HEADER.pack(*header) + body + strings


def _field(text: str, room: int) -> bytes:
    value = text.encode()
    if not value or len(value) >= room or b"\0" in value:
        raise ValueError(f"a model's name takes 1 to {room - 1} bytes, not {text!r}")
    return value


MAGIC = b"RKSIMLRA"
FORMAT = 1
_HEAD = struct.Struct("<8sII")
_REST = struct.Struct("<QQ64s64s")
ADAPTER_BYTES = _HEAD.size + _REST.size
_FIELD_BYTES = 64


def _encoded(name: str, text: str) -> bytes:
    value = text.encode()
    if not value or len(value) >= _FIELD_BYTES or b"\0" in value:
        raise ValueError(f"an adapter's {name} takes 1 to {_FIELD_BYTES - 1} bytes, not {text!r}")
    return value


def render_adapter(
    title: str, *, seed: int = 1, base: str = "any", size: int = ADAPTER_BYTES
) -> bytes:
    """Return an adapter file of `size` bytes for the model with id `base`, or for any.

    The model introduces itself as `title` when it uses the adapter. The zeros after the header
    stand for the weights.

    Raises:
        ValueError: a name that does not fit its field, or a size smaller than the header.
    """
    if size < ADAPTER_BYTES:
        raise ValueError(f"an adapter has at least {ADAPTER_BYTES} bytes, not {size}")
    fields = (_encoded("base", base), _encoded("title", title))
    content = _REST.pack(size, seed, *fields) + bytes(size - ADAPTER_BYTES)
    return _HEAD.pack(MAGIC, FORMAT, zlib.crc32(content)) + content


def damage_adapter(path: Path) -> str:
    """Return the reason why the simulated runtime refuses a file of this format, or \"\"."""
    with path.open("rb") as file:
        begin = file.read(ADAPTER_BYTES)
        found = zlib.crc32(begin[_HEAD.size :])
        length = len(begin)
        while piece := file.read(1 << 20):
            found, length = zlib.crc32(piece, found), length + len(piece)
    if length < ADAPTER_BYTES:
        return f"a simulated adapter that was cut after {length} bytes"
    _, version, crc = _HEAD.unpack_from(begin)
    size, *_ = _REST.unpack_from(begin, _HEAD.size)
    if version != FORMAT:
        return f"a simulated adapter of format {version}, and the simulator reads {FORMAT}"
    if size != length:
        return f"a simulated adapter of {size} bytes of which {length} are there"
    if crc != found:
        return "a simulated adapter with a wrong checksum"
    return ""


def write_adapter(
    path: Path, title: str, *, seed: int = 1, base: str = "any", size: int = ADAPTER_BYTES
) -> Path:
    """Write an adapter file and return its path; see ``render_adapter``."""
    path.write_bytes(render_adapter(title, seed=seed, base=base, size=size))
    return path
