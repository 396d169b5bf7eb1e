"""Log-probabilities of answers in OpenAI's two forms.

A token that ends inside a character is written as escaped bytes: chats have the bytes beside it,
completions write ``bytes:`` before them, as OpenAI does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile

from typing_extensions import TypedDict

from rkserve.api.json.fields import JsonObject
from rkserve.core.messages import Delta, TokenOrigin
from rkserve.core.run_params import Scored
from rkserve.models.files import Vocabulary

Ids = tuple[int, ...]
Chosen = tuple[int, Scored | None]  # an ID, and its log-probability


class TokenLogprob(TypedDict):
    """A token with its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChosenLogprob(TokenLogprob):
    """A token of an answer, and the likeliest ones in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(TypedDict):
    """Log-probabilities in the form of chats."""

    content: list[ChosenLogprob]
    refusal: None


class CompletionLogprobLists(TypedDict):
    """Log-probabilities in the form of completions."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@dataclass(frozen=True)
class TokenTexts:
    """The texts of an answer's token IDs, and its prompts by choice.

    ``vocabulary`` is None if no log-probabilities were requested; then the prompts have ``texts``.
    Tokens in ``hidden`` end answers unseen, so their log-probabilities are not listed. With
    ``as_ids`` tokens are named ``token_id:<id>``.
    """

    vocabulary: Vocabulary | None
    prompts: tuple[Ids, ...]
    texts: tuple[str | None, ...] = ()
    hidden: frozenset[int] = frozenset()
    as_ids: bool = False

    @property
    def known(self) -> Vocabulary:
        """The vocabulary of an answer with log-probabilities, which is always there."""
        assert self.vocabulary is not None
        return self.vocabulary

    def seen(self, chosen: Iterable[Chosen]) -> list[Chosen]:
        """Return the tokens of an answer whose log-probabilities are listed."""
        return [one for one in chosen if one[0] not in self.hidden]

    def prompt_text(self, index: int) -> str:
        """Return the text of a choice's prompt: the client's own, or that of its IDs."""
        text = self.texts[index] if self.texts else None
        if text is not None:
            return text
        known = self.vocabulary
        data = (
            b"" if known is None else b"".join(known.bytes_of(one) for one in self.prompts[index])
        )
        return data.decode(errors="replace")


def chat_logprobs(lexicon: TokenTexts, chosen: Iterable[Chosen]) -> JsonObject:
    """Return ``logprobs`` of a choice of a chat."""
    return {
        "content": [
            {
                **_of_chat(lexicon, token_id, scored.logprob),
                "top_logprobs": [_of_chat(lexicon, *likely) for likely in scored.top],
            }
            for token_id, scored in lexicon.seen(chosen)
            if scored is not None
        ],
        "refusal": None,
    }


def _of_chat(lexicon: TokenTexts, token_id: int, logprob: float) -> JsonObject:
    data = lexicon.known.piece(token_id)
    token = data.decode("utf-8", errors="backslashreplace")
    if lexicon.as_ids:
        token = id_name(token_id)
    return {"token": token, "logprob": logprob, "bytes": list(data)}


def id_name(token_id: int) -> str:
    """Return the name of a token in vLLM's ``return_tokens_as_token_ids``."""
    return f"token_id:{token_id}"


@dataclass
class CompletionLog:
    """Turns tokens of one choice into ``logprobs`` of completions, with their offsets.

    ``offset`` is that of the next token, in characters. A token inside a character has the offset
    of the character.
    """

    lexicon: TokenTexts
    offset: int = 0
    _open: bytes = field(default=b"", init=False)

    def of(self, chosen: Iterable[Chosen], *, top: int) -> JsonObject:
        """Return ``logprobs`` of the next tokens; the first token of a prompt has none."""
        result: JsonObject = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, scored in chosen:
            result["tokens"].append(self._token(token_id))
            result["token_logprobs"].append(None if scored is None else scored.logprob)
            result["top_logprobs"].append(self._top(token_id, scored, top))
            result["text_offset"].append(self.offset)
            self._advance(self.lexicon.known.bytes_of(token_id))
        return result

    def _top(self, token_id: int, scored: Scored | None, top: int) -> JsonObject | None:
        if scored is None or top == 0:
            return None
        likeliest = {self._token(likely): logprob for likely, logprob in scored.top}
        # As in OpenAI's API, the chosen token is always among them.
        return {**likeliest, self._token(token_id): scored.logprob}

    def _token(self, token_id: int) -> str:
        if self.lexicon.as_ids:
            return id_name(token_id)
        data = self.lexicon.known.piece(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def _advance(self, data: bytes) -> None:
        self._open += data
        try:
            self.offset += len(self._open.decode())
        except UnicodeDecodeError as exc:
            if exc.reason == "unexpected end of data" and exc.end == len(self._open):
                self.offset += len(self._open[: exc.start].decode())
                self._open = self._open[exc.start :]
                return
            self.offset += len(self._open.decode(errors="replace"))
        self._open = b""


def of_prompt(ids: Ids, scored: Sequence[Scored]) -> list[Chosen]:
    """Return ``logprobs`` of a prompt, of which the first token has none."""
    return [(ids[0], None), *zip(ids[1:], scored, strict=True)]


class ChoiceTokens:
    """The tokens of one choice, after edits and hooks.

    A stream takes the new ones with ``news``.
    """

    def __init__(self) -> None:
        self._slots: list[Chosen | None] = []  # None is context and not part of the answer
        self._unsent: list[Chosen] = []
        self._void = 0  # sent tokens that are no longer part of the answer
        self.prompt: tuple[Scored, ...] = ()

    def add(self, delta: Delta) -> None:
        """Take a delta."""
        if delta.prompt:
            self.prompt = delta.prompt
        if delta.splice is None:
            new = chosen(delta)
            self._slots += new
            self._unsent += new
            return
        before = self.chosen
        self._slots[delta.splice.keep :] = [
            None if slot.kind is TokenOrigin.INJECTED else (slot.token_id, slot.scored)
            for slot in delta.splice.slots
        ]
        sent, after = len(before) - len(self._unsent), self.chosen
        pairs = zip(before[:sent], after, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        self._void += sent - same
        self._unsent = after[same:]

    def news(self) -> tuple[list[Chosen], int]:
        """Return the unsent tokens, and the number of sent ones that are retracted."""
        found = self._unsent, self._void
        self._unsent, self._void = [], 0
        return found

    @property
    def last(self) -> int | None:
        """The id of the last token of the answer."""
        return next((one[0] for one in reversed(self._slots) if one is not None), None)

    @property
    def chosen(self) -> list[Chosen]:
        """The tokens of the answer."""
        return [one for one in self._slots if one is not None]

    @property
    def mean(self) -> float:
        """The mean log-probability of a token, by which answers are ranked."""
        found = [scored.logprob for _, scored in self.chosen if scored is not None]
        return sum(found) / len(found) if found else float("-inf")


def chosen(delta: Delta) -> list[Chosen]:
    """Return the new tokens of a delta."""
    logprobs: Sequence[Scored | None] = delta.logprobs or [None] * len(delta.token_ids)
    return list(zip(delta.token_ids, logprobs, strict=True))


class SpecialTokens:
    """Inserts the names of special tokens into the text of one choice, as the runtime omits them.

    Retracted text takes the names in it along.
    """

    def __init__(self, vocabulary: Vocabulary, ends: frozenset[int]) -> None:
        """A token in ``ends`` is named at the end only: see ``tail``."""
        self._vocabulary, self._ends = vocabulary, ends
        self._length = 0  # of the text from the boards
        self._names: list[tuple[int, int]] = []  # offset and length in that text

    def named(self, delta: Delta) -> Delta:
        """Return a delta with these names in its text."""
        void = 0
        if delta.retract:
            self._length -= delta.retract
            while self._names and self._names[-1][0] > self._length:
                void += self._names.pop()[1]
        text = "".join(self._pieces(delta))
        return replace(delta, text=text, retract=delta.retract + void)

    def tail(self, token_id: int | None) -> str:
        """Return the name of the token that ended the answer; empty if its text is there."""
        return self._name(token_id) if token_id is not None and token_id in self._ends else ""

    def _pieces(self, delta: Delta) -> Iterable[str]:
        at = 0
        for token_id, length in self._parts(delta):
            yield delta.text[at : at + length]
            at, self._length = at + length, self._length + length
            if not length and token_id not in self._ends and (name := self._name(token_id)):
                self._names.append((self._length, len(name)))
                yield name
        yield delta.text[at:]
        self._length += len(delta.text) - at

    def _parts(self, delta: Delta) -> list[tuple[int, int]]:
        """Return IDs with the lengths of their texts, as far as these are known."""
        if delta.splice is None:
            return list(zip(delta.token_ids, delta.parts, strict=True))
        slots = [one for one in delta.splice.slots if one.kind is TokenOrigin.GENERATED]
        texts = [one.data.decode(errors="replace") for one in slots]
        if "".join(texts) == delta.text:
            pairs = zip(slots, texts, strict=True)
            return [(slot.token_id, len(text)) for slot, text in pairs]
        # Text is held back or changed, so the names follow the text that is certain.
        first = [(-1, len(delta.text))]
        return first + [(token_id, 0) for token_id in delta.token_ids]

    def _name(self, token_id: int) -> str:
        if token_id not in self._vocabulary.special:
            return ""
        return self._vocabulary.piece(token_id).decode(errors="replace")
