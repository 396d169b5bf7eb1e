"""Threads for work on long bodies, so that parsing one does not delay the streams of others."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

T = TypeVar("T")

# Shorter bodies are parsed and tokenized in about a millisecond, less than the switch to a thread
# costs the token streams of other requests.
INLINE_BODY_BYTES = 8192
# A tokenizer takes some 500 bytes for each character: few long bodies are worked on at once.
_PROMPTS = ThreadPoolExecutor(2, thread_name_prefix="long bodies")
# Counting has its own thread, so that it does not delay prompts.
_COUNTS = ThreadPoolExecutor(1, thread_name_prefix="counting")
# After longer bodies the allocator is told to return memory; by itself it keeps all of it.
_TRIM_BYTES = 128 * 1024


async def off_loop(size: int, work: Callable[[], T], *, counts: bool = False) -> T:
    """Return the result of ``work`` on a body of ``size`` bytes, from a thread if the body is long.

    Work that still waits for a thread is cancelled with its caller. ``counts`` selects the thread
    for requests that generate nothing, such as /tokenize.
    """
    if size <= INLINE_BODY_BYTES:
        return work()
    pool = _COUNTS if counts else _PROMPTS
    return await asyncio.get_running_loop().run_in_executor(pool, partial(_done, size, work))


def _done(size: int, work: Callable[[], T]) -> T:
    try:
        return work()
    finally:
        if size >= _TRIM_BYTES:
            give_memory_back()


def give_memory_back() -> None:
    """Return freed memory to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)
