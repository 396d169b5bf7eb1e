"""A board's view of its hardware, asked by several Routers at once."""

from __future__ import annotations

import asyncio
from pathlib import Path

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
