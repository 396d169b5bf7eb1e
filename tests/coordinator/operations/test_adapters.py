"""Versions of adapters through the Coordinator: staged on every board, and retired."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rkserve.control.calls import OperationKind
from rkserve.control.operations import OperationState, ResultStatus
from rkserve.coordinator.operations.garbage_collection import GarbageCollector
from rkserve.core.errors import (
    AdapterExists,
    StageFailed,
)
from tests.support.boards.fake_boards import eventually
from tests.support.cluster.fake_cluster import CONTENT, MODEL, served, serving

pytestmark = pytest.mark.virtual_time

K, S = OperationKind, OperationState


# -- staging -----------------------------------------------------------------------------------


async def test_a_version_is_staged_on_every_board_and_served_by_its_full_name(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as it:
        version = it.store.add("v1", CONTENT["v1"])
        outcome = await it.stage(version)
        assert (outcome.status, outcome.applied) == (200, True)
        assert [r.details["sent_bytes"] for r in outcome.operation.results.values()] == [300] * 3
        assert all(board.whole for board in it.cluster.boards.values())
        line = it.desired.line(MODEL, "tone")
        assert line is not None
        assert line.versions == (version,)
        assert served(it) is None
        again = await it.stage(version)
        assert (again.status, again.applied) == (200, False)


@pytest.mark.parametrize(
    "method", ["stage_begin", "stage_chunk", "stage_commit"], ids=["begin", "chunk", "commit"]
)
async def test_a_staging_that_fails_on_one_board_changes_nothing_anywhere(
    tmp_path: Path, method: str
) -> None:
    async with serving(tmp_path) as it:
        it.cluster["b"].refuses[method] = StageFailed("b", "its disk is full")
        outcome = await it.stage(it.store.add("v1", CONTENT["v1"]))
        assert (outcome.status, outcome.operation.state) == (503, S.FAILED)
        assert outcome.operation.error is not None
        assert "its disk is full" in outcome.operation.error.message
        assert it.desired.lines == ()
        assert [board.whole for board in it.cluster.boards.values()] == [{}, {}, {}]


async def test_a_board_that_dies_while_staging_is_left_out_and_has_it_before_it_serves(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as it:
        it.cluster["b"].dies_in = "stage_chunk"
        outcome = await it.stage(it.store.add("v1", CONTENT["v1"]))
        assert outcome.status == 200
        assert outcome.operation.results["b"].status is ResultStatus.GONE
        it.cluster["b"].dies_in = ""
        it.cluster["b"].restart()
        assert not it.cluster["b"].serves
        await eventually(lambda: it.follows)
        assert it.cluster["b"].whole


async def test_a_version_that_is_another_content_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, "v1") as it:
        with pytest.raises(AdapterExists):
            await it.stage(it.store.add("v1", b"something else"))
        assert served(it) == "v1"


async def test_a_file_that_the_store_has_not_fails_the_staging(tmp_path: Path) -> None:
    async with serving(tmp_path) as it:
        version = it.store.add("v1", CONTENT["v1"])
        it.store.files.clear()
        outcome = await it.stage(version)
        assert outcome.operation.state is S.FAILED
        assert outcome.operation.error is not None
        assert "no such file" in outcome.operation.error.message


# -- retirement --------------------------------------------------------------------------------


async def test_a_retired_adapter_is_forgotten_and_its_memory_given_back_board_by_board(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1") as it:
        assert all(board.loaded for board in it.cluster.boards.values())
        await it.heard()  # reports say what is loaded
        outcome = await it.call(K.ADAPTER_RETIRE, model=MODEL, name="tone")
        assert outcome.status == 200
        assert it.desired.lines == ()
        assert [board.asked["renew"] for board in it.cluster.boards.values()] == [1, 1, 1]
        assert not any(board.loaded for board in it.cluster.boards.values())


async def test_files_that_no_line_names_are_removed_after_a_while_from_boards_and_store(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        await it.call(K.ADAPTER_RETIRE, model=MODEL, name="tone", version="v2")
        await it.heard()
        await it.it._garbage_collector.look()  # of which requests that run may still have need
        assert len(it.store.files) == 2
        garbage_collector = GarbageCollector(it.it._context, it.store, grace_s=0.0)
        garbage_collector.remember(it.it.operations(100))
        await garbage_collector.look()
        assert len(it.store.files) == 1
        assert [len(board.whole) for board in it.cluster.boards.values()] == [1, 1, 1]
        await it.heard()
        await garbage_collector.look()  # and that is all there is to do
        assert [board.asked["unstage"] for board in it.cluster.boards.values()] == [1, 1, 1]


async def test_a_version_that_is_staged_again_while_it_is_being_removed_stays(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        version = it.store.add("v2", CONTENT["v2"])
        await it.call(K.ADAPTER_RETIRE, model=MODEL, name="tone", version="v2")
        await it.heard()
        garbage_collector = GarbageCollector(it.it._context, it.store, grace_s=0.0)
        garbage_collector.remember(it.it.operations(100))
        async with it.it._context.stager.at("b"):
            removing = asyncio.create_task(garbage_collector.look())
            staging = asyncio.create_task(it.stage(version))
            await eventually(lambda: it.it.operations(1)[0].kind is K.ADAPTER_STAGE)
        await removing
        assert (await staging).status == 200
        await eventually(lambda: it.follows)
        assert len(it.store.files) == 2
        assert [len(board.whole) for board in it.cluster.boards.values()] == [2, 2, 2]


async def test_a_staging_that_fails_takes_nothing_from_another_one_of_the_same_version(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1") as it:
        version = it.store.add("v1", CONTENT["v1"])
        it.cluster["b"].refuses["stage_begin"] = StageFailed("b", "its disk is full")
        again = await it.stage(version)
        assert again.operation.state is S.FAILED
        assert [len(board.whole) for board in it.cluster.boards.values()] == [1, 1, 1]


async def test_a_board_that_lost_its_disk_gets_the_files_again_before_it_serves(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        it.cluster["c"].restart(disk=False)
        await eventually(lambda: it.follows)
        assert sorted(one.title for one in it.cluster["c"].whole.values()) == [
            "adapter tone@v1",
            "adapter tone@v2",
        ]
