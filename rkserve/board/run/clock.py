"""The time that a board's waits are measured in: that of its event loop."""

from __future__ import annotations

import asyncio


def now_s() -> float:
    """Return the loop's time; only differences mean something."""
    return asyncio.get_running_loop().time()
