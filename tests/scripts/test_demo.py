"""`make demo` around `serve run`, with a program of a few lines in its place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rkserve.core.child_process import free_port
from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

SCRIPTS = PROJECT / "scripts"

# Stands in for `serve run`: fails as Ray does as often as it has to, then serves two answers.
SERVE = """
import http.server, json, os, pathlib, sys, yaml
left = pathlib.Path(os.environ["FAILURES_LEFT"])
print("limit", os.environ["RAY_gcs_server_port_wait_time_s"])
if (count := int(left.read_text())) > 0:
    left.write_text(str(count - 1))
    print("Traceback (most recent call last):\\n  ...")
    sys.exit("Exception: The current node timed out during startup.")
if os.environ.get("LAST_WORDS"):
    sys.exit(os.environ["LAST_WORDS"])
print("WARNING -- Token authentication is enabled for this Ray cluster.")
print("INFO -- Started a local Ray instance. View the dashboard at http://127.0.0.1:8265 ")
sys.stdout.flush()

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"data": [{"id": "sim-chat"}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass

port = yaml.safe_load(open(sys.argv[-1]))["http_options"]["port"]
server = http.server.HTTPServer(("127.0.0.1", port), Handler)
for _ in range(2):  # /ready, /v1/models
    server.handle_request()
sys.exit(7)
"""
DEMO = """
import pathlib, sys
sys.path.insert(0, sys.argv[1])
import demo
folder = pathlib.Path(sys.argv[2])
demo.CONFIG, demo.LOG = folder / "serve_config.yaml", folder / "demo.log"
demo.SERVE = (sys.executable, str(folder / "serve.py"), "run")
sys.exit(demo.main())
"""


def demo(folder: Path, failures: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the script to its end in a process of its own."""
    config = yaml.safe_load((PROJECT / "serve_config.yaml").read_text(encoding="utf-8"))
    config["http_options"]["port"] = free_port()
    (folder / "serve_config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "serve.py").write_text(SERVE, encoding="utf-8")
    (folder / "left").write_text(str(failures), encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-c", DEMO, str(SCRIPTS), str(folder)],
        env={**os.environ, "FAILURES_LEFT": str(folder / "left"), **environ},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_ray_that_did_not_start_gets_a_second_attempt(tmp_path: Path) -> None:
    done = demo(tmp_path, failures=1, RAY_AUTH_TOKEN="s3cret")
    assert (
        "rkserve: Ray did not start (Exception: The current node timed out during startup.); "
        "trying once more.\n" in done.stdout
    )
    assert "The cluster is ready." in done.stdout
    assert "dashboard  http://127.0.0.1:8265  (token: s3cret)\n" in done.stdout
    assert "serve ended with exit code 7" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_two_attempts_are_enough(tmp_path: Path) -> None:
    done = demo(tmp_path, failures=2)
    assert done.returncode == 1
    assert done.stdout.count("Ray did not start") == 2
    assert "giving up; see" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_a_refused_configuration_is_one_sentence_and_no_second_attempt(tmp_path: Path) -> None:
    done = demo(tmp_path, LAST_WORDS="rkserve: port 8000 is in use.")
    assert done.returncode == 1
    assert done.stderr == "\nrkserve: port 8000 is in use.\n"
    assert "Ray did not start" not in done.stdout


@pytest.mark.parametrize(
    ("environ", "limit"),
    [
        pytest.param({}, "180", id="more than Ray's 30 s"),
        pytest.param({"RAY_gcs_server_port_wait_time_s": "45"}, "45", id="what the user set"),
    ],
)
def test_ray_gets_minutes_to_start(tmp_path: Path, environ: dict[str, str], limit: str) -> None:
    demo(tmp_path, 0, LAST_WORDS="rkserve: enough", **environ)
    assert f"limit {limit}\n" in (tmp_path / "demo.log").read_text(encoding="utf-8")


def test_a_shim_that_stands_for_no_python_is_named(tmp_path: Path) -> None:
    shim = tmp_path / "shims" / "python3.12"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    done = subprocess.run(
        ["sh", str(SCRIPTS / "check_tools.sh"), "python3.12"],
        env={**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"rkserve: {shim} is only a shim, and it says: pyenv: python3.12")
    assert "PYENV_VERSION" in done.stderr


@pytest.mark.parametrize(
    ("over", "shown"),
    [
        pytest.param(
            True, ["  1 of at most 3 packages: ray", "  2 of at most 3 packages: cffi"], id="screen"
        ),
        pytest.param(False, ["  1 of at most 3 packages: ray"], id="log"),
    ],
)
def test_the_installation_shows_its_progress(over: bool, shown: list[str]) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import install\n"
        "print(*install.progress(sys.stdin, 3, over=sys.argv[2] == 'True'), sep='|')"
    )
    lines = "Collecting ray==2.60.0 (from -r x)\n  Downloading ray\nCollecting cffi\n"
    done = subprocess.run(
        [sys.executable, "-c", script, str(SCRIPTS), str(over)],
        input=f"{lines}Installing collected packages: cffi, ray\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    pieces = [piece.strip("\r\n ") for piece in done.stdout.split("|")]
    assert pieces == [*(one.strip() for one in shown), "unpacking 2 packages ..."]
