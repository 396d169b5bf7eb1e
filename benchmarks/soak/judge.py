"""Judgement of a soak's answers, calls and faults, one after the other as they come. Pure.

A run of days keeps counts and the first flaws, and no answers.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from benchmarks.harness.exchange import Truth

ALLOWED = frozenset({429, 502, 503, 504})
CALLS_DONE = (200, 202, 207)  # the last one on some boards, which the others follow
CALLS_ALLOWED = ALLOWED | {*CALLS_DONE, 409}
TRIAL_FAILED = (422, "adapter_trial_failed")
RETRIED_LATER = (429, 503)  # which have to name a time
SHOWN = 5  # flaws of a kind that a report quotes
KEPT = 4096  # windows of faults that are remembered; requests are shorter than that
NOT_FIRED_SHARE = 0.05
# A client notices the end of its connection later than the fault, on a busy machine.
LATE_S = 10.0


NOT_ALLOWED = "a status that is not allowed"
NO_OBJECT = "a refusal without an error object"
NO_TIME = "a refusal without Retry-After"
BROKEN = "a connection broke off without a fault of the front"


class Ending(Enum):
    """The end of one attempt to get an answer, as its client sees it."""

    WHOLE = "whole"
    REFUSED = "refused"
    BROKEN = "broken off"
    UNREACHED = "not connected"
    FAILED = "failed in mid-stream"
    CUT = "cut short in order"
    LEFT = "left by its client"
    SILENT = "not ended in time"


@dataclass(frozen=True, slots=True)
class Outcome:
    """One attempt. Times on the monotonic clock; ``truth`` is what it must be, if it is known.

    ``detail`` is the error's code, or the reason of a misshapen answer.
    """

    kind: str
    ending: Ending
    sent_s: float
    ended_s: float
    status: int = 200
    detail: str = ""
    error_object: bool = True
    retry_after: bool = True
    found: Truth | None = None
    truth: Truth | None = None
    continued: int = 0
    board: str = ""
    message: str = ""


_ENDED_WRONG = {
    Ending.BROKEN: BROKEN,
    Ending.UNREACHED: "the address refused connections without a fault of the front",
    Ending.FAILED: "an answer failed in mid-stream",
    Ending.CUT: "an answer ended in order before its end",
    Ending.SILENT: "an answer did not end in time",
}


@dataclass(frozen=True, slots=True)
class CallOutcome:
    """The answer to a control call; status 0 is a connection that was lost."""

    what: str
    asked_s: float
    answered_s: float
    status: int
    detail: str = ""
    message: str = ""
    error_object: bool = True
    retry_after: bool = True


@dataclass(slots=True)
class Window:
    """The time of a fault, from before it was made until its part is back; None while it is not."""

    kind: str
    front: bool
    began_s: float
    over_s: float | None = None

    def meets(self, from_s: float, until_s: float) -> bool:
        """Return whether it overlaps with a time."""
        return self.began_s <= until_s and (self.over_s is None or from_s <= self.over_s + LATE_S)


@dataclass(slots=True)
class KindFigures:
    """Counts of one kind of traffic."""

    endings: Counter[Ending] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    continued: int = 0
    repeated: int = 0
    replayed: int = 0


@dataclass(slots=True)
class FaultCount:
    """Counts of one kind of fault, and the times until its part was back."""

    fired: int = 0
    missed: int = 0
    back_s: list[float] = field(default_factory=list)


class Judge:
    """Counts and flaws. Use it from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.kinds: dict[str, KindFigures] = {}
        self.faults: dict[str, FaultCount] = {}
        self.calls: dict[str, Counter[str]] = {}
        self.flaws: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}
        self._windows: list[Window] = []
        self._fresh: list[str] = []

    @property
    def clean(self) -> bool:
        """True without a flaw."""
        return not self.flaws

    # -- faults -------------------------------------------------------------------------------

    def fault_begins(self, kind: str, *, front: bool, at_s: float) -> Window:
        """Record a fault before it is made: what it breaks is judged by it."""
        window = Window(kind, front, at_s)
        with self._lock:
            self._windows = [*self._windows[-KEPT:], window]
        return window

    def fault_ends(self, window: Window, at_s: float, *, fired: bool) -> None:
        """Record the moment at which the part that was hit is back, or that it was not hit."""
        with self._lock:
            window.over_s = at_s
            count = self.faults.setdefault(window.kind, FaultCount())
            if fired:
                count.fired += 1
                count.back_s.append(at_s - window.began_s)
            else:
                count.missed += 1

    def during(self, from_s: float, until_s: float, *, front: bool | None = None) -> list[str]:
        """Return the faults of a time, those of the front only, or all."""
        with self._lock:
            return [
                one.kind
                for one in self._windows
                if one.meets(from_s, until_s) and front in (None, one.front)
            ]

    @property
    def not_fired_share(self) -> float:
        """Faults that did not fire, as a share of all."""
        missed = sum(one.missed for one in self.faults.values())
        tried = missed + sum(one.fired for one in self.faults.values())
        return missed / tried if tried else 0.0

    @property
    def fired(self) -> int:
        """Faults that fired."""
        return sum(one.fired for one in self.faults.values())

    # -- answers and calls --------------------------------------------------------------------

    def take(self, one: Outcome) -> None:
        """Count an attempt, and hold it to what it may be."""
        flaw = self._flaw(one)
        with self._lock:
            figures = self.kinds.setdefault(one.kind, KindFigures())
            figures.endings[one.ending] += 1
            figures.continued += one.continued > 0
            if one.ending is Ending.REFUSED:
                figures.refusals[f"{one.status} {one.detail}".strip()] += 1
        if flaw is not None:
            self.flaw(*flaw)

    def take_call(self, one: CallOutcome) -> None:
        """Count the answer to a control call, and hold it to what it may be."""
        with self._lock:
            named = f"{one.status} {one.detail}".strip() if one.status else "connection lost"
            self.calls.setdefault(one.what, Counter())[named] += 1
        around = self.during(one.asked_s, one.answered_s)
        if not one.status:
            if not self.during(one.asked_s, one.answered_s, front=True):
                self.flaw(BROKEN, f"{one.what}, during {around}: {one.detail}")
        elif (one.status, one.detail) == TRIAL_FAILED and around:
            pass  # the content is taken for the reason of what happened to the board
        elif one.status not in CALLS_ALLOWED:
            self.flaw(NOT_ALLOWED, f"{one.what}, during {around}: {named} {one.message}")
        elif one.status in RETRIED_LATER and not one.retry_after:
            self.flaw(NO_TIME, f"{one.what}: {named} {one.message}")
        elif one.status not in CALLS_DONE and not one.error_object:
            self.flaw(NO_OBJECT, f"{one.what}: {named}")

    def repeat(self, kind: str, *, replayed: bool) -> None:
        """Count a repeat with the key of an earlier request."""
        with self._lock:
            figures = self.kinds.setdefault(kind, KindFigures())
            figures.repeated += 1
            figures.replayed += replayed

    def flaw(self, what: str, example: str) -> None:
        """Record a broken invariant."""
        with self._lock:
            self.flaws[what] += 1
            quoted = self.examples.setdefault(what, [])
            if len(quoted) < SHOWN:
                quoted.append(example)
                self._fresh.append(f"{what}: {example}")

    def fresh(self) -> list[str]:
        """Return the examples since the last call."""
        with self._lock:
            found, self._fresh = self._fresh, []
            return found

    def _flaw(self, one: Outcome) -> tuple[str, str] | None:
        if one.ending is Ending.WHOLE:
            return _wrong(one)
        if one.ending is Ending.REFUSED:
            return _refusal(one)
        by_fault = one.ending in (Ending.BROKEN, Ending.UNREACHED)
        if by_fault and self.during(one.sent_s, one.ended_s, front=True):
            return None
        what = _ENDED_WRONG.get(one.ending)
        return None if what is None else (what, self._example(one))

    def _example(self, one: Outcome) -> str:
        around = ", ".join(dict.fromkeys(self.during(one.sent_s, one.ended_s))) or "no fault"
        words = f"{one.detail} {one.message}".strip()
        lasted = f"{one.ended_s - one.sent_s:.1f} s"
        return f"{one.kind}, after {lasted}, during {around}: {words or one.ending.value}"


def _wrong(one: Outcome) -> tuple[str, str] | None:
    if one.found is None or one.truth is None:
        return "an answer without anything to judge it by", f"{one.kind}: {one.detail}"
    if one.found == one.truth:
        return None
    return "an answer is wrong", f"{one.kind}: wrong{one.truth.difference(one.found)} {one.detail}"


def _refusal(one: Outcome) -> tuple[str, str] | None:
    named = f"{one.kind}: {one.status} {one.detail} {one.message}".strip()
    if one.status not in ALLOWED:
        return NOT_ALLOWED, named
    if not one.error_object:
        return NO_OBJECT, named
    if one.status in RETRIED_LATER and not one.retry_after:
        return NO_TIME, named
    return None


def faults_total(faults: Iterable[FaultCount]) -> FaultCount:
    """Return the counts of all kinds together."""
    found = FaultCount()
    for one in faults:
        found.fired += one.fired
        found.missed += one.missed
        found.back_s += one.back_s
    return found
