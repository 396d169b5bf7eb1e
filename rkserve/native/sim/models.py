"""Files for the simulated runtime, and its arithmetic on embeddings and images, in Python.

Files are base weights that give other answers, LoRA adapters, and image encoders. The arithmetic
repeats embed.c, media.c and rknn/rknnsim.c: a test computes with it the embedding of a token id,
the rows that the simulated image encoder makes of pixels, and the four letters that the simulated
model sees in these rows. It knows no handles and no structs.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rkserve.models.files import SIM_FORMAT, SIM_HEADER, SIM_MAGIC

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


# Flags of a piece, as in enum piece_flag of rksim.h.
PIECE_SPECIAL, PIECE_MARKER, PIECE_SILENT = 1, 2, 4
Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class SimModel:
    """A simulated model before it is written.

    ``pieces`` are the bytes and flags of each id, ``bank`` the ids of each sentence after a space
    and at the start of a line, ``strings`` the texts of strings.txt. ``markers`` are the ids of
    the start and the end of a turn, of the end of a text, of a silent token, and of the end of a
    thought.
    """

    model_id: str
    profile: str
    toolkit: str
    dtype: str
    max_context: int
    memory_mb: int
    load_ms: int
    pieces: Sequence[tuple[bytes, int]]
    bank: Sequence[tuple[Ids, Ids]]
    strings: Sequence[str]
    markers: tuple[int, int, int, int, int]
    npu_cores: int = 3

    def render(self) -> bytes:
        """Return the file: header, pieces, bank, strings, then what they point at."""
        strings = b"".join(line.encode() + b"\0" for line in self.strings)
        pieces_at = SIM_HEADER.size
        bank_at = pieces_at + 8 * len(self.pieces)
        ids_at = bank_at + 8 * len(self.bank)
        strings_at = ids_at + 4 * sum(len(spaced) + len(bare) for spaced, bare in self.bank)
        bytes_at = strings_at + len(strings)
        table, blob, sentences, ids = bytearray(), bytearray(), bytearray(), bytearray()
        for piece, flags in self.pieces:
            table += struct.pack("<IHH", bytes_at + len(blob), len(piece), flags)
            blob += piece
        for spaced, bare in self.bank:
            sentences += struct.pack("<IHH", ids_at + len(ids), len(spaced), len(bare))
            ids += struct.pack(f"<{len(spaced) + len(bare)}i", *spaced, *bare)
        header = SIM_HEADER.pack(
            SIM_MAGIC,
            SIM_FORMAT,
            bytes_at + len(blob),
            *(_field(self.model_id, 64), b"any", _field(self.profile, 64)),
            *(_field(self.toolkit, 16), _field(self.dtype, 16)),
            *(self.max_context, self.npu_cores, self.memory_mb, self.load_ms),
            *(len(self.pieces), pieces_at, len(self.bank), bank_at, strings_at, len(strings)),
            *self.markers,
        )
        return bytes(header + table + sentences + ids + strings + blob)


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


def write_adapter(
    path: Path, title: str, *, seed: int = 1, base: str = "any", size: int = ADAPTER_BYTES
) -> Path:
    """Write an adapter file and return its path; see ``render_adapter``."""
    path.write_bytes(render_adapter(title, seed=seed, base=base, size=size))
    return path


EMBED_DIM = 64  # floats of a row: SIM_EMBED_DIM in rksim.h
CROSS_DIM = 128  # floats of a key or a value per token: SIM_CROSS_DIM in addons.h
_ROW = struct.Struct(f"<{EMBED_DIM}f")
_64_BITS = (1 << 64) - 1


def _spread(value: int) -> int:
    """The finish of splitmix64, as in digest.c."""
    value = (value + 0x9E3779B97F4A7C15) & _64_BITS
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _64_BITS
    return value ^ value >> 31


@functools.cache
def embedding(token_id: int) -> bytes:
    """The embedding of a token: `EMBED_DIM` floats, as bytes."""
    bits = (_spread(token_id * EMBED_DIM + at) >> 40 for at in range(1, EMBED_DIM))
    return _ROW.pack((token_id + 1) / 2**20, *(value / 2**23 - 1 for value in bits))


def embeddings(token_ids: Iterable[int]) -> bytes:
    """The embeddings of several tokens, one after another."""
    return b"".join(embedding(token_id) for token_id in token_ids)


def rows(floats: Sequence[float]) -> bytes:
    """Floats as the bytes of rows.

    Raises:
        ValueError: they do not make whole rows.
    """
    if len(floats) % EMBED_DIM:
        raise ValueError(f"{len(floats)} floats do not make whole rows of {EMBED_DIM}")
    return struct.pack(f"<{len(floats)}f", *floats)


def pattern(picture: bytes) -> str:
    """The four letters that the simulator sees in the rows of one picture or video."""
    digest = 0
    for at in range(0, len(picture), _ROW.size):
        row = _spread(zlib.crc32(picture[at : at + _ROW.size]))
        digest = _spread(digest ^ (row & ~7))
    letters = ""
    for _ in range(4):
        digest, letter = divmod(digest, 26)
        letters += chr(ord("A") + letter)
    return letters


ENCODER_MAGIC, ENCODER_FORMAT = b"RKSIMRKN", 1
ENCODER_HEADER = struct.Struct("<8s7I16s")


@dataclass(frozen=True, slots=True)
class SimEncoder:
    """One simulated encoder: a token for each patch of a square grid, row by row.

    ``encode_ms`` is multiplied by the time scale of the simulated board.
    """

    width: int
    height: int
    tokens: int
    embed: int = 64  # floats of a row, as the simulated language model takes them
    n_output: int = 1
    encode_ms: int = 0
    platform: str = "any"

    def write(self, file: Path) -> None:
        """Write the model's file."""
        sizes = (self.width, self.height, self.tokens, self.embed, self.n_output, self.encode_ms)
        file.write_bytes(
            ENCODER_HEADER.pack(ENCODER_MAGIC, ENCODER_FORMAT, *sizes, self.platform.encode())
        )

    def encoded(self, pixels: bytes) -> bytes:
        """Return the rows of an image: float32, the outputs of each token one after another."""
        rows = bytearray()
        for token in range(self.tokens):
            digest = self._patch(pixels, token)
            values = [
                (_spread(digest ^ _spread(output * 65536 + at)) >> 40) / 8388608 - 1
                for output in range(self.n_output)
                for at in range(self.embed)
            ]
            rows += struct.pack(f"<{len(values)}f", *values)
        return bytes(rows)

    def _patch(self, pixels: bytes, token: int) -> int:
        side = 1
        while side * side < self.tokens:
            side += 1
        row, column = divmod(token, side)
        digest = token
        for y in range(row * self.height // side, (row + 1) * self.height // side):
            first = column * self.width // side
            for x in range(first, (column + 1) * self.width // side):
                at = 3 * (y * self.width + x)
                digest = _spread(digest ^ int.from_bytes(pixels[at : at + 3], "little"))
        return digest
