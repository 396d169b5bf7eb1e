"""The watch over Ray's processes, with small programs in the places of Ray's own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rkserve.bringup import ray_node
from rkserve.bringup.ray_node import ENDED, GCS, RAYLET

pytestmark = pytest.mark.slow

# Leaves its processes behind, as `ray start` does: a raylet with a worker, and others.
START = """
import subprocess, sys
folder, names = sys.argv[1], sys.argv[2:]
for name in names:
    subprocess.Popen([f"{folder}/{name}", f"{folder}/run.sh", name], start_new_session=True)
print("Ray runtime started.")
"""
# Notes its end by SIGTERM; "stubborn" does not end.
RUN = """
trap '{ echo $1 >> ${0%/*}/ended; [ $1 = stubborn ] || exit 0; }' TERM
[ $1 = raylet ] && sleep 600 &
while :; do sleep 0.05; done
"""
WAIT_S = 30.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with programs that have the names of Ray's."""
    for name in (RAYLET, GCS, "dashboard", "stubborn"):
        shutil.copy("/bin/sh", tmp_path / name)
    (tmp_path / "run.sh").write_text(RUN)
    (tmp_path / "start.py").write_text(START)
    return tmp_path


@contextlib.contextmanager
def watch(folder: Path, *names: str, patience_s: float = 5.0) -> Iterator[subprocess.Popen[str]]:
    """Run the watch as the head and boards do, until so many processes run below it."""
    command = [sys.executable, str(folder / "start.py"), str(folder), *names]
    text = (
        f"import runpy, sys; sys.argv[1:] = {command!r}; "
        f"module = runpy.run_path({ray_node.__file__!r}); "
        f"module['main'].__globals__['PATIENCE_S'] = {patience_s}; "
        "sys.exit(module['main'](sys.argv[1:]))"
    )
    child = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", text], stdout=subprocess.PIPE, text=True
    )
    try:
        wait(lambda: {*names} <= {*below(child)} and "python" not in " ".join(below(child)))
        yield child
    finally:
        for one in psutil.Process(child.pid).children(recursive=True) if running(child) else []:
            with contextlib.suppress(psutil.NoSuchProcess):  # ended since it was listed
                one.kill()
        child.kill()
        child.communicate()


def running(child: subprocess.Popen[str]) -> bool:
    return child.poll() is None


def below(child: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """Return the processes below, by name."""
    found = {}
    for one in psutil.Process(child.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[one.name()] = one
    return found


def wait(look: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not look():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def all_ended(processes: dict[str, psutil.Process]) -> bool:
    return not any(one.is_running() for one in processes.values())


def ended(folder: Path) -> list[str]:
    """Return the names of the processes that SIGTERM has ended, in order."""
    return (folder / "ended").read_text().split()


def test_sigterm_ends_the_raylet_first_and_leaves_nothing(folder: Path) -> None:
    with watch(folder, "dashboard", GCS, RAYLET) as child:
        processes = below(child)
        assert "sleep" in processes  # the worker
        child.send_signal(signal.SIGTERM)
        assert child.wait(WAIT_S) == 0
        assert all_ended(processes)
    assert ended(folder) == [RAYLET, GCS, "dashboard"]


@pytest.mark.parametrize("name", [RAYLET, GCS])
def test_the_end_of_a_process_that_ray_needs_ends_all(folder: Path, name: str) -> None:
    with watch(folder, "dashboard", GCS, RAYLET) as child:
        processes = below(child)
        processes[name].kill()
        out, _ = child.communicate(timeout=WAIT_S)
        assert child.returncode == ENDED
        assert all_ended(processes)
    assert out.endswith(f"{name} ended with exit code {128 + signal.SIGKILL}.\n")


def test_ray_goes_on_without_a_process_that_it_does_not_need(folder: Path) -> None:
    with watch(folder, "dashboard", RAYLET) as child:
        processes = below(child)
        processes["dashboard"].kill()
        wait(lambda: not processes["dashboard"].is_running())  # collected, not left as a zombie
        assert running(child)
        assert processes[RAYLET].is_running()


def test_a_process_that_does_not_end_in_order_is_killed(folder: Path) -> None:
    with watch(folder, "stubborn", RAYLET, patience_s=0.5) as child:
        processes = below(child)
        child.send_signal(signal.SIGTERM)
        assert child.wait(WAIT_S) == 0
        assert all_ended(processes)
    assert ended(folder) == [RAYLET, "stubborn"]


def watched(*command: str) -> subprocess.CompletedProcess[str]:
    """Run the watch as the head and boards do, to its end."""
    whole = [sys.executable, "-I", "-S", ray_node.__file__, *command]
    return subprocess.run(whole, capture_output=True, text=True, timeout=WAIT_S, check=False)


@pytest.mark.parametrize(("text", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_a_start_that_fails_has_its_own_exit_code(text: str, code: int) -> None:
    assert watched(sys.executable, "-c", f"import os, sys; {text}").returncode == code


def test_a_start_without_a_raylet_is_a_failure() -> None:
    done = watched(sys.executable, "-c", "pass")
    assert done.returncode == ENDED
    assert done.stdout == "The raylet ended with `ray start`.\n"


def test_a_program_that_is_not_there_is_a_failure() -> None:
    assert watched("/nonexistent/python").returncode == 127


def test_the_watch_needs_no_site_packages_and_little_of_the_library() -> None:
    text = f"import runpy, sys; runpy.run_path({ray_node.__file__!r}); print(*sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", text]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    assert not {"subprocess", "asyncio", "rkserve", "ray"} & {*found.stdout.split()}
