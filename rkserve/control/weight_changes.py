"""Changes of a model's base weights in the desired state, and the plan of their rollout.

Weights are known by content. The order of moves is that of ``rollout``.

::

    in turn   STAGE all, OFFER (to none), SWITCH each board, ``max_unavailable`` at a time, COMMIT
    at once   STAGE all, HOLD all, SWITCH all, COMMIT (new weights, hold released)

The file in the model folder needs no staging.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from rkserve.control import state_changes
from rkserve.control.rollout_plan import Move, RolloutPlan, RolloutStage, Stages
from rkserve.core.desired_state import (
    BaseVersion,
    BaseWeightsChange,
    Desired,
    InFlight,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsRolloutPlan(RolloutPlan):
    """The plan of an update of base weights.

    ``version`` of None is the file in the model folder. ``at_once`` holds all boards meanwhile, so
    that no answer mixes versions. Nothing is observed: a board itself reports a failed load or
    trial run.
    """

    heavy: ClassVar[bool] = True
    version: BaseVersion | None
    label: str
    at_once: bool = False
    hold_s: float = 600.0

    @property
    def stages(self) -> Stages:
        """See ``RolloutPlan``."""
        stage: Stages = () if self.version is None else (Move.STAGE,)
        if self.at_once:
            return (*stage, Move.HOLD, Move.SWITCH, Move.COMMIT)
        return (*stage, Move.OFFER, RolloutStage.ROLL, Move.COMMIT)

    @property
    def held(self) -> Scope:
        """See ``RolloutPlan``."""
        return Scope(models=(self.model,))

    @property
    def needs_hold(self) -> bool:
        """See ``RolloutPlan``."""
        return self.at_once

    def turn(self, at: Move | RolloutStage) -> tuple[Move, ...]:
        """See ``RolloutPlan``."""
        return (Move.SWITCH,) if at is RolloutStage.ROLL else ()

    def offer(self, desired: Desired) -> Desired:
        """Return the state with the change begun."""
        to, label = self.version, self.label
        return begin(desired, self.model, to, label, self.in_flight, everywhere=self.at_once)

    def switch(self, desired: Desired, boards: tuple[str, ...]) -> Desired:
        """See ``RolloutPlan``."""
        if not self.at_once:
            return switch(desired, self.model, boards)
        self.require_hold(desired)
        return self.offer(desired)

    def committed(self, desired: Desired) -> Desired:
        """See ``RolloutPlan``."""
        return commit(desired, self.model)

    def undone(self, desired: Desired) -> Desired:
        """See ``RolloutPlan``."""
        return undo(desired, self.model)

    def check(self, desired: Desired) -> None:
        """Raise the errors of the commit, before anything is staged or stopped for it."""
        self.noted(self.committed(self.offer(desired)))

    def holds(self, desired: Desired) -> bool:
        """Return whether the model already has these weights under that name, with nothing else to
        record.
        """
        weights = desired.weights_of(self.model)
        same = is_same(weights.base, self.version) and weights.label == self.label
        return same and self.step is None and weights.rebase is None

    def noted(self, desired: Desired) -> Desired:
        """Return the state with the trainer's step; without one the step is reset, so that a
        trainer may start again.
        """
        if self.step is None:
            return state_changes.forget_step(desired, self.model)
        return state_changes.set_step(desired, self.model, self.step)
