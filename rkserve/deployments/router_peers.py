"""Calls over Ray handles: of Routers to each other and to the Coordinator, and of that to them.

Ray's exceptions become rkserve's here.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from rkserve.core.answer_metrics import RouterUsage
from rkserve.core.api_keys import SpentLimits
from rkserve.core.board_report import OTHER_ROUTERS, GenerationInfo, RouterGenerations
from rkserve.core.desired_state import Scope as ClusterScope
from rkserve.core.errors import BoardFailed, CoordinatorAway, RkserveError
from rkserve.core.exposition import RouterFigures
from rkserve.core.logs import LogPage
from rkserve.core.messages import ControlAction
from rkserve.deployments.board_link import Replicas, wait_for_all

if TYPE_CHECKING:
    # What only Routers send each other: the Coordinator has this module without their HTTP.
    from rkserve.api.responses.stored import StoredResponse
    from rkserve.http.gradio_routes import PendingCall
    from rkserve.verdicts.facts import RouterView

log = logging.getLogger(__name__)

SHORT_ID = 8  # characters of a replica ID in place of a name
ANNOUNCE_S = 10.0  # the first Routers begin before there are any to announce themselves to
FAREWELL_S = 2.0
SPENT_S = 2.0


class RayPeers:
    """``Peers`` over Ray's handle of the Router's own deployment."""

    def __init__(self, timeout_s: float) -> None:
        context = serve.get_replica_context()
        self._handle: Any = serve.get_deployment_handle(context.deployment, context.app_name)
        self._timeout_s = timeout_s
        self._replica: str = context.replica_id.unique_id
        self._replicas = Replicas(self._handle, timeout_s)
        self._names: dict[str, str] = {}  # of Routers that have answered, by replica ID

    async def unassigned(self) -> list[GenerationInfo]:
        """Return the generations of all Routers without a board. Raises ``BoardFailed``."""
        answers: list[list[GenerationInfo]] = await self._ask("unassigned")
        return [info for answer in answers for info in answer]

    async def control_unassigned(
        self, generation: str, action: ControlAction, choice: int | None
    ) -> RouterGenerations:
        """Control the Routers' part of a generation without a board. Raises ``BoardFailed``."""
        answers: list[RouterGenerations] = await self._ask(
            "control_unassigned", generation, action, choice
        )
        return RouterGenerations(
            tuple(one for answer in answers for one in answer.done),
            tuple(one for answer in answers for one in answer.refused),
            tuple(one for answer in answers for one in answer.ended),
            any(answer.known for answer in answers),
        )

    async def logs(self, after: Mapping[str, int], tail: int) -> list[LogPage]:
        """Return lines of all Routers; see ``RouterLogs``. Raises ``BoardFailed``."""
        answers: list[LogPage] = await self._ask("logs", dict(after), tail)
        return answers

    async def kept_chain(
        self, owner: str, response_id: str, most_bytes: int | None
    ) -> list[StoredResponse]:
        """Return a response and its predecessors stored by some Router.

        Raises:
            BoardFailed: they did not answer.
        """
        answers: list[list[StoredResponse]] = await self._ask(
            "kept_chain", owner, response_id, most_bytes
        )
        return max(answers, key=len, default=[])

    async def forget_response(self, owner: str, response_id: str) -> bool:
        """Have all Routers remove a response; False if none had it. Raises ``BoardFailed``."""
        return any(await self._ask("forget_response", owner, response_id))

    async def share_gradio(self, pending: PendingCall) -> None:
        """Store a posted call of a Gradio client on all Routers. Raises ``BoardFailed``."""
        await self._ask("keep_gradio", pending)

    async def claim_gradio(self, owner: str, event_id: str, *, cancel: bool) -> bool:
        """Remove such a call from all Routers; False if none has it. Raises ``BoardFailed``."""
        return any(await self._ask("drop_gradio", owner, event_id, cancel))

    async def figures(self, timeout_s: float) -> tuple[Sequence[RouterFigures], Sequence[str]]:
        """Return the metrics of the other Routers; see ``MetricsPeers``."""
        return await self._others("figures", timeout_s)

    async def views(self, timeout_s: float) -> tuple[Sequence[RouterView], Sequence[str]]:
        """Return the shares of the other Routers in the cluster's view; see ``ViewPeers``."""
        return await self._others("cluster_view", timeout_s)

    async def usage(
        self, first_day: int, timeout_s: float
    ) -> tuple[Sequence[RouterUsage], Sequence[str]]:
        """Return the usage at the other Routers since a day; see ``UsagePeers``."""
        return await self._others("key_usage", timeout_s, first_day)

    async def _others(
        self, method: str, timeout_s: float, *args: Any
    ) -> tuple[list[Any], list[str]]:
        """Ask the other Routers for values with their names (``router``).

        Returns those of the Routers that answered in time, and the names of the silent ones.
        """
        if self._replicas.listed() == {self._replica}:
            return [], []
        found: dict[str, Any] = {}

        async def one(answer: Any) -> None:
            if (answered := await answer) is not None:
                replica, value = answered
                found[replica] = value

        # Of a public broadcast, one silent replica would withhold the answers of all.
        until_s = time.monotonic() + timeout_s
        try:
            answers = await asyncio.wait_for(
                self._replicas.broadcast(method, self._replica, *args), timeout_s
            )
        except (RayError, RayServeException, TimeoutError, asyncio.TimeoutError) as exc:
            log.warning("%s of the other Routers is missing: %s", method, type(exc).__name__)
        else:
            left_s = max(0.0, until_s - time.monotonic())
            await wait_for_all([one(answer) for answer in answers], left_s)
        listed = self._replicas.listed() - {self._replica}
        known = {replica: name for replica, name in self._names.items() if replica in listed}
        self._names = known | {replica: one.router for replica, one in found.items()}
        silent = sorted(listed - found.keys())
        return list(found.values()), [self._names.get(one, one[:SHORT_ID]) for one in silent]

    async def began(self, router: str) -> None:
        """Announce a Router's name to the others; see ``MetricsPeers``."""
        await self._notify("router_began", router, timeout_s=ANNOUNCE_S)

    async def ended(self, figures: RouterFigures) -> None:
        """Leave a Router's counts to the others; see ``MetricsPeers``."""
        await self._notify("router_ended", figures, timeout_s=FAREWELL_S)

    async def spent(self, router: str, report: Mapping[str, SpentLimits]) -> None:
        """Report the use of keys' limits at this Router to the others; see ``Callers``."""
        await self._notify("keys_spent", router, dict(report), timeout_s=SPENT_S)

    async def _notify(self, method: str, *args: Any, timeout_s: float) -> None:
        try:
            await _broadcast(self._handle, method, *args, timeout_s=timeout_s)
        except RkserveError as exc:
            # The first Router of all, or the last one, has no others.
            log.info("%s was not sent to the other Routers: %s", method, exc)

    async def _ask(self, method: str, *args: Any) -> list[Any]:
        return await _broadcast(self._handle, method, *args, timeout_s=self._timeout_s)


class RayRouters:
    """``Routers`` over Ray: all Routers of the application, as the Coordinator reaches them."""

    def __init__(self, deployment: str) -> None:
        self._deployment = deployment
        self._app = serve.get_replica_context().app_name
        self._handle: Any = None

    async def abort(
        self, scope: ClusterScope, request_ids: list[str] | None, timeout_s: float
    ) -> int:
        """Have all Routers abort their requests without a board. Raises ``BoardFailed``."""
        if self._handle is None:
            # Routers are deployed after the Coordinator, so the handle is found at the first call.
            find = serve.get_deployment_handle
            try:
                self._handle = await asyncio.to_thread(find, self._deployment, self._app)
            except (RayError, RayServeException) as exc:
                raise BoardFailed(OTHER_ROUTERS, f"not found ({type(exc).__name__})") from exc
        found: list[int] = await _broadcast(
            self._handle, "abort_waiting", scope, request_ids, timeout_s=timeout_s
        )
        return sum(found)


class RayCoordinatorLink:
    """``HeadLink`` over Ray's handle of the Coordinator's deployment."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method of the Coordinator; see ``HeadLink``."""
        # In a context of its own: a client that hangs up must not cancel what the call began.
        remote = getattr(self._handle, method).remote
        response = contextvars.Context().run(remote, *args)

        async def answer() -> Any:
            return await response

        done = False
        try:
            result = await asyncio.wait_for(answer(), timeout_s)
            done = True
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            raise CoordinatorAway(
                f"The Coordinator did not answer '{method}' within {timeout_s:g} s."
            ) from None
        except RayTaskError as exc:
            done = True
            if isinstance(exc.cause, RkserveError):
                raise exc.cause from None
            log.exception("the Coordinator raised what it should not")
            raise CoordinatorAway("The Coordinator failed; its log says why.") from exc
        except (RayError, RayServeException) as exc:
            raise CoordinatorAway(
                f"The Coordinator cannot be reached ({type(exc).__name__}); GET /v1/operations "
                "tells later what became of the call."
            ) from exc
        else:
            return result
        finally:
            if not done:
                # A waiting call must not outlive its caller; one that changes the cluster is
                # the Coordinator's own task, which a cancelled call does not end.
                with contextlib.suppress(RayError, RayServeException):
                    response.cancel()


async def _broadcast(handle: Any, method: str, *args: Any, timeout_s: float) -> list[Any]:
    # In a context of its own: the caller's request is not theirs.
    broadcast = contextvars.Context().run(handle.broadcast, method, *args)
    try:
        answers: list[Any] = await broadcast.results_async(timeout_s=timeout_s)
    except RayTaskError as exc:
        # A Router's own error is its answer.
        if isinstance(exc.cause, RkserveError):
            raise exc.cause from None
        raise BoardFailed(
            OTHER_ROUTERS, f"one of them failed ({type(exc.cause).__name__})"
        ) from exc
    except (RayError, RayServeException, TimeoutError, asyncio.TimeoutError) as exc:
        raise BoardFailed(OTHER_ROUTERS, f"no answer ({type(exc).__name__})") from exc
    return answers
