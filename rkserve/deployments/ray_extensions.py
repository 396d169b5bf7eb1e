"""Extensions of Ray Serve: the request router for boards, and the autoscaling policy.

The request router sends a request to the replica chosen by the Router; Ray's handle carries the
choice as the session ID. The policy wants one replica for every node that offers a resource. It
runs in Serve's controller several times a second, and never blocks. Ray pickles this module by
value: it has no imports from rkserve and no globals shared with it.
"""

from __future__ import annotations

from typing import Any

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


class FollowNodes:
    """Counts the living nodes that offer ``share`` of a custom resource.

    Only nodes that join or leave the Ray cluster change the target.
    """

    def __init__(self, share: float = 1.0, resource: str = "rknpu") -> None:
        self._share, self._resource = share, resource

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the target number of replicas, and the state for Ray's next call."""
        import ray

        boards = sum(
            1
            for node in ray.nodes()
            if node["Alive"] and node["Resources"].get(self._resource, 0.0) >= self._share
        )
        return (
            target(boards, context.target_num_replicas, context.current_num_replicas),
            dict(context.policy_state),
        )


def target(boards: int, current_target: int, running: int) -> int:
    """Return the new number of replicas for ``boards`` boards.

    A replica of a dead node counts as running until Serve notices. Lowering the target before that
    would make Serve stop a healthy replica on another board; so the target waits until the dead one
    no longer counts.
    """
    if boards < current_target and running > boards:
        return current_target
    return boards
