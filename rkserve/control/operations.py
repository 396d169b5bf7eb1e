"""Records of operations, their states, and the rules for concurrent operations. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum

from rkserve.control import params as read
from rkserve.control.params import Json, Params
from rkserve.control.state_changes import overlap
from rkserve.core.desired_state import InFlight, Scope
from rkserve.core.errors import OperationConflict, RkserveError


class OperationKind(str, Enum):
    """The kinds of operations."""

    PAUSE = "pause"
    RESUME = "resume"
    SLEEP = "sleep"
    WAKE = "wake"
    CACHE_RESET = "cache_reset"
    ABORT = "abort"
    ADAPTER_STAGE = "adapter_stage"
    ADAPTER_ROLLOUT = "adapter_rollout"
    ADAPTER_ROLLBACK = "adapter_rollback"
    ADAPTER_PROMOTE = "adapter_promote"
    ADAPTER_RETIRE = "adapter_retire"
    LABEL = "label"
    WEIGHT_UPDATE = "weight_update"
    REBASE = "rebase"


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

    Those of a pause: ``stopping`` (boards are told), ``undoing``; of a sleep ``sleeping``,
    ``undoing``, and of a wake-up ``waking``. Those of a rollout: ``staging``, ``loading``,
    ``stopping``, ``switching``, ``observing``, ``releasing`` (committed, boards continue),
    ``undoing``; the last before the end tells where it ended: ``done``.
    """

    ACCEPTED = "accepted"
    STAGING = "staging"
    LOADING = "loading"
    STOPPING = "stopping"
    SLEEPING = "sleeping"
    WAKING = "waking"
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
    operation runs, ``waiting`` boards were told and have not answered.
    """

    WAITING = "waiting"
    OK = "ok"
    GONE = "gone"
    SILENT = "silent"
    FAILED = "failed"


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
    details: Mapping[str, Json] = field(default_factory=dict, hash=False)

    @property
    def good(self) -> bool:
        """True if nothing is left to do on the board: it succeeded, or is gone."""
        return self.status in (ResultStatus.OK, ResultStatus.GONE)


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


@dataclass(frozen=True, slots=True)
class ControlOperation:
    """One operation. Times are in seconds since 1970, ``phases`` are (name, milliseconds).

    ``params`` are those of its call, ``who`` names the caller without any secret. ``epoch`` is the
    last one that it made (0: none). ``key`` and ``fingerprint`` are those of the call, so that a
    repeated call finds it. ``results`` are by board ID. ``error`` is None on success.
    """

    id: str
    kind: OperationKind
    state: OperationState = OperationState.RUNNING
    phase: Phase = Phase.ACCEPTED
    params: Params = field(default_factory=dict, hash=False)
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

    def heard(self, board_id: str, result: BoardOutcome) -> ControlOperation:
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


# These hold boards briefly, unless their strategy is rolling or canary.
_HOLDERS = frozenset(
    {
        OperationKind.ADAPTER_ROLLOUT,
        OperationKind.ADAPTER_ROLLBACK,
        OperationKind.WEIGHT_UPDATE,
    }
)
# These change the versions that a model serves.
ROLLOUTS = frozenset(
    {
        OperationKind.ADAPTER_ROLLOUT,
        OperationKind.ADAPTER_ROLLBACK,
        OperationKind.ADAPTER_PROMOTE,
        OperationKind.ADAPTER_RETIRE,
        OperationKind.WEIGHT_UPDATE,
        OperationKind.REBASE,
    }
)
# Those of them that may change base weights.
UPDATES = frozenset({OperationKind.WEIGHT_UPDATE, OperationKind.REBASE})
# Their effect is not promised to the caller before they are answered.
HOLDS = frozenset({OperationKind.PAUSE, OperationKind.SLEEP})
_PAUSING = frozenset({OperationKind.PAUSE, OperationKind.RESUME, OperationKind.WAKE})
_RESTING = frozenset({OperationKind.SLEEP, OperationKind.WAKE})
_K = OperationKind


def conflict(
    running: Iterable[ControlOperation], kind: OperationKind, params: Params
) -> str | None:
    """Return why a running operation excludes the requested one; None if none does.

    ``promote`` and ``rollback`` of an adapter whose canary is being observed are allowed: that
    rollout (``deciding``) receives them instead of a new operation.
    """
    for one in running:
        if not one.over and (why := _excludes(one, kind, params)):
            return f"Operation '{one.id}' ({one.kind.value}) is going on: {why}"
    return None


def deciding(
    running: Iterable[ControlOperation], kind: OperationKind, params: Params
) -> ControlOperation | None:
    """Return the observed canary that a ``promote`` or ``rollback`` decides, if any."""
    if kind not in (_K.ADAPTER_PROMOTE, _K.ADAPTER_ROLLBACK):
        return None
    return next((one for one in running if _is_observed(one) and _same_line(one, params)), None)


def _excludes(one: ControlOperation, kind: OperationKind, params: Params) -> str | None:
    if one.kind in ROLLOUTS:
        return _beside_rollout(one, kind, params)
    if one.kind in _RESTING:
        return _beside_rest(one, kind, params)
    if _stops(one) and kind is _K.RESUME:
        meet = overlap(read.scope(one.params), read.scope(params))
        return "boards are still stopping; resume once it is answered." if meet else None
    if one.kind is _K.ADAPTER_STAGE and kind in (_K.ADAPTER_STAGE, _K.ADAPTER_RETIRE):
        return _same_version(one, params, "that version is being staged.")
    return None


def _stops(one: ControlOperation) -> bool:
    """Return whether it stops boards; a reset that interrupts running requests does so briefly."""
    resets = one.kind is _K.CACHE_RESET
    return one.kind is _K.PAUSE or (
        resets and read.flag(one.params, "reset_running_requests", default=False)
    )


def _beside_rest(one: ControlOperation, kind: OperationKind, params: Params) -> str | None:
    """Exclude changes of the served versions on boards that are going to sleep or waking up."""
    if kind in ROLLOUTS:
        meant = Scope(models=(read.text(params, "model"),))
    elif kind in _RESTING and kind is not one.kind:
        meant = read.scope(params)
    else:
        return None
    if not overlap(read.scope(one.params), meant):
        return None
    going = "going to sleep" if one.kind is _K.SLEEP else "waking up"
    return f"boards are still {going}; ask again once it is answered."


def _beside_rollout(one: ControlOperation, kind: OperationKind, params: Params) -> str | None:
    if kind in ROLLOUTS:
        return _rollouts(one, kind, params)
    if kind is _K.SLEEP:
        served = Scope(models=(read.text(one.params, "model"),))
        meet = overlap(served, read.scope(params))
        return "it changes what the model serves; let it sleep once that is over." if meet else None
    if kind in _PAUSING:
        return _pause_against_rollout(one, params)
    if kind is _K.LABEL and one.kind in UPDATES and _same_model(one, params):
        return "it brings its own label of the weights."
    if kind is _K.ADAPTER_STAGE and one.kind is _K.ADAPTER_RETIRE:
        return _same_version(one, params, "that version is being retired.")
    return None


def _rollouts(one: ControlOperation, kind: OperationKind, params: Params) -> str | None:
    if not _same_model(one, params):
        return None
    decides = kind in (_K.ADAPTER_PROMOTE, _K.ADAPTER_ROLLBACK)
    if decides and _is_observed(one) and _same_line(one, params):
        return None
    return "only one operation at a time changes what a model serves."


def _pause_against_rollout(one: ControlOperation, params: Params) -> str | None:
    at_once = (one.params.get("strategy") or "atomic") == "atomic"  # null is a default as well
    if one.kind not in _HOLDERS or not at_once or not _holds_now(one):
        return None
    adapter = None if _is_held_first(one) else read.optional_text(one.params, "name")
    held = Scope(models=(read.text(one.params, "model"),), adapter=adapter)
    meet = overlap(held, read.scope(params))
    return "it holds the boards for a moment; try again." if meet else None


def _holds_now(one: ControlOperation) -> bool:
    """Return whether boards are held, also during a load under the hold."""
    loads = one.phase in (Phase.LOADING, Phase.SWITCHING)
    return one.phase in HOLDING or (loads and _is_held_first(one))


def _is_held_first(one: ControlOperation) -> bool:
    """Return whether it holds the whole model before boards load."""
    return one.kind is _K.WEIGHT_UPDATE and one.params.get("in_flight") != InFlight.PIN.value


def _same_model(one: ControlOperation, params: Params) -> bool:
    return one.params.get("model") == params.get("model")


def _is_observed(one: ControlOperation) -> bool:
    return (
        not one.over and one.kind is OperationKind.ADAPTER_ROLLOUT and one.phase is Phase.OBSERVING
    )


def _same_line(one: ControlOperation, params: Params) -> bool:
    return all(one.params.get(name) == params.get(name) for name in ("model", "name"))


def _same_version(one: ControlOperation, params: Params, why: str) -> str | None:
    if not _same_line(one, params):
        return None
    versions = (one.params.get("version"), params.get("version"))
    return why if None in versions or versions[0] == versions[1] else None
