"""A rollout ends with the new version everywhere or with nothing changed, whatever happens."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import event as note
from hypothesis import given, settings
from hypothesis import strategies as st

from rkserve.control import state_changes
from rkserve.control.calls import (
    AdapterRollbackAction,
    OperationKind,
    Strategy,
)
from rkserve.control.operations import ControlError, ControlOperation, OperationState, Phase
from rkserve.control.rollout import (
    PATIENCE,
    PATIENCE_S,
    BoardAnswered,
    BoardJoined,
    BoardLeft,
    CanaryAssessed,
    CanaryDecided,
    ChangeRefused,
    Event,
    FinishRollout,
    ObserveCanary,
    Rollout,
    RolloutCancelled,
    Step,
    advance,
    start,
)
from rkserve.control.rollout_plan import (
    AdapterRolloutPlan,
    CanaryAssessment,
    CanaryVerdict,
    Move,
    MoveRequest,
)
from rkserve.coordinator.state.state_store import recover
from rkserve.core.desired_state import AdapterVersions, Desired, InFlight, PauseMode, Scope
from rkserve.core.errors import RkserveError
from tests.support.values.control_values import recorded
from tests.support.values.rollouts import THREE, V1, V2, V3, atomic, served

pytestmark = pytest.mark.slow

BROKEN = ControlError(503, "stage_failed", "the disk is full")
LATE = ControlError(504, "operation_timeout", "its time is up")
GOOD, BAD, WAIT = (
    CanaryAssessment(verdict, "because")
    for verdict in (
        CanaryVerdict.GOOD,
        CanaryVerdict.BAD,
        CanaryVerdict.WAIT,
    )
)


def line(desired: Desired) -> AdapterVersions | None:
    return desired.line("m", "law")


@dataclass
class Performer:
    """Carries out what a rollout asks for on a desired state, as a Coordinator does."""

    plan: AdapterRolloutPlan
    desired: Desired
    now_s: float = 1000.0
    steps: list[Step] = field(default_factory=list)
    pending: list[tuple[Move, str]] = field(default_factory=list)
    refuse: Move | None = None
    joined: set[str] = field(default_factory=set)
    joined_late: set[str] = field(default_factory=set)
    operation: ControlOperation = field(
        default_factory=lambda: recorded(
            "op",
            OperationKind.ADAPTER_ROLLOUT,
            params={"model": "m", "name": "law", "version": "v3"},
        )
    )

    def __post_init__(self) -> None:
        if self.plan.version is None:
            self.operation = replace(
                self.operation, action=AdapterRollbackAction(model="m", name="law")
            )
        self.before = self.desired
        self.rollout: Rollout
        self.rollout, steps = start(self.plan, self.now_s)
        self.perform(steps)

    @property
    def asked(self) -> list[tuple[Move, tuple[str, ...]]]:
        return [(step.move, step.boards) for step in self.steps if isinstance(step, MoveRequest)]

    @property
    def finish(self) -> FinishRollout | None:
        last = self.steps[-1]
        return last if isinstance(last, FinishRollout) else None

    def tell(self, event: Event) -> None:
        self.rollout, steps = advance(self.rollout, event, self.now_s)
        self.perform(steps)

    def perform(self, steps: tuple[Step, ...]) -> None:
        for step in steps:
            self.steps.append(step)
            if isinstance(step, FinishRollout):
                self.operation = self.operation.end(step.state, self.now_s, step.error)
            elif isinstance(step, MoveRequest) and not self.change(step):
                return

    def change(self, ask: MoveRequest) -> bool:
        if ask.move is self.refuse:
            self.refuse = None
            self.tell(ChangeRefused(ask.move, ControlError(503, "ledger_failed", "no room")))
            return False
        try:
            after = self.plan.apply(ask, self.desired, self.now_s)
        except RkserveError as error:
            self.tell(ChangeRefused(ask.move, ControlError.of(error)))
            return False
        assert after is self.desired or after.epoch == self.desired.epoch + 1
        epoch = self.operation.epoch if after is self.desired else after.epoch
        if not self.rollout.ended:
            self.operation = self.operation.at(self.rollout.phase, epoch=epoch)
        self.desired = after
        self.pending += [(ask.move, board) for board in ask.boards]
        return True

    def join(self, board: str) -> None:
        """A board joins, or comes back, and is asked for what the others are asked for."""
        if board in self.rollout.boards:
            return
        self.tell(BoardJoined(board))
        if board not in self.rollout.boards:
            return
        self.joined.add(board)
        if self.rollout.at is not Move.HOLD:
            self.joined_late.add(board)
        assert isinstance(self.rollout.at, Move)
        self.pending = [one for one in self.pending if one[1] != board]
        self.pending.append((self.rollout.at, board))

    def answer(self, move: Move, *boards: str, error: ControlError | None = None) -> None:
        for board in boards or self.rollout.boards:
            self.pending.remove((move, board))
            self.tell(BoardAnswered(move, board, error))


def rolling(**fields: object) -> AdapterRolloutPlan:
    return atomic(strategy=Strategy.ROLLING, **fields)


def canary(**fields: object) -> AdapterRolloutPlan:
    return atomic(strategy=Strategy.CANARY, weight=0.25, observe_s=30.0, **fields)


@pytest.mark.promise(
    "Adapters", "`atomic` is one epoch for all; `rolling` takes `max_unavailable` boards"
)
def test_atomic_brings_all_boards_to_it_at_one_instant() -> None:
    one = Performer(atomic(in_flight=InFlight.SWITCH), served(V1))
    one.answer(Move.STAGE)
    one.answer(Move.LOAD)
    assert one.desired.epoch == one.before.epoch + 1
    (held,) = one.desired.pauses
    assert (held.scope, held.mode) == (Scope(("m",), (), "law"), PauseMode.KEEP)
    assert held.expires_s == one.now_s + one.plan.hold_s
    assert line(one.desired) == line(one.before)
    one.answer(Move.HOLD)
    assert one.desired.pauses == ()
    assert one.desired.epoch == one.before.epoch + 2
    after = line(one.desired)
    assert after is not None
    assert (after.active, after.previous, after.candidate) == (V3, V1, None)
    assert (after.epoch, after.in_flight) == (one.desired.epoch, InFlight.SWITCH)
    assert one.finish is None
    one.answer(Move.COMMIT)
    assert one.finish == FinishRollout(OperationState.SUCCEEDED)
    moves = (Move.STAGE, Move.LOAD, Move.HOLD, Move.COMMIT)
    assert one.asked == [(move, THREE) for move in moves]


def test_a_trainers_update_holds_the_model_before_boards_load_and_notes_its_step() -> None:
    one = Performer(atomic(held_first=True, step=9), served(V1))
    one.answer(Move.STAGE)
    (held,) = one.desired.pauses
    assert (held.scope, held.mode) == (Scope(("m",)), PauseMode.KEEP)
    one.answer(Move.HOLD)
    assert one.asked[-1] == (Move.LOAD, THREE)
    assert one.desired.weights_of("m").step is None
    before = one.desired.epoch
    one.answer(Move.LOAD)
    assert (one.desired.epoch, one.desired.pauses) == (before + 1, ())
    assert one.desired.weights_of("m").step == 9
    one.answer(Move.COMMIT)
    assert one.finish == FinishRollout(OperationState.SUCCEEDED)


@pytest.mark.promise(
    "Adapters", "`atomic` is one epoch for all; `rolling` takes `max_unavailable` boards"
)
def test_rolling_takes_as_many_boards_at_a_time_as_it_may() -> None:
    one = Performer(rolling(max_unavailable=2), served(V1))
    one.answer(Move.STAGE)
    one.answer(Move.OFFER)
    assert one.asked[2:] == [(Move.LOAD, ("b1", "b2"))]
    one.answer(Move.LOAD, "b2")
    assert one.asked[3:] == [(Move.SWITCH, ("b2",))]
    now = line(one.desired)
    assert now is not None
    assert (now.serves("b2", "s"), now.serves("b1", "s")) == (V3.ref, V1.ref)
    one.answer(Move.SWITCH, "b2")
    assert one.asked[4:] == [(Move.LOAD, ("b3",))]
    one.answer(Move.LOAD, "b1", "b3")
    one.answer(Move.SWITCH, "b3", "b1")
    one.answer(Move.COMMIT)
    assert one.finish == FinishRollout(OperationState.SUCCEEDED)
    assert one.desired.pauses == ()


def test_a_canary_is_loaded_everywhere_observed_and_promoted() -> None:
    one = Performer(canary(), served(V1))
    one.answer(Move.STAGE)
    for board in THREE:
        one.answer(Move.LOAD, board)
    one.answer(Move.OFFER)
    assert one.steps[-1] == ObserveCanary()
    now = line(one.desired)
    assert now is not None
    assert (now.active, now.candidate, now.weight) == (V1, V3, 0.25)
    one.tell(CanaryAssessed(GOOD))  # too early
    one.now_s += 30.0
    one.tell(CanaryAssessed(WAIT))
    assert one.rollout.phase is Phase.OBSERVING
    one.tell(CanaryAssessed(GOOD))
    one.answer(Move.COMMIT)
    assert one.finish == FinishRollout(OperationState.SUCCEEDED)


def observing(plan: AdapterRolloutPlan) -> Performer:
    one = Performer(plan, served(V1))
    one.answer(Move.STAGE)
    for board in plan.boards:
        one.answer(Move.LOAD, board)
    one.answer(Move.OFFER)
    return one


@pytest.mark.parametrize(
    ("plan", "after_s", "event", "code"),
    [
        pytest.param(canary(), 1.0, CanaryAssessed(BAD), "canary_failed", id="it is bad"),
        pytest.param(
            canary(auto=False), 1.0, CanaryAssessed(BAD), "canary_failed", id="bad, by hand"
        ),
        pytest.param(
            canary(), 1.0, CanaryDecided(promote=False), "rolled_back", id="someone says so"
        ),
        pytest.param(canary(), 1.0, RolloutCancelled(LATE), LATE.code, id="cancelled"),
        pytest.param(
            canary(),
            30.0 * PATIENCE,
            CanaryAssessed(WAIT),
            "canary_failed",
            id="nobody asks for it",
        ),
    ],
)
def test_a_canary_is_taken_back(
    plan: AdapterRolloutPlan, after_s: float, event: Event, code: str
) -> None:
    one = observing(plan)
    one.now_s += after_s
    one.tell(event)
    one.answer(Move.UNDO)
    assert one.finish is not None
    assert one.finish.state is OperationState.UNDONE
    assert one.finish.error is not None
    assert one.finish.error.code == code
    assert line(one.desired) == replace(line(one.before), epoch=one.desired.epoch)  # type: ignore[type-var]


def test_a_canary_without_auto_waits_for_a_decision() -> None:
    one = observing(canary(auto=False))
    one.now_s += 30.0 * PATIENCE + PATIENCE_S
    one.tell(CanaryAssessed(GOOD))
    one.tell(CanaryAssessed(WAIT))
    assert one.rollout.phase is Phase.OBSERVING
    one.tell(CanaryDecided(promote=True, who="ann"))
    one.answer(Move.COMMIT)
    assert one.finish == FinishRollout(OperationState.SUCCEEDED)


def test_a_rollback_by_hand_is_a_hold_and_a_commit() -> None:
    one = Performer(atomic(version=None), served(V1, V2))
    one.answer(Move.HOLD)
    one.answer(Move.COMMIT)
    after = line(one.desired)
    assert after is not None
    assert (after.active, after.previous, one.desired.pauses) == (V1, None, ())
    assert one.asked == [(Move.HOLD, THREE), (Move.COMMIT, THREE)]


@pytest.mark.promise("Adapters", "A stage that fails changes nothing anywhere")
def test_a_failed_stage_changes_nothing_anywhere() -> None:
    one = Performer(atomic(), served(V1))
    one.answer(Move.STAGE, "b1")
    one.answer(Move.STAGE, "b2", error=BROKEN)
    assert one.finish == FinishRollout(OperationState.FAILED, BROKEN)
    assert one.desired is one.before
    one.answer(Move.STAGE, "b3")
    assert one.asked == [(Move.STAGE, THREE)]


def test_a_board_that_cannot_be_held_lets_all_go_on_as_before() -> None:
    one = Performer(atomic(), served(V1))
    one.answer(Move.STAGE)
    one.answer(Move.LOAD)
    one.answer(Move.HOLD, "b1")
    one.answer(Move.HOLD, "b2", error=LATE)
    assert one.desired.pauses == ()
    assert one.finish is None
    one.answer(Move.UNDO, "b1", "b2")
    one.answer(Move.UNDO, "b3", error=LATE)
    assert one.finish == FinishRollout(OperationState.UNDONE, LATE, ("b3",))
    assert line(one.desired) == line(one.before)


def test_the_first_failure_is_the_reason() -> None:
    one = Performer(rolling(max_unavailable=2), served(V1))
    one.answer(Move.STAGE)
    one.answer(Move.OFFER)
    one.answer(Move.LOAD, "b1", error=BROKEN)
    one.answer(Move.LOAD, "b2", error=LATE)  # it was asked before all was to be taken back
    one.answer(Move.UNDO)
    assert one.finish == FinishRollout(OperationState.UNDONE, BROKEN)
    assert [move for move, _ in one.asked].count(Move.UNDO) == 1


@pytest.mark.parametrize(
    ("plan", "refused", "state"),
    [
        pytest.param(atomic(), Move.HOLD, OperationState.FAILED, id="a hold"),
        pytest.param(atomic(), Move.COMMIT, OperationState.UNDONE, id="a commit"),
        pytest.param(rolling(), Move.OFFER, OperationState.FAILED, id="an offer"),
        pytest.param(rolling(), Move.SWITCH, OperationState.UNDONE, id="a switch"),
    ],
)
def test_a_change_that_cannot_be_written_down_ends_it(
    plan: AdapterRolloutPlan, refused: Move, state: OperationState
) -> None:
    one = Performer(plan, served(V1), refuse=refused)
    while one.pending:
        move, board = one.pending[0]
        one.answer(move, board)
    assert one.finish is not None
    assert one.finish.state is state
    assert one.finish.error is not None
    assert one.finish.error.code == "ledger_failed"
    assert (one.desired is one.before) is (state is OperationState.FAILED)


def test_a_board_that_dies_is_left_out() -> None:
    one = Performer(atomic(), served(V1))
    one.answer(Move.STAGE, "b1", "b2")
    one.tell(BoardLeft("b3"))
    assert one.asked[-1] == (Move.LOAD, ("b1", "b2"))
    one.tell(BoardAnswered(Move.STAGE, "b3", BROKEN))  # what it said before it died
    one.answer(Move.LOAD)
    one.tell(BoardLeft("b1"))
    one.answer(Move.HOLD)
    one.answer(Move.COMMIT)
    assert one.finish == FinishRollout(OperationState.SUCCEEDED)


@pytest.mark.parametrize("when", [Move.STAGE, Move.LOAD, Move.HOLD])
def test_without_a_board_left_nothing_comes_in(when: Move) -> None:
    one = Performer(atomic(), served(V1))
    while one.asked[-1][0] is not when:
        one.answer(one.asked[-1][0])
    for board in THREE:
        one.tell(BoardLeft(board))
    assert one.finish is not None
    assert one.finish.error is not None
    assert one.finish.error.code == "no_board"
    assert one.desired.pauses == ()
    assert line(one.desired) == line(one.before)


def test_a_rollout_on_no_boards_fails_at_once() -> None:
    one = Performer(atomic(boards=()), served(V1))
    assert one.finish is not None
    assert one.finish.state is OperationState.FAILED


@pytest.mark.promise("Adapters", "A board that joins late has all versions before it serves")
def test_a_board_that_joins_at_the_hold_is_held_and_committed_like_the_others() -> None:
    one = Performer(atomic(), served(V1))
    one.answer(Move.STAGE)
    one.tell(BoardLeft("b3"))
    one.answer(Move.LOAD)
    one.join("b4")
    one.join("b3")  # it has come back
    one.answer(Move.HOLD, "b1", "b2", "b3")
    assert one.asked[-1][0] is Move.HOLD  # b4 may still go on with the old version
    one.answer(Move.HOLD, "b4")
    assert one.asked[-1] == (Move.COMMIT, ("b1", "b2", "b4", "b3"))


@pytest.mark.parametrize("move", [Move.HOLD, Move.COMMIT], ids=["hold", "commit"])
def test_a_board_that_joins_and_does_not_answer_counts_like_any_other(move: Move) -> None:
    one = Performer(atomic(), served(V1))
    while one.asked[-1][0] is not move:
        one.answer(one.asked[-1][0])
    one.join("b4")
    one.answer(move, "b4", error=LATE)
    if move is Move.HOLD:
        assert one.asked[-1] == (Move.UNDO, (*THREE, "b4"))
    else:
        one.answer(move, *THREE)
        assert one.finish == FinishRollout(OperationState.PARTIAL, None, ("b4",))


def test_a_board_that_joins_while_others_load_is_not_waited_for() -> None:
    one = Performer(atomic(), served(V1))
    one.answer(Move.STAGE)
    one.join("b4")
    one.answer(Move.LOAD)
    assert one.asked[-1] == (Move.HOLD, THREE)


def test_after_the_commit_a_silent_board_is_told_later() -> None:
    one = Performer(atomic(), served(V1))
    for move in (Move.STAGE, Move.LOAD, Move.HOLD):
        one.answer(move)
    one.answer(Move.COMMIT, "b1")
    one.answer(Move.COMMIT, "b2", error=LATE)
    one.tell(RolloutCancelled(LATE))  # the time is up for b3
    assert one.finish == FinishRollout(OperationState.PARTIAL, None, ("b2", "b3"))
    after = line(one.desired)
    assert after is not None
    assert after.active == V3


def test_a_commit_whose_hold_has_ended_is_no_commit() -> None:
    one = Performer(atomic(), served(V1))
    one.answer(Move.STAGE)
    one.answer(Move.LOAD)
    one.desired = state_changes.expire(one.desired, one.now_s + one.plan.hold_s)[0]
    one.answer(Move.HOLD)
    one.answer(Move.UNDO)
    assert one.finish is not None
    assert one.finish.state is OperationState.UNDONE
    assert line(one.desired) == line(one.before)


def test_a_pause_by_hand_outlasts_the_rollout_within_it() -> None:
    desired = state_changes.pause(
        served(V1), "by-hand", Scope(("m",), (), "law"), PauseMode.KEEP, 0.0
    )
    one = Performer(atomic(), desired)
    for move in (Move.STAGE, Move.LOAD, Move.HOLD, Move.COMMIT):
        one.answer(move)
    assert one.finish == FinishRollout(OperationState.SUCCEEDED)
    assert [pause.operation for pause in one.desired.pauses] == ["by-hand"]


# Anything, in any order

plans = st.builds(
    lambda strategy, version, held_first, **rest: atomic(
        strategy=strategy if version else Strategy.ATOMIC,
        version=version,
        held_first=held_first and strategy is Strategy.ATOMIC,
        **rest,
    ),
    st.sampled_from(Strategy),
    st.sampled_from((V3, V3, V3, None)),
    st.booleans(),
    boards=st.integers(0, 5).map(lambda n: tuple(f"b{i}" for i in range(n))),
    max_unavailable=st.integers(1, 3),
    auto=st.booleans(),
    hold_s=st.sampled_from((5.0, 60.0)),
)
# Mostly all goes well, or nothing would ever come far.
fates = st.sampled_from(
    ("ok",) * 24
    + ("fail", "gone", "gone", "join", "again", "late", "wait", "tick", "judge", "decide")
)


def meet(one: Performer, fate: str, pick: int) -> None:
    """Let something happen to a rollout."""
    board = one.plan.boards[pick % len(one.plan.boards)]
    if fate == "tick":
        one.now_s += pick % 40
        one.desired = state_changes.expire(one.desired, one.now_s)[0]
    elif fate == "judge":
        one.tell(CanaryAssessed((GOOD, BAD, WAIT)[pick % 3]))
    elif fate == "decide":
        one.tell(CanaryDecided(promote=bool(pick % 2)))
    elif fate == "late":
        one.tell(BoardAnswered(list(Move)[pick % len(Move)], board, BROKEN if pick % 2 else None))
    elif fate == "gone":
        one.tell(BoardLeft(board))
    elif fate == "join":
        one.join((board, "new")[pick % 2])
    elif one.pending and fate != "wait":
        move, board = one.pending.pop(pick % len(one.pending))
        one.tell(BoardAnswered(move, board, BROKEN if fate == "fail" else None))
        if fate == "again":
            one.tell(BoardAnswered(move, board, BROKEN))


def drain(one: Performer) -> None:
    """Let all that is asked for be answered, and all that is observed be judged."""
    for _ in range(100):
        if one.rollout.ended:
            return
        if one.pending:
            one.tell(BoardAnswered(*one.pending.pop(0)))
        else:
            one.now_s += PATIENCE * one.plan.observe_s + PATIENCE_S
            one.tell(CanaryAssessed(WAIT) if one.plan.auto else CanaryDecided(promote=True))
    pytest.fail(f"it never ends: {one.rollout}")


def check_order(one: Performer) -> None:
    """Look at what was asked for: no commit without the moves before it, no way back after it."""
    asked = [move for move, _ in one.asked]
    finishes = [step for step in one.steps if isinstance(step, FinishRollout)]
    assert len(finishes) == 1
    assert isinstance(one.steps[-1], FinishRollout)
    assert asked.count(Move.COMMIT) <= 1
    assert asked.count(Move.UNDO) <= 1
    if finishes[0].state in (OperationState.SUCCEEDED, OperationState.PARTIAL):
        assert Move.UNDO not in asked
        done = one.rollout.done
        wanted = {
            Strategy.ATOMIC: (Move.STAGE, Move.LOAD, Move.HOLD),
            Strategy.ROLLING: (Move.STAGE, Move.OFFER, Move.LOAD, Move.SWITCH),
            Strategy.CANARY: (Move.STAGE, Move.LOAD, Move.OFFER),
        }[one.plan.strategy]
        planned = {*one.rollout.boards} & {*one.plan.boards} - one.joined
        for move in wanted if one.plan.version else (Move.HOLD,):
            assert {board for what, board in done if what is move} >= planned
        if Move.HOLD in asked:
            held = {board for what, board in done if what is Move.HOLD}
            assert held >= {*one.rollout.boards} - one.joined_late


def check_end(one: Performer) -> None:
    """Check the desired state: the new version, or what it was, and nobody paused."""
    assert one.finish is not None
    state, after, before = one.finish.state, line(one.desired), line(one.before)
    assert one.desired.pauses == ()
    new = V3 if one.plan.version else V1
    if state in (OperationState.SUCCEEDED, OperationState.PARTIAL):
        assert after is not None
        assert (after.active, after.candidate) == (new, None)
        assert (state is OperationState.PARTIAL) is bool(one.finish.lagging)
        assert one.finish.error is None
    else:
        assert after is not None
        assert before is not None
        assert replace(after, epoch=0, in_flight=before.in_flight) == replace(before, epoch=0)
        assert one.finish.error is not None
        assert one.finish.error.message
        if state is OperationState.FAILED:
            assert one.desired == one.before


@settings(deadline=None, max_examples=400)
@given(
    plans,
    st.lists(st.tuples(fates, st.integers(0, 1000)), max_size=60),
    st.sampled_from((None,) * 8 + (Move.HOLD, Move.OFFER, Move.SWITCH, Move.COMMIT)),
)
def test_every_rollout_ends_committed_or_undone_and_leaves_nobody_paused(
    plan: AdapterRolloutPlan, events: list[tuple[str, int]], refuse: Move | None
) -> None:
    one = Performer(plan, served(V1, V2), refuse=refuse)
    for fate, pick in events:
        if plan.boards:
            meet(one, fate, pick)
        away = {board for move, board in one.rollout.asked if move is Move.LOAD} - {
            board for move, board in one.rollout.done if move is Move.SWITCH
        }
        if plan.strategy is Strategy.ROLLING:
            assert len(away) <= plan.max_unavailable
    drain(one)
    note(f"{plan.strategy.value}: {one.rollout.ended}")
    check_order(one)
    check_end(one)
    steps = len(one.steps)
    for event in (
        BoardLeft("b0"),
        CanaryDecided(True),
        CanaryAssessed(BAD),
        RolloutCancelled(LATE),
        BoardAnswered(Move.UNDO, "b0"),
    ):
        one.tell(event)
    assert len(one.steps) == steps


@pytest.mark.promise("Adapters", "Whatever dies meanwhile, one version is served everywhere")
@settings(deadline=None, max_examples=400)
@given(plans, st.lists(st.tuples(fates, st.integers(0, 1000)), max_size=40))
def test_a_coordinator_that_dies_at_any_moment_leaves_one_of_the_two_as_well(
    plan: AdapterRolloutPlan, events: list[tuple[str, int]]
) -> None:
    one = Performer(plan, served(V1, V2))
    for fate, pick in events if plan.boards else ():
        meet(one, fate, pick)
    committed = any(move is Move.COMMIT for move, _ in one.asked) and Move.UNDO not in {
        move for move, _ in one.asked
    }
    desired, changed = recover(one.desired, [one.operation], one.now_s)
    operation = changed[0] if changed else one.operation
    note(f"{one.rollout.phase.value}: {operation.state.value}")
    assert operation.over
    assert desired.pauses == ()
    after = line(desired)
    assert after is not None
    assert after.candidate is None
    stands = operation.state in (OperationState.SUCCEEDED, OperationState.PARTIAL)
    assert stands is committed
    assert after.active == ((V3 if plan.version else V1) if committed else V2)
    assert recover(desired, [operation], one.now_s + 9) == (desired, ())


@settings(deadline=None)
@given(plans, st.lists(st.tuples(fates, st.integers(0, 1000)), max_size=30))
def test_two_cancellations_end_a_rollout(
    plan: AdapterRolloutPlan, events: list[tuple[str, int]]
) -> None:
    one = Performer(plan, served(V1, V2))
    for fate, pick in events if plan.boards else ():
        meet(one, fate, pick)
    one.tell(RolloutCancelled(LATE))
    one.tell(RolloutCancelled(LATE))
    check_order(one)
    check_end(one)


def test_its_values_cross_processes() -> None:
    one = Performer(canary(), served(V1))
    assert pickle.loads(pickle.dumps((one.rollout, one.steps))) == (one.rollout, one.steps)
