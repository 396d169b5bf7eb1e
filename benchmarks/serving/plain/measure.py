"""Load on one side, and its figures: tokens, TTFT and CPU time."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.harness.processes import chat_body
from benchmarks.serving.plain.pace import MODEL, PREFILL_S, PROMPT, TOKEN_S, TOKENS
from rkserve.bench.cluster import HOST
from rkserve.bench.connection import OK, Connection, Incoming, request_bytes
from rkserve.bench.processes import BenchFailed, CpuUse, Json, ProcessReading, hold
from rkserve.bench.results import cores

WARM_S, IDLE_S = 4.0, 6.0
SETTLE_S = 2.0  # after the start, before the idle use is read
ANSWER_S = 60.0
FIRST_ANSWER_S = 300.0  # LiteLLM compiles its modules at its first start
EXCERPT = 200  # characters of an error's body
HEAD = ("proxy", "router", "gateway")
BOARD = ("board replica", "engine", "upstream")


@dataclass(frozen=True, slots=True)
class Running:
    """A side that serves at ``port``. ``read_cpu`` reads its processes, by their part of it.

    ``reports_prefill`` is true where an answer says how long its prefill took at the board; on
    other sides that is the pace's. ``key`` is that of a side that wants one; ``ended`` is true once
    the side has ended by itself.
    """

    port: int
    read_cpu: Callable[[], ProcessReading]
    reports_prefill: bool = False
    key: str = ""
    ended: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one side at one load. CPU time in ms per token by part.

    ``net`` is without idle use. ``ttft_ms`` is the median of the time beyond the prefill. ``busy``
    is the share of all cores' time that anything on the machine took, clients included.
    """

    side: str
    streams: int
    tokens_per_s: float
    ttft_ms: float
    gross: dict[str, float]
    net: dict[str, float]
    busy: float

    def cost(self, parts: Collection[str], *, net: bool = False) -> float:
        """Return the CPU time of some parts, in ms per token."""
        found = self.net if net else self.gross
        return sum(ms for part, ms in found.items() if part in parts)

    def beside(self) -> float:
        """Return the CPU time of what is neither head nor board, in ms per token."""
        return sum(ms for part, ms in self.gross.items() if part not in (*HEAD, *BOARD))


@dataclass(frozen=True, slots=True)
class Window:
    """A measured window: tokens that arrived, TTFTs beyond the prefill in ms, and CPU use."""

    tokens: float
    waits_ms: Sequence[float]
    use: CpuUse


def measure(side: str, running: Running, seconds: float, loads: Sequence[int]) -> Iterator[Figures]:
    """Yield the figures of one side for each number of streams, after its idle use.

    Raises:
        BenchFailed: it gives no answers, or wrong ones.
    """
    asyncio.run(first_answer(running))
    time.sleep(SETTLE_S)
    idle, before = CpuUse(cores()), running.read_cpu()
    time.sleep(IDLE_S)
    idle.add(before, running.read_cpu())
    for streams in loads:
        try:
            window = asyncio.run(play(running, streams, seconds))
        except OSError as exc:
            raise BenchFailed(f"the connection failed: {exc}") from exc
        hold([] if window.waits_ms and window.tokens else [f"no answer began in {seconds:g} s"])
        yield figures(side, streams, window, idle, seconds)


def figures(side: str, streams: int, window: Window, idle: CpuUse, seconds: float) -> Figures:
    """Return the figures of a window of so many seconds, which has tokens and answers."""
    use, tokens = window.use, window.tokens
    rest = {part: ms / idle.wall_ms for part, ms in idle.by_part_ms.items()}
    net = {
        part: max(0.0, ms - rest.get(part, 0.0) * use.wall_ms) / tokens
        for part, ms in use.by_part_ms.items()
    }
    return Figures(
        side=side,
        streams=streams,
        tokens_per_s=tokens / seconds,
        ttft_ms=statistics.median(window.waits_ms),
        gross={part: ms / tokens for part, ms in use.by_part_ms.items()},
        net=net,
        busy=use.machine_ms / (use.cores * use.wall_ms),
    )


async def first_answer(running: Running) -> None:
    """Return once a request is answered: gateways find their upstreams while they listen already.

    Raises:
        BenchFailed: it is not answered in time, or the side has ended.
    """
    begun_s = time.monotonic()
    request, reason = _request(running, 1), "it does not listen"
    while time.monotonic() - begun_s < FIRST_ANSWER_S and not running.ended():
        try:
            connection = await Connection.open(HOST, running.port)
            try:
                await _answer(connection, request)
            finally:
                connection.close()
        except (OSError, BenchFailed) as exc:
            reason = str(exc)
            await asyncio.sleep(0.5)
        else:
            return
    raise BenchFailed(f"no answer within {time.monotonic() - begun_s:.0f} s: {reason}")


async def play(running: Running, streams: int, seconds: float) -> Window:
    """Keep so many streams busy, and return what came in the window after the warm-up.

    Raises:
        BenchFailed: an answer failed or took too long.
        OSError: there is no connection.
    """
    request = _request(running, TOKENS)
    begun_s = time.monotonic()
    first_s, last_s = begun_s + WARM_S, begun_s + WARM_S + seconds
    tokens = 0.0
    waits: list[float] = []

    async def client(number: int) -> None:
        nonlocal tokens
        await asyncio.sleep(number * TOKENS * TOKEN_S / streams)
        connection = await Connection.open(HOST, running.port)
        while time.monotonic() < last_s:
            if connection.closed:
                connection = await Connection.open(HOST, running.port)
            incoming = await _answer(connection, request)
            times = text_times(incoming)
            inside = sum(first_s <= at_s < last_s for at_s in times)
            tokens += inside * tokens_per_event(incoming, len(times))
            if first_s <= incoming.sent_s < last_s:
                prefill = prefill_ms(incoming) if running.reports_prefill else PREFILL_S * 1e3
                waits.append((times[0] - incoming.sent_s) * 1e3 - prefill)
        connection.close()

    async def watch() -> CpuUse:
        use = CpuUse(cores())
        await asyncio.sleep(first_s - time.monotonic())
        before = running.read_cpu()
        await asyncio.sleep(last_s - time.monotonic())
        use.add(before, running.read_cpu())
        return use

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client(number) for number in range(streams)))
    return Window(tokens, waits, await watching)


def _request(running: Running, tokens: int) -> bytes:
    headers = {"authorization": f"Bearer {running.key}"} if running.key else {}
    body = chat_body(MODEL, PROMPT, tokens)
    return request_bytes(HOST, running.port, body, headers=headers)


async def _answer(connection: Connection, request: bytes) -> Incoming:
    """Return a whole answer. Raises ``BenchFailed`` where it is none, or has no text."""
    connection.send(request)
    incoming = connection.so_far
    if not await connection.ends_by(time.monotonic() + ANSWER_S):
        raise BenchFailed(f"an answer took more than {ANSWER_S:.0f} s")
    body = b" ".join(event for _, event in incoming.events).decode(errors="replace")[:EXCERPT]
    if incoming.status != OK:
        raise BenchFailed(f"HTTP {incoming.status}: {body}")
    if not text_times(incoming):
        raise BenchFailed(f"an answer without text: {body}")
    return incoming


def text_times(incoming: Incoming) -> list[float]:
    """Return the times of the events with text."""
    return [
        at_s
        for at_s, event in incoming.events
        if b'"content":' in event and _has_text(_json(event))
    ]


def tokens_per_event(incoming: Incoming, events: int) -> float:
    """Return the tokens of each event with text: of the usage, or one where none is sent.

    A gateway may send several tokens in one event.
    """
    for _, event in reversed(incoming.events):
        if b'"completion_tokens":' in event and (usage := _json(event).get("usage")):
            return float(usage["completion_tokens"]) / events
    return 1.0


def prefill_ms(incoming: Incoming) -> float:
    """Return the prefill that the board reports; that of the pace where it reports none."""
    for _, event in reversed(incoming.events):
        if b'"timings"' in event:
            return float(_json(event)["timings"]["prefill_ms"])
    return PREFILL_S * 1e3


def _json(event: bytes) -> Json:
    """Return the chunk of an event. Raises ``BenchFailed`` where it is no JSON."""
    try:
        chunk: Json = json.loads(event.removeprefix(b"data:"))
    except ValueError:
        raise BenchFailed(f"no JSON: {event[:EXCERPT]!r}") from None
    return chunk


def _has_text(chunk: Json) -> bool:
    return any(one.get("delta", {}).get("content") for one in chunk.get("choices", ()))
