"""Calls from Routers and the Coordinator to one group's boards, and the transport of their tokens.

Generations and reports use a channel connection to their board (``transport``), and Ray if there is
none. All other calls use Ray. Ray's exceptions become rkserve's here.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.schema import DeploymentStatusOverview, ReplicaState

from rkserve.core.board_report import BoardReport
from rkserve.core.errors import BoardFailed, BoardGone, BoardSilent, BoardStartFailed, RkserveError
from rkserve.core.messages import Accepted, CacheSource, EmbedRequest, Event, GenerateRequest
from rkserve.fleet.fleet import TakeDelta
from rkserve.transport.cache_transfer import cache_key
from rkserve.transport.client import BoardConnection, ChannelClient, ChannelLost
from rkserve.transport.codec import METHODS
from rkserve.transport.server import ChannelAddress

log = logging.getLogger(__name__)

_T = TypeVar("_T")
# States of a replica that takes no requests yet, or no more.
NOT_RUNNING = (ReplicaState.STARTING, ReplicaState.STOPPING)


class _Unlisted(BoardFailed):
    """The replica has left Ray's table: it is draining, or has ended."""


class RayLink:
    """``BoardLink`` over Ray's handle of a Board deployment."""

    def __init__(
        self,
        handle: Any,
        group: str,
        report_timeout_s: float,
        channels: ChannelClient | None = None,
    ) -> None:
        """Without ``channels`` everything goes through Ray."""
        self._channels = channels
        self._streams = handle.options(stream=True)
        self._handle = handle
        self._group = group
        self._report_timeout_s = report_timeout_s
        self._replicas = Replicas(handle, report_timeout_s)
        self._asked = frozenset[str]()  # the replicas that were listed at the last round
        self.complete = False  # see ``BoardLink``

    async def open(
        self, request: GenerateRequest, replica: str, take: TakeDelta | None = None
    ) -> AsyncGenerator[Event, None]:
        """Generate on that replica; see ``BoardLink``."""
        channels = self._channels
        line = None if channels is None else channels.line(replica)
        if channels is not None and line is not None:
            inbox = line.generate(request, take)
            try:
                while (event := await inbox.next()) is not None:
                    yield event
            except BoardFailed as exc:
                # A failure before the first event may be of the connection only.
                if inbox.received or not inbox.lost or isinstance(exc, BoardSilent):
                    raise
            else:
                return
            finally:
                line.leave(inbox)
                channels.streams["channel"] += inbox.received
        if channels is not None:
            channels.streams["ray"] += 1
        async with aclosing(self._streamed(request, replica)) as streamed:
            async for event in streamed:
                yield event

    def cache_source(self, replica: str, tokens: int) -> CacheSource | None:
        """Return the way to that replica's cache files; see ``BoardLink``."""
        line = None if self._channels is None else self._channels.line(replica)
        if line is None:
            return None
        at = line.address
        return CacheSource(at.board_id, at.host, at.port, tokens, cache_key(at.key), at.fingerprint)

    async def _streamed(
        self, request: GenerateRequest, replica: str
    ) -> AsyncGenerator[Event, None]:
        """Yield the events that come through Ray."""
        handle = self._streams.options(session_id=replica)
        method = handle.embed if isinstance(request, EmbedRequest) else handle.generate
        # In a context of its own: Ray's request routers match waiting calls by the id of the HTTP
        # request, and the calls of one request for several choices would be mixed up.
        response = contextvars.Context().run(method.remote, request)
        where = replica  # until the board sends its name, which is more readable
        try:
            while True:
                try:
                    event = await self._translated(response.__anext__, where)
                except StopAsyncIteration:
                    return
                if isinstance(event, Accepted):
                    where = event.board_id
                yield event
        finally:
            # Neither dropping the response nor cancelling its consumer stops the board. For a call
            # that never reached a replica Ray raises an error that was handled already once more.
            with contextlib.suppress(RayError, RayServeException):
                response.cancel()

    async def reports(self) -> list[BoardReport]:
        """Collect one report from every board that answers in time.

        Replicas with a connection are asked over it; without any connection, one Ray broadcast asks
        them all. Ray collects its answers as a whole, so that a single silent replica fails it;
        then every replica that Ray lists is asked alone, including those without an earlier report.
        """
        self.complete = False
        self._asked = listed = self._replicas.listed()
        lines = self._lines_to(listed)
        near = await asyncio.gather(*(self._reported(line) for line in lines.values()))
        reports = [report for report in near if report is not None]
        if len(reports) < len(listed) or not listed:
            reports += await self._reports_by_ray(frozenset(one.replica for one in reports))
        else:
            await self._replicas.forget_dead()
            self.complete = True
        for report in reports:
            self._seek(report.replica)
        return reports

    def _lines_to(self, replicas: Iterable[str]) -> dict[str, BoardConnection]:
        if self._channels is None:
            return {}
        found = {replica: self._channels.line(replica) for replica in replicas}
        return {replica: line for replica, line in found.items() if line is not None}

    async def _reported(self, line: BoardConnection) -> BoardReport | None:
        """Return a report over a connection; None if Ray must be used."""
        try:
            found: BoardReport = await asyncio.wait_for(line.ask("report"), self._report_timeout_s)
        except (ChannelLost, RkserveError, TimeoutError, asyncio.TimeoutError):  # two before 3.11
            return None
        return found

    async def _reports_by_ray(self, known: frozenset[str]) -> list[BoardReport]:
        """Collect the reports of all replicas except ``known`` ones."""
        reports = [] if known else await self._broadcast()
        reported = known | {report.replica for report in reports}
        left = self._replicas.listed() - reported
        later, _ = await asyncio.gather(self._ask_each(left), self._replicas.forget_dead())
        self.complete = all(isinstance(answer, BoardReport | BoardGone) for answer in later)
        return [*reports, *(answer for answer in later if isinstance(answer, BoardReport))]

    async def _broadcast(self) -> list[BoardReport]:
        """Return the answers of all replicas at once; nothing if one of them is silent."""
        broadcast = contextvars.Context().run(self._handle.broadcast, "report")

        async def collect() -> list[Any]:
            try:
                found: list[Any] = await broadcast.results_async(
                    timeout_s=self._report_timeout_s, return_exceptions=True
                )
            except DeploymentUnavailableError:
                return []  # no replica at all
            return found

        try:
            answers = await self._translated(collect, self._group)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            if not self._replicas.listed():
                raise BoardFailed(self._group, "no report within the time limit") from None
            return []
        return [answer for answer in answers if isinstance(answer, BoardReport)]

    def _seek(self, replica: str) -> None:
        """Open a connection to that replica before a request needs it."""
        if self._channels is None:
            return

        async def find() -> ChannelAddress | None:
            found: ChannelAddress | None = await self.ask(
                replica, "channel", timeout_s=self._report_timeout_s
            )
            return found

        self._channels.seek(replica, find)

    async def _ask_each(self, replicas: Iterable[str]) -> list[BoardReport | BaseException]:
        limit_s = self._report_timeout_s
        asked = (self._ask_by_ray(one, "report", timeout_s=limit_s) for one in sorted(replicas))
        answers: list[BoardReport | BaseException]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return answers

    async def ask(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method of that replica's board; see ``BoardLink``."""
        channels = self._channels
        line = None if channels is None else channels.line(replica)
        if line is not None and method in METHODS:
            try:
                return await asyncio.wait_for(line.ask(method, *args), timeout_s)
            except ChannelLost:
                log.debug("%s of replica %s goes through Ray", method, replica)
            except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                raise BoardSilent(replica, f"nothing came within {timeout_s:g} s") from None
        return await self._ask_by_ray(replica, method, *args, timeout_s=timeout_s)

    async def _ask_by_ray(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        call = getattr(self._handle.options(session_id=replica), method)
        response = contextvars.Context().run(call.remote, *args)

        async def answer() -> Any:
            return await response

        try:
            return await self._translated(lambda: asyncio.wait_for(answer(), timeout_s), replica)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            raise BoardSilent(replica, f"nothing came within {timeout_s:g} s") from None
        except _Unlisted as exc:
            if await self._replicas.is_dead(replica):
                raise BoardGone(replica, "its replica has ended") from exc
            # The caller treats it as a board in an unknown state.
            raise BoardFailed(replica, exc.reason) from exc
        finally:
            with contextlib.suppress(RayError, RayServeException):
                response.cancel()

    async def ask_all(
        self, method: str, *args: Any, timeout_s: float, take: Callable[[Any], None]
    ) -> None:
        """Call a method of every board that Ray lists; see ``BoardLink``."""

        async def one(answer: Awaitable[Any]) -> None:
            take(await answer)

        listed = self._replicas.listed()
        lines = self._lines_to(listed)
        if listed and len(lines) == len(listed) and method in METHODS:
            await wait_for_all([one(line.ask(method, *args)) for line in lines.values()], timeout_s)
            return
        try:
            answers = await asyncio.wait_for(self._replicas.broadcast(method, *args), timeout_s)
        except (RayError, RayServeException, TimeoutError, asyncio.TimeoutError):
            return  # no answer at all; a call to each replica alone shows why
        await wait_for_all([one(answer) for answer in answers], timeout_s)

    def has_new(self) -> bool:
        """Return whether Ray lists a replica that the last round of reports did not ask."""
        return not self._replicas.listed() <= self._asked

    async def has_running(self) -> bool:
        """Return whether a board of this group may run, from Serve's own status; True if that is
        not there.
        """
        try:
            deployment = await self._status()
        except (RayError, RayServeException) as exc:
            log.warning("the status of group %s is not known: %s", self._group, exc)
            return True
        return deployment is not None and any(
            number
            for state, number in deployment.replica_states.items()
            if state not in NOT_RUNNING
        )

    async def start_failure(self) -> BoardStartFailed | None:
        """Return the latest start failure of a board of this group, from Serve's own status."""
        deployment = await self._status()
        return BoardStartFailed.parse(deployment.message) if deployment else None

    async def _status(self) -> DeploymentStatusOverview | None:
        """Return Serve's status of this group's deployment."""
        status = await asyncio.to_thread(serve.status)  # a blocking call to Serve's controller
        application = status.applications.get(self._handle.app_name)
        return application and application.deployments.get(self._handle.deployment_name)

    async def _translated(self, call: Callable[[], Awaitable[_T]], where: str) -> _T:
        """Await a call to a board, with Ray's exceptions translated.

        Raises:
            RkserveError: raised by the board itself.
            BoardGone: its replica has ended.
            _Unlisted: Ray sends it nothing any more, though it may still be at work.
            BoardFailed: Ray could not reach it; whether it continues is unknown.
        """
        try:
            return await call()
        except RayTaskError as exc:
            if isinstance(exc.cause, RkserveError):
                raise exc.cause from None
            log.exception("board %s raised what it should not", where)
            raise BoardFailed(where, "an internal error; see the board's log") from exc
        except ActorDiedError as exc:
            raise BoardGone(where, "its replica died") from exc
        except (RayError, RayServeException) as exc:
            # Known by its name only: Ray pickles that class with its module.
            if type(exc).__name__ == "ReplicaGone":
                raise _Unlisted(where, "its replica is being ended, or has (ReplicaGone)") from exc
            raise BoardFailed(where, f"Ray could not reach it ({type(exc).__name__})") from exc


async def wait_for_all(calls: Iterable[Coroutine[Any, Any, None]], timeout_s: float) -> None:
    """Wait for calls with a time limit. Failed ones are left out; a call to the replica alone shows
    why.
    """
    waits_for = [asyncio.ensure_future(one) for one in calls]
    if not waits_for:
        return
    try:
        await asyncio.wait(waits_for, timeout=timeout_s)
    finally:
        for waiting in waits_for:
            waiting.cancel()
        await asyncio.gather(*waits_for, return_exceptions=True)


class Replicas:
    """The replicas that a handle routes to, and those that have left its table and may still run.

    This is the only reader of the handle's routing table, for which Ray has no public interface. A
    draining replica leaves that table long before it stops generating.
    """

    def __init__(self, handle: Any, timeout_s: float) -> None:
        self._handle = handle
        self._timeout_s = timeout_s
        self._met: dict[str, Any] = {}  # by unique id, Ray's own object

    def listed(self) -> frozenset[str]:
        """Return the IDs of those in the handle's routing table now; none before its first call."""
        # Each of these may not be there before the handle's first call.
        router = self._handle._router  # noqa: SLF001 # no public way
        inner = None if router is None else router._asyncio_router  # noqa: SLF001 # no public way
        table = None if inner is None else inner._request_router  # noqa: SLF001 # no public way
        if table is None:
            return frozenset()
        # Another thread may change the table: a copy first.
        found = {one.replica_id.unique_id: one for one in list(table.curr_replicas.values())}
        self._met |= found
        return frozenset(found)

    async def broadcast(self, method: str, *args: Any) -> list[Awaitable[Any]]:
        """Call a method of every listed replica; return an awaitable for each answer.

        One broadcast costs half of as many single calls, which Ray lets each replica accept first.
        Raises Ray's error if there is no replica.
        """
        response = contextvars.Context().run(self._handle.broadcast, method, *args)
        # In public Ray only gives all answers at once, so that the slowest would hide the others.
        results = await response._fetch_replica_results_async()  # noqa: SLF001 # no public way
        return [result.get_async() for result in results]

    async def forget_dead(self) -> None:
        """Forget replicas that have left the table and ended since."""
        left = self._met.keys() - self.listed()
        await asyncio.gather(*(self.is_dead(replica) for replica in left))

    async def is_dead(self, replica: str) -> bool:
        """Return whether a replica has ended, which only Ray's status of its process proves."""
        met = self._met.get(replica)
        if met is None:
            return True  # it was found dead before: every known replica was in the table once
        try:
            await asyncio.wait_for(met.get_queue_len(deadline_s=self._timeout_s), self._timeout_s)
        except ActorDiedError:
            self._met.pop(replica, None)
            return True
        except (RayError, TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            return False
        return False
