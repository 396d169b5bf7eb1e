"""Child processes that execute commands in JSON lines: the parent's end and the child's.

A child ends when its stdin closes, so that no process survives a killed benchmark.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rkserve.bench.processes import PROC, ProcessIdentity, descendants, is_alive
from rkserve.core.errors import RkserveError

Json = dict[str, Any]
OnProgress = Callable[[Json], None]  # progress before the answer
READ_SIZE = 1 << 16
LAST_WORDS = 15
GRACE_S = 45.0  # Serve ends its replicas one by one, and each of them its engine


class BenchFailed(RkserveError):
    """The benchmark cannot go on."""


def hold(flaws: Sequence[str]) -> None:
    """Raise ``BenchFailed`` if there are flaws that invalidate measurements."""
    if flaws:
        raise BenchFailed(f"not fit for measuring: {'; '.join(flaws)}")


class CommandProcess:
    """One process of the benchmark. Its output goes to ``log``."""

    def __init__(self, module: str, log: Path, environ: dict[str, str] | None = None) -> None:
        self._name, self._log = module, log
        with log.open("ab") as sink:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, **(environ or {})},
                # Ctrl-C in the terminal is for the parent, which then ends its children in order.
                start_new_session=True,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        self._pending = b""

    @property
    def pid(self) -> int:
        """The pid of the child, the root of its process tree."""
        return self._process.pid

    def ask(self, command: Json, timeout_s: float, heard: OnProgress = lambda _: None) -> Json:
        """Send a command and wait for its answer. Raises ``BenchFailed``."""
        self.send(command)
        return self.receive(timeout_s, heard)

    def send(self, command: Json) -> None:
        """Send a command. Raises ``BenchFailed`` where the child has ended."""
        try:
            self._in.write(json.dumps(command).encode() + b"\n")
            self._in.flush()
        except BrokenPipeError:
            raise self._failed("has ended") from None

    def receive(self, timeout_s: float, heard: OnProgress = lambda _: None) -> Json:
        """Wait for the answer to the last command. Raises ``BenchFailed``.

        ``heard`` gets what the child tells before it answers.
        """
        deadline_s = time.monotonic() + timeout_s
        while "told" in (answer := self._line(deadline_s)):
            heard(answer["told"])
        if "failed" in answer:
            raise self._failed(answer["failed"])
        return answer

    def close(self) -> None:
        """End the child and all its descendants; kill them after a time limit."""
        family = descendants(PROC, self.pid)
        with contextlib.suppress(BrokenPipeError):
            self._in.close()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            family = descendants(PROC, self.pid)
            self._process.kill()
            self._process.wait()
        self._out.close()
        _end_orphans(family)

    def _line(self, deadline_s: float) -> Json:
        parts = [self._pending]
        while b"\n" not in parts[-1]:
            parts.append(self._read(deadline_s))
        line, _, self._pending = b"".join(parts).partition(b"\n")
        said: Json = json.loads(line)
        return said

    def _read(self, deadline_s: float) -> bytes:
        left_s = max(0.0, deadline_s - time.monotonic())
        if not select.select([self._out], [], [], left_s)[0]:
            raise self._failed("does not answer")
        chunk = os.read(self._out.fileno(), READ_SIZE)
        if not chunk:
            # It has closed its end and cleans up; the reason is in the log when it has exited.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE_S)
            raise self._failed("has ended")
        return chunk

    def _failed(self, how: str) -> BenchFailed:
        said = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        words = "\n".join(["", *said[-LAST_WORDS:]])
        return BenchFailed(f"{self._name} {how}.{words if said else ''}")


def _end_orphans(family: list[ProcessIdentity]) -> None:
    """End processes that outlived the child, after it was killed or has crashed."""
    for number, patience_s in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 3.0)):
        left = [one for one in family if is_alive(PROC, one)]
        for one in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, number)
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s and any(is_alive(PROC, one) for one in left):
            time.sleep(0.05)


def serve_commands(carry_out: Callable[[Json, OnProgress], Json]) -> None:
    """Execute the commands from stdin until it closes: the child's end.

    ``carry_out`` may report progress before it returns the answer. All prints go to stderr; an
    ``RkserveError`` is the answer to its command.
    """
    answers = os.dup(1)
    os.dup2(2, 1)
    with os.fdopen(answers, "wb") as out:

        def say(words: Json) -> None:
            out.write(json.dumps(words).encode() + b"\n")
            out.flush()

        for command in _commands():
            try:
                answer = carry_out(command, lambda words: say({"told": words}))
            except RkserveError as exc:
                answer = {"failed": str(exc)}
            say(answer)


def _commands() -> Iterator[Json]:
    for line in sys.stdin.buffer:
        yield json.loads(line)
