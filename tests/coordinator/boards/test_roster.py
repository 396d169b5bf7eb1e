"""A Coordinator says that boards have stopped only where it knows them all."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rkserve.core.board_report import BoardReport
from rkserve.core.errors import BoardFailed, CoordinatorAway
from rkserve.fleet.fleet import TOGETHER_S
from tests.support.boards.fake_boards import eventually
from tests.support.cluster.fake_cluster import Control, FakeBoard, FakeCluster

pytestmark = pytest.mark.virtual_time


async def test_nothing_is_called_stopped_before_each_board_was_heard_once(tmp_path: Path) -> None:
    it = Control(tmp_path, FakeCluster.of("a", "b", "c"))
    await it.open()
    await eventually(lambda: it.follows)
    it.cluster["b"].frozen = True
    await it.again()
    epoch = it.desired.epoch
    with pytest.raises(CoordinatorAway, match="Not all boards have reported") as caught:
        await it.pause()
    assert (caught.value.http_status, it.desired.epoch) == (503, epoch)
    assert it.it.operations(10) == []
    it.cluster["b"].frozen = False
    await eventually(lambda: not it.it._roster._fleet.unknown)
    assert (await it.pause()).status == 200
    assert it.held == ["a", "b", "c"]
    await it.close()


async def test_a_cluster_can_be_resumed_before_each_board_was_heard(tmp_path: Path) -> None:
    it = Control(tmp_path, FakeCluster.of("a", "b"))
    await it.open()
    await eventually(lambda: it.follows)
    assert (await it.pause()).status == 200
    it.cluster["b"].frozen = True
    await it.again()
    assert (await it.resume()).status == 200
    it.cluster["b"].frozen = False
    await eventually(lambda: it.held == [] and it.follows)
    await it.close()


@pytest.mark.parametrize("slow_s", [0.0, 2 * TOGETHER_S], ids=["at once", "long"])
async def test_boards_are_told_by_one_call_and_only_the_others_by_themselves(
    tmp_path: Path, slow_s: float
) -> None:
    it = Control(tmp_path, FakeCluster.of("a", "b", "c"), settings={"operation_timeout_s": 60})
    await it.open()
    await eventually(lambda: it.follows)
    told = {name: it.cluster[name].asked["adopt"] for name in "abc"}
    it.cluster["b"].slow_s["adopt"] = slow_s
    it.cluster["c"].refuses["adopt"] = BoardFailed("c", "it is being started")
    outcome = asyncio.create_task(it.pause())
    await eventually(lambda: it.cluster["c"].asked["adopt"] >= told["c"] + 2)
    del it.cluster["c"].refuses["adopt"]
    assert (await outcome).status == 200
    again = {name: it.cluster[name].asked["adopt"] - told[name] for name in "abc"}
    assert again["a"] == 1
    assert (again["b"] > 1) == (slow_s > TOGETHER_S)
    assert again["c"] >= 3
    await it.close()


async def test_a_group_without_replicas_holds_up_nobody(tmp_path: Path) -> None:
    it = Control(tmp_path, FakeCluster.of())
    await it.open()
    assert (await it.pause()).status == 200
    it.cluster.boards["late"] = FakeBoard("late")
    await eventually(lambda: it.held == ["late"])
    await it.close()


class Mute(FakeCluster):
    """Boards that Ray cannot reach at all, for a while."""

    mute = True

    async def reports(self) -> list[BoardReport]:
        if self.mute:
            raise BoardFailed("only", "no report within the time limit")
        return await super().reports()


async def test_a_group_that_did_not_report_at_all_is_not_known(tmp_path: Path) -> None:
    cluster = Mute.of("a", "b")
    assert isinstance(cluster, Mute)
    it = Control(tmp_path, cluster)
    await it.open()
    with pytest.raises(CoordinatorAway):
        await it.pause()
    cluster.mute = False
    await eventually(lambda: it.follows)
    assert (await it.pause()).status == 200
    await it.close()
