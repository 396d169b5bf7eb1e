"""The page of the comparison."""

from __future__ import annotations

from contextlib import AbstractContextManager

from benchmarks.serving.plain.measure import Figures, Running
from benchmarks.serving.plain.report import (
    Result,
    figures_table,
    page,
    parts_table,
    ratio_table,
)
from benchmarks.serving.plain.sides import Side
from rkserve.bench.results import Machine

TITLES = {"plain": "plain Ray Serve", "smg": "SMG"}
MACHINE = Machine(cores=2, processor="A", memory_gb=16.0, versions={})


def side(name: str) -> Side:
    def unused(*_: object) -> AbstractContextManager[Running]:
        raise AssertionError

    return Side(name, TITLES[name], f"head of {name}", f"boards of {name}", unused)


def figures(name: str, streams: int, **gross: float) -> Figures:
    net = {part: ms / 2 for part, ms in gross.items()}
    return Figures(name, streams, 400.0, 3.25, gross, net, 0.875)


PLAIN = figures("plain", 8, proxy=1.0, router=1.0, gcs=9.0, **{"board replica": 4.0})
GATEWAY = figures("smg", 8, gateway=0.5, upstream=1.0)


def test_each_side_has_its_head_and_the_sum_with_boards() -> None:
    lines = figures_table([PLAIN, GATEWAY], TITLES).splitlines()
    assert lines[2] == "| plain Ray Serve | 8 | 400 | 3.2 | 2.000 | 1.000 | 6.000 | 3.000 |"
    assert lines[3] == "| SMG | 8 | 400 | 3.2 | 0.500 | 0.250 | 1.500 | 0.750 |"


def test_ratios_are_to_the_plain_side_at_as_many_streams() -> None:
    alone = figures("smg", 1, gateway=0.5)
    lines = ratio_table([PLAIN, GATEWAY, alone], TITLES).splitlines()
    assert lines[2:] == ["| SMG | 8 | 0.250 | 0.250 | 0.250 | 0.250 |"]


def test_a_cost_of_the_plain_side_below_the_clock_gives_no_ratio() -> None:
    nothing = figures("plain", 8, proxy=0.0)
    assert ratio_table([nothing, GATEWAY], TITLES).endswith("| SMG | 8 | - | - | - | - |")


def test_parts_that_a_side_lacks_are_marked_and_others_are_beside() -> None:
    lines = parts_table([PLAIN, GATEWAY], TITLES).splitlines()
    assert lines[2] == "| plain Ray Serve | 8 | 1.000 | 1.000 | - | 4.000 | - | - | 9.000 | 88% |"
    assert lines[3] == "| SMG | 8 | - | - | 0.500 | - | - | 1.000 | 0.000 | 88% |"


def test_the_page_names_what_is_head_and_board_and_why_a_side_has_no_figures() -> None:
    failed = Result(side("smg"), [], "it ended\nwith exit code 1")
    text = page([Result(side("plain"), [PLAIN]), failed], 8, MACHINE)
    assert "- **Not measured**: SMG: it ended with exit code 1\n" in text
    assert "| plain Ray Serve | head of plain | boards of plain |" in text
    assert "\n\n\n" not in text


def test_a_side_that_fails_with_all_streams_keeps_its_first_figures() -> None:
    text = page([Result(side("smg"), [GATEWAY], "HTTP 503")], 8, MACHINE)
    assert "- **Not measured**: SMG with all streams: HTTP 503\n" in text
    assert "| SMG | 8 | 400 |" in text
    assert "As a share" not in text


def test_a_page_without_any_figures_is_only_its_reasons() -> None:
    text = page([Result(side("smg"), [], "no network", left_out=True)], 8, MACHINE)
    assert "no network" in text
    assert "tokens/s" not in text
