"""Intervention hooks: protocol, actions, the chain that calls them, and built-in ones. Pure.

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

from rkserve.board.answer.transcript import ReasoningBlock
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


# -- built-in hooks --------------------------------------------------------------------------------


class StopStrings:
    """End the answer before its first stop string, or behind it.

    Text that may be the beginning of a stop string is held back until that is decided.
    """

    def __init__(self, stops: tuple[str, ...], *, include: bool = False) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops, self._include = stops, include
        self._held = ""
        self.found: str | None = None  # the stop string that was found

    def on_piece(self, piece: Decoded) -> Action:
        """Pass on text that is certain not to belong to a stop string."""
        certain = self.feed(piece.text)
        if self.found is None:
            return Continue(certain)
        return Stop(certain + self.found if self._include else certain, self.found)

    def feed(self, text: str) -> str:
        """Return the text that became certain with ``text``, before the stop string."""
        if self.found is not None:
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

    def on_end(self) -> str:
        """Return text held back for a stop string that did not follow."""
        certain, self._held = self._held, ""
        return certain


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` that is a proper prefix of ``stop``."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0


class PauseOn:
    """Pause after a token that completes one of some texts, or is one of some ids.

    The reason of the pause is that text or id.
    """

    def __init__(self, request: GenerateRequest) -> None:
        self._finder = TextFinder(request.pause_on_text)
        self._ids = frozenset(request.pause_on_ids)

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


class ThinkingLimit:
    """End the reasoning block after so many tokens, as the model would, and let the answer follow.

    Where an edit changed the block, it is ended at the next token over the limit.
    """

    def __init__(self, request: GenerateRequest) -> None:
        thinking = request.thinking
        assert thinking is not None
        assert thinking.max_tokens is not None
        self._thinking, self._most = thinking, thinking.max_tokens
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


def hooks_of(request: GenerateRequest, hooks: Sequence[HookFactory]) -> list[HookFactory]:
    """Return the factories of the request's own hooks and of ``hooks``, in the order of calls.

    Pauses depend on the model's output, stop strings on the shown text. Stop strings hold text
    back, which must not delay other hooks, so they come last.
    """
    factories: list[HookFactory] = []
    if request.thinking is not None and request.thinking.max_tokens is not None:
        factories.append(ThinkingLimit)
    if request.pause_on_text or request.pause_on_ids:
        factories.append(PauseOn)
    factories += hooks
    if request.stop:
        factories.append(lambda asked: StopStrings(asked.stop, include=asked.include_stop))
    return factories
