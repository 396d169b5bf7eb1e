"""Stores of prompt cache files on one folder, one after the other, with files of any content."""

from __future__ import annotations

import os
from pathlib import Path

from rkserve.board.answer.transcript import Ids
from rkserve.board.storage.prompt_cache import CachedFile, CacheFingerprint, CacheStore

SEAL = CacheFingerprint(
    model="m" * 64, release="1.3.0", template="t", tokenizer="k", load="ctx4096"
)
FIRST = (1, 2, 3, 4)
SECOND = (*FIRST, 5, 6)
OTHER = (9, 8, 7)


class Clock:
    """A time of day that goes on when it is told to, a second with every look."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


class Cabinet:
    """A folder with stores opened on it one after the other, as by one process after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        self._open: CacheStore | None = None

    def open(self, budget_bytes: int = 10_000, seal: CacheFingerprint = SEAL) -> CacheStore:
        self.close()
        self._open = CacheStore(self.folder, seal, budget_bytes, clock=self.clock)
        self._open.open()
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def files(self) -> list[str]:
        """The suffixes of all files of the store's, and nothing of its lock."""
        return sorted(file.name.partition(".")[2] for file in self.folder.glob("kv-*/*"))


def keep(
    store: CacheStore,
    ids: Ids = FIRST,
    *,
    name: str | None = None,
    adapter: str | None = None,
    size: int = 1000,
) -> CachedFile:
    """Do as the runtime does, and then as the board does."""
    path = store.reserve()
    path.write_bytes(os.urandom(size))
    return store.commit(path, ids, name, adapter)


def kept(store: CacheStore) -> set[tuple[str | None, Ids]]:
    return {(entry.name, entry.ids) for entry in store.entries()}
