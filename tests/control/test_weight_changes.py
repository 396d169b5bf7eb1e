"""Other base weights come to all boards of a model or to none, whatever happens on the way."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import event as note
from hypothesis import given, settings
from hypothesis import strategies as st

from rkserve.control import state_changes, weight_changes
from rkserve.control.calls import OperationKind
from rkserve.control.operations import (
    ControlError,
    ControlOperation,
    OperationState,
    Phase,
    conflict,
)
from rkserve.control.rollout import (
    BoardAnswered,
    BoardJoined,
    BoardLeft,
    ChangeRefused,
    Event,
    FinishRollout,
    RolloutCancelled,
    Step,
    advance,
    start,
)
from rkserve.control.rollout_plan import Move, MoveRequest, RolloutStage
from rkserve.control.weight_changes import WeightsRolloutPlan
from rkserve.coordinator.state.state_store import recover
from rkserve.core.desired_state import BaseVersion, Desired, InFlight, PauseMode, Scope
from rkserve.core.errors import OperationConflict, RequestError, RkserveError, StaleWeights
from tests.support.values.control_values import action, recorded

pytestmark = pytest.mark.slow

K, S = OperationKind, OperationState
OLD, NEW, OTHER = (BaseVersion("m", name, name[0] * 64, 100) for name in ("a-old", "b-new", "c"))
THREE = ("b1", "b2", "b3")
BROKEN = ControlError(503, "rebase_failed", "it cannot be loaded")
LATE = ControlError(504, "operation_timeout", "its time is up")
DONE = (S.SUCCEEDED, S.PARTIAL)


def on_base(base: BaseVersion | None = OLD, step: int | None = 4) -> Desired:
    """What the cluster is when weights of a trainer's are served."""
    if base is None:
        return state_changes.set_step(Desired(), "m", step) if step is not None else Desired()
    desired = weight_changes.begin(Desired(), "m", base, base.version, InFlight.PIN)
    desired = weight_changes.commit(desired, "m")
    return desired if step is None else state_changes.set_step(desired, "m", step)


def loads(desired: Desired, *boards: str) -> list[str]:
    """Return the label of the weights that boards must load."""
    return [desired.target(board, "m").label for board in boards]


def rolling(**fields: object) -> WeightsRolloutPlan:
    given = {"version": NEW, "label": "b-new", "boards": THREE, **fields}
    return WeightsRolloutPlan(operation="op", model="m", **given)  # type: ignore[arg-type]


def at_once(**fields: object) -> WeightsRolloutPlan:
    return rolling(at_once=True, in_flight=InFlight.SWITCH, **{"step": 5, **fields})


# -- changes -----------------------------------------------------------------------------------


def test_boards_load_other_weights_as_their_turn_comes() -> None:
    desired = weight_changes.begin(on_base(), "m", NEW, "b-new", InFlight.SWITCH)
    assert loads(desired, "b1", "b2") == ["a-old", "a-old"]
    desired = weight_changes.switch(desired, "m", ["b2"])
    assert loads(desired, "b1", "b2") == ["a-old", "b-new"]
    target = desired.target("b2", "m")
    assert (target.base, target.rebase) == (NEW, InFlight.SWITCH)
    after = weight_changes.commit(desired, "m")
    assert loads(after, "b1", "b2", "a late one") == ["b-new"] * 3
    assert after.weights_of("m").rebase is None
    assert after.weights_of("m").step == 4
    back = weight_changes.undo(desired, "m")
    assert loads(back, "b1", "b2") == ["a-old", "a-old"]
    # What ran on b2 is treated on the way back as on the way there.
    assert back.target("b2", "m").rebase is InFlight.SWITCH


def test_the_way_back_to_the_folders_own_file_is_the_same() -> None:
    desired = weight_changes.begin(on_base(), "m", None, "default", InFlight.PIN)
    desired = weight_changes.commit(weight_changes.switch(desired, "m", THREE), "m")
    assert desired.target("b1", "m").base is None
    assert loads(desired, "b1") == ["default"]


def test_nothing_changes_where_nothing_is_on_its_way_to_be_undone() -> None:
    for desired in (Desired(), on_base()):
        assert weight_changes.undo(desired, "m") is desired


@pytest.mark.parametrize(
    ("change", "error"),
    [
        pytest.param(
            lambda d: weight_changes.begin(
                weight_changes.begin(d, "m", NEW, "n", InFlight.PIN), "m", OTHER, "o", InFlight.PIN
            ),
            OperationConflict,
            id="two at once",
        ),
        pytest.param(
            lambda d: weight_changes.begin(d, "m", NEW, "", InFlight.PIN),
            RequestError,
            id="no label",
        ),
        pytest.param(
            lambda d: weight_changes.switch(d, "m", ["b1"]), OperationConflict, id="a switch"
        ),
        pytest.param(lambda d: weight_changes.commit(d, "m"), OperationConflict, id="a commit"),
        pytest.param(lambda d: at_once(step=4).check(d), StaleWeights, id="the same step"),
        pytest.param(lambda d: at_once(step=3).check(d), StaleWeights, id="an earlier step"),
    ],
)
def test_a_change_that_may_not_be_made_has_a_reason(change: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        change(on_base())  # type: ignore[operator]


@pytest.mark.parametrize(
    ("plan", "holds"),
    [
        pytest.param(rolling(version=OLD, label="a-old"), True, id="the same"),
        pytest.param(
            rolling(version=replace(OLD, version="x"), label="a-old"), True, id="content counts"
        ),
        pytest.param(rolling(version=OLD, label="renamed"), False, id="another label"),
        pytest.param(rolling(), False, id="another content"),
        pytest.param(rolling(version=None, label="a-old"), False, id="the folder's"),
        pytest.param(at_once(version=OLD, label="a-old"), False, id="a new step"),
    ],
)
def test_what_is_served_already_is_known_by_its_content(
    plan: WeightsRolloutPlan, holds: bool
) -> None:
    assert plan.holds(on_base()) is holds


# -- the course --------------------------------------------------------------------------------


@dataclass
class World:
    """Boards, a desired state, and an update that is carried out as a Coordinator does."""

    plan: WeightsRolloutPlan
    desired: Desired = field(default_factory=on_base)
    now_s: float = 1000.0
    refuse: Move | None = None
    steps: list[Step] = field(default_factory=list)
    pending: list[tuple[Move, str]] = field(default_factory=list)
    there: set[str] = field(default_factory=set)
    mixed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.before = self.desired
        kind = K.WEIGHT_UPDATE if self.plan.at_once else K.REBASE
        params = {"model": "m", "digest": NEW.digest}
        self.operation = recorded("op", kind, params=params)
        self.there = set(self.plan.boards)
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
        try:
            if ask.move is self.refuse:
                self.refuse = None
                raise OperationConflict("no room in the ledger")
            after = self.plan.apply(ask, self.desired, self.now_s)
        except RkserveError as error:
            self.tell(ChangeRefused(ask.move, ControlError.of(error)))
            return False
        assert after is self.desired or after.epoch == self.desired.epoch + 1
        if not self.rollout.ended:
            epoch = self.operation.epoch if after is self.desired else after.epoch
            self.operation = self.operation.at(self.rollout.phase, epoch=epoch)
        self.desired = after
        self.pending += [(ask.move, board) for board in ask.boards]
        self.look()
        return True

    def look(self) -> None:
        """Note a moment in which boards that go on would answer with different weights."""
        held = {b for b in self.there if self.desired.target(b, "m").hold is not None}
        emitting = set(loads(self.desired, *(self.there - held)))
        if self.plan.at_once and len(emitting) > 1:
            self.mixed.append(f"{emitting} at epoch {self.desired.epoch}")

    def answer(self, move: Move, *boards: str, error: ControlError | None = None) -> None:
        for board in boards or tuple(self.rollout.boards):
            self.pending.remove((move, board))
            self.tell(BoardAnswered(move, board, error))

    def die(self, board: str) -> None:
        self.there.discard(board)
        self.pending = [one for one in self.pending if one[1] != board]
        self.tell(BoardLeft(board))

    def join(self, board: str) -> None:
        """A board joins or returns; the performer notices that where it asks several boards."""
        self.there.add(board)
        known = board in self.rollout.boards
        at = self.rollout.at
        if known or not (at in (Move.HOLD, Move.COMMIT, Move.UNDO) or at is RolloutStage.ROLL):
            return
        self.tell(BoardJoined(board))
        if isinstance(at, Move) and board in self.rollout.boards:
            self.pending.append((at, board))

    @property
    def away(self) -> set[str]:
        """The boards whose turn it is."""
        asked, done = self.rollout.asked, self.rollout.done
        return {b for move, b in asked if move is Move.SWITCH and (move, b) not in done}


def test_board_by_board_no_more_are_away_than_may_be() -> None:
    one = World(rolling(max_unavailable=2))
    one.answer(Move.STAGE)
    one.answer(Move.OFFER)
    assert loads(one.desired, *THREE) == ["b-new", "b-new", "a-old"]
    one.answer(Move.SWITCH, "b2")
    assert loads(one.desired, *THREE) == ["b-new"] * 3
    one.answer(Move.SWITCH, "b1", "b3")
    one.answer(Move.COMMIT)
    assert one.finish == FinishRollout(S.SUCCEEDED)
    assert one.desired.weights_of("m").base == NEW
    assert one.asked == [
        (Move.STAGE, THREE),
        (Move.OFFER, THREE),
        (Move.SWITCH, ("b1", "b2")),
        (Move.SWITCH, ("b3",)),
        (Move.COMMIT, THREE),
    ]


def test_at_once_holds_all_until_all_have_loaded_and_notes_the_step() -> None:
    one = World(at_once())
    one.answer(Move.STAGE)
    (held,) = one.desired.pauses
    assert (held.scope, held.mode, held.level) == (Scope(("m",)), PauseMode.KEEP, None)
    one.answer(Move.HOLD)
    assert loads(one.desired, *THREE) == ["b-new"] * 3
    assert one.desired.pauses == (held,)
    assert one.desired.weights_of("m").step == 4
    before = one.desired.epoch
    one.answer(Move.SWITCH)
    assert not one.desired.pauses
    assert one.desired.epoch == before + 1
    weights = one.desired.weights_of("m")
    assert (weights.step, weights.base, weights.rebase) == (5, NEW, None)
    one.answer(Move.COMMIT)
    assert one.finish == FinishRollout(S.SUCCEEDED)


@pytest.mark.parametrize("plan", [rolling(version=None), at_once(version=None)], ids=repr)
def test_back_to_the_folders_own_file_nothing_is_staged(plan: WeightsRolloutPlan) -> None:
    assert Move.STAGE not in plan.stages


def test_one_board_that_cannot_load_it_brings_all_back() -> None:
    one = World(rolling())
    one.answer(Move.STAGE)
    one.answer(Move.OFFER)
    one.answer(Move.SWITCH, "b1")
    one.answer(Move.SWITCH, "b2", error=BROKEN)
    assert loads(one.desired, *THREE) == ["a-old"] * 3
    assert one.finish is None
    one.answer(Move.UNDO)
    assert one.finish == FinishRollout(S.UNDONE, BROKEN)


def test_a_board_that_dies_in_its_turn_stops_the_update_before_the_next_one_does() -> None:
    one = World(rolling())
    one.answer(Move.STAGE)
    one.answer(Move.OFFER)
    one.die("b1")
    assert one.asked[-1] == (Move.UNDO, ("b2", "b3"))
    assert one.rollout.error is not None
    assert "died while it loaded" in one.rollout.error.message


@pytest.mark.parametrize("gone", ["b2", "b3"])
def test_a_board_that_dies_otherwise_is_left_out(gone: str) -> None:
    one = World(rolling())
    one.answer(Move.STAGE)
    one.answer(Move.OFFER)
    one.die(gone)
    (left,) = {"b2", "b3"} - {gone}
    one.answer(Move.SWITCH, "b1")
    one.answer(Move.SWITCH, left)
    one.answer(Move.COMMIT)
    assert one.finish == FinishRollout(S.SUCCEEDED)


def test_a_board_that_joins_meanwhile_waits_for_its_turn() -> None:
    one = World(rolling())
    one.answer(Move.STAGE)
    one.answer(Move.OFFER)
    one.join("b4")
    assert loads(one.desired, "b4") == ["a-old"]
    for board in ("b1", "b2", "b3"):
        one.answer(Move.SWITCH, board)
    assert loads(one.desired, "b4") == ["b-new"]
    assert one.away == {"b4"}
    one.answer(Move.SWITCH, "b4")
    assert one.asked[-1] == (Move.COMMIT, (*THREE, "b4"))


def test_all_at_once_one_that_dies_is_left_out() -> None:
    one = World(at_once())
    one.answer(Move.STAGE)
    one.answer(Move.HOLD)
    one.die("b1")
    one.answer(Move.SWITCH, "b2", "b3")
    one.answer(Move.COMMIT)
    assert one.finish == FinishRollout(S.SUCCEEDED)


def test_a_hold_that_ended_before_all_had_loaded_brings_all_back() -> None:
    one = World(at_once())
    one.answer(Move.STAGE)
    one.answer(Move.HOLD)
    one.desired, _ = state_changes.expire(one.desired, one.now_s + one.plan.hold_s)
    one.answer(Move.SWITCH)
    assert one.asked[-1][0] is Move.UNDO
    one.answer(Move.UNDO)
    assert one.finish is not None
    assert one.finish.state is S.UNDONE
    assert loads(one.desired, *THREE) == ["a-old"] * 3
    assert one.desired.weights_of("m").step == 4


# -- whatever happens --------------------------------------------------------------------------

plans = st.builds(
    lambda at_once_, count, most, folder, in_flight: WeightsRolloutPlan(
        operation="op",
        model="m",
        version=None if folder else NEW,
        label="default" if folder else "b-new",
        boards=tuple(f"b{n}" for n in range(count)),
        at_once=at_once_,
        max_unavailable=most,
        in_flight=in_flight,
        step=5 if at_once_ else None,
    ),
    st.booleans(),
    st.integers(0, 4),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from(InFlight),
)
FATES = ("good",) * 8 + ("bad", "die", "die other", "join", "late", "expire")
fates = st.lists(st.tuples(st.sampled_from(FATES), st.integers(0, 1000)), max_size=40)
refusals = st.sampled_from((None,) * 6 + (Move.HOLD, Move.OFFER, Move.SWITCH, Move.COMMIT))


def meet(one: World, fate: str, pick: int) -> None:
    """Let something happen."""
    names = [*(f"b{n}" for n in range(5)), "newcomer"]
    if fate == "join":
        one.join(names[pick % len(names)])
    elif fate == "late":
        if pick % 4 == 0:
            one.tell(RolloutCancelled(LATE))
    elif fate == "expire":
        one.now_s += one.plan.hold_s if pick % 4 == 0 else 1.0
        one.desired, _ = state_changes.expire(one.desired, one.now_s)
        one.look()
    elif fate == "die other" and one.there:
        one.die(sorted(one.there)[pick % len(one.there)])
    elif one.pending:
        move, board = one.pending[pick % len(one.pending)]
        if fate == "die":
            one.die(board)
        else:
            one.pending.remove((move, board))
            one.tell(BoardAnswered(move, board, BROKEN if fate == "bad" else None))


def drain(one: World) -> None:
    """Let everything that is asked for be answered well."""
    while one.pending and one.finish is None:
        move, board = one.pending.pop(0)
        one.tell(BoardAnswered(move, board))


def check_end(one: World) -> None:
    assert one.finish is not None
    weights, before = one.desired.weights_of("m"), one.before.weights_of("m")
    assert one.desired.pauses == ()
    assert weights.rebase is None
    assert not one.mixed
    if one.finish.state in DONE:
        assert weight_changes.is_same(weights.base, one.plan.version)
        assert (weights.label, weights.step) == (one.plan.label, one.plan.step)
    else:
        assert one.finish.error is not None
        kept = (weights.base, weights.label, weights.step)
        assert kept == (before.base, before.label, before.step)


@settings(deadline=None, max_examples=400)
@given(plans, fates, refusals)
def test_every_update_ends_committed_or_undone_and_mixes_nothing(
    plan: WeightsRolloutPlan, events: list[tuple[str, int]], refuse: Move | None
) -> None:
    one = World(plan, refuse=refuse)
    for fate, pick in events:
        if one.finish is not None:
            break
        meet(one, fate, pick)
        if not plan.at_once:
            assert len(one.away) <= plan.max_unavailable
    drain(one)
    note(f"{'at once' if plan.at_once else 'in turn'}: {one.rollout.ended}")
    check_end(one)


@settings(deadline=None, max_examples=400)
@given(plans, fates)
def test_a_coordinator_that_dies_at_any_moment_leaves_one_of_the_two_as_well(
    plan: WeightsRolloutPlan, events: list[tuple[str, int]]
) -> None:
    one = World(plan)
    for fate, pick in events:
        if one.finish is not None:
            break
        meet(one, fate, pick)
    moves = [move for move, _ in one.asked]
    committed = Move.COMMIT in moves and Move.UNDO not in moves
    desired, changed = recover(one.desired, [one.operation], one.now_s)
    operation = changed[0] if changed else one.operation
    note(f"{one.rollout.phase.value}: {operation.state.value}")
    assert operation.over
    assert desired.pauses == ()
    weights, before = desired.weights_of("m"), one.before.weights_of("m")
    assert weights.rebase is None
    assert (operation.state in DONE) is committed
    if committed:
        assert weight_changes.is_same(weights.base, plan.version)
    else:
        assert (weights.base, weights.step) == (before.base, before.step)
    assert recover(desired, [operation], one.now_s + 9) == (desired, ())


def test_its_values_cross_processes() -> None:
    one = World(rolling())
    assert pickle.loads(pickle.dumps((one.rollout, one.steps))) == (one.rollout, one.steps)


# -- who excludes whom -------------------------------------------------------------------------

UPDATE = recorded("op-1", K.WEIGHT_UPDATE, params={"model": "m", "name": "law"})
PINNED = recorded("op-1", K.WEIGHT_UPDATE, params={"model": "m", "name": "law", "in_flight": "pin"})
BASE = recorded("op-2", K.WEIGHT_UPDATE, params={"model": "m"})
TURNS = recorded("op-3", K.REBASE, params={"model": "m"})


@pytest.mark.parametrize(
    ("running", "kind", "params", "meet"),
    [
        pytest.param(UPDATE, K.WEIGHT_UPDATE, {"model": "m"}, False, id="two updates"),
        pytest.param(TURNS, K.WEIGHT_UPDATE, {"model": "m"}, False, id="an update in a rebase"),
        pytest.param(TURNS, K.ADAPTER_ROLLOUT, {"model": "m", "name": "x"}, False, id="a rollout"),
        pytest.param(TURNS, K.REBASE, {"model": "other"}, True, id="another model"),
        pytest.param(TURNS, K.LABEL, {"model": "m", "label": "x"}, False, id="a label"),
        pytest.param(TURNS, K.LABEL, {"model": "n", "label": "x"}, True, id="another's label"),
        pytest.param(TURNS, K.SLEEP, {"models": ["m"]}, False, id="a sleep"),
        pytest.param(TURNS, K.ADAPTER_STAGE, {"model": "m", "name": "x"}, True, id="a staging"),
        pytest.param(TURNS, K.PAUSE, {}, True, id="a pause between turns"),
        pytest.param(BASE.at(Phase.STAGING), K.PAUSE, {}, True, id="a pause before the hold"),
        pytest.param(BASE.at(Phase.STOPPING), K.PAUSE, {}, False, id="a pause in the hold"),
        pytest.param(BASE.at(Phase.SWITCHING), K.RESUME, {}, False, id="while boards load"),
        pytest.param(UPDATE.at(Phase.LOADING), K.PAUSE, {}, False, id="while it loads, held"),
        pytest.param(
            UPDATE.at(Phase.STOPPING), K.PAUSE, {"adapter": "med"}, False, id="all are held"
        ),
        pytest.param(
            PINNED.at(Phase.STOPPING), K.PAUSE, {"adapter": "med"}, True, id="another adapter"
        ),
        pytest.param(PINNED.at(Phase.LOADING), K.PAUSE, {}, True, id="it loads, and is not held"),
    ],
)
def test_operations_that_an_update_excludes_are_refused(
    running: ControlOperation, kind: OperationKind, params: dict[str, object], meet: bool
) -> None:
    assert (conflict([running], action(kind, params)) is None) is meet
