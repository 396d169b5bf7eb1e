"""A board's view of its hardware, asked by several Routers at once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.engine.telemetry import read_telemetry
from rkserve.core.board_report import Hardware
from rkserve.deployments import board_factory
from rkserve.deployments.board_factory import HardwareView
from rkserve.native.sim import telemetry


def view(root: Path) -> HardwareView:
    telemetry.ensure_tree(root, "RK3588", telemetry.BoardReadings())
    return HardwareView(root, "simulated", is_simulated=True)


def test_several_who_ask_at_once_all_get_the_figures(tmp_path: Path) -> None:
    async def ask() -> list[str]:
        hardware = view(tmp_path / "tree")
        found = await asyncio.gather(*(hardware.read(busy=False) for _ in range(8)))
        return [one.soc for one in found if one is not None]

    assert asyncio.run(ask()) == ["RK3588"] * 8


def test_each_question_is_answered_by_a_reading_of_its_time(tmp_path: Path) -> None:
    async def ask() -> list[set[float]]:
        hardware = view(tmp_path / "tree")
        found = [await hardware.read(busy=busy) for busy in (True, False, True)]
        return [set(one.npu_load) for one in found if one is not None]

    assert asyncio.run(ask()) == [{50.0}, {0.0}, {50.0}]


def test_figures_are_read_again_after_a_while_and_when_the_board_begins_to_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings: list[Any] = []

    def counted(*args: Any) -> Hardware:
        readings.append(args)
        return read_telemetry(*args)

    monkeypatch.setattr(board_factory, "read_telemetry", counted)

    async def ask(*busy: bool) -> int:
        readings.clear()
        hardware = view(tmp_path / "tree")
        for one in busy:
            assert await hardware.read(busy=one) is not None
        return len(readings)

    assert asyncio.run(ask(False, False, False)) == 1
    assert asyncio.run(ask(False, True, True, False)) == 3
    monkeypatch.setattr(board_factory, "IDLE_AGE_S", 0.0)
    assert asyncio.run(ask(False, False, False)) == 3
