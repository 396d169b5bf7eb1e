"""``make demo``: start the cluster of simulated boards and say how to talk to it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import BinaryIO

import yaml

from rkserve.config import parse_config
from rkserve.deployments.front import FLAG, available, environ
from rkserve.errors import ConfigError
from rkserve.ports import free_ports

PROJECT = Path(__file__).resolve().parents[1]
CONFIG = PROJECT / "serve_config.yaml"
START_TIMEOUT_S = 180
LOG = PROJECT / ".venv" / "demo.log"

HINT = """
The cluster is ready. Try it in another terminal:

  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{{
    "model": "{model}", "messages": [{{"role": "user", "content": "Hello! Who are you?"}}]}}'

  chat       {url}/
  state      {bin}/rkserve status
  models     {url}/v1/models
  metrics    {url}/metrics
  dashboard  {dashboard}
  log        {log}

Without make: {bin}/serve run serve_config.yaml. Ctrl-C stops the cluster.
"""


def main() -> int:
    """Run until Ctrl-C. Returns the exit code."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    try:
        parse_config(config["applications"][0]["args"])
    except ConfigError as exc:
        print(f"rkserve: {exc}", file=sys.stderr)
        return 1
    port = config["http_options"]["port"]
    url = f"http://127.0.0.1:{port}"
    if _is_taken(port):
        print(
            f"rkserve: port {port} is in use. Stop what listens there, or change http_options.port "
            f"in {CONFIG.name}.",
            file=sys.stderr,
        )
        return 1
    # A shell without job control starts its background jobs with Ctrl-C ignored, and serve would
    # inherit that: nothing could stop it in order.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _as_interrupt)
    with tempfile.TemporaryDirectory(prefix="rkserve-") as folder, LOG.open("wb") as log:
        return _serve(url, log, Path(folder))


def _serve(url: str, log: BinaryIO, folder: Path) -> int:
    """Run the cluster until Ctrl-C, with HAProxy in front of it where Ray has that."""
    front = environ(folder, free_ports()) if available() and FLAG not in os.environ else {}
    serve = subprocess.Popen(
        [Path(sys.executable).parent / "serve", "run", str(CONFIG)],
        cwd=PROJECT,
        env={**os.environ, **front},
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # Ctrl-C reaches it through us, once
    )
    try:
        return _watch(serve, url)
    except KeyboardInterrupt:
        print("\nStopping the cluster ...", flush=True)
        return 0
    finally:
        _stop(serve)


def _watch(serve: subprocess.Popen[bytes], url: str) -> int:
    model = _wait_until_ready(serve, url)
    if model is None:
        return 1
    print(
        HINT.format(
            url=url,
            model=model,
            dashboard=_dashboard(),
            log=LOG.relative_to(PROJECT),
            bin=Path(sys.executable).parent.relative_to(PROJECT),
        ),
        flush=True,
    )
    code = serve.wait()
    print(f"rkserve: serve ended with exit code {code}; see {LOG.relative_to(PROJECT)}.")
    return 1


def _wait_until_ready(serve: subprocess.Popen[bytes], url: str) -> str | None:
    """Return the first model's id once every model has a board, or None after saying why not."""
    started_s = time.monotonic()
    while (waited_s := time.monotonic() - started_s) < START_TIMEOUT_S:
        if serve.poll() is not None:
            tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-15:])
            print(f"\nrkserve: serve ended with exit code {serve.returncode}:\n{tail}")
            return None
        if _get(f"{url}/ready") is not None:
            models = _get(f"{url}/v1/models")
            if models is not None:
                print(f"\rStarting Ray and the boards ... ready after {waited_s:.0f} s", flush=True)
                return str(models["data"][0]["id"])
        if sys.stdout.isatty():
            print(f"\rStarting Ray and the boards ... {waited_s:.0f} s", end="", flush=True)
        time.sleep(0.5)
    print(f"\nrkserve: no board was ready after {START_TIMEOUT_S} s; see {LOG}.")
    return None


def _get(url: str) -> dict[str, list[dict[str, object]]] | None:
    """Return the JSON behind ``url``, or None while it is not there."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            found: dict[str, list[dict[str, object]]] = json.load(answer)
            return found
    except (urllib.error.URLError, OSError, ValueError):
        return None


def _dashboard() -> str:
    """Return the dashboard's address as Ray logged it."""
    found = re.search(r"dashboard at \S*?(http://[\w.:\[\]-]+\d)", LOG.read_text(errors="replace"))
    return found[1] if found else "none was started"


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _as_interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _stop(serve: subprocess.Popen[bytes]) -> None:
    """Let serve shut Ray down in order; by force if it does not."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not leave half of it behind
    for number, patience_s in ((signal.SIGINT, 60), (signal.SIGTERM, 20), (signal.SIGKILL, 5)):
        if serve.poll() is None:
            serve.send_signal(number)
        try:
            serve.wait(patience_s)
        except subprocess.TimeoutExpired:
            continue
        return


if __name__ == "__main__":
    sys.exit(main())
