"""The simulator's arithmetic on embeddings and images, in Python.

It repeats embed.c, media.c and rknn/rknnsim.c: a test computes with it the embedding of a token id,
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
