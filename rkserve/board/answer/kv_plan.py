"""The known content of one engine's KV cache, and the part that a run can reuse. Pure.

Between runs the KV cache of RKLLM can be appended to or cleared, not cut back: a request reuses all
of the live context or nothing. Ranges can be cut out of a paused run. Positions are valid only
under the origin that they were computed with.
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
    """The start of a run: whether to clear, the ids to send, and the number of reused positions."""

    clear: bool
    send: Ids
    reused: int


@dataclass(frozen=True, slots=True)
class ResumePlan:
    """The resumption of a paused run: ranges to cut out of the KV cache, then ids to send.

    ``cut`` is applied range by range, each at the positions of that moment.
    """

    cut: tuple[Range, ...]
    send: Ids


class CachedContext:
    """The token ids in the runtime's KV cache, as far as they are known for certain."""

    def __init__(self, *, append: bool) -> None:
        """``append`` is true where the release accepts only the new ids of a conversation."""
        self.append = append
        self._ids: Ids | None = ()
        self._origin: str | None = None  # the origin that they were computed under
        self._once = False

    @property
    def ids(self) -> Ids | None:
        """The ids in the cache; None where they are not known."""
        return self._ids

    @property
    def origin(self) -> str | None:
        """The origin of ``ids``; None is the base model."""
        return self._origin

    @property
    def once(self) -> bool:
        """True where no request is expected to extend it."""
        return self._once

    @property
    def positions(self) -> int:
        """The number of positions known to be in the cache."""
        return len(self._ids or ())

    def plan(self, prompt: Ids, origin: str | None = None) -> PrefillPlan:
        """Return the start of a run over ``prompt``.

        At least one id is always sent: the runtime computes the first new token from it.
        """
        held = self._ids
        if self.append and held and self._origin == origin and _is_begun_by(prompt, held):
            return PrefillPlan(clear=False, send=prompt[len(held) :], reused=len(held))
        return PrefillPlan(clear=held != (), send=prompt, reused=0)

    def settle(
        self, transcript: Ids, positions: int, origin: str | None = None, *, once: bool = False
    ) -> bool:
        """Record the context that a run left: ``transcript``, perhaps without its last token.

        With ``once`` no request is expected to extend it. Return False where ``positions``, the
        runtime's count, cannot be right (see ``held``): it did not append the ids, or moved its
        window. The context is forgotten then.
        """
        self._ids = held(transcript, positions)
        self._origin = origin if self._ids else None
        self._once = once
        return self._ids is not None

    def cleared(self, kept: int) -> None:
        """Record a clear between runs that spared ``kept`` positions.

        They are the first ones: a clear can spare only a system prompt. Where their ids are not
        known, or ``kept`` is impossible, everything is forgotten.
        """
        if kept == 0:
            self.reset()
        elif self._ids is not None and 0 < kept <= len(self._ids):
            self._ids = self._ids[:kept]
        else:
            self.forget()

    def forget(self) -> None:
        """Mark the content as unknown (abort, failure): the next run clears first."""
        self._ids = None
        self._origin = None

    def reset(self) -> None:
        """Mark the cache as empty, as in a new engine."""
        self._ids = ()
        self._origin = None


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


def common_prefix(one: Sequence[T], other: Sequence[T]) -> int:
    """Return the length of the common prefix of two sequences of one type."""
    # Slices are compared in C: a Python loop over 16,384 positions, once per cache entry, is too
    # slow.
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
