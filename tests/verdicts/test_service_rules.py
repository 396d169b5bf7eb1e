"""Rules about the service as a whole, at their limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rkserve.core.board_report import BoardState
from rkserve.core.desired_state import BoardTarget, Desired, EffectivePause, PauseMode, SleepLevel
from rkserve.verdicts.facts import WINDOWS, ClusterFacts, TrafficCounts
from rkserve.verdicts.rules import VerdictOutcome, judge
from tests.support.values.cluster_facts import (
    EPOCH,
    MODEL,
    NOW_S,
    board,
    healthy,
    pause,
    traffic,
    with_traffic,
)


def with_windows(**windows: TrafficCounts) -> ClusterFacts:
    """A cluster with other traffic in some windows, named like ``w5m``."""
    others = {name[1:]: counts for name, counts in windows.items()}
    return replace(healthy(), traffic={MODEL: {**dict.fromkeys(WINDOWS, traffic()), **others}})


BAD = TrafficCounts(good=50, failed=50)
ASLEEP = BoardTarget(EPOCH, hold=EffectivePause(PauseMode.KEEP), level=SleepLevel.UNLOADED)


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(with_windows(w5m=TrafficCounts(failed=19)), id="19 requests say nothing"),
        pytest.param(with_windows(w5m=BAD), id="a short outage within a good hour"),
        pytest.param(with_windows(w1h=BAD), id="an outage that is over"),
        pytest.param(with_traffic(good=2000, late=19, count=2000), id="within the budget"),
        pytest.param(with_traffic(count=0, ttft_s=99.0), id="no traffic at all"),
        pytest.param(with_traffic(count=19, ttft_s=99.0, wait_s=99.0), id="too little traffic"),
        pytest.param(with_traffic(turned_away=2), id="one in a hundred turned away"),
        pytest.param(with_traffic(expected=1999, found=0), id="few tokens expected"),
        pytest.param(replace(healthy(), streams={"ray": 19}), id="few streams"),
        pytest.param(
            replace(healthy(), streams={"ray": 500}, has_channel=False), id="the channel is off"
        ),
        pytest.param(
            replace(healthy(), desired=Desired(EPOCH, (pause(expires_s=None),))), id="no lease"
        ),
        pytest.param(
            replace(healthy(), desired=Desired(EPOCH, (pause(expires_s=NOW_S - 5),))),
            id="a lease that has just ended",
        ),
        pytest.param(
            healthy(*(board(n, state=BoardState.ASLEEP, target=ASLEEP) for n in range(1, 5))),
            id="a model that sleeps on purpose",
        ),
    ],
)
def test_a_rule_is_silent_about(facts: ClusterFacts) -> None:
    assert judge(facts).reasons == ()


def test_both_pairs_of_windows_find_a_fast_loss_of_the_budget() -> None:
    for facts in (with_windows(w5m=BAD, w1h=BAD), with_windows(w30m=BAD, w6h=BAD)):
        (only,) = judge(facts).reasons
        assert only.rule == "ErrorBudgetFast"
        assert only.evidence[0].endswith("50 failed and 0 late of 100")


def test_a_fast_loss_explains_the_slow_one() -> None:
    (only,) = judge(with_traffic(good=100, failed=100)).reasons
    assert only.rule == "ErrorBudgetFast"
    assert "ErrorBudgetSlow" in only.evidence[-1]


def test_a_model_without_boards_names_their_states() -> None:
    facts = replace(healthy(), models=(MODEL, "other"))
    verdict = judge(facts)
    assert verdict.outcome is VerdictOutcome.NOT_READY
    (only,) = verdict.reasons
    assert (only.model, only.evidence) == ("other", ())
    avoided = healthy(*(board(n, circuit="open") for n in range(1, 5)))
    assert judge(avoided).outcome is VerdictOutcome.NOT_READY


def test_an_overdue_pause_names_its_scope_and_the_coordinator() -> None:
    slept = pause(level=SleepLevel.UNLOADED)
    facts = replace(healthy(), desired=Desired(EPOCH, (slept,)), coordinator_reachable=False)
    overdue = next(one for one in judge(facts).reasons if one.rule == "PauseHeldPastLease")
    assert overdue.command == f"rkserve wake --model {MODEL}"
    assert overdue.evidence == ("The Coordinator ends leases, and does not answer.",)


def test_the_time_to_the_first_token_is_judged_by_the_configured_target() -> None:
    facts = with_traffic(ttft_s=3.0)
    assert judge(facts).reasons == ()
    strict = replace(facts, objectives=facts.objectives.model_copy(update={"ttft_s": 2.0}))
    assert [one.rule for one in judge(strict).reasons] == ["TtftP95"]


DRAINED = BoardTarget(EPOCH, drained=True)
DRAINED_ASLEEP = replace(ASLEEP, drained=True)


def test_a_drained_board_is_no_reason_while_another_one_serves() -> None:
    assert judge(healthy(board(1, target=DRAINED))).outcome is VerdictOutcome.READY


@pytest.mark.parametrize(
    ("facts", "sentence", "command"),
    [
        pytest.param(
            healthy(*(board(n, target=DRAINED) for n in (1, 2)), count=2),
            "All its boards are drained: requests are refused.",
            "rkserve boards undrain rock-01 rock-02",
            id="all are drained",
        ),
        pytest.param(
            healthy(*(board(n, target=DRAINED) for n in range(1, 7)), count=6),
            "All its boards are drained: requests are refused.",
            f"rkserve boards undrain --model {MODEL}",
            id="more than a command names",
        ),
        pytest.param(
            healthy(board(1, target=DRAINED), board(2, state=BoardState.LOST), count=2),
            "No board serves it. Drained: 1 of its 2 boards.",
            "rkserve boards undrain rock-01",
            id="the other one is lost",
        ),
        pytest.param(
            healthy(board(1, state=BoardState.ASLEEP, target=DRAINED_ASLEEP), count=1),
            "All its boards are drained: requests are refused.",
            "rkserve boards undrain rock-01",
            id="asleep too, and no request wakes it",
        ),
    ],
)
def test_a_model_whose_boards_are_drained_has_the_command_that_ends_it(
    facts: ClusterFacts, sentence: str, command: str
) -> None:
    found = judge(facts)
    reason = found.reasons[0]
    assert (found.outcome, reason.rule) == (VerdictOutcome.NOT_READY, "ModelWithoutBoards")
    assert (reason.sentence, reason.command) == (sentence, command)
    assert any("drained" in line for line in reason.evidence)


def test_a_model_sleeps_on_purpose_although_one_of_its_boards_is_drained() -> None:
    sleeps = board(1, state=BoardState.ASLEEP, target=ASLEEP)
    facts = healthy(sleeps, board(2, target=DRAINED), count=2)
    assert judge(facts).outcome is VerdictOutcome.READY
