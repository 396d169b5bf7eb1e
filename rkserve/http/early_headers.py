"""Streamed answers whose client gets headers before a board has taken the call.

Proxies and clients give up a connection that says nothing; once headers are out, pings keep it, and
whatever goes wrong is an event of the stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from rkserve.api.common.dialect import AnyCall, Dialect
from rkserve.core.errors import RkserveError
from rkserve.router.service import Opened, Service

log = logging.getLogger(__name__)


async def stream_late(
    service: Service, opening: asyncio.Task[Opened], dialect: Dialect, call: AnyCall
) -> AsyncGenerator[bytes, None]:
    """Yield pings while a call is being opened, and then its answer. Closes the call."""
    try:
        while not opening.done():
            yield dialect.ping(call)
            await asyncio.wait({opening}, timeout=service.config.ping_s)
        async with aclosing(service.stream(opening.result())) as events:
            async for chunk in events:
                yield chunk
    except Exception as exc:
        if not isinstance(exc, RkserveError):
            log.exception("a call could not be opened, in a way that should not happen")
        yield dialect.broken(exc)
    finally:
        await give_up(service, opening)


async def give_up(service: Service, opening: asyncio.Task[Opened]) -> None:
    """End a call that nobody waits for any more, opened or not; once more does no harm."""
    opening.cancel()
    await asyncio.wait({opening})
    if not opening.cancelled() and opening.exception() is None:
        await service.close(opening.result())
