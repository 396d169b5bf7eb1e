"""The bytes of a model's token IDs, from its folder's tokenizer.json. It encodes nothing.

A token may end inside a character, so this reads the vocabulary itself instead of decoded text. It
supports the two ways in which vocabularies write bytes, and refuses any other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkserve.core.errors import ConfigError

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_BLANK = "\u2581"  # SentencePiece's character for a space


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

    def said(self, token_id: int) -> bytes:
        """Return the bytes that an ID adds to a text."""
        return b"" if token_id in self.special else self.piece(token_id)


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
    return piece.replace(_BLANK, " ").encode()
