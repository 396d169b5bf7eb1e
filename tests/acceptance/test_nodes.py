"""Boards that join, leave, or cannot start: nodes with an NPU, driven by the simulated library."""

from __future__ import annotations

import asyncio
import shutil
import struct
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from rkserve.core.board_report import BoardReport
from rkserve.native.sim.build import ensure_built
from tests.support.cluster.local_cluster import START_S, App, LocalCluster, wait_for
from tests.support.http.talk import CHAT, MODEL, Reply, chat_body, streaming
from tests.support.paths import PROJECT
from tests.support.sim import rkllm_fake

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# Offset of the memory size in the simulated model's file; docs/reference/simulator.md.
MEMORY_MB_AT = 200
SHARE = 0.25  # of a board's NPU, so that one node takes a replica of every group


def board_group(name: str, number: int, library: Path, model: Path | str = "") -> dict[str, Any]:
    """Settings of a group of real boards, several of which share an NPU."""
    return {
        "name": name,
        "model": str(model or f"models/{MODEL}"),
        "library": str(library),
        "rknpu": SHARE,
        "base_domain_id": number,
        "max_boards": 8,
    }


# -- joining and leaving --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def farm(ray_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """An application for real boards, before the first board has joined.

    An NPU is shared by a group that works and three that cannot start.
    """
    folder, copy = tmp_path_factory.mktemp("farm"), ray_cluster.model_copy
    beta = rkllm_fake.build(folder / "librkllmrt-beta.so", rkllm_fake.version("1.2.1b1"))
    groups = [
        board_group("farm", 0, ensure_built("1.3.0")),
        board_group("gone", 1, Path("/nonexistent/librkllmrt.so"), copy("lost")),
        board_group("beta", 2, beta, copy("early")),
        board_group("big", 3, ensure_built("1.3.0"), _huge_model(folder)),
    ]
    ray_cluster.deploy("farm", {"boards": groups, "state_dir": "~/state"})
    yield App(ray_cluster, "farm", "farm", boards=0)
    ray_cluster.delete("farm")
    for node in list(ray_cluster.cluster.worker_nodes):
        ray_cluster.remove_node(node)


def join(cluster: LocalCluster) -> Any:
    """Join a board whose simulated library runs at a third of a real one's times."""
    return cluster.add_board_node(RKSIM_TIME_SCALE="0.3", RKSIM_LOAD_MS="100")


def replicas(app: App, number: int) -> list[BoardReport]:
    """Wait until so many boards report."""

    def look() -> list[BoardReport] | None:
        found = app.reports()
        return found if len(found) == number else None

    return wait_for(f"{number} boards report", look, START_S)


def home_of(pid: int) -> str:
    """Return the home of a replica's process, which tells on which node it is."""
    return Path(psutil.Process(pid).environ()["HOME"]).name


def test_boards_that_join_and_leave_gain_and_lose_their_replica(farm: App) -> None:
    _expect_no_board_yet(farm)

    join(farm.cluster)
    (first,) = replicas(farm, 1)
    assert (first.release, first.model) == ("1.3.0", MODEL)
    assert first.board_id == f"farm@{first.node}"
    _expect_an_answer(farm)

    node = join(farm.cluster)
    both = replicas(farm, 2)
    assert {home_of(report.pid) for report in both} == {"home-1", "home-2"}
    assert first.replica in {report.replica for report in both}
    assert home_of(farm.replica_pid("Router")) not in {home_of(report.pid) for report in both}

    stayed, moved = asyncio.run(_lose_a_board_in_mid_answer(farm, node))
    for one in (stayed, moved):
        assert (one.error, one.finish_reason, one.retracted) == (None, "stop", 0)
    assert stayed.text == moved.text
    assert moved.timings["continued"] == 1

    (survivor,) = replicas(farm, 1)
    assert (survivor.replica, survivor.pid, survivor.engine_pid) == (
        first.replica,
        first.pid,
        first.engine_pid,
    )
    _expect_an_answer(farm)


def _expect_no_board_yet(app: App) -> None:
    with app.http_sync() as http:
        wait_for("the Router to be up", lambda: http.get("/health").status_code == 200, START_S)
        for response in (http.post(CHAT, json=chat_body("Hello")), http.get("/ready")):
            assert response.status_code == 503
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "no_board"
        assert http.get(f"/v1/models/{MODEL}").json()["rkserve"]["boards"] == []


def _expect_an_answer(app: App) -> None:
    def answered() -> bool:
        with app.http_sync() as http:
            response = http.post(CHAT, json=chat_body("Repeat after me: here"))
        if response.status_code == 503:  # the Router has not heard of the board yet
            return False
        return bool(response.json()["choices"][0]["message"]["content"] == "here")

    wait_for("an answer", answered)


async def _lose_a_board_in_mid_answer(app: App, node: Any) -> tuple[Reply, Reply]:
    """Cut ``node`` off while both boards answer; return the answer that stayed, then the other."""
    async with app.http() as http, AsyncExitStack() as stack:
        replies = await _one_on_each(app, stack, http)
        await asyncio.to_thread(app.cluster.remove_node, node)
        await asyncio.gather(*(reply.read() for reply in replies))
    stayed, moved = sorted(replies, key=lambda reply: reply.timings.get("continued", 0))
    return stayed, moved


async def _one_on_each(app: App, stack: AsyncExitStack, http: httpx.AsyncClient) -> list[Reply]:
    """Open two answers until they run on two boards, which the Router has to hear of first."""
    for _ in range(20):
        async with AsyncExitStack() as attempt:
            replies = [
                await attempt.enter_async_context(streaming(http, "Write 600 tokens"))
                for _ in range(2)
            ]
            await replies[0].read(deltas=2)
            reports = await asyncio.to_thread(app.reports)
            if [report.running for report in reports] == [1, 1]:
                stack.push_async_exit(attempt.pop_all())
                return replies
        await asyncio.sleep(0.5)
    raise AssertionError("the Router never used the second board")


# -- boards that cannot start ---------------------------------------------------------------------


@pytest.fixture
def troubled(farm: App) -> App:
    """The same with a node: that of the test before, or a new one where that has not run."""
    if not farm.cluster.cluster.worker_nodes:
        join(farm.cluster)
    return farm


def _huge_model(folder: Path) -> Path:
    """Return a model that needs twice the memory that one NPU domain has."""
    model = folder / "huge-chat"
    shutil.copytree(PROJECT / "models" / MODEL, model)
    content = bytearray((model / "model.rkllm").read_bytes())
    struct.pack_into("<I", content, MEMORY_MB_AT, 8000)
    (model / "model.rkllm").write_bytes(content)
    return model


@pytest.mark.parametrize(
    ("group", "model", "says"),
    [
        pytest.param("gone", "lost", "/nonexistent/librkllmrt.so", id="no library"),
        pytest.param("beta", "early", "1.2.1b1", id="a release that is refused"),
        pytest.param("big", "huge-chat", "malloc", id="a model that does not fit"),
    ],
)
def test_a_board_that_cannot_start_says_why_wherever_one_looks(
    troubled: App, group: str, model: str, says: str
) -> None:
    def status() -> str:
        return troubled.cluster.status(troubled.name, group)

    def in_status() -> str | None:
        message = status()
        return message if says in message else None

    def in_models() -> dict[str, str] | None:
        with troubled.http_sync() as http:
            response = http.get(f"/v1/models/{model}")
        boards = response.json()["rkserve"]["boards"] if response.status_code == 200 else []
        reason = says.rpartition("/")[2]  # clients read no folders of the board
        found = [b for b in boards if b["id"].startswith(f"{group}@") and reason in b["reason"]]
        return found[0] if found else None

    message = wait_for("the reason in `serve status`", in_status, START_S, instead=status)
    assert "cannot start" in message
    listed = wait_for("the reason in /v1/models", in_models, START_S)
    assert listed["state"] == "failed"


def test_the_other_boards_serve_meanwhile(troubled: App) -> None:
    _expect_an_answer(troubled)


def test_a_model_without_a_board_that_starts_is_a_503_with_the_reason(troubled: App) -> None:
    def refused() -> httpx.Response | None:
        with troubled.http_sync() as http:
            response = http.post(CHAT, json={**chat_body("Hello"), "model": "huge-chat"})
        return response if "malloc" in response.text else None

    response = wait_for("the reason in a refusal", refused)
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "no_board"
    assert int(response.headers["retry-after"]) >= 1
