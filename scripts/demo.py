"""``make demo``: start the cluster of simulated boards and say how to talk to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

import yaml

from rkserve.bringup import serving
from rkserve.bringup.processes import end_child
from rkserve.bringup.serving import ServeLog
from rkserve.core.child_process import free_ports
from rkserve.core.errors import ConfigError
from rkserve.deployments.haproxy import FLAG, PATIENCE, available, environ
from rkserve.deployments.preflight import check_file

PROJECT = Path(__file__).resolve().parents[1]
CONFIG = PROJECT / "serve_config.yaml"
SERVE = serving.SERVE
ATTEMPTS = 2
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

Without make: {bin}/rkserve up serve_config.yaml. Ctrl-C stops the cluster.
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
    serving.interrupt_on_signals()
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
        print(f"\nrkserve: Ray did not start ({ServeLog(LOG).last_line()}); {again}.", flush=True)
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
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second must not leave half of it behind
        end_child(serve)


def _watch(serve: subprocess.Popen[bytes], url: str) -> int | None:
    names = _wait_until_ready(serve, url)
    if names is None:
        return None if serve.poll() is not None and ServeLog(LOG).lacks_ray() else 1
    print(
        HINT.format(
            url=url,
            model=names[0],
            names=", ".join(names),
            dashboard=ServeLog(LOG).dashboard(),
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
    while (waited_s := time.monotonic() - started_s) < serving.START_TIMEOUT_S:
        if serve.poll() is not None:
            if not ServeLog(LOG).lacks_ray():
                _explain_end(ServeLog(LOG).explain_end(serve.returncode))
            return None
        if (models := serving.ready_models(url)) is not None:
            print(f"\rStarting Ray and the boards ... ready after {waited_s:.0f} s", flush=True)
            return models
        if sys.stdout.isatty():
            print(f"\rStarting Ray and the boards ... {waited_s:.0f} s", end="", flush=True)
        time.sleep(serving.POLL_S)
    print(f"\nrkserve: no board was ready after {serving.START_TIMEOUT_S} s; see {_shown(LOG)}.")
    return None


def _explain_end(text: str) -> None:
    print(f"\n{text}", file=sys.stdout if "\n" in text else sys.stderr)


def _shown(path: Path) -> Path:
    return path.relative_to(PROJECT) if path.is_relative_to(PROJECT) else path


if __name__ == "__main__":
    sys.exit(main())
