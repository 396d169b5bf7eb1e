"""Plans of rollouts: their stages, the change of the desired state by each move, and the comparison
of a canary with the active version. Pure.

The order of moves and the meaning of answers are those of ``rollout``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar

from rkserve.control import state_changes
from rkserve.control.calls import AdapterRollbackAction, AdapterRolloutAction, Strategy
from rkserve.core.board_report import BoardReport, VersionFigures
from rkserve.core.desired_state import (
    ActivePause,
    AdapterVersion,
    Artifact,
    Desired,
    InFlight,
    PauseMode,
    Scope,
)
from rkserve.core.errors import OperationConflict, RequestError


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
    sentence = f"It decodes at {speed:.0%} of the active version's speed on the same boards"
    if speed < limits.speed:
        return CanaryAssessment(CanaryVerdict.BAD, f"{sentence}; {limits.speed:.0%} are asked for.")
    return CanaryAssessment(CanaryVerdict.GOOD, f"{sentence}, and fails no more often.")


def _totals(figures: Mapping[str, VersionFigures]) -> tuple[int, int]:
    return (
        sum(one.requests for one in figures.values()),
        sum(one.failed for one in figures.values()),
    )


def _rate(requests: int, failed: int) -> float:
    return failed / requests if requests else 0.0


class Move(str, Enum):
    """A request to boards. All but the first two are changes of the desired state."""

    STAGE = "stage"
    LOAD = "load"
    HOLD = "hold"
    OFFER = "offer"
    SWITCH = "switch"
    COMMIT = "commit"
    UNDO = "undo"


class RolloutStage(Enum):
    """The stages of a rollout that are not one move of all boards."""

    ROLL = "roll"
    OBSERVE = "observe"


Stages = tuple[Move | RolloutStage, ...]

_STAGES: dict[Strategy, Stages] = {
    Strategy.ATOMIC: (Move.STAGE, Move.LOAD, Move.HOLD, Move.COMMIT),
    Strategy.ROLLING: (Move.STAGE, Move.OFFER, RolloutStage.ROLL, Move.COMMIT),
    Strategy.CANARY: (Move.STAGE, Move.LOAD, Move.OFFER, RolloutStage.OBSERVE, Move.COMMIT),
}
_BACK: Stages = (Move.HOLD, Move.COMMIT)
# Boards load between two runs, which may take minutes; held boards load at once.
_HELD_FIRST: Stages = (Move.STAGE, Move.HOLD, Move.LOAD, Move.COMMIT)


@dataclass(frozen=True, slots=True)
class MoveRequest:
    """Ask boards for a move and report each answer (``BoardAnswered``, ``BoardLeft``).

    A change is applied (``RolloutPlan.apply``) and stored first, once, also if ``boards`` is empty;
    a failure of that (``ChangeRefused``) is reported before any other event. Boards that are not in
    ``boards`` may get it too, and their answers are ignored.
    """

    move: Move
    boards: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan(ABC):
    """The plan of a rollout: its stages, and the change of the desired state by each move.

    ``boards`` are those present at the start, of which ``max_unavailable`` take a turn at a time. A
    canary is observed for ``observe_s`` seconds, and without ``auto`` until a manual decision.
    ``hold_s`` is the lease of its own pause in seconds: more than boards may take to stop and to
    continue. The commit records ``step``, a trainer's. ``heavy``: a switch makes boards load the
    whole model.
    """

    heavy: ClassVar[bool] = False
    operation: str
    model: str
    version: Artifact | None
    boards: tuple[str, ...]
    max_unavailable: int = 1
    in_flight: InFlight = InFlight.PIN
    observe_s: float = 0.0
    auto: bool = True
    hold_s: float = 60.0
    step: int | None = None

    @property
    @abstractmethod
    def stages(self) -> Stages:
        """Its stages, in order."""

    @property
    @abstractmethod
    def held(self) -> Scope:
        """The part of the cluster that a hold stops."""

    @property
    @abstractmethod
    def needs_hold(self) -> bool:
        """Return whether it may commit only while it holds the boards."""

    @abstractmethod
    def turn(self, at: Move | RolloutStage) -> tuple[Move, ...]:
        """Return the moves that boards make one after the other in that stage; none if all go at
        once.
        """

    @abstractmethod
    def offer(self, desired: Desired) -> Desired:
        """Return the state with the version known, and served to no session or to some."""

    @abstractmethod
    def switch(self, desired: Desired, boards: tuple[str, ...]) -> Desired:
        """Return the state in which these boards serve it."""

    @abstractmethod
    def committed(self, desired: Desired) -> Desired:
        """Return the state in which every board serves it."""

    @abstractmethod
    def undone(self, desired: Desired) -> Desired:
        """Return the state without it."""

    @abstractmethod
    def noted(self, desired: Desired) -> Desired:
        """Return the state with the trainer's step."""

    def apply(self, move: MoveRequest, desired: Desired, now_s: float) -> Desired:
        """Return the desired state after a move; ``STAGE`` and ``LOAD`` do not change it.

        The result is one epoch later, or the same value if there is nothing to change. ``now_s`` is
        in seconds since 1970. Raises the errors of ``state_changes``, and ``OperationConflict`` for
        a commit whose hold has ended, to be reported as ``RolloutCancelled``.
        """
        if move.move is Move.HOLD:
            until_s = now_s + self.hold_s
            pause = ActivePause(
                self.operation, self.held, PauseMode.KEEP, since_s=now_s, expires_s=until_s
            )
            return state_changes.hold(desired, pause)
        if move.move is Move.OFFER:
            return self.offer(desired)
        if move.move is Move.SWITCH:
            return self.switch(desired, move.boards)
        if move.move is Move.COMMIT:
            self.require_hold(desired)
            return state_changes.as_one(desired, self.committed, self.noted, self._withdrawn)
        if move.move is Move.UNDO:
            return state_changes.as_one(desired, self._withdrawn, self.undone)
        return desired

    def require_hold(self, desired: Desired) -> None:
        """Raise ``OperationConflict`` if a hold that it needs has ended."""
        held = any(pause.operation == self.operation for pause in desired.pauses)
        if self.needs_hold and not held:
            raise OperationConflict("Its hold on the boards ended before all were ready.")

    def _withdrawn(self, desired: Desired) -> Desired:
        return state_changes.withdraw(desired, self.operation)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRolloutPlan(RolloutPlan):
    """The plan of a rollout of an adapter, which is loaded beside the model.

    ``version`` is None for a manual rollback. ``weight`` (0 to 1) is the canary's share of the
    sessions. ``keep`` is the number of versions kept beside the active and the previous one.
    ``held_first``: an atomic rollout holds all requests of the model before boards load, instead of
    those of the adapter afterwards.
    """

    name: str
    version: AdapterVersion | None
    strategy: Strategy = Strategy.ATOMIC
    weight: float = 0.1
    observe_s: float = 60.0
    keep: int = state_changes.KEEP_VERSIONS
    held_first: bool = False

    @property
    def stages(self) -> Stages:
        """See ``RolloutPlan``."""
        if self.held_first and self.version is not None:
            return _HELD_FIRST
        return _BACK if self.version is None else _STAGES[self.strategy]

    @property
    def held(self) -> Scope:
        """See ``RolloutPlan``."""
        return Scope(models=(self.model,), adapter=None if self.held_first else self.name)

    @property
    def needs_hold(self) -> bool:
        """See ``RolloutPlan``."""
        return self.strategy is Strategy.ATOMIC

    def turn(self, at: Move | RolloutStage) -> tuple[Move, ...]:
        """See ``RolloutPlan``."""
        if at is RolloutStage.ROLL:
            return (Move.LOAD, Move.SWITCH)
        canary = at is Move.LOAD and self.strategy is Strategy.CANARY
        return (Move.LOAD,) if canary else ()

    def offer(self, desired: Desired) -> Desired:
        """See ``RolloutPlan``."""
        return self.offered(desired, self.weight if self.strategy is Strategy.CANARY else 0.0)

    def switch(self, desired: Desired, boards: tuple[str, ...]) -> Desired:
        """See ``RolloutPlan``."""
        return state_changes.switch(desired, self.model, self.name, boards)

    def undone(self, desired: Desired) -> Desired:
        """See ``RolloutPlan``."""
        line = desired.line(self.model, self.name)
        if line is None or line.candidate is None or line.candidate != self.version:
            return desired
        return state_changes.drop(desired, self.model, self.name)

    def check(self, desired: Desired) -> None:
        """Raise the errors of the commit, before anything is staged or stopped for it."""
        self.noted(self.committed(desired))

    def holds(self, desired: Desired) -> bool:
        """Return whether the version is already the active one, with nothing else to record."""
        return self.step is None and self._serves(desired)

    def noted(self, desired: Desired) -> Desired:
        """Return the state with the trainer's step, if there is one."""
        if self.step is None:
            return desired
        return state_changes.set_step(desired, self.model, self.step)

    def _serves(self, desired: Desired) -> bool:
        line = desired.line(self.model, self.name)
        return self.version is not None and line is not None and line.active == self.version

    def committed(self, desired: Desired) -> Desired:
        """Return the state with the new version active, whether it was a candidate before or
        not.
        """
        if self.version is None:
            return state_changes.rollback(
                desired, self.model, self.name, in_flight=self.in_flight, keep=self.keep
            )
        line = desired.line(self.model, self.name)
        if line is None or line.candidate != self.version:
            desired = self.offered(desired, 0.0)
        if self._serves(desired):
            return desired
        return state_changes.commit(desired, self.model, self.name, self.keep)

    def offered(self, desired: Desired, weight: float) -> Desired:
        """Return the state with the new version as a candidate."""
        if self.version is None:
            raise OperationConflict("A rollback brings in no version.")
        return state_changes.begin(
            desired, self.model, self.version, weight=weight, in_flight=self.in_flight
        )


def plan(
    operation: str,
    asked: AdapterRolloutAction | AdapterRollbackAction,
    version: AdapterVersion | None,
    boards: Iterable[str],
    *,
    hold_s: float = 60.0,
    keep: int = state_changes.KEEP_VERSIONS,
) -> AdapterRolloutPlan:
    """Return the plan of an action; a rollback has no version. Raises ``RequestError``."""
    given = AdapterRolloutPlan(
        operation=operation,
        model=asked.model,
        name=asked.name,
        version=None,
        boards=tuple(sorted(set(boards))),
        hold_s=hold_s,
        keep=keep,
    )
    if isinstance(asked, AdapterRollbackAction):
        return given
    if version is None:
        raise RequestError("'version' is required.", "version")
    return replace(
        given,
        version=version,
        strategy=asked.strategy,
        max_unavailable=asked.max_unavailable,
        weight=asked.weight,
        in_flight=asked.in_flight,
        observe_s=asked.observe_s,
        auto=asked.auto,
    )
