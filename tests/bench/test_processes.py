"""What the benchmark reads from /proc, and what it adds up from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rkserve.bench.processes import (
    MS_PER_TICK,
    PROC,
    BenchFailed,
    CommandProcess,
    CpuUse,
    ProcessIdentity,
    ProcessMemory,
    age_s,
    descendants,
    has_ended_below,
    is_alive,
    memory_of,
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


def test_the_age_of_a_process_counts_its_imports() -> None:
    before_s = time.monotonic()
    with subprocess.Popen(("sleep", "100")) as child:
        time.sleep(0.2)
        age = age_s(PROC, child.pid)
        passed_s = time.monotonic() - before_s
        child.kill()
    tick_s = MS_PER_TICK / 1e3
    assert 0.2 - tick_s <= age <= passed_s + tick_s
    assert age_s(PROC, child.pid) == 0.0, "it has ended"


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
    replicas = memory_of(tmp_path, snapshot(tmp_path, [500]))["board replica"]
    assert replicas == [ProcessMemory(4000 * 1024, 2000 * 1024)]


def test_an_ended_process_is_known_by_its_program_until_it_is_collected(tmp_path: Path) -> None:
    for pid, name, parent, state in (
        (5, "start", 1, "S"),
        (6, "raylet", 5, "Z"),
        (7, "gcs", 5, "S"),
    ):
        folder = tmp_path / str(pid)
        folder.mkdir()
        line = stat_line(pid, name, parent, (0, 0)).replace(") S ", f") {state} ")
        (folder / "stat").write_text(line)
        (folder / "comm").write_text(f"{name}\n")
    assert has_ended_below(tmp_path, 5, "raylet")
    assert not has_ended_below(tmp_path, 5, "gcs")
    assert not has_ended_below(tmp_path, 7, "raylet")


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


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A child's module, which also starts a process of its own that nothing else would end."""
    (tmp_path / "echo_child.py").write_text(
        "import os, subprocess\n"
        "from rkserve.bench.processes import BenchFailed, serve_commands\n"
        "def carry_out(command, tell):\n"
        "    print('noise on stdout')\n"
        "    if command.get('fail'): raise BenchFailed('it cannot')\n"
        "    if command.get('die'): os._exit(3)\n"
        "    for number in range(command.get('steps', 0)): tell({'step': number})\n"
        "    if command.get('spawn'):\n"
        "        orphan = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "        return {'pid': orphan.pid}\n"
        "    return {'echo': command}\n"
        "serve_commands(carry_out)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "echo_child"


def test_a_child_answers_and_what_it_prints_does_not_disturb(echo: str, tmp_path: Path) -> None:
    child = CommandProcess(echo, tmp_path / "log")
    try:
        long = "x" * 300_000
        assert child.ask({"text": long}, 30) == {"echo": {"text": long}}
        assert child.ask({"n": 2}, 30) == {"echo": {"n": 2}}
    finally:
        child.close()

    assert "noise on stdout" in (tmp_path / "log").read_text()


def test_a_child_tells_how_far_it_is_before_it_answers(echo: str, tmp_path: Path) -> None:
    child = CommandProcess(echo, tmp_path / "log")
    heard: list[dict[str, int]] = []
    try:
        assert child.ask({"steps": 3}, 30, heard.append) == {"echo": {"steps": 3}}
    finally:
        child.close()

    assert heard == [{"step": 0}, {"step": 1}, {"step": 2}]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        pytest.param({"fail": True}, "echo_child it cannot", id="it refuses"),
        pytest.param({"die": True}, "echo_child has ended", id="it dies"),
    ],
)
def test_a_childs_failure_is_raised_with_its_log(
    echo: str, tmp_path: Path, command: dict[str, bool], words: str
) -> None:
    child = CommandProcess(echo, tmp_path / "log")
    try:
        with pytest.raises(BenchFailed, match=words) as caught:
            child.ask(command, 30)
    finally:
        child.close()

    assert "noise on stdout" in str(caught.value)


def test_closing_a_child_ends_what_it_left_behind(echo: str, tmp_path: Path) -> None:
    child = CommandProcess(echo, tmp_path / "log")
    orphan = child.ask({"spawn": True}, 30)["pid"]
    started = parse_stat(Path(f"/proc/{orphan}/stat").read_text()).identity

    child.close()

    assert not is_alive(Path("/proc"), started)


def test_a_child_ends_by_itself_when_its_parent_is_killed(echo: str, tmp_path: Path) -> None:
    import os
    import subprocess

    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, time\nfrom pathlib import Path\n"
            "from rkserve.bench.processes import CommandProcess\n"
            f"child = CommandProcess({echo!r}, Path({str(tmp_path / 'log')!r}))\n"
            "child.ask({}, 30)\nprint(child.pid, flush=True)\ntime.sleep(600)\n",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    started = parse_stat(Path(f"/proc/{pid}/stat").read_text()).identity

    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()

    deadline_s = time.monotonic() + 30
    while is_alive(Path("/proc"), started) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not is_alive(Path("/proc"), started)
