"""The start, the watch and the end of a head, with small programs in the place of Ray and serve."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rkserve.bench.processes import PROC, is_alive
from rkserve.bringup.board import JoinOptions, run_board
from rkserve.bringup.head import run_head
from rkserve.bringup.head_plan import HeadOptions, check_ports
from rkserve.bringup.processes import RayStore, StateFolder
from rkserve.core.child_process import free_port, free_ports
from rkserve.core.errors import ConfigError
from tests.support.http.certificates import ELSEWHERE, write_certificate
from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

# Stands in for `ray start --head --block`: fails as often as it has to, then runs with a child.
RAY = """
import http.server, json, os, pathlib, subprocess, sys, threading, time
left = pathlib.Path(os.environ["FAILURES_LEFT"])
print("options", *sys.argv[1:], os.environ["RAY_AUTH_MODE"])
folder = next(a for a in sys.argv if a.startswith("--temp-dir=")).partition("=")[2]
if pathlib.Path(folder, "ray_current_cluster").exists():
    sys.exit("Ray is trying to start at an address, but is already running.")
if place := os.environ.get("RAY_gcs_storage_path"):
    with open(pathlib.Path(place, "session_name"), "a") as file:
        file.write(f"{left.read_text()} ")
if (count := int(left.read_text())) > 0:
    left.write_text(str(count - 1))
    if raylet := os.environ.get("RAYLET"):
        ended = subprocess.Popen([raylet])
        time.sleep(600)
    sys.exit("The current node timed out during startup.")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
if message := os.environ.get("FAILING"):
    class Dashboard(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            router = {"message": f"It fails. Error:\\nValueError: {message}"}
            found = {"applications": {"rkserve": {"deployments": {"Router": router}}}}
            body = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
        def log_message(self, *_):
            pass
    port = int(next(a for a in sys.argv if a.startswith("--dashboard-port=")).partition("=")[2])
    dashboard = http.server.HTTPServer(("127.0.0.1", port), Dashboard)
    threading.Thread(target=dashboard.serve_forever, daemon=True).start()
print("rkserve: the raylet runs, and Ray's dashboard follows", flush=True)
time.sleep(600)
"""
# Stands in for `serve run`.
SERVE = """
import http.server, json, os, sys, yaml, ssl
if words := os.environ.get("LAST_WORDS"):
    sys.exit(words)
assert sys.stdin.readline(), "a head whose Ray runs writes one"

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "sim-chat"}]}).encode()
        self.send_response(503 if "FAILING" in os.environ else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
    def log_message(self, *_):
        pass

options = yaml.safe_load(open(sys.argv[-1]))["http_options"]
server = http.server.HTTPServer(("127.0.0.1", options["port"]), Handler)
if "ssl_certfile" in options:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(options["ssl_certfile"], options["ssl_keyfile"])
    server.socket = context.wrap_socket(server.socket, server_side=True)
server.serve_forever()
"""
UP = """
import pathlib, sys
from rkserve.bringup import head, head_plan, processes, serving
folder = pathlib.Path(sys.argv[1])
processes.SHORT_FOLDER = folder / "short"  # that of this machine may have a real Ray's files
head.RAY_START = (sys.executable, str(folder / "ray.py"))
serving.SERVE = (sys.executable, str(folder / "serve.py"))
options = head_plan.HeadOptions(
    folder / "serve_config.yaml", folder / "state", "192.0.2.1", int(sys.argv[2]), int(sys.argv[3]),
    haproxy=False, mdns=False,
)
sys.exit(head.run_head(options, lambda text: print(text, flush=True)))
"""


def config(folder: Path, **group: Any) -> Path:
    """The demo's configuration on another port."""
    content = yaml.safe_load((PROJECT / "serve_config.yaml").read_text(encoding="utf-8"))
    content["http_options"]["port"] = free_port()
    content["applications"][0]["args"]["boards"][0].update(group)
    file = folder / "serve_config.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


def up(
    folder: Path, failures: int = 0, http_options: dict[str, Any] | None = None, **environ: str
) -> subprocess.Popen[str]:
    file = config(folder)
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    content["http_options"].update(http_options or {})
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    for name, text in (("ray.py", RAY), ("serve.py", SERVE), ("left", str(failures))):
        (folder / name).write_text(text, encoding="utf-8")
    first = next(p for p in free_ports() if p % 10 == 0 and all_free(p))
    return started(folder, first, **environ)


def started(folder: Path, first: int, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", UP, str(folder), str(first), str(first + 9)],
        env={
            **os.environ,
            "FAILURES_LEFT": str(folder / "left"),
            "HOME": str(folder),
            **environ,
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=PROJECT,
    )


def all_free(first: int) -> bool:
    try:
        check_ports(range(first, first + 10))
    except ConfigError:
        return False
    return True


def wait_ready(process: subprocess.Popen[str], folder: Path) -> None:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        record = StateFolder(folder / "state", "head").read()
        if record is not None and record.ready:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
    raise AssertionError("the head was not ready")


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_a_signal_ends_everything_that_was_started(tmp_path: Path, number: int) -> None:
    process = up(tmp_path, failures=1)
    wait_ready(process, tmp_path)
    record = StateFolder(tmp_path / "state", "head").read()
    assert record is not None
    everything = record.all_alive()
    assert len(everything) >= 4  # the supervisor, Ray with its child, and serve
    process.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    lines = output.splitlines()
    assert lines[:3] == [
        "Starting Ray ...",
        "rkserve: Ray did not start (The current node timed out during startup.); "
        "trying once more.",
        lines[2],
    ]
    assert lines[2].startswith("Ray runs at 192.0.2.1:")
    assert "Ready after" in output
    assert "a first answer took" in output
    assert lines[-1] == "Stopping ..."
    assert not [one for one in everything if is_alive(PROC, one)]
    assert StateFolder(tmp_path / "state", "head").read() is None
    token = tmp_path / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600
    assert "token" in (tmp_path / "state" / "ray.log").read_text()


def test_down_ends_the_recorded_processes(tmp_path: Path) -> None:
    process = up(tmp_path)
    wait_ready(process, tmp_path)
    state = StateFolder(tmp_path / "state", "head")
    said: list[str] = []
    assert state.end(said.append)
    process.communicate(timeout=60)
    assert process.returncode == 0
    assert said == [f"Stopping pid {process.pid} ..."]
    assert not state.end(said.append)


def test_a_killed_supervisor_leaves_a_record_that_ends_the_rest(tmp_path: Path) -> None:
    process = up(tmp_path)
    wait_ready(process, tmp_path)
    state = StateFolder(tmp_path / "state", "head")
    record = state.read()
    assert record is not None
    process.kill()
    process.communicate(timeout=60)
    assert record.all_alive()
    assert state.end(print)
    assert not record.all_alive()


def test_serve_that_ends_is_explained_and_ray_ends_with_it(tmp_path: Path) -> None:
    process = up(tmp_path, LAST_WORDS="rkserve: router.policy: unknown policy 'x'.")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "rkserve: router.policy: unknown policy 'x'.\n" in output
    assert StateFolder(tmp_path / "state", "head").read() is None


def test_serve_that_refuses_its_file_ends_a_ray_that_does_not_start(tmp_path: Path) -> None:
    raylet = tmp_path / "endless"
    raylet.write_text("#!/bin/sh\nsleep 600\n", encoding="utf-8")
    raylet.chmod(0o755)
    refusal = "rkserve: serve_config.yaml: http_options.prot: unknown key."
    process = up(tmp_path, failures=1, RAYLET=str(raylet), LAST_WORDS=refusal)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert output.endswith(f"Starting Ray ...\n{refusal}\nStopping ...\n")


def test_the_note_of_a_killed_head_does_not_keep_ray_from_starting(tmp_path: Path) -> None:
    process = up(tmp_path)
    wait_ready(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    options = (tmp_path / "state" / "ray.log").read_text().splitlines()[0].split()
    port = next(int(one.partition("=")[2]) for one in options if one.startswith("--port="))
    folder = next(one.partition("=")[2] for one in options if one.startswith("--temp-dir="))
    note = Path(folder) / "ray_current_cluster"
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_text(f"192.0.2.1:{port}", encoding="utf-8")
    process = started(tmp_path, port)
    wait_ready(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    assert not note.exists()


def test_a_deployment_that_does_not_start_is_noted_once_with_its_error(tmp_path: Path) -> None:
    process = up(tmp_path, FAILING="there is no such thing")
    assert process.stdout is not None
    noted = "rkserve: Router does not start: there is no such thing\n"
    assert any(line == noted for line in process.stdout)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert noted not in output


def test_ray_gets_three_attempts(tmp_path: Path) -> None:
    process = up(tmp_path, failures=3)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert output.count("Ray did not start") == 3
    assert "giving up; see" in output


@pytest.mark.parametrize(
    ("failures", "names", "aside"),
    [
        pytest.param(0, "before 0 ", None, id="it starts with them"),
        pytest.param(1, "0 ", "before 1 ", id="it starts without them", marks=pytest.mark.long),
        pytest.param(2, "1 ", "before 2 ", id="it starts without any", marks=pytest.mark.long),
    ],
)
def test_ray_s_tables_of_a_crashed_run_are_used_and_set_aside_where_ray_does_not_start(
    tmp_path: Path, failures: int, names: str, aside: str | None
) -> None:
    release = importlib.metadata.version("ray")
    file, moved = (
        tmp_path / "state" / name / release / "session_name" for name in ("gcs", "gcs.aside")
    )
    file.parent.mkdir(parents=True, mode=0o700)
    file.write_text("before ")
    for folder in (file.parents[1], file.parents[2]):
        folder.chmod(0o700)
    process = up(tmp_path, failures=failures)
    wait_ready(process, tmp_path)
    assert file.read_text() == names
    assert (moved.read_text() if moved.exists() else None) == aside
    os.kill(process.pid, signal.SIGKILL)  # a crash leaves them
    process.communicate(timeout=60)
    StateFolder(tmp_path / "state", "head").end(print)
    assert file.exists()
    process = up(tmp_path)
    wait_ready(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert not file.exists(), "an end in order leaves none"
    assert output.endswith("Stopping ...\n")


def test_an_operator_s_storage_of_ray_wins(tmp_path: Path) -> None:
    store = RayStore(tmp_path, "2.60.0", {"RAY_gcs_storage": "memory"})
    assert (store.environ(), store.set_aside()) == ({}, False)


def test_an_attempt_ends_with_its_raylet(tmp_path: Path) -> None:
    raylet = tmp_path / "raylet"
    raylet.write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    raylet.chmod(0o755)
    process = up(tmp_path, failures=1, RAYLET=str(raylet))
    wait_ready(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "rkserve: Ray did not start (its raylet has ended, as it does where" in output
    assert "trying once more.\nRay runs at" in output


def test_a_head_with_serves_own_tls_asks_itself_by_https(tmp_path: Path) -> None:
    """The certificate is for other names than that of the loopback, as an authority's is."""
    certificate, key = write_certificate(tmp_path, "own", names=ELSEWHERE)
    files = {"ssl_certfile": str(certificate), "ssl_keyfile": str(key)}
    process = up(tmp_path, http_options=files)
    wait_ready(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "The Router answers at https://127.0.0.1:" in output
    assert "sim-chat at https://127.0.0.1:" in output


def test_a_machine_without_localhost_is_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: Any, **__: Any) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    options = HeadOptions(config(tmp_path), tmp_path / "state")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))  # a cluster of this user may run
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match=r"localhost has no loopback.*Run: echo '127\.0\.0\.1"):
        run_head(options, print)
    with pytest.raises(ConfigError, match=r"localhost has no loopback.*Run: echo '127\.0\.0\.1"):
        run_board(
            JoinOptions(tmp_path / "state", ray_port=next(filter(all_free, free_ports()))), print
        )


def test_a_named_token_that_is_missing_stops_the_start(tmp_path: Path) -> None:
    process = up(tmp_path, RAY_AUTH_TOKEN_PATH=str(tmp_path / "none"), RAY_AUTH_TOKEN="")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert f"Ray's token {tmp_path / 'none'} is missing or empty." in output
