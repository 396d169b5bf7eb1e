"""Figures of the hardware that are worse than they should be: their limits and commands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from rkserve.core.board_report import Hardware
from rkserve.verdicts.hardware import (
    Shortfall,
    heat,
    highest_ddr_hz,
    low_ddr,
    low_disk,
    low_memory,
    low_npu,
)
from tests.support.values.cluster_facts import HEALTHY


@pytest.mark.parametrize(
    ("look", "field", "below", "above"),
    [
        (low_ddr, "ddr_hz", 2_000_000_000, 2_007_000_000),
        (low_npu, "npu_hz", 949_000_000, 950_000_000),
        (heat, "temperature_c", 80.0, 79.9),
        (low_memory, "memory_available_bytes", 639_999_999, 640_000_000),
    ],
)
def test_a_figure_is_worse_than_it_should_be_beyond_its_limit_only(
    look: Callable[[Hardware], Shortfall | None], field: str, below: float, above: float
) -> None:
    def reading(value: Any) -> Hardware:
        return replace(HEALTHY, **{field: value})

    found = look(reading(below))
    assert found is not None
    assert found.sentence
    assert found.command
    assert look(reading(above)) is None
    assert look(reading(None)) is None
    assert look(Hardware()) is None


def test_the_highest_memory_clock_is_the_board_s_own_or_the_soc_s() -> None:
    assert highest_ddr_hz(HEALTHY) == 2_112_000_000
    assert highest_ddr_hz(replace(HEALTHY, ddr_max_hz=1_056_000_000)) == 1_056_000_000
    assert highest_ddr_hz(Hardware(soc="RV1126B")) == 1_332_000_000
    assert highest_ddr_hz(Hardware(soc="X")) is None


@pytest.mark.parametrize(
    ("governor", "command"),
    [
        ("powersave", "echo performance | sudo tee"),
        ("rknpu_ondemand", "echo 1000000000 | sudo tee"),
    ],
)
def test_an_npu_clock_is_raised_by_its_governor_or_by_its_limit(
    governor: str, command: str
) -> None:
    found = low_npu(replace(HEALTHY, npu_hz=300_000_000, npu_governor=governor))
    assert found is not None
    assert found.command.startswith(command)


def test_a_full_disk_names_the_folder_where_it_is_known() -> None:
    found = low_disk("/var/my state", 10_000_000)
    assert found is not None
    assert found.sentence.startswith("/var/my state has 10 MB free")
    assert "'/var/my state'" in found.command
    assert low_disk("", 1_000_000_000) is None
    assert low_disk("", None) is None
