"""A request for a model that sleeps wakes it, where it shall: once for all requests of a Router.

It knows what the cluster shall be, who reports, and how to ask the Coordinator; what becomes of the
request afterwards it does not: that goes its way to a board, and waits there for the load.
"""

from __future__ import annotations

import asyncio
import logging
import time

from rkserve.control.calls import Call
from rkserve.control.operations import OperationKind
from rkserve.control.sleep_policy import REQUEST, requested, wakeable
from rkserve.core.errors import ModelAsleep, RkserveError
from rkserve.fleet.fleet import Fleet
from rkserve.router.coordinator_client import Cluster

log = logging.getLogger(__name__)

# Whoever comes so soon after a wake-up that failed is told the same: each one is an operation.
FAILED_S = 1.0


class Waking:
    """Use it from one event loop."""

    def __init__(self, cluster: Cluster, fleet: Fleet, limit_s: float) -> None:
        """Waits ``limit_s`` for the Coordinator to say that boards are about to load."""
        self._cluster = cluster
        self._fleet = fleet
        self._limit_s = limit_s
        self._going_on: dict[str, asyncio.Task[int]] = {}
        self._failed: dict[str, tuple[float, ModelAsleep]] = {}

    def needed(self, model: str) -> bool:
        """Whether a request for the model finds no board awake, and wakes one."""
        desired = self._cluster.desired
        return bool(desired.pauses) and wakeable(desired, model, self._fleet.reports(model))

    async def ready(self, model: str) -> int:
        """Return once the model's boards are awake or about to be: from which epoch on, or 0.

        Raises:
            ModelAsleep: it cannot be woken now.
        """
        if not self.needed(model):
            return 0
        failed_s, error = self._failed.get(model, (float("-inf"), None))
        if error is not None and time.monotonic() - failed_s < FAILED_S:
            raise ModelAsleep(error.model, error.reason)
        task = self._going_on.get(model)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._wake(model))
            self._going_on[model] = task
            task.add_done_callback(lambda done: self._ended(model, done))
        # One client that leaves must not take the others' wake-up with it.
        return await asyncio.shield(task)

    async def _wake(self, model: str) -> int:
        call = Call(OperationKind.WAKE, requested(model), who=REQUEST, background=True)
        try:
            outcome = await asyncio.wait_for(self._cluster.perform(call), self._limit_s)
        except RkserveError as exc:
            raise ModelAsleep(model, exc.message.rstrip(".")) from exc
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            reason = f"the Coordinator did not answer within {self._limit_s:g} s"
            raise ModelAsleep(model, reason) from None
        error = outcome.operation.error
        if error is not None:
            raise ModelAsleep(model, error.message.rstrip("."))
        return max(outcome.operation.epoch, self._cluster.desired.epoch)

    def _ended(self, model: str, task: asyncio.Task[int]) -> None:
        del self._going_on[model]
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, ModelAsleep):
            log.warning("%s", error.message)
            self._failed[model] = (time.monotonic(), error)
        else:
            self._failed.pop(model, None)
