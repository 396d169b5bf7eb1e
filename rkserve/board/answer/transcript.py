"""The token ids of one generation, the deltas that report them, and the KV cache of them. Pure.

A transcript has the prompt, the answer with its reasoning part, and the ids that edits inserted and
removed. It validates an edit's positions and is independent of hooks and runs.

Between runs the KV cache of RKLLM can be appended to or cleared: a request reuses all of the live
context or nothing, unless the runtime itself compares a prompt with the cache and computes what
differs. Ranges can be cut out of a paused run. Positions are valid only under the origin that they
were computed with.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import compress, pairwise

from rkserve.core.block_hashes import common_prefix
from rkserve.core.errors import RequestError
from rkserve.core.messages import Delta, Splice, Thinking, TokenOrigin, TranscriptToken
from rkserve.core.run_params import Scored

Ids = tuple[int, ...]
Range = tuple[int, int]  # half-open


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """The resumption of a paused run: ranges to cut out of the KV cache, then ids to send.

    ``cut`` is applied range by range, each at the positions of that moment.
    """

    cut: tuple[Range, ...]
    send: Ids


class CachedContext:
    """The token ids in the runtime's KV cache, as far as they are known for certain.

    ``ids`` are None where they are not known, and were computed under ``origin``; None is the base
    model. With ``history`` a run with ``keep_history`` left them, which only another such run can
    extend. With ``once`` no request is expected to extend them.
    """

    def __init__(self, *, append: bool, prefix: bool = False) -> None:
        """``append`` is true where the release accepts only the new ids of a conversation.

        ``prefix`` is true where the runtime keeps what a run without ``keep_history`` computed, and
        computes only the rest of a later prompt with the same prefix.
        """
        self.append, self.prefix = append, prefix
        self.ids: Ids | None = ()
        self.origin: str | None = None
        self.history = append and not prefix
        self.once = False

    @property
    def reuses(self) -> bool:
        """True where a later run can profit from the context of an earlier one."""
        return self.append or self.prefix

    @property
    def positions(self) -> int:
        """The number of positions known to be in the cache."""
        return len(self.ids or ())

    def reusable(self, prompt: Ids, origin: str | None = None, *, history: bool = True) -> int:
        """Return how many positions a run over ``prompt`` need not compute.

        With ``history`` it extends all of them, or none, and sends at least one id, from which the
        runtime computes the first new token. Otherwise it sends the whole prompt, and the runtime
        finds the common prefix itself.
        """
        held = self.ids
        if not held or self.origin != origin or self.history is not history:
            return 0
        if not history:
            return common_prefix(held, prompt) if self.prefix else 0
        if not self.append or len(held) >= len(prompt):
            return 0
        return len(held) if prompt[: len(held)] == held else 0

    def settle(
        self, transcript: Ids, positions: int, origin: str | None = None, *, once: bool = False
    ) -> bool:
        """Record the context that a run left: ``transcript``, perhaps without its last token.

        With ``once`` no request is expected to extend it. Return False where ``positions``, the
        runtime's count, cannot be right (see ``held``): it did not append the ids, or moved its
        window. The context is forgotten then.
        """
        self.ids = held(transcript, positions)
        self.origin = origin if self.ids else None
        self.history, self.once = True, once
        return self.ids is not None

    def keep(self, transcript: Ids, origin: str | None = None, *, once: bool = False) -> None:
        """Record the context that a run without ``keep_history`` left to the runtime's own reuse.

        The runtime compares ids itself, so a token too many or too few does no harm.
        """
        self.ids, self.origin = transcript, origin
        self.history, self.once = False, once

    def cleared(self, kept: int) -> None:
        """Record a clear between runs that spared ``kept`` positions.

        They are the first ones: a clear can spare only a system prompt. Where their ids are not
        known, or ``kept`` is impossible, everything is forgotten.
        """
        if kept == 0:
            self.reset()
        elif self.ids is not None and 0 < kept <= len(self.ids):
            self.ids = self.ids[:kept]
        else:
            self.forget()

    def forget(self) -> None:
        """Mark the content as unknown (abort, failure): the next run clears first."""
        self.ids = None
        self.origin = None

    def reset(self) -> None:
        """Mark the cache as empty, as in a new engine."""
        self.ids = ()
        self.origin = None


def held(transcript: Ids, positions: int) -> Ids | None:
    """Return the part of ``transcript`` that the KV cache holds; None where it is not known.

    ``transcript`` is everything that was sent and generated. A token enters the KV cache only when
    the next one is computed, so whether the last one is in depends on how the run ended or was
    paused; the runtime's ``positions`` tells. Any other number is impossible.
    """
    if max(0, len(transcript) - 1) <= positions <= len(transcript):
        return transcript[:positions]
    return None


def plan_resume(kept: Ids | None, wanted: Ids, cuts: Iterable[Range] = ()) -> ResumePlan | None:
    """Return how a paused run resumes with ``wanted`` as its context; None: recompute instead.

    ``kept`` is the content of its KV cache (see ``held``) and ``cuts`` the ranges that edits cut
    out, one after the other, each at the positions of that moment. The rest is cut back to the
    common prefix with ``wanted``, and the remaining ids are sent: at least one, from which the next
    token is computed.

    It must be recomputed where the content is not known or does not contain a cut, and where no
    position would be left: cutting everything is as doubtful as the full clear of a paused engine.
    """
    if kept is None:
        return None
    asked: list[Range] = []
    for start, end in cuts:
        if not 0 <= start <= end <= len(kept):
            return None
        if start < end:
            kept = kept[:start] + kept[end:]
            asked.append((start, end))
    common = min(common_prefix(kept, wanted), len(wanted) - 1)
    if common < 1:
        return None
    if common < len(kept):
        asked.append((common, len(kept)))
    return ResumePlan(cut=tuple(asked), send=wanted[common:])


class Transcript:
    """The ids of one generation in order. Edits return a changed copy or raise."""

    def __init__(self, prompt: Ids, slots: Iterable[TranscriptToken] = ()) -> None:
        self.prompt = prompt  # without cleared ranges
        self.slots = list(slots)

    @property
    def context(self) -> Ids:
        """The ids that the next run needs in its KV cache."""
        return (*self.prompt, *(slot.token_id for slot in self.slots if not slot.cleared))

    @property
    def answer(self) -> list[int]:
        """The ids of the answer."""
        return [slot.token_id for slot in self.slots if slot.kind is not TokenOrigin.INJECTED]

    def drop_unfinished(self) -> int:
        """Drop an incomplete character at the end; return the number of its tokens.

        The text that the runtime held back is lost with the interruption, and the next run
        generates these tokens again.
        """
        before = len(self.slots)
        while self.slots and self.slots[-1].unfinished:
            self.slots.pop()
        return before - len(self.slots)

    def cleared(self, ranges: Sequence[Range], held: int) -> Transcript:
        """Return a copy without these half-open ranges of the first ``held`` positions.

        Raises:
            RequestError: a range is outside of the cache, reversed, or overlaps another one.
        """
        context = self.context
        live = [True] * len(context)
        for start, end in ordered(ranges, min(held, len(context))):
            live[start:end] = [False] * (end - start)
        position, slots = len(self.prompt), []
        for slot in self.slots:
            if not slot.cleared:
                slots.append(slot if live[position] else replace(slot, cleared=True))
                position += 1
            else:
                slots.append(slot)
        return Transcript(tuple(compress(self.prompt, live)), slots)

    def spliced(self, take_back: int, ids: Ids, text: str, kind: TokenOrigin) -> Transcript:
        """Return a copy with ``ids`` in place of the last tokens of the answer.

        Raises:
            RequestError: the answer has fewer tokens, or the cut would split an inserted piece.
        """
        copy = Transcript(self.prompt, self.slots[: self._cut(take_back)])
        copy.drop_unfinished()
        if not ids:
            if text:
                raise RequestError("text needs its token ids", "text")
            return copy
        try:
            data = text.encode()
        except UnicodeEncodeError as exc:
            raise RequestError(f"the text is not valid Unicode: {exc.reason}", "text") from None
        # Its text cannot be divided among the tokens, so it is shown with the last one.
        copy.slots += [TranscriptToken(token_id, b"", kind, waiting=True) for token_id in ids[:-1]]
        copy.slots.append(TranscriptToken(ids[-1], data, kind))
        return copy

    def _cut(self, take_back: int) -> int:
        """Return the first slot of the last ``take_back`` tokens of the answer."""
        cut, kinds = len(self.slots), [slot.kind for slot in self.slots]
        own = kinds[::-1].index(TokenOrigin.INJECTED) if TokenOrigin.INJECTED in kinds else cut
        if not 0 <= take_back <= own:
            where = "it holds" if own == cut else "it holds since what was injected last"
            raise RequestError(
                f"{take_back} tokens of the answer cannot be replaced: {own} is what {where}",
                "replace_last",
            )
        cut -= take_back
        before = self.slots[cut - 1] if cut else None
        if before is not None and before.waiting and before.kind is TokenOrigin.APPENDED:
            raise RequestError(
                f"taking back {take_back} tokens would cut words in two that were put in as one "
                "piece; take back all of them or none",
                "replace_last",
            )
        return cut


def ordered(ranges: Sequence[Range], held: int) -> list[Range]:
    """Return the non-empty ranges, the last one first.

    In that order each can be cleared by itself: it moves no position of the ranges that follow.

    Raises:
        RequestError: a range is outside of the cache, reversed, or overlaps another one.
    """
    for start, end in ranges:
        if not 0 <= start <= end <= held:
            raise RequestError(
                f"the range [{start}, {end}) is outside of the cache, which holds {held} positions",
                "clear",
            )
    found = sorted(((start, end) for start, end in ranges if start < end), reverse=True)
    for (start, _), (other, end) in pairwise(found):
        if end > start:
            raise RequestError(
                f"the ranges [{other}, {end}) and [{start}, ...) to clear overlap", "clear"
            )
    return found


class Utf8Decoder:
    """An incremental UTF-8 decoder that returns complete characters.

    A character is held back until its last byte arrives; one that is never completed is dropped.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, data: bytes) -> str:
        """Return the characters that ``data`` completes."""
        return self._decoder.decode(data)

    @property
    def whole(self) -> bool:
        """True where no incomplete character is held back."""
        return not self._decoder.getstate()[0]

    def drop(self) -> None:
        """Forget the bytes of an incomplete character."""
        self._decoder.reset()


class PendingDelta:
    """The text, ids and slots of one answer that were emitted, and those still to be emitted.

    It compares the text shown now with the emitted text. From all deltas the whole transcript can
    be rebuilt, so that another board can continue it. Up to ``certain`` slots may be emitted; set
    it together with ``ids``, the number of them that belong to the answer.
    """

    def __init__(
        self,
        prompt: Ids,
        slots: Sequence[TranscriptToken] = (),
        ids: int = 0,
        text: str = "",
        *,
        scored: bool = False,
    ) -> None:
        """The arguments are the part emitted on another board. ``scored`` ids carry logprobs."""
        self._scored = scored
        self._given = [text]
        self._text, self._retract = "", 0
        self._prompt = prompt
        self._slots = len(slots)  # emitted slots
        self._taken = ids  # emitted ids of the answer
        self._parts: list[int] | None = []  # lengths of the texts since then, one per id
        self._rewritten = False
        self.certain, self.ids = len(slots), ids

    @property
    def pending(self) -> bool:
        """True where ``take`` has something to return."""
        return bool(self._slots < self.certain or self._text or self._retract or self._rewritten)

    def add(self, ids: int, text: str, shown: str) -> None:
        """Add a piece of ``ids`` tokens, its text, and the text shown for it."""
        self._text += shown
        if self._parts is None or ids != 1 or text != shown:
            self._parts = None
        else:
            self._parts.append(len(text))

    def add_silent(self) -> None:
        """Add a token of the answer without text: its end."""
        if self._parts is not None:
            self._parts.append(0)

    def show(self, shown: str) -> None:
        """Set the whole text shown of the answer."""
        given = "".join(self._given)
        same = common_prefix(given, shown)
        self._retract, self._text = len(given) - same, shown[same:]

    def rewrite(self, same_ids: int, same_slots: int) -> None:
        """Note that the answer was changed behind so many ids and slots."""
        self._taken = min(self._taken, same_ids)
        self._slots = min(self._slots, same_slots)
        self._rewritten = True

    def take(self, transcript: Transcript, token_ids: Sequence[int]) -> Delta | None:
        """Return the delta since the last call, or None.

        Ids are emitted with their text. Ids that an edit removed are not taken back here.
        """
        if not self.pending:
            return None
        ids, text = tuple(token_ids[self._taken : self.ids]), self._text
        parts = self._parts
        if (
            parts is None
            or self._rewritten
            or self._retract
            or len(parts) != len(ids)
            or sum(parts) != len(text)
        ):
            delta = Delta(text, ids, self._retract, splice=self._splice(transcript))
        else:
            delta = Delta(text, ids, lengths=tuple(parts) if len(parts) > 1 else ())
        if self._scored and ids:
            delta = replace(delta, logprobs=self._logprobs(transcript, len(ids)))
        if self._retract:
            self._given = ["".join(self._given)[: -self._retract]]
        self._given.append(text)
        self._taken, self._slots = self.ids, self.certain
        self._text, self._retract, self._parts, self._rewritten = "", 0, [], False
        return delta

    def _logprobs(self, transcript: Transcript, count: int) -> tuple[Scored | None, ...]:
        """Return the logprobs of the last ``count`` certain ids."""
        found: list[Scored | None] = []
        for at in range(self.certain - 1, -1, -1):
            slot = transcript.slots[at]
            if len(found) == count:
                break
            if slot.kind is not TokenOrigin.INJECTED:
                found.append(slot.scored)
        return tuple(reversed(found))

    def _splice(self, transcript: Transcript) -> Splice:
        prompt = None if transcript.prompt == self._prompt else transcript.prompt
        self._prompt = transcript.prompt
        return Splice(self._slots, tuple(transcript.slots[self._slots : self.certain]), prompt)


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
        tail = self._tail.lstrip()
        if tail.startswith(self._open):
            self.inside = self.opened = True
            self._tail = tail[len(self._open) :]
        else:
            self.over = not self._open.startswith(tail)


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """The reasoning part of an answer: its tokens up to its end, and whether it is unended."""

    tokens: int = 0
    unended: bool = False


def reasoning_span(slots: Iterable[TranscriptToken], thinking: Thinking) -> ReasoningSpan:
    """Return the reasoning part of an answer. The marks around it count."""
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
