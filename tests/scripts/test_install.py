"""The tools that the Makefile needs, and the progress of its installation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import PROJECT

pytestmark = pytest.mark.slow

SCRIPTS = PROJECT / "scripts"


def test_a_shim_that_stands_for_no_python_is_named(tmp_path: Path) -> None:
    shim = tmp_path / "shims" / "python3.12"
    shim.parent.mkdir()
    shim.write_text("#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    done = subprocess.run(
        ["sh", str(SCRIPTS / "check_tools.sh"), "python3.12"],
        env={**os.environ, "PATH": f"{shim.parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"rkserve: {shim} is only a shim, and it says: pyenv: python3.12")
    assert "PYENV_VERSION" in done.stderr


@pytest.mark.parametrize(
    ("over", "shown"),
    [
        pytest.param(
            True, ["  1 of at most 3 packages: ray", "  2 of at most 3 packages: cffi"], id="screen"
        ),
        pytest.param(False, ["  1 of at most 3 packages: ray"], id="log"),
    ],
)
def test_the_installation_shows_its_progress(over: bool, shown: list[str]) -> None:
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import install\n"
        "print(*install.progress(sys.stdin, 3, over=sys.argv[2] == 'True'), sep='|')"
    )
    lines = "Collecting ray==2.60.0 (from -r x)\n  Downloading ray\nCollecting cffi\n"
    done = subprocess.run(
        [sys.executable, "-c", script, str(SCRIPTS), str(over)],
        input=f"{lines}Installing collected packages: cffi, ray\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    pieces = [piece.strip("\r\n ") for piece in done.stdout.split("|")]
    assert pieces == [*(one.strip() for one in shown), "unpacking 2 packages ..."]
