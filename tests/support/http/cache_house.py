"""Boards with caches behind a Router without Ray."""

from __future__ import annotations

from typing import Any

from rkserve.config.router import RouterConfig
from rkserve.core.board_report import (
    CacheEntry,
    KvReport,
)
from tests.support.boards.fake_boards import FakeBoards, report
from tests.support.http.router_house import House

SIZE, CLEAR = "/v1/cache/kv/size", "/v1/cache/kv/clear"

MODEL_CACHE = "/v1/cache/sim-chat"


def house_of(*boards: str, config: RouterConfig | None = None, **says: Any) -> House:
    """Boards with things to say; ``a_kv=...`` is what a says to kv, ``kv=...`` what all do."""
    found = FakeBoards([report(b) for b in boards])
    for key, said in says.items():
        board, _, method = key.partition("__")
        where = (f"replica of {board}", method) if method else ("", key)
        found.says[where] = said
    return House(found, config or RouterConfig())


def kv(board: str, *entries: int, status: str = "ok", size: int | None = 1000) -> KvReport:
    """What a board holds."""
    return KvReport(board, "sim-chat", entries, 4096 * len(entries), size, status)


def cache(board: str, name: str | None = "doc", adapter: str | None = None) -> CacheEntry:
    """One file."""
    return CacheEntry(board, "sim-chat", name, 500, 3000, adapter)
