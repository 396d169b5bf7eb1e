"""Records of operations, their states, and the rules for concurrent operations. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeGuard

from pydantic import JsonValue

from rkserve.control.calls import (
    AdapterPromoteAction,
    AdapterRetireAction,
    AdapterRollbackAction,
    AdapterRolloutAction,
    AdapterStageAction,
    AnyAction,
    BoardAction,
    CacheResetAction,
    LabelAction,
    OperationKind,
    PauseAction,
    ResumeAction,
    ServingAction,
    SleepAction,
    Strategy,
    WakeAction,
    WeightUpdateAction,
)
from rkserve.control.state_changes import overlap
from rkserve.core.desired_state import InFlight, Scope
from rkserve.core.errors import OperationConflict, RkserveError
from rkserve.core.skew import crosses_versions


class OperationState(str, Enum):
    """The state of an operation.

    ``partial``: the change is in effect, but some boards have not followed yet. ``failed``: it
    ended before it changed anything served. ``undone``: its changes were reverted.
    """

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    PARTIAL = "partial"
    FAILED = "failed"
    UNDONE = "undone"


_S = OperationState
# A partial operation succeeds when the last board has followed. All other end states are final.
TRANSITIONS: frozenset[tuple[OperationState, OperationState]] = frozenset(
    {
        (_S.RUNNING, _S.SUCCEEDED),
        (_S.RUNNING, _S.PARTIAL),
        (_S.RUNNING, _S.FAILED),
        (_S.RUNNING, _S.UNDONE),
        (_S.PARTIAL, _S.SUCCEEDED),
    }
)


class Phase(str, Enum):
    """The phase of a running operation.

    Those of a pause: ``stopping`` (boards get the new state), ``undoing``; of a sleep ``sleeping``,
    ``undoing``, and of a wake-up ``waking``; of a drain ``draining``, of errands to one board
    ``restarting`` and ``measuring``; of a staging ``trying`` (one board loads the adapter). Those
    of a rollout: ``staging``, ``loading``, ``stopping``, ``switching``, ``observing``,
    ``releasing`` (committed, boards continue), ``undoing``; the last before the end tells where it
    ended: ``done``.
    """

    ACCEPTED = "accepted"
    STAGING = "staging"
    TRYING = "trying"
    LOADING = "loading"
    STOPPING = "stopping"
    SLEEPING = "sleeping"
    WAKING = "waking"
    DRAINING = "draining"
    RESTARTING = "restarting"
    MEASURING = "measuring"
    SWITCHING = "switching"
    OBSERVING = "observing"
    RELEASING = "releasing"
    UNDOING = "undoing"
    DONE = "done"


# An atomic rollout holds boards in this phase; a commit or an undo removes the hold in the same
# epoch, so that nothing is held while boards still follow.
HOLDING = frozenset({Phase.STOPPING})


class ResultStatus(str, Enum):
    """The result of an operation on one board; ``gone`` boards have no replica any more. While the
    operation runs, ``waiting`` boards got the new state and have not answered.
    """

    WAITING = "waiting"
    OK = "ok"
    GONE = "gone"
    SILENT = "silent"
    FAILED = "failed"


@crosses_versions
@dataclass(frozen=True, slots=True)
class BoardOutcome:
    """One board's answer. ``latency_ms`` is from the call to its answer.

    ``error`` is an error code such as ``stage_failed``, and empty on success; ``details`` are
    figures that go into the answer unchanged (``stopped``, ``kept``, ``load_ms``, ...).
    """

    status: ResultStatus
    latency_ms: float = 0.0
    error: str = ""
    message: str = ""
    details: Mapping[str, JsonValue] = field(default_factory=dict, hash=False)

    @property
    def good(self) -> bool:
        """True if nothing is left to do on the board: it succeeded, or is gone."""
        return self.status in (ResultStatus.OK, ResultStatus.GONE)


@crosses_versions
@dataclass(frozen=True, slots=True)
class ControlError:
    """The reason for an operation's failure, as answered: HTTP status, code and message."""

    status: int
    code: str
    message: str

    @classmethod
    def of(cls, error: RkserveError) -> ControlError:
        """Return the answer to an error."""
        return cls(error.http_status, error.code or "internal_error", error.message)


@crosses_versions
@dataclass(frozen=True, slots=True)
class ControlOperation:
    """One operation. Times are in seconds since 1970, ``phases`` are (name, milliseconds).

    ``action`` is that of its call, ``who`` names the caller without any secret. ``epoch`` is the
    last one that it made (0: none). ``key`` and ``fingerprint`` are those of the call, so that a
    repeated call finds it. ``results`` are by board ID. ``error`` is None on success.
    """

    id: str
    action: AnyAction
    state: OperationState = OperationState.RUNNING
    phase: Phase = Phase.ACCEPTED
    who: str = ""
    created_s: float = 0.0
    finished_s: float | None = None
    epoch: int = 0
    key: str | None = None
    fingerprint: str = ""
    results: Mapping[str, BoardOutcome] = field(default_factory=dict, hash=False)
    phases: tuple[tuple[str, float], ...] = ()
    error: ControlError | None = None

    @property
    def kind(self) -> OperationKind:
        """The kind of its action."""
        return self.action.kind

    @property
    def params(self) -> dict[str, JsonValue]:
        """The parameters of its call as JSON data."""
        return self.action.params

    @property
    def over(self) -> bool:
        """True if it has ended."""
        return self.state is not OperationState.RUNNING

    @property
    def succeeded(self) -> int:
        """The number of boards that succeeded or are gone."""
        return sum(result.good for result in self.results.values())

    @property
    def status(self) -> int:
        """The HTTP status of its state."""
        if self.error is not None:
            return self.error.status
        return {_S.RUNNING: 202, _S.PARTIAL: 207}.get(self.state, 200)

    def at(self, phase: Phase, *, epoch: int | None = None) -> ControlOperation:
        """Return it in another phase. Raises ``OperationConflict`` if it is over."""
        if self.over:
            raise OperationConflict(f"Operation '{self.id}' is over: it is {self.state.value}.")
        return replace(self, phase=phase, epoch=self.epoch if epoch is None else epoch)

    def with_result(self, board_id: str, result: BoardOutcome) -> ControlOperation:
        """Return it with one board's latest answer."""
        return replace(self, results={**self.results, board_id: result})

    def spent(self, phase: str, ms: float) -> ControlOperation:
        """Return it with the duration of a phase in milliseconds."""
        return replace(self, phases=(*self.phases, (phase, ms)))

    def end(
        self, state: OperationState, now_s: float, error: ControlError | None = None
    ) -> ControlOperation:
        """Return it ended. Raises ``OperationConflict`` for a transition that ``TRANSITIONS``
        lacks.
        """
        if (self.state, state) not in TRANSITIONS:
            raise OperationConflict(
                f"Operation '{self.id}' is {self.state.value} and cannot become {state.value}."
            )
        return replace(self, state=state, phase=Phase.DONE, finished_s=now_s, error=error)


@crosses_versions
@dataclass(frozen=True, slots=True)
class OperationOutcome:
    """The answer to an ``OperationRequest``. ``status`` is HTTP's: 200, 202, 207, or that of
    ``operation.error``.

    ``applied`` is False if this call changed nothing: it repeats an earlier one, or its change was
    already in effect. ``emitted`` has the token counts of stopped generations by request ID.
    """

    status: int
    operation: ControlOperation
    applied: bool = True
    emitted: Mapping[str, int] = field(default_factory=dict, hash=False)


# These may change base weights.
UPDATES = frozenset({OperationKind.WEIGHT_UPDATE, OperationKind.REBASE})
# Their effect is not promised to the caller before they are answered.
HOLDS = frozenset({OperationKind.PAUSE, OperationKind.SLEEP})


def conflict(running: Iterable[ControlOperation], asked: AnyAction) -> str | None:
    """Return why a running operation excludes the requested one; None if none does.

    ``promote`` and ``rollback`` of an adapter whose canary is being observed are allowed: that
    rollout (``deciding``) receives them instead of a new operation.
    """
    for one in running:
        if not one.over and (why := _excludes(one, asked)):
            return f"Operation '{one.id}' ({one.kind.value}) is going on: {why}"
    return None


def deciding(running: Iterable[ControlOperation], asked: AnyAction) -> ControlOperation | None:
    """Return the observed canary that a ``promote`` or ``rollback`` decides, if any."""
    return next((one for one in running if _decides(asked, one)), None)


def _excludes(one: ControlOperation, asked: AnyAction) -> str | None:
    doing = one.action
    if isinstance(asked, BoardAction):
        return _beside_errand(one, asked)
    if isinstance(doing, ServingAction):
        return _beside_rollout(one, doing, asked)
    if isinstance(doing, SleepAction | WakeAction):
        return _beside_sleep(doing, asked)
    if isinstance(asked, ResumeAction) and _stops(doing):
        meet = overlap(doing.scope, asked.scope)
        return "boards are still stopping; resume once it is answered." if meet else None
    if isinstance(doing, AdapterStageAction) and isinstance(
        asked, AdapterStageAction | AdapterRetireAction
    ):
        return "that version is being staged." if _is_same_version(doing, asked) else None
    return None


def _beside_errand(one: ControlOperation, asked: BoardAction) -> str | None:
    """Exclude a restart or measurement of a board whose engine another operation is changing.

    The models of boards are not known here: an operation on a model may be about another one.
    """
    doing = one.action
    if isinstance(doing, BoardAction):
        return "one such call to a board at a time." if doing.board == asked.board else None
    if isinstance(doing, ServingAction):
        changes = one.kind in UPDATES or _held(one) is not None
        meant = not asked.models or doing.model in asked.models
        return (
            "boards load what it brings; ask again once it is over." if changes and meant else None
        )
    if isinstance(doing, SleepAction | WakeAction) or _stops(doing):
        meet = overlap(doing.scope, asked.scope)
        return "boards are still following it; ask again once it is answered." if meet else None
    return None


def _stops(doing: AnyAction) -> TypeGuard[PauseAction | CacheResetAction]:
    """Return whether it stops boards; a reset that interrupts running requests does so briefly."""
    if isinstance(doing, CacheResetAction):
        return doing.reset_running_requests
    return isinstance(doing, PauseAction)


def _beside_sleep(doing: SleepAction | WakeAction, asked: AnyAction) -> str | None:
    """Exclude changes of the served versions on boards that are going to sleep or waking up."""
    if isinstance(asked, ServingAction):
        meant = Scope(models=(asked.model,))
    elif isinstance(asked, SleepAction | WakeAction) and asked.kind is not doing.kind:
        meant = asked.scope
    else:
        return None
    if not overlap(doing.scope, meant):
        return None
    going = "going to sleep" if isinstance(doing, SleepAction) else "waking up"
    return f"boards are still {going}; ask again once it is answered."


def _beside_rollout(one: ControlOperation, doing: ServingAction, asked: AnyAction) -> str | None:
    if isinstance(asked, ServingAction):
        beside = asked.model != doing.model or _decides(asked, one)
        return None if beside else "only one operation at a time changes what a model serves."
    if isinstance(asked, SleepAction):
        meet = overlap(Scope(models=(doing.model,)), asked.scope)
        return "it changes what the model serves; let it sleep once that is over." if meet else None
    if isinstance(asked, PauseAction | ResumeAction | WakeAction):
        held = _held(one)
        meet = held is not None and overlap(held, asked.scope)
        return "it holds the boards for a moment; try again." if meet else None
    if isinstance(asked, LabelAction) and one.kind in UPDATES and asked.model == doing.model:
        return "it brings its own label of the weights."
    if isinstance(asked, AdapterStageAction) and isinstance(doing, AdapterRetireAction):
        return "that version is being retired." if _is_same_version(doing, asked) else None
    return None


def _held(one: ControlOperation) -> Scope | None:
    """Return the part of the cluster that an atomic rollout holds now, also during a load under the
    hold.
    """
    doing = one.action
    if not isinstance(doing, AdapterRolloutAction | AdapterRollbackAction | WeightUpdateAction):
        return None
    if isinstance(doing, AdapterRolloutAction) and doing.strategy is not Strategy.ATOMIC:
        return None
    # An update that does not pin requests holds the whole model before boards load.
    first = isinstance(doing, WeightUpdateAction) and doing.in_flight is not InFlight.PIN
    loads = one.phase in (Phase.LOADING, Phase.SWITCHING)
    if one.phase in HOLDING or (loads and first):
        return Scope(models=(doing.model,), adapter=None if first else doing.name)
    return None


def _decides(asked: AnyAction, one: ControlOperation) -> bool:
    """Return whether it decides that rollout's observed canary."""
    doing = one.action
    return (
        isinstance(asked, AdapterPromoteAction | AdapterRollbackAction)
        and isinstance(doing, AdapterRolloutAction)
        and one.phase is Phase.OBSERVING
        and not one.over
        and (doing.model, doing.name) == (asked.model, asked.name)
    )


def _is_same_version(
    one: AdapterStageAction | AdapterRetireAction, other: AdapterStageAction | AdapterRetireAction
) -> bool:
    """Return whether both are about one version; a retirement without a version is about all."""
    if (one.model, one.name) != (other.model, other.name):
        return False
    return None in (one.version, other.version) or one.version == other.version
