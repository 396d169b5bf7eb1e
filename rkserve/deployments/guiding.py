"""Grammars that clients ask for, tried in a process of their own before any board hears of them.

It keeps that process, and what it said: clients send the same schema with every request.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections import OrderedDict

from rkserve.board.child import Child
from rkserve.errors import RequestError
from rkserve.runvalues import Guide
from rkserve.sampling.asking import LIMIT_S, MAX_CHARS, PROGRAM, ask, refuse, too_long

KEPT = 64
# Starting takes a moment, and the answer may wait for a processor.
PATIENCE_S = 30.0
# Of one line; a grammar has its limit, and JSON makes up to six characters of one.
_LINE_BYTES = 16 * MAX_CHARS


class Guiding:
    """The grammars of one Router. Use it from one event loop."""

    def __init__(self) -> None:
        self._known: OrderedDict[Guide, str | None] = OrderedDict()
        self._child: Child | None = None
        self._said: asyncio.StreamReader  # by that process
        self._turn = asyncio.Lock()

    async def check(self, guide: Guide, param: str) -> None:
        """Raise ``RequestError`` that names ``param`` where a grammar cannot be followed."""
        if (reason := too_long(guide)) is not None:
            refuse(reason, param)
        async with self._turn:
            if guide not in self._known:
                self._known[guide] = await self._tried(guide)
            self._known.move_to_end(guide)
            reason = self._known[guide]
            if len(self._known) > KEPT:
                self._known.popitem(last=False)
        if reason is not None:
            refuse(reason, param)

    async def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            await self._over(child)

    async def _tried(self, guide: Guide) -> str | None:
        try:
            child = self._child = self._child or await self._started()
            child.write(ask(guide).encode())
            said = await self._line()
        except (TimeoutError, asyncio.TimeoutError) as exc:  # two classes before Python 3.11
            await self.close()
            raise RequestError(
                f"The grammar could not be tried within {PATIENCE_S:g} s: the Router is busy with "
                "other things."
            ) from exc
        except BaseException:
            await self.close()  # whoever left may have left an answer that nobody waits for
            raise
        if said is not None:
            reason: str | None = json.loads(said)
            return reason
        how = await self._over(child)
        self._child = None
        if how == -signal.SIGVTALRM:
            return f"it takes longer than {LIMIT_S:g} s to compile."
        return "it takes too much memory to compile."

    async def _started(self) -> Child:
        self._said = asyncio.StreamReader(_LINE_BYTES)
        child = self._child = await Child.start(
            (sys.executable, "-m", PROGRAM), out=asyncio.StreamReaderProtocol(self._said)
        )
        if await self._line() is None:
            raise RuntimeError("the process that tries grammars has ended at its start")
        return child

    async def _line(self) -> bytes | None:
        """Return its next word; None where it has ended."""
        line = await asyncio.wait_for(self._said.readline(), PATIENCE_S)
        return bytes(line) if line else None

    async def _over(self, child: Child) -> int:
        """Return how it ended, once it has."""
        await self._said.read()  # to the end of its words: that is no matter of time
        code = await child.wait()
        child.close()
        return code
