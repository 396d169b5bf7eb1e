"""Clients of a soak: all kinds of requests, hang-ups, repeats with keys, scrapes and followers.

They run in a thread with a loop of its own, and report every attempt to the judge.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.harness.connection import WatchedConnection
from benchmarks.harness.exchange import Truth
from benchmarks.soak.judge import Ending, Judge, Outcome
from benchmarks.soak.questions import (
    RESPONSES,
    STREAMED,
    MisshapenAnswer,
    Question,
    ReadAnswer,
    error_of,
    read_given,
)
from benchmarks.soak.script import Script
from rkserve.bench.connection import OK, ConnectionLost, Incoming, request_bytes
from rkserve.bench.processes import BenchFailed

ANSWER_S = 180.0  # longer than a queue, a pause and several failovers on a busy machine
KEYED_S = 300.0  # in which a request with a key gets its whole answer, however often it is repeated
REST_S = (0.0, 0.2)
LONGEST_RETRY_S = 3.0
SCRAPE_S = 5.0
FOLLOWED_S = 120.0  # a stream without an end is asked for anew
HANG_UP_SHARE, KEYED_SHARE, REPLAY_SHARE, FRESH_SHARE = 0.1, 0.25, 0.3, 0.3
CONVERSATIONS_SHARE, ADAPTER_SHARE = 0.2, 0.15
VIEWER, LOGS, SCRAPER = "viewer of events", "follower of logs", "scrape"


@dataclass(frozen=True, slots=True)
class Access:
    """The address of the cluster, and the keys to generate and to look."""

    host: str
    port: int
    infer_key: str = field(repr=False)
    admin_key: str = field(repr=False)

    def post(self, question: Question, key: str = "") -> bytes:
        """Return a question as it goes over the wire."""
        headers = {"authorization": f"Bearer {self.infer_key}"}
        if key:
            headers["idempotency-key"] = key
        return request_bytes(self.host, self.port, question.body, question.path, headers)

    def get(self, path: str, secret: str) -> bytes:
        """Return a request without a body as it goes over the wire."""
        return (
            f"GET {path} HTTP/1.1\r\nhost: {self.host}:{self.port}\r\n"
            f"authorization: Bearer {secret}\r\n\r\n"
        ).encode()


@dataclass(frozen=True, slots=True)
class HangingUp:
    """The moment at which a client hangs up: after so many events, or so many seconds."""

    events: int
    seconds: float

    @classmethod
    def drawn(cls, rng: random.Random, question: Question) -> HangingUp:
        """Draw one that most answers do not outrun."""
        if question.streamed:
            return cls(rng.randint(1, 20), ANSWER_S)
        return cls(1, rng.uniform(0.02, 1.0))


class Asker:
    """One client's connection, which is kept over several requests."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._kept: WatchedConnection | None = None

    async def attempt(
        self, kind: str, request: bytes, leaving: HangingUp | None = None
    ) -> tuple[Outcome, Incoming | None]:
        """Send a request once; return its end and, where there is one, the complete answer."""
        sent_s = time.monotonic()
        end = partial(Outcome, kind, sent_s=sent_s)
        try:
            incoming = await self._exchange(request, leaving)
        except (OSError, BenchFailed) as exc:
            return end(_ending_by(exc), ended_s=time.monotonic(), message=str(exc)), None
        ended_s, board = time.monotonic(), ""
        if incoming is None:
            return end(Ending.LEFT, ended_s=ended_s), None
        board = incoming.headers.get("x-rkserve-board", "")
        if not incoming.done:
            return end(Ending.SILENT, ended_s=ended_s, board=board), None
        if incoming.status == OK:
            return end(Ending.WHOLE, ended_s=ended_s, board=board), incoming
        error = error_of(incoming)
        refused = end(
            Ending.REFUSED,
            ended_s=ended_s,
            status=incoming.status,
            detail=str((error or {}).get("code") or ""),
            message=str((error or {}).get("message") or "")[:200],
            error_object=error is not None,
            retry_after="retry-after" in incoming.headers,
        )
        return refused, incoming

    async def ask(
        self, question: Question, script: Script, *, key: str = "", leaving: HangingUp | None = None
    ) -> tuple[Outcome, ReadAnswer | None, Incoming | None]:
        """Ask a question once, and judge by ``script`` what came of it."""
        request = self._access.post(question, key)
        outcome, incoming = await self.attempt(question.kind, request, leaving)
        if outcome.ending is not Ending.WHOLE or incoming is None:
            return outcome, None, incoming
        try:
            read = read_given(question, incoming)
        except MisshapenAnswer as exc:
            return replace(outcome, ending=Ending.CUT, message=str(exc)), None, incoming
        if read.error is not None:
            code = str(read.error.get("code") or read.error.get("type"))
            message = str(read.error.get("message", ""))[:200]
            failed = replace(outcome, ending=Ending.FAILED, detail=code, message=message)
            return failed, None, incoming
        truth = script.truth(question, read)
        detail = f"{question.same} {read.version}".strip()
        found = replace(outcome, found=read.truth, truth=truth, detail=detail)
        return replace(found, continued=read.continued), read, incoming

    @classmethod
    async def once(cls, access: Access, script: Script, question: Question) -> Outcome:
        """Ask a question once, on a connection of its own."""
        asker = cls(access)
        try:
            outcome, _, _ = await asker.ask(question, script)
            return outcome
        finally:
            asker.close()

    async def _exchange(self, request: bytes, leaving: HangingUp | None) -> Incoming | None:
        """Return the answer; None where it was left on purpose. Raises as ``Connection`` does."""
        kept, self._kept = self._kept, None
        if kept is not None and not kept.closed:
            try:
                return await self._over(kept, request, leaving)
            except ConnectionLost as exc:
                # A server may hang up between two requests, which the second one crosses.
                if exc.began:
                    raise
        fresh = await WatchedConnection.open(self._access.host, self._access.port)
        return await self._over(fresh, request, leaving)

    async def _over(
        self, connection: WatchedConnection, request: bytes, leaving: HangingUp | None
    ) -> Incoming | None:
        until_s = time.monotonic() + ANSWER_S
        connection.send(request)
        incoming = connection.so_far
        try:
            if leaving is not None and not await _ends_before(connection, leaving):
                connection.leave()
                return None
            await connection.answer(until_s)
        finally:
            if incoming.reusable and not connection.closed:
                self._kept = connection
            else:
                connection.close()
        return incoming

    def close(self) -> None:
        """Hang up."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None


async def _ends_before(connection: WatchedConnection, leaving: HangingUp) -> bool:
    """Wait until it is time to hang up; return whether the answer has ended before."""
    incoming = connection.so_far

    def enough(incoming: Incoming) -> bool:
        return incoming.done or len(incoming.events) >= leaving.events

    try:
        await connection.reach(enough, time.monotonic() + leaving.seconds)
    except ConnectionLost:
        raise
    except BenchFailed:
        pass  # it is as late as that
    return incoming.done


class Clients:
    """So many clients, a scraper and two followers, from ``start`` to ``stop``."""

    def __init__(
        self, access: Access, script: Script, judge: Judge, clients: int, seed: int
    ) -> None:
        self._access, self._script, self._judge = access, script, judge
        self._clients, self._seed = clients, seed
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="clients", daemon=True)
        self._over = False
        self._failure: BaseException | None = None
        self.answers = 0
        self.seen: dict[str, int] = {VIEWER: 0, LOGS: 0, SCRAPER: 0}

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def stop(self) -> None:
        """Let every client end what it has begun. Raises the failure of a client."""
        self._over = True
        self._thread.join(KEYED_S + ANSWER_S)
        if self._thread.is_alive():
            raise BenchFailed("the clients did not end")
        if self._failure is not None:
            raise self._failure

    @property
    def alive(self) -> bool:
        """True while they ask."""
        return self._thread.is_alive() and self._failure is None

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._all())
        except Exception as exc:  # noqa: BLE001 - it is raised where the clients are stopped
            self._failure = exc
        finally:
            self._loop.close()

    async def _all(self) -> None:
        clients = [asyncio.create_task(self._client(number)) for number in range(self._clients)]
        beside: list[Coroutine[Any, Any, None]] = [
            self._scrapes(),
            self._follow(VIEWER, "/v1/cluster/events"),
            self._follow(LOGS, "/v1/logs?follow=true&tail=10"),
        ]
        watchers = [asyncio.create_task(one) for one in beside]
        try:
            await asyncio.gather(*clients)
        finally:
            for task in [*clients, *watchers]:
                task.cancel()
            ended = await asyncio.gather(*watchers, return_exceptions=True)
        for one in ended:
            if isinstance(one, Exception):
                raise one

    # -- those who ask ------------------------------------------------------------------------

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        asker = Asker(self._access)
        try:
            while not self._over:
                for question in self._next(rng):
                    if not await self._one(asker, rng, question):
                        break
                    await asyncio.sleep(rng.uniform(*REST_S))
                if rng.random() < FRESH_SHARE:
                    asker.close()
        finally:
            asker.close()

    def _next(self, rng: random.Random) -> Sequence[Question]:
        """Return the next question, or the turns of a conversation."""
        drawn = rng.random()
        if drawn < CONVERSATIONS_SHARE:
            return rng.choice(self._script.conversations)
        if drawn < CONVERSATIONS_SHARE + ADAPTER_SHARE:
            return [rng.choice(self._script.adapter)]
        return [rng.choice(self._script.single[rng.choice([*self._script.single])])]

    async def _one(self, asker: Asker, rng: random.Random, question: Question) -> bool:
        """Ask a question in one of the ways; return whether there was a whole answer."""
        if rng.random() < HANG_UP_SHARE:
            leaving = HangingUp.drawn(rng, question)
            outcome, _, _ = await asker.ask(question, self._script, leaving=leaving)
            self._judge.take(outcome)
            return False
        if question.api != "embedding" and rng.random() < KEYED_SHARE:
            return await self._keyed(asker, rng, question)
        outcome, read, incoming = await asker.ask(question, self._script)
        self._judge.take(outcome)
        await _rest(outcome, incoming)
        if read is not None and question.path == RESPONSES:
            await self._stored(asker, question, read)
        self.answers += read is not None
        return read is not None

    async def _keyed(self, asker: Asker, rng: random.Random, question: Question) -> bool:
        """Repeat a request with a key until its answer is whole, and now and then once more."""
        keyed = replace(question, kind=_with_key(question.kind))
        key, deadline_s = secrets.token_hex(12), time.monotonic() + KEYED_S
        while True:
            outcome, read, incoming = await asker.ask(keyed, self._script, key=key)
            self._judge.take(outcome)
            if read is not None and incoming is not None:
                break
            if time.monotonic() > deadline_s:
                lasted = f"{question.kind}, {KEYED_S:.0f} s: {outcome.detail} {outcome.message}"
                self._judge.flaw("a request with a key never got its whole answer", lasted)
                return False
            self._judge.repeat(keyed.kind, replayed=False)
            await _rest(outcome, incoming)
        self.answers += 1
        if rng.random() < REPLAY_SHARE:
            await self._replayed(asker, keyed, key, read)
        return True

    async def _replayed(self, asker: Asker, keyed: Question, key: str, first: ReadAnswer) -> None:
        """Repeat a request that was answered: the answer is the same one."""
        outcome, read, incoming = await asker.ask(keyed, self._script, key=key)
        self._judge.take(outcome)
        if read is None or incoming is None:
            return
        self._judge.repeat(keyed.kind, replayed=True)
        if incoming.headers.get("idempotent-replayed") != "true" or read.name != first.name:
            named = f"{keyed.kind}: {read.name}, after {first.name}"
            self._judge.flaw("a repeat of an answered request is another answer", named)

    async def _stored(self, asker: Asker, question: Question, read: ReadAnswer) -> None:
        """Get a stored response again."""
        request = self._access.get(f"{RESPONSES}/{read.name}", self._access.infer_key)
        outcome, incoming = await asker.attempt("stored response", request)
        if outcome.ending is Ending.WHOLE and incoming is not None:
            plain = replace(question, body={**question.body, "stream": False})
            try:
                again = read_given(plain, incoming)
            except MisshapenAnswer as exc:
                outcome = replace(outcome, ending=Ending.CUT, message=str(exc))
            else:
                outcome = replace(outcome, found=again.truth, truth=read.truth)
        self._judge.take(outcome)

    # -- those who look -----------------------------------------------------------------------

    async def _scrapes(self) -> None:
        asker = Asker(self._access)
        request = self._access.get("/metrics", self._access.admin_key)
        try:
            while True:
                outcome, incoming = await asker.attempt(SCRAPER, request)
                if outcome.ending is Ending.WHOLE and incoming is not None:
                    text = b"\n\n".join(event for _, event in incoming.events)
                    same = Truth("metrics", "", 0, 0)
                    good = b"\nrkserve_router_up" in text
                    found = same if good else Truth(text[:80].decode(errors="replace"), "", 0, 0)
                    outcome = replace(outcome, found=found, truth=same)
                    self.seen[SCRAPER] += len(text) if good else 0
                self._judge.take(outcome)
                await asyncio.sleep(SCRAPE_S)
        finally:
            asker.close()

    async def _follow(self, kind: str, path: str) -> None:
        """Read a stream without an end, and ask for it again whenever it has ended."""
        request = self._access.get(path, self._access.admin_key)
        while True:
            sent_s = time.monotonic()
            end = partial(Outcome, kind, sent_s=sent_s)
            try:
                connection = await WatchedConnection.open(self._access.host, self._access.port)
                try:
                    outcome = await self._followed(connection, request, kind, end)
                finally:
                    connection.close()
            except (OSError, BenchFailed) as exc:
                outcome = end(_ending_by(exc), ended_s=time.monotonic(), message=str(exc))
            self._judge.take(outcome)
            await asyncio.sleep(1.0)

    async def _followed(
        self,
        connection: WatchedConnection,
        request: bytes,
        kind: str,
        end: Callable[..., Outcome],
    ) -> Outcome:
        connection.send(request)
        incoming, sent_s = connection.so_far, time.monotonic()
        try:
            while not await connection.ends_by(time.monotonic() + 1.0):
                _drop_read(incoming)
                if time.monotonic() > sent_s + FOLLOWED_S:
                    break
        finally:
            self.seen[kind] += incoming.size if incoming.status == OK else 0
        if not incoming.done:
            connection.leave()
            return end(Ending.LEFT, ended_s=time.monotonic())
        ended_s = time.monotonic()
        if incoming.status == OK:
            return end(Ending.LEFT, ended_s=ended_s)  # after a quarter of an hour it is over
        error = error_of(incoming)
        return end(
            Ending.REFUSED,
            ended_s=ended_s,
            status=incoming.status,
            detail=str((error or {}).get("code") or ""),
            error_object=error is not None,
            retry_after="retry-after" in incoming.headers,
        )


def _drop_read(incoming: Incoming) -> None:
    """Forget the events that have arrived: the stream has no end."""
    if incoming.status == OK:
        incoming.events.clear()


def _ending_by(exc: OSError | BenchFailed) -> Ending:
    if isinstance(exc, OSError):
        return Ending.UNREACHED
    return Ending.BROKEN if isinstance(exc, ConnectionLost) else Ending.CUT


def _with_key(kind: str) -> str:
    plain = kind.removesuffix(STREAMED)
    return f"{plain}, key" + (STREAMED if kind != plain else "")


async def _rest(outcome: Outcome, incoming: Incoming | None) -> None:
    """Wait before the next request, as long as a refusal asks for."""
    if outcome.ending is Ending.WHOLE:
        return
    asked = incoming.headers.get("retry-after", "1") if incoming is not None else "0.5"
    seconds = float(asked) if asked.replace(".", "", 1).isdigit() else 1.0
    await asyncio.sleep(min(seconds, LONGEST_RETRY_S))
