"""Rules about boards, where they must not fire."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rkserve.core.board_report import BoardState, FetchProgress
from rkserve.verdicts.facts import ClusterFacts
from rkserve.verdicts.rules import judge
from tests.support.values.cluster_facts import HEALTHY, NOW_S, board, healthy

SLOW_DDR = replace(HEALTHY, ddr_hz=528_000_000)
SLOW_NPU = replace(HEALTHY, npu_hz=300_000_000)


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(healthy(board(1, SLOW_DDR, at_work=None)), id="an idle board saves power"),
        pytest.param(healthy(board(1, SLOW_NPU, at_work=HEALTHY)), id="an idle NPU, too"),
        pytest.param(
            healthy(board(1, HEALTHY, at_work=SLOW_DDR)), id="a clock that was raised meanwhile"
        ),
        pytest.param(
            healthy(board(1, replace(SLOW_NPU, npu_load=(3.0, 0.0, 0.0)))),
            id="an NPU that has just begun",
        ),
        pytest.param(healthy(board(1, replace(HEALTHY, ddr_hz=None))), id="a clock not shown"),
        pytest.param(healthy(board(1, replace(HEALTHY, soc="", ddr_max_hz=None))), id="no SoC"),
        pytest.param(
            healthy(board(1, epoch=11, state_since_s=NOW_S - 5)), id="a board that has just come"
        ),
        pytest.param(
            replace(healthy(board(1, epoch=11)), epoch_since_s=NOW_S - 3),
            id="a desired state that has just come",
        ),
        pytest.param(
            healthy(
                board(1, state=BoardState.FETCHING, fetch=FetchProgress(), state_since_s=NOW_S - 60)
            ),
            id="a board that fetches its model",
        ),
        pytest.param(
            healthy(board(1, state=BoardState.LOADING, state_since_s=NOW_S - 60)),
            id="a board that loads",
        ),
        pytest.param(healthy(board(1, speed_tokens_per_s=None)), id="a board that has not decoded"),
        pytest.param(
            healthy(board(1, speed_tokens_per_s=5.0), count=2), id="two boards have no median"
        ),
        pytest.param(
            healthy(
                board(1, replace(HEALTHY, soc="RK3576"), speed_tokens_per_s=5.0, platform="RK3576")
            ),
            id="another SoC is another kind",
        ),
    ],
)
def test_a_rule_is_silent_about(facts: ClusterFacts) -> None:
    assert judge(facts).reasons == ()


@pytest.mark.parametrize("state", [BoardState.LOADING, BoardState.JOINING, BoardState.FETCHING])
def test_a_board_that_takes_too_long_to_come_is_a_reason(state: BoardState) -> None:
    coming = board(1, state=state, epoch=12, state_since_s=NOW_S - 900)
    (only,) = judge(healthy(coming)).reasons
    assert only.rule == "BoardRecovering"
    assert only.sentence == f"It is {state.value} for 15 minutes."


def test_a_board_that_the_router_avoids_is_a_reason() -> None:
    avoided = board(1, circuit="open", circuit_reason="3 requests failed, last: it hung")
    (only,) = judge(healthy(avoided)).reasons
    assert only.rule == "BoardRecovering"
    assert only.evidence[0] == "3 requests failed, last: it hung"


@pytest.mark.parametrize(
    ("state", "command", "place"),
    [
        (BoardState.LOST, "sudo systemctl restart rkserve-board", "board"),
        (BoardState.FAILED, "rkserve doctor", "board"),
        (BoardState.STOPPED, "serve status", "head"),
    ],
)
def test_the_command_for_a_missing_board_depends_on_how_it_is_missing(
    state: BoardState, command: str, place: str
) -> None:
    (only,) = judge(healthy(board(1, state=state))).reasons
    assert only.command.startswith(command)
    assert only.run_on == place


def test_the_last_reading_of_a_board_that_is_gone_is_no_reason() -> None:
    gone = board(1, SLOW_DDR, state=BoardState.LOST, speed_tokens_per_s=3.0, epoch=2)
    assert [one.rule for one in judge(healthy(gone)).reasons] == ["BoardLost"]


def test_a_cause_is_told_once_where_heat_lowers_the_clocks() -> None:
    hot = replace(HEALTHY, temperature_c=92.0, npu_hz=600_000_000, ddr_hz=1_068_000_000)
    (only,) = judge(healthy(board(1, hot, speed_tokens_per_s=4.0))).reasons
    assert only.rule == "Hot"
    assert len([line for line in only.evidence if "clock is" in line]) == 2


def test_paths_of_the_board_s_disk_are_not_in_the_evidence() -> None:
    failed = board(1, state=BoardState.FAILED, reason="cannot open /var/lib/models/x.rkllm")
    (only,) = judge(healthy(failed)).reasons
    assert only.evidence[0] == "cannot open x.rkllm"
