"""Boards of the benchmark's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

START_S = 900.0


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.slow
def test_boards_of_our_own_are_started_loaded_under_each_policy_and_ended(tmp_path: Path) -> None:
    policies: Sequence[str] = ("least_load", "prefix")
    words = [word for name in policies for word in ("--policy", name)]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rkserve", "bench", "smoke", "--boards", "2"),
            *("--time-scale", "0", "--sessions", "4", "--out", str(tmp_path / "out"), *words),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=START_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [run["target"] for run in found["runs"]] == list(policies)
    for run in found["runs"]:
        assert run["asked"] == run["answered"] == 8
        assert run["prefix"]["reporting"] == 8
        assert {"router", "board replica", "engine"} <= run["processes"].keys()
