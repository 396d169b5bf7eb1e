"""The CPU benchmark on a small model: both sides are measured, and reported as ratios."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.cpu.__main__ import COUNTS, Asked, Round, Speed, measure, render
from benchmarks.cpu.model import Shape, write_model
from benchmarks.harness.command import ProgressLine

pytestmark = pytest.mark.engine
SMALL = Shape(size=64, wide=128, layers=2, heads=4, kv_heads=2, vocabulary=512, context=256)
ASKED = Asked(rounds=2, threads=1, prompt=20, tokens=40)


async def test_both_sides_are_measured_by_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of several answers of a small model the first may end before the last begins.
    monkeypatch.setattr("benchmarks.cpu.__main__.COUNTS", (1,))
    monkeypatch.setattr("benchmarks.cpu.__main__.IDS", 200)
    write_model(tmp_path / "m.gguf", SMALL)
    rounds = await measure(tmp_path / "m.gguf", tmp_path, ASKED, ProgressLine())
    assert len(rounds) == ASKED.rounds
    for made in rounds:
        assert made.bare[1].wall > 0
        assert min(made.bare[1].first_ms, made.board[1].first_ms) > 0


def test_the_report_has_the_medians_of_ratios() -> None:
    def made(one: float) -> Round:
        bare = {count: Speed(10.0, 10.0 * (1 + count / 4), 100.0) for count in COUNTS}
        board = {count: Speed(10.0 * one, 10.0 * (1 + count / 4), 103.0) for count in COUNTS}
        return Round(bare, board)

    text = render([made(0.5), made(0.9), made(0.8)], ASKED, SMALL)
    row = next(line for line in text.splitlines() if line.startswith("| 4 "))
    assert [cell.strip() for cell in row.strip("|").split("|")] == [
        *("4", "10.0", "8.0", "0.80", "1.00", "1.00 to 1.00", "1.60", "1.60")
    ]
    assert "adds 3.0 ms (3.0 to 3.0 in half of the rounds)" in text
