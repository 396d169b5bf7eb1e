"""The cluster's status: totals, what is paused and what sleeps, and the weights in service."""

from __future__ import annotations

from typing import Any

import pytest

from rkserve.api.admin.cluster_status import (
    BoardStatus,
    CoordinatorEntry,
    cluster_entry,
    is_paused_entry,
    is_sleeping_entry,
    weight_info,
)
from rkserve.control import sleep as sleep_changes
from rkserve.control import state_changes
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import (
    AdapterVersion,
    AdapterVersions,
    Desired,
    PauseMode,
    Scope,
    SleepLevel,
)
from rkserve.core.messages import AdapterRef

KEEP = PauseMode.KEEP


def board(name: str, state: BoardState = BoardState.READY, **figures: Any) -> BoardReport:
    return BoardReport(name, "m", state, **figures)


def slept(level: SleepLevel, *boards: str) -> Desired:
    return sleep_changes.sleep(Desired(4), "op", Scope((), boards), KEEP, level, now_s=0.0)


PAUSED = state_changes.pause(Desired(), "op", Scope(), KEEP, 0.0)
ASLEEP = BoardState.ASLEEP


@pytest.mark.parametrize(
    ("desired", "boards", "told"),
    [
        pytest.param(Desired(), ["a", "b"], (False, False), id="neither"),
        pytest.param(slept(SleepLevel.UNLOADED, "a"), ["a", "b"], (True, False), id="one"),
        pytest.param(slept(SleepLevel.PAUSED), ["a", "b"], (True, True), id="all, lightly"),
        pytest.param(slept(SleepLevel.UNLOADED), [], (True, True), id="no board is there"),
        pytest.param(PAUSED, ["a"], (False, False), id="a pause is no sleep"),
    ],
)
def test_is_sleeping_tells_any_and_all(
    desired: Desired, boards: list[str], told: tuple[bool, bool]
) -> None:
    found = is_sleeping_entry(desired, [board(name) for name in boards], None)
    assert (found["is_sleeping"], found["all"], found["epoch"]) == (*told, desired.epoch)
    assert list(found["boards"]) == boards


def test_what_sleeps_is_paused_as_well_and_told_apart() -> None:
    desired = slept(SleepLevel.DROPPED, "a")
    reports = [board("a", ASLEEP, level=2, hold="keep"), board("b")]
    assert is_sleeping_entry(desired, reports, "m")["boards"] == {
        "a": {"sleeping": True, "level": 2, "reported": 2, "state": "asleep", "epoch": None},
        "b": {"sleeping": False, "level": None, "reported": None, "state": "ready", "epoch": None},
    }
    paused = is_paused_entry(desired, reports, None)
    assert (paused["is_paused"], paused["all"]) == (True, False)
    assert [one["level"] for one in paused["boards"].values()] == [2, None]


def test_adapters_digests_stand_beside_the_base_weights() -> None:
    active = AdapterVersion(AdapterRef("tone", "v1", "a" * 64), 7)
    lines = (AdapterVersions("m", "tone", active), AdapterVersions("m", "other"))
    board = BoardReport("a", "m", BoardState.READY, serving=(("tone", "a" * 64),))
    entry = weight_info(Desired(lines=lines), ["m"], None, [board])["models"]["m"]
    assert entry["adapters"] == {"tone": "v1", "other": None}
    assert entry["adapter_digests"] == {"tone": "a" * 64}
    assert entry["boards"]["a"]["adapter_digests"] == {"tone": "a" * 64}


def test_totals_add_up_boards_and_lack_what_one_of_them_does_not_know() -> None:
    desired = slept(SleepLevel.UNLOADED, "b")
    reports = [
        board("b", ASLEEP, context_len=4, prompt_tokens=30, cached_tokens=10),
        board("a", context_len=8, n_batch=2, kv_positions=3, running=1, prompt_tokens=10),
    ]
    boards = [BoardStatus(one, 5.0, 2.5, 100) for one in reports]
    head = CoordinatorEntry(reachable=False, heard_s_ago=1.23456)
    told = cluster_entry(desired, ["m", "other"], boards, head)
    assert (told["epoch"], told["coordinator"]["heard_s_ago"]) == (5, 1.235)
    assert [one["id"] for one in told["boards"]] == ["a", "b"]
    total = told["total"]
    assert (total["boards"], total["ready"], total["asleep"], total["running"]) == (2, 1, 1, 1)
    assert (total["positions"], total["capacity"], total["bytes"]) == (3, 20, 300)
    assert (total["hit_ratio"], total["decode_tokens_per_s"]) == (0.25, 5.0)
    assert (told["models"]["m"]["boards"], told["models"]["other"]["boards"]) == (2, 0)
    unknown = cluster_entry(desired, ["m"], [*boards, BoardStatus(board("c"))], head)
    assert unknown["total"]["bytes"] is None
