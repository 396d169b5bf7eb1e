"""What the simulated runtime makes of embeddings: the Python side of embed.c and media.c.

It knows the embedding of a token id and the four letters that the simulator sees in a picture, so
that a caller can feed text as EMBED input, answer the embedding callback, and know beforehand what
will be said about a picture. It refuses to know about handles and structs.
"""

from __future__ import annotations

import functools
import struct
import zlib
from collections.abc import Iterable, Sequence

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
