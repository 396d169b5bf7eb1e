"""Asks the other Routers of the application for what only they know; this is Ray's side of it."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from rkserve.deployments.generations import ROUTERS
from rkserve.errors import BoardFailed
from rkserve.messages import GenerationInfo


class RayPeers:
    """``Peers`` over Ray's handle of the Router's own deployment."""

    def __init__(self, timeout_s: float) -> None:
        context = serve.get_replica_context()
        self._handle: Any = serve.get_deployment_handle(context.deployment, context.app_name)
        self._timeout_s = timeout_s

    async def homeless(self) -> list[GenerationInfo]:
        """Return the generations of all Routers that no board has. Raises ``BoardFailed``."""
        # In a context of its own: the request that asks is not theirs.
        broadcast = contextvars.Context().run(self._handle.broadcast, "homeless")
        try:
            answers: list[list[GenerationInfo]] = await broadcast.results_async(
                timeout_s=self._timeout_s
            )
        except (RayError, RayServeException, TimeoutError, asyncio.TimeoutError) as exc:
            raise BoardFailed(ROUTERS, f"no answer ({type(exc).__name__})") from exc
        return [info for answer in answers for info in answer]
