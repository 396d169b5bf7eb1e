"""The trace of a streamed chat through Router, channel, board and engine."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts import bars
from tests.support.paths import PROJECT


@pytest.mark.engine
def test_a_chat_executes_every_step_of_the_walk_through_the_architecture() -> None:
    done = subprocess.run(
        [sys.executable, str(PROJECT / "scripts" / "trace_chat.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    executed = {line.strip() for line in done.stdout.splitlines() if line.startswith("  ")}
    assert set(bars.spine()) - executed == set()
