"""Child processes on pipes, started without running any code between fork and exec; and free ports
of this machine for servers that start later.

Ray's event loop is uvloop, which forks: Python's handlers and its own run in the child before exec.
A replica has dozens of threads. If one of them holds a lock at that moment, the child waits for it
forever, and the whole replica waits for the child. ``subprocess`` uses vfork, which avoids this.

A child gets a clean environment: the parent's holds keys and tokens, and what a foreign library
does with them, or leaves of them in a file, is not known.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence

# The pipes close first, so that the first poll usually finds the process ended.
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 0.1

# What programs, their loader and Python need of a parent's environment. Ray sets OMP_NUM_THREADS=1
# for its workers, which would hold a library's own threads down: it is not among them.
INHERITED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR"),
        *("LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_ARENA_MAX", "XDG_CACHE_HOME", "VIRTUAL_ENV"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONOPTIMIZE"),
        *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUTF8", "PYTHONMALLOC"),
        *("ASAN_OPTIONS", "UBSAN_OPTIONS"),  # of a simulated library with sanitizers
    }
)
INHERITED_PREFIXES = ("LC_", "RKLLM_", "RKNN_", "RKSIM_")  # locales, and the libraries' settings


def clean_environ(more: Iterable[str] = ()) -> dict[str, str]:
    """Return the variables of this process that a child gets, and those named in ``more``."""
    names = INHERITED.union(more)
    return {
        name: value
        for name, value in os.environ.items()
        if name in names or name.startswith(INHERITED_PREFIXES)
    }


class ChildProcess:
    """A running program. Use it from one event loop; build it with ``start``.

    Write to ``stdin`` unless it is closing; what the program does not read before it ends is lost.
    """

    stdin: asyncio.WriteTransport
    stdout: asyncio.ReadTransport
    stderr: asyncio.ReadTransport

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        out: asyncio.Protocol,
        err: asyncio.Protocol | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> ChildProcess:
        """Start a program in a session of its own, so that Ctrl-C in a terminal does not reach it.

        ``out`` receives its stdout, ``err`` its stderr, which is inherited without one. No other
        open file is inherited. Without ``environ`` it gets a clean environment.

        Raises:
            OSError: it cannot be started.
        """
        # The loop waits for its exec: milliseconds, because the program is in the page cache.
        process = _vfork(command, subprocess.PIPE if err is not None else None, environ)
        child = cls(process)
        try:
            await child._connect(out, err)
        except BaseException:
            child.kill()
            child.close()
            await child.wait()
            raise
        return child

    async def _connect(self, out: asyncio.Protocol, err: asyncio.Protocol | None) -> None:
        loop = asyncio.get_running_loop()
        if err is not None:
            self.stderr, _ = await loop.connect_read_pipe(lambda: err, self._process.stderr)
        self.stdout, _ = await loop.connect_read_pipe(lambda: out, self._process.stdout)
        self.stdin, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self._process.stdin)

    def close(self) -> None:
        """Close all pipes."""
        for name in ("stdin", "stdout", "stderr"):
            # A transport closes its pipe; without one the start has failed before.
            pipe = getattr(self, name, None) or getattr(self._process, name)
            if pipe is not None:
                pipe.close()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self._process.kill()

    async def wait(self) -> int:
        """Wait for its end; return its exit code, or the negated number of the signal that ended
        it.
        """
        # Not in a thread: a process stuck in a driver never ends, and nor would that thread.
        pause_s = _FIRST_LOOK_S
        while (code := self._process.poll()) is None:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        return code


def _vfork(
    command: Sequence[str], err: int | None, environ: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=err,
        bufsize=0,
        env=clean_environ() if environ is None else environ,
        start_new_session=True,
    )


HOST = "127.0.0.1"
# Ray's workers listen from 10002 to 19999, and replicas that serve HTTP themselves from 30000.
FIRST, LAST = 20_000, 29_999
_yielded: set[int] = set()


def free_ports(rng: random.Random | None = None) -> Iterator[int]:
    """Yield ports on which nothing listens, each of them once in this process.

    None is in the range from which a kernel assigns ports to outgoing connections and to servers
    that do not choose one (from 32768 by default): such a port could be assigned before the server
    starts, and a starting Ray takes hundreds. Several callers plan the ports of one cluster before
    anything listens there, so that one caller's port must not be another's.

    Raises:
        OSError: none is left.
    """
    if 2 * len(_yielded) > LAST - FIRST:
        _yielded.clear()  # of earlier clusters, long since
    ports = list(range(FIRST, LAST + 1))
    (rng or random.Random()).shuffle(ports)
    for port in ports:
        if port not in _yielded and listens_nowhere(port, HOST):
            _yielded.add(port)
            yield port
    raise OSError(f"no port from {FIRST} to {LAST} is free")


def free_port() -> int:
    """Return one of ``free_ports``. Raises ``OSError``."""
    return next(free_ports())


def bind_error(port: int, host: str = "") -> OSError | None:
    """Return the error of a server that would listen on a port, None if it may: at one address, or
    without it at all of IPv4.
    """
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        # As servers do: a recently closed connection does not block a port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as exc:
            return exc
        return None


def listens_nowhere(port: int, host: str = "") -> bool:
    """Return whether a server may listen on a port; see ``bind_error``."""
    return bind_error(port, host) is None
