"""How long a run may be silent before the library counts as hung. Pure: the clock is passed in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class RunTimeouts:
    """Time limits of a run, in seconds; see the configuration reference for the reasons."""

    first_token_s: float = 30.0
    prefill_per_token_s: float = 0.1
    token_s: float = 10.0
    abort_s: float = 2.0
    image_s: float = 30.0


class RunPhase(Enum):
    """What the run owes us next."""

    PREFILL = "the first token"
    DECODE = "the next token"
    PAUSE = "the pause"
    RETURN = "the end of the run after the abort"


class Watchdog:
    """The deadline of one run: moves with every token, tightens with a pause wish or an abort."""

    def __init__(self, patience: RunTimeouts, prefill_tokens: int, now_s: float) -> None:
        self._patience = patience
        self.phase = RunPhase.PREFILL
        self._aborting = self._pausing = False
        self._since_s = now_s
        self._limit_s = patience.first_token_s + patience.prefill_per_token_s * prefill_tokens

    @property
    def deadline_s(self) -> float:
        """When the run counts as hung."""
        return self._since_s + self._limit_s

    def token(self, now_s: float) -> bool:
        """A token came. After a pause wish or an abort, stragglers do not move the deadline.

        Like ``aborted``, it returns True where the deadline is nearer than before, so that whoever
        sleeps until then must look again.
        """
        before_s = self.deadline_s
        if self._aborting:
            if self.phase is not RunPhase.RETURN:
                self._expect(RunPhase.RETURN, self._patience.abort_s, now_s)
        elif self._pausing:
            if self.phase is not RunPhase.PAUSE:
                self._expect(RunPhase.PAUSE, self._patience.token_s, now_s)
        else:
            self._expect(RunPhase.DECODE, self._patience.token_s, now_s)
        return self.deadline_s < before_s

    def paused(self, now_s: float) -> bool:
        """A pause was asked for; it is granted at the next token that carries text."""
        before_s = self.deadline_s
        self._pausing = True
        if self.phase is RunPhase.DECODE:
            self._expect(RunPhase.PAUSE, self._patience.token_s, now_s)
        return self.deadline_s < before_s

    def aborted(self, now_s: float) -> bool:
        """An abort was asked for. It does not cut prefill, so that keeps its own limit."""
        before_s = self.deadline_s
        self._aborting = True
        if self.phase in (RunPhase.DECODE, RunPhase.PAUSE):
            self._expect(RunPhase.RETURN, self._patience.abort_s, now_s)
        return self.deadline_s < before_s

    def verdict(self, now_s: float) -> str:
        """Say what did not happen, for the log and the health check."""
        return f"{self.phase.value} did not come within {now_s - self._since_s:.1f} s"

    def _expect(self, phase: RunPhase, limit_s: float, now_s: float) -> None:
        self.phase, self._since_s, self._limit_s = phase, now_s, limit_s
