"""Circuit breakers: pause requests to boards that keep failing. Pure: the clock is passed in.

A board is identified by its key; the replacement of a replica has a new key, and starts closed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum


class Circuit(str, Enum):
    """The state of a board's circuit."""

    CLOSED = "closed"  # all requests pass
    OPEN = "open"  # no requests for a while
    HALF_OPEN = "half_open"  # one probe, which closes or opens the circuit


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """``failures`` within ``window_s`` open the circuit for ``open_s``.

    Each failed probe doubles that time, up to ``longest_s``. A probe without a result for
    ``probe_s`` is abandoned, and another one may be sent.
    """

    failures: int = 3
    window_s: float = 30.0
    open_s: float = 2.0
    longest_s: float = 60.0
    probe_s: float = 30.0


@dataclass(slots=True)
class _Board:
    failed_s: deque[float] = field(default_factory=deque)
    reason: str = ""
    until_s: float | None = None  # None: closed
    lasts_s: float = 0.0  # the duration of the last opening
    probe_s: float | None = None  # the time at which the probe was sent


class CircuitBreaker:
    """The circuits of all boards of one Router."""

    def __init__(self, rules: BreakerRules | None = None) -> None:
        self._rules = rules or BreakerRules()
        self._boards: dict[str, _Board] = {}  # boards with recent failures only

    def circuit(self, key: str, now_s: float) -> Circuit:
        """Return the state of the board's circuit."""
        board = self._boards.get(key)
        if board is None or board.until_s is None:
            return Circuit.CLOSED
        if now_s < board.until_s or self._is_probed(board, now_s):
            return Circuit.OPEN
        return Circuit.HALF_OPEN

    def allows(self, key: str, now_s: float) -> bool:
        """Return whether a request may be sent to the board now."""
        return key not in self._boards or self.circuit(key, now_s) is not Circuit.OPEN

    def blocked(self, now_s: float) -> list[str]:
        """Return the keys of boards with an open circuit."""
        return [key for key in self._boards if self.circuit(key, now_s) is Circuit.OPEN]

    def soonest_s(self, now_s: float) -> float | None:
        """Return the time at which the first of ``blocked`` half-opens; None without any."""
        return min([self._again_s(self._boards[key]) for key in self.blocked(now_s)], default=None)

    def sent(self, key: str, now_s: float) -> None:
        """Note a request to the board; the first one after the open time is the probe."""
        board = self._boards.get(key)
        if board is not None and board.until_s is not None and now_s >= board.until_s:
            board.probe_s = now_s

    def worked(self, key: str) -> None:
        """Close the circuit after a success and forget earlier failures."""
        self._boards.pop(key, None)

    def failed(self, key: str, reason: str, now_s: float) -> bool:
        """Count a request lost by the board's fault; return whether that opens the circuit."""
        board, rules = self._boards.setdefault(key, _Board()), self._rules
        board.reason = reason
        board.failed_s.append(now_s)
        while board.failed_s[0] <= now_s - rules.window_s:
            board.failed_s.popleft()
        if board.until_s is not None and now_s >= board.until_s:
            return self._open(board, now_s, min(2 * board.lasts_s, rules.longest_s))
        if board.until_s is None and len(board.failed_s) >= rules.failures:
            return self._open(board, now_s, rules.open_s)
        return False

    def undecided(self, key: str) -> None:
        """Note a request that ended without showing the board's health; allow another probe."""
        board = self._boards.get(key)
        if board is not None:
            board.probe_s = None

    def forgive(self, key: str) -> None:
        """Remove the last failure, which was not the board's fault."""
        board = self._boards.get(key)
        if board is None:
            return
        board.failed_s.pop()
        board.until_s = board.probe_s = None
        if not board.failed_s:
            del self._boards[key]

    def reason(self, key: str, now_s: float) -> str:
        """Return why the circuit is not closed; empty if it is."""
        board = self._boards.get(key)
        if board is None or board.until_s is None:
            return ""
        left_s = max(0.0, board.until_s - now_s)
        return (
            f"{len(board.failed_s)} requests failed, last: {board.reason}; next in {left_s:.1f} s"
        )

    def keep(self, keys: frozenset[str]) -> None:
        """Forget all boards but these."""
        for key in self._boards.keys() - keys:
            del self._boards[key]

    def _open(self, board: _Board, now_s: float, lasts_s: float) -> bool:
        board.until_s, board.lasts_s, board.probe_s = now_s + lasts_s, lasts_s, None
        return True

    def _is_probed(self, board: _Board, now_s: float) -> bool:
        return board.probe_s is not None and now_s < board.probe_s + self._rules.probe_s

    def _again_s(self, board: _Board) -> float:
        """Return the time at which an open circuit half-opens without news of the board."""
        assert board.until_s is not None
        probed_s = 0.0 if board.probe_s is None else board.probe_s + self._rules.probe_s
        return max(board.until_s, probed_s)
