"""What the owner of a key may ask of one Router in a minute, and at once. Pure.

Each limit per minute is a bucket that fills evenly and holds one minute's worth, so that nobody has
to wait for the full minute. Tokens of a prompt count when it is let in; those of an answer, which
is not known before, once it has ended, and board time as it passes: a bucket may get into debt, and
has to fill up again first.
The clock is passed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rkserve.core.errors import RateLimited

MINUTE_S = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one key may; None is without limit. ``weight`` is its share where boards are scarce.

    Its requests must not be more urgent than ``min_priority``, which is a number that others may
    go below.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    weight: float = 1.0
    min_priority: int | None = None
    board_seconds_per_minute: int | None = None


@dataclass(slots=True)
class _Bucket:
    per_minute: int
    level: float
    seen_s: float

    @classmethod
    def full(cls, per_minute: int | None, now_s: float) -> _Bucket | None:
        return None if per_minute is None else cls(per_minute, per_minute, now_s)

    def fill(self, now_s: float) -> None:
        gained = (now_s - self.seen_s) * self.per_minute / MINUTE_S
        self.level = min(float(self.per_minute), self.level + max(0.0, gained))
        self.seen_s = now_s

    def wait_s(self, level: float) -> int:
        """Seconds until it has reached a level."""
        return max(1, math.ceil((level - self.level) * MINUTE_S / self.per_minute))


class Meter:
    """What the owner of one key does."""

    def __init__(self, limits: Limits, now_s: float) -> None:
        self.limits = limits
        self.running = 0
        self._requests = _Bucket.full(limits.requests_per_minute, now_s)
        self._tokens = _Bucket.full(limits.tokens_per_minute, now_s)
        self._board = _Bucket.full(limits.board_seconds_per_minute, now_s)

    def enter(self, now_s: float) -> None:
        """Let a call in. Raises ``RateLimited``; then nothing was counted."""
        concurrent = self.limits.concurrent
        if concurrent is not None and self.running >= concurrent:
            raise RateLimited(f"{concurrent} calls at once", 1)
        if self._tokens is not None:
            self._tokens.fill(now_s)
            if self._tokens.level <= 0:
                what = f"{self._tokens.per_minute} tokens per minute"
                raise RateLimited(what, self._tokens.wait_s(1.0))
        if self._board is not None:
            self._board.fill(now_s)
            if self._board.level <= 0:
                what = f"{self._board.per_minute} s of board time per minute"
                raise RateLimited(what, self._board.wait_s(1.0))
        if self._requests is not None:
            self._requests.fill(now_s)
            if self._requests.level < 1:
                what = f"{self._requests.per_minute} requests per minute"
                raise RateLimited(what, self._requests.wait_s(1.0))
            self._requests.level -= 1
        self.running += 1

    def spend(self, tokens: int, now_s: float) -> None:
        """That many tokens were read or generated."""
        if self._tokens is not None:
            self._tokens.fill(now_s)
            self._tokens.level -= tokens

    def use_board(self, seconds: float, now_s: float) -> None:
        """Count time for which one of its requests had a board, also while it was paused there."""
        if self._board is not None:
            self._board.fill(now_s)
            self._board.level -= seconds

    def leave(self) -> None:
        """A call that was let in is over."""
        self.running -= 1
