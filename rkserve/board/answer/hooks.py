"""Intervention hooks: what may look at an answer while it grows, and change its course. Pure.

A hook sees each piece of text as it is decoded and says what is to happen; it knows no run and no
engine. Hooks form a chain: each gets what the one before it shows. They are called on the path of
every token, in the loop that serves all clients of the board, so a hook must be quick: no waiting,
no network, no work that grows with the answer at every piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rkserve.board.answer.stop_strings import StopSearch, TextFinder
from rkserve.core.messages import GenerateRequest


@dataclass(frozen=True, slots=True)
class Decoded:
    """One piece of the answer: a token, or several that have their text together.

    Several are the tokens of one character, and the words that an edit or a ``Replace`` put in.
    ``ids`` is empty for the text that the hook before held back until the end. ``index`` counts
    the answer's tokens, from 0, up to the last one of this piece.

    ``replayed``: the answer was changed, or the piece was put in by an edit, and a fresh hook sees
    what remains of it. ``Pause`` and a ``Replace`` in the context have no effect then.
    """

    index: int
    ids: tuple[int, ...]
    text: str
    replayed: bool
    # Of all pieces, this one's is at `_at`: joined only when asked for.
    _texts: Sequence[str] = field(default=(), repr=False)
    _at: int = field(default=0, repr=False)

    @property
    def token_id(self) -> int | None:
        """The piece's last token."""
        return self.ids[-1] if self.ids else None

    @property
    def answer(self) -> str:
        """The whole text up to and with this piece, as the hook before shows it."""
        return "".join(self._texts[: self._at + 1])


@dataclass(frozen=True, slots=True)
class Continue:
    """Go on. ``show`` is given out instead of the piece's text; None is the text as it came."""

    show: str | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """The answer ends here, with finish reason ``stop``; of this piece ``show`` is given out.

    ``by`` is the text that ended it, for dialects that tell their clients.
    """

    show: str = ""
    by: str | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Pause after this piece; ``reason`` is what the pause is put down to."""

    show: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Replace:
    """Put ``text`` in place of the last ``last`` tokens of the answer, this piece included.

    In the context, ``ids`` take their place there: the run is interrupted and goes on from them,
    and ``text`` is what they are shown as. Otherwise only what is shown changes, and ``ids`` has
    no meaning. Text that was given out already is taken back where the client's stream allows it.
    """

    ids: tuple[int, ...]
    text: str
    last: int = 1
    in_context: bool = True


Action = Continue | Stop | Pause | Replace


class Hook(Protocol):
    """Watches one generation. It is made anew and sees a replay when the answer is changed."""

    def on_piece(self, piece: Decoded) -> Action:
        """Say what is to happen with, and after, this piece."""

    def on_end(self) -> str:
        """The answer is over: return the text that was held back."""


# Makes the hook of one generation, a new one at each call, or None where it has no interest in it.
HookFactory = Callable[[GenerateRequest], Hook | None]


class StopStrings:
    """Ends the answer before the first stop string of the request, or behind it."""

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        self._search = StopSearch(stops)
        self._include = include

    def on_piece(self, piece: Decoded) -> Action:
        """Hold back what may be the beginning of a stop string."""
        certain = self._search.feed(piece.text)
        found = self._search.found
        if found is None:
            return Continue(certain)
        return Stop(certain + found if self._include else certain, found)

    def on_end(self) -> str:
        """Release it: no stop string came."""
        return self._search.flush()


class PauseOn:
    """Pauses after the token that completes one of some texts, or is one of some ids.

    The reason that it gives is the entry.
    """

    def __init__(self, texts: tuple[str, ...], ids: tuple[int, ...]) -> None:
        self._finder = TextFinder(texts)
        self._ids = frozenset(ids)

    def on_piece(self, piece: Decoded) -> Action:
        """Hold nothing back: the client sees what it was paused for."""
        text = self._finder.feed(piece.text)
        if text is not None:
            return Pause(reason=text)
        for token_id in piece.ids:
            if token_id in self._ids:
                return Pause(reason=str(token_id))
        return Continue()

    def on_end(self) -> str:
        """Nothing was held back."""
        return ""


def stop_strings(request: GenerateRequest) -> Hook | None:
    """Make the hook of the request's stop strings."""
    return StopStrings(request.stop, include=request.include_stop) if request.stop else None


def pause_on(request: GenerateRequest) -> Hook | None:
    """Make the hook of the request's own pauses."""
    if not request.pause_on_text and not request.pause_on_ids:
        return None
    return PauseOn(request.pause_on_text, request.pause_on_ids)
