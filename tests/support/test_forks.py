"""Tests in forks are reported as without them, also where their process dies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.paths import PROJECT

CONFTEST = """
from tests.support.forks import Forks

def pytest_runtestloop(session):
    jobs = {}
    for item in session.items:
        jobs.setdefault(item.path, []).append(item)
    Forks(session, list(jobs.values())).run(2)
    return True
"""
DIES = """
import os, pytest, signal, warnings

def test_it_passes(tmp_path):
    assert "fork" in str(tmp_path)

def test_it_fails():
    print("its last words")
    assert 1 == 2

def test_it_warns():
    warnings.warn("of something")

def test_it_dies():
    os.kill(os.getpid(), signal.SIGKILL)

def test_it_comes_after():
    pass
"""
ENDS = """
import os, pytest

@pytest.fixture(scope="module")
def there():
    yield os.getpid()
    raise OSError("at its end")

@pytest.mark.parametrize("number", range(3))
def test_it_is_the_same_process(there, number):
    assert os.getpid() == there
"""


def test_each_test_is_run_once_and_reported(tmp_path: Path) -> None:
    files = {"conftest.py": CONFTEST, "test_dies.py": DIES, "test_ends.py": ENDS}
    files |= {f"test_{number}.py": "def test_it(): pass" for number in range(3)}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PROJECT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout
    assert "2 failed, 9 passed, 1 warning, 1 error" in done.stdout.splitlines()[-1], done.stdout
    assert "its last words" in done.stdout
    assert "UserWarning: of something" in done.stdout
    assert "the process of this test ended with -9" in done.stdout
    assert "ERROR test_ends.py::test_it_is_the_same_process[2] - OSError: at its end" in done.stdout
    passed = [line for line in done.stdout.splitlines() if line.startswith("PASSED ")]
    assert len(passed) == len(set(passed)) == 9
