"""Request bodies within limits of length and time; Serve itself sets neither."""

from __future__ import annotations

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from rkserve.errors import BodyTooLarge, BodyTooSlow, RequestError


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Return the whole body.

    Raises:
        BodyTooLarge: as soon as it is known to be longer than ``max_bytes``.
        BodyTooSlow: it did not arrive within ``timeout_s``.
        RequestError: the Content-Length header is not a number, or the client left.
    """
    _check_announced(request.headers.get("content-length"), max_bytes)
    try:
        return await asyncio.wait_for(_collect(request, max_bytes), timeout_s)
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        raise BodyTooSlow(f"The body did not arrive within {timeout_s:.0f} s.") from None
    except ClientDisconnect:
        raise RequestError("The client left before its request was complete.") from None


def _check_announced(length: str | None, max_bytes: int) -> None:
    if length is None:
        return
    if not length.isascii() or not length.isdigit():
        raise RequestError("The Content-Length header is not a number.")
    if int(length) > max_bytes:
        raise _too_large(max_bytes)


async def _collect(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is longer than the limit of {max_bytes} bytes.")
