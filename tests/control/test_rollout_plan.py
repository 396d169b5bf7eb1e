"""Plans of rollouts: what a call asks for, and what is refused before anything is staged."""

from __future__ import annotations

import pytest

from rkserve.control import state_changes
from rkserve.control.calls import (
    AdapterRollbackAction,
    AdapterRolloutAction,
    Strategy,
)
from rkserve.control.rollout_plan import AdapterRolloutPlan, Move, MoveRequest, RolloutStage, plan
from rkserve.core.desired_state import Desired, InFlight
from rkserve.core.errors import AdapterExists, OperationConflict, RequestError
from tests.support.values.control_values import version
from tests.support.values.rollouts import THREE, V1, V2, V3, atomic, served


@pytest.mark.parametrize(
    ("one", "desired", "error"),
    [
        pytest.param(
            atomic(version=None), served(V1), OperationConflict, id="nothing to go back to"
        ),
        pytest.param(
            atomic(version=version("law", "v1", "other")),
            served(V1),
            AdapterExists,
            id="other content",
        ),
        pytest.param(
            atomic(),
            state_changes.begin(served(V1), "m", V2),
            OperationConflict,
            id="another candidate",
        ),
    ],
)
def test_what_cannot_be_committed_is_known_before_anything_is_staged(
    one: AdapterRolloutPlan, desired: Desired, error: type[Exception]
) -> None:
    with pytest.raises(error):
        one.check(desired)


def test_what_is_served_already_is_known_too() -> None:
    atomic().check(served(V1))
    assert not atomic().holds(served(V1))
    assert atomic().holds(served(V1, V3))
    assert not atomic(version=None).holds(served(V1, V3))


def test_a_plan_is_made_of_an_action() -> None:
    asked = AdapterRolloutAction(
        model="m",
        name="law",
        version="v3",
        strategy=Strategy.CANARY,
        weight=1,
        in_flight=InFlight.ABORT,
    )
    found = plan("op", asked, V3, ["b2", "b1", "b2"], keep=4)
    assert found == atomic(
        boards=("b1", "b2"),
        strategy=Strategy.CANARY,
        weight=1,
        in_flight=InFlight.ABORT,
        keep=4,
    )
    back = plan("op", AdapterRollbackAction(model="m", name="law"), None, THREE)
    assert (back.version, back.strategy) == (None, Strategy.ATOMIC)
    with pytest.raises(RequestError, match="version"):
        plan("op", asked, None, THREE)


def test_each_strategy_has_its_stages() -> None:
    commits = [one.stages for one in (atomic(), atomic(held_first=True), atomic(version=None))]
    assert commits == [
        (Move.STAGE, Move.LOAD, Move.HOLD, Move.COMMIT),
        (Move.STAGE, Move.HOLD, Move.LOAD, Move.COMMIT),
        (Move.HOLD, Move.COMMIT),
    ]
    canary = atomic(strategy=Strategy.CANARY)
    assert canary.stages == (
        Move.STAGE,
        Move.LOAD,
        Move.OFFER,
        RolloutStage.OBSERVE,
        Move.COMMIT,
    )
    assert (canary.turn(Move.LOAD), atomic().turn(Move.LOAD)) == ((Move.LOAD,), ())
    assert canary.turn(RolloutStage.ROLL) == (Move.LOAD, Move.SWITCH)


def test_staging_and_loading_change_nothing() -> None:
    desired = served(V1)
    for move in (Move.STAGE, Move.LOAD):
        assert atomic().apply(MoveRequest(move, THREE), desired, 0.0) is desired
