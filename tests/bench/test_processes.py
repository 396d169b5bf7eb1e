"""What the benchmark reads from /proc, and what it adds up from it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rkserve.bench.processes import (
    MS_PER_TICK,
    CpuUse,
    ProcessIdentity,
    ProcessMemory,
    descendants,
    is_alive,
    memory,
    parse_machine,
    parse_rollup,
    parse_stat,
    part_of,
    snapshot,
)
from tests.support.values.bench_answers import reading


def stat_line(pid: int, name: str, parent: int, ticks: tuple[int, int], nice: int = 0) -> str:
    user, system = ticks
    return (
        f"{pid} ({name}) S {parent} 1 1 0 -1 4194560 100 0 0 0 {user} {system} 7 7 "
        f"20 {nice} 3 0 {pid * 10} 1000000 500 18446744073709551615"
    )


def write_process(root: Path, pid: int, parent: int, command: str, rss: int = 10) -> None:
    folder = root / str(pid)
    folder.mkdir()
    (folder / "stat").write_text(stat_line(pid, "python", parent, (1, 1)))
    (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode())
    (folder / "smaps_rollup").write_text(f"00-ff ---p\nRss:   {rss} kB\nPss:   {rss // 2} kB\n")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("python", id="plain"),
        pytest.param("ray::Serve Replica", id="with a blank"),
        pytest.param("a) S 1 (b", id="that imitates the fields behind it"),
    ],
)
def test_a_stat_line_is_read_whatever_the_process_is_called(name: str) -> None:
    stat = parse_stat(stat_line(42, name, 7, (150, 50), nice=15))

    assert stat.identity == ProcessIdentity(42, 420)
    assert (stat.parent, stat.nice, stat.zombie) == (7, 15, False)
    assert stat.cpu_ms == pytest.approx(200 * MS_PER_TICK)


def test_memory_is_read_in_bytes_and_swap_lines_are_not_mistaken_for_it() -> None:
    text = (
        "55-7f ---p 0 0:0 0 [rollup]\nRss:  2000 kB\nPss:  900 kB\nPss_Dirty: 5 kB\nSwapPss: 7 kB"
    )

    assert parse_rollup(text) == ProcessMemory(2000 * 1024, 900 * 1024)


def test_the_machine_is_busy_with_all_but_idling_waiting_and_being_stolen_from() -> None:
    times = parse_machine("cpu  100 20 30 4000 500 1 2 60 99 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")

    assert times.busy_ms == pytest.approx(153 * MS_PER_TICK)
    assert times.stolen_ms == pytest.approx(60 * MS_PER_TICK)


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("ray::ServeReplica:rkserve:Board-sim", "board replica"),
        ("ray::ServeReplica:rkserve:Router", "router"),
        ("ray::ProxyActor", "proxy"),
        ("ray::ServeController", "controller"),
        ("python -m rkserve.native.engine.process 1.0", "engine"),
        ("/x/ray/core/src/ray/raylet/raylet --raylet_socket_name=/tmp/s", "raylet"),
        ("/x/ray/core/src/ray/gcs/gcs_server --log_dir=/tmp/l", "gcs"),
        ("python -m benchmarks.harness.client", "client"),
        ("ray::IDLE", "other Ray"),
    ],
)
def test_a_process_is_known_by_its_command_line(command: str, part: str) -> None:
    assert part_of(command) == part


def test_a_tree_is_followed_down_also_to_pids_that_are_smaller_than_their_parents(
    tmp_path: Path,
) -> None:
    write_process(tmp_path, 500, 1, "python -m rkserve.bench.cluster")
    write_process(tmp_path, 30, 500, "ray::ServeReplica:rkserve:Board-sim", rss=4000)
    write_process(tmp_path, 700, 30, "python -m rkserve.native.engine.process 1.0")
    write_process(tmp_path, 31, 1, "ray::ServeReplica:other:Board-sim")

    found = {identity.pid: part for identity, (part, _) in snapshot(tmp_path, [500]).items()}

    assert found == {500: "driver", 30: "board replica", 700: "engine"}
    assert {one.pid for one in descendants(tmp_path, 500)} == {30, 700}
    assert memory(tmp_path, [500])["board replica"] == [ProcessMemory(4000 * 1024, 2000 * 1024)]


def test_a_pid_that_is_used_again_is_another_process(tmp_path: Path) -> None:
    write_process(tmp_path, 30, 1, "x")

    assert is_alive(tmp_path, ProcessIdentity(30, 300))
    assert not is_alive(tmp_path, ProcessIdentity(30, 299))
    assert not is_alive(tmp_path, ProcessIdentity(31, 310))


def test_cpu_use_adds_up_over_stretches_and_counts_a_new_process_from_its_start() -> None:
    use = CpuUse(cores=2)

    use.add(reading(0.0, 0.0, router=100.0), reading(1.0, 600.0, router=150.0, engine=30.0))
    use.add(reading(5.0, 900.0, router=400.0), reading(6.0, 1100.0, router=420.0))

    assert use.by_part_ms == {"router": 70.0, "engine": 30.0}
    assert use.wall_ms == pytest.approx(2000.0)
    assert use.ours_share == pytest.approx(100 / 4000)
    assert use.others_share == pytest.approx(700 / 4000)
    assert use.stolen_share == pytest.approx(20 / 4000)


def test_a_shell_that_only_names_a_process_is_not_taken_for_it() -> None:
    mark = f"watched-{os.getpid()}"
    code = f"from rkserve.bench.processes import *; print(pids_with(PROC, '{mark}'), end='')"
    found = subprocess.run(
        ["sh", "-c", f'"$0" -c "$1"; true {mark}', sys.executable, code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert found.stdout == "[]"
