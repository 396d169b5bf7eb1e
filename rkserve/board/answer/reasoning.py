"""What a model thinks before it answers, as its board sees it: marks in an answer's text. Pure.

It knows where the block begins and ends, counts its tokens, and ends it where it gets too long.
What a client is shown of it is not decided here: a board gives out an answer as the model says it.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass

from rkserve.board.answer.hooks import Action, Continue, Decoded, Hook, Replace
from rkserve.core.messages import GenerateRequest, Kind, Slot, Thinking


class ReasoningBlock:
    """Where an answer is: before, inside or behind its one block of thoughts.

    White space may come before the block, and nothing else.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._open, self._close = thinking.open, thinking.close
        self.inside = thinking.begun
        self.opened = thinking.begun
        self.over = False  # it has ended, or none has begun
        self._tail = ""  # of the text, as far as it may belong to a mark

    def feed(self, text: str) -> None:
        """Take more of the answer."""
        if self.over:
            return
        self._tail += text
        if not self.inside:
            self._begin()
        if self.inside:
            closed = self._close in self._tail
            self._tail = self._tail[-(len(self._close) - 1) :] if len(self._close) > 1 else ""
            self.inside, self.over = not closed, closed

    @property
    def closing(self) -> bool:
        """Whether it may be in the middle of the mark that ends the block."""
        return any(self._close.startswith(self._tail[at:]) for at in range(len(self._tail)))

    def _begin(self) -> None:
        said = self._tail.lstrip()
        if said.startswith(self._open):
            self.inside = self.opened = True
            self._tail = said[len(self._open) :]
        else:
            self.over = not self._open.startswith(said)


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """The thoughts in an answer: its tokens up to their end, and whether that has come."""

    tokens: int = 0
    unended: bool = False


def reasoning_span(slots: Iterable[Slot], thinking: Thinking | None) -> ReasoningSpan:
    """Return what an answer has of thoughts. The marks around them count."""
    if thinking is None:
        return ReasoningSpan()
    block, tokens = ReasoningBlock(thinking), 0
    characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for slot in slots:
        if slot.kind is Kind.INJECTED:
            continue
        tokens += 1
        block.feed(characters.decode(slot.data))
        if block.over:
            break
    return ReasoningSpan(tokens if block.opened else 0, block.inside)


class ThinkingLimit:
    """Ends the block after so many tokens, as if the model had done so, and lets the answer go on.

    Where an edit has changed the block, it is ended at the next token that is too many.
    """

    def __init__(self, thinking: Thinking, most: int) -> None:
        self._thinking, self._most = thinking, most
        self._block = ReasoningBlock(thinking)
        self._tokens = 0

    def on_piece(self, piece: Decoded) -> Action:
        """Count a piece inside the block."""
        counts = self._block.inside
        self._block.feed(piece.text)
        if not self._block.inside:
            return Continue()
        self._tokens += len(piece.ids) if counts else 0
        if self._tokens < self._most or piece.replayed or self._block.closing:
            return Continue()
        return Replace(
            (*piece.ids, *self._thinking.closing_ids),
            piece.text + self._thinking.closing,
            last=len(piece.ids),
        )

    def on_end(self) -> str:
        """Nothing was held back."""
        return ""


def thinking_limit(request: GenerateRequest) -> Hook | None:
    """Make the hook of a request whose thinking is limited."""
    thinking = request.thinking
    if thinking is None or thinking.max_tokens is None:
        return None
    return ThinkingLimit(thinking, thinking.max_tokens)
