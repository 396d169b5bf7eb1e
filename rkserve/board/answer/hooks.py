"""Intervention hooks: the protocol, its actions, and the chain that calls them. Pure.

A hook gets each piece of text as it is decoded and returns an action; it knows no run and no
engine. Hooks form a chain: each gets the output of the one before it. They are called for every
token in the event loop that serves all clients of the board, so a hook must be quick: no waiting,
no network, no work per piece that grows with the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rkserve.core.errors import HookFailed
from rkserve.core.messages import GenerateRequest


@dataclass(frozen=True, slots=True)
class Decoded:
    """One piece of the answer: a token, or several that share their text.

    Several are the tokens of one character, and the words that an edit or a ``Replace`` inserted.
    ``ids`` is empty for text that the previous hook held back until the end. ``index`` counts the
    answer's tokens, from 0, up to the last one of this piece.

    ``replayed``: the answer was changed, or an edit inserted the piece, and a fresh hook gets the
    remaining answer. ``Pause`` and a ``Replace`` in the context have no effect then.
    """

    index: int
    ids: tuple[int, ...]
    text: str
    replayed: bool
    # The texts of all pieces; this one's is at `_at`. They are joined only on demand.
    _texts: Sequence[str] = field(default=(), repr=False)
    _at: int = field(default=0, repr=False)

    @property
    def token_id(self) -> int | None:
        """The piece's last token."""
        return self.ids[-1] if self.ids else None

    @property
    def answer(self) -> str:
        """The whole text up to and including this piece, as the previous hook shows it."""
        return "".join(self._texts[: self._at + 1])


@dataclass(frozen=True, slots=True)
class Continue:
    """Continue. ``show`` is emitted instead of the piece's text; None is the text unchanged."""

    show: str | None = None


@dataclass(frozen=True, slots=True)
class Stop:
    """End the answer with finish reason ``stop``; of this piece ``show`` is emitted.

    ``by`` is the text that ended it, for APIs that report it.
    """

    show: str = ""
    by: str | None = None


@dataclass(frozen=True, slots=True)
class Pause:
    """Pause after this piece, with ``reason``."""

    show: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Replace:
    """Put ``text`` in place of the last ``last`` tokens of the answer, this piece included.

    In the context, ``ids`` replace them there: the run is interrupted and continues from them, and
    ``text`` is shown for them. Otherwise only the shown text changes, and ``ids`` has no meaning.
    Emitted text is retracted where the client's stream allows it.
    """

    ids: tuple[int, ...]
    text: str
    last: int = 1
    in_context: bool = True


Action = Continue | Stop | Pause | Replace


class Hook(Protocol):
    """The hook of one generation. It is created again and gets a replay when the answer changes."""

    def on_piece(self, piece: Decoded) -> Action:
        """Return the action for this piece."""

    def on_end(self) -> str:
        """Return the text held back, at the end of the answer."""


# Creates the hook of one generation, a new one at each call, or None where it does not apply.
HookFactory = Callable[[GenerateRequest], Hook | None]


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnswerPiece:
    """Tokens of the answer that share their text; ``index`` is the last one's."""

    index: int
    ids: tuple[int, ...]
    text: str


@dataclass(slots=True)
class ChainOutcome:
    """The result of passing a piece through the chain.

    ``rewritten``: the shown text of earlier pieces changed too. ``rewind`` is a replacement in the
    context and the name of the hook that returned it.
    """

    stop: bool = False
    pause: str | None = None
    rewind: tuple[str, Replace] | None = None
    rewritten: bool = False


class _Stage:
    """One hook and its factory."""

    def __init__(self, name: str, factory: HookFactory, hook: Hook) -> None:
        self.name, self.factory, self.hook = name, factory, hook


class HookChain:
    """The hooks of one generation, in order.

    They are third-party code: an exception or an invalid action is ``HookFailed`` here.
    """

    def __init__(self, factories: Sequence[HookFactory], request: GenerateRequest) -> None:
        self._request = request
        self._stages: list[_Stage] = []
        for factory in factories:
            hook = self._make(factory)
            if hook is not None:
                name = type(hook).__qualname__
                self._stages.append(_Stage(name, factory, hook))
        self._pieces: list[AnswerPiece] = []
        # The input of stage i for each piece is at i; the last list is the shown text.
        self._texts: list[list[str]] = [[] for _ in range(len(self._stages) + 1)]
        self._stopped: tuple[int, int] | None = None  # by which stage, at which piece
        self.stopped_by: str | None = None  # the text at which a hook stopped

    @property
    def shown(self) -> list[str]:
        """The shown text of each piece."""
        return self._texts[-1]

    def feed(self, piece: AnswerPiece, *, replayed: bool = False) -> ChainOutcome:
        """Pass a piece through the hooks."""
        outcome = ChainOutcome()
        self._pieces.append(piece)
        self._texts[0].append(piece.text)
        for depth in range(len(self._stages)):
            self._catch_up(depth, outcome, replayed=replayed)
            if outcome.rewind is not None:
                break  # the piece is not part of the answer
        return outcome

    def end(self) -> ChainOutcome:
        """Release text that the hooks held back; each one's passes through those behind it."""
        outcome = ChainOutcome()
        for depth, stage in enumerate(self._stages):
            if self._stopped is not None and depth <= self._stopped[0]:
                continue  # it comes after the answer's end
            held = _released(stage)
            if not held:
                continue
            index = self._pieces[-1].index if self._pieces else -1
            self._pieces.append(AnswerPiece(index, (), held))
            for texts in self._texts[: depth + 1]:
                texts.append("")
            self._texts[depth + 1].append(held)
            for deeper in range(depth + 1, len(self._stages)):
                self._catch_up(deeper, outcome, replayed=True)
        return outcome

    def _catch_up(self, depth: int, outcome: ChainOutcome, *, replayed: bool) -> None:
        """Pass pieces to a stage that it has not got yet: the newest, or all of them if it is
        fresh.
        """
        shown = self._texts[depth + 1]
        for at in range(len(shown), len(self._pieces)):
            if self._stopped is not None and at > self._stopped[1] and self._pieces[at].ids:
                shown.append("")
                continue
            old = replayed or at < len(self._pieces) - 1
            text = self._ask(depth, at, outcome, replayed=old)
            if text is None:
                return
            shown.append(text)

    def _ask(self, depth: int, at: int, outcome: ChainOutcome, *, replayed: bool) -> str | None:
        """Return the shown text of piece ``at``; None where the stage rewinds the context."""
        stage, piece, texts = self._stages[depth], self._pieces[at], self._texts[depth]
        decoded = Decoded(piece.index, piece.ids, texts[at], replayed, texts, at)
        try:
            action = stage.hook.on_piece(decoded)
        except BaseException as exc:  # a hook that calls exit() ends only its own answer
            raise _raised(stage.name, exc) from exc
        _check(stage.name, action)
        text: str | None = None
        match action:
            case Continue(show=text):
                pass
            case Stop(show=text, by=by):
                self._stopped, self.stopped_by, outcome.stop = (depth, at), by, True
            case Pause(show=text, reason=reason):
                if not replayed and outcome.pause is None:
                    outcome.pause = reason or stage.name
            case Replace(in_context=True):
                if not replayed:
                    outcome.rewind = (stage.name, action)
                    return None
            case Replace(text=text, last=last):
                outcome.rewritten |= self._blank(depth, at, last)
        return texts[at] if text is None else text

    def _blank(self, depth: int, at: int, last: int) -> bool:
        """Blank the pieces before ``at`` with the last tokens; True where there are any."""
        covered, first = max(1, len(self._pieces[at].ids)), at
        while covered < last and first > 0:
            first -= 1
            covered += len(self._pieces[first].ids)
        if not 1 <= last <= covered:
            reason = f"it replaces the last {last} tokens; the answer has {covered}"
            raise HookFailed(self._stages[depth].name, reason)
        if first == at:
            return False
        self._texts[depth + 1][first:] = [""] * (at - first)
        for stage, shown in zip(self._stages[depth + 1 :], self._texts[depth + 2 :], strict=True):
            stage.hook = self._remake(stage)
            shown.clear()
        return True

    def _make(self, factory: HookFactory) -> Hook | None:
        try:
            return factory(self._request)
        except BaseException as exc:  # a hook that calls exit() ends its own answer only
            name = getattr(factory, "__qualname__", type(factory).__qualname__)
            raise _raised(name, exc) from exc

    def _remake(self, stage: _Stage) -> Hook:
        hook = self._make(stage.factory)
        if hook is None:
            raise HookFailed(stage.name, "its factory returned None for a replay")
        return hook


def _released(stage: _Stage) -> str:
    try:
        held = stage.hook.on_end()
    except BaseException as exc:
        raise _raised(stage.name, exc) from exc
    if not _is_text(held):
        raise _wrong(stage.name, "on_end did not return a string", held)
    return held


def _raised(name: str, exc: BaseException) -> HookFailed:
    # The author of the hook needs the traceback, which is available only here.
    log.error("hook %s raised %r", name, exc, exc_info=exc)
    return HookFailed(name, f"it raised {type(exc).__name__}", repr(exc))


def _wrong(name: str, reason: str, found: object) -> HookFailed:
    log.error("hook %s: %s: %r", name, reason, found)
    return HookFailed(name, reason, repr(found))


def _check(name: str, action: object) -> None:
    """Raise ``HookFailed`` unless ``action`` is a valid action: hooks are not type-checked.

    An error must show here, and not where a token is taken or a run is started from it.
    """
    if not isinstance(action, Continue | Stop | Pause | Replace):
        raise _wrong(name, "it did not return an action", action)
    kind = type(action).__name__
    if isinstance(action, Replace):
        fits = {
            "ids": isinstance(action.ids, tuple) and all(map(_is_number, action.ids)),
            "text": _is_text(action.text),
            "last": _is_number(action.last),
            "in_context": isinstance(action.in_context, bool),
        }
    else:
        optional = not isinstance(action, Stop) and action.show is None
        fits = {"show": optional or _is_text(action.show)}
        if isinstance(action, Pause):
            fits["reason"] = _is_text(action.reason)
        if isinstance(action, Stop):
            fits["by"] = action.by is None or _is_text(action.by)
    for key, fit in fits.items():
        if not fit:
            raise _wrong(name, f"its {kind} has a wrong {key}", action)


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    """Return whether it is a string that can be encoded: half of a surrogate pair cannot."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
