"""The tokenizer of a model folder's tokenizer.json, and control tokens in clients' texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers

from rkserve.api.json.fields import CHARS_PER_TOKEN, JsonText
from rkserve.core.errors import ConfigError, RequestError

# The library takes some 500 bytes for each character of a text, so that a long one is measured in
# slices before it is tokenized as a whole.
SLICE_CHARS = 16384
# Tokens that a cut may make of one, and by which a measure is too high: more than it ever is.
_CUT_TOKENS = 16


class Tokenizer:
    """A read-only, thread-safe tokenizer.

    ``added`` holds the texts of added tokens, and ``control`` those of the special ones among them.
    ``encode`` reads these as control tokens at any position; ``literal`` never does. No token has
    more than ``longest`` characters.
    """

    def __init__(self, file: Path) -> None:
        try:
            self._hf = tokenizers.Tokenizer.from_file(str(file))
        except Exception as exc:  # the library raises plain Exception
            raise ConfigError(f"{file} is not a tokenizer that can be read: {exc}") from exc
        # Both belong to training; they would truncate or pad prompts silently.
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
        vocabulary = self._hf.get_vocab()
        self._limit = max(vocabulary.values(), default=-1)
        self.longest = CHARS_PER_TOKEN
        if self._keeps_characters(added.values()):
            # Composition makes one character of at most two for each byte.
            self.longest = min(CHARS_PER_TOKEN, 2 * max(map(len, vocabulary), default=1))

    def _keeps_characters(self, added: Iterable[tokenizers.AddedToken]) -> bool:
        """Return whether a token stands for no more characters than it has bytes, or twice that.

        Where text is dropped or replaced on its way to tokens, nothing bounds what one stands for.
        """
        model, normalizer = self._hf.model, self._hf.normalizer
        return (
            isinstance(model, models.BPE)
            and not model.fuse_unk
            and isinstance(self._hf.decoder, decoders.ByteLevel)
            and (normalizer is None or isinstance(normalizer, normalizers.NFC))
            and not any(token.lstrip or token.rstrip for token in added)
        )

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Return the ids of a text.

        ``add_special_tokens`` lets the tokenizer add what its own post-processor says, a BOS for
        some models; a chat template writes its own instead.
        """
        # The batch call lets other threads run; encode() holds the interpreter's lock, and with it
        # all streams of this process, for up to two seconds per megabyte.
        (one,) = self._hf.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(one.ids)

    def beginning(self, text: str, tokens: int) -> tuple[str, int]:
        """Return a prefix of a text with at least so many tokens, and a lower bound of its tokens.

        It is the whole text if that may be shorter. Short texts are not measured.
        """
        if len(text) <= SLICE_CHARS:
            return text, 0
        found = 0
        for start in range(0, len(text), SLICE_CHARS):
            end = start + SLICE_CHARS
            # A cut between a letter and a blank adds nothing; any other one a few.
            ids = self.encode(text[start:end], add_special_tokens=False)
            found += max(0, len(ids) - _CUT_TOKENS)
            if found >= tokens:
                return text[:end], found
        return text, found

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
        """Check a client's token IDs against the vocabulary.

        Raises ``RequestError``: naming the first invalid ID.
        """
        for index, token_id in enumerate(ids):
            self.check_one(token_id, f"{path}[{index}]")

    def check_one(self, token_id: int, path: str) -> None:
        """Check one token ID against the vocabulary. Raises ``RequestError``."""
        # The bounds first: the library takes 32 bits and raises its own error beyond.
        if not 0 <= token_id <= self._limit or self._hf.id_to_token(token_id) is None:
            raise RequestError(
                f"Invalid '{path}': {str(token_id)[:24]} is not a token id of this model, whose "
                f"vocabulary has {self.vocab_size} tokens.",
                path,
            )

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of token IDs in the middle of a text, without control tokens."""
        # Some decoders take the first token's blank for the beginning of a text and drop it.
        before = self._hf.decode(list(self._anchor), skip_special_tokens=True)
        whole = self._hf.decode([*self._anchor, *ids], skip_special_tokens=True)
        return str(whole[len(before) :])

    def whole_text(self, ids: Sequence[int]) -> str:
        """Return the text of token IDs; control tokens are written by name."""
        return str(self._hf.decode(list(ids), skip_special_tokens=False))

    def strings(self, ids: Sequence[int]) -> list[str]:
        """Return the vocabulary's spelling of each token."""
        return [self._hf.id_to_token(token_id) or "" for token_id in ids]

    def _spell(self, text: str) -> tuple[int, ...]:
        ids = self._plain(text[:1]) + self._plain(text[1:])
        if self._control_ids.isdisjoint(ids):
            return ids
        each = (self._plain(character) for character in text)
        return tuple(i for ids in each for i in ids if i not in self._control_ids)

    def _plain(self, text: str) -> tuple[int, ...]:
        return self.encode(text, add_special_tokens=False)


# Unicode noncharacters, which no interchanged text has. A client's own are treated as markers.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
VERBATIM = "\ufdd3"  # a template's own stand-in for JSON text that it prints as it came
LEFT_OFF = "\ufdd2"  # in place of the cut in an assistant's turn
IMAGE = "\ufdd4"  # around the number of an image
_STAND_IN = re.compile(f"{_OPEN}([0-9]+){_CLOSE}")


class PromptSegment(NamedTuple):
    """A segment of a rendered prompt. ``typed``: a marker that a client wrote."""

    text: str
    typed: bool


class ControlTokenGuard:
    """Replaces the markers of one model in clients' text."""

    def __init__(self, markers: Iterable[str]) -> None:
        self.markers = frozenset(markers)
        # Longest first: a marker may begin with another.
        names = sorted(
            {*self.markers, _OPEN, _CLOSE, LEFT_OFF, VERBATIM, IMAGE},
            key=lambda name: (-len(name), name),
        )
        self._found = re.compile("|".join(map(re.escape, names)))

    def hide(self, value: Any, typed: list[str]) -> Any:
        """Return a JSON value with stand-ins for its markers, which are appended to ``typed``."""
        if isinstance(value, str):
            return self._found.sub(lambda found: _stand_in(found[0], typed), value)
        if isinstance(value, JsonText):
            items = {self.hide(key, typed): self.hide(item, typed) for key, item in value.items()}
            return JsonText(items, self.hide(value.text, typed))
        if isinstance(value, dict):
            return {self.hide(key, typed): self.hide(item, typed) for key, item in value.items()}
        if isinstance(value, list):
            return [self.hide(item, typed) for item in value]
        return value


def pieces(rendered: str, typed: list[str]) -> Iterator[PromptSegment]:
    """Cut a rendered prompt at its stand-ins, in order and without empty pieces."""
    for index, part in enumerate(_STAND_IN.split(rendered)):
        if index % 2:  # the groups of the pattern: numbers of stand-ins
            yield PromptSegment(typed[int(part)], typed=True)
        elif part:
            yield PromptSegment(part, typed=False)


def _stand_in(marker: str, typed: list[str]) -> str:
    typed.append(marker)
    return f"{_OPEN}{len(typed) - 1}{_CLOSE}"
