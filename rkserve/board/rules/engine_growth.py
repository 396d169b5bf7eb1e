"""Growth of an engine process, and the limits beyond which it is replaced between two runs.

The vendor's library is reported to leak memory and files over days. An engine that is replaced in
time costs the load of its model; one that the kernel ends costs a run as well. No processes and no
clocks: figures and time are arguments.
"""

from __future__ import annotations

import zlib

from rkserve.core.board_report import EngineUse

# Boards with the same traffic grow alike: their limits differ, so that they do not load at once.
SPREAD = 0.25
FILES_SHARE = 0.5  # of the files that the process may open
REST_S = 600.0  # the least life of an engine: a model that needs the memory would load for ever
MB = 1_000_000


class EngineGrowth:
    """The growth of one board's engines, each from the first figures that are seen of it."""

    def __init__(self, board_id: str, limit_bytes: int) -> None:
        share = zlib.crc32(board_id.encode()) / 2**32
        self._limit_bytes = round(limit_bytes * (1 + SPREAD * share))
        self._pid = 0
        self._first = EngineUse(0)
        self._seen_s = 0.0

    def excess(self, pid: int, use: EngineUse, now_s: float) -> str:
        """Return the reason to replace the engine; empty where there is none."""
        if pid != self._pid:
            self._pid, self._first, self._seen_s = pid, use, now_s
        if now_s - self._seen_s < REST_S:
            return ""
        grown = use.memory_bytes - self._first.memory_bytes
        if grown > self._limit_bytes:
            return (
                f"the engine's memory grew by {grown // MB} MB to {use.memory_bytes // MB} MB, "
                f"more than {self._limit_bytes // MB} MB"
            )
        if use.files is None or use.most_files is None:
            return ""
        if use.files > FILES_SHARE * use.most_files:
            return f"the engine has {use.files} open files of at most {use.most_files}"
        return ""
