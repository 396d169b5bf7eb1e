"""Detokenization as the library does it: a character is delivered whole, with its last token."""

from __future__ import annotations

import codecs

from rkserve.models.vocabulary import Vocabulary


class Detokenizer:
    """The text of one answer's tokens, by one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""

    @property
    def size(self) -> int:
        """The number of tokens; further columns of a row of logits are padding."""
        return len(self._vocabulary)

    def text_of(self, token_id: int) -> tuple[bytes, bool]:
        """Return the text of a token, and True if it is delayed to the next token."""
        self._held += self._vocabulary.said(token_id)
        self._decoder.reset()
        self._decoder.decode(self._held)
        if self._decoder.getstate()[0]:
            return b"", True
        said, self._held = self._held, b""
        return said, False
