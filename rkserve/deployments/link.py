"""The token path over Ray: one group's boards behind a deployment handle.

The only place that knows how requests and events travel between Router and Board, and that turns
Ray's exceptions into ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException

from rkserve.errors import BoardFailed, BoardSilent, BoardStartFailed, RkserveError
from rkserve.messages import Accepted, BoardReport, Event, GenerateRequest

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class RayLink:
    """``BoardLink`` over Ray's handle of a Board deployment."""

    def __init__(self, handle: Any, group: str, report_timeout_s: float) -> None:
        self._streams = handle.options(stream=True)
        self._handle = handle
        self._group = group
        self._report_timeout_s = report_timeout_s
        self._heard: set[str] = set()  # replicas that answered the last complete broadcast

    async def open(self, request: GenerateRequest, replica: str) -> AsyncGenerator[Event, None]:
        """Generate on that replica; see ``BoardLink``."""
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
        is silent fails it. Then every replica that was heard before is asked by itself.
        """
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
            return await self._ask_each()
        reports = [answer for answer in answers if isinstance(answer, BoardReport)]
        self._heard = {report.replica for report in reports}
        return reports

    async def _ask_each(self) -> list[BoardReport]:
        limit_s = self._report_timeout_s
        asked = [
            asyncio.create_task(self.ask(replica, "report", timeout_s=limit_s))
            for replica in sorted(self._heard)
        ]
        if not asked:
            raise BoardFailed(self._group, "no report within the time limit")
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, BoardReport)]

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
        finally:
            with contextlib.suppress(RayError, RayServeException):
                response.cancel()

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
            BoardFailed: its replica is gone, or Ray could not reach it.
        """
        try:
            return await call()
        except RayTaskError as exc:
            if isinstance(exc.cause, RkserveError):
                raise exc.cause from None
            log.exception("board %s raised what it should not", where)
            raise BoardFailed(where, "an internal error; see the board's log") from exc
        except RayActorError as exc:
            raise BoardFailed(where, "its replica died") from exc
        except (RayError, RayServeException) as exc:
            raise BoardFailed(where, f"Ray could not reach it ({type(exc).__name__})") from exc
