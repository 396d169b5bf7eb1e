"""Faults as others notice them: clients that leave, libraries that crash or hang, boards that are
killed or frozen, tokens without a channel.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import openai
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rkserve.bringup import ray_worker
from rkserve.core.board_report import BoardReport
from tests.support.boards.fakes import run_loop
from tests.support.cluster.local_cluster import App, LocalCluster, wait_for
from tests.support.http.talk import CHAT, ENDLESS, MODEL, Reply, ask, chat_body, streaming

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# The token at which a scripted fault strikes: the answer is under way by then.
FAULT_AT = 20
LONG = "Write 120 tokens"
# At a real board's speed, seven seconds for such an answer: something can be done meanwhile.
SLOW, FAST, FAULT_LATE = "time_scale=1", "time_scale=0.02", 100
FREED_WITHIN_S = 60.0


@pytest.fixture
def well(boards: App) -> Iterator[App]:
    """Three boards that are well before and after the test, under the same names."""
    for number in range(boards.boards):
        boards.cluster.control(f"sim-{number}")
    before = [report.board_id for report in boards.settled()]
    yield boards
    for number in range(boards.boards):
        boards.cluster.control(f"sim-{number}")
    assert [report.board_id for report in boards.settled()] == before


@asynccontextmanager
async def one_on_each(http: httpx.AsyncClient, text: str) -> AsyncIterator[dict[str, Reply]]:
    """Open one stream on each of the three boards.

    The least load makes sure of that, once the Router has heard of a board that has come back, and
    no longer leaves it alone for what it did in the tests before: a minute at most.
    """
    for _ in range(300):
        async with AsyncExitStack() as stack:
            streams = [await stack.enter_async_context(streaming(http, text)) for _ in range(3)]
            replies = {stream.board: stream for stream in streams}
            if len(replies) == 3:
                yield replies
                return
        await asyncio.sleep(0.3)
    raise AssertionError("the Router does not use all boards")


def report_of(app: App, board_id: str) -> BoardReport:
    """Return the report of a board that must answer."""
    found = app.report(board_id)
    assert found is not None, f"{board_id} does not report"
    return found


# -- hang-ups -------------------------------------------------------------------------------------


async def _leave_a_stream(http: httpx.AsyncClient) -> None:
    async with streaming(http, ENDLESS) as reply:
        await reply.read(deltas=5)


async def _leave_while_waiting_for_a_whole_answer(http: httpx.AsyncClient) -> None:
    with pytest.raises(httpx.ReadTimeout):
        await http.post(CHAT, json=chat_body(ENDLESS), timeout=3.0)


async def _leave_several_choices(http: httpx.AsyncClient) -> None:
    async with streaming(http, ENDLESS, n=3) as reply:
        await reply.read(deltas=5)


async def _leave_the_openai_client(http: httpx.AsyncClient) -> None:
    async with openai.AsyncOpenAI(base_url=f"{http.base_url}v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": ENDLESS}], stream=True
        )
        await anext(aiter(stream))
        await stream.close()


@pytest.mark.parametrize(
    "leave",
    [
        pytest.param(_leave_a_stream, id="in the middle of a stream"),
        pytest.param(_leave_while_waiting_for_a_whole_answer, id="before a whole answer"),
        pytest.param(
            _leave_several_choices, id="with several choices under way", marks=pytest.mark.long
        ),
        pytest.param(
            _leave_the_openai_client, id="by the openai client's close()", marks=pytest.mark.long
        ),
    ],
)
def test_a_client_that_leaves_frees_its_boards(
    well: App, leave: Callable[[httpx.AsyncClient], Awaitable[None]]
) -> None:
    """At a real board's speed the answer would go on for minutes."""
    for number in range(3):
        well.cluster.control(f"sim-{number}", "time_scale=1")
    before = sum(report.aborted for report in well.reports())

    async def come_and_go() -> None:
        async with well.http() as http:
            await leave(http)

    asyncio.run(come_and_go())
    left_s = time.monotonic()
    wait_for(
        "all boards idle after the hang-up",
        lambda: not any(report.running for report in well.reports()),
        FREED_WITHIN_S,
    )
    print(f"the boards were seen idle {time.monotonic() - left_s:.3f} s after the hang-up")  # noqa: T201
    assert sum(report.aborted for report in well.reports()) > before
    with well.http_sync() as http:  # a client that leaves is no failure of ours
        families = text_string_to_metric_families(http.get("/metrics").text)
        samples = [one for family in families for one in family.samples]
    failed = [one for one in samples if one.labels.get("status") == "500" and one.value]
    assert not failed


def test_a_request_that_leaves_the_queue_never_runs(old_board: App) -> None:
    old_board.settled()
    old_board.cluster.control("old-0", "gate=token:1")

    def waiting(requests: int) -> None:
        wait_for(f"{requests} waiting", lambda: old_board.waiting() == requests)

    async def crowd() -> Reply:
        async with old_board.http() as http, streaming(http, "Write 300 tokens") as first:
            await first.read(deltas=1)
            leaves = asyncio.create_task(ask(http, ENDLESS))
            await asyncio.to_thread(waiting, 1)
            leaves.cancel()
            await asyncio.wait({leaves})
            await asyncio.to_thread(waiting, 0)
            old_board.cluster.control("old-0")
            return await first.read()

    before = old_board.reports()[0]
    first = asyncio.run(crowd())
    after = old_board.settled()[0]
    assert (first.finish_reason, first.done) == ("stop", True)
    assert after.completion_tokens - before.completion_tokens == 301


# -- isolation ------------------------------------------------------------------------------------

CLIENTS = 64
NUMBERS, NUMBERS_OF_LEAVERS = 8, 150


@pytest.mark.parametrize(
    "rounds", [pytest.param(2), pytest.param(8, marks=pytest.mark.long)], ids=["128", "512"]
)
def test_nobody_ever_gets_the_text_of_another(well: App, rounds: int) -> None:
    """64 clients on 3 boards, some of their requests hanging up in mid-stream.

    The boards take a fiftieth of a real one's time and not none: what takes no time is all on its
    way to a client before that can leave.
    """
    for number in range(3):
        well.cluster.control(f"sim-{number}", "time_scale=0.02")
    before = sum(report.aborted for report in well.reports())
    started_s = time.monotonic()
    finished, left = asyncio.run(_crowd(well, rounds))
    took_s = time.monotonic() - started_s
    reports = well.settled()
    aborted = sum(report.aborted for report in reports) - before
    print(f"{finished} answers, {left} hang-ups, {aborted} aborted, in {took_s:.1f} s")  # noqa: T201
    assert finished + left == CLIENTS * rounds
    assert left > CLIENTS * rounds / 20
    # On a busy machine many have their whole answer before they manage to leave.
    assert left / 5 < aborted <= left
    assert [report.failed for report in reports] == [0, 0, 0]


async def _crowd(app: App, rounds: int) -> tuple[int, int]:
    async with app.http() as http:
        clients = [_client(http, number, rounds) for number in range(CLIENTS)]
        counts = await asyncio.gather(*clients)
    return sum(done for done, _ in counts), sum(left for _, left in counts)


async def _client(http: httpx.AsyncClient, number: int, rounds: int) -> tuple[int, int]:
    """One client's requests, one after the other; each says something that nobody else says.

    Returns how many answers it read to the end, and how many it left in mid-stream.
    """
    rng = random.Random(number)
    left = 0
    for turn in range(rounds):
        leaves = rng.random() < 0.1
        numbers = NUMBERS_OF_LEAVERS if leaves else NUMBERS
        marker = f"client {number} turn {turn} says " + " ".join(
            str(rng.randrange(10_000)) for _ in range(numbers)
        )
        if leaves:
            left += await _hangs_up(http, marker, after=rng.randrange(1, 4))
        elif rng.random() < 0.5:
            reply = await ask(http, f"Repeat after me: {marker}")
            assert (reply.text, reply.finish_reason, reply.error) == (marker, "stop", None)
        else:
            body = chat_body(f"Repeat after me: {marker}")
            response = await http.post(CHAT, json=body)
            assert response.status_code == 200, response.text
            assert response.json()["choices"][0]["message"]["content"] == marker
    return rounds - left, left


async def _hangs_up(http: httpx.AsyncClient, marker: str, after: int) -> bool:
    """Leave after so many deltas; False where the whole answer was there by then."""
    async with streaming(http, f"Repeat after me: {marker}") as reply:
        await reply.read(deltas=after)
    assert reply.text, "it was to leave in the middle of the text"
    assert marker.startswith(reply.text), (marker, reply.text)
    return not reply.done


# -- the library fails ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("board", "fault", "says"),
    [
        pytest.param("sim-0", "segv_at_token", "SIGSEGV", id="SIGSEGV"),
        pytest.param(
            "sim-1", "abort_at_token", "GGML_ASSERT", id="abort()", marks=pytest.mark.long
        ),
        pytest.param("sim-2", "hang_at_token", "did not come", id="a silent hang"),
    ],
)
def test_a_library_that_fails_costs_no_answer_and_no_replica(
    well: App, board: str, fault: str, says: str
) -> None:
    before = report_of(well, board)
    for number in range(3):
        well.cluster.control(f"sim-{number}", SLOW)

    async def talk() -> dict[str, Reply]:
        async with well.http() as http, one_on_each(http, LONG) as replies:
            # Not earlier: it strikes once, and might strike while the streams are still opened.
            for one in replies:
                strikes = [f"fault={fault}:{FAULT_LATE}"] if one == board else []
                well.cluster.control(one, FAST, *strikes)
            await asyncio.gather(*(reply.read() for reply in replies.values()))
            return replies

    replies = asyncio.run(talk())
    _expect_that_it_went_on(replies, board)

    well.settled()
    after = report_of(well, board)
    assert after.pid == before.pid, "the replica was replaced"
    assert after.replica == before.replica
    assert after.engine_pid != before.engine_pid, "the engine was not replaced"
    assert not psutil.pid_exists(before.engine_pid)
    assert after.engine_starts == before.engine_starts + 1
    assert says in after.last_recovery
    _expect_every_board_to_serve(well)


def _expect_that_it_went_on(replies: dict[str, Reply], board: str) -> None:
    """All asked the same, and the answer of the one that lost its board is that of the others."""
    for one in replies.values():
        assert (one.finish_reason, one.error, one.done) == ("stop", None, True)
    assert len({(one.text, one.retracted) for one in replies.values()}) == 1
    continued = {name: one.timings.get("continued", 0) for name, one in replies.items()}
    assert continued == {**dict.fromkeys(replies, 0), board: 1}
    assert replies[board].timings["lost_ms"] > 0


def _expect_every_board_to_serve(app: App) -> None:
    # Else the first answer may be over before the third is asked for, and two share a board.
    for number in range(3):
        app.cluster.control(f"sim-{number}", SLOW)

    async def talk() -> list[Reply]:
        async with app.http() as http, one_on_each(http, LONG) as replies:
            for board in replies:
                app.cluster.control(board, FAST)
            return await asyncio.gather(*(reply.read() for reply in replies.values()))

    for reply in asyncio.run(talk()):
        assert (reply.finish_reason, reply.error) == ("stop", None)


@pytest.mark.long
def test_an_answer_in_one_piece_outlives_the_crash_of_every_board(well: App) -> None:
    starts = {report.board_id: report.engine_starts for report in well.reports()}
    with well.http_sync() as http:
        whole = http.post(CHAT, json=chat_body(LONG, temperature=0)).json()
        # Slow enough that a board's tokens are on their way before it crashes: a request that
        # ends two boards without a token in between is not tried on a third.
        for number in range(3):
            strikes = f"fault=segv_at_token:{FAULT_AT}"
            well.cluster.control(f"sim-{number}", "time_scale=0.5", strikes)
        response = http.post(CHAT, json=chat_body(LONG, temperature=0))
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["choices"] == whole["choices"]
    assert answer["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    # On a busy machine a crashed board may be back before the third one is asked.
    assert answer["timings"]["continued"] in (2, 3)
    crashed = [one for one in well.settled() if one.engine_starts > starts[one.board_id]]
    assert len(crashed) == answer["timings"]["continued"]


def test_requests_that_wait_survive_the_crash_of_their_board(old_board: App) -> None:
    """The queue belongs to the board and not to the engine that died."""
    old_board.settled()
    old_board.cluster.control("old-0", f"fault=segv_at_token:{FAULT_AT}")

    async def talk() -> tuple[Reply, Reply]:
        async with (
            old_board.http() as http,
            streaming(http, LONG) as first,
            streaming(http, "Repeat after me: still here") as second,
        ):
            return await first.read(), await second.read()

    struck, waited = asyncio.run(talk())
    # There is no other board: it goes on when that is back, before those that wait.
    assert (struck.error, struck.finish_reason) == (None, "stop")
    assert struck.timings["continued"] == 1
    assert (waited.text, waited.finish_reason) == ("still here", "stop")
    old_board.cluster.control("old-0")
    old_board.settled()


# -- the replica is killed ------------------------------------------------------------------------


def test_a_killed_replica_costs_no_answer_and_comes_back_as_the_same_board(well: App) -> None:
    before = report_of(well, "sim-1")
    for number in range(3):
        well.cluster.control(f"sim-{number}", SLOW)

    async def talk() -> dict[str, Reply]:
        async with well.http() as http, one_on_each(http, LONG) as replies:
            await asyncio.gather(*(reply.read(deltas=10) for reply in replies.values()))
            os.kill(before.pid, signal.SIGKILL)
            for number in range(3):
                well.cluster.control(f"sim-{number}", FAST)
            await asyncio.gather(*(reply.read() for reply in replies.values()))
            return replies

    replies = asyncio.run(talk())
    _expect_that_it_went_on(replies, "sim-1")
    wait_for(
        "the engine of the killed replica to end",
        lambda: not psutil.pid_exists(before.engine_pid),
    )
    well.settled()
    after = report_of(well, "sim-1")
    assert after.pid != before.pid
    assert after.replica != before.replica
    _expect_every_board_to_serve(well)


def test_a_killed_replica_comes_back_without_the_process_that_forked_it(well: App) -> None:
    before = report_of(well, "sim-2")
    server = psutil.Process(before.pid).parent()
    assert server is not None
    assert server.cmdline()[0].startswith(ray_worker.TITLE)
    server.kill()
    os.kill(before.pid, signal.SIGKILL)
    well.settled()
    other = psutil.Process(report_of(well, "sim-2").pid).parent()
    assert other is not None
    assert other.cmdline()[0].startswith(ray_worker.TITLE), "the new worker is the next server's"
    assert other.pid != server.pid
    _expect_every_board_to_serve(well)


@pytest.mark.long
def test_requests_are_served_while_an_idle_board_is_killed_and_replaced(well: App) -> None:
    """The Router hears of it late; whoever is sent to the dead board is passed on."""
    before = report_of(well, "sim-2")

    async def until_it_is_back() -> int:
        answered = 0
        async with well.http() as http:
            os.kill(before.pid, signal.SIGKILL)
            deadline_s = time.monotonic() + 60
            back = None
            while back is None and time.monotonic() < deadline_s:
                texts = [f"Repeat after me: {answered + k}" for k in range(6)]
                for text, reply in zip(
                    texts,
                    await asyncio.gather(*(ask(http, text) for text in texts)),
                    strict=True,
                ):
                    assert (reply.error, reply.text) == (None, text.rpartition(" ")[2])
                    answered += 1
                back = await asyncio.to_thread(well.report, "sim-2")
        assert back is not None
        return answered

    assert asyncio.run(until_it_is_back()) >= 6


def test_a_request_that_two_boards_die_of_is_refused_and_the_boards_are_not_to_blame(
    well: App,
) -> None:
    before = {report.board_id: report.engine_starts for report in well.reports()}
    for number in range(3):
        well.cluster.control(f"sim-{number}", "fault=segv_at_token:1", "sticky=1")
    chunks: list[Any] = []
    with openai.OpenAI(base_url=f"{well.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIError, match="SIGSEGV") as caught:
            chunks.extend(
                client.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": LONG}], stream=True
                )
            )
        assert caught.value.code == "poison_request"
        assert not chunks or all(not chunk.choices[0].delta.content for chunk in chunks)
    well.settled()
    started = [r.engine_starts - before[r.board_id] for r in well.reports()]
    assert sorted(started) == [0, 1, 1]


# -- the channel ---------------------------------------------------------------------------------


def taken(app: App) -> dict[str, float]:
    """Generations of the Router by the way that their tokens took, and its connections."""
    with app.http_sync() as http:
        text = http.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "rkserve_token_streams_total":
                found[sample.labels["path"]] = sample.value
            elif sample.name == "rkserve_channels":
                found["connections"] = sample.value
    return found


@pytest.fixture
def connected(boards: App) -> Iterator[App]:
    """Three boards at a real board's speed, each with a connection, and as fast as before after."""
    for number in range(boards.boards):
        boards.cluster.control(f"sim-{number}", "time_scale=0.5")
    wait_for("a connection to every board", lambda: taken(boards)["connections"] >= boards.boards)
    yield boards
    for number in range(boards.boards):
        boards.cluster.control(f"sim-{number}")
    boards.settled()


def test_tokens_take_the_channel(connected: App) -> None:
    async def main() -> None:
        before = taken(connected)
        async with connected.http() as http:
            assert (await ask(http, "Hello!")).done
        after = taken(connected)
        assert after["channel"] == before["channel"] + 1
        assert after["ray"] == before["ray"]

    run_loop(main(), 300.0)


def test_the_log_of_every_process_is_read_and_a_request_is_found_in_it(connected: App) -> None:
    """Serve's own filters, which set its request id on every line, stand between the two."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}
    with connected.http_sync() as http:
        answer = http.post("/v1/chat/completions", json=body, headers={"x-request-id": "a b"})
        request = answer.json()["id"]
        lines = [json.loads(line) for line in http.get("/v1/logs").text.splitlines()]
        found = http.get("/v1/logs", params={"request_id": request}).text.splitlines()
        engine = http.get("/v1/boards/sim-0/logs", params={"tail": 1}).text
    boards = {f"sim-{number}" for number in range(connected.boards)}
    assert {line["source"] for line in lines} == {*boards, "router", "coordinator"}
    (access,) = [json.loads(line) for line in found]
    assert access["message"].startswith("POST /v1/chat/completions 200 ")
    assert "x_request_id=a_b" in access["message"]
    assert "Hello" not in access["message"]
    assert '"engine_pid":' in engine, "its last words come first"


def test_a_board_that_is_frozen_in_mid_answer_costs_its_client_nothing(connected: App) -> None:
    """Ray alone would notice after its own checks; the answer goes on elsewhere before."""

    async def main() -> None:
        async with connected.http() as http:
            expected = (await ask(http, LONG, temperature=0)).text
            async with streaming(http, LONG, temperature=0) as reply:
                await reply.read(deltas=5)
                report = await asyncio.to_thread(connected.report, reply.board)
                assert report is not None
                os.kill(report.pid, signal.SIGSTOP)
                try:
                    await reply.read()
                finally:
                    os.kill(report.pid, signal.SIGCONT)
            assert reply.error is None
            assert (reply.text, reply.done) == (expected, True)

    run_loop(main(), 300.0)


# -- Ray's own calls ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(ray_cluster: LocalCluster) -> Iterator[App]:
    """A board without a channel, whose Router gives a control call two seconds."""
    group = ray_cluster.simulated("plain", 1)
    args = {"boards": [group], "channel": False, "router": {"control_timeout_s": 2.0}}
    ray_cluster.deploy("plain", args)
    app = App(ray_cluster, "plain", "plain", 1)
    app.settled()
    yield app
    ray_cluster.delete("plain")


@pytest.mark.long
def test_without_the_channel_tokens_come_through_ray(plain: App) -> None:
    async def main() -> None:
        before = taken(plain)
        async with plain.http() as http:
            assert (await ask(http, "Hello!")).done
        assert taken(plain) == {"channel": 0, "ray": before["ray"] + 1, "connections": 0}

    run_loop(main(), 300.0)


@pytest.mark.long
def test_a_build_that_its_caller_gave_up_leaves_the_queue_and_is_never_made(plain: App) -> None:
    """Control calls take Ray's way with a channel, too."""
    with plain.http_sync() as http:
        body = chat_body("Tell me a story.", stream=True, pause_on=[" "], native_pause=True)
        with http.stream("POST", CHAT, json=body):  # the pause keeps the board
            wait_for("the pause", lambda: plain.reports()[0].paused == 1)
            build = {"cache_name": "late", "prompt": "You are Ferris."}
            refused = http.post(f"/v1/cache/{MODEL}", json=build)
            assert refused.status_code == 503
            assert "the build was withdrawn" in refused.json()["error"]["message"]
            wait_for("the withdrawal", lambda: plain.reports()[0].queued == 0)
        plain.settled()
        assert http.get(f"/v1/cache/{MODEL}").json()["data"] == []
