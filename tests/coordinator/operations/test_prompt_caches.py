"""Named prompt caches that the Coordinator keeps, on boards that join or lost theirs, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rkserve.config.serve_config import RkserveConfig
from rkserve.coordinator.operations.prompt_caches import MAX_CACHES
from rkserve.core.desired_state import SYSTEM_PROMPT, DesiredCache
from rkserve.core.errors import CacheUnsupported, RequestError
from rkserve.core.files import ids_digest
from rkserve.deployments.coordinator import system_prompts
from rkserve.models.folder import open_model_folder
from tests.support.boards.fake_boards import eventually
from tests.support.cluster.fake_cluster import MODEL, Control, FakeBoard, FakeCluster
from tests.support.paths import PROJECT

FOLDER = PROJECT / "models" / "sim-chat"
DOC = DesiredCache(MODEL, "doc", (1, 2, 3), at_s=1.0)
SYSTEM = DesiredCache(MODEL, SYSTEM_PROMPT, (7, 8, 9, 10))


@asynccontextmanager
async def control(folder: Path, **rest: Any) -> AsyncIterator[Control]:
    it = Control(folder, FakeCluster.of("a", "b", "c"), **rest)
    await it.open()
    try:
        await eventually(lambda: it.follows)
        yield it
    finally:
        await it.close()


def have(it: Control, name: str = "doc") -> dict[str, str]:
    """Return which boards hold a cache, and the digest of its ids."""
    return {
        board.board_id: board.prompts[name].digest
        for board in it.cluster.boards.values()
        if name in board.prompts
    }


def everywhere(it: Control, cache: DesiredCache) -> bool:
    return have(it, cache.name) == dict.fromkeys(it.cluster.boards, ids_digest(cache.ids))


async def test_a_board_that_joins_later_builds_what_was_built_by_name(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        it.it.caches.keep(DOC)
        await eventually(lambda: everywhere(it, DOC))
        it.cluster.boards["d"] = FakeBoard("d")
        await eventually(lambda: everywhere(it, DOC))
        it.cluster["a"].restart(disk=False)  # its disk was replaced
        await eventually(lambda: everywhere(it, DOC))
        await it.again()  # so does a successor, which reads the ledger
        it.cluster["b"].restart(disk=False)
        await eventually(lambda: everywhere(it, DOC))
        assert it.cluster["c"].asked["build_cache"] == 1, "what is there is not built again"


async def test_another_content_takes_the_place_of_the_first_on_boards_that_were_away(
    tmp_path: Path,
) -> None:
    async with control(tmp_path) as it:
        it.it.caches.keep(DOC)
        await eventually(lambda: everywhere(it, DOC))
        away = it.cluster.boards.pop("c")
        other = DesiredCache(MODEL, "doc", (4, 5, 6, 7), at_s=2.0)
        it.it.caches.keep(other)
        await eventually(lambda: everywhere(it, other))
        away.restart()
        it.cluster.boards["c"] = away
        await eventually(lambda: everywhere(it, other))


async def test_what_was_deleted_does_not_come_back_with_a_board(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        it.it.caches.keep(DOC)
        await eventually(lambda: everywhere(it, DOC))
        away = it.cluster.boards.pop("c")
        assert it.it.caches.drop(MODEL, "doc")
        assert not it.it.caches.drop(MODEL, "doc")
        assert not it.it.caches.drop(MODEL, "other")
        await eventually(lambda: have(it) == {})
        await it.again()
        away.restart()
        it.cluster.boards["c"] = away
        await eventually(lambda: have(it) == {})
        assert it.it.caches.desired(MODEL) == []


async def test_a_board_that_cannot_build_it_is_told_of_and_stops_nothing(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        it.cluster["b"].refuses["build_cache"] = CacheUnsupported("The disk is full.")
        it.it.caches.keep(DOC)
        await eventually(lambda: set(have(it)) == {"a", "c"})
        await eventually(lambda: it.it.caches.desired(MODEL)[0]["failed"])
        (told,) = it.it.caches.desired(MODEL)
        assert told["failed"] == [{"board": "b", "message": "The disk is full."}]
        assert (told["cache_name"], told["tokens"], told["configured"]) == ("doc", 3, False)
        assert (await it.pause()).status == 200
        assert (await it.resume()).status == 200


async def test_an_adapter_s_cache_follows_its_active_version(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        versions = {name: it.store.add(name, name.encode() * 40) for name in ("v1", "v2")}
        for version in versions.values():
            assert (await it.stage(version)).status == 200
        it.it.caches.keep(DesiredCache(MODEL, "doc", (1, 2), line="tone"))
        it.it.caches.keep(DesiredCache(MODEL, "old", (1, 2), line="tone", version="v1"))
        await asyncio.sleep(0.3)
        assert have(it) == {}, "no version is served yet"

        def keys(name: str) -> set[str | None]:
            boards = it.cluster.boards.values()
            return {board.prompts[name].adapter for board in boards if name in board.prompts}

        assert (await it.roll("v1")).status == 200
        await eventually(lambda: keys("doc") == {versions["v1"].key} and len(have(it)) == 3)
        assert (await it.roll("v2")).status == 200
        await eventually(lambda: keys("doc") == {versions["v2"].key})
        assert keys("old") == {versions["v1"].key}


async def test_boards_that_sleep_or_are_paused_are_left_alone(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        assert (await it.sleep(mode="keep", level=1)).status == 200
        it.it.caches.keep(DOC)
        await asyncio.sleep(0.3)
        assert all(not board.asked["build_cache"] for board in it.cluster.boards.values())
        assert (await it.wake()).status == 200
        await eventually(lambda: everywhere(it, DOC))


async def test_the_configured_system_prompt_is_on_every_board_from_its_start(
    tmp_path: Path,
) -> None:
    async with control(tmp_path, system_prompts={"only": SYSTEM}) as it:
        await eventually(lambda: everywhere(it, SYSTEM))
        it.cluster.boards["d"] = FakeBoard("d")
        await eventually(lambda: everywhere(it, SYSTEM))
        (told,) = it.it.caches.desired(MODEL)
        assert (told["cache_name"], told["configured"]) == (SYSTEM_PROMPT, True)
        for refused in (
            lambda: it.it.caches.keep(DesiredCache(MODEL, SYSTEM_PROMPT, (1,))),
            lambda: it.it.caches.drop(MODEL, SYSTEM_PROMPT),
        ):
            with pytest.raises(RequestError, match=r"prompt_cache\.system_prompt"):
                refused()


async def test_a_model_has_so_many_named_caches_at_most(tmp_path: Path) -> None:
    async with control(tmp_path) as it:
        for board in it.cluster.boards.values():
            board.refuses["caches"] = CacheUnsupported("none here")
        for number in range(MAX_CACHES):
            it.it.caches.keep(DesiredCache(MODEL, f"doc-{number}", (1,)))
        with pytest.raises(RequestError, match=f"the limit is {MAX_CACHES}"):
            it.it.caches.keep(DOC)
        it.it.caches.keep(DesiredCache(MODEL, "doc-1", (2,)))
        assert it.it.caches.drop(MODEL, "doc-2")
        it.it.caches.keep(DOC)


def config(**cache: Any) -> RkserveConfig:
    group = {"name": "chat", "model": str(FOLDER), "simulated": {}, "prompt_cache": cache}
    return RkserveConfig.model_validate({"boards": [group]})


def test_a_system_prompt_is_read_from_the_configuration() -> None:
    found = config(system_prompt="You are a patient teacher.")
    folders = {"chat": open_model_folder(FOLDER)}
    made = system_prompts(found.deployed, folders)
    assert (made["chat"].name, made["chat"].model) == (SYSTEM_PROMPT, MODEL)
    assert len(made["chat"].ids) > 5
    assert system_prompts(config().deployed, folders) == {}
    # One that the model cannot take keeps nothing from starting.
    assert system_prompts(config(system_prompt="long " * 50_000).deployed, folders) == {}


@pytest.mark.parametrize(
    ("group", "why"),
    [
        pytest.param({"prompt_cache": {"system_prompt": "x", "max_bytes": 0}}, "max_bytes"),
        pytest.param({"prompt_cache": {"system_prompt": "x"}, "n_batch": 2}, "n_batch"),
    ],
)
def test_a_system_prompt_without_prompt_caches_is_a_mistake(
    group: dict[str, Any], why: str
) -> None:
    known = {"name": "chat", "model": str(FOLDER), "simulated": {}}
    with pytest.raises(ValueError, match=why):
        RkserveConfig.model_validate({"boards": [{**known, **group}]})
