"""A Ray cluster of the benchmark's own, with the application on it; ended when stdin closes.

It starts and stops only what it has started itself, in a folder of its own and on free ports.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import traceback
from pathlib import Path
from typing import Any

import ray
from ray import serve

from rkserve.app import build
from rkserve.bench.processes import BenchFailed, Json, serve_commands

APP = "rkserve"
HOST = "127.0.0.1"
READY_S = 120.0


def start(command: Json) -> dict[str, Any]:
    """Start Ray and Serve's proxy."""
    ray.init(
        address="local",  # never another cluster of the machine
        _temp_dir=str(Path(command["folder"]) / "ray"),  # Ray opens it to every account
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
    )
    serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": command["port"]})
    return {}


def deploy(command: Json) -> dict[str, Any]:
    """Replace what runs by so many boards at such a speed; returns once all of them serve."""
    serve.delete(APP)
    simulated = {key: command[key] for key in ("boards", "profile", "release", "time_scale")}
    group = {
        "name": "sim",
        "model": command["model"],
        "simulated": simulated,
        "prompt_cache": {"park": command["park"]},
        "quirks": {} if command["prefix_reuse"] else {"prefix_reuse_in_ram": False},
        **{key: command[key] for key in ("queue_limit", "crash_limit", "health_check_timeout_s")},
    }
    state_dir = Path(command["folder"]) / "state"
    state_dir.mkdir(exist_ok=True)
    data_dir = str(Path(command["folder"]) / "data")
    router = {"replicas": 1, **command["args"].get("router", {})}  # one is what is measured
    args = {
        **command["args"],
        "router": router,
        "boards": [group],
        "state_dir": str(state_dir),
        "coordinator": {"data_dir": data_dir},
    }
    started_s = time.monotonic()
    serve.run(build(args), name=APP, route_prefix="/")
    _await_boards(command["port"], command["boards"])
    return {"took_s": time.monotonic() - started_s}


def _await_boards(port: int, boards: int) -> None:
    deadline_s = time.monotonic() + READY_S
    while (ready := _ready_boards(port)) != boards:
        if time.monotonic() > deadline_s:
            raise BenchFailed(f"only {ready} of {boards} boards are ready after {READY_S:.0f} s")
        time.sleep(0.2)


def _ready_boards(port: int) -> int:
    """Ask as a client would. 0 while no server answers."""
    with contextlib.closing(http.client.HTTPConnection(HOST, port, timeout=5)) as connection:
        try:
            connection.request("GET", "/v1/models")
            answer = connection.getresponse()
            body = answer.read()
        except OSError:  # the proxy is not there yet
            return 0
    if answer.status != http.client.OK:
        return 0
    boards = json.loads(body)["data"][0]["rkserve"]["boards"]
    return sum(board["state"] == "ready" for board in boards)


def main() -> None:
    """Serve the benchmark."""
    steps = {"start": start, "deploy": deploy}
    try:
        serve_commands(lambda command, _: steps[command["do"]](command))
    except Exception:
        # At once: the parent does not wait for the whole clean-up.
        traceback.print_exc()
        raise
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
