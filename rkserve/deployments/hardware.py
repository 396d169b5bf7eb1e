"""Readings of a board's hardware: the kernel's files, or a simulated board's own tree of them.

``board.engine.telemetry`` parses them. A stuck driver must not delay a report: a missing reading
leaves the previous one in place.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

from rkserve.board.engine.telemetry import read_soc, read_telemetry
from rkserve.config.board_group import BoardGroupConfig
from rkserve.core.board_report import Hardware
from rkserve.core.errors import ConfigError
from rkserve.native.sim import telemetry as simulated

log = logging.getLogger(__name__)

ROOT = Path("/")
READ_S = 0.5
BUSY_PERCENT, IDLE_PERCENT = 50, 0  # three cores at 48 to 50 % is what a decoding RK3588 showed


class HardwareView:
    """Reads one board's figures. ``platform`` is the SoC's name, if known."""

    def __init__(self, root: Path, platform: str, *, is_simulated: bool) -> None:
        self._root = root
        self.platform = platform
        self._is_simulated = is_simulated
        self._reading: asyncio.Task[Hardware] | None = None
        self._latest: Hardware | None = None
        self._shown: int | None = None  # the simulated load

    @classmethod
    def of(cls, group: BoardGroupConfig, folder: Path) -> HardwareView:
        """Return the view of a board of ``group``; a simulated one gets its tree in ``folder``."""
        if group.simulated is None:
            return cls(ROOT, read_soc(ROOT) or os.uname().machine, is_simulated=False)
        soc = group.simulated.profile.partition("-")[0].upper()
        try:
            simulated.ensure_tree(folder, soc, simulated.BoardReadings())
        except (ConfigError, OSError) as exc:
            log.warning("the simulated board's figures cannot be shown: %s", exc)
        return cls(folder, "simulated", is_simulated=True)

    async def read(self, *, busy: bool) -> Hardware | None:
        """Return the latest figures; None until there are any."""
        reading = self._reading
        if reading is None:
            reading = asyncio.create_task(asyncio.to_thread(self._read, busy=busy))
            self._reading = reading
        done, _ = await asyncio.wait({reading}, timeout=READ_S)
        if done:
            self._latest = reading.result()
            if self._reading is reading:  # several callers may have waited for it
                self._reading = None
        return self._latest

    def _read(self, *, busy: bool) -> Hardware:
        if self._is_simulated:
            self._show_load(BUSY_PERCENT if busy else IDLE_PERCENT)
        return read_telemetry(self._root)

    def _show_load(self, percent: int) -> None:
        if percent == self._shown:
            return  # each report would write a file
        soc = read_soc(self._root)
        try:
            simulated.show_load(self._root, soc, percent)
            self._shown = percent
        except (ConfigError, OSError) as exc:
            log.debug("the simulated load is not shown: %s", exc)
