"""A short soak as a command: a cluster with all of its traffic, and a few faults of the head."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rkserve.deployments.haproxy import available
from tests.support.paths import PROJECT

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.long,
    pytest.mark.skipif(not available(), reason="Ray has no HAProxy for this platform"),
]
LIMIT_S = 3000.0


def test_a_short_soak_breaks_no_rule_and_leaves_no_process(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ["--hours", "0.03", "--boards", "3", "--streams", "8", "--fault-every", "20"]
    words = [sys.executable, "-m", "benchmarks.soak", *options, "--json", str(figures)]
    done = subprocess.run(
        words, cwd=PROJECT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    found = json.loads(figures.read_text())
    assert found["flaws"] == {}, found["examples"]
    assert sum(one["fired"] for one in found["faults"].values()) > 0
    assert "| a process is left over" in done.stdout
    assert done.returncode == 0, done.stderr[-2000:]
