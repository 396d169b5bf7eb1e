"""Ways to lose a board, and the report that counts afterwards. With real processes."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.control.faults_site import Site
from benchmarks.harness.board_nodes import BoardNodes
from benchmarks.harness.victims import Ground, Victim
from rkserve.bench.processes import PROC, ProcessIdentity, identity_of

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]


class Told(Site):
    """A cluster that says of its boards what it is given."""

    def __init__(self, boards: list[dict[str, Any]]) -> None:
        self.boards = boards

    def get(self, path: str, **query: str | int) -> Any:
        assert (path, query) == ("/v1/boards", {})
        return {"data": self.boards}


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A replica and its engine, of which a simulated board is thought to be made."""
    environ = {"RKSIM_CONTROL": str(tmp_path / "board-3" / "control")}
    both = [subprocess.Popen(SLEEPS, env=environ) for _ in range(2)]
    yield both
    for one in both:
        one.kill()
        one.wait()


def ground(processes: list[subprocess.Popen[bytes]]) -> Ground:
    """One board of these processes, ready by its report."""
    replica, engine = processes
    board = {"id": "b", "state": "ready", "pid": replica.pid, "engine_pid": engine.pid}
    site = Told([{**board, "circuit": {"state": "closed"}}])
    nodes = BoardNodes.__new__(BoardNodes)  # no node is lost in these
    return Ground(site, nodes, 1, random.Random(0))


def who(process: subprocess.Popen[bytes]) -> ProcessIdentity:
    """The process for good."""
    found = identity_of(PROC, process.pid)
    assert found is not None
    return found


def test_a_board_is_found_by_the_control_file_of_its_engine(
    processes: list[subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    replica, engine = processes
    control = tmp_path / "board-3" / "control"
    found = ground(processes).victim()
    assert found == Victim("b", who(replica), who(engine), 3, control)


def test_a_board_whose_replica_was_killed_is_not_back_as_long_as_only_its_report_says_so(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    there = ground(processes)
    assert len(there._ready()) == 1
    victim = there.victim()
    assert there.kill_replica(victim)
    assert there._ready() == []
    processes[0].wait()
    assert there._ready() == [], "nodes has that pid"
    assert not there.kill_replica(victim), "it is gone, and whoever has its pid is left alone"


def test_a_replica_that_ends_with_its_library_is_counted_once(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    there = ground(processes)
    victim = there.victim()
    victim.control.parent.mkdir()
    fired = victim.control.with_name("control.fired")

    def strike() -> None:
        fired.write_text(str(time.monotonic()), encoding="utf-8")

    for ends in (False, True):
        later = threading.Timer(0.1, strike)
        later.start()
        assert there.abort_library(victim)
        later.join()
        if ends:
            processes[0].kill()
            processes[0].wait()
        assert there.replicas_ended() == ends
    assert there.replicas_ended() == 0


def test_a_process_with_the_pid_of_one_that_was_killed_is_another_one(
    processes: list[subprocess.Popen[bytes]],
) -> None:
    there = ground(processes)
    engine = who(processes[1])
    there._gone.add(ProcessIdentity(engine.pid, engine.started - 1))
    assert len(there._ready()) == 1
