"""Ray's autoscaling policy for real boards: one replica for every node that has an NPU.

Only nodes that join or leave the Ray cluster change the target. It runs in Serve's controller
several times a second, pickled by value with this module: so it imports Ray inside functions, never
blocks, and imports nothing of rkserve.
"""

from __future__ import annotations

from typing import Any

RESOURCE = "rknpu"


class FollowNodes:
    """Counts the living nodes that offer ``share`` of an NPU."""

    def __init__(self, share: float = 1.0) -> None:
        self._share = share

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Return the target number of replicas, and the state for Ray's next call."""
        import ray

        boards = sum(
            1
            for node in ray.nodes()
            if node["Alive"] and node["Resources"].get(RESOURCE, 0.0) >= self._share
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
