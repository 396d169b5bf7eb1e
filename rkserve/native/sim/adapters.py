"""LoRA adapters for the simulated runtime: files that load as the vendor's would.

It knows the format (docs/reference/simulator.md). It refuses to know what an adapter does to the
answers: that is in the simulator, and hangs on the seed, the title and the scale that it is loaded
with.
scripts/make_sim_chat.py --adapter writes one from the command line.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

MAGIC = b"RKSIMLRA"
FORMAT = 1
_HEAD = struct.Struct("<8sII")
_REST = struct.Struct("<QQ64s64s")
HEADER_BYTES = _HEAD.size + _REST.size
_FIELD_BYTES = 64


def _field(name: str, text: str) -> bytes:
    value = text.encode()
    if not value or len(value) >= _FIELD_BYTES or b"\0" in value:
        raise ValueError(f"an adapter's {name} takes 1 to {_FIELD_BYTES - 1} bytes, not {text!r}")
    return value


def render(title: str, *, seed: int = 1, base: str = "any", size: int = HEADER_BYTES) -> bytes:
    """Return an adapter file of `size` bytes for the model with id `base`, or for any.

    The model introduces itself as `title` when it uses the adapter. The zeros after the header
    stand for the weights.

    Raises:
        ValueError: a name that does not fit its field, or a size smaller than the header.
    """
    if size < HEADER_BYTES:
        raise ValueError(f"an adapter has at least {HEADER_BYTES} bytes, not {size}")
    fields = (_field("base", base), _field("title", title))
    content = _REST.pack(size, seed, *fields) + bytes(size - HEADER_BYTES)
    return _HEAD.pack(MAGIC, FORMAT, zlib.crc32(content)) + content


def damage(path: Path) -> str:
    """Return the reason why the simulated runtime refuses a file of this format, or \"\"."""
    with path.open("rb") as file:
        begin = file.read(HEADER_BYTES)
        found = zlib.crc32(begin[_HEAD.size :])
        length = len(begin)
        while piece := file.read(1 << 20):
            found, length = zlib.crc32(piece, found), length + len(piece)
    if length < HEADER_BYTES:
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


def write(
    path: Path, title: str, *, seed: int = 1, base: str = "any", size: int = HEADER_BYTES
) -> Path:
    """Write an adapter file and return its path; see ``render``."""
    path.write_bytes(render(title, seed=seed, base=base, size=size))
    return path
