"""Batches and instances over HTTP: generations that share a run, and boards that are served twice.

In strict mode, where misuse of the C API ends the engine.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.cluster.local_cluster import App
from tests.support.cluster.varied import BATCH, BATCHED, PAIR, TWICE, of
from tests.support.http.talk import CHAT, ENDLESS, Reply, act, chat_body, streaming

pytestmark = pytest.mark.ray
pytest_plugins = ["tests.support.cluster.varied_fixtures"]

SLOW = 0.5
# The deployments of its two instances.
INSTANCES = [f"{PAIR}-i{number}" for number in range(2)]


@pytest.fixture(scope="module")
def app(varied: App) -> App:
    """A board that runs four at once, and one that is served by two handles."""
    for instance in INSTANCES:
        of(varied, instance)
    return of(varied, BATCH)


@pytest.fixture
def http(app: App) -> Iterator[httpx.Client]:
    """A client; the board of batches is the same engine afterwards."""
    (before,) = app.reports()
    with app.http_sync() as client:
        yield client
    (after,) = app.reports()
    assert after.engine_pid == before.engine_pid, after.last_recovery


@pytest.fixture
def slow(app: App) -> Iterator[None]:
    """So that something can be done while an answer goes on."""
    boards = ("batch-0", "pair-i0-0", "pair-i1-0")
    for board in boards:
        app.cluster.control(board, f"time_scale={SLOW}")
    yield
    for board in boards:
        app.cluster.control(board)


async def post(http: httpx.AsyncClient, model: str, text: str, **extra: Any) -> dict[str, Any]:
    response = await http.post(CHAT, json=chat_body(text, **{"model": model, **extra}))
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def text_of(found: dict[str, Any]) -> str:
    text: str = found["choices"][0]["message"]["content"]
    return text


def test_clients_that_share_a_run_get_their_own_words_each(app: App, http: httpx.Client) -> None:
    (before,) = app.reports()

    async def client(session: httpx.AsyncClient, number: int) -> list[dict[str, Any]]:
        rng = random.Random(number)
        answers = []
        for turn in range(3):
            words = " ".join(str(rng.randrange(10_000)) for _ in range(rng.randrange(3, 12)))
            text = f"client {number} turn {turn} says {words}"
            found = await post(session, BATCHED, f"Repeat after me: {text}")
            assert text_of(found) == text
            assert found["choices"][0]["finish_reason"] == "stop"
            answers.append(found)
        return answers

    async def crowd() -> list[dict[str, Any]]:
        async with app.http() as session:
            all_of_them = await asyncio.gather(*(client(session, n) for n in range(8)))
            return [found for answers in all_of_them for found in answers]

    answers = asyncio.run(crowd())
    batches = [found["timings"].get("batch", 1) for found in answers]
    assert max(batches) == 4
    assert sum(batches) / len(batches) > 2
    (after,) = app.reports()
    runs = after.batch_runs - before.batch_runs
    assert after.batch_entries - before.batch_entries == len(answers)
    assert runs < len(answers) / 1.5
    assert after.n_batch == 4


def test_entries_of_a_batch_end_each_in_its_own_way(
    app: App, http: httpx.Client, slow: None
) -> None:
    """By a stop string, a limit, a hang-up, an abort, and at the end of what there is to say."""

    async def talk() -> None:
        async with app.http() as session:
            leaver = asyncio.create_task(_leave(session))
            endless = asyncio.create_task(_abort(session))
            stopped, limited = await asyncio.gather(
                post(session, BATCHED, "Repeat after me: one two STOP three", stop="STOP"),
                post(session, BATCHED, "Write 40 tokens", max_tokens=9),
            )
            assert (text_of(stopped), stopped["choices"][0]["finish_reason"]) == (
                "one two ",
                "stop",
            )
            assert limited["choices"][0]["finish_reason"] == "length"
            assert limited["usage"]["completion_tokens"] == 9
            assert await leaver
            aborted = await endless
            assert (aborted.finish_reason, aborted.done) == ("abort", True)
            whole = await post(session, BATCHED, "Count to 9")
            assert text_of(whole) == "1, 2, 3, 4, 5, 6, 7, 8, 9."

    asyncio.run(asyncio.wait_for(talk(), 60))
    app.settled()


async def _leave(session: httpx.AsyncClient) -> bool:
    async with streaming(session, ENDLESS, model=BATCHED) as reply:
        await reply.read(deltas=8)
    return bool(reply.text)


async def _abort(session: httpx.AsyncClient) -> Reply:
    async with streaming(session, ENDLESS, model=BATCHED) as reply:
        await reply.read(deltas=15)
        await act(session, reply.id, "abort")
        return await reply.read()


def test_one_of_a_batch_is_paused_and_resumed_while_the_others_go_on(
    app: App, http: httpx.Client, slow: None
) -> None:
    counted = ", ".join(str(n) for n in range(1, 61)) + "."

    async def talk() -> None:
        async with (
            app.http() as session,
            streaming(session, "Count to 60", model=BATCHED, temperature=0) as one,
        ):
            others = [
                asyncio.create_task(post(session, BATCHED, f"Repeat after me: other {n}"))
                for n in range(3)
            ]
            await one.read(deltas=6)
            told = await act(session, one.id, "pause")
            assert told["kv"] == "recomputed"
            assert counted.startswith(told["partial_output"])
            assert [text_of(await other) for other in others] == [f"other {n}" for n in range(3)]
            assert text_of(await post(session, BATCHED, "Repeat after me: later")) == "later"
            app.cluster.control("batch-0")
            await act(session, one.id, "resume")
            await one.read()
            assert (one.text, one.finish_reason) == (counted, "stop")

    asyncio.run(asyncio.wait_for(talk(), 60))


def test_a_native_pause_that_a_batch_cannot_have_becomes_the_other_one(
    app: App, http: httpx.Client
) -> None:
    async def talk() -> None:
        body = {"model": BATCHED, "temperature": 0, "pause_on": ["5"]}
        async with app.http() as session, streaming(session, "Count to 9", **body) as one:
            await one.read_until(lambda r: bool(r.pauses))
            assert (one.text, one.pauses[0]["kv"]) == ("1, 2, 3, 4, 5", "recomputed")
            await act(session, one.id, "resume")
            assert (await one.read()).text == "1, 2, 3, 4, 5, 6, 7, 8, 9."

    asyncio.run(asyncio.wait_for(talk(), 60))


def test_a_board_of_batches_keeps_no_prompt_caches_and_says_so(http: httpx.Client) -> None:
    body = {"cache_name": "x", "prompt": "tea"}
    response = http.post(f"/v1/cache/{BATCHED}", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["code"] == "cache_unsupported"


def test_the_kv_cache_of_a_batch_is_told_by_entry(http: httpx.Client) -> None:
    (entry,) = http.get("/v1/cache/kv/size", params={"model": BATCHED}).json()["data"]
    assert len(entry["entries"]) == 4
    assert entry["capacity"] == 4 * 4096


def test_metrics_say_how_full_batches_were(app: App, http: httpx.Client) -> None:
    app.settled()
    text = http.get("/metrics").text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if 'model="batched"' in line)
    labels = '{board="batch-0",model="batched"}'
    runs = float(figures[f"rkserve_batch_runs_total{labels}"])
    assert float(figures[f"rkserve_batch_entries_total{labels}"]) > runs > 0
    assert float(figures[f"rkserve_batch_tail_seconds_total{labels}"]) > 0


def test_a_board_of_two_instances_serves_two_at_once(
    app: App, http: httpx.Client, slow: None
) -> None:
    boards = {b["id"]: b for b in http.get("/v1/boards").json()["data"] if b["model"] == TWICE}
    assert sorted(boards) == ["pair-i0-0", "pair-i1-0"]
    assert len({b["engine_pid"] for b in boards.values()}) == 2

    async def talk() -> None:
        async with app.http() as session:
            body = {"model": TWICE}
            async with (
                streaming(session, "Write 60 tokens", **body) as one,
                streaming(session, "Write 60 tokens", **body) as other,
            ):
                # Both have begun before either has ended.
                await asyncio.gather(one.read(deltas=3), other.read(deltas=3))
                assert (one.done, other.done) == (False, False)
                assert {one.board, other.board} == set(boards)
                await asyncio.gather(one.read(), other.read())
            assert (one.finish_reason, other.finish_reason) == ("stop", "stop")

    asyncio.run(asyncio.wait_for(talk(), 60))
