"""Ray's request router for boards: sends a request to the replica chosen by the Router.

Ray's handle carries the choice as the session ID. Ray pickles this module by value, so it imports
nothing of rkserve at module level and shares no globals with it.
"""

from __future__ import annotations

from ray.serve.exceptions import RayServeException
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica


class ReplicaGone(RayServeException):
    """The chosen replica left between the choice and the call.

    Callers catch the base class: this one is pickled with its module.
    """


class PickReplica(RequestRouter):
    """Routes by ``handle.options(session_id=<replica's unique id>)``."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the chosen replica, or fail the request at once if it is gone.

        The error goes into the request's future: Ray would only log an error raised here, and the
        request would wait forever.
        """
        if pending_request is None:
            return [candidate_replicas]
        # Without it Ray's retry loop never sleeps while the replica cannot take the request.
        pending_request.routing_context.should_backoff = True
        wanted = pending_request.metadata.session_id
        chosen = [r for r in candidate_replicas if r.replica_id.unique_id == wanted]
        if chosen:
            return [chosen]
        if not pending_request.future.done():
            pending_request.future.set_exception(ReplicaGone(wanted))
        return [candidate_replicas[:1]]  # not empty, so that Ray's loop ends for this request
