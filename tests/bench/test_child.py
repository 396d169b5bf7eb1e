"""Child processes that execute commands: answers, failures, and what they leave behind."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from rkserve.bench.child import BenchFailed, CommandProcess
from rkserve.bench.processes import is_alive, parse_stat


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A child's module, which also starts a process of its own that nothing else would end."""
    (tmp_path / "echo_child.py").write_text(
        "import os, subprocess\n"
        "from rkserve.bench.child import BenchFailed, serve_commands\n"
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
            "from rkserve.bench.child import CommandProcess\n"
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
