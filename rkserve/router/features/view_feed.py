"""The live events of the cluster's view: one snapshot for each reader, then deltas for all of them.

A delta is made and encoded once, whatever the number of readers. None of them has a buffer of its
own: those that fall behind the latest deltas get a snapshot instead.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any

from rkserve.api.admin.cluster_view import MAX_SECONDS, SnapshotEvent, ViewDocument
from rkserve.api.admin.view_document import ViewContext, document, history_entry
from rkserve.control.operations import ControlOperation
from rkserve.core.errors import RkserveError, TooManyViewers
from rkserve.core.merge_patch import merge_patch
from rkserve.router.features.cluster_view import ClusterView
from rkserve.router.service import Service
from rkserve.verdicts.rules import judge

log = logging.getLogger(__name__)

RING = 24  # deltas that are kept for readers that fall behind: two minutes
SPACING_S = 0.25  # between two deltas; boards that change together are in one of them
# Requests that come and go within seconds would be most of a delta: they may take so much of it on
# average, and are shown less often where that is not enough. A list of hundreds is of no use.
REQUESTS_BYTES_PER_S, REQUESTS_BURST = 600.0, 9_000.0
OPERATIONS_S = 2.0
OPERATIONS = 20
RECENT_S = 600.0  # operations that ended earlier are left out
RETRY_MS = 1000
PING = b": \n\n"


def encoded(event: str, number: int, data: Mapping[str, Any]) -> bytes:
    """Return an event in the form of server-sent events."""
    return f"event: {event}\nid: {number}\ndata: {_json(data)}\n\n".encode()


def _json(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


class _Audience:
    """The readers of one of the two documents, and the latest deltas of it."""

    def __init__(self, *, operator: bool) -> None:
        self.operator = operator
        self.readers = 0
        self.number = 0  # of the latest event
        self.document: ViewDocument | None = None
        self._deltas: deque[tuple[int, bytes]] = deque(maxlen=RING)
        self._snapshot: tuple[int, bytes] | None = None
        self._news = asyncio.Event()
        self._allowed, self._updated_s = REQUESTS_BURST, 0.0  # bytes of requests, at that time

    def update(self, made: ViewDocument, now_s: float) -> None:
        """Take over a new document, and wake the readers if it differs."""
        gained = (now_s - self._updated_s) * REQUESTS_BYTES_PER_S
        self._allowed, self._updated_s = min(REQUESTS_BURST, self._allowed + gained), now_s
        before, self.document = self.document, made
        if before is None:
            self.number += 1
            return
        if self._allowed < 0:
            made["requests"] = before["requests"]
        if patch := merge_patch(before, made):
            self._allowed -= len(_json(patch.get("requests", "")))
            self.number += 1
            self._deltas.append((self.number, encoded("delta", self.number, patch)))
            news, self._news = self._news, asyncio.Event()
            news.set()

    def leave(self) -> None:
        """Note that a reader has left; without any, nothing is kept."""
        self.readers -= 1
        if not self.readers:
            self.document = self._snapshot = None
            self._deltas.clear()

    def snapshot(self, history: Callable[[], Any]) -> bytes:
        """Return the event with the whole document; the same for readers that come together."""
        assert self.document is not None  # there is a reader
        known = self._snapshot
        if known is None or known[0] != self.number:
            data: SnapshotEvent = {"view": self.document, "history": history()}
            known = (self.number, encoded("snapshot", self.number, data))
            self._snapshot = known
        return known[1]

    async def after(self, number: int, timeout_s: float) -> Sequence[bytes] | None:
        """Wait for deltas after an event; none if the time is up, None if they are forgotten."""
        if number == self.number:
            try:
                await asyncio.wait_for(self._news.wait(), timeout_s)
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                return ()
        if not self._deltas or self._deltas[0][0] > number + 1:
            return None
        return [chunk for at, chunk in self._deltas if at > number]


class ViewFeed:
    """The events of one Router's view. Use from one event loop."""

    def __init__(self, view: ClusterView, service: Service) -> None:
        self._view, self._service = view, service
        self._limit, self._ping_s = service.config.max_viewers, service.config.ping_s
        self._audiences = tuple(_Audience(operator=operator) for operator in (False, True))
        self._operations: Sequence[ControlOperation] = ()
        self._published_s = float("-inf")
        self._later: asyncio.TimerHandle | None = None
        view.changed.append(self._changed)

    @property
    def readers(self) -> int:
        """The number of readers."""
        return sum(one.readers for one in self._audiences)

    async def follow(self) -> None:
        """Sample the view forever; what readers need of others is asked before each sample."""
        await self._view.follow(self._prepare)

    async def open(self, *, operator: bool) -> ViewReader:
        """Admit a reader, who must be closed. Raises ``TooManyViewers``."""
        if self.readers >= self._limit:
            raise TooManyViewers(self._limit)
        audience = self._audiences[operator]
        audience.readers += 1
        reader = ViewReader(self, audience)
        try:
            await self._prepare()
            if audience.document is None:
                self.publish()
        except BaseException:
            reader.close()
            raise
        return reader

    async def _prepare(self) -> None:
        """Ask the other Routers and the Coordinator, if there are readers."""
        if self.readers:
            await asyncio.gather(self._view.look(), self._look_at_operations())

    async def _look_at_operations(self) -> None:
        cluster = self._service.cluster
        if not self._audiences[True].readers or not cluster.reachable:
            return
        try:
            found = await asyncio.wait_for(cluster.operations(OPERATIONS), OPERATIONS_S)
        except (RkserveError, TimeoutError, asyncio.TimeoutError) as exc:
            log.debug("showing the operations that are known: %s", exc)
            return
        oldest_s = time.time() - RECENT_S
        self._operations = [one for one in found if (one.finished_s or oldest_s) >= oldest_s]

    def _changed(self) -> None:
        """Publish now, or soon after the last time."""
        if not self.readers or self._later is not None:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._published_s + SPACING_S - loop.time()
        if wait_s <= 0:
            self.publish()
        else:
            self._later = loop.call_later(wait_s, self._publish_later)

    def _publish_later(self) -> None:
        self._later = None
        self.publish()

    def publish(self) -> None:
        """Make the documents of those who read, and their deltas."""
        now_s = self._published_s = asyncio.get_running_loop().time()
        facts = self._view.facts()
        verdict = judge(facts)
        for audience in self._audiences:
            if audience.readers:
                operations = self._operations if audience.operator else None
                about = ViewContext(self._view.router, self._view.tick, operations)
                audience.update(document(facts, verdict, about), now_s)

    async def stream(self, audience: _Audience, seconds: float) -> AsyncGenerator[bytes, None]:
        """Yield the events of an audience from now on, for some time."""
        until_s = asyncio.get_running_loop().time() + seconds
        number = audience.number
        yield f"retry: {RETRY_MS}\n\n".encode() + audience.snapshot(self._history)
        while asyncio.get_running_loop().time() < until_s:
            left_s = until_s - asyncio.get_running_loop().time()
            deltas = await audience.after(number, min(self._ping_s, left_s))
            number = audience.number
            if deltas is None:
                yield audience.snapshot(self._history)
            else:
                yield b"".join(deltas) or PING

    def _history(self) -> Any:
        return history_entry(self._view.histories, self._view.sampled_s)


class ViewReader:
    """One reader of the events."""

    def __init__(self, feed: ViewFeed, audience: _Audience) -> None:
        self._feed, self._audience = feed, audience
        self._closed = False

    def events(self, seconds: float = MAX_SECONDS) -> AsyncGenerator[bytes, None]:
        """Yield the events for so many seconds."""
        return self._feed.stream(self._audience, seconds)

    def close(self) -> None:
        """End it, also before its first event; idempotent."""
        if not self._closed:
            self._closed = True
            self._audience.leave()
