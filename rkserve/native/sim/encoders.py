"""The files of the simulated image encoder, and what it makes of pixels: the Python side of
rknn/rknnsim.c.

It knows the format and the arithmetic, so that a test knows beforehand what an image becomes. It
refuses to know about contexts and structs.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

MAGIC, FORMAT = b"RKSIMRKN", 1
HEADER = struct.Struct("<8s7I16s")
_64_BITS = (1 << 64) - 1


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
        file.write_bytes(HEADER.pack(MAGIC, FORMAT, *sizes, self.platform.encode()))

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


def _spread(value: int) -> int:
    """The finish of splitmix64, as in digest.c."""
    value = (value + 0x9E3779B97F4A7C15) & _64_BITS
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _64_BITS
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _64_BITS
    return value ^ value >> 31
