"""Which boards are left alone for a while because they kept failing. Pure: the clock is passed in.

It is told what became of requests and knows nothing of how they are sent. A board is whatever has a
key; one that was replaced has another, and begins anew.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum


class Circuit(str, Enum):
    """What a board may be sent."""

    CLOSED = "closed"  # everything
    OPEN = "open"  # nothing, for a while
    HALF_OPEN = "half_open"  # one request, whose end decides


@dataclass(frozen=True, slots=True)
class BreakerRules:
    """``failures`` within ``window_s`` open the circuit for ``open_s``.

    Each probe that fails doubles that, up to ``longest_s``. A probe that says nothing for
    ``probe_s`` is given up, and another one may be sent.
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
    lasts_s: float = 0.0  # how long it was opened for the last time
    probe_s: float | None = None  # when the probe was sent


class CircuitBreaker:
    """The circuits of all boards that one Router sends requests to."""

    def __init__(self, rules: BreakerRules | None = None) -> None:
        self._rules = rules or BreakerRules()
        self._boards: dict[str, _Board] = {}  # only those that failed lately

    def circuit(self, key: str, now_s: float) -> Circuit:
        """Return what the board may be sent now."""
        board = self._boards.get(key)
        if board is None or board.until_s is None:
            return Circuit.CLOSED
        if now_s < board.until_s or self._is_probed(board, now_s):
            return Circuit.OPEN
        return Circuit.HALF_OPEN

    def allows(self, key: str, now_s: float) -> bool:
        """Whether the board may be sent a request now."""
        return key not in self._boards or self.circuit(key, now_s) is not Circuit.OPEN

    def blocked(self, now_s: float) -> list[str]:
        """Return the keys of the boards that are sent nothing now."""
        return [key for key in self._boards if self.circuit(key, now_s) is Circuit.OPEN]

    def soonest_s(self, now_s: float) -> float | None:
        """Return when the first of ``blocked`` may be sent something; None: there is none."""
        return min([self._again_s(self._boards[key]) for key in self.blocked(now_s)], default=None)

    def sent(self, key: str, now_s: float) -> None:
        """The board is sent a request; the first one after a while is the probe."""
        board = self._boards.get(key)
        if board is not None and board.until_s is not None and now_s >= board.until_s:
            board.probe_s = now_s

    def worked(self, key: str) -> None:
        """The board has answered in order, or begun to: what it failed at before is forgotten."""
        self._boards.pop(key, None)

    def failed(self, key: str, reason: str, now_s: float) -> bool:
        """A request was lost on the board, by its own fault; return whether that opens it."""
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
        """A request ended there without a word of the board's health: another may be the probe."""
        board = self._boards.get(key)
        if board is not None:
            board.probe_s = None

    def forgive(self, key: str) -> None:
        """The last failure was not the board's fault."""
        board = self._boards.get(key)
        if board is None:
            return
        board.failed_s.pop()
        board.until_s = board.probe_s = None
        if not board.failed_s:
            del self._boards[key]

    def reason(self, key: str, now_s: float) -> str:
        """Say why the board is sent nothing, or only a probe; nothing where it is sent all."""
        board = self._boards.get(key)
        if board is None or board.until_s is None:
            return ""
        left_s = max(0.0, board.until_s - now_s)
        return (
            f"{len(board.failed_s)} requests failed, last: {board.reason}; next in {left_s:.1f} s"
        )

    def keep(self, keys: frozenset[str]) -> None:
        """Forget all boards but these: the others are there no more."""
        for key in self._boards.keys() - keys:
            del self._boards[key]

    def _open(self, board: _Board, now_s: float, lasts_s: float) -> bool:
        board.until_s, board.lasts_s, board.probe_s = now_s + lasts_s, lasts_s, None
        return True

    def _is_probed(self, board: _Board, now_s: float) -> bool:
        return board.probe_s is not None and now_s < board.probe_s + self._rules.probe_s

    def _again_s(self, board: _Board) -> float:
        """Return until when an open circuit stays open, if nothing is heard of the board."""
        assert board.until_s is not None
        probed_s = 0.0 if board.probe_s is None else board.probe_s + self._rules.probe_s
        return max(board.until_s, probed_s)
