"""Changes to ``ray start`` on a head, made by Ray's own hook (``RAY_START_HOOK``).

The hook gets the parameters of ``ray start`` before it starts anything. Ray's dashboard imports for
seconds, and Ray waits for it before it starts the raylet. No request needs the dashboard: it starts
after the raylet here, with a lower priority than the processes that requests need. Workers are
forks of one process that has imported Ray (``ray_worker``).
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from ray._private import services
from ray._private.node import Node

from rkserve.bringup import ray_worker
from rkserve.bringup.ray_node import RAYLET_RUNS

FORKED_WORKERS = "RKSERVE_FORKED_WORKERS"
DASHBOARD_NICENESS = 10
REGISTERED_S = 30.0  # Ray's own limit
POLL_S = 0.1


def tune(params: Any, head: bool) -> None:
    """Leave out Ray Client's server, fork workers, and start the dashboard last.

    Args:
        params: Ray's ``RayParams`` of this start.
        head: False for a node that joins a cluster, which has neither, and one worker.
    """
    if not head:
        return
    params.ray_client_server_port = None  # no option of `ray start` leaves it out
    if os.environ.get(FORKED_WORKERS) != "0":
        params.worker_path = ray_worker.__file__
    start_api_server, start_ray_processes = Node.start_api_server, Node.start_ray_processes
    asked: dict[str, Any] = {}

    def later(_: Node, **options: Any) -> None:
        asked.update(options)

    def raylet_first(node: Node) -> None:
        start_ray_processes(node)
        if _has_registered(node):
            sys.stdout.write(f"{RAYLET_RUNS}\n")
            sys.stdout.flush()
        os.nice(DASHBOARD_NICENESS)  # of this process, which only waits from here on, too
        start_api_server(node, **asked)

    Node.start_api_server, Node.start_ray_processes = later, raylet_first


def _has_registered(node: Node) -> bool:
    """Wait for the raylet's registration; Ray reports it if that does not come."""
    deadline_s = time.monotonic() + REGISTERED_S
    while time.monotonic() < deadline_s:
        try:
            services.get_node(node.gcs_address, node.node_id)
        except RuntimeError:
            time.sleep(POLL_S)
        else:
            return True
    return False
