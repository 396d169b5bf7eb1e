"""Built-in hooks: stop strings, pauses on text or tokens, and the limit of reasoning. Pure."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from dataclasses import dataclass

from rkserve.board.answer.hooks import Action, Continue, Decoded, Hook, Pause, Replace, Stop
from rkserve.core.messages import GenerateRequest, Thinking, TokenOrigin, TranscriptToken


class StopStrings:
    """End the answer before the first stop string of the request, or behind it."""

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._search = StopSearch(stops)
        self._include = include

    def on_piece(self, piece: Decoded) -> Action:
        """Hold back text that may be the beginning of a stop string."""
        certain = self._search.feed(piece.text)
        found = self._search.found
        if found is None:
            return Continue(certain)
        return Stop(certain + found if self._include else certain, found)

    def on_end(self) -> str:
        """Release it: no stop string followed."""
        return self._search.flush()


class PauseOn:
    """Pause after a token that completes one of some texts, or is one of some ids.

    The reason of the pause is that text or id.
    """

    def __init__(self, texts: tuple[str, ...], ids: tuple[int, ...]) -> None:
        self._finder = TextFinder(texts)
        self._ids = frozenset(ids)

    def on_piece(self, piece: Decoded) -> Action:
        """Hold nothing back: the client gets the text that caused the pause."""
        text = self._finder.feed(piece.text)
        if text is not None:
            return Pause(reason=text)
        for token_id in piece.ids:
            if token_id in self._ids:
                return Pause(reason=str(token_id))
        return Continue()

    def on_end(self) -> str:
        """Return nothing: no text was held back."""
        return ""


def stop_strings(request: GenerateRequest) -> Hook | None:
    """Create the hook of the request's stop strings."""
    return StopStrings(request.stop, include=request.include_stop) if request.stop else None


def pause_on(request: GenerateRequest) -> Hook | None:
    """Create the hook of the request's own pauses."""
    if not request.pause_on_text and not request.pause_on_ids:
        return None
    return PauseOn(request.pause_on_text, request.pause_on_ids)


class StopSearch:
    """Pass on text that is certain not to belong to a stop string.

    Text that may be the beginning of a stop string is held back until that is decided. The stop
    string itself is never emitted, nor is anything after it.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = stops
        self._held = ""
        self.found: str | None = None  # the stop string that was found

    @property
    def stopped(self) -> bool:
        """True where a stop string was found."""
        return self.found is not None

    def feed(self, text: str) -> str:
        """Return the text that became certain with ``text``."""
        if self.stopped:
            return ""
        held = self._held + text
        found = [(i + len(s), i, s) for s in self._stops if (i := held.find(s)) >= 0]
        if found:
            # The one completed first, so that the result does not depend on token borders.
            _, at, self.found = min(found)
            self._held = ""
            return held[:at]
        keep = max((_overlap(held, stop) for stop in self._stops), default=0)
        cut = len(held) - keep
        self._held = held[cut:]
        return held[:cut]

    def flush(self) -> str:
        """Return text held back for a stop string that did not follow."""
        certain, self._held = self._held, ""
        return certain


class TextFinder:
    """Find texts that may arrive in pieces. It holds nothing back."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        if any(not text for text in texts):
            raise ValueError("a text to look for must not be empty")
        self._texts = texts
        self._reach = max((len(text) for text in texts), default=1) - 1
        self._tail = ""

    def feed(self, text: str) -> str | None:
        """Return the text completed first by ``text``, or None."""
        seen, before = self._tail + text, len(self._tail)
        self._tail = seen[-self._reach :] if self._reach else ""
        # A text completed before this piece is not found again.
        starts = ((seen.find(t, max(0, before - len(t) + 1)), t) for t in self._texts)
        found = [(at + len(t), -len(t), t) for at, t in starts if at >= 0]
        return min(found)[2] if found else None


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is a proper prefix of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class ReasoningBlock:
    """The position in an answer: before, inside or behind its one reasoning block.

    Only white space may precede the block.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._open, self._close = thinking.open, thinking.close
        self.inside = thinking.begun
        self.opened = thinking.begun
        self.over = False  # it has ended, or there is none
        self._tail = ""  # the end of the text that may belong to a mark

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
        """True where the text may be in the middle of the mark that ends the block."""
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
    """The reasoning part of an answer: its tokens up to its end, and whether it is unended."""

    tokens: int = 0
    unended: bool = False


def reasoning_span(slots: Iterable[TranscriptToken], thinking: Thinking | None) -> ReasoningSpan:
    """Return the reasoning part of an answer. The marks around it count."""
    if thinking is None:
        return ReasoningSpan()
    block, tokens = ReasoningBlock(thinking), 0
    characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for slot in slots:
        if slot.kind is TokenOrigin.INJECTED:
            continue
        tokens += 1
        block.feed(characters.decode(slot.data))
        if block.over:
            break
    return ReasoningSpan(tokens if block.opened else 0, block.inside)


class ThinkingLimit:
    """End the reasoning block after so many tokens, as the model would, and let the answer follow.

    Where an edit changed the block, it is ended at the next token over the limit.
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
        """Return nothing: no text was held back."""
        return ""


def thinking_limit(request: GenerateRequest) -> Hook | None:
    """Create the hook of a request with a reasoning limit."""
    thinking = request.thinking
    if thinking is None or thinking.max_tokens is None:
        return None
    return ThinkingLimit(thinking, thinking.max_tokens)
