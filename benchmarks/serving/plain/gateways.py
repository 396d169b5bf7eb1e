"""Gateways of others before the paced servers: their environments, settings and processes.

Each has a virtual environment of its own in ``.compat``, made of the lock file in ``locks`` when
it is first measured; none is a dependency of rkserve.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.plain.pace import MODEL
from compat.suite import NOWHERE, PROXIES, QUIET, WORK
from rkserve.bench.cluster import HOST
from rkserve.bench.processes import BenchFailed
from rkserve.config.serve_config import PROJECT
from rkserve.core.child_process import free_port

LOCKS = Path(__file__).parent / "locks"
INSTALL = PROJECT / "scripts" / "install.py"
# Of the environment of compat's suites: without compiled modules each start takes a minute.
UNCOMPILED = "PYTHONDONTWRITEBYTECODE"
STOP_S = 15.0
LAST_LINES = 3  # of pip or of a gateway, in an error


class LeftOut(BenchFailed):
    """A gateway cannot be installed here, and is not measured."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway by the name of its package and lock file.

    ``command`` makes its command of the environment's programs, a folder for its files, its port,
    and the ports of the servers behind it.
    """

    package: str
    command: Callable[[Path, Path, int, Sequence[int]], list[str]]

    @property
    def lock(self) -> Path:
        """The lock file of its environment."""
        return LOCKS / f"{self.package}.lock"

    @property
    def version(self) -> str:
        """The pinned version."""
        return pinned(self.lock.read_text(encoding="utf-8"), self.package)


def pinned(lock: str, package: str) -> str:
    """Return the version of a package in the text of a lock file."""
    mark = f"{package}=="
    line = next(line for line in lock.splitlines() if line.startswith(mark))
    return line.removeprefix(mark).split()[0]


def litellm_config(upstreams: Sequence[int]) -> str:
    """Return LiteLLM's configuration: a deployment of the model for each server, else defaults."""
    deployments = [
        {
            "model_name": MODEL,
            "litellm_params": {
                "model": f"openai/{MODEL}",
                "api_base": f"http://{HOST}:{port}/v1",
                "api_key": "none",
            },
        }
        for port in upstreams
    ]
    return json.dumps({"model_list": deployments}, indent=1)  # which is YAML, too


def litellm_command(bin_: Path, folder: Path, port: int, upstreams: Sequence[int]) -> list[str]:
    """Return the command of LiteLLM's proxy, with one worker."""
    (config := folder / "config.yaml").write_text(litellm_config(upstreams), encoding="utf-8")
    return [
        str(bin_ / "litellm"),
        *("--config", str(config)),
        *("--host", HOST),
        *("--port", str(port)),
        *("--num_workers", "1"),
    ]


def smg_command(bin_: Path, _folder: Path, port: int, upstreams: Sequence[int]) -> list[str]:
    """Return the command of SMG.

    Its default policy prefers the server that has a prompt's prefix: all streams of this benchmark
    have one prompt, and would be sent to one server.
    """
    return [
        *(str(bin_ / "smg"), "launch"),
        *("--host", HOST),
        *("--port", str(port)),
        *("--prometheus-host", HOST),
        *("--prometheus-port", str(free_port())),
        *("--policy", "round_robin"),
        *("--log-level", "warn"),
        "--worker-urls",
        *(f"http://{HOST}:{one}" for one in upstreams),
    ]


LITELLM = Gateway("litellm", litellm_command)
SMG = Gateway("smg", smg_command)


def programs(gateway: Gateway) -> Path:
    """Return the folder of a gateway's programs; install it unless it is there already.

    Raises:
        LeftOut: it cannot be installed.
    """
    place = WORK / f"bench-{gateway.package}"
    wanted = hashlib.sha256(gateway.lock.read_bytes()).hexdigest()
    stamp = place / "installed"
    bin_ = place / "venv" / "bin"
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return bin_
    place.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    for command in (
        [sys.executable, "-m", "venv", "--clear", str(bin_.parent)],
        [str(bin_ / "python"), str(INSTALL), str(gateway.lock)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = last_lines(done.stderr or done.stdout)
            raise LeftOut(f"{gateway.package} could not be installed: {reason}")
    stamp.write_text(wanted, encoding="utf-8")
    return bin_


@contextmanager
def serving(command: Sequence[str], folder: Path, key: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a gateway as long as the block lasts. ``key`` is for its own clients.

    Raises:
        BenchFailed: the block failed, with the last lines of the gateway if it has ended.
    """
    environ = {
        **{name: one for name, one in os.environ.items() if name not in (*PROXIES, UNCOMPILED)},
        **dict.fromkeys(PROXIES, NOWHERE),
        **{name: value for name, value in QUIET.items() if name != UNCOMPILED},
        # LiteLLM does not start without one; each run has another.
        "LITELLM_MASTER_KEY": key,
        "HOME": str(folder),  # no settings of the user's, and none left there
    }
    log = folder / "log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            cwd=folder,
            env=environ,
            start_new_session=True,  # a process group, which is ended with all in it
        )
    try:
        yield process
    except BenchFailed as exc:
        if (code := process.poll()) is None:
            raise
        words = last_lines(log.read_text(encoding="utf-8", errors="replace"))
        raise BenchFailed(f"it ended with exit code {code}: {words}") from exc
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_lines(text: str) -> str:
    """Return the last lines of an output, in one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " / ".join(lines[-LAST_LINES:])
