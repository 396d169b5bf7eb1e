"""Plays a trace against a server: open loop or closed, one plain connection per running request.

In an open loop sessions begin when the trace says, whatever becomes of the others, and latencies
count from when a request was due, not from when it could be sent: a slow server cannot slow down
those who measure it (coordinated omission). A session's next turn waits for the answer before it,
as people do. In a closed loop so many clients play one session after the other. Nothing is ever
asked twice.
"""

from __future__ import annotations

import asyncio
import errno
import ssl
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from rkserve.bench.connection import Connection, ConnectionLost, NotHttp
from rkserve.bench.outcome import (
    CapturedExchange,
    OutcomeKind,
    RequestOutcome,
    SentRequest,
    never_answered,
    read_outcome,
)
from rkserve.bench.processes import BenchFailed, Json
from rkserve.bench.target import Target
from rkserve.bench.trace import Trace, TraceSession
from rkserve.core.tls import context_for

NO_ANSWER = "(no answer)"
DEADLINE_HEADER = "x-request-timeout"
IDLE_S = 2.0  # servers close idle connections after 5 s and more: never write into a closing one
TELL_S = 0.5
PROBE_S = 0.05
OWN_LIMITS = frozenset({errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL, errno.ENOBUFS})


@dataclass(frozen=True, slots=True)
class ClientTimeouts:
    """The time limits of a client, in seconds."""

    connect_s: float = 10.0
    stall_s: float = 60.0  # without a byte
    total_s: float = 300.0


@dataclass(frozen=True, slots=True)
class PlayOptions:
    """The settings for playing a trace.

    ``clients`` makes it a closed loop. ``time_factor`` stretches all times of the trace. After
    ``duration_s`` no request is sent; running ones are awaited. ``deadline_s`` is sent with each
    request. ``salt`` keeps a server from reusing the caches of another run. ``keep_text`` keeps the
    text of answers, and ``capture`` all of the exchanges.
    """

    clients: int | None = None
    time_factor: float = 1.0
    duration_s: float | None = None
    warmup_s: float = 0.0
    deadline_s: float | None = None
    salt: str = ""
    keep_text: bool = False
    capture: bool = False
    limits: ClientTimeouts = field(default_factory=ClientTimeouts)


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of a run."""

    done: int
    total: int
    running: int
    failed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PlayedRun:
    """A finished run.

    The window for rates reaches from the end of the warm-up to the time when the last request was
    due, or to the last answer if all were due within the time of one answer. ``lag_ms`` are the
    delays of this program's event loop.
    """

    target: str
    plan: PlayOptions
    outcomes: tuple[RequestOutcome, ...]
    start_s: float
    window_s: tuple[float, float]
    end_s: float
    lag_ms: tuple[float, ...]
    cpu_s: float
    interrupted: bool


OnRunProgress = Callable[[RunProgress], None]


class Player:
    """One run. ``stop`` ends it early; what was found until then is kept."""

    def __init__(self, target: Target, trace: Trace, plan: PlayOptions) -> None:
        self._target, self._trace, self._plan = target, trace, plan
        self._pool = Pool(target, plan.limits)
        self._outcomes: list[RequestOutcome] = []
        self._lag_ms: list[float] = []
        self._running = 0
        self._cut = False
        self._last_due_s = 0.0
        self._start_s = 0.0
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        """Hang up everywhere."""
        self._stopped.set()

    def _window_end(self, first_s: float) -> float:
        last_s = max(first_s, self._last_due_s)
        done = [(one.end_s, one.asked.due_s) for one in self._outcomes if one.ok and one.end_s]
        if done and last_s - first_s < statistics.median(end_s - due_s for end_s, due_s in done):
            # Hardly an answer could end before the last request.
            return max(last_s, max(done)[0])
        return last_s

    async def play(self, progress: OnRunProgress = lambda _: None) -> PlayedRun:
        """Play the trace to its end. Raises ``BenchFailed`` where the host has no address."""
        await self._pool.resolve()
        cpu_s = time.process_time()
        self._start_s = time.monotonic()
        whole = asyncio.ensure_future(self._closed() if self._plan.clients else self._open())
        beside = [asyncio.ensure_future(one) for one in (self._probe(), self._report(progress))]
        stopped = asyncio.ensure_future(self._stopped.wait())
        try:
            await asyncio.wait({whole, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            interrupted = not whole.done()
            await _end(whole, stopped, *beside)
            self._pool.close()
        progress(self._progress())
        end_s = time.monotonic()
        first_s = self._start_s + self._plan.warmup_s
        return PlayedRun(
            target=self._target.name,
            plan=self._plan,
            outcomes=tuple(self._outcomes),
            start_s=self._start_s,
            window_s=(first_s, self._window_end(first_s)),
            end_s=end_s,
            lag_ms=tuple(self._lag_ms),
            cpu_s=time.process_time() - cpu_s,
            interrupted=interrupted,
        )

    # -- who asks when ------------------------------------------------------------------------

    async def _open(self) -> None:
        async with _children() as start:
            for session in self._trace.sessions:
                due_s = self._start_s + session.at_s * self._plan.time_factor
                if self._is_over(due_s):
                    break
                await _sleep_until(due_s)
                start(self._session(session, due_s))

    async def _closed(self) -> None:
        assert self._plan.clients is not None
        left = iter(self._trace.sessions)
        async with _children() as start:
            for _ in range(self._plan.clients):
                start(self._client(left))

    async def _client(self, left: Iterator[TraceSession]) -> None:
        for session in left:
            if self._is_over(time.monotonic()):
                return
            await self._session(session, time.monotonic())

    async def _session(self, session: TraceSession, due_s: float) -> None:
        messages = self._trace.opening(session, self._plan.salt)
        for number, turn in enumerate(session.turns):
            due_s += turn.think_s * self._plan.time_factor
            if self._is_over(due_s):
                return
            await _sleep_until(due_s)
            messages.append({"role": "user", "content": turn.user})
            outcome = await self._ask(session, number, due_s, messages)
            answer = turn.answer if turn.answer is not None else outcome.text
            messages.append({"role": "assistant", "content": answer or NO_ANSWER})
            due_s = time.monotonic()

    def _is_over(self, due_s: float) -> bool:
        limit_s = self._plan.duration_s
        return self._cut or (limit_s is not None and due_s > self._start_s + limit_s)

    # -- one request --------------------------------------------------------------------------

    async def _ask(
        self, session: TraceSession, number: int, due_s: float, messages: list[Json]
    ) -> RequestOutcome:
        turn = session.turns[number]
        body = self._target.body_of(messages, turn.max_tokens, session.more)
        asked = SentRequest(session.name, number, due_s, time.monotonic())
        self._last_due_s = max(self._last_due_s, due_s)
        self._running += 1
        outcome = None
        try:
            outcome = await self._exchange(asked, body)
        finally:
            self._running -= 1
            self._keep(outcome or never_answered(asked, OutcomeKind.CUT, "", "", time.monotonic()))
        return outcome

    def _keep(self, outcome: RequestOutcome) -> None:
        keep = self._plan.keep_text or self._plan.capture
        self._outcomes.append(outcome if keep else replace(outcome, text=""))

    def _deadline(self) -> dict[str, str]:
        deadline_s = self._plan.deadline_s
        return {} if deadline_s is None else {DEADLINE_HEADER: f"{deadline_s:g}"}

    async def _exchange(self, asked: SentRequest, body: Json) -> RequestOutcome:
        request, captured = self._target.request(body, self._deadline()), None
        if self._plan.capture:
            captured = body
        try:
            connection = await self._pool.take()
        except (OSError, asyncio.TimeoutError) as exc:
            own = getattr(exc, "errno", None) in OWN_LIMITS
            kind = OutcomeKind.CLIENT if own else OutcomeKind.CONNECT
            lost = never_answered(asked, kind, _name(exc), str(exc), time.monotonic())
            return lost if captured is None else replace(lost, captured=CapturedExchange(captured))
        connection.send(request)
        incoming, broken, detail = connection.so_far, None, ""
        try:
            broken = await self._receive(connection, asked)
        except ConnectionLost as exc:
            broken, detail = OutcomeKind.CLOSED, str(exc)
        except NotHttp as exc:
            broken, detail = OutcomeKind.GARBAGE, str(exc)
        except asyncio.CancelledError:
            # The end of the run. What there was is kept, and ``_is_over`` says so to the session.
            broken, self._cut = OutcomeKind.CUT, True
        if broken is None and incoming.reusable:
            self._pool.give(connection)
        else:
            connection.close()
        return read_outcome(asked, incoming, broken, detail, time.monotonic(), body=captured)

    async def _receive(self, connection: Connection, asked: SentRequest) -> OutcomeKind | None:
        incoming, limits = connection.so_far, self._plan.limits
        end_s = asked.sent_s + limits.total_s
        while (now_s := time.monotonic()) < end_s:
            stall_s = (incoming.last_s or asked.sent_s) + limits.stall_s
            if stall_s <= now_s:
                return OutcomeKind.STALLED
            if await connection.ends_by(min(end_s, stall_s)):
                return None
        return OutcomeKind.TIMEOUT

    # -- beside it ----------------------------------------------------------------------------

    async def _probe(self) -> None:
        while True:
            wanted_s = time.monotonic() + PROBE_S
            await asyncio.sleep(PROBE_S)
            self._lag_ms.append((time.monotonic() - wanted_s) * 1e3)

    async def _report(self, progress: OnRunProgress) -> None:
        while True:
            progress(self._progress())
            await asyncio.sleep(TELL_S)

    def _progress(self) -> RunProgress:
        failed = sum(not one.ok for one in self._outcomes)
        took_s = time.monotonic() - self._start_s
        return RunProgress(len(self._outcomes), self._trace.requests, self._running, failed, took_s)


class Pool:
    """Connections that wait for the next request; there are as many as are needed at once."""

    def __init__(self, target: Target, limits: ClientTimeouts) -> None:
        self._host, self._port = target.address
        self._address = self._host
        self._tls = context_for(target.url)
        self._limits = limits
        self._idle: list[tuple[float, Connection]] = []

    async def resolve(self) -> None:
        """Find the address once, not for each connection. Raises ``BenchFailed``."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(self._host, self._port)
        except OSError as exc:
            raise BenchFailed(f"{self._host} has no address: {exc}") from exc
        self._address = str(found[0][4][0])

    async def take(self) -> Connection:
        """Return an idle connection. Raises ``OSError`` and ``TimeoutError``."""
        while self._idle:
            since_s, connection = self._idle.pop()
            if not connection.closed and time.monotonic() - since_s < IDLE_S:
                return connection
            connection.close()
        opening = Connection.open(self._address, self._port, self._tls, self._host)
        return await asyncio.wait_for(opening, self._limits.connect_s)

    def give(self, connection: Connection) -> None:
        """Take one back."""
        self._idle.append((time.monotonic(), connection))

    def close(self) -> None:
        """Hang up."""
        for _, connection in self._idle:
            connection.close()
        self._idle.clear()


@asynccontextmanager
async def _children() -> AsyncIterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """Give something that starts tasks; all of them have ended after the block."""
    tasks: set[asyncio.Task[None]] = set()
    failures: list[BaseException] = []

    def ended(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            failures.append(failure)

    def start(coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(coroutine)
        tasks.add(task)
        task.add_done_callback(ended)

    try:
        yield start
        while tasks and not failures:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await _end(*tasks)
    if failures:
        raise failures[0]


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for one in tasks:
        if not one.done():
            one.cancel()
    for one in tasks:
        with suppress(asyncio.CancelledError):
            await one


async def _sleep_until(at_s: float) -> None:
    # Also where it is late already: others must get their turn between two requests.
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))


def _name(exc: BaseException) -> str:
    number = exc.errno if isinstance(exc, OSError) and not isinstance(exc, ssl.SSLError) else None
    return errno.errorcode.get(number or 0, type(exc).__name__)
