"""Comparison of a canary with the active version, from the boards' counters. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from rkserve.core.board_report import BoardReport, VersionFigures


class CanaryVerdict(str, Enum):
    """The state of the comparison."""

    WAIT = "wait"
    GOOD = "good"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class CanaryAssessment:
    """A verdict and a sentence with its reason."""

    verdict: CanaryVerdict
    reason: str


@dataclass(frozen=True, slots=True)
class CanaryLimits:
    """The requirements on a canary, and how much worse than the active version it may be.

    It can be good only after ``requests`` ended requests and ``tokens`` generated tokens. Its share
    of failed requests (0 to 1) may exceed the active version's by ``failures``, and its decode
    tokens/s must reach the fraction ``speed`` of the active version's.
    """

    requests: int = 20
    tokens: int = 200
    failures: float = 0.05
    speed: float = 0.8


@dataclass(frozen=True, slots=True)
class CanaryWatch:
    """The boards' counters per version since the watch began; it survives replaced replicas.

    ``seen`` are the last counters by (replica, version), which run since a replica's start;
    ``gained`` by (board ID, version) is the increase since a board's first report.
    """

    seen: Mapping[tuple[str, str], VersionFigures] = field(default_factory=dict, hash=False)
    gained: Mapping[tuple[str, str], VersionFigures] = field(default_factory=dict, hash=False)
    boards: frozenset[str] = frozenset()

    def saw(self, reports: Sequence[BoardReport]) -> CanaryWatch:
        """Return it with the boards' reports added. A board's first report is its zero point."""
        seen, gained = dict(self.seen), dict(self.gained)
        for report in reports:
            for now in report.versions:
                there, mine = (report.replica, now.version), (report.board_id, now.version)
                if report.board_id in self.boards:
                    gained[mine] = _sum(gained.get(mine), _gain(seen.get(there), now))
                seen[there] = now
        return CanaryWatch(seen, gained, self.boards | {report.board_id for report in reports})

    def judge(
        self, candidate: str, active: str | None, limits: CanaryLimits | None = None
    ) -> CanaryAssessment:
        """Return the verdict of one version against another, by their names (None: no other)."""
        return judge(self._of(candidate), self._of(active), limits or CanaryLimits())

    def _of(self, version: str | None) -> dict[str, VersionFigures]:
        return {board: one for (board, name), one in self.gained.items() if name == version}


def _gain(before: VersionFigures | None, now: VersionFigures) -> VersionFigures:
    # The first report of a new replica counts in full: it started after the watch began.
    if before is None:
        return now
    return VersionFigures(
        now.version,
        now.requests - before.requests,
        now.failed - before.failed,
        now.tokens - before.tokens,
        now.decode_ms - before.decode_ms,
    )


def _sum(one: VersionFigures | None, other: VersionFigures) -> VersionFigures:
    if one is None:
        return other
    return replace(
        one,
        requests=one.requests + other.requests,
        failed=one.failed + other.failed,
        tokens=one.tokens + other.tokens,
        decode_ms=one.decode_ms + other.decode_ms,
    )


def judge(
    candidate: Mapping[str, VersionFigures],
    active: Mapping[str, VersionFigures],
    limits: CanaryLimits,
) -> CanaryAssessment:
    """Return the verdict from each board's counters for the candidate and the active version.

    Failures count at once: the verdict is bad as soon as successes of all remaining required
    requests could not restore the rate. Speed is compared board by board, because boards differ
    more than versions do; boards that ran only one of the two are left out.
    """
    requests, failed = _totals(candidate)
    allowed = _rate(*_totals(active)) + limits.failures
    rate = failed / max(requests, limits.requests, 1)
    if rate > allowed:
        return CanaryAssessment(
            CanaryVerdict.BAD,
            f"{failed} of {requests} requests failed; {allowed:.1%} are allowed, by those of the "
            "active version.",
        )
    tokens = sum(one.tokens for one in candidate.values())
    if requests < limits.requests or tokens < limits.tokens:
        return CanaryAssessment(
            CanaryVerdict.WAIT,
            f"{requests} of {limits.requests} requests and {tokens} of {limits.tokens} tokens so "
            "far.",
        )
    return _speed(candidate, active, limits)


def _speed(
    candidate: Mapping[str, VersionFigures],
    active: Mapping[str, VersionFigures],
    limits: CanaryLimits,
) -> CanaryAssessment:
    expected_ms = actual_ms = 0.0
    for board, one in candidate.items():
        other = active.get(board)
        if other is None or not (one.tokens and other.tokens and one.decode_ms > 0):
            continue
        expected_ms += one.tokens * other.decode_ms / other.tokens
        actual_ms += one.decode_ms
    if not actual_ms:
        return CanaryAssessment(
            CanaryVerdict.GOOD, "It fails no more often; nothing to compare its speed with."
        )
    speed = expected_ms / actual_ms
    said = f"It decodes at {speed:.0%} of the active version's speed on the same boards"
    if speed < limits.speed:
        return CanaryAssessment(CanaryVerdict.BAD, f"{said}; {limits.speed:.0%} are asked for.")
    return CanaryAssessment(CanaryVerdict.GOOD, f"{said}, and fails no more often.")


def _totals(figures: Mapping[str, VersionFigures]) -> tuple[int, int]:
    return (
        sum(one.requests for one in figures.values()),
        sum(one.failed for one in figures.values()),
    )


def _rate(requests: int, failed: int) -> float:
    return failed / requests if requests else 0.0
