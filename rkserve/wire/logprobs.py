"""Logprobs of answers in OpenAI's two forms; it knows which tokens count, and what they say.

A token that ends inside a character is written with its bytes as escapes: chats have the bytes
beside it, completions write ``bytes:`` before them, as OpenAI does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rkserve.messages import Delta, Kind
from rkserve.runvalues import Scored
from rkserve.vocabulary import Vocabulary
from rkserve.wire.jsonbody import JsonObject

Ids = tuple[int, ...]
Chosen = tuple[int, Scored | None]  # an id, and what the model gave it


@dataclass(frozen=True)
class Lexicon:
    """What the ids of an answer stand for, and its prompts, by choice.

    ``vocabulary`` of None cannot say: no logprobs were asked for, and the prompts have ``texts``.
    """

    vocabulary: Vocabulary | None
    prompts: tuple[Ids, ...]
    texts: tuple[str | None, ...] = ()

    def prompt_text(self, index: int) -> str:
        """The text of a choice's prompt: the client's own, or what its ids say."""
        text = self.texts[index] if self.texts else None
        if text is not None:
            return text
        known = self.vocabulary
        data = b"" if known is None else b"".join(known.said(one) for one in self.prompts[index])
        return data.decode(errors="replace")


def chat_logprobs(vocabulary: Vocabulary, chosen: Iterable[Chosen]) -> JsonObject:
    """Return ``logprobs`` of a choice of a chat."""
    return {
        "content": [
            {
                **_of_chat(vocabulary, token_id, scored.logprob),
                "top_logprobs": [_of_chat(vocabulary, *likely) for likely in scored.top],
            }
            for token_id, scored in chosen
            if scored is not None
        ],
        "refusal": None,
    }


def _of_chat(vocabulary: Vocabulary, token_id: int, logprob: float) -> JsonObject:
    data = vocabulary.piece(token_id)
    token = data.decode("utf-8", errors="backslashreplace")
    return {"token": token, "logprob": logprob, "bytes": list(data)}


@dataclass
class CompletionLog:
    """Turns tokens of one choice into ``logprobs`` of completions; it knows where each begins.

    ``offset`` is where the next one does, in characters. A token inside a character begins where
    that does.
    """

    vocabulary: Vocabulary
    offset: int = 0
    _open: bytes = field(default=b"", init=False)

    def of(self, chosen: Iterable[Chosen], *, top: int) -> JsonObject:
        """Return them for the next tokens; the first token of a prompt has no logprob."""
        told: JsonObject = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for token_id, scored in chosen:
            told["tokens"].append(self._token(token_id))
            told["token_logprobs"].append(None if scored is None else scored.logprob)
            told["top_logprobs"].append(self._top(token_id, scored, top))
            told["text_offset"].append(self.offset)
            self._advance(self.vocabulary.said(token_id))
        return told

    def _top(self, token_id: int, scored: Scored | None, top: int) -> JsonObject | None:
        if scored is None or top == 0:
            return None
        likeliest = {self._token(likely): logprob for likely, logprob in scored.top}
        # The chosen one is always among them, as OpenAI has it.
        return {**likeliest, self._token(token_id): scored.logprob}

    def _token(self, token_id: int) -> str:
        data = self.vocabulary.piece(token_id)
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
    """Return the tokens of a prompt, the first of which follows nothing."""
    return [(ids[0], None), *zip(ids[1:], scored, strict=True)]


class Choice:
    """The tokens of one choice as they come, and as edits and hooks leave them."""

    def __init__(self) -> None:
        self._slots: list[Chosen | None] = []  # None is context and not part of the answer
        self.prompt: tuple[Scored, ...] = ()

    def add(self, delta: Delta) -> None:
        """Take a delta."""
        if delta.prompt:
            self.prompt = delta.prompt
        if delta.splice is None:
            self._slots += chosen(delta)
            return
        self._slots[delta.splice.keep :] = [
            None if slot.kind is Kind.INJECTED else (slot.token_id, slot.scored)
            for slot in delta.splice.slots
        ]

    @property
    def chosen(self) -> list[Chosen]:
        """The tokens of the answer."""
        return [one for one in self._slots if one is not None]

    @property
    def mean(self) -> float:
        """The mean logprob of a token, by which answers are ranked."""
        found = [scored.logprob for _, scored in self.chosen if scored is not None]
        return sum(found) / len(found) if found else float("-inf")


def chosen(delta: Delta) -> list[Chosen]:
    """Return the new tokens of a delta."""
    logprobs: Sequence[Scored | None] = delta.logprobs or [None] * len(delta.token_ids)
    return list(zip(delta.token_ids, logprobs, strict=True))
