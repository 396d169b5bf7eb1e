"""Threads of their own for files that come from elsewhere at somebody else's pace.

A server that is slow holds its thread for minutes. In asyncio's shared threads a few of them would
keep chunks from being read, and so every board from being staged. It knows nothing of files.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from rkserve.core.errors import ArtifactRefused

P = ParamSpec("P")
T = TypeVar("T")

AT_ONCE = 4


class Fetching:
    """So many blocking calls at once, and no more. Use it from one event loop."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._going_on = 0
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="fetch")

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call it in one of the threads.

        Raises:
            ArtifactRefused: as many as may be are being fetched already.
        """
        if self._going_on >= self._at_once:
            raise ArtifactRefused(
                f"{self._going_on} files are being fetched at once, which is the limit; try "
                "again in a moment."
            )
        self._going_on += 1
        future = self._threads.submit(partial(call, *args, **kwargs))
        loop = asyncio.get_running_loop()
        # Also when the caller has left: the thread is free only once the call has ended.
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._ended))
        return await asyncio.wrap_future(future)

    def _ended(self) -> None:
        self._going_on -= 1

    def close(self) -> None:
        """Begin nothing any more; what goes on ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
