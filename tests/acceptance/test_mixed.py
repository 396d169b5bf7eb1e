"""A simulated NPU and a CPU with one vocabulary: one model, whose answers go on across kinds."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from rkserve.core.board_report import BoardReport
from tests.support.cluster.local_cluster import App, LocalCluster, wait_for
from tests.support.http.talk import ENDLESS, MODEL, Reply, act, streaming
from tests.support.paths import PROJECT
from tests.support.values.tiny_gguf import tiny_folder

pytestmark = pytest.mark.ray

NPU, CPU = "mixed-npu", "mixed-cpu"
NPU_BOARD = f"{NPU}-0"
# So long that something can be done meanwhile: a tiny model writes a thousand tokens in a second.
LONG: dict[str, Any] = {"max_tokens": 2500, "temperature": 0}
ENDS = ("length", "stop")  # what the tiny model writes is nonsense, and may end at any token


@pytest.fixture(scope="module")
def mixed(ray_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """One board of each kind behind one Router; the application's group is the NPU's."""
    model = tiny_folder(tmp_path_factory.mktemp("mixed") / MODEL)
    (model / "model.rkllm").symlink_to(PROJECT / "models" / MODEL / "model.rkllm")
    groups = [
        ray_cluster.simulated(NPU, 1, model=str(model)),
        {"name": CPU, "model": str(model), "cpu": {"threads": 1}, "patience": {"least_s": 30.0}},
    ]
    # By default a request waits for the CPU, where it ends sooner than on the idle NPU.
    args = {"boards": groups, "router": {"policy": "least_load"}, "security": {"open": True}}
    ray_cluster.deploy("mixed", args)
    deployed = App(ray_cluster, "mixed", NPU, 1)
    deployed.ready()
    deployed.settled()
    cpu_board(deployed)
    yield deployed
    ray_cluster.delete("mixed")


def cpu_board(app: App) -> BoardReport:
    """Wait until the CPU board is ready and idle; return its report."""

    def look() -> BoardReport | None:
        found = app.cluster.reports(app.name, CPU)
        return found[0] if found and found[0].state.value == "ready" else None

    return wait_for("the CPU board", look)


def is_cpu(reply: Reply) -> bool:
    return reply.headers["x-rkserve-release"].startswith("llama.cpp ")


@asynccontextmanager
async def one_on_each(
    http: httpx.AsyncClient, only: bool | None = None
) -> AsyncIterator[tuple[Reply, Reply]]:
    """Open one stream on the NPU and one on the CPU; ``only`` leaves the other one again."""
    for _ in range(100):
        async with AsyncExitStack() as stack:
            both: dict[bool, Reply] = {}
            for _ in range(2):
                own = await stack.enter_async_context(AsyncExitStack())
                reply = await own.enter_async_context(streaming(http, ENDLESS, **LONG))
                both[is_cpu(reply)] = reply
                if only is not None and is_cpu(reply) is not only:
                    other = own
            if len(both) == 2:
                if only is not None:
                    await other.aclose()
                yield both[False], both[True]
                return
        await asyncio.sleep(0.2)
    raise AssertionError("the Router does not use both boards")


def test_both_kinds_are_one_model(mixed: App) -> None:
    with mixed.http_sync() as http:
        assert [one["id"] for one in http.get("/v1/models").json()["data"]] == [MODEL]
        boards = http.get("/v1/boards").json()["data"]
    assert {one["release"].split()[0] for one in boards} == {"1.3.0", "llama.cpp"}


@pytest.mark.parametrize("from_cpu", [True, False], ids=["from CPU to NPU", "from NPU to CPU"])
def test_an_answer_goes_on_at_a_board_of_the_other_kind(mixed: App, from_cpu: bool) -> None:
    engine_pid = cpu_board(mixed).engine_pid

    async def talk() -> tuple[str, Reply]:
        async with mixed.http() as http, one_on_each(http, only=from_cpu) as both:
            moves = both[from_cpu]
            await moves.read(deltas=40)
            before = moves.text
            if from_cpu:
                os.kill(engine_pid, signal.SIGKILL)
            else:
                mixed.cluster.control(NPU_BOARD, "fault=abort_at_token:400")
            return before, await moves.read()

    try:
        before, reply = asyncio.run(talk())
    finally:
        mixed.cluster.control(NPU_BOARD)
    assert reply.error is None
    assert reply.text.startswith(before)
    assert reply.finish_reason in ENDS
    assert reply.timings["continued"] == 1
    assert len(reply.timings["boards"]) == 2
    assert reply.timings["boards"][0] == reply.board


def test_a_pause_of_the_cluster_stops_both_kinds_and_loses_nothing(mixed: App) -> None:
    async def talk() -> list[Reply]:
        async with mixed.http() as http, one_on_each(http) as both:
            for reply in both:
                await reply.read(deltas=5)
            told = await http.post("/pause", json={"mode": "keep"})
            assert told.status_code == 200, told.text
            results = told.json()["results"]
            assert {one["status"] for one in results.values()} == {"paused"}
            assert len(results) == 2
            mixed.cluster.control(NPU_BOARD, "time_scale=0")
            assert (await http.post("/resume")).status_code == 200
            return [await reply.read() for reply in both]

    try:
        replies = asyncio.run(talk())
    finally:
        mixed.cluster.control(NPU_BOARD)
    for reply in replies:
        assert reply.error is None
        assert reply.finish_reason in ENDS
        assert reply.timings["boards"] == [reply.board]
        assert reply.timings["paused_ms"] > 0


def test_a_pause_goes_over_to_the_other_kind_with_its_answer(mixed: App) -> None:
    engine_pid = cpu_board(mixed).engine_pid

    async def talk() -> tuple[str, Reply]:
        async with mixed.http() as http, one_on_each(http, only=True) as (_, cpu):
            await cpu.read(deltas=20)
            told = await act(http, cpu.id, "pause")
            os.kill(engine_pid, signal.SIGKILL)
            await cpu.read_until(lambda reply: bool(reply.comments))
            mixed.cluster.control(NPU_BOARD, "time_scale=0")
            await act(http, cpu.id, "resume")
            return told["partial_output"], await cpu.read()

    try:
        partial, reply = asyncio.run(talk())
    finally:
        mixed.cluster.control(NPU_BOARD)
    assert reply.text.startswith(partial)
    assert reply.error is None
    assert reply.finish_reason in ENDS
