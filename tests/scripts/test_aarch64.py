"""arm64 under emulation: the lock's wheels for another Python, and the results of test files."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.aarch64 import EmulatedRoot, FileResult, Report, files_of, locked, render
from tests.support.paths import PROJECT

LOCK = """\
one==1.0 \\
    --hash=sha256:aa
    # via two
old==1.0 ; python_full_version < '3.11.5' \\
    --hash=sha256:bb
old==2.0 ; python_full_version >= '3.11.5' \\
    --hash=sha256:cc
arm==3.0 ; platform_machine == 'aarch64' \\
    --hash=sha256:dd
win==4.0 ; sys_platform == 'win32' \\
    --hash=sha256:ee
"""


@pytest.mark.parametrize(("python", "old"), [("3.11.2", "old==1.0"), ("3.13.5", "old==2.0")])
def test_markers_are_those_of_the_other_machine(tmp_path: Path, python: str, old: str) -> None:
    lock = tmp_path / "lock"
    lock.write_text(LOCK)
    lines = locked(lock, python).splitlines()
    pinned = [line.removesuffix(" \\") for line in lines if "==" in line]
    assert pinned == ["one==1.0", old, "arm==3.0"]
    assert sum("--hash" in line for line in lines) == 3


def test_the_lock_s_own_lines_are_understood() -> None:
    found = locked(PROJECT / "requirements.lock", "3.11.2")
    names = [line.split("==")[0] for line in found.splitlines() if "==" in line and line[0] != " "]
    assert len(names) == len(set(names)), "each package once"
    assert "ray" in names


def test_a_command_runs_in_the_root_and_leaves_nothing(tmp_path: Path) -> None:
    words = EmulatedRoot(tmp_path).command(("python3", "-V"), "/opt")
    assert words[:5] == ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    assert words[-4:] == [str(tmp_path), "/opt", "python3", "-V"]


def test_folders_and_files_are_test_files() -> None:
    found = list(files_of(["tests/scripts", "tests/test_words.py"]))
    assert "tests/scripts/test_aarch64.py" in found
    assert found[-1] == "tests/test_words.py"


def test_the_report_names_failures_and_files_that_were_cut() -> None:
    files = [
        FileResult("tests/a.py", passed=3, seconds=1.5),
        FileResult("tests/b.py", passed=1, failed=1, failures=["tests.b::test_x"], cut=True),
    ]
    text = render(Report("bookworm", "3.11.2", 150.0, 581.0, 276.0, files))
    assert "tests/b.py (cut by the time limit)" in text
    assert "tests.b::test_x" in text
    assert "4 passed, 1 failed, 0 skipped; 1 of 2 files to their end" in text
    assert text.splitlines()[-1] == "rkserve up: not tried"
