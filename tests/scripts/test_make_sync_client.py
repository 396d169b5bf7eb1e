"""The synchronous client is generated from the asynchronous one, and up to date."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import PROJECT

SCRIPT = PROJECT / "scripts" / "make_sync_client.py"


def test_the_synchronous_client_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_asynchronous_name_without_a_rule_is_an_error(tmp_path: Path) -> None:
    source = tmp_path / "asynchronous.py"
    source.write_text("from somewhere import run_async_thing\n")
    generate = runpy.run_path(str(SCRIPT))["generate"]
    with pytest.raises(SystemExit, match="no rule for run_async_thing"):
        generate(str(source))
