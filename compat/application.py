"""One rkserve application of simulated boards, for all suites: started, and ended by its handle.

It has ports and a temporary folder of its own, so that it disturbs no other Ray of this machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from rkserve.core.child_process import free_port, free_ports
from rkserve.deployments.haproxy import FLAG, PATIENCE, available, environ

PROJECT = Path(__file__).resolve().parents[1]
START_S = 240.0
# Fifty times as fast as the boards that are imitated: no suite is about speed.
TIME_SCALE = 0.02


def config(port: int, folder: Path) -> dict[str, Any]:
    """A chat model on two boards, one for vectors, and one that sees."""

    def group(name: str, model: str, boards: int, **more: str) -> dict[str, Any]:
        simulated = {"boards": boards, "time_scale": TIME_SCALE, "load_s": 0.2, **more}
        return {"name": name, "model": f"models/{model}", "simulated": simulated}

    groups = [
        group("sim", "sim-chat", 2),
        group("embed", "sim-embed", 1, profile="rk3588-qwen3-0.6b-w8a8"),
        group("vision", "sim-vision", 1),
    ]
    args = {
        "boards": groups,
        "state_dir": str(folder / "state"),
        "coordinator": {"data_dir": str(folder / "data")},
    }
    application = {
        "name": "rkserve",
        "route_prefix": "/",
        "import_path": "rkserve.app:build",
        "args": args,
    }
    return {
        "proxy_location": "HeadOnly",
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [application],
    }


@contextlib.contextmanager
def running(log: Path) -> Iterator[str]:
    """Start it, yield its URL once every model has a board, and end it.

    Raises:
        RuntimeError: it ended, or was not ready in time; ``log`` has its words.
    """
    # Short: the paths of Ray's sockets have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder, port = Path(name), free_port()
        (folder / "state").mkdir()
        file = folder / "serve_config.yaml"
        file.write_text(yaml.safe_dump(config(port, folder)), encoding="utf-8")
        url = f"http://127.0.0.1:{port}"
        with log.open("wb") as out:
            path = os.pathsep.join([str(PROJECT), *_given("PYTHONPATH")])
            # As in `make demo`: what clients meet is HAProxy.
            front = environ(folder / "f", free_ports()) if available() else {FLAG: "0"}
            process = serve_run(file, folder, out.fileno(), PYTHONPATH=path, **front)
            try:
                _wait_until_ready(process, url, log)
                yield url
            finally:
                _end(process)


def serve_run(file: Path, folder: Path, out: int, **more: str) -> subprocess.Popen[bytes]:
    """Start ``serve run`` as a user in the project's folder would, in a session of its own.

    Ray's temporary files go to ``folder``, what it says to the file descriptor ``out``, and
    ``more`` is added to its environment.
    """
    environ = {
        **PATIENCE,
        **os.environ,
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        **more,
    }
    environ.pop("RAY_ADDRESS", None)
    # A shell without job control starts its background jobs with Ctrl-C ignored, and serve would
    # inherit that: nothing could stop it in order.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "ray.serve.scripts", "run", str(file)],
            cwd=PROJECT,
            env=environ,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)


def _given(name: str) -> list[str]:
    return [value] if (value := os.environ.get(name)) else []


def _wait_until_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        if process.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise RuntimeError(f"serve ended with {process.returncode}:\n{tail}")
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"no board was ready after {START_S:.0f} s; see {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let serve shut Ray down in order; by force if it does not."""
    for number, patience_s in ((signal.SIGINT, 60), (signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        if process.poll() is None:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
            return
