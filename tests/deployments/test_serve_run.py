"""The plain way: ``serve run`` with the file that the project ships, in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from compat.application import serve_run
from rkserve.core.child_process import free_port
from tests.support.cluster.local_cluster import START_S, expect_no_process_of, wait_for
from tests.support.http.talk import CHAT, MODEL, chat_body
from tests.support.paths import PROJECT

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path for Ray's sockets, from which nothing runs any more afterwards."""
    with tempfile.TemporaryDirectory(prefix="rk-", dir="/tmp", ignore_cleanup_errors=True) as name:
        (Path(name) / "ray").mkdir()
        yield Path(name)
        expect_no_process_of(Path(name))


def on_another_port(folder: Path, port: int) -> Path:
    """Return the shipped configuration, changed so that it disturbs nobody on this machine."""
    config = yaml.safe_load((PROJECT / "serve_config.yaml").read_text(encoding="utf-8"))
    config["http_options"]["port"] = port
    args = config["applications"][0]["args"]
    args["state_dir"] = str(folder / "state")
    args["coordinator"] = {"data_dir": str(folder / "data")}
    file = folder / "serve_config.yaml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    return file


def test_serve_run_serves_and_ends_with_ctrl_c(folder: Path) -> None:
    port = free_port()
    log_file = folder / "serve.log"
    with log_file.open("wb") as log:
        process = serve_run(on_another_port(folder, port), folder, log.fileno())
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:
                wait_for("`serve run` to serve", lambda: _is_ready(process, http), START_S)
                answer = http.post(CHAT, json=chat_body("Repeat after me: served")).json()
                assert answer["choices"][0]["message"]["content"] == "served"
                boards = wait_for("three boards", lambda: _three_boards(http))
                assert boards == ["sim-0", "sim-1", "sim-2"]
            os.killpg(process.pid, signal.SIGINT)  # what a terminal does at Ctrl-C
            process.wait(timeout=60)
        except BaseException:
            sys.stdout.write(log_file.read_text(errors="replace"))
            raise
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _is_ready(process: subprocess.Popen[bytes], http: httpx.Client) -> bool:
    assert process.poll() is None, f"`serve run` ended with {process.returncode}"
    try:
        return http.get("/ready").status_code == 200
    except httpx.TransportError:
        return False


def _three_boards(http: httpx.Client) -> list[str] | None:
    boards = http.get(f"/v1/models/{MODEL}").json()["rkserve"]["boards"]
    ready = [board["id"] for board in boards if board["state"] == "ready"]
    return ready if len(ready) == 3 else None
