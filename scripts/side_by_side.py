"""Run targets of the Makefile at the same time, and print their outputs one after the other.

``python scripts/side_by_side.py check cluster unit``: the output of the first target is printed as
it comes, that of each later one from its beginning once those before have ended. A target that
fails ends none of the others. Exits with 1 if any has failed.

Targets named later run at a lower priority: name those first whose tests have the most time limits.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO

POLL_S = 0.1
NICER = 2  # per target: a test in the last one must still get its share
END_S = 60.0  # tests end their clusters after an interrupt


@dataclass
class Run:
    """A running target; its output goes into a file without a name."""

    name: str
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    started_s: float
    took_s: float | None = None

    def ended(self) -> bool:
        """Return whether the target has ended; its duration is taken at the first such call."""
        if self.took_s is None and self.process.poll() is not None:
            self.took_s = time.monotonic() - self.started_s
        return self.took_s is not None

    def result(self) -> str:
        """Return the result of an ended target as a line."""
        code = self.process.returncode
        word = "passed" if code == 0 else f"failed (exit code {code})"
        return f"make {self.name}: {word} after {self.took_s:.0f} s"


def _in_a_group() -> None:
    """Prepare a target's process: a group of its own, which an interrupt ends.

    It has no session of its own, which the kernel would give a share of its own. In the background
    of a shell an interrupt is ignored, which processes inherit.
    """
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(names: Sequence[str], stack: ExitStack) -> list[Run]:
    """Start ``make NAME`` for each name, in a process group of its own."""
    # The outer make's job server is not for these: each target counts its own processes.
    environ = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS")}
    if sys.stdout.isatty():
        environ.setdefault("PY_COLORS", "1")
    runs = []
    for number, name in enumerate(names):
        nicer = str(NICER * number)
        output = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
        process = subprocess.Popen(
            ["nice", "-n", nicer, "make", "--no-print-directory", name],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            preexec_fn=_in_a_group,  # noqa: PLW1509 - this process has one thread
        )
        runs.append(Run(name, process, output, time.monotonic()))
    return runs


def follow(runs: Sequence[Run], into: BinaryIO) -> None:
    """Copy the outputs in order, each until its target has ended."""
    for run in runs:
        with Path(f"/proc/self/fd/{run.output.fileno()}").open("rb") as written:
            while True:
                done = [one.ended() for one in runs][runs.index(run)]
                shutil.copyfileobj(written, into)
                into.flush()
                if done:
                    break
                time.sleep(POLL_S)


def end(runs: Sequence[Run]) -> None:
    """Interrupt what still runs, and kill what does not end then."""
    for one in runs:
        if one.process.poll() is None:
            os.killpg(one.process.pid, signal.SIGINT)
    until_s = time.monotonic() + END_S
    for one in runs:
        try:
            one.process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()


def main(names: Sequence[str]) -> int:
    """Run the targets; return the exit code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with ExitStack() as stack:
        runs = start(names, stack)
        try:
            follow(runs, sys.stdout.buffer)
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        finally:
            end(runs)
        print(*(one.result() for one in runs), sep="\n", flush=True)
        return int(any(one.process.returncode for one in runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
