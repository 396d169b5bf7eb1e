"""The measurement of access lines and traces, with few requests."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.paths import PROJECT

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.mark.long
def test_every_way_has_a_figure_for_its_own_part_and_for_whole_requests() -> None:
    command = [sys.executable, "-m", "benchmarks.tracing", "--requests", "8", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=PROJECT)
    rows = re.findall(r"^(.{30}) +(-?[\d.]+) +(-?[\d.]+)$", done.stdout, re.MULTILINE)
    names = [name.strip() for name, _, _ in rows]
    parts, wholes = names[:7], names[7:]
    assert parts[0] == wholes[0] == "no access lines, no traces"
    assert parts[-1] == wholes[-1] == "and traces of all"
    assert [name for name in parts if "Serve's" not in name] == wholes
    figures = dict(zip(parts, (float(figure) for _, figure, _ in rows), strict=False))
    assert figures["and traces of all"] > figures["and traces of no request"] > 0
    assert done.stderr == "", "the collector has taken all spans"
