"""What the KV cache of one handle holds, and what a run or a resumption can reuse of it. Pure.

Between runs the KV cache of RKLLM can be appended to or cleared, not cut back: a request reuses all
of the live context or nothing. Of a paused run ranges can be cut out. Positions are worth something
only under the origin that they were computed with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Ids = tuple[int, ...]
Range = tuple[int, int]  # half-open
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How to start a run: clear first or not, which ids to send, how many the context holds."""

    clear: bool
    send: Ids
    reused: int


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """How to go on with a paused run: what to cut out of the KV cache, then which ids to send.

    ``cut`` is applied range by range, each at the positions of that moment.
    """

    cut: tuple[Range, ...]
    send: Ids


class CachedContext:
    """The token ids that the runtime's KV cache holds, as far as they are known for certain."""

    def __init__(self, *, append: bool) -> None:
        """``append`` says whether the release may be sent only the new ids of a conversation."""
        self.append = append
        self._ids: Ids | None = ()
        self._origin: str | None = None  # what they were computed under
        self._once = False

    @property
    def ids(self) -> Ids | None:
        """The ids that are held; None where that is not known."""
        return self._ids

    @property
    def origin(self) -> str | None:
        """The origin that ``ids`` were computed under; None is the base model."""
        return self._origin

    @property
    def once(self) -> bool:
        """Whether nobody is expected to go on from it."""
        return self._once

    @property
    def positions(self) -> int:
        """Positions known to be held."""
        return len(self._ids or ())

    def plan(self, prompt: Ids, origin: str | None = None) -> PrefillPlan:
        """Return how a run over ``prompt`` begins.

        At least one id is always sent: the runtime computes the first new token from it.
        """
        held = self._ids
        if self.append and held and self._origin == origin and _is_begun_by(prompt, held):
            return PrefillPlan(clear=False, send=prompt[len(held) :], reused=len(held))
        return PrefillPlan(clear=held != (), send=prompt, reused=0)

    def settle(
        self, transcript: Ids, positions: int, origin: str | None = None, *, once: bool = False
    ) -> bool:
        """Record what a run that ended in order left: ``transcript``, perhaps without its end.

        ``once``: nobody is expected to go on from it.

        False where ``positions``, the runtime's word, cannot be true (see ``held``): it did not
        append what it was sent, or moved its window. The context is forgotten then.
        """
        self._ids = held(transcript, positions)
        self._origin = origin if self._ids else None
        self._once = once
        return self._ids is not None

    def cleared(self, kept: int) -> None:
        """Record that it was cleared between runs, but for ``kept`` positions.

        They are the first ones: all that a clear can spare is a system prompt. Where these are not
        known, or cannot be that many, everything is forgotten.
        """
        if kept == 0:
            self.reset()
        elif self._ids is not None and 0 < kept <= len(self._ids):
            self._ids = self._ids[:kept]
        else:
            self.forget()

    def forget(self) -> None:
        """The content is unknown (abort, failure): the next run clears first."""
        self._ids = None
        self._origin = None

    def reset(self) -> None:
        """A new handle: nothing is held."""
        self._ids = ()
        self._origin = None


def held(transcript: Ids, positions: int) -> Ids | None:
    """Return what the KV cache holds of ``transcript``, or None where that is not known.

    ``transcript`` is everything that was sent and delivered. How much of it the KV cache holds is
    the runtime's word: a token enters it only when the next one is computed, so whether the last
    one is in differs with the way the run ended or was paused. No other number can be true.
    """
    if max(0, len(transcript) - 1) <= positions <= len(transcript):
        return transcript[:positions]
    return None


def plan_resume(kept: Ids | None, wanted: Ids, cuts: Iterable[Range] = ()) -> ResumePlan | None:
    """Return how a paused run goes on with ``wanted`` as its context; None: recompute instead.

    ``kept`` is what its KV cache holds (see ``held``) and ``cuts`` what edits asked to cut out,
    one after the other, each at the positions of that moment. What is left is cut back to where
    it and ``wanted`` part, and the rest is sent: at least one id, from which the next token is
    computed.

    It has to be recomputed where the content is not known or does not hold a cut, and where no
    position would be left: cutting everything is as suspect as the full clear of a paused handle.
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


def common_prefix(one: Sequence[T], other: Sequence[T]) -> int:
    """Return how many ids, or characters, both begin with. They are of one type."""
    # Slices are compared in C: a loop over 16,384 positions would be felt, once per cache entry.
    same, differs = 0, min(len(one), len(other))
    if one[:differs] == other[:differs]:
        return differs
    while differs - same > 1:
        middle = (same + differs) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            differs = middle
    return same


def _is_begun_by(prompt: Ids, begun: Ids) -> bool:
    return len(begun) < len(prompt) and prompt[: len(begun)] == begun
