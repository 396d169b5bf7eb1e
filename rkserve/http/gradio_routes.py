"""Routes of Gradio's API: a call is posted in one request, and its events are read in another.

The two requests may reach different Routers, so a posted call is shared with all Routers until one
of them streams it.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rkserve.api import gradio
from rkserve.api.common import output
from rkserve.api.common.calls import read_chat
from rkserve.api.json.fields import parse_object
from rkserve.api.json.schemas import Example
from rkserve.core.errors import GenerationNotFound, QueueFull, RequestError, RkserveError
from rkserve.http.auth import key_of
from rkserve.http.bodies import body_of, stream_late
from rkserve.http.openapi import ASK, EVENTS, INFER, OK, EndpointAnswer, Routes, returns
from rkserve.http.streamed_answer import StreamedAnswer
from rkserve.router.auth.callers import Caller
from rkserve.router.service import Service, read_call
from rkserve.router.stored_responses import owner_of

# A client reads the events of a call at once; after this long it must have gone.
PENDING_S = 60.0
MAX_PENDING = 256
MAX_PENDING_BYTES = 32 * 1024 * 1024
# A session's stream without calls ends, and the client opens another one with its next call.
LINGER_S = 5.0
# Unread events of a client, beyond which its calls wait.
MAX_UNREAD = 64
_RETRY_S = 5


@dataclass(frozen=True)
class PendingCall:
    """A posted call whose events have not been read. ``size`` is its body's length in bytes."""

    event_id: str
    owner: str
    call: gradio.GradioCall
    size: int


class GradioPeers(Protocol):
    """The Routers of one application, the caller included. Their calls raise ``BoardFailed``."""

    async def share_gradio(self, pending: PendingCall) -> None:
        """Keep a posted call on every Router."""

    async def claim_gradio(self, owner: str, event_id: str, *, cancel: bool) -> bool:
        """Remove a posted call from every Router, with ``cancel`` also where it runs."""


class GradioCalls:
    """The posted and the running calls of one Router. Use from one event loop."""

    def __init__(
        self, peers: GradioPeers | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``peers`` are all Routers, if there are several."""
        self._peers, self._clock = peers, clock
        self._pending: dict[str, tuple[float, PendingCall]] = {}
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._streams: dict[tuple[str, str], _SessionStream] = {}

    async def post(self, pending: PendingCall) -> None:
        """Keep a call until its events are read. Raises ``QueueFull``, ``BoardFailed``."""
        if self._peers is None:
            self.keep(pending)
        else:
            await self._peers.share_gradio(pending)

    def keep(self, pending: PendingCall) -> None:
        """Keep a call, or start it if its session's stream is open at this Router.

        Raises ``QueueFull``: too many calls wait for their clients.
        """
        self._forget_old()
        waiting = [one.size for _, one in self._pending.values()]
        if len(waiting) >= MAX_PENDING or sum(waiting) + pending.size > MAX_PENDING_BYTES:
            raise QueueFull(len(waiting), _RETRY_S)
        self._pending[pending.event_id] = (self._clock(), pending)
        stream = self._streams.get((pending.owner, pending.call.session))
        if stream is not None and pending.call.session:
            stream.arrived(pending)

    def drop(self, owner: str, event_id: str, *, cancel: bool) -> bool:
        """Remove a call from this Router; False if it is not here."""
        _, pending = self._pending.get(event_id, (0.0, None))
        if pending is not None and pending.owner == owner:
            del self._pending[event_id]
            return True
        running = self._running.get((owner, event_id)) if cancel else None
        return running is not None and running.cancel()

    async def claim(self, owner: str, event_id: str) -> PendingCall | None:
        """Remove a posted call from all Routers and return it; None if there is none."""
        self._forget_old()
        _, pending = self._pending.get(event_id, (0.0, None))
        if pending is None or pending.owner != owner:
            return None
        del self._pending[event_id]
        if self._peers is not None:
            await self._peers.claim_gradio(owner, event_id, cancel=False)
        return pending

    async def cancel(self, owner: str, event_id: str) -> bool:
        """End a call, posted or running, on any Router; False if there is none."""
        if self._peers is None:
            return self.drop(owner, event_id, cancel=True)
        return await self._peers.claim_gradio(owner, event_id, cancel=True)

    def waiting(self, owner: str, session: str) -> list[PendingCall]:
        """Return the posted calls of a session in order."""
        self._forget_old()
        found = [one for _, one in self._pending.values()]
        return [one for one in found if (one.owner, one.call.session) == (owner, session)]

    def opened(self, key: tuple[str, str], stream: _SessionStream) -> None:
        """Register a session's stream, which replaces an earlier one."""
        self._streams[key] = stream

    def closed(self, key: tuple[str, str], stream: _SessionStream) -> None:
        """Unregister a session's stream."""
        if self._streams.get(key) is stream:
            del self._streams[key]

    def runs(self, owner: str, event_id: str, task: asyncio.Task[None]) -> None:
        """Register the task that runs a call."""
        self._running[owner, event_id] = task
        task.add_done_callback(lambda _: self._running.pop((owner, event_id), None))

    def _forget_old(self) -> None:
        oldest_s = self._clock() - PENDING_S
        for event_id in [key for key, (since_s, _) in self._pending.items() if since_s < oldest_s]:
            del self._pending[event_id]


_Events = Callable[[PendingCall, gradio.CallFraming], AsyncGenerator[bytes, None]]


class _SessionStream:
    """The events of all calls of one session, merged in order of arrival."""

    def __init__(self, calls: GradioCalls, owner: str, session: str, events: _Events) -> None:
        self._calls, self._events = calls, events
        self._key = (owner, session)
        self._chunks: asyncio.Queue[bytes] = asyncio.Queue(MAX_UNREAD)
        self._tasks: set[asyncio.Task[None]] = set()
        self._open = True

    def arrived(self, pending: PendingCall) -> None:
        """Start a call."""
        task = asyncio.get_running_loop().create_task(self._run(pending))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self._calls.runs(pending.owner, pending.event_id, task)

    async def chunks(self, ping_s: float) -> AsyncGenerator[bytes, None]:
        """Yield events until no call is left or the client leaves."""
        self._calls.opened(self._key, self)
        loop = asyncio.get_running_loop()
        getting = loop.create_task(self._chunks.get())
        try:
            for pending in self._calls.waiting(*self._key):
                self.arrived(pending)
            while self._tasks or getting.done() or not self._chunks.empty():
                if (await asyncio.wait({getting}, timeout=ping_s))[0]:
                    yield getting.result()
                    getting = loop.create_task(self._chunks.get())
                else:
                    yield gradio.QueueFraming.ping
                if not (self._tasks or getting.done()) and self._chunks.empty():
                    await asyncio.wait({getting}, timeout=LINGER_S)
        finally:
            self._open = False
            self._calls.closed(self._key, self)
            left = {getting, *self._tasks}
            for task in left:
                task.cancel()
            await asyncio.wait(left)

    async def _run(self, pending: PendingCall) -> None:
        framing = gradio.QueueFraming(pending.event_id)
        try:
            if await self._calls.claim(pending.owner, pending.event_id) is None:
                return
            async with aclosing(self._events(pending, framing)) as events:
                async for chunk in events:
                    await self._chunks.put(chunk)
        except RkserveError as exc:
            await self._chunks.put(framing.failed(exc))
        except asyncio.CancelledError:
            if self._open:  # else the whole stream ends
                await self._chunks.put(framing.failed(RequestError("The call was cancelled.")))
            raise


class _Handlers:
    """The handlers behind the routes."""

    def __init__(self, service: Service, calls: GradioCalls) -> None:
        self._service, self._calls = service, calls

    def caller(self, request: Request) -> tuple[str, Caller]:
        """Return a request's owner and caller."""
        client = key_of(request)
        return owner_of(client, self._service.keys), self._service.callers.of(client)

    async def post(self, request: Request, read: Callable[[bytes], gradio.GradioCall]) -> Response:
        """Keep a call until its client reads its events, and return its id."""
        owner, _ = self.caller(request)
        body = await body_of(self._service, request)
        call = await read_call(body, read)
        if gradio.immediate(call) is None:  # a mistake in its arguments is refused at once
            read_chat(gradio.chat_body(call, self._service.models.default))
        pending = PendingCall(uuid.uuid4().hex, owner, call, len(body))
        await self._calls.post(pending)
        return JSONResponse(gradio.GradioEvent(event_id=pending.event_id))

    async def events(
        self, pending: PendingCall, framing: gradio.CallFraming, caller: Caller
    ) -> AsyncGenerator[bytes, None]:
        """Carry a call out, and yield its events."""
        outputs = gradio.immediate(pending.call)
        if outputs is not None:
            yield framing.opening() + framing.completed(outputs)
            return
        service = self._service
        asked = gradio.chat_body(pending.call, service.models.default)
        body = output.dumps(asked).encode()
        dialect = gradio.dialect_of(pending.call, asked, framing)
        opening = asyncio.get_running_loop().create_task(service.open(body, dialect, caller=caller))
        async with aclosing(stream_late(service, opening, dialect, dialect.parse(body))) as events:
            async for chunk in events:
                yield chunk

    def session(self, request: Request) -> Response:
        """Stream the events of all calls of a session."""
        owner, caller = self.caller(request)
        session = gradio.check_session(request.query_params.get("session_hash", ""))

        async def events(
            pending: PendingCall, framing: gradio.CallFraming
        ) -> AsyncGenerator[bytes, None]:
            # One connection has the answers of several calls.
            with self._service.log.part(request.method, f"{request.url.path}#call"):
                async with aclosing(self.events(pending, framing, caller)) as chunks:
                    async for chunk in chunks:
                        yield chunk

        stream = _SessionStream(self._calls, owner, session, events)
        return _streamed(stream.chunks(self._service.config.ping_s))

    async def one(self, request: Request, event_id: str) -> Response:
        """Stream the events of one call."""
        owner, caller = self.caller(request)
        pending = await self._calls.claim(owner, event_id)
        if pending is None:
            raise GenerationNotFound(event_id[: gradio.MAX_SESSION_CHARS])
        return _streamed(self.events(pending, gradio.CallFraming(), caller))

    async def cancel(self, request: Request) -> Response:
        """End a call."""
        owner, _ = self.caller(request)
        asked = gradio.GradioCancelRequest.read(parse_object(await body_of(self._service, request)))
        found = await self._calls.cancel(owner, asked.event_id)
        return JSONResponse(gradio.GradioCancelled(success=found))


_NAME = {"name": "`chat`, `get_user_input` or `get_RKLLM_output`."}


def add_gradio(app: FastAPI, service: Service, calls: GradioCalls) -> None:
    """Add the routes; those of a call also without the prefix, as Gradio 4 had them."""
    routes, route = _Handlers(service, calls), Routes(app, "Gradio")
    posted = returns(gradio.GradioEvent, "The call waits for its events to be read.")
    event = {"event_id": "0" * 32}
    streamed = EndpointAnswer(OK, "The events.", {EVENTS: str})

    @route("GET /config", INFER, returns(gradio.GradioConfig, "What Gradio's clients read."))
    async def config(request: Request) -> JSONResponse:
        """Describe the functions and their components."""
        routes.caller(request)
        return JSONResponse(gradio.configuration("rkserve"))

    signatures = returns(gradio.GradioInfo, "The arguments and outputs of each.")

    @route(f"GET {gradio.PREFIX}/info", INFER, signatures)
    async def info(request: Request) -> JSONResponse:
        """Describe the functions' arguments."""
        routes.caller(request)
        return JSONResponse(gradio.signatures())

    @route(
        f"POST {gradio.PREFIX}/queue/join",
        INFER,
        posted,
        errors=(429, 503),
        body=gradio.GradioJoinRequest,
        example=Example({"fn_index": 0, "data": ["Hello"], "session_hash": "s1"}),
    )
    async def join(request: Request) -> Response:
        """Post a call of a session."""
        return await routes.post(request, gradio.read_join)

    @route(
        f"GET {gradio.PREFIX}/queue/data",
        INFER,
        streamed,
        errors=(400, *ASK),
        query=gradio.SessionQuery,
        example=Example(query={"session_hash": "s1"}),
    )
    async def data(request: Request) -> Response:
        """Carry out the calls of a session, and stream their events."""
        return routes.session(request)

    @route(
        f"POST {gradio.PREFIX}/cancel {gradio.PREFIX}/reset",
        INFER,
        returns(gradio.GradioCancelled, "Whether it was there."),
        errors=(503,),
        body=gradio.GradioCancelRequest,
        example=Example(event),
    )
    async def cancel(request: Request) -> Response:
        """End a call, posted or running."""
        return await routes.cancel(request)

    @route(
        f"POST {gradio.PREFIX}/call/{{name}} /call/{{name}}",
        INFER,
        posted,
        errors=(404, 429, 503),
        paths=_NAME,
        body=gradio.GradioCallRequest,
        example=Example({"data": ["Hello"]}, {"name": "chat"}),
    )
    async def call(request: Request, name: str) -> Response:
        """Post a call of a function."""
        return await routes.post(request, partial(gradio.read_call, name))

    # The event ID identifies the call; the function's name is only part of the path.
    @route(
        f"GET {gradio.PREFIX}/call/{{name}}/{{event_id}} /call/{{name}}/{{event_id}}",
        INFER,
        streamed,
        errors=ASK,
        paths=_NAME | {"event_id": "The id in the answer to the posted call."},
        example=Example(path={"name": "chat", **event}),
    )
    async def events(request: Request, name: str, event_id: str) -> Response:  # noqa: ARG001 - a part of the path
        """Carry out a posted call, and stream its events."""
        return await routes.one(request, event_id)


def _streamed(events: AsyncGenerator[bytes, None]) -> Response:
    async def end() -> None:
        """Nothing is left: closing the generator ends its calls."""

    return StreamedAnswer(events, end, output.HEADERS)
