"""The state of a model in one word, from its boards and the desired state."""

from __future__ import annotations

from typing import Any

import pytest

from rkserve.api.openai.models import model_state
from rkserve.control import sleep as sleep_changes
from rkserve.control import state_changes
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import Desired, PauseMode, Scope, SleepLevel

KEEP = PauseMode.KEEP


def board(name: str, state: BoardState = BoardState.READY, **figures: Any) -> BoardReport:
    return BoardReport(name, "m", state, **figures)


def slept(level: SleepLevel, *boards: str) -> Desired:
    return sleep_changes.sleep(Desired(4), "op", Scope((), boards), KEEP, level, now_s=0.0)


PAUSED = state_changes.pause(Desired(), "op", Scope(), KEEP, 0.0)
ASLEEP = BoardState.ASLEEP


@pytest.mark.parametrize(
    ("desired", "boards", "state"),
    [
        pytest.param(Desired(), [board("a")], "ready", id="ready"),
        pytest.param(slept(SleepLevel.UNLOADED, "a"), [board("a"), board("b")], "ready", id="one"),
        pytest.param(PAUSED, [board("a")], "paused", id="paused"),
        pytest.param(slept(SleepLevel.PAUSED), [board("a")], "paused", id="the lightest sleep"),
        pytest.param(slept(SleepLevel.UNLOADED), [board("a", ASLEEP)], "asleep", id="asleep"),
        pytest.param(
            slept(SleepLevel.DROPPED),
            [board("a", ASLEEP), board("b", BoardState.FAILED)],
            "asleep",
            id="one of them failed",
        ),
        pytest.param(Desired(), [board("a", ASLEEP)], "loading", id="about to wake"),
        pytest.param(Desired(), [board("a", BoardState.RECOVERING)], "loading", id="recovering"),
        pytest.param(
            slept(SleepLevel.UNLOADED, "a"),
            [board("a", ASLEEP), board("b", BoardState.JOINING)],
            "loading",
            id="another one joins",
        ),
        pytest.param(Desired(), [board("a", BoardState.FAILED)], "failed", id="failed"),
        pytest.param(
            slept(SleepLevel.UNLOADED), [board("a", BoardState.LOST)], "failed", id="lost"
        ),
        pytest.param(Desired(), [], "loading", id="not heard yet"),
    ],
)
def test_a_model_has_one_state(desired: Desired, boards: list[BoardReport], state: str) -> None:
    assert model_state(desired, boards) == state
