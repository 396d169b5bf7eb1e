"""The token path: one group's boards behind a deployment handle, and what carries their tokens.

The only place that knows how requests and events travel between Router and Board, and that turns
Ray's exceptions into ours. Calls are Ray's, and so are their limits, cancellation and errors. The
events of an answer come over a connection to its board (``channel_router``), or through Ray where
there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from rkserve.deployments.channel_board import Address
from rkserve.deployments.channel_inbox import Inbox
from rkserve.deployments.channel_router import Channels, RouterLine
from rkserve.deployments.replicas import Replicas
from rkserve.errors import BoardFailed, BoardGone, BoardSilent, BoardStartFailed, RkserveError
from rkserve.messages import Accepted, BoardReport, Event, Finished, GenerateRequest

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class _Unlisted(BoardFailed):
    """The replica has left Ray's table: it is drained, or has ended."""


class RayLink:
    """``BoardLink`` over Ray's handle of a Board deployment."""

    def __init__(
        self,
        handle: Any,
        group: str,
        report_timeout_s: float,
        channels: Channels | None = None,
    ) -> None:
        """Without ``channels`` events come through Ray, which whoever only asks has no need of."""
        self._channels = channels
        self._answers: set[asyncio.Task[bool]] = set()  # of calls that go on; see ``_carried``
        self._streams = handle.options(stream=True)
        self._handle = handle
        self._group = group
        self._report_timeout_s = report_timeout_s
        self._replicas = Replicas(handle, report_timeout_s)
        self._complete = False

    @property
    def complete(self) -> bool:
        """Whether the last round of reports left nobody out; see ``BoardLink``."""
        return self._complete

    async def open(self, request: GenerateRequest, replica: str) -> AsyncGenerator[Event, None]:
        """Generate on that replica; see ``BoardLink``."""
        channels = self._channels
        line = None if channels is None else channels.line(replica)
        if channels is not None and line is not None:
            # The connection may end before the board has read the call: then nothing was run.
            async with aclosing(self._carried(request, replica, line)) as carried:
                async for event in carried:
                    if event is None:
                        break
                    yield event
                else:
                    return
        if channels is not None:
            channels.streams["ray"] += 1
        async with aclosing(self._streamed(request, replica)) as streamed:
            async for event in streamed:
                yield event

    async def _carried(
        self, request: GenerateRequest, replica: str, line: RouterLine
    ) -> AsyncGenerator[Event | None, None]:
        """Yield the events that come over the connection; None where the board has lost that."""
        inbox = line.enter()
        call = self._handle.options(session_id=replica).generate_on
        response = contextvars.Context().run(call.remote, request, line.number, inbox.stream)
        answer = asyncio.ensure_future(self._answer(response, line.board_id, inbox))
        taken = finished = False
        try:
            while (event := await inbox.next()) is not None:
                if not taken and self._channels is not None:
                    taken = True
                    self._channels.streams["channel"] += 1
                finished = isinstance(event, Finished)
                yield event
            if answer.done() and not answer.result():
                yield None
        finally:
            line.leave(inbox)
            if finished:
                # The call is about to end by itself: nobody need wait for that.
                self._answers.add(answer)
                answer.add_done_callback(self._answers.discard)
            else:
                answer.cancel()
                with contextlib.suppress(RayError, RayServeException):
                    response.cancel()

    async def _answer(self, response: Any, where: str, inbox: Inbox) -> bool:
        """Wait for the end of a call, and let the reader of its events know of it."""
        reached = True

        async def answered() -> bool:
            nonlocal reached
            try:
                found: bool = await response
            except RayTaskError:
                raise
            except BaseException:
                reached = False
                raise
            return found

        try:
            carried = await self._translated(answered, where)
        except RkserveError as exc:
            inbox.answered(exc, reached=reached)
            return True
        except BaseException as exc:  # whoever reads must not wait for ever
            reason = f"its call ended unheard ({type(exc).__name__})"
            inbox.answered(BoardFailed(where, reason), reached=False)
            raise
        inbox.answered(None, reached=carried)
        if not carried:
            inbox.end()
        return carried

    async def _streamed(
        self, request: GenerateRequest, replica: str
    ) -> AsyncGenerator[Event, None]:
        """Yield the events that come through Ray."""
        method = self._streams.options(session_id=replica).generate
        # In a context of its own: Ray's request routers match waiting calls by the id of the HTTP
        # request, and the calls of one request for several choices would be mixed up.
        response = contextvars.Context().run(method.remote, request)
        where = replica  # until the board says its name, which means more to whoever reads it
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
            # that never reached a replica Ray raises here once more what has been said already.
            with contextlib.suppress(RayError, RayServeException):
                response.cancel()

    async def reports(self) -> list[BoardReport]:
        """Collect one report from every board that answers in time.

        One broadcast asks them all. Ray collects its answers as a whole: a single replica that
        is silent fails it. Then every replica that Ray lists now is asked by itself, also one that
        was never heard.
        """
        self._complete = False
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
            answers = []
            if not self._replicas.listed():
                raise BoardFailed(self._group, "no report within the time limit") from None
        reports = [answer for answer in answers if isinstance(answer, BoardReport)]
        left = self._replicas.listed() - {report.replica for report in reports}
        later, _ = await asyncio.gather(self._ask_each(left), self._replicas.forget_dead())
        reports += [answer for answer in later if isinstance(answer, BoardReport)]
        self._complete = all(isinstance(answer, BoardReport | BoardGone) for answer in later)
        for report in reports:
            self._seek(report.replica)
        return reports

    def _seek(self, replica: str) -> None:
        """Have a connection to that replica before a request needs it."""
        if self._channels is None:
            return

        async def find() -> Address | None:
            found: Address | None = await self.ask(
                replica, "channel", timeout_s=self._report_timeout_s
            )
            return found

        self._channels.seek(replica, find)

    async def _ask_each(self, replicas: Iterable[str]) -> list[BoardReport | BaseException]:
        limit_s = self._report_timeout_s
        asked = (self.ask(replica, "report", timeout_s=limit_s) for replica in sorted(replicas))
        answers: list[BoardReport | BaseException]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return answers

    async def ask(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method of that replica's board; see ``BoardLink``."""
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
            # To whoever asks it is one more board of which nothing is known now.
            raise BoardFailed(replica, exc.reason) from exc
        finally:
            with contextlib.suppress(RayError, RayServeException):
                response.cancel()

    async def ask_all(
        self, method: str, *args: Any, timeout_s: float, heard: Callable[[Any], None]
    ) -> None:
        """Call a method of every board that Ray lists; see ``BoardLink``."""

        async def one(answer: Awaitable[Any]) -> None:
            heard(await answer)

        try:
            answers = await asyncio.wait_for(self._replicas.broadcast(method, *args), timeout_s)
            waits_for = [asyncio.ensure_future(one(answer)) for answer in answers]
        except (RayError, RayServeException, TimeoutError, asyncio.TimeoutError):
            return  # nobody was heard; asked by itself, each says why
        try:
            await asyncio.wait(waits_for, timeout=timeout_s)
        finally:
            for waiting in waits_for:
                waiting.cancel()
            await asyncio.gather(*waits_for, return_exceptions=True)

    async def start_failure(self) -> BoardStartFailed | None:
        """Return the latest failure of a board of this group to start, from Serve's own status."""
        status = await asyncio.to_thread(serve.status)  # a blocking call to Serve's controller
        application = status.applications.get(self._handle.app_name)
        deployment = application and application.deployments.get(self._handle.deployment_name)
        return BoardStartFailed.parse(deployment.message) if deployment else None

    async def _translated(self, call: Callable[[], Awaitable[_T]], where: str) -> _T:
        """Await a call to a board, with Ray's exceptions turned into ours.

        Raises:
            RkserveError: what the board raised itself.
            BoardGone: its replica has ended.
            _Unlisted: Ray sends it nothing any more, though it may be at work still.
            BoardFailed: Ray could not reach it; whether it goes on is not known.
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
