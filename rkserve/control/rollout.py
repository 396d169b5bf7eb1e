"""The state machine of a rollout: events in, steps out. Pure.

The caller executes each ``Step`` and reports its result as an ``Event``, in any order, also late or
twice. Boards are known by name only, and times are those of the caller's clock, in seconds.

Invariant: until the commit is requested, a failure on a present board undoes everything; after it
the new version stands, and reconciliation brings boards that have not followed to it. Boards that
die are left out. Boards that join or return get the current desired state, like any board, and have
its files before they serve. A hold and a commit include all boards present by then: the caller asks
newcomers too and reports them (``BoardJoined``), so that none continues with an older state.

::

    atomic    STAGE all, LOAD all, HOLD all (the adapter only), COMMIT (new version, hold released)
    rolling   STAGE all, OFFER (to none), for each board LOAD and SWITCH, ``max_unavailable`` at
              a time, COMMIT
    canary    STAGE all, LOAD all, ``max_unavailable`` at a time, OFFER (to a part of the sessions),
              observe until there is a verdict, COMMIT
    rollback  HOLD all, COMMIT (the previous version is back, hold released)

Base weights use the same stages; see ``weight_changes``. Boards then load the whole model in their
turn: one that dies in its turn undoes everything, and one that joins meanwhile gets a turn too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypeAlias

from rkserve.control.operations import ControlError, OperationState, Phase
from rkserve.control.rollout_plan import (
    CanaryAssessment,
    CanaryVerdict,
    Move,
    MoveRequest,
    RolloutPlan,
    RolloutStage,
)

# An observation without a verdict continues for this multiple of the requested time, and at least
# for this many seconds, before the version is undone: an idle cluster proves nothing.
PATIENCE = 10
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class ObserveCanary:
    """Assess the candidate repeatedly and report each assessment (``CanaryAssessed``), until the
    end.
    """


@dataclass(frozen=True, slots=True)
class FinishRollout:
    """The rollout is over. ``lagging`` boards have not followed the commit.

    ``error`` is the reason if the version did not come in.
    """

    state: OperationState
    error: ControlError | None = None
    lagging: tuple[str, ...] = ()


Step: TypeAlias = MoveRequest | ObserveCanary | FinishRollout


@dataclass(frozen=True, slots=True)
class BoardAnswered:
    """A board's answer to a move, or its timeout; ``error`` of None is success."""

    move: Move
    board_id: str
    error: ControlError | None = None


@dataclass(frozen=True, slots=True)
class BoardLeft:
    """A board died or left; requests to it have no effect."""

    board_id: str


@dataclass(frozen=True, slots=True)
class BoardJoined:
    """A board that was not part of the rollout, and is asked for the current move like the others.

    It comes before the board's answer. It matters for a hold, a commit and an undo only: the board
    loads the version when it needs it. A board that would load the whole model then waits for its
    turn like the others.
    """

    board_id: str


@dataclass(frozen=True, slots=True)
class ChangeRefused:
    """A change could not be made or stored, and no board received it.

    An ``UNDO`` is never refused: a caller that cannot store it tries again, or restarts.
    """

    move: Move
    error: ControlError


@dataclass(frozen=True, slots=True)
class CanaryAssessed:
    """An assessment of the observed candidate."""

    judgement: CanaryAssessment


@dataclass(frozen=True, slots=True)
class CanaryDecided:
    """A manual promotion or rollback of the observed candidate, by ``who``."""

    promote: bool
    who: str = ""


@dataclass(frozen=True, slots=True)
class RolloutCancelled:
    """The rollout must end now: its time is up, or it was stopped."""

    error: ControlError


Event: TypeAlias = (
    BoardAnswered
    | BoardLeft
    | BoardJoined
    | ChangeRefused
    | CanaryAssessed
    | CanaryDecided
    | RolloutCancelled
)


@dataclass(frozen=True, slots=True)
class Rollout:
    """The state of a rollout, made by ``start`` and changed only by ``advance``."""

    plan: RolloutPlan
    boards: tuple[str, ...]
    at: Move | RolloutStage
    asked: frozenset[tuple[Move, str]] = frozenset()
    done: frozenset[tuple[Move, str]] = frozenset()
    lagging: frozenset[str] = frozenset()
    changed: bool = False
    observed_from_s: float = math.inf
    error: ControlError | None = None
    ended: OperationState | None = None

    @property
    def phase(self) -> Phase:
        """The phase for the operation's record."""
        return Phase.DONE if self.ended else _PHASES[self.at]


_PHASES: dict[Move | RolloutStage, Phase] = {
    Move.STAGE: Phase.STAGING,
    Move.LOAD: Phase.LOADING,
    Move.HOLD: Phase.STOPPING,
    Move.OFFER: Phase.SWITCHING,
    Move.SWITCH: Phase.SWITCHING,
    RolloutStage.ROLL: Phase.SWITCHING,
    RolloutStage.OBSERVE: Phase.OBSERVING,
    Move.COMMIT: Phase.RELEASING,
    Move.UNDO: Phase.UNDOING,
}
# Moves for every present board, including those that joined after the rollout began.
EVERYWHERE = frozenset({Move.HOLD, Move.COMMIT, Move.UNDO})
_CHANGING = frozenset({Move.HOLD, Move.OFFER, Move.SWITCH, Move.COMMIT})
NO_BOARD = ControlError(503, "no_board", "No board is left that could show the version good.")
Next: TypeAlias = tuple[Rollout, tuple[Step, ...]]


def start(plan: RolloutPlan, now_s: float) -> Next:
    """Return the initial state and the first steps, in order."""
    rollout = Rollout(plan, plan.boards, plan.stages[0])
    return _go_on(rollout, now_s) if plan.boards else _take_back(rollout, NO_BOARD)


def advance(rollout: Rollout, event: Event, now_s: float) -> Next:
    """Return the state after an event, and the next steps, in order.

    ``now_s`` is in seconds of the clock passed to ``start``. Events that are late, repeated, or
    about a board that is gone change nothing.
    """
    if rollout.ended:
        return rollout, ()
    if isinstance(event, CanaryAssessed | CanaryDecided):
        return _observed(rollout, event, now_s)
    if isinstance(event, BoardAnswered):
        return _answered(rollout, event, now_s)
    if isinstance(event, BoardLeft):
        return _gone(rollout, event.board_id, now_s)
    if isinstance(event, BoardJoined):
        return _joined(rollout, event.board_id, now_s)
    return (
        _refused(rollout, event) if isinstance(event, ChangeRefused) else _cancelled(rollout, event)
    )


def _observed(rollout: Rollout, event: CanaryAssessed | CanaryDecided, now_s: float) -> Next:
    if rollout.at is not RolloutStage.OBSERVE:
        return rollout, ()
    if isinstance(event, CanaryAssessed):
        return _judged(rollout, event.judgement, now_s)
    return _decided(rollout, event, now_s)


def _answered(rollout: Rollout, event: BoardAnswered, now_s: float) -> Next:
    answer = (event.move, event.board_id)
    if answer not in rollout.asked or answer in rollout.done:
        return rollout, ()
    if rollout.at is Move.UNDO and event.move is not Move.UNDO:
        return rollout, ()
    if event.error is not None:
        if event.move not in (Move.COMMIT, Move.UNDO):
            return _take_back(rollout, event.error)
        rollout = replace(rollout, lagging=rollout.lagging | {event.board_id})
    return _go_on(replace(rollout, done=rollout.done | {answer}), now_s)


def _gone(rollout: Rollout, board_id: str, now_s: float) -> Next:
    if board_id not in rollout.boards:
        return rollout, ()
    boards = tuple(one for one in rollout.boards if one != board_id)
    died_of_it = _in_turn(rollout, board_id)
    # Its pending moves are dropped with it: if it returns, the rollout does not wait for them.
    rollout = replace(
        rollout,
        boards=boards,
        asked=frozenset(one for one in rollout.asked if one[1] != board_id),
        lagging=rollout.lagging - {board_id},
    )
    if died_of_it:
        why = f"Board {board_id} died while it loaded the new weights."
        return _take_back(rollout, ControlError(503, "board_gone", why))
    if not boards and rollout.at not in (Move.COMMIT, Move.UNDO):
        return _take_back(rollout, NO_BOARD)
    return _go_on(rollout, now_s)


def _in_turn(rollout: Rollout, board_id: str) -> bool:
    """Return whether a board is loading the model in a turn of its own."""
    turn = (Move.SWITCH, board_id)
    return (
        rollout.plan.heavy
        and rollout.at is RolloutStage.ROLL
        and turn in rollout.asked
        and turn not in rollout.done
    )


def _joined(rollout: Rollout, board_id: str, now_s: float) -> Next:
    if board_id in rollout.boards:
        return rollout, ()
    joined = replace(rollout, boards=(*rollout.boards, board_id))
    if rollout.plan.heavy and rollout.at is RolloutStage.ROLL:
        return _go_on(joined, now_s)  # it waits for its turn
    if rollout.at not in EVERYWHERE:
        return rollout, ()
    return replace(joined, asked=rollout.asked | {(Move(rollout.at), board_id)}), ()


def _refused(rollout: Rollout, event: ChangeRefused) -> Next:
    if rollout.at is Move.UNDO or event.move not in _CHANGING:
        return rollout, ()
    # Every rollout begins its changes with one of these: before it there is nothing to undo.
    changed = event.move not in (Move.HOLD, Move.OFFER)
    return _take_back(replace(rollout, changed=changed), event.error)


def _cancelled(rollout: Rollout, event: RolloutCancelled) -> Next:
    if rollout.at not in (Move.COMMIT, Move.UNDO):
        return _take_back(rollout, event.error)
    late = {board for board in rollout.boards if (rollout.at, board) not in rollout.done}
    return _finish(replace(rollout, lagging=rollout.lagging | late))


def _judged(rollout: Rollout, judgement: CanaryAssessment, now_s: float) -> Next:
    plan, since_s = rollout.plan, now_s - rollout.observed_from_s
    if judgement.verdict is CanaryVerdict.BAD:
        return _take_back(rollout, ControlError(409, "canary_failed", judgement.reason))
    if not plan.auto or since_s < plan.observe_s:
        return rollout, ()
    if judgement.verdict is CanaryVerdict.GOOD:
        return _enter_next(rollout, now_s)
    if since_s < max(plan.observe_s * PATIENCE, PATIENCE_S):
        return rollout, ()
    why = f"No verdict within {since_s:.0f} s: {judgement.reason}"
    return _take_back(rollout, ControlError(409, "canary_failed", why))


def _decided(rollout: Rollout, event: CanaryDecided, now_s: float) -> Next:
    if event.promote:
        return _enter_next(rollout, now_s)
    by = f" by {event.who}" if event.who else ""
    return _take_back(rollout, ControlError(409, "rolled_back", f"It was rolled back{by}."))


def _take_back(rollout: Rollout, error: ControlError) -> Next:
    """Undo the changes; if there are none, the rollout has failed without effects."""
    rollout = replace(rollout, error=error)
    if not rollout.changed:
        return _finish(rollout)
    undoing = replace(rollout, at=Move.UNDO, lagging=frozenset())
    asking, step = _ask(undoing, Move.UNDO, rollout.boards)
    if rollout.boards:
        return asking, (step,)
    ended, steps = _finish(asking)
    return ended, (step, *steps)


def _finish(rollout: Rollout) -> Next:
    lagging = tuple(sorted(rollout.lagging))
    if rollout.at is Move.COMMIT:
        state = OperationState.PARTIAL if lagging else OperationState.SUCCEEDED
    else:
        state = OperationState.UNDONE if rollout.at is Move.UNDO else OperationState.FAILED
    return replace(rollout, ended=state), (FinishRollout(state, rollout.error, lagging),)


def _ask(rollout: Rollout, move: Move, boards: Iterable[str]) -> tuple[Rollout, MoveRequest]:
    asked = tuple(boards)
    return (
        replace(
            rollout,
            asked=rollout.asked | {(move, board) for board in asked},
            changed=rollout.changed or move in _CHANGING,
        ),
        MoveRequest(move, asked),
    )


def _go_on(rollout: Rollout, now_s: float) -> Next:
    """Request all moves that are possible now; enter the next stage when this one is complete."""
    if rollout.at is RolloutStage.OBSERVE:
        return rollout, ()
    if _complete(rollout):
        if rollout.at in (Move.COMMIT, Move.UNDO):
            return _finish(rollout)
        return _enter_next(rollout, now_s)
    steps: list[Step] = []
    for move, boards in _due(rollout):
        rollout, step = _ask(rollout, move, boards)
        steps.append(step)
    return rollout, tuple(steps)


def _enter_next(rollout: Rollout, now_s: float) -> Next:
    stages = rollout.plan.stages
    rollout = replace(rollout, at=stages[stages.index(rollout.at) + 1])
    if rollout.at is RolloutStage.OBSERVE:
        return replace(rollout, observed_from_s=now_s), (ObserveCanary(),)
    return _go_on(rollout, now_s)


def _complete(rollout: Rollout) -> bool:
    last = Move.SWITCH if rollout.at is RolloutStage.ROLL else rollout.at
    return all((last, board) in rollout.done for board in rollout.boards)


def _due(rollout: Rollout) -> list[tuple[Move, tuple[str, ...]]]:
    """Return the move requests that are due now."""
    if turn := rollout.plan.turn(rollout.at):
        return _due_in_turn(rollout, turn)
    move = Move(rollout.at)
    fresh = tuple(board for board in rollout.boards if (move, board) not in rollout.asked)
    return [(move, fresh)] if fresh else []


def _due_in_turn(rollout: Rollout, turn: tuple[Move, ...]) -> list[tuple[Move, tuple[str, ...]]]:
    """Return the next turns: ``max_unavailable`` boards at a time, from the first move of their
    turn until its last one is done.
    """
    asked, done = rollout.asked, rollout.done
    first, last = turn[0], turn[-1]
    waiting = [board for board in rollout.boards if (first, board) not in asked]
    away = [
        board for board in rollout.boards if (first, board) in asked and (last, board) not in done
    ]
    ready = [board for board in away if (first, board) in done and (last, board) not in asked]
    free = waiting[: max(0, rollout.plan.max_unavailable - len(away))]
    due = [(last, tuple(ready)), (first, tuple(free))]
    return [(move, boards) for move, boards in due if boards]
