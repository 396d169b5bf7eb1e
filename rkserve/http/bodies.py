"""Request bodies and answers: bodies read within limits of length and time, which Ray Serve itself
does not have; answers of the generation routes, whole or streamed, with early headers.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

from rkserve.api.admin.query import read_key
from rkserve.api.common.answer import AnyCall, Dialect
from rkserve.api.common.output import (
    BOARD,
    EPOCH,
    QUEUED_AHEAD,
    RELEASE,
    SAMPLING_IGNORED,
    TIMEOUT,
    TOOLS_IGNORED,
    WEIGHT_VERSION,
    read_timeout,
    tool_headers,
)
from rkserve.api.common.version_policy import ANY, POLICY, SESSION, VersionPolicy, read_policy
from rkserve.api.json.fields import MAX_TIMEOUT_S, JsonObject, quoted
from rkserve.api.json.schemas import Example, RequestModel
from rkserve.core.errors import (
    BodyTooLarge,
    BodyTooSlow,
    RequestError,
    RkserveError,
    UnsupportedMediaType,
)
from rkserve.core.request_record import record_of_request
from rkserve.http.auth import is_browser, key_of
from rkserve.http.openapi import (
    EVENTS,
    GENERATION,
    INFER,
    JSON,
    KEY,
    OK,
    EndpointAnswer,
    EndpointParameter,
    H,
    Routes,
    returns,
)
from rkserve.http.streamed_answer import ClientStream, StreamedAnswer
from rkserve.router.auth.callers import Caller
from rkserve.router.auth.key_ring import ClientKey
from rkserve.router.idempotency.answers import REPLAYED, LiveAnswer
from rkserve.router.idempotency.store import name_of
from rkserve.router.request_log import failed
from rkserve.router.service import Opened, Service, read_call
from rkserve.router.stored_responses import CallMemory, owner_of

# Defaults of HTTP clients for callers that name no type: the first is that of curl's ``-d``, the
# second that of aiohttp for bytes.
_UNNAMED = ("", "application/x-www-form-urlencoded", "application/octet-stream")


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Return the whole body, which must be JSON.

    Raises:
        UnsupportedMediaType: its headers name another type.
        BodyTooLarge: as soon as it is known to be longer than ``max_bytes``.
        BodyTooSlow: it did not arrive within ``timeout_s``.
        RequestError: the Content-Length header is not a number, or the client left.
    """
    _check_type(request)
    announced(request, max_bytes)
    try:
        return await asyncio.wait_for(_collect(request, max_bytes), timeout_s)
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        raise BodyTooSlow(f"The body did not arrive within {timeout_s:.0f} s.") from None
    except ClientDisconnect:
        raise RequestError("The client left before its request was complete.") from None


async def body_of(service: Service, request: Request) -> bytes:
    """Return the body, as ``read_body`` within the configured limits."""
    return await read_body(request, service.config.max_body_bytes, service.config.body_timeout_s)


async def read_parts(
    request: Request, max_bytes: int, timeout_s: float, part_bytes: int
) -> AsyncIterator[bytes]:
    """Yield a long body in parts of equal size, the last one shorter, one in memory at a time.

    The total time is not limited, but each part of the stream must arrive within ``timeout_s``.

    Raises:
        BodyTooLarge, BodyTooSlow, RequestError: as ``read_body``; the iteration ends.
    """
    chunks = request.stream()
    part, found = bytearray(), 0
    while True:
        try:
            chunk = await asyncio.wait_for(anext(chunks), timeout_s)
        except StopAsyncIteration:
            break
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            raise BodyTooSlow(f"Nothing of the body came for {timeout_s:.0f} s.") from None
        except ClientDisconnect:
            raise RequestError("The client left before its request was complete.") from None
        found += len(chunk)
        if found > max_bytes:
            raise _too_large(max_bytes)
        part += chunk
        while len(part) >= part_bytes:
            yield bytes(part[:part_bytes])
            del part[:part_bytes]
    if part:
        yield bytes(part)


def query_of(request: Request) -> tuple[tuple[str, str], ...]:
    """Return the decoded pairs of the query string, in order."""
    return tuple(request.query_params.multi_items())


def announced(request: Request, max_bytes: int) -> int | None:
    """Return the Content-Length, if any. Raises ``BodyTooLarge``, ``RequestError``."""
    length = request.headers.get("content-length")
    if length is None:
        return None
    if not length.isascii() or not length.isdigit():
        raise RequestError("The Content-Length header is not a number.")
    if len(length) > len(str(max_bytes)) or int(length) > max_bytes:
        raise _too_large(max_bytes)
    return int(length)


async def _collect(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _check_type(request: Request) -> None:
    """Require JSON, which pages of other origins cannot send without a preflight.

    Many programs send no type or their library's default; these pass unless a browser sends them. A
    page of another origin is recognized by the Origin header of its POST.
    """
    headers = request.headers
    if headers.get("content-length") == "0":
        return
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise UnsupportedMediaType(
            f"Content-Encoding {quoted(encoding)} is not supported: send the body uncompressed."
        )
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    if kind in _UNNAMED and not is_browser(request):
        return
    raise UnsupportedMediaType(
        f"Content-Type {quoted(kind)} is not supported: send 'Content-Type: application/json'."
    )


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is longer than the limit of {max_bytes} bytes.")


log = logging.getLogger(__name__)


# Headers of calls that a board answers, and of their answers.
ASKED: tuple[EndpointParameter, ...] = (
    EndpointParameter(
        POLICY, "header", str, "`any`, `latest-only` or `min-version:<version>` of the weights."
    ),
    EndpointParameter(SESSION, "header", str, "Keeps the requests of a session on one version."),
    EndpointParameter(
        TIMEOUT,
        "header",
        {"type": "number", "exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S},
        "Seconds for which the answer is of use.",
    ),
)
ANSWERED = {
    BOARD: "The boards that answer.",
    RELEASE: "The release of their runtime.",
    QUEUED_AHEAD: "How many requests were before this one.",
    SAMPLING_IGNORED: "Sampling parameters that the runtime could not honour.",
    TOOLS_IGNORED: "Types of offered tools that are not known here and were left out.",
    EPOCH: "The epoch of what the boards obey.",
    WEIGHT_VERSION: "The versions of the weights.",
}
_REPLAYED = "`true` where it was made for an earlier request with the same `Idempotency-Key`."


def generation(  # noqa: PLR0917 - as a table of routes reads them
    routes: Routes,
    call: str,
    body: type[RequestModel],
    example: JsonObject,
    whole: Any,
    piece: Any = None,
    stream: str = EVENTS,
    says: str = "",
    answered: str = "The answer.",
) -> Callable[[H], H]:
    """Return the decorator of a route that a board answers, whole or as a stream of pieces.

    ``answered`` describes an answer without pieces.
    """
    answer, asked = returns(whole, answered, headers=ANSWERED), ASKED
    if piece is not None:
        content, what = {JSON: whole, stream: str}, "The answer, whole or with `stream` in pieces."
        headers = {**ANSWERED, REPLAYED: _REPLAYED}
        answer, asked = EndpointAnswer(OK, what, content, headers, {stream: piece}), (*ASKED, KEY)
    return routes(
        call,
        INFER,
        answer,
        errors=GENERATION,
        headers=asked,
        body=body,
        example=Example(example),
        says=says,
    )


async def stream_late(
    service: Service,
    opening: asyncio.Task[Opened],
    dialect: Dialect,
    call: AnyCall,
    writer: ClientStream | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield pings while a call is being opened, and then its answer. Closes the call.

    Proxies and clients drop connections without data. After the headers, errors are events of the
    stream.
    """
    try:
        while not opening.done():
            yield dialect.ping(call)
            await asyncio.wait({opening}, timeout=service.config.ping_s)
        async with aclosing(service.stream(opening.result(), writer)) as events:
            async for chunk in events:
                yield chunk
    except Exception as exc:
        failed(record_of_request(), exc)
        if not isinstance(exc, RkserveError):
            log.exception("a call could not be opened, in a way that should not happen")
        yield dialect.broken(exc)
    finally:
        await give_up(service, opening)


async def give_up(service: Service, opening: asyncio.Task[Opened]) -> None:
    """End an abandoned call, opened or not; idempotent."""
    opening.cancel()
    await asyncio.wait({opening})
    if not opening.cancelled() and opening.exception() is None:
        await service.close(opening.result())


Remember = Callable[[ClientKey | None], CallMemory]
Aside = Callable[[bytes, Caller], Awaitable[Response | None]]


def policy_of(request: Request) -> VersionPolicy:
    """Return the version policy of a request. Raises ``RequestError``."""
    header = request.headers.get(POLICY)
    return ANY if header is None else read_policy(header)


async def respond(
    service: Service,
    request: Request,
    dialect: Dialect,
    aside: Aside | None = None,
    remember: Remember | None = None,
) -> Response:
    """Answer a call of a dialect, whole or as a stream.

    ``aside`` answers calls that generate nothing, and returns None for others. ``remember`` returns
    the stored conversation for a client's key.
    """
    client = key_of(request)
    policy = policy_of(request)
    timeout_s = read_timeout(request.headers.get(TIMEOUT))
    body = await body_of(service, request)
    session, caller = request.headers.get(SESSION), service.callers.of(client)
    if aside is not None and (answered := await aside(body, caller)) is not None:
        return answered
    memory = None if remember is None else remember(client)
    opens = partial(service.open, body, dialect, policy, session)
    call_of = partial(opens, caller=caller, timeout_s=timeout_s, memory=memory)
    key = read_key(request.headers.get(KEY.name))
    if key is not None and service.keyed is not None:
        name, make = name_of(owner_of(client, service.keys), key), _maker(service, dialect, call_of)
        live, follows = service.keyed.join(name, _digest(request, body), make)
        return await _respond_once(service, dialect, body, live, follows=follows)
    opening = asyncio.get_running_loop().create_task(call_of())
    try:
        await asyncio.wait({opening}, timeout=service.config.headers_after_s)
        if not opening.done() and (call := await read_call(body, dialect.parse)).stream:
            writer, end = ClientStream(), partial(give_up, service, opening)
            events = stream_late(service, opening, dialect, call, writer)
            early = {**dialect.headers, **tool_headers(call.left_out)}
            return StreamedAnswer(events, end, early, writer=writer)
        opened = await opening
        if opened.call.stream:
            writer, end = ClientStream(), partial(service.close, opened)
            headers = {**dialect.headers, **opened.headers}
            return StreamedAnswer(service.stream(opened, writer), end, headers, writer=writer)
        answer = await service.whole(opened)  # the headers are complete only after this
    except BaseException:
        await give_up(service, opening)
        raise
    return JSONResponse(answer, headers=opened.headers)


def _digest(request: Request, body: bytes) -> str:
    """Return what repeats of a request have in common."""
    path, policy = request.scope["path"], request.headers.get(POLICY, "")
    return hashlib.sha256(f"{path}\n{policy}\n".encode() + body).hexdigest()


async def _respond_once(
    service: Service, dialect: Dialect, body: bytes, live: LiveAnswer, *, follows: bool
) -> Response:
    """Answer a request with an ``Idempotency-Key`` that has joined ``live``, and leave it: a repeat
    gets the answer of the first one.
    """
    joined = True

    async def leave() -> None:
        nonlocal joined
        if joined:
            joined = False
            live.leave()

    try:
        await asyncio.wait({live.begun}, timeout=service.config.headers_after_s)
        if not live.begun.done() and (call := await read_call(body, dialect.parse)).stream:
            early = {**dialect.headers, **tool_headers(call.left_out)}
            return StreamedAnswer(_late(service, live, dialect, call), leave, early)
        await asyncio.shield(live.begun)
        repeated = {REPLAYED: "true"} if follows or live.replayed else {}
        headers = {**live.headers, **repeated}
        if headers["content-type"] != JSON:
            return StreamedAnswer(live.read(), leave, headers)
        parts = [part async for part in live.read()]
    except BaseException:
        await leave()
        raise
    await leave()
    return Response(b"".join(parts), headers=headers)


def _maker(
    service: Service, dialect: Dialect, opens: Callable[[], Awaitable[Opened]]
) -> Callable[[LiveAnswer], Awaitable[None]]:
    """Return the function that makes the answer to a request with an ``Idempotency-Key``."""

    async def make(live: LiveAnswer) -> None:
        opened = await opens()
        try:
            await (stream if opened.call.stream else whole)(live, opened)
        finally:
            await service.close(opened)

    async def whole(live: LiveAnswer, opened: Opened) -> None:
        async def keep(answer: JsonObject) -> None:
            body = bytes(JSONResponse(answer).body)
            await live.store({**opened.headers, "content-type": JSON}, body)

        opened.completed = keep
        body = bytes(JSONResponse(await service.whole(opened)).body)
        live.begin({**opened.headers, "content-type": JSON})
        await live.add(body)

    async def stream(live: LiveAnswer, opened: Opened) -> None:
        headers, ping = {**dialect.headers, **opened.headers}, dialect.ping(opened.call)

        async def keep(closing: bytes) -> None:
            await live.store(headers, live.body(without=ping) + closing)

        opened.completed = keep
        live.begin(headers)
        async with aclosing(service.stream(opened)) as events:
            async for part in events:
                await live.add(part)

    return make


async def _late(
    service: Service, live: LiveAnswer, dialect: Dialect, call: AnyCall
) -> AsyncGenerator[bytes, None]:
    """Yield pings until an answer has begun, and then it; see ``stream_late``."""
    try:
        while not live.begun.done():
            yield dialect.ping(call)
            await asyncio.wait({live.begun}, timeout=service.config.ping_s)
        live.begun.result()
        async with aclosing(live.read()) as parts:
            async for part in parts:
                yield part
    except Exception as exc:  # noqa: BLE001 - a defect is logged where the answer is made
        failed(record_of_request(), exc)
        yield dialect.broken(exc)
