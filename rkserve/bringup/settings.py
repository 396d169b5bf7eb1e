"""Ray's settings and ports on the head and on boards, each with its reason.

This is the only place that states them: ``rkserve up`` and ``rkserve join`` start Ray with them,
and the head sends a board's part in its answer to ``rkserve join``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rkserve.bringup.processes import BOARD, HEAD
from rkserve.config.board_group import CPU, NPU
from rkserve.deployments.haproxy import FLAG, FORCED_STOP, METRICS_MS, PATIENCE, PROXY_CHECK

GCS_PORT, DASHBOARD_PORT = 6379, 8265
# Ray's default is a third of the memory; rkserve puts no large objects into it.
OBJECT_STORE_BYTES = 100_000_000
# Ray's log monitor copies what workers print to the driver. Nothing of rkserve reads that:
# `rkserve logs` asks the processes, and the dashboard reads the files. It takes 43 MB of an
# idle board's memory (PSS, x86-64), and 1.6 CPU-seconds from a head that starts.
NO_LOG_MONITOR = ("--include-log-monitor=false",)
# It starts and ends machines of a cloud, of which there are none. 49 MB of a head's memory (PSS,
# x86-64), and 4 CPU-seconds from its start; `ray status` on the head is empty without it.
NO_AUTOSCALER = ("--no-monitor",)
SLOW_START = (
    "Ray gives 30 s or less by default; a busy machine or a board with a cold SD card takes longer."
)


@dataclass(frozen=True, slots=True)
class RaySetting:
    """One environment variable of Ray's processes, the nodes that need it, and the reason."""

    name: str
    value: str
    reason: str
    nodes: tuple[str, ...] = (HEAD, BOARD)


SETTINGS: tuple[RaySetting, ...] = (
    RaySetting(
        "RAY_AUTH_MODE", "token", "Without a token every host that reaches Ray's ports runs code."
    ),
    RaySetting(
        "RAY_worker_niceness",
        "0",
        "Ray runs its workers at nice 15 by default, and with them an engine that is not root's. "
        "Beside two busy programs on two cores, first tokens came 12 ms after their prefill (34 at "
        "most); with replicas at nice 15 it was 14 (54).",
    ),
    RaySetting(
        "RAY_START_HOOK",
        "rkserve.bringup.ray_start.tune",
        "`ray start` waits for Ray's dashboard, which imports for seconds, before it starts the "
        "raylet, and starts a server for Ray Client, which rkserve does not use: here the "
        "dashboard follows the raylet, after the first answer if `rkserve up` starts Ray, and "
        "there is no such server.",
        (HEAD,),
    ),
    RaySetting(
        "RKSERVE_FORKED_WORKERS",
        "1",
        "Ray executes a Python for each worker, which imports Ray and Serve anew. Workers that are "
        "forks of one process save a head with four simulated boards 15 of 32 s until its first "
        "answer, and 440 of its 1,730 MB. With 0 all are executed.",
        (HEAD,),
    ),
    RaySetting(
        "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT",
        "1000000",
        "Serve gives up on a deployment after three failed starts per replica by default, and a "
        "node that is lost counts as one: a board with a bad card, or boards that come and go, "
        "would end the deployment of all boards.",
        (HEAD,),
    ),
    RaySetting(
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS",
        str(METRICS_MS),
        "Serve's 100 ms wakes every replica ten times a second: 0.2 percent of a core for an idle "
        "board, 0.5 for a Router.",
    ),
    RaySetting(
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S",
        "0.25",
        "At Serve's 0.1 s an idle controller takes 6.1 percent of a core and the GCS 2.5; at this "
        "3.2 and 1.4, and each board 0.2 less. A replica that ended is replaced 0.15 s later at "
        "most.",
        (HEAD,),
    ),
    RaySetting(
        "RAY_gcs_rpc_server_reconnect_timeout_s",
        "3600",
        "A board's Ray ends after a minute without its head by default, and with it the engine and "
        "its model.",
        (BOARD,),
    ),
    RaySetting(
        "MALLOC_ARENA_MAX",
        "2",
        "The C library has up to eight heaps for each core, of which Ray's threads fill many: 6 MB "
        "of a board with two cores.",
        (BOARD,),
    ),
    RaySetting("RAY_USAGE_STATS_ENABLED", "0", "Ray reports usage to its makers by default."),
    *(
        RaySetting(
            name,
            value,
            "Serve looks every 10 s by default, three times: a killed HAProxy answered again after "
            "30 s, with this after 6.",
            (HEAD,),
        )
        for name, value in PROXY_CHECK.items()
    ),
    *(
        RaySetting(
            name,
            value,
            "Serve gives a replica that answers no health checks its time to end in order, an hour "
            "for a Router, and clients of a frozen one hang as long (one gave up after 90 s); with "
            "this it is killed, after 37 s.",
            (HEAD,),
        )
        for name, value in FORCED_STOP.items()
    ),
    *(RaySetting(name, value, SLOW_START) for name, value in PATIENCE.items()),
)


def settings_of(node: str) -> dict[str, str]:
    """Return the variables of a node of this kind."""
    return {one.name: one.value for one in SETTINGS if node in one.nodes}


def environment_of(node: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a node's Ray; variables that an operator has set win.

    The authentication mode is the exception: a board's Ray without it could not join.
    """
    return {**settings_of(node), **environ, "RAY_AUTH_MODE": "token"}


def sent_to_boards(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a head with this environment sends to its boards."""
    return {**settings_of(BOARD), **({FLAG: "1"} if environ.get(FLAG) == "1" else {})}


def environment_file() -> str:
    """Return the contents of cluster/systemd/rkserve.env."""
    lines = [
        "# Ray's settings on the head and on boards: those that rkserve up and rkserve join set by",
        "# themselves. A value that is changed here wins; keep the file alike on all nodes.",
    ]
    for one in SETTINGS:
        lines += ["", f"# {one.reason}", f"{one.name}={one.value}"]
    return "\n".join(lines) + "\n"


# Those of Ray's workers, by Ray's default; Ray does not start with another port of its own there.
WORKER_PORTS = range(10_002, 20_000)


@dataclass(frozen=True, slots=True)
class NodePorts:
    """The ports of one node's Ray, consecutive from that of the head's GCS or one for a board.

    Fixed, so that a firewall can name them, as are ``WORKER_PORTS``.
    """

    first: int = GCS_PORT

    def options(self) -> Iterator[str]:
        """Yield the options of ``ray start`` that both kinds of nodes have."""
        names = (
            *("node-manager-port", "object-manager-port", "dashboard-agent-grpc-port"),
            *("runtime-env-agent-port", "metrics-export-port", "dashboard-agent-listen-port"),
        )
        yield from (f"--{name}={self.first + at}" for at, name in enumerate(names, 1))

    @property
    def last(self) -> int:
        """The last port."""
        return self.first + 6


def head_options(
    ports: NodePorts, address: str, dashboard_port: int, *, cpu: bool = False
) -> list[str]:
    """Return the options of ``ray start`` on the head; with ``cpu`` it is a CPU board, too."""
    offered = [f"--resources={json.dumps({CPU: 1.0})}"] if cpu else []
    return [
        *("--head", f"--port={ports.first}", f"--node-ip-address={address}"),
        *ports.options(),
        *offered,
        f"--dashboard-port={dashboard_port}",
        *NO_AUTOSCALER,
        *NO_LOG_MONITOR,
        "--disable-usage-stats",
    ]


def board_options(ports: NodePorts, ray_address: str, share: float) -> list[str]:
    """Return the options of ``ray start`` on a board, whose NPU counts as ``share``.

    Every board offers its CPU; only a group with ``cpu`` takes it.
    """
    return [
        f"--address={ray_address}",
        *ports.options(),
        f"--resources={json.dumps({NPU: share, CPU: 1.0})}",
        f"--object-store-memory={OBJECT_STORE_BYTES}",
        *NO_LOG_MONITOR,
        "--disable-usage-stats",
    ]
