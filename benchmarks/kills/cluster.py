"""A Ray cluster for the kill run, of several nodes with a board each; it ends with its stdin.

A node can be cut off as by a power failure, and another one joined. Only processes that were
started here are stopped here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

from rkserve.app import build
from rkserve.bench.processes import BenchFailed, Json, serve_commands
from rkserve.native.sim.build import ensure_built

HOST, APP = "127.0.0.1", "rkserve"
RELEASE = "1.3.0"
# A node that is lost is noticed after two seconds, where its connections do not say so at once.
_SYSTEM = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}


class Nodes:
    """The cluster and the nodes with boards, by their numbers."""

    def __init__(self) -> None:
        self._cluster: Any = None
        self._command: Json = {}
        self._nodes: dict[int, Any] = {}

    def start(self, command: Json) -> Json:
        """Start Ray, so many nodes, and the application on them."""
        self._command = command
        folder = Path(command["folder"])
        head = {
            "num_cpus": 2,
            "include_dashboard": False,
            "temp_dir": str(folder / "ray"),
            "_system_config": _SYSTEM,
        }
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        ray.init(address=self._cluster.address, log_to_driver=False, configure_logging=False)
        http = {"host": HOST, "port": command["port"]}
        serve.start(proxy_location="HeadOnly", http_options=http)
        group = {
            "name": "kills",
            "model": command["model"],
            "library": str(ensure_built(RELEASE)),
            "prompt_cache": {"park": False},
            "max_boards": 64,
            **command["group"],
        }
        args = {
            "boards": [group],
            "state_dir": "~/state",
            "router": command["router"],
            "coordinator": {"data_dir": str(folder / "data")},
        }
        target = serve.RunTarget(build(args), name=APP, route_prefix="/")
        # How many boards there are is for Serve to find out, which a call that waits would not see.
        serve.run_many([target], wait_for_applications_running=False)
        for number in range(command["boards"]):
            self.join({"node": number})
        return {}

    def join(self, command: Json) -> Json:
        """Join a node under a number that is free, with a home and a control file of its own."""
        number = command["node"]
        if number in self._nodes:
            raise BenchFailed(f"node {number} is there")
        home = Path(self._command["folder"]) / f"home-{number}"
        home.mkdir(exist_ok=True)
        environ = {
            "HOME": str(home),
            "RKSIM_CONTROL": str(home / "control"),
            "RKSIM_TIME_SCALE": repr(self._command["time_scale"]),
            "RKSIM_LOAD_MS": repr(self._command["load_ms"]),
        }
        self._nodes[number] = self._cluster.add_node(
            num_cpus=1,
            resources={"rknpu": 1},
            env_vars=environ,
            node_ip_address=f"127.0.1.{number + 1}",  # by which boards of one host are told apart
            include_dashboard=False,
            temp_dir=str(Path(self._command["folder"]) / "ray"),
        )
        return {}

    def lose(self, command: Json) -> Json:
        """Cut a node off."""
        node = self._nodes.pop(command["node"])
        self._cluster.remove_node(node, allow_graceful=False)
        return {}

    def end(self) -> None:
        """End all of it."""
        if self._cluster is not None:
            serve.shutdown()
            ray.shutdown()
            self._cluster.shutdown()


def main() -> None:
    """Serve the kill run."""
    nodes = Nodes()
    steps = {"start": nodes.start, "join": nodes.join, "lose": nodes.lose}
    try:
        serve_commands(lambda command, _: steps[command["do"]](command))
    finally:
        nodes.end()


if __name__ == "__main__":
    main()
