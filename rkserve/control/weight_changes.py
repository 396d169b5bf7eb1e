"""Changes of a model's base weights in the desired state, and the plan of their rollout.

Weights are known by content. The order of moves is that of ``rollout``.

::

    in turn   STAGE all, OFFER (to nobody), SWITCH each board, ``max_unavailable`` at a time, COMMIT
    at once   STAGE all, HOLD all, SWITCH all, COMMIT (new weights, hold released)

The file in the model folder needs no staging.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rkserve.control import state_changes
from rkserve.control.rollout_plan import Move, MoveRequest, RolloutStage, Stages
from rkserve.core.desired_state import (
    ActivePause,
    BaseVersion,
    BaseWeightsChange,
    Desired,
    InFlight,
    PauseMode,
    Scope,
    Weights,
)
from rkserve.core.errors import OperationConflict, RequestError

FOLDER_LABEL = "default"  # of the file in the model folder, until it is given a name


def begin(
    desired: Desired,
    model: str,
    to: BaseVersion | None,
    label: str,
    in_flight: InFlight,
    *,
    everywhere: bool = False,
) -> Desired:
    """Begin a change of base weights: on no board yet, or on all of them (``everywhere``).

    ``to`` of None is the model folder's file.

    Raises ``OperationConflict`` if a change is in progress, and ``RequestError`` for an empty
    label.
    """
    if not label:
        raise RequestError("The label of a version of the weights must not be empty.", "label")
    weights = desired.weights_of(model)
    if weights.rebase is not None:
        raise OperationConflict(f"Model '{model}' is getting other base weights.")
    rebase = BaseWeightsChange(to, label, everywhere=everywhere)
    return state_changes.weigh(desired, replace(weights, rebase=rebase, in_flight=in_flight))


def switch(desired: Desired, model: str, board_ids: Iterable[str]) -> Desired:
    """Make these boards too load them. Raises as ``commit`` does."""
    weights, rebase = _on_their_way(desired, model)
    switched = tuple(sorted({*rebase.switched, *board_ids}))
    return state_changes.weigh(desired, replace(weights, rebase=replace(rebase, switched=switched)))


def commit(desired: Desired, model: str) -> Desired:
    """Make them the model's weights, for every board.

    Raises ``OperationConflict`` if no change is in progress.
    """
    weights, rebase = _on_their_way(desired, model)
    return state_changes.weigh(
        desired, replace(weights, base=rebase.to, label=rebase.label, rebase=None)
    )


def undo(desired: Desired, model: str) -> Desired:
    """Return every board to its previous weights; nothing changes if no change is in progress."""
    return state_changes.weigh(desired, replace(desired.weights_of(model), rebase=None))


def is_same(one: BaseVersion | None, other: BaseVersion | None) -> bool:
    """Return whether both have the same content, whatever their names."""
    return (None if one is None else one.digest) == (None if other is None else other.digest)


def _on_their_way(desired: Desired, model: str) -> tuple[Weights, BaseWeightsChange]:
    weights = desired.weights_of(model)
    if weights.rebase is None:
        raise OperationConflict(f"No other base weights are on their way to model '{model}'.")
    return weights, weights.rebase


@dataclass(frozen=True, slots=True)
class WeightsRolloutPlan:
    """The plan of an update of base weights; see ``RolloutPlan``.

    ``version`` of None is the file in the model folder. ``boards`` are those present at the start.
    ``at_once`` holds all of them meanwhile, with a lease of ``hold_s`` seconds, so that no answer
    mixes versions. The commit records ``step``, a trainer's.
    """

    operation: str
    model: str
    version: BaseVersion | None
    label: str
    boards: tuple[str, ...]
    at_once: bool = False
    max_unavailable: int = 1
    in_flight: InFlight = InFlight.PIN
    step: int | None = None
    hold_s: float = 600.0

    @property
    def stages(self) -> Stages:
        """Its stages, in order."""
        stage: Stages = () if self.version is None else (Move.STAGE,)
        if self.at_once:
            return (*stage, Move.HOLD, Move.SWITCH, Move.COMMIT)
        return (*stage, Move.OFFER, RolloutStage.ROLL, Move.COMMIT)

    @property
    def heavy(self) -> bool:
        """Boards load the whole model."""
        return True

    @property
    def observe_s(self) -> float:
        """Always 0: a board itself reports a failed load or trial run."""
        return 0.0

    @property
    def auto(self) -> bool:
        """Always true: there is nothing to decide by hand."""
        return True

    def turn(self, at: Move | RolloutStage) -> tuple[Move, ...]:
        """Return the moves that boards make one after the other."""
        return (Move.SWITCH,) if at is RolloutStage.ROLL else ()

    def apply(self, move: MoveRequest, desired: Desired, now_s: float) -> Desired:
        """Return the desired state after a move, as ``AdapterRolloutPlan.apply`` does."""
        return _CHANGES[move.move](self, move, desired, now_s)

    def check(self, desired: Desired) -> None:
        """Raise the errors of the commit, before anything is staged or stopped for it."""
        self.noted(commit(self.begun(desired), self.model))

    def holds(self, desired: Desired) -> bool:
        """Return whether the model already has these weights under that name, with nothing else to
        record.
        """
        weights = desired.weights_of(self.model)
        same = is_same(weights.base, self.version) and weights.label == self.label
        return same and self.step is None and weights.rebase is None

    def begun(self, desired: Desired) -> Desired:
        """Return the state with the change begun."""
        to, label = self.version, self.label
        return begin(desired, self.model, to, label, self.in_flight, everywhere=self.at_once)

    def noted(self, desired: Desired) -> Desired:
        """Return the state with the trainer's step; without one the step is reset, so that a
        trainer may start again.
        """
        if self.step is None:
            return state_changes.forget_step(desired, self.model)
        return state_changes.set_step(desired, self.model, self.step)


def _nothing(
    _plan: WeightsRolloutPlan, _ask: MoveRequest, desired: Desired, _now_s: float
) -> Desired:
    return desired


def _hold(plan: WeightsRolloutPlan, _ask: MoveRequest, desired: Desired, now_s: float) -> Desired:
    scope = Scope(models=(plan.model,))
    asked = ActivePause(
        plan.operation, scope, PauseMode.KEEP, since_s=now_s, expires_s=now_s + plan.hold_s
    )
    return state_changes.hold(desired, asked)


def _offer(plan: WeightsRolloutPlan, _ask: MoveRequest, desired: Desired, _now_s: float) -> Desired:
    return plan.begun(desired)


def _switch(plan: WeightsRolloutPlan, ask: MoveRequest, desired: Desired, _now_s: float) -> Desired:
    if plan.at_once:
        _require_hold(plan, desired)
        return plan.begun(desired)
    return switch(desired, plan.model, ask.boards)


def _commit(
    plan: WeightsRolloutPlan, _ask: MoveRequest, desired: Desired, _now_s: float
) -> Desired:
    if plan.at_once:
        _require_hold(plan, desired)
    return state_changes.as_one(
        desired,
        lambda after: commit(after, plan.model),
        plan.noted,
        lambda after: state_changes.withdraw(after, plan.operation),
    )


def _require_hold(plan: WeightsRolloutPlan, desired: Desired) -> None:
    if all(pause.operation != plan.operation for pause in desired.pauses):
        raise OperationConflict("Its hold on the boards ended before all were ready.")


def _undo(plan: WeightsRolloutPlan, _ask: MoveRequest, desired: Desired, _now_s: float) -> Desired:
    return state_changes.as_one(
        desired,
        lambda after: state_changes.withdraw(after, plan.operation),
        lambda after: undo(after, plan.model),
    )


_CHANGES: dict[Move, Callable[[WeightsRolloutPlan, MoveRequest, Desired, float], Desired]] = {
    Move.STAGE: _nothing,
    Move.HOLD: _hold,
    Move.OFFER: _offer,
    Move.SWITCH: _switch,
    Move.COMMIT: _commit,
    Move.UNDO: _undo,
}
