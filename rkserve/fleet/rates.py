"""How fast boards work now, from counters that they report about once a second. Pure.

A rate over the time since a board's start says nothing of today; one over the last two reports
jumps. Ten seconds show a change soon and hold still enough to be read.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW_S = 10.0


@dataclass(frozen=True, slots=True)
class Counted:
    """Tokens that one replica of a board had prefilled and decoded at a time."""

    now_s: float
    replica: str
    prefill_tokens: int
    decode_tokens: int


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens of each second of the window, whether the board worked or not."""

    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0


class Rates:
    """The window of one board."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen: deque[Counted] = deque()

    def heard(self, counted: Counted) -> None:
        """Take over a report; a new replica counts from zero again."""
        if self._seen and self._seen[-1].replica != counted.replica:
            self._seen.clear()
        self._seen.append(counted)
        # The one before the window's beginning stays: without it a slow reporter had no rate.
        while len(self._seen) > 2 and self._seen[1].now_s <= counted.now_s - self._window_s:  # noqa: PLR2004 - both ends
            self._seen.popleft()

    def now(self) -> Rate:
        """Return the rate over the window; nothing is known before the second report."""
        if len(self._seen) <= 1:
            return Rate()
        first, last = self._seen[0], self._seen[-1]
        took_s = last.now_s - first.now_s
        if took_s <= 0:
            return Rate()
        return Rate(
            max(0, last.prefill_tokens - first.prefill_tokens) / took_s,
            max(0, last.decode_tokens - first.decode_tokens) / took_s,
        )
