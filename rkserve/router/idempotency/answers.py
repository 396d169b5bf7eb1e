"""The answers to requests with an ``Idempotency-Key`` at one Router: those that are being made, for
all requests with their key, and those that are stored.

A task of its own makes an answer, so that it outlives the connection of the client that asked for
it. A repeat at the same Router follows the answer from its beginning; one at another Router of the
node waits for its end, and makes it anew where the first Router has died.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from rkserve.config.router import IdempotencyConfig
from rkserve.core.errors import (
    AnswerGivenUp,
    AnswerNotKept,
    IdempotencyFailed,
    IdempotencyKeyReused,
    RkserveError,
)
from rkserve.core.node_database import StoreThread
from rkserve.router.idempotency.store import AnswerStore, KeyState

log = logging.getLogger(__name__)

LOOK_S = 0.25  # between looks for the answer of another Router
WANTED_AGAIN_S = 1.0
SWEEP_S = 600.0
REPLAYED = "idempotent-replayed"  # the header of an answer that was not made for this request


class LiveAnswer:
    """The answer for a key: it is being made, or was stored. Use it from one event loop.

    A request joins it by ``KeyedAnswers.join``, and leaves it by ``leave``.
    """

    def __init__(self, digest: str, most_bytes: int, left: Callable[[LiveAnswer], None]) -> None:
        """``left`` is called when the last request has left an answer that is still being made."""
        self.digest = digest
        self.task: asyncio.Task[None] | None = None  # the one that makes it
        self.headers: Mapping[str, str] = {}
        self.replayed = False  # it was stored, or another Router makes it
        # Its headers are known; or it failed before.
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.begun.add_done_callback(_look_at_error)
        self.store: Callable[[Mapping[str, str], bytes], Awaitable[None]] = _stored_nowhere
        self.joined = self.leaves = 0
        self._most_bytes, self._left = most_bytes, left
        self._chunks: list[bytes] = []
        self._dropped = 0  # chunks of a long answer that its reader has had
        self._size = 0
        self._ended = False
        self._failure: BaseException | None = None
        self._news = asyncio.Event()

    # -- making ---------------------------------------------------------------------------------

    def begin(self, headers: Mapping[str, str]) -> None:
        """Set the headers, before the first part."""
        self.headers = dict(headers)
        if not self.begun.done():
            self.begun.set_result(None)

    async def add(self, part: bytes) -> None:
        """Add a part; one of an answer that is too long to be kept waits for its only reader."""
        self._chunks.append(part)
        self._size += len(part)
        self._notify()
        while self._drops and self._chunks:
            if not self.joined:
                raise AnswerGivenUp
            self._news = news = asyncio.Event()
            await news.wait()

    def body(self, without: bytes = b"") -> bytes:
        """Return all parts but those that are equal to ``without``."""
        return b"".join(part for part in self._chunks if part != without)

    @property
    def too_long(self) -> bool:
        """True if it cannot be kept."""
        return self._size > self._most_bytes

    @property
    def _drops(self) -> bool:
        """True if parts are not kept for another request than the one that reads."""
        return self.too_long and self.joined <= 1

    def end(self, failure: BaseException | None = None) -> None:
        """End it; with a failure before its headers every request gets that."""
        self._ended, self._failure = True, failure
        if failure is not None and not self.begun.done():
            self.begun.set_exception(failure)
        self._notify()

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    # -- reading --------------------------------------------------------------------------------

    async def read(self) -> AsyncGenerator[bytes, None]:
        """Yield the parts from the first one. Raises the error that cut it off."""
        at = 0
        while True:
            while at < self._dropped + len(self._chunks):
                part = self._chunks[at - self._dropped]
                at += 1
                yield part
                if self._drops:
                    del self._chunks[: at - self._dropped]
                    self._dropped = at
                    self._notify()
            if self._ended:
                break
            await self._news.wait()
        if self._failure is not None:
            raise self._failure

    def leave(self) -> None:
        """Take a request away that has joined."""
        self.joined -= 1
        self.leaves += 1
        if not self.joined and not self._ended:
            self._notify()
            self._left(self)


Make = Callable[[LiveAnswer], Awaitable[None]]


class KeyedAnswers:
    """The keyed requests of one Router. Use it from one event loop."""

    def __init__(self, config: IdempotencyConfig, folder: Path) -> None:
        """``folder`` is one of the node."""
        self._config = config
        self._live: dict[str, LiveAnswer] = {}
        # Those that make answers, also one that was given up, and timers that give them up.
        self._tasks: set[asyncio.Task[None]] = set()
        self._store = StoreThread("keyed answers", lambda: AnswerStore(folder, config))

    def join(self, name: str, digest: str, make: Make) -> tuple[LiveAnswer, bool]:
        """Return the answer for a key, which the caller has to leave, and whether it is followed
        already; where it is new, ``make`` makes it.

        ``make`` calls ``begin``, ``add`` for each part, and ``store`` before the answer counts as
        given. ``digest`` is that of the request.

        Raises:
            IdempotencyKeyReused: the key is that of another request.
            AnswerNotKept: the answer cannot be followed any more.
        """
        known = live = self._live.get(name)
        if live is None:
            most_bytes, left = self._config.max_answer_bytes, partial(self._orphaned, name)
            live = self._live[name] = LiveAnswer(digest, most_bytes, left)
            live.task = self._begun(self._run(name, live, make))
        elif live.digest != digest:
            raise IdempotencyKeyReused
        elif live.too_long:
            raise AnswerNotKept
        live.joined += 1
        return live, known is not None

    async def follow(self) -> None:
        """Remove expired answers, forever."""
        while True:
            try:
                await self._store.call(lambda store: store.sweep())
            except IdempotencyFailed as exc:
                log.warning("old answers cannot be removed: %s", exc)
            await asyncio.sleep(SWEEP_S)

    async def close(self) -> None:
        """End what is being made, and close the files."""
        while self._tasks:  # a client that leaves meanwhile begins a timer
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self._store.close()

    async def _run(self, name: str, live: LiveAnswer, make: Make) -> None:
        failure: BaseException | None = None
        try:
            if await self._is_own(name, live):
                live.store = partial(self._finish, name, live)
                await make(live)
        except asyncio.CancelledError:
            failure = AnswerGivenUp()
            raise
        except Exception as exc:
            if not isinstance(exc, RkserveError):
                log.exception("an answer failed in a way that it should not")
            failure = exc
        finally:
            try:
                # Also where this task is cancelled: otherwise the key would stay locked.
                await asyncio.shield(self._release(name, live))
            finally:
                self._forget(name, live)
                live.end(failure)

    async def _is_own(self, name: str, live: LiveAnswer) -> bool:
        """Return whether this Router makes the answer; wait for another Router that does, and take
        over its answer or its key.
        """
        while True:
            claim = await self._store.call(lambda store: store.claim(name, live.digest, live))
            if claim.state is KeyState.OWN:
                live.replayed = False  # the Router that made it has given it up, or has died
                return True
            if claim.state is KeyState.REUSED:
                raise IdempotencyKeyReused
            if claim.state is KeyState.TOO_LONG:
                raise AnswerNotKept
            live.replayed = True
            if claim.state is KeyState.DONE:
                live.begin(claim.headers)
                await live.add(claim.body)
                return False
            await asyncio.sleep(LOOK_S)

    async def _finish(
        self, name: str, live: LiveAnswer, headers: Mapping[str, str], body: bytes
    ) -> None:
        """Store an answer; its client gets it also where that fails, and a repeat is new then."""
        kept = None if live.too_long else body
        with suppress(IdempotencyFailed):  # it is logged
            await self._store.call(lambda store: store.finish(name, headers, kept))

    async def _release(self, name: str, live: LiveAnswer) -> None:
        with suppress(IdempotencyFailed):  # it is logged, and the key is free
            await self._store.call(lambda store: store.release(name, live))

    def _forget(self, name: str, live: LiveAnswer) -> None:
        """Let the next request with the key begin an answer of its own."""
        if self._live.get(name) is live:
            del self._live[name]

    def _orphaned(self, name: str, live: LiveAnswer) -> None:
        """Cancel an answer without clients after ``linger_s``."""
        task, leaves = live.task, live.leaves
        assert task is not None

        def alone() -> bool:
            return not live.joined and live.leaves == leaves and not task.done()

        async def give_up() -> None:
            await asyncio.sleep(self._config.linger_s)
            while alone():
                try:
                    wanted = await self._store.call(lambda store: store.is_wanted(name))
                except IdempotencyFailed:
                    wanted = False
                if not wanted and alone():  # a client may have come meanwhile
                    self._forget(name, live)
                    task.cancel()
                    return
                await asyncio.sleep(WANTED_AGAIN_S)

        self._begun(give_up())

    def _begun(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _stored_nowhere(_headers: Mapping[str, str], _body: bytes) -> None:
    """Store nothing: the answer is a stored one."""


def _look_at_error(begun: asyncio.Future[None]) -> None:
    """Retrieve the exception, so that asyncio does not log it where every client has left."""
    if not begun.cancelled():
        begun.exception()
