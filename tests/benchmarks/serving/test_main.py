"""The benchmark's prompts, its command line and its children."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.harness.prompts import messages_of_length
from benchmarks.serving.__main__ import REPORT, options
from benchmarks.serving.measure import FULL, QUICK
from rkserve.api.common.renderer import Renderer
from rkserve.bench.harness.child import BenchFailed, CommandProcess
from rkserve.bench.harness.procfs import is_alive, parse_stat
from rkserve.config.serve_config import resolve_folder
from rkserve.models.folder import open_model_folder


def test_prompts_have_exactly_the_tokens_that_were_asked_for_and_differ() -> None:
    renderer = Renderer(open_model_folder(resolve_folder(Path("models/sim-chat"))))

    prompts = [renderer.chat(messages_of_length(renderer, 128, number)).ids for number in range(16)]

    assert {len(ids) for ids in prompts} == {128}
    assert len(set(prompts)) == 16


def test_a_long_prompt_has_exactly_its_tokens_too() -> None:
    renderer = Renderer(open_model_folder(resolve_folder(Path("models/sim-chat"))))

    assert len(renderer.chat(messages_of_length(renderer, 1000, 1_000_003)).ids) == 1000


def test_a_prompt_that_cannot_be_so_short_is_refused() -> None:
    renderer = Renderer(open_model_folder(resolve_folder(Path("models/sim-chat"))))

    with pytest.raises(BenchFailed, match="no prompt of exactly 5 tokens"):
        messages_of_length(renderer, 5, 0)


@pytest.mark.parametrize(
    ("arguments", "cases", "writes"),
    [
        pytest.param([], "abcdefghi", REPORT, id="a full run writes the page"),
        pytest.param(["--quick"], "abcdefghi", None, id="a quick one does not"),
        pytest.param(["--cases", "d,a"], "ad", None, id="neither do some of the cases"),
        pytest.param(["--cases", "c", "--output", "x.md"], "c", Path("x.md"), id="unless asked"),
    ],
)
def test_the_page_is_only_written_from_a_full_run(
    arguments: list[str], cases: str, writes: Path | None
) -> None:
    asked = options(arguments)

    assert (asked.cases, asked.output) == (cases, writes)
    assert asked.size == (QUICK if "--quick" in arguments else FULL)


def test_the_window_can_be_chosen_and_nothing_else_changes() -> None:
    assert options(["--seconds", "3"]).size == replace(FULL, seconds=3.0)


def test_a_case_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options(["--cases", "a,z"])

    assert "is not some of a,b,c,d,e,f,g,h" in capsys.readouterr().err


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A child's module, which also starts a process of its own that nothing else would end."""
    (tmp_path / "echo_child.py").write_text(
        "import os, subprocess\n"
        "from rkserve.bench.harness.child import BenchFailed, serve_commands\n"
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
            "from rkserve.bench.harness.child import CommandProcess\n"
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
