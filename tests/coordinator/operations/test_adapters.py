"""Adapter versions through the Coordinator: staging, retirement, removal of unused files."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from rkserve.control.calls import OperationKind
from rkserve.control.operations import OperationState, ResultStatus
from rkserve.coordinator.operations.adapters import GarbageCollector
from rkserve.core.desired_state import AdapterVersion
from rkserve.core.errors import (
    AdapterExists,
    ArtifactRefused,
    StageFailed,
    StaleEpoch,
)
from tests.support.boards.fake_boards import eventually
from tests.support.cluster.fake_cluster import (
    CONTENT,
    MODEL,
    Control,
    FakeCluster,
    served,
    serving,
    started,
)

pytestmark = pytest.mark.virtual_time

K, S = OperationKind, OperationState


# -- staging -----------------------------------------------------------------------------------


@pytest.mark.promise("Adapters", "Versions live side by side and have names of their own")
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


async def test_a_model_with_npus_and_cpus_has_no_adapters_and_no_new_weights(
    tmp_path: Path,
) -> None:
    fleet = Control(tmp_path, FakeCluster.of("a", "b", "c"), mixed=frozenset({MODEL}))
    async with started(fleet) as it:
        with pytest.raises(ArtifactRefused, match="no file of weights loads on both"):
            await it.stage(it.store.add("v1", CONTENT["v1"]))
        assert it.desired.lines == ()
        assert [board.whole for board in it.cluster.boards.values()] == [{}, {}, {}]
        with pytest.raises(ArtifactRefused, match="of one kind"):
            await it.it.find_weights(MODEL, f"{MODEL}@v2")


@pytest.mark.promise("Adapters", "A stage that fails changes nothing anywhere")
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


@pytest.mark.promise(
    "Adapters", "A version is identified by content: digest, size, base model, scale"
)
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


@pytest.mark.promise("Adapters", "The memory of retired versions is freed, board by board")
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


@pytest.mark.promise("Adapters", "A board that joins late has all versions before it serves")
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


def garbage_collector(it: Control, grace_s: float = 0.0) -> GarbageCollector:
    """One that knows what a Coordinator that has just started knows."""
    made = GarbageCollector(it.it._context, it.store, grace_s=grace_s)
    made.remember(it.it.operations(100))
    return made


def another(version: AdapterVersion, label: str, scale: float = 1.0) -> AdapterVersion:
    """Return a version of the same content."""
    return replace(version, ref=replace(version.ref, version=label, scale=scale))


async def test_a_file_stays_while_another_version_with_that_content_is_being_staged(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1") as it:
        version = it.store.add("v2", CONTENT["v2"])
        it.cluster["b"].refuses["stage_commit"] = StageFailed("b", "its disk is full")
        assert (await it.stage(version)).status != 200
        it.cluster["b"].refuses.clear()
        it.cluster["c"].slow_s["stage_commit"] = 0.2
        asked = it.cluster["a"].asked["stage_commit"]
        again = asyncio.create_task(it.stage(another(version, "v2b", 2.0), scale=2.0))
        await eventually(lambda: it.cluster["a"].asked["stage_commit"] > asked)
        assert not again.done()
        await garbage_collector(it).look()
        assert (await again).status == 200
        await garbage_collector(it).look()
        assert version.ref.digest in it.store.files
        it.cluster["a"].restart(disk=False)
        await eventually(lambda: it.cluster["a"].serves)


async def test_a_file_stays_while_a_line_names_its_content_though_no_record_does(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1") as it:
        (version,) = it.cluster["a"].whole.values()
        assert isinstance(version, AdapterVersion)
        assert (await it.stage(another(version, "same"))).status == 200
        forgetful = GarbageCollector(it.it._context, it.store, grace_s=0.0)
        latest = it.it.operations(1)
        assert latest[0].params["version"] == "same"
        forgetful.remember(latest)
        await it.call(K.ADAPTER_RETIRE, model=MODEL, name="tone", version="same")
        await it.heard()
        await forgetful.look()
        assert version.ref.digest in it.store.files
        assert [len(board.whole) for board in it.cluster.boards.values()] == [1, 1, 1]


async def test_a_version_that_no_record_names_is_removed_from_boards_once_it_is_retired(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1") as it:
        forgetful = GarbageCollector(it.it._context, it.store, grace_s=0.0)
        await forgetful.look()
        await it.call(K.ADAPTER_RETIRE, model=MODEL, name="tone")
        await it.heard()
        await forgetful.look()
        assert it.store.files == {}
        assert [len(board.whole) for board in it.cluster.boards.values()] == [0, 0, 0]


async def test_a_file_that_has_just_come_again_is_not_removed_before_it_is_staged(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        made = garbage_collector(it, grace_s=0.2)
        await it.call(K.ADAPTER_RETIRE, model=MODEL, name="tone", version="v2")
        await it.heard()
        await made.look()  # the time of grace begins
        await asyncio.sleep(0.25)
        version = it.store.add("v2", CONTENT["v2"])  # the end of another upload
        await made.look()
        assert version.ref.digest in it.store.files
        assert (await it.stage(version)).status == 200


async def test_a_board_is_free_as_soon_as_it_has_a_file_that_others_still_wait_for(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1") as it:
        stager = it.it._context.stager
        it.cluster["c"].slow_s["stage_commit"] = 5.0
        asked = it.cluster["c"].asked["stage_commit"]
        staging = asyncio.create_task(it.stage(it.store.add("v2", CONTENT["v2"])))
        await eventually(lambda: it.cluster["c"].asked["stage_commit"] > asked)
        await eventually(lambda: not stager.at("a").locked() and not stager.at("b").locked())
        assert stager.at("c").locked()
        assert not staging.done()
        it.cluster["c"].slow_s.clear()
        assert (await staging).status == 200


async def test_a_board_that_somebody_holds_keeps_no_other_from_getting_a_file(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1") as it:
        version = it.store.add("v2", CONTENT["v2"])
        async with it.it._context.stager.at("b"):
            staging = asyncio.create_task(it.stage(version))
            others = [it.cluster["a"], it.cluster["c"]]
            await eventually(lambda: all(version.ref.key in one.whole for one in others))
            assert version.ref.key not in it.cluster["b"].whole
        assert (await staging).status == 200
        assert version.ref.key in it.cluster["b"].whole


async def test_a_silent_board_holds_up_no_removal_elsewhere_and_is_asked_when_it_answers(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        made = garbage_collector(it)
        await it.call(K.ADAPTER_RETIRE, model=MODEL, name="tone", version="v2")
        it.cluster["b"].frozen = True
        await it.heard()
        await asyncio.wait_for(made.look(), 5.0)
        assert [len(board.whole) for board in it.cluster.boards.values()] == [1, 2, 1]
        it.cluster["b"].frozen = False
        await it.heard()
        await made.look()
        assert [len(board.whole) for board in it.cluster.boards.values()] == [1, 1, 1]
        assert len(it.store.files) == 1


async def test_a_version_is_removed_from_a_board_that_was_away_when_it_was_dropped(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, "v1", "v2") as it:
        made = garbage_collector(it)
        it.cluster["c"].dead = True
        roster = it.it._context.roster
        await eventually(lambda: all(one.board_id != "c" for one in roster.reports()))
        await it.call(K.ADAPTER_RETIRE, model=MODEL, name="tone", version="v2")
        await it.heard()
        await made.look()
        assert [len(board.whole) for board in it.cluster.boards.values()] == [1, 1, 2]
        assert len(it.store.files) == 1
        it.cluster["c"].restart()
        await eventually(lambda: it.follows)
        await it.heard()
        await made.look()
        assert [len(board.whole) for board in it.cluster.boards.values()] == [1, 1, 1]


async def test_what_was_forgotten_long_ago_is_what_nobody_has(tmp_path: Path) -> None:
    async with serving(tmp_path, "v1", "v2", "v3") as it:
        made = GarbageCollector(it.it._context, it.store, grace_s=0.0, most=1)
        made.remember(it.it.operations(100))
        it.cluster["c"].refuses["unstage"] = StageFailed("c", "its disk fails")
        for version in ("v2", "v3"):
            await it.call(K.ADAPTER_RETIRE, model=MODEL, name="tone", version=version)
        for _ in range(2):
            await it.heard()
            await made.look()
        assert [len(board.whole) for board in it.cluster.boards.values()] == [1, 1, 3]
        it.cluster["c"].refuses.clear()
        await made.look()
        assert [len(board.whole) for board in it.cluster.boards.values()] == [1, 1, 1]
        for _ in range(2):
            await it.heard()
            await made.look()
        assert len(made._known) == 1


async def test_a_file_that_was_never_staged_is_removed_after_a_while(tmp_path: Path) -> None:
    async with serving(tmp_path, "v1") as it:
        pushed = it.store.add("v2", CONTENT["v2"])
        with pytest.raises(StaleEpoch):
            await it.call(
                K.ADAPTER_STAGE,
                model=MODEL,
                name="tone",
                version="v2",
                digest=pushed.ref.digest,
                size_bytes=pushed.size_bytes,
                expected_epoch=1,
            )
        await garbage_collector(it, grace_s=60.0).look()
        assert len(it.store.files) == 2
        await garbage_collector(it).look()
        assert pushed.ref.digest not in it.store.files
        assert len(it.store.files) == 1
