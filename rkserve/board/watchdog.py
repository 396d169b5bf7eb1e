"""How long a run may be silent before the library counts as hung. Pure: the clock is passed in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits of a run, in seconds; see the configuration reference for the reasons."""

    first_token_s: float = 30.0
    prefill_per_token_s: float = 0.1
    token_s: float = 10.0
    abort_s: float = 2.0


class Phase(Enum):
    """What the run owes us next."""

    PREFILL = "the first token"
    DECODE = "the next token"
    RETURN = "the end of the run after the abort"


class Watchdog:
    """The deadline of one run: moves with every token, tightens with an abort."""

    def __init__(self, patience: Patience, prefill_tokens: int, now_s: float) -> None:
        self._patience = patience
        self.phase = Phase.PREFILL
        self._aborting = False
        self._since_s = now_s
        self._limit_s = patience.first_token_s + patience.prefill_per_token_s * prefill_tokens

    @property
    def deadline_s(self) -> float:
        """When the run counts as hung."""
        return self._since_s + self._limit_s

    def token(self, now_s: float) -> bool:
        """A token came. After an abort, stragglers do not move the deadline.

        Like ``aborted``, it returns True where the deadline is nearer than before, so that whoever
        sleeps until then must look again.
        """
        before_s = self.deadline_s
        if self._aborting:
            if self.phase is not Phase.RETURN:
                self._expect_return(now_s)
        else:
            self.phase, self._since_s = Phase.DECODE, now_s
            self._limit_s = self._patience.token_s
        return self.deadline_s < before_s

    def aborted(self, now_s: float) -> bool:
        """An abort was asked for. It does not cut prefill, so that keeps its own limit."""
        before_s = self.deadline_s
        self._aborting = True
        if self.phase is Phase.DECODE:
            self._expect_return(now_s)
        return self.deadline_s < before_s

    def verdict(self, now_s: float) -> str:
        """Say what did not happen, for the log and the health check."""
        return f"{self.phase.value} did not come within {now_s - self._since_s:.1f} s"

    def _expect_return(self, now_s: float) -> None:
        self.phase, self._since_s, self._limit_s = Phase.RETURN, now_s, self._patience.abort_s
