"""Plans of rollouts: the stages of a call, its early refusals, and the assessment of canaries."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkserve.control import state_changes
from rkserve.control.calls import (
    AdapterRollbackAction,
    AdapterRolloutAction,
    Strategy,
)
from rkserve.control.rollout_plan import (
    AdapterRolloutPlan,
    CanaryLimits,
    CanaryVerdict,
    CanaryWatch,
    Move,
    MoveRequest,
    RolloutStage,
    judge,
    plan,
)
from rkserve.core.board_report import BoardReport, BoardState, VersionFigures
from rkserve.core.desired_state import Desired, InFlight
from rkserve.core.errors import AdapterExists, OperationConflict, RequestError
from tests.support.values.control_values import version
from tests.support.values.rollouts import THREE, V1, V2, V3, atomic, served

V = CanaryVerdict
LIMITS = CanaryLimits(requests=10, tokens=100, failures=0.1, speed=0.8)


def did(requests: int, failed: int = 0, tokens: int = 0, per_s: float = 10.0) -> VersionFigures:
    return VersionFigures("v", requests, failed, tokens, tokens / per_s * 1000)


@pytest.mark.parametrize(
    ("candidate", "active", "verdict", "said"),
    [
        pytest.param({}, {}, V.WAIT, "0 of 10 requests", id="nothing yet"),
        pytest.param({"a": did(9, 0, 500)}, {}, V.WAIT, "9 of 10", id="too few requests"),
        pytest.param({"a": did(20, 0, 99)}, {}, V.WAIT, "99 of 100", id="too few tokens"),
        pytest.param({"a": did(10, 0, 100)}, {}, V.GOOD, "nothing to compare", id="alone"),
        pytest.param({"a": did(10, 1, 100)}, {}, V.GOOD, "", id="as bad as it may be"),
        pytest.param({"a": did(10, 2, 100)}, {}, V.BAD, "2 of 10", id="worse than it may be"),
        pytest.param({"a": did(1, 1)}, {}, V.WAIT, "", id="one failure says little"),
        pytest.param({"a": did(2, 2)}, {}, V.BAD, "2 of 2", id="the rest cannot mend it"),
        pytest.param(
            {"a": did(10, 3, 100)}, {"a": did(10, 3, 100)}, V.GOOD, "", id="as bad as the other"
        ),
        pytest.param(
            {"a": did(10, 4, 100)},
            {"a": did(30, 3, 100)},
            V.BAD,
            "4 of 10",
            id="worse than the other, by requests",
        ),
        pytest.param(
            {"a": did(5, 0, 100), "b": did(5)},
            {"a": did(5, 0, 100), "b": did(5)},
            V.GOOD,
            "100%",
            id="a board without tokens says nothing of speed",
        ),
        pytest.param(
            {"a": did(10, 0, 100, 8.0)}, {"a": did(10, 0, 100, 10.0)}, V.GOOD, "80%", id="slow"
        ),
        pytest.param(
            {"a": did(10, 0, 100, 7.9)}, {"a": did(10, 0, 100, 10.0)}, V.BAD, "79%", id="too slow"
        ),
        pytest.param(
            {"slow": did(10, 0, 1000, 5.0), "fast": did(1, 0, 10, 20.0)},
            {"slow": did(10, 0, 10, 5.0), "fast": did(10, 0, 1000, 20.0)},
            V.GOOD,
            "100%",
            id="more of it on a slow board",
        ),
        pytest.param(
            {"a": did(10, 0, 100, 1.0)},
            {"b": did(10, 0, 100, 10.0)},
            V.GOOD,
            "nothing to compare",
            id="on different boards",
        ),
        pytest.param(
            {"a": did(5, 0, 50), "b": did(5, 2, 50)}, {}, V.BAD, "2 of 10", id="over all boards"
        ),
    ],
)
def test_the_verdict(
    candidate: dict[str, VersionFigures],
    active: dict[str, VersionFigures],
    verdict: CanaryVerdict,
    said: str,
) -> None:
    found = judge(candidate, active, LIMITS)
    assert found.verdict is verdict
    assert said in found.reason


def report(replica: str, *figures: VersionFigures, board: str = "b") -> BoardReport:
    return BoardReport(board, "m", BoardState.READY, replica=replica, versions=figures)


def counted(name: str, requests: int, failed: int = 0) -> VersionFigures:
    return VersionFigures(name, requests, failed, 100 * requests, 1000.0 * requests)


def test_only_what_happened_since_the_watch_began_counts() -> None:
    watch = CanaryWatch().saw([report("r1", counted("old", 1000, 900), counted("new", 50, 50))])
    assert watch.gained == {}
    watch = watch.saw([report("r1", counted("old", 1010, 900), counted("new", 60, 51))])
    assert watch.gained == {("b", "old"): counted("old", 10), ("b", "new"): counted("new", 10, 1)}


def test_a_board_that_joins_is_counted_from_its_first_report() -> None:
    watch = CanaryWatch().saw([report("r1", counted("old", 5))])
    watch = watch.saw(
        [report("r1", counted("old", 5)), report("r2", counted("old", 99), board="c")]
    )
    assert ("c", "old") not in watch.gained
    watch = watch.saw([report("r2", counted("old", 100), board="c")])
    assert watch.gained["c", "old"] == counted("old", 1)


def test_what_a_replica_did_before_it_died_is_not_forgotten() -> None:
    watch = CanaryWatch().saw([report("r1", counted("new", 0))])
    watch = watch.saw([report("r1", counted("new", 4, 2))])
    watch = watch.saw([])
    watch = watch.saw([report("r2", counted("new", 3, 1))])
    assert watch.gained["b", "new"] == counted("new", 7, 3)


def test_a_report_that_comes_late_counts_nothing_twice() -> None:
    watch = CanaryWatch().saw([report("r1", counted("new", 0))])
    for requests in (6, 4, 9):
        watch = watch.saw([report("r1", counted("new", requests))])
    assert watch.gained["b", "new"] == counted("new", 9)


def test_a_watch_judges_by_labels() -> None:
    watch = CanaryWatch().saw([report("r1")])
    watch = watch.saw([report("r1", counted("law@v2", 10, 2), counted("law@v1", 10))])
    assert watch.judge("law@v2", "law@v1", LIMITS).verdict is V.BAD
    assert watch.judge("law@v1", "law@v2", LIMITS).verdict is V.GOOD
    assert watch.judge("law@v1", None, LIMITS).verdict is V.GOOD
    assert watch.judge("law@v3", None).verdict is V.WAIT


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(0, 5), st.booleans()),
        max_size=30,
    )
)
def test_a_watch_adds_up_whatever_boards_restart(
    events: list[tuple[str, bool, int, bool]],
) -> None:
    replicas = {"a": 0, "b": 0}
    counters = {"a": 0, "b": 0}
    watch = CanaryWatch().saw([report(f"{board}-0", board=board) for board in "ab"])
    true = {"a": 0, "b": 0}
    for board, restarts, requests, heard in events:
        if restarts and heard:
            replicas[board] += 1
            counters[board] = 0
        counters[board] += requests
        true[board] += requests
        if heard or restarts:
            figures = counted("new", counters[board])
            watch = watch.saw([report(f"{board}-{replicas[board]}", figures, board=board)])
    final = [
        report(f"{board}-{replicas[board]}", counted("new", counters[board]), board=board)
        for board in "ab"
    ]
    gained = watch.saw(final).gained
    lost = {board: true[board] - gained[board, "new"].requests for board in "ab"}
    assert all(loss >= 0 for loss in lost.values())
    if all(heard for _, _, _, heard in events):
        assert lost == {"a": 0, "b": 0}


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
