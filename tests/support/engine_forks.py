"""Engine processes that are forks of one with their modules, instead of programs of their own.

To start Python and import takes an engine longer than most tests need from it. Everything else is
as in an engine that was executed: its pipes, session, environment and end. Tests of the start
itself are marked ``executes_engine``.

Forks are made by a process without threads, which imports the engine alone: a fork of the tests'
own process would inherit the locks of its threads.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from rkserve.core import child_process

PROGRAM = "rkserve.native.engine.process"
ROOT = Path(__file__).parents[2]
# Variables that act on the start of a program; with another value than here it is executed.
OF_START = ("LD_PRELOAD", "LD_LIBRARY_PATH", "ASAN_OPTIONS", "UBSAN_OPTIONS", "MALLOC_ARENA_MAX")
HERE = {name: os.environ.get(name) for name in OF_START}  # before a test changes any
MESSAGE_BYTES = 1 << 17
PIPES = 3

executes_engine = False  # whether the current test is marked so
_execute = child_process._vfork
_forks: dict[int, _Forks] = {}  # by the process that uses them


class ForkedEngine:
    """The part of ``subprocess.Popen`` that ``ChildProcess`` uses."""

    def __init__(self, forks: _Forks, pid: int, pipes: Sequence[IO[bytes] | None]) -> None:
        self._forks = forks
        self.pid = pid
        self.stdin, self.stdout, self.stderr = pipes

    def poll(self) -> int | None:
        """Return the exit code or the negated number of a signal; None while it runs."""
        return self._forks.code(self.pid)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


class _Forks:
    """The process that forks, as seen from the tests'. It ends with its socket."""

    def __init__(self) -> None:
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            number = there.fileno()
            self._process = subprocess.Popen(
                (sys.executable, "-m", __name__, str(number)), pass_fds=(number,), cwd=ROOT
            )
        self._codes: dict[int, int] = {}

    def start(
        self, arguments: Sequence[str], err: int | None, environ: Mapping[str, str]
    ) -> ForkedEngine:
        (its_in, our_in), (our_out, its_out) = os.pipe(), os.pipe()
        our_err, its_err = os.pipe() if err is not None else (None, os.dup(2))
        theirs = (its_in, its_out, its_err)
        told = {"arguments": list(arguments), "environ": dict(environ), "cwd": str(Path.cwd())}
        try:
            socket.send_fds(self._socket, [json.dumps(told).encode()], theirs)
        finally:
            for number in theirs:
                os.close(number)
        pid: int | None = None
        while pid is None:
            pid = self._take(self._socket.recv(MESSAGE_BYTES)).get("started")
        logged = None if our_err is None else os.fdopen(our_err, "rb", 0)
        pipes = (os.fdopen(our_in, "wb", 0), os.fdopen(our_out, "rb", 0), logged)
        return ForkedEngine(self, pid, pipes)

    def code(self, pid: int) -> int | None:
        with suppress(BlockingIOError):
            while pid not in self._codes:
                self._take(self._socket.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT))
        return self._codes.get(pid)

    def _take(self, message: bytes) -> dict[str, int]:
        if not message:
            raise RuntimeError("the process that forks engines has ended")
        told: dict[str, int] = json.loads(message)
        if "ended" in told:
            self._codes[told["ended"]] = told["code"]
        return told


def start(
    command: Sequence[str], err: int | None, environ: Mapping[str, str] | None
) -> subprocess.Popen[bytes]:
    """Start a program, an engine by a fork; stands in for ``child_process._vfork``."""
    given = child_process.clean_environ() if environ is None else environ
    alike = all(given.get(name) == value for name, value in HERE.items())
    if executes_engine or not alike or tuple(command[:3]) != (sys.executable, "-m", PROGRAM):
        return _execute(command, err, environ)
    forks = _forks.get(os.getpid())
    if forks is None:
        forks = _forks[os.getpid()] = _Forks()
    return cast("subprocess.Popen[bytes]", forks.start(command[3:], err, given))


# -- the process that forks -----------------------------------------------------------------------


def _serve(tests: socket.socket) -> None:
    """Fork an engine for each message of the tests, and send them the ends of all."""
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal, which is for the tests
    asked = tests.fileno()
    while True:
        ready, _, _ = select.select((asked, woken), (), ())
        if woken in ready:
            os.read(woken, MESSAGE_BYTES)
        if asked in ready:
            message, pipes, *_ = socket.recv_fds(tests, MESSAGE_BYTES, PIPES)
            if not message:
                return
            pid = os.fork()
            if pid == 0:
                _be_engine(json.loads(message), pipes)
            for pipe in pipes:
                os.close(pipe)
            tests.send(json.dumps({"started": pid}).encode())
        _report_ends(tests)


def _report_ends(tests: socket.socket) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            tests.send(json.dumps({"ended": ended[0], "code": code}).encode())


def _be_engine(told: dict[str, Any], pipes: Sequence[int]) -> NoReturn:
    from rkserve.native.engine import process

    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for default in (signal.SIGCHLD, signal.SIGINT):
            signal.signal(default, signal.SIG_DFL)
        for number, pipe in enumerate(pipes):
            os.dup2(pipe, number)
        opened = [int(one.name) for one in Path("/proc/self/fd").iterdir()]
        os.closerange(PIPES, max(opened) + 1)
        os.environ.clear()
        os.environ.update(told["environ"])
        os.chdir(told["cwd"])
        sys.argv = [process.__file__, *told["arguments"]]
        process.main()
    finally:  # main() never returns
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    from rkserve.native.binding import library, runtime
    from rkserve.native.engine import process

    del library, runtime, process  # imported for the forks
    _serve(socket.socket(fileno=int(sys.argv[1])))
