"""Figures of one side of the comparison, from answers and CPU use."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from benchmarks.serving.plain.measure import (
    HEAD,
    Figures,
    Running,
    Window,
    figures,
    first_answer,
    play,
    prefill_ms,
    text_times,
    tokens_per_event,
)
from benchmarks.serving.plain.pace import PREFILL_S
from rkserve.bench.connection import Incoming
from rkserve.bench.processes import BenchFailed, CpuUse, MachineTimes, ProcessReading

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
NO_PROCESSES = ProcessReading(0.0, {}, MachineTimes(0.0, 0.0))


def chunk(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode()


def text(content: str | None) -> bytes:
    return chunk(choices=[{"index": 0, "delta": {"content": content}}])


def use(wall_ms: float, **parts: float) -> CpuUse:
    return CpuUse(2, wall_ms=wall_ms, by_part_ms=parts, machine_ms=wall_ms)


def test_the_cost_is_that_of_some_parts_and_what_is_neither_head_nor_board_is_beside() -> None:
    gross = {"proxy": 0.5, "router": 0.5, "board replica": 2.0, "gcs": 9.0}
    one = Figures("a", 8, 400.0, 3.25, gross, {part: ms / 2 for part, ms in gross.items()}, 0.5)
    assert one.cost(HEAD) == pytest.approx(1.0)
    assert one.cost(HEAD, net=True) == pytest.approx(0.5)
    assert one.beside() == pytest.approx(9.0)


def test_the_idle_use_of_a_part_is_taken_off_for_as_long_as_the_window_was() -> None:
    window = Window(100.0, [5.0, 7.0, 6.0], use(2000.0, gateway=300.0, upstream=10.0))
    idle = use(1000.0, gateway=50.0, upstream=20.0)
    one = figures("litellm", 8, window, idle, seconds=2.0)
    assert one.tokens_per_s == pytest.approx(50.0)
    assert one.ttft_ms == pytest.approx(6.0)
    assert one.gross == pytest.approx({"gateway": 3.0, "upstream": 0.1})
    assert one.net == pytest.approx({"gateway": 2.0, "upstream": 0.0})
    assert one.busy == pytest.approx(0.5)


def test_events_with_text_count_and_the_prefill_is_that_of_the_board() -> None:
    incoming = Incoming(sent_s=0.0)
    incoming.events = [(1.0, text("")), (1.5, text(None)), (2.0, text("a")), (3.0, b"data: [DONE]")]
    assert text_times(incoming) == [2.0]
    assert prefill_ms(incoming) == PREFILL_S * 1e3
    incoming.events.append((4.0, chunk(timings={"prefill_ms": 12.5})))
    assert prefill_ms(incoming) == 12.5


def test_an_event_has_the_tokens_of_the_usage_shared_out_and_one_without_a_usage() -> None:
    incoming = Incoming(sent_s=0.0)
    incoming.events = [(1.0, text("a b")), (2.0, text("c d"))]
    assert tokens_per_event(incoming, 2) == 1.0
    incoming.events.append((3.0, chunk(choices=[], usage={"completion_tokens": 4})))
    assert tokens_per_event(incoming, 2) == 2.0


def test_an_event_that_is_no_json_is_a_failure_of_its_side() -> None:
    incoming = Incoming(sent_s=0.0)
    incoming.events = [(1.0, b'data: {"content": ')]
    with pytest.raises(BenchFailed, match="no JSON"):
        text_times(incoming)


@asynccontextmanager
async def answering(status: str, body: bytes) -> AsyncIterator[Running]:
    """A server with one answer to all requests."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
        writer.write(f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Running(server.sockets[0].getsockname()[1], lambda: NO_PROCESSES)


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        pytest.param("500 Oops", b"out of order", "HTTP 500: out of order", id="an error"),
        pytest.param("200 OK", b'data: {"error": "x"}', "an answer without text", id="no text"),
    ],
)
async def test_a_side_that_gives_no_answer_fails_with_its_words(
    status: str, body: bytes, reason: str
) -> None:
    async with answering(status, body) as running:
        with pytest.raises(BenchFailed, match=reason):
            await play(running, streams=1, seconds=0.1)


async def test_a_side_that_has_answered_is_ready() -> None:
    async with answering("200 OK", text("a") + b"\n\n") as running:
        await first_answer(running)


async def test_a_side_that_has_ended_is_not_waited_for() -> None:
    running = Running(1, lambda: NO_PROCESSES, ended=lambda: True)
    with pytest.raises(BenchFailed, match="no answer within 0 s: it does not listen"):
        await first_answer(running)
