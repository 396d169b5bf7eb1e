"""Text to token ids by the model folder's tokenizer.json; it knows no roles and no templates."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from rkserve.errors import ConfigError, RequestError


class Tokenizer:
    """A read-only tokenizer; one serves any number of threads.

    ``added`` are the texts of tokens beside the learned ones, and ``control`` those of the special
    ones among them. ``encode`` reads them as control tokens
    wherever they stand; ``literal`` never does.
    """

    def __init__(self, file: Path) -> None:
        try:
            self._hf = tokenizers.Tokenizer.from_file(str(file))
        except Exception as exc:  # the library raises plain Exception
            raise ConfigError(f"{file} is not a tokenizer that can be read: {exc}") from exc
        # Both belong to training; left on they would cut or stretch prompts in silence.
        self._hf.no_truncation()
        self._hf.no_padding()
        self.vocab_size: int = self._hf.get_vocab_size(with_added_tokens=True)
        added = self._hf.get_added_tokens_decoder()
        special = {i: t for i, t in added.items() if t.special}
        self.added = frozenset(token.content for token in added.values())
        self.control = frozenset(token.content for token in special.values())
        self._control_ids = frozenset(special)
        self._spelled: dict[str, tuple[int, ...]] = {}
        self._anchor = self._plain("a")
        self._limit = max(self._hf.get_vocab().values(), default=-1)

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the ids of a text.

        ``add_special_tokens`` lets the tokenizer add what its own post-processor says, a BOS for
        some models; a chat template writes its own instead.
        """
        # The batch call lets other threads run; encode() holds the interpreter's lock, and with it
        # all streams of this process, for up to two seconds per megabyte.
        (one,) = self._hf.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(one.ids)

    def literal(self, text: str) -> tuple[int, ...]:
        """Return ids that spell the text of a control token without being one.

        A marker that is cut after its first character is no marker. Where a piece is a control
        token itself, the text is spelled one character at a time, and a character that has no
        other spelling is left out.
        """
        # Kept, because a client may send a hundred thousand of them; control tokens are few.
        if text not in self._spelled:
            self._spelled[text] = self._spell(text)
        return self._spelled[text]

    def check(self, ids: Sequence[int], path: str) -> None:
        """Hold a client's token ids to the vocabulary.

        Raises:
            RequestError: naming the first id that is no token.
        """
        for index, token_id in enumerate(ids):
            self.check_one(token_id, f"{path}[{index}]")

    def check_one(self, token_id: int, path: str) -> None:
        """Hold one token id to the vocabulary. Raises ``RequestError``."""
        # The bounds first: the library takes 32 bits and raises its own error beyond.
        if not 0 <= token_id <= self._limit or self._hf.id_to_token(token_id) is None:
            raise RequestError(
                f"Invalid '{path}': {str(token_id)[:24]} is not a token id of this model, whose "
                f"vocabulary has {self.vocab_size} tokens.",
                path,
            )

    def text(self, ids: Sequence[int]) -> str:
        """Return what token ids say in the middle of a text; control tokens say nothing."""
        # Some decoders take the first token's blank for the beginning of a text and drop it.
        before = self._hf.decode(list(self._anchor), skip_special_tokens=True)
        whole = self._hf.decode([*self._anchor, *ids], skip_special_tokens=True)
        return str(whole[len(before) :])

    def whole_text(self, ids: Sequence[int]) -> str:
        """Return what token ids say as a text of their own; control tokens say their names."""
        return str(self._hf.decode(list(ids), skip_special_tokens=False))

    def strings(self, ids: Sequence[int]) -> list[str]:
        """Return how the vocabulary spells each token."""
        return [self._hf.id_to_token(token_id) or "" for token_id in ids]

    def _spell(self, text: str) -> tuple[int, ...]:
        ids = self._plain(text[:1]) + self._plain(text[1:])
        if self._control_ids.isdisjoint(ids):
            return ids
        each = (self._plain(character) for character in text)
        return tuple(i for ids in each for i in ids if i not in self._control_ids)

    def _plain(self, text: str) -> tuple[int, ...]:
        return self.encode(text, add_special_tokens=False)
