"""Tokens to text as the library would give it: a character comes whole, with its last token."""

from __future__ import annotations

import codecs

from rkserve.models.vocabulary import Vocabulary


class Detokenizer:
    """What is said with the tokens of one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""

    @property
    def size(self) -> int:
        """How many tokens there are: what a row of logits has beyond stands for nothing."""
        return len(self._vocabulary)

    def say(self, token_id: int) -> tuple[bytes, bool]:
        """Return the text of a token, and whether it waits for that of the next one."""
        self._held += self._vocabulary.said(token_id)
        self._decoder.reset()
        self._decoder.decode(self._held)
        if self._decoder.getstate()[0]:
            return b"", True
        said, self._held = self._held, b""
        return said, False
