"""Targets side by side: the order of their outputs, their results, and an interrupt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.paths import PROJECT

SCRIPT = PROJECT / "scripts" / "side_by_side.py"
LIMIT_S = 60.0


def started(folder: Path, makefile: str, *names: str) -> subprocess.Popen[str]:
    (folder / "Makefile").write_text(makefile, encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *names],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "MAKEFLAGS": "w"},
    )


def test_targets_run_at_the_same_time_and_their_outputs_do_not_mix(tmp_path: Path) -> None:
    # Each waits for the other, which ends only if both run.
    makefile = (
        "first:\n\t@echo one; touch 1; until [ -e 2 ]; do sleep 0.05; done; echo two\n"
        "second:\n\t@echo three; touch 2; until [ -e 1 ]; do sleep 0.05; done; echo four >&2\n"
    )
    process = started(tmp_path, makefile, "first", "second")
    output, _ = process.communicate(timeout=LIMIT_S)
    lines = output.splitlines()
    assert lines[:4] == ["one", "two", "three", "four"]
    assert lines[4].startswith("make first: passed after ")
    assert lines[5].startswith("make second: passed after ")
    assert process.returncode == 0


def test_a_target_that_fails_ends_none_of_the_others(tmp_path: Path) -> None:
    makefile = (
        "bad:\n\t@touch failed; exit 3\n"
        "good:\n\t@until [ -e failed ]; do sleep 0.05; done; echo whole\n"
    )
    process = started(tmp_path, makefile, "bad", "good")
    output, _ = process.communicate(timeout=LIMIT_S)
    assert "\nwhole\n" in output
    assert "make bad: failed (exit code 2) after" in output
    assert "make good: passed after" in output
    assert process.returncode == 1


def test_an_interrupt_ends_all_of_them(tmp_path: Path) -> None:
    makefile = "one two:\n\t@echo $$$$ > $@.new; mv $@.new $@.pid; exec sleep 600\n"
    process = started(tmp_path, makefile, "one", "two")
    until_s = time.monotonic() + LIMIT_S
    while not all((tmp_path / name).exists() for name in ("one.pid", "two.pid")):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGINT
    for name in ("one.pid", "two.pid"):
        assert not Path(f"/proc/{(tmp_path / name).read_text().strip()}").exists()
