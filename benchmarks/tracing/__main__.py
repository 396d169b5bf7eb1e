"""Measure the CPU time that access lines and traces cost a Router, by request and by token.

``python -m benchmarks.tracing`` answers chats of scripted boards in this process, without sockets
and without Ray, so that what is measured is a larger part of the whole than in a cluster. CPU time
is that of the process with the thread that sends spans; their collector is another process.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
from ray.serve._private.logging_utils import access_log_msg, configure_component_logger
from ray.serve.schema import LoggingConfig
from starlette.datastructures import Headers

from benchmarks.tracing.collector import collector
from rkserve.config.router import TracingConfig
from rkserve.core.messages import Delta
from rkserve.core.request_record import RequestRecord, record_generation
from rkserve.deployments.replica import log_with_serve
from rkserve.deployments.tracing import OpenTelemetry, open_tracing
from rkserve.router.request_log import RequestLog
from tests.support.boards.fake_boards import FakeBoards, accepted, finished, report
from tests.support.http.router_house import CHAT, House, chat

LONG = 256
US = 1e6


@dataclass(frozen=True)
class Way:
    """One configuration: Serve's encoding of the log, None for no access lines, and sampling."""

    name: str
    encoding: str | None
    ratio: float | None = None
    serves: bool = False


WAYS = (
    Way("no access lines, no traces", None),
    Way("Serve's access lines instead", None, serves=True),
    Way("access lines", "TEXT"),
    Way("access lines in JSON", "JSON"),
    Way("and traces of no request", "TEXT", 0.0),
    Way("and traces of 1 %", "TEXT", 0.01),
    Way("and traces of all", "TEXT", 1.0),
)


def house_of(tracing: OpenTelemetry | None) -> House:
    """Return a Router with a board that answers with as many tokens as it is asked for."""
    boards = FakeBoards([report("a")], {"replica of a": [[]]})
    return House(boards, tracing=tracing)


def set_length(house: House, tokens: int) -> None:
    """Have the board answer with so many tokens."""
    deltas = [Delta(" the", (100 + at,)) for at in range(tokens)]
    house.boards.scripts["replica of a"] = [[accepted("a"), *deltas, finished(tokens)]]


async def cpu_s(house: House, requests: int) -> float:
    """Return the CPU time of one request, of so many."""
    await house.service.fleet.refresh()
    transport = httpx.ASGITransport(house.app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        body = chat(stream=True)
        gc.collect()
        began_s = time.process_time()
        for _ in range(requests):
            (await client.post(CHAT, json=body)).raise_for_status()
        return (time.process_time() - began_s) / requests


def log_to(folder: Path, encoding: str | None) -> None:
    """Set up the log as Serve does in a replica, without its copy on stderr."""
    config = LoggingConfig(encoding=encoding or "TEXT", logs_dir=str(folder))
    configure_component_logger(
        component_name="bench",
        component_id="1",
        logging_config=config,
        max_bytes=1 << 26,
        backup_count=1,
    )
    serve = logging.getLogger("ray.serve")
    streams = [one for one in serve.handlers if isinstance(one, logging.StreamHandler)]
    for handler in streams:
        serve.removeHandler(handler)
    log_with_serve()
    logging.getLogger("rkserve.access").disabled = encoding is None


def record_of(log: RequestLog) -> RequestRecord:
    """Return the record of a streamed chat as it is when the answer ends."""
    record = log.begin("POST", CHAT, Headers({"x-request-id": "0b5e2c8a-3f1d"}))
    record.id, record.model, record.operation = "chatcmpl-0123456789abcdef", "sim-chat", "chat"
    record.route, record.status, record.stream, record.first_s = CHAT, 200, True, time.monotonic()
    record.prompt_tokens, record.completion_tokens, record.finish = 37, 20, ["stop"]
    generation = record_generation("chatcmpl-0123456789abcdef/0")
    generation.wait().ended_s = time.monotonic()
    visit = generation.visit("replica", 0, 0, embeds=False)
    for event in (accepted("a"), Delta("x", (1,)), finished(20)):
        visit.observe(event)
    return record


def ends_s(tracing: OpenTelemetry | None, count: int, *, serves: bool) -> float:
    """Return the CPU time of the begin and the end of a request, of so many.

    That of sending the spans is in it.
    """
    serve, log = logging.getLogger("ray.serve"), RequestLog(tracing)
    gc.collect()
    began_s = time.process_time()
    for _ in range(count):
        log.end(record_of(log))
        if serves:
            told = {"method": "POST", "route": "/", "status": "200", "latency_ms": 12.3}
            extra = {"route": "/", "request_id": "0b5e2c8a-3f1d", "skip_context_filter": True}
            serve.info(access_log_msg(**told), extra=extra)
    if tracing is not None:
        tracing.close()  # sends the last ones
    return (time.process_time() - began_s) / count


def pieces(rounds: int, count: int, show: Callable[[str], None]) -> None:
    """Measure what each request has of it, without the request; the least of several rounds."""
    found: dict[str, list[float]] = {way.name: [] for way in WAYS}
    with collector() as url, tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for way in WAYS:
                log_to(Path(folder), way.encoding)
                tracing = traces(way, url)
                found[way.name].append(ends_s(tracing, count, serves=way.serves))
    base_s = min(found[WAYS[0].name])
    show(f"{'CPU time of one request, us':30} {'its own part':>12} {'more':>8}")
    for name, values in found.items():
        show(f"{name:30} {min(values) * US:12.1f} {(min(values) - base_s) * US:8.1f}")


def traces(way: Way, url: str) -> OpenTelemetry | None:
    """Return the traces of a way."""
    if way.ratio is None:
        return None
    settings = TracingConfig(enabled=True, endpoint=url, sampling_ratio=way.ratio)
    return open_tracing(settings, "bench")


def whole(rounds: int, count: int, show: Callable[[str], None]) -> None:
    """Measure whole requests with short and with long answers; the least of several rounds."""
    ways = [way for way in WAYS if not way.serves]  # that is not in this process
    found: dict[str, list[tuple[float, float]]] = {way.name: [] for way in ways}
    with collector() as url, tempfile.TemporaryDirectory() as folder:
        for _ in range(rounds):
            for way in ways:
                log_to(Path(folder), way.encoding)
                tracing = traces(way, url)
                house = house_of(tracing)
                set_length(house, 1)
                asyncio.run(cpu_s(house, 10))  # caches are filled
                short_s = asyncio.run(cpu_s(house, count))
                set_length(house, LONG)
                found[way.name].append((short_s, asyncio.run(cpu_s(house, count // 4))))
                if tracing is not None:
                    tracing.close()
    show(f"{'CPU time in this process, us':30} {'1 token':>12} {'each further token':>20}")
    for name, rows in found.items():
        short_s, long_s = (min(column) for column in zip(*rows, strict=True))
        each_s = (long_s - short_s) / (LONG - 1)
        show(f"{name:30} {short_s * US:12.1f} {each_s * US:20.2f}")


def main() -> None:
    """Read the options, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=400, help="of each way and round")
    parser.add_argument("--rounds", type=int, default=7)
    asked = parser.parse_args()
    pieces(asked.rounds, 10 * asked.requests, print)
    whole(asked.rounds, asked.requests, print)


if __name__ == "__main__":
    main()
