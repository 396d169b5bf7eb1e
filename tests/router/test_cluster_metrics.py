"""The metrics of a cluster: the same from every Router, and right whatever becomes of Routers."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import Message

from rkserve.config.router import MetricsConfig, RouterConfig
from rkserve.core.board_report import BoardState
from rkserve.core.exposition import RouterFigures
from rkserve.core.messages import Delta
from tests.core.test_board_metrics import REPORT
from tests.support.boards.fake_boards import (
    FakeBoards,
    Step,
    accepted,
    eventually,
    finished,
    report,
)
from tests.support.http.router_house import CHAT, House, chat
from tests.support.http.scraping import ClusterOfRouters, Scraper, parsed

pytestmark = [pytest.mark.virtual_time, pytest.mark.slow]


def house(**config: Any) -> House:
    return House(FakeBoards.answering("a", "b", text="Hel|lo| you"), RouterConfig(**config))


async def refused(of: House) -> None:
    """Make a request that is refused at once, as a server would."""
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": CHAT,
        "raw_path": CHAT.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-length", b"none")],
        "client": ("127.0.0.1", 1),
        "server": ("localhost", None),
    }

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_: Message) -> None:
        pass

    await of.app(scope, receive, send)


async def scrape(of: House) -> str:
    return (await of("GET", "/metrics")).text


# -- several Routers ------------------------------------------------------------------------------


async def test_two_thousand_requests_at_three_routers_are_counted_exactly() -> None:
    """Also while one Router is replaced in order and another one is killed."""
    rng = random.Random(7)
    routers = ClusterOfRouters(3, house)
    prometheus, sent, chats = Scraper(), 0, 0

    async def scraped() -> None:
        prometheus.take(await scrape(rng.choice([*routers.houses.values()])))

    await scraped()
    for turn in range(50):
        for _ in range(40):
            await refused(rng.choice([*routers.houses.values()]))
            sent += 1
        for _ in range(2):
            of = rng.choice([*routers.houses.values()])
            assert (await of("POST", CHAT, json=chat(stream=turn % 2 == 0))).status_code == 200
            chats += 1
        if turn == 15:  # it ends in order: what no scrape has seen is left to the others
            await routers.metrics["0"].end()
            routers.kill("0")
        if turn == 20:
            routers.join("0")
            await routers.metrics["0"].begin()
        if turn == 30:  # it is killed after a scrape, and a successor takes its name
            await scraped()
            routers.kill("1")
            routers.join("1")
            await routers.metrics["1"].begin()
        await scraped()
    assert (sent, chats) == (2_000, 100)
    count = prometheus.increase
    assert count("rkserve_requests_total", route=CHAT, status="200") == chats
    assert count("rkserve_ttft_seconds_count", model="sim-chat") == chats
    assert count("rkserve_ttft_seconds_bucket", model="sim-chat", le="+Inf") == chats
    assert count("rkserve_finish_reasons_total", reason="stop") == chats
    assert count("rkserve_request_completion_tokens_sum") == 3 * chats
    assert count("rkserve_goodput_tokens_total") == 3 * chats
    assert count("rkserve_inter_token_seconds_count") == 2 * chats
    assert count("rkserve_key_completion_tokens_total", key="(none)") == 3 * chats
    assert count("rkserve_requests_total", route=CHAT, status="400") == sent


async def test_every_router_gives_the_same_answer_with_boards_and_coordinator_once() -> None:
    routers = ClusterOfRouters(3, house)
    for number, of in enumerate(routers.houses.values()):
        for _ in range(number + 1):
            await of("POST", CHAT, json=chat())
    seen = []
    for of in routers.houses.values():
        found = parsed(await scrape(of))
        seen.append(
            {
                dict(labels)["router"]: value
                for (name, labels), value in found.items()
                if name == "rkserve_ttft_seconds_count"
            }
        )
        boards = [labels for name, labels in found if name == "rkserve_board_running"]
        assert len(boards) == 2
        assert ("rkserve_desired_epoch", frozenset()) in found
        assert all("router" not in dict(labels) for labels in boards)
        up = [value for (name, _), value in found.items() if name == "rkserve_router_up"]
        assert up == [1, 1, 1]
    assert seen == [{"0": 1, "1": 2, "2": 3}] * 3


async def test_a_silent_router_is_down_and_the_others_figures_are_there() -> None:
    routers = ClusterOfRouters(3, house)
    routers.silent.add("1")
    prometheus = Scraper()
    prometheus.take(await scrape(routers.houses["0"]))
    assert [prometheus.value("rkserve_router_up", router=name) for name in "012"] == [1, 0, 1]
    assert prometheus.value("rkserve_requests_in_flight", router="1") is None
    assert prometheus.value("rkserve_requests_in_flight", router="2") == 0
    assert prometheus.value("rkserve_board_running", board="a") == 0


async def test_what_a_router_counted_outlives_it_until_its_name_is_taken() -> None:
    routers = ClusterOfRouters(2, house)
    for _ in range(3):
        await routers.houses["1"]("POST", CHAT, json=chat())
    await routers.metrics["1"].end()
    routers.kill("1")
    prometheus = Scraper()
    prometheus.take(await scrape(routers.houses["0"]))
    assert prometheus.value("rkserve_ttft_seconds_count", router="1") == 3
    assert prometheus.value("rkserve_requests_in_flight", router="1") is None, "gauges end with it"
    assert prometheus.value("rkserve_router_up", router="1") is None
    # A Router that begins later gets it from the others.
    routers.join("2")
    later = Scraper()
    later.take(await scrape(routers.houses["2"]))
    assert later.value("rkserve_ttft_seconds_count", router="1") == 3
    routers.join("1")
    await routers.metrics["1"].begin()
    for of in routers.houses.values():
        taken = Scraper()
        taken.take(await scrape(of))
        assert taken.value("rkserve_ttft_seconds_count", router="1") == 0
    routers.kill("1")
    gone = Scraper()
    gone.take(await scrape(routers.houses["0"]))
    assert gone.value("rkserve_ttft_seconds_count", router="1") is None


async def test_a_router_does_not_keep_figures_of_its_own_name() -> None:
    routers = ClusterOfRouters(1, house)
    routers.metrics["0"].keep(RouterFigures("0"))
    assert (await routers.metrics["0"].own()).departed == ()


async def test_a_lost_board_has_a_state_and_no_figures() -> None:
    boards = FakeBoards([report("a", requests=5), report("b", state=BoardState.LOST, requests=3)])
    prometheus = Scraper()
    prometheus.take(await scrape(House(boards)))
    assert prometheus.value("rkserve_board_state", board="b", state="lost") == 1
    assert prometheus.value("rkserve_board_state", board="b", state="ready") == 0
    assert prometheus.value("rkserve_board_requests_total", board="b") is None
    assert prometheus.value("rkserve_board_requests_total", board="a") == 5


# -- answers --------------------------------------------------------------------------------------


async def test_the_ends_of_answers_are_counted_by_reason() -> None:
    steps: list[Step] = [accepted("a"), Delta("x", (1,)), finished(1)]
    of = House(FakeBoards([report("a")], {"replica of a": [steps]}))
    await of("POST", CHAT, json=chat(n=2))
    assert of.metric("rkserve_finish_reasons_total", model="sim-chat", reason="stop") == 2
    of.boards.scripts["replica of a"] = [[accepted("a"), Delta("x", (1,)), ZeroDivisionError("x")]]
    await of("POST", CHAT, json=chat(stream=True))
    assert of.metric("rkserve_finish_reasons_total", model="sim-chat", reason="error") == 1
    assert of.metric("rkserve_request_prompt_tokens_count", model="sim-chat") == 2
    assert of.metric("rkserve_request_completion_tokens_sum", model="sim-chat") == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_leaves_is_the_reason_of_an_end(stream: bool) -> None:
    gate = asyncio.Event()
    steps: list[Step] = [accepted("a"), Delta("x", (1,)), gate]
    of = House(FakeBoards([report("a")], {"replica of a": [steps]}))
    request = asyncio.create_task(of("POST", CHAT, json=chat(stream=stream)))
    await eventually(lambda: of.metric("rkserve_ttft_seconds_count", model="sim-chat"))
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
    await eventually(lambda: not of.boards.running)
    name = "rkserve_finish_reasons_total"
    assert of.metric(name, model="sim-chat", reason="hang_up") == 1
    assert of.metric(name, model="sim-chat", reason="error") == 0


# -- size and time --------------------------------------------------------------------------------

BOARDS = 50
LIMIT_BYTES = 300_000


@pytest.mark.parametrize("vllm_names", [False, True], ids=["plain", "vllm names"])
async def test_a_scrape_of_fifty_boards_is_small_and_quick(vllm_names: bool) -> None:
    model = "sim-chat"
    reports = [
        replace(REPORT, board_id=f"rk3588@board-{n:02}", replica=f"replica-{n}", model=model)
        for n in range(BOARDS)
    ]
    metrics = MetricsConfig(vllm_names=vllm_names)
    routers = ClusterOfRouters(
        3, lambda: House(FakeBoards(list(reports)), RouterConfig(metrics=metrics))
    )
    for of in routers.houses.values():
        await of.service.fleet.refresh()
    texts, took_ms = [], []
    for _ in range(5):
        began = time.perf_counter()
        texts.append(await routers.metrics["0"].text())
        took_ms.append((time.perf_counter() - began) * 1e3)
    size, best_ms = len(texts[-1].encode()), min(took_ms)
    print(f"a scrape of {BOARDS} boards and 3 Routers: {best_ms:.1f} ms, {size / 1e3:.0f} kB")  # noqa: T201
    assert (
        len({labels for name, labels in parsed(texts[-1]) if name == "rkserve_kv_capacity"}) == 50
    )
    assert size < LIMIT_BYTES
    assert best_ms < 2000  # 10 ms where nothing else runs


# -- vLLM's names ---------------------------------------------------------------------------------


async def test_vllms_names_are_there_where_they_are_asked_for() -> None:
    assert "vllm:" not in await scrape(house())
    routers = ClusterOfRouters(2, lambda: house(metrics=MetricsConfig(vllm_names=True)))
    await routers.houses["1"]("POST", CHAT, json=chat())
    prometheus = Scraper()
    prometheus.take(await scrape(routers.houses["0"]))
    model = {"model_name": "sim-chat", "engine": "0"}
    success = "vllm:request_success_total"
    assert prometheus.value(success, finished_reason="stop", router="1", **model) == 1
    assert prometheus.value(success, finished_reason="stop", router="0", **model) == 0
    assert prometheus.value("vllm:num_requests_running", **model) == 0
    assert prometheus.value("vllm:num_requests_waiting", **model) == 0


async def test_adapters_that_run_or_wait_at_any_router_are_listed() -> None:
    gate = asyncio.Event()
    routers = ClusterOfRouters(2, lambda: house(metrics=MetricsConfig(vllm_names=True)))
    of = routers.houses["1"]
    of.boards.scripts = {
        f"replica of {name}": [[accepted(name), Delta("x", (1,)), gate, finished(1)]]
        for name in "ab"
    }
    request = asyncio.create_task(of("POST", CHAT, json={**chat(), "model": "sim-chat:pirate"}))
    await eventually(lambda: of.metric("rkserve_requests_in_flight"))
    labels = dict(
        next(
            labels
            for (name, labels) in parsed(await scrape(routers.houses["0"]))
            if name == "vllm:lora_requests_info"
        )
    )
    assert labels["running_lora_adapters"] == "pirate"
    assert labels["max_lora"] == "4"
    gate.set()
    assert (await request).status_code == 200
    assert (await routers.metrics["1"].own()).running == ()
