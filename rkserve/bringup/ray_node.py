"""`ray start`, and the watch over the processes that it leaves behind.

``ray start --block`` watches them, too, with all of Ray imported. This program is run by its path
and without site-packages, and imports little of the standard library::

    python -I -S ray_node.py PYTHON -m ray.scripts.scripts start --head ...

It ends with the exit code of ``ray start`` where that fails, else when the raylet or the GCS ends.
SIGTERM and SIGINT end Ray in order: the raylet first, which ends its workers.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36
RAYLET, GCS = "raylet", "gcs_server"
NEEDED = (RAYLET, GCS)
# Printed by the hook of ``ray start`` once the raylet has registered; applications may connect.
RAYLET_RUNS = "rkserve: the raylet runs, and Ray's dashboard follows"
# Set where the dashboard waits for a line of standard input, so that it takes no time of the start.
DASHBOARD_WAITS = "RKSERVE_DASHBOARD_WAITS"
# The time of each to end in order; Ray's own `--block` gives one second, which is too short for a
# busy board.
PATIENCE_S = 5.0
POLL_S = 0.05
ENDED = 1  # the exit code after Ray has ended by itself


class Interrupted(Exception):
    """SIGTERM or SIGINT arrived."""


def children() -> dict[int, str]:
    """Return the pids of this process's children that run, and the names of their programs."""
    found = {}
    own = os.getpid()
    pids = [int(pid) for pid in _text(f"/proc/{own}/task/{own}/children").split()]
    for pid in pids:
        try:
            name, _, fields = _text(f"/proc/{pid}/stat").partition("(")[2].rpartition(")")
        except OSError:
            continue  # it was no child of this process yet, and has ended
        if fields.split()[0] != "Z":
            found[pid] = name
    return found


def _text(path: str) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 # pathlib is large
        return file.read()


def main(command: list[str]) -> int:
    """Run ``command``, and wait until Ray has ended. Returns the exit code."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _interrupt)
    try:
        return _run(command)
    except Interrupted:
        return 0
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        _end_all()


def _interrupt(*_: object) -> None:
    raise Interrupted


def _run(command: list[str]) -> int:
    start = os.fork()
    if start == 0:
        try:
            os.execv(command[0], command)
        finally:
            os._exit(127)
    while True:
        pid, status = os.wait()
        if pid == start:
            break
    if status != 0:
        return _exit_code(status)
    # Its processes are children of this one since its end.
    needed = {pid: name for pid, name in children().items() if name in NEEDED}
    if RAYLET not in needed.values():
        _note("The raylet ended with `ray start`.")
        return ENDED
    while True:
        pid, status = os.wait()
        if pid in needed:
            _note(f"{needed[pid]} ended with exit code {_exit_code(status)}.")
            return ENDED


def _note(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return 128 - code if code < 0 else code


def _end_all() -> None:
    """End every child: the raylet, then the GCS, then the others; each by force after its time."""
    for names in ((RAYLET,), (GCS,), ()):
        _end(names)


def _end(names: tuple[str, ...]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        signalled: set[int] = set()
        deadline_s = time.monotonic() + PATIENCE_S
        while (left := _children_of(names)) and time.monotonic() < deadline_s:
            for pid in left - signalled:  # children of one that has ended come to this process
                os.kill(pid, number)
            signalled |= left
            time.sleep(POLL_S)


def _children_of(names: tuple[str, ...]) -> set[int]:
    _reap()  # only here: until then a pid that was read is a child of this process
    return {pid for pid, name in children().items() if not names or name in names}


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return  # none is left


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
