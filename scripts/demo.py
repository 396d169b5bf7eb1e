"""``make demo``: start the cluster of simulated boards and say how to talk to it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import BinaryIO

import yaml

from rkserve.core.child_process import free_ports
from rkserve.core.errors import ConfigError
from rkserve.deployments.haproxy import FLAG, PATIENCE, available, environ
from rkserve.deployments.preflight import check_file

PROJECT = Path(__file__).resolve().parents[1]
CONFIG = PROJECT / "serve_config.yaml"
SERVE = (sys.executable, "-m", "rkserve.deployments.preflight", "run")
START_TIMEOUT_S = 600
ATTEMPTS = 2
TOKEN_ASKED = "Token authentication is enabled"
STARTED = "Started a local Ray instance"
LOG = PROJECT / ".venv" / "demo.log"

HINT = """
The cluster is ready. Try it in another terminal:

  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{{
    "model": "{model}", "messages": [{{"role": "user", "content": "Hello! Who are you?"}}]}}'

  chat       {url}/
  state      {bin}/rkserve status
  models     {names}: {url}/v1/models
  metrics    {url}/metrics
  dashboard  {dashboard}
  log        {log}

Without make: {bin}/serve run serve_config.yaml. Ctrl-C stops the cluster.
"""


def main() -> int:
    """Run until Ctrl-C. Returns the exit code."""
    try:
        check_file(CONFIG, starts=True, ray=False)  # `serve run` checks Ray's keys
    except ConfigError as exc:
        print(f"rkserve: {exc}", file=sys.stderr)
        return 1
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    url = f"http://127.0.0.1:{config['http_options']['port']}"
    # A shell without job control starts its background jobs with Ctrl-C ignored, and serve would
    # inherit that: nothing could stop it in order.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _as_interrupt)
    for attempt in range(1, ATTEMPTS + 1):
        # Short, for the paths of HAProxy's sockets.
        with (
            tempfile.TemporaryDirectory(prefix="rkserve-", dir="/tmp") as folder,
            LOG.open("wb") as log,
        ):
            try:
                code = _serve(url, log, Path(folder))
            except ConfigError as exc:
                print(f"rkserve: {exc}", file=sys.stderr)
                return 1
        if code is not None:
            return code
        again = "trying once more" if attempt < ATTEMPTS else f"giving up; see {_shown(LOG)}"
        print(f"\nrkserve: Ray did not start ({_last_line()}); {again}.", flush=True)
    return 1


def _serve(url: str, log: BinaryIO, folder: Path) -> int | None:
    """Run the cluster until Ctrl-C, with HAProxy in front of it where Ray has that.

    Returns the exit code, or None where Ray itself did not start.
    """
    front = environ(folder, free_ports()) if available() and FLAG not in os.environ else {}
    serve = subprocess.Popen(
        [*SERVE, str(CONFIG)],
        cwd=PROJECT,
        env={**PATIENCE, **os.environ, **front},
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


def _watch(serve: subprocess.Popen[bytes], url: str) -> int | None:
    names = _wait_until_ready(serve, url)
    if names is None:
        return None if serve.poll() is not None and _ray_failed() else 1
    print(
        HINT.format(
            url=url,
            model=names[0],
            names=", ".join(names),
            dashboard=_dashboard(),
            log=_shown(LOG),
            bin=_shown(Path(sys.executable).parent),
        ),
        flush=True,
    )
    code = serve.wait()
    print(f"rkserve: serve ended with exit code {code}; see {_shown(LOG)}.")
    return 1


def _wait_until_ready(serve: subprocess.Popen[bytes], url: str) -> list[str] | None:
    """Return the models and adapters once every model has a board, or None after saying why not."""
    started_s = time.monotonic()
    while (waited_s := time.monotonic() - started_s) < START_TIMEOUT_S:
        if serve.poll() is not None:
            if not _ray_failed():
                _explain_end(serve.returncode)
            return None
        if _get(f"{url}/ready") is not None:
            models = _get(f"{url}/v1/models")
            if models is not None:
                print(f"\rStarting Ray and the boards ... ready after {waited_s:.0f} s", flush=True)
                return [str(one["id"]) for one in models["data"]]
        if sys.stdout.isatty():
            print(f"\rStarting Ray and the boards ... {waited_s:.0f} s", end="", flush=True)
        time.sleep(0.5)
    print(f"\nrkserve: no board was ready after {START_TIMEOUT_S} s; see {_shown(LOG)}.")
    return None


def _ray_failed() -> bool:
    """Return whether ``serve run`` ended before its Ray ran, and not over the configuration."""
    said = LOG.read_text(errors="replace")
    return STARTED not in said and not _last_line().startswith("rkserve: ")


def _last_line() -> str:
    lines = LOG.read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "without a word")


def _explain_end(code: int) -> None:
    """Print the one sentence of a check that failed, or the log's end."""
    if (last := _last_line()).startswith("rkserve: "):
        print(f"\n{last}", file=sys.stderr)
        return
    tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-15:])
    print(f"\nrkserve: serve ended with exit code {code}:\n{tail}")


def _shown(path: Path) -> Path:
    return path.relative_to(PROJECT) if path.is_relative_to(PROJECT) else path


def _get(url: str) -> dict[str, list[dict[str, object]]] | None:
    """Return the JSON behind ``url``, or None while it is not there."""
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            found: dict[str, list[dict[str, object]]] = json.load(answer)
            return found
    except (urllib.error.URLError, OSError, ValueError):
        return None


def _dashboard() -> str:
    """Return the dashboard's address as Ray logged it, and the token that it asks for."""
    said = LOG.read_text(errors="replace")
    found = re.search(r"dashboard at \S*?(http://[\w.:\[\]-]+\d)", said)
    if found is None:
        return "none was started"
    asked = TOKEN_ASKED in said or os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    token = _token() if asked else None
    return found[1] if token is None else f"{found[1]}  (token: {token})"


def _token() -> str | None:
    """Return the token of Ray's clusters on this machine, found as Ray finds it."""
    if token := os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return token
    file = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    try:
        return Path(file).read_text(encoding="utf-8").strip() or None
    except OSError:
        return None


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
