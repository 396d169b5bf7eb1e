"""CPU time of a Router's core, for each token and each request, without Ray and boards.

``python -m benchmarks.serving.routercore`` starts a Router with its routes, queue and channel on
the HTTP server and the event loop that Serve gives it, and boards that only emit tokens, each in a
process of its own; clients are in this one. Ray's own share of a request is not part of it.
"""

from __future__ import annotations

import argparse
import asyncio
import pickle
import random
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
import uvloop
from prometheus_client import CollectorRegistry

from benchmarks.harness.processes import chat_body
from rkserve.bench.connection import OK, Connection, request_bytes
from rkserve.bench.processes import BenchFailed, hold, parse_stat
from rkserve.config.router import ChannelConfig, ResponsesConfig, RouterConfig
from rkserve.core.board_report import BoardReport, BoardState, Emitted
from rkserve.core.desired_state import Adoption, Desired
from rkserve.core.errors import BoardStartFailed
from rkserve.core.logs import LogPage, LogQuery
from rkserve.core.messages import (
    Accepted,
    CacheOffer,
    CacheQuery,
    Delta,
    EmbedRequest,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    PassDelta,
    Timings,
    Usage,
)
from rkserve.core.metrics import RouterMetrics
from rkserve.fleet.fleet import TakeDelta
from rkserve.http.app import make_app
from rkserve.models.folder import open_model_folder
from rkserve.router.coordinator_client import CoordinatorClient
from rkserve.router.dispatch.dispatch import open_dispatch, open_fleet
from rkserve.router.served_models import ServedModel
from rkserve.router.service import Service
from rkserve.router.stored_responses import Responses
from rkserve.transport.client import ChannelClient
from rkserve.transport.server import ChannelAddress, ChannelServer

MODEL = Path(__file__).parents[2] / "models" / "sim-chat"
GROUP = "boards"
HOST = "127.0.0.1"
START_S = 60.0
ANSWER_S = 120.0
WORDS = (" the", " board", " answers", " one", " token", " after", "\n", " another", ",", ' "word"')


@dataclass(frozen=True, slots=True)
class CoreLoad:
    """A closed loop of ``clients``, one for each board; a token every ``token_s`` of each."""

    name: str
    clients: int
    tokens: int
    token_s: float
    stream: bool = True
    encrypted: bool = False
    seconds: float = 6.0


LOADS = (
    CoreLoad("32 streams, a token every 20 ms", 32, 256, 0.02),
    CoreLoad("96 streams, a token every 20 ms", 96, 256, 0.02),
    CoreLoad("32 streams, a token every 20 ms, encrypted", 32, 256, 0.02, encrypted=True),
    CoreLoad("short streams of 8 tokens at once", 4, 8, 0.0),
    CoreLoad("short whole answers of 8 tokens at once", 4, 8, 0.0, stream=False),
)


class EmittingBoard:
    """A board that emits tokens at a pace; see ``BoardMethods``."""

    def __init__(self, name: str, token_s: float) -> None:
        self._name, self._token_s = name, token_s

    async def generate(
        self, request: GenerateRequest, _: PassDelta | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of one generation; the first token after a random share of a step."""
        loop = asyncio.get_running_loop()
        yield Accepted(self._name, "1.3.0", 0)
        due_s = loop.time() + random.random() * self._token_s
        for number in range(request.max_tokens):
            if self._token_s:
                await asyncio.sleep(max(0.0, due_s - loop.time()))
                due_s += self._token_s
            yield Delta(WORDS[number % len(WORDS)], (1000 + number,))
        usage = Usage(len(request.prompt_ids), request.max_tokens)
        timings = Timings(0.0, 1.0, usage.prompt_tokens, 1.0, usage.completion_tokens, 0.0)
        yield Finished(FinishReason.LENGTH, usage, timings)

    async def embed(self, request: EmbedRequest) -> AsyncGenerator[Event, None]:
        """Refuse: no load asks for vectors."""
        raise BenchFailed(f"{request.request_id} asks for vectors")
        yield

    async def report(self) -> BoardReport:
        """Return the report of a ready board."""
        return board_report(self._name)

    async def emitted(self) -> Emitted:
        """Return nothing: no load pauses."""
        return Emitted(self._name, ())

    async def adopt(self, desired: Desired) -> Adoption:
        """Accept the desired state."""
        return Adoption(self._name, desired.epoch)

    async def send_cache(self, _: CacheQuery) -> AsyncGenerator[CacheOffer | bytes, None]:
        """See ``BoardMethods``."""
        raise BenchFailed("no board fetches a prompt cache here")
        yield b""

    async def logs(self, query: LogQuery) -> LogPage:
        """Refuse: no load reads logs."""
        raise BenchFailed(f"{query} asks for logs")


def board_report(name: str) -> BoardReport:
    """Return the report of a ready board."""
    return BoardReport(
        name, "sim-chat", BoardState.READY, release="1.3.0", queue_limit=1, replica=name
    )


class ChannelLink:
    """``BoardLink`` over the channel alone."""

    complete = True

    def __init__(self, channels: ChannelClient, names: Sequence[str]) -> None:
        self._channels, self._names = channels, names

    async def open(
        self, request: GenerateRequest, replica: str, take: TakeDelta | None = None
    ) -> AsyncGenerator[Event, None]:
        """Generate on that board."""
        line = self._channels.line(replica)
        if line is None:
            raise BenchFailed(f"no connection to {replica}")
        inbox = line.generate(request, take)
        try:
            while (event := await inbox.next()) is not None:
                yield event
        finally:
            line.leave(inbox)

    async def ask(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        """Refuse: no load needs a call."""
        raise BenchFailed(f"{method} of {replica}: {args} within {timeout_s:g} s")

    def cache_source(self, _replica: str, _tokens: int) -> None:
        """See ``BoardLink``: these boards have no files."""

    async def ask_all(
        self, method: str, *args: Any, timeout_s: float, take: Callable[[Any], None]
    ) -> None:
        """Do nothing: no load needs a call."""

    async def reports(self) -> list[BoardReport]:
        """Return a report of each board, over its connection."""
        lines = [line for name in self._names if (line := self._channels.line(name))]
        return list(await asyncio.gather(*(line.ask("report") for line in lines)))

    def has_new(self) -> bool:
        """Return False: all are there from the start."""
        return False

    async def has_running(self) -> bool:
        """Return True: all run."""
        return True

    async def start_failure(self) -> BoardStartFailed | None:
        """Return none."""
        return None


async def run_boards(load: CoreLoad) -> None:
    """Listen as one board for each client, and write the addresses to stdout."""
    encrypt = "always" if load.encrypted else "never"
    config = ChannelConfig(encrypt=encrypt)
    servers = []
    for number in range(load.clients):
        name = f"board-{number}"
        servers.append(ChannelServer(name, config, EmittingBoard(name, load.token_s)))
        await servers[-1].listen(HOST)
    tell([server.address for server in servers])
    await asyncio.to_thread(sys.stdin.buffer.read)


class NoCoordinator:
    """A Coordinator that no load needs."""

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def call(*_: Any, **__: Any) -> Any:
            raise BenchFailed(f"no Coordinator for {name}")

        return call


async def run_router(addresses: Sequence[ChannelAddress]) -> None:
    """Serve HTTP for boards at these addresses, and write the port to stdout."""
    channels = ChannelClient(ChannelConfig())
    names = [address.board_id for address in addresses]
    served = ServedModel.open(open_model_folder(MODEL))
    model = served.folder.id
    config = RouterConfig(responses=ResponsesConfig(store="never"))
    fleet = open_fleet(config, {GROUP: ChannelLink(channels, names)}, {GROUP: model})
    metrics = RouterMetrics(CollectorRegistry())
    dispatch = open_dispatch(config, fleet, metrics, random.Random(1))
    cluster = CoordinatorClient(NoCoordinator(), fleet.obey)  # type: ignore[arg-type] # unused
    service = Service(config, {model: served}, dispatch, cluster, metrics)
    app = make_app(service, 1, 1, Responses(config, Path()))
    for address in addresses:
        channels.seek(address.board_id, _found(address))
    async with asyncio.timeout(START_S):
        while any(channels.line(name) is None for name in names):  # noqa: ASYNC110 # no event
            await asyncio.sleep(0.01)
    await fleet.refresh()
    server = uvicorn.Server(
        uvicorn.Config(app, HOST, 0, lifespan="off", access_log=False, log_level="critical")
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 # no event
        await asyncio.sleep(0.01)
    tell(server.servers[0].sockets[0].getsockname()[1])
    refreshing = asyncio.create_task(_refresh(fleet.refresh))
    await asyncio.to_thread(sys.stdin.buffer.read)
    refreshing.cancel()
    server.should_exit = True
    await serving
    await channels.close()


def _found(address: ChannelAddress) -> Callable[[], Awaitable[ChannelAddress | None]]:
    async def find() -> ChannelAddress | None:
        return address

    return find


async def _refresh(refresh: Callable[[], Awaitable[Any]]) -> None:
    while True:
        await asyncio.sleep(1.0)
        await refresh()


def tell(value: Any) -> None:
    """Write one value to stdout."""
    sys.stdout.write(pickle.dumps(value).hex() + "\n")
    sys.stdout.flush()


class Child:
    """A process of this module; it ends with its stdin."""

    def __init__(self, role: str, given: Any) -> None:
        command = [sys.executable, "-m", "benchmarks.serving.routercore", "--role", role]
        self._process = subprocess.Popen(
            [*command, "--given", pickle.dumps(given).hex()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        hold([] if line else [f"the {role} process ended at its start"])
        self.said = pickle.loads(bytes.fromhex(line.decode()))  # noqa: S301 - our own child

    @property
    def cpu_ms(self) -> float:
        """CPU time so far."""
        return parse_stat(Path(f"/proc/{self._process.pid}/stat").read_text()).cpu_ms

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


@dataclass(frozen=True, slots=True)
class CoreFigures:
    """The figures of one load. ``events`` are events of streams with text."""

    tokens: int
    events: int
    answers: int
    cpu_ms: float
    seconds: float


async def play(load: CoreLoad, port: int, router: Child) -> CoreFigures:
    """Play the load, and return what it took between the warm-up and the last sending."""
    body = chat_body("sim-chat", [{"role": "user", "content": "Hello! Who are you?"}], load.tokens)
    if not load.stream:
        body = {name: body[name] for name in body.keys() - {"stream", "stream_options"}}
    request = request_bytes(HOST, port, body)
    begun_s = time.monotonic()
    warm_s = min(2.0, load.seconds / 3)
    end_s = begun_s + warm_s + load.seconds
    events = answers = 0
    counting = False

    async def client(delay_s: float) -> None:
        nonlocal events, answers
        await asyncio.sleep(delay_s)
        connection = await Connection.open(HOST, port)
        while time.monotonic() < end_s:
            connection.send(request)
            incoming = connection.so_far
            seen = 0
            ended = asyncio.create_task(connection.ends_by(time.monotonic() + ANSWER_S))
            while not ended.done():
                await asyncio.wait({ended}, timeout=0.5)
                if load.token_s and time.monotonic() < end_s:
                    fresh, seen = len(incoming.events) - seen, len(incoming.events)
                    events += fresh if counting else 0
            hold([] if await ended else ["an answer took too long"])
            hold([] if incoming.status == OK else [f"HTTP {incoming.status}"])
            if counting and time.monotonic() < end_s:
                answers += 1
        connection.close()

    async def watch() -> tuple[float, float]:
        nonlocal counting
        await asyncio.sleep(warm_s)
        counting, first_ms, first_s = True, router.cpu_ms, time.monotonic()
        await asyncio.sleep(load.seconds)
        counting = False
        return router.cpu_ms - first_ms, time.monotonic() - first_s

    delays = [random.random() * min(1.0, warm_s) for _ in range(load.clients)]
    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client(delay) for delay in delays))
    cpu_ms, seconds = await watching
    tokens = events if load.token_s else answers * load.tokens
    return CoreFigures(tokens, events, answers, cpu_ms, seconds)


def measure(load: CoreLoad) -> CoreFigures:
    """Measure one load with processes of its own."""
    boards = Child("boards", load)
    try:
        router = Child("router", boards.said)
        try:
            return asyncio.run(play(load, router.said, router))
        finally:
            router.close()
    finally:
        boards.close()


def table(found: Mapping[CoreLoad, Sequence[CoreFigures]]) -> str:
    """Return the medians as a Markdown table."""
    lines = [
        "| load | tokens/s | CPU per token, us | tokens/s per core | CPU per request, ms "
        "| requests/s |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for load, rounds in found.items():
        median = statistics.median
        rate = median(one.tokens / one.seconds for one in rounds)
        token_us = median(1e3 * one.cpu_ms / one.tokens for one in rounds)
        asked = median(one.answers / one.seconds for one in rounds)
        request_ms = median(one.cpu_ms / max(1, one.answers) for one in rounds)
        per_request = "-" if load.token_s else f"{request_ms:.2f}"
        lines.append(
            f"| {load.name} | {rate:.0f} | {token_us:.1f} | {1e6 / token_us:.0f} "
            f"| {per_request} | {asked:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print, or be one of the processes."""
    parser = argparse.ArgumentParser(description="CPU time of a Router's core")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=int, default=None, help="number of one load")
    parser.add_argument("--role", choices=("boards", "router"), help=argparse.SUPPRESS)
    parser.add_argument("--given", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role is not None:
        value = pickle.loads(bytes.fromhex(given.given))  # noqa: S301 - of our own parent
        uvloop.run((run_boards if given.role == "boards" else run_router)(value))
        return
    loads = LOADS if given.only is None else LOADS[given.only : given.only + 1]
    found = {load: [measure(load) for _ in range(given.rounds)] for load in loads}
    sys.stdout.write(f"{table(found)}\n")


if __name__ == "__main__":
    main()
