"""The replicas of a deployment, as Ray's handle knows them; and whether one has ended.

The only place that reads the handle's routing table: Ray offers no public way to it. A replica that
is being drained leaves that table long before it stops generating.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable
from typing import Any

from ray.exceptions import ActorDiedError, RayError


class Replicas:
    """The replicas that a handle routes to, and those that have left its table and may go on."""

    def __init__(self, handle: Any, timeout_s: float) -> None:
        self._handle = handle
        self._timeout_s = timeout_s
        self._met: dict[str, Any] = {}  # by unique id, Ray's own object

    def listed(self) -> frozenset[str]:
        """Return the ids of those in the handle's routing table now; none before its first call."""
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
        """Call a method of every replica that is listed now; return an answer to wait for of each.

        One broadcast costs half of as many single calls, which Ray lets each replica accept first.
        Raises what Ray raises where there is no replica.
        """
        response = contextvars.Context().run(self._handle.broadcast, method, *args)
        # In public Ray only gives all answers at once, so that the slowest would hide the others.
        results = await response._fetch_replica_results_async()  # noqa: SLF001 # no public way
        return [result.get_async() for result in results]

    async def forget_dead(self) -> None:
        """Forget those that have left the table and ended since."""
        left = self._met.keys() - self.listed()
        await asyncio.gather(*(self.is_dead(replica) for replica in left))

    async def is_dead(self, replica: str) -> bool:
        """Whether a replica has ended, which is certain only if Ray says so of its process."""
        met = self._met.get(replica)
        if met is None:
            return True  # it was found dead before: none is known that was not in the table once
        try:
            await asyncio.wait_for(met.get_queue_len(deadline_s=self._timeout_s), self._timeout_s)
        except ActorDiedError:
            self._met.pop(replica, None)
            return True
        except (RayError, TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            return False
        return False
