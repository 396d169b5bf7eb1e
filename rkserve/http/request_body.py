"""Reading request bodies within limits of length and time, and parsing query strings.

Ray Serve itself has no such limits.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from rkserve.api.json.fields import quoted
from rkserve.core.errors import BodyTooLarge, BodyTooSlow, RequestError, UnsupportedMediaType
from rkserve.http.auth import is_browser

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
