"""The command of the comparison: the choice of sides, and sides that fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.harness.command import FAILED
from benchmarks.serving.plain import __main__ as command
from benchmarks.serving.plain.gateways import LeftOut
from benchmarks.serving.plain.measure import Figures, Running
from benchmarks.serving.plain.sides import SIDES, Side
from rkserve.bench.processes import BenchFailed, MachineTimes, ProcessReading
from rkserve.bench.systems import Note

RUNNING = Running(1, lambda: ProcessReading(0.0, {}, MachineTimes(0.0, 0.0)))


def side(name: str, failure: Exception | None = None) -> Side:
    @contextmanager
    def opened(_folder: Path, _boards: int, _note: Note) -> Iterator[Running]:
        if failure is not None:
            raise failure
        yield RUNNING

    return Side(name, name, "head", "boards", opened)


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> dict[str, Side]:
    """Sides that start no process: one has figures, the others fail."""

    def measured(
        name: str, _running: Running, _seconds: float, loads: tuple[int, ...]
    ) -> Iterator[Figures]:
        yield Figures(name, loads[0], 48.0, 1.0, {"proxy": 1.0}, {"proxy": 1.0}, 0.5)
        if name == "breaks":
            raise BenchFailed("HTTP 503")

    found = {
        one.name: one
        for one in (
            side("breaks"),
            side("absent", LeftOut("no network")),
            side("refused", ConnectionRefusedError("refused")),
            side("plain"),
        )
    }
    monkeypatch.setattr(command, "SIDES", found)
    monkeypatch.setattr(command, "measure", measured)
    return found


def test_all_sides_are_measured_unless_some_are_chosen_and_the_order_stays() -> None:
    assert command.options([]).sides == [*SIDES.values()]
    assert [one.name for one in command.options(["--sides", "rkserve, plain"]).sides] == [
        "plain",
        "rkserve",
    ]


def test_an_unknown_side_is_refused_with_the_known_ones(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        command.options(["--sides", "plain,nginx"])
    assert "'nginx': not some of plain,haproxy" in capsys.readouterr().err


def test_a_side_that_fails_is_on_the_page_and_the_others_go_on(
    sides: dict[str, Side], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command.main(["--output", str(tmp_path / "page.md")]) == FAILED
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert "breaks with all streams: HTTP 503" in text
    assert "absent: no network" in text
    assert "refused: refused" in text
    assert "| plain | 1 | 48 |" in text
    assert "breaks: HTTP 503; refused: refused" in capsys.readouterr().err


@pytest.mark.usefixtures("sides")
def test_a_side_that_cannot_be_installed_is_no_failure() -> None:
    assert command.main(["--sides", "absent,plain"]) == 0
