"""Prompt cache files of one board: listing, lookup by prompt, and eviction.

It knows the content of files from its caller and by their sha256; the runtime writes and loads
them, and the board decides when. A file that is foreign, damaged, swapped or half written is a
miss: it is removed, and the reason logged.

Named caches are removed only by ``delete``. Parked conversations share the rest of the budget, and
the least recently used one is removed first. Methods that touch the disk are marked, and belong in
a thread; the others are quick.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import uuid4

from rkserve.board.answer.transcript import Ids
from rkserve.board.storage.cache_files import (
    CachedFile,
    CacheFingerprint,
    CacheFolder,
    UnusableCacheFile,
)
from rkserve.core.block_hashes import adapter_of, common_prefix
from rkserve.core.errors import CacheUnsupported, RequestError
from rkserve.core.files import check_cache_name

__all__ = ["CacheFingerprint", "CacheHit", "CacheStore", "CachedFile"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheHit:
    """A file that shares a prefix with a prompt, and how many ids of the prompt it saves."""

    entry: CachedFile
    tokens: int

    @property
    def path(self) -> Path:
        """The file to load."""
        return self.entry.path


class CacheStore:
    """The prompt caches of one board, for one fingerprint at a time.

    No other process may use ``folder`` meanwhile.
    """

    def __init__(
        self,
        folder: Path,
        seal: CacheFingerprint,
        budget_bytes: int,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``clock`` returns the time of day, which continues after the process has ended."""
        self.budget_bytes = budget_bytes
        self._own, self._folder = seal, folder
        self._files = CacheFolder(folder, seal)
        self._clock = clock
        # Calls come from the board's loop and from threads. The lock is held for look-ups only,
        # never while a file is hashed: the loop must not wait for a disk.
        self._lock = threading.Lock()
        self._entries: dict[str, CachedFile] = {}
        self._pinned: str | None = None
        self._elsewhere_bytes = 0  # size of the named caches of other base weights

    def open(self) -> None:
        """Take over the files of an earlier process, and remove useless ones. Disk.

        Raises:
            ConfigError: the folder cannot be used, or another process uses it.
        """
        self._take_over(self._files.open())
        self._limit()

    def _limit(self) -> None:
        """Reduce the budget to the room that there is, in words for the operator."""
        space = self._files.space()
        found = space.limit(self.budget_bytes, self.used_bytes)
        if found < self.budget_bytes:
            why = (
                f"they are in memory ({space.kind}): set prompt_cache.folder to a disk"
                if space.in_memory
                else f"the disk has {space.free_bytes >> 20} MiB free, of which a part stays free"
            )
            log.warning(
                "the prompt caches in %s are limited to %d MiB instead of %d MiB: %s",
                self._folder,
                found >> 20,
                self.budget_bytes >> 20,
                why,
            )
            self.budget_bytes = found
            self._remove(self._room_for(0))

    def compatibility(self, platform: str) -> int:
        """Return a hash of all on which a file depends, for boards that exchange files.

        It is of the fingerprint, with the base weights that are loaded, and the SoC ``platform``.
        """
        content = f"{self._files.fingerprint} {platform}".encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big")

    def measure(self) -> tuple[float, float]:
        """Return the rates of writing and reading files here, in bytes/s. Disk.

        Raises ``OSError``.
        """
        return self._files.measure()

    def reseal(self, base: str) -> None:
        """Keep and use only caches computed with these base weights. Disk.

        ``base`` is their sha256, or empty for those of the store's own fingerprint. Conversations
        parked before are removed; named caches wait until these weights come back, as after a
        failed update, and take their part of the budget until the next ``open``.

        Raises:
            ConfigError, OSError: the folder cannot be used.
        """
        seal = replace(self._own, model=f"sha256:{base}") if base else self._own
        if not self._files.differs(seal):
            self._files.seal(seal)
            return
        self.delete_parked()
        with self._lock:
            self._entries = {}
        found = self._files.turn_to(seal)
        self._elsewhere_bytes = self._files.bytes_elsewhere()
        self._take_over(found)

    def _take_over(self, found: Iterable[CachedFile]) -> None:
        named: dict[str, CachedFile] = {}
        taken: dict[str, CachedFile] = {}
        for entry in sorted(found, key=lambda e: e.created_s):
            if entry.name is None:
                taken[entry.id] = entry
                continue
            # A process that died while it replaced a cache left both files.
            if (older := named.get(entry.name)) is not None:
                self._files.remove(older)
            named[entry.name] = entry
        taken.update({entry.id: entry for entry in named.values()})
        with self._lock:
            self._entries.update(taken)
        self._remove(self._room_for(0))
        if (used := self.used_bytes) > self.budget_bytes:
            log.warning(
                "named prompt caches take %d bytes, and the budget is %d: nothing else is cached",
                used,
                self.budget_bytes,
            )

    def close(self) -> None:
        """Release the folder."""
        self._files.close()

    # -- in memory --------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """The size of all files."""
        with self._lock:
            return sum(entry.file_bytes for entry in self._entries.values())

    def entries(self) -> list[CachedFile]:
        """Return the files, the oldest first."""
        with self._lock:
            return sorted(self._entries.values(), key=lambda entry: entry.created_s)

    def find(self, ids: Ids, origin: str | None, *, name: str | None = None) -> CacheHit | None:
        """Return the file that saves most of ``ids`` under ``origin``; ``verify`` it before use.

        With ``name`` it is that file, however little it saves. Named files are the operator's and
        serve every salt, parked conversations only their own. At least one id is always computed,
        so a file never saves all of them.

        Raises:
            RequestError: the named file was computed under another adapter, so that its positions
                are invalid although the ids agree.
        """
        candidates, adapter = self.entries(), adapter_of(origin)
        if name is not None:
            candidates = [entry for entry in candidates if entry.name == name]
            if candidates and (made := adapter_of(candidates[0].origin)) != adapter:
                raise RequestError(
                    f"The prompt cache '{name}' was made with {_words(made)} and cannot be used "
                    f"with {_words(adapter)}.",
                    "use_cache",
                )
        hits = [
            CacheHit(entry, min(common_prefix(entry.ids, ids), max(0, len(ids) - 1)))
            for entry in candidates
            if name is not None
            or entry.origin == origin
            or (entry.name is not None and adapter_of(entry.origin) == adapter)
        ]
        best = max(hits, key=lambda hit: (hit.tokens, hit.entry.used_s), default=None)
        return best if best is not None and (best.tokens or name is not None) else None

    def find_to_send(self, ids: Ids, origin: str | None) -> CachedFile | None:
        """Return the file of exactly that origin that shares most with ``ids``; ``verify`` it."""
        own = [entry for entry in self.entries() if entry.origin == origin]
        best = max(own, key=lambda entry: common_prefix(entry.ids, ids), default=None)
        return best if best is not None and common_prefix(best.ids, ids) else None

    def holds(self, ids: Ids, origin: str | None) -> bool:
        """Return whether a file covers all of ``ids``, so that storing them again gains nothing."""
        return any(
            entry.origin == origin and common_prefix(entry.ids, ids) == len(ids)
            for entry in self.entries()
        )

    def pin(self, entry: CachedFile | None) -> None:
        """Keep this file, which the runtime has loaded, until the next call.

        The runtime may read a file again after loading it. The budget may be exceeded by this one
        file; only ``delete`` removes it.
        """
        with self._lock:
            self._pinned = entry.id if entry is not None else None

    # -- disk -------------------------------------------------------------------------------------

    def verify(self, entry: CachedFile) -> bool:
        """Return whether the file is unchanged, and note its use. Disk.

        The whole file is hashed once, and again only when its inode, times or size differ. A file
        that does not fit is removed: look for another one.
        """
        try:
            self._files.check(entry)
        except (UnusableCacheFile, OSError) as exc:
            log.warning("prompt cache %s is not used, and removed: %s", entry.path, exc)
            self._remove([entry])
            return False
        used = replace(entry, used_s=self._clock())
        with self._lock:
            if entry.id not in self._entries:
                return False  # deleted meanwhile
            self._entries[entry.id] = used
        self._files.touch(used)
        return True

    def reserve(self, expected_bytes: int = 0, name: str | None = None) -> Path:
        """Return the path for a new file; ``commit`` or ``abandon`` it. Disk.

        Room for ``expected_bytes`` is made now, in place of the cache called ``name``: if the
        estimate is right, the disk never holds more than the budget and the replaced file.

        Raises:
            CacheUnsupported: it does not fit, or the folder cannot be written.
        """
        self._make_room(expected_bytes, name)
        try:
            return self._files.reserve(uuid4().hex[:16])
        except OSError as exc:
            raise _unwritten(exc) from exc

    def commit(
        self,
        path: Path,
        ids: Sequence[int],
        name: str | None = None,
        origin: str | None = None,
        *,
        sha256: str | None = None,
    ) -> CachedFile:
        """Add the file written at ``path``, and return its entry. Disk.

        ``ids`` are exactly its positions, computed under ``origin``. The content of a file from
        another board was verified: it has ``sha256``. A cache of the same name is replaced, and so
        are parked conversations that this one extends.

        Raises:
            CacheUnsupported: nothing was written, it does not fit into the budget, or the disk
                failed. The file is removed then, and the named caches are unchanged.
            RequestError: ``name`` is invalid.
        """
        path = self._files.reserved(path)
        now_s = self._clock()
        try:
            if not self._files.is_current(path):
                raise CacheUnsupported("The weights that this cache belongs to were replaced.")
            if name is not None:
                check_cache_name(name)
            written = self._files.examine(path, sha256)
            self._make_room(written.file_bytes, name)
            entry = CachedFile(
                id=path.name.partition(".")[0],
                path=path.with_suffix(""),
                name=name,
                origin=origin,
                ids=tuple(ids),
                file_bytes=written.file_bytes,
                sha256=written.sha256,
                created_s=now_s,
                used_s=now_s,
            )
            # A slow disk would take as long for a fetched file as the prefill that it saves.
            self._files.publish(path, entry, written, durable=sha256 is None)
        except UnusableCacheFile as exc:
            self._files.discard(path)
            raise CacheUnsupported(f"The runtime wrote no prompt cache: {exc}.") from exc
        except OSError as exc:
            self._files.discard(path)
            raise _unwritten(exc) from exc
        except RequestError:
            self._files.discard(path)
            raise
        with self._lock:
            self._entries[entry.id] = entry
            superseded = [old for old in self._entries.values() if self._supersedes(entry, old)]
        self._remove(superseded)
        return entry

    def abandon(self, path: Path) -> None:
        """Discard the reserved file of a failed run. Disk."""
        self._files.discard(self._files.reserved(path))

    def delete(self, name: str) -> bool:
        """Remove the cache of that name; False where there is none. Disk."""
        with self._lock:
            named = [entry for entry in self._entries.values() if entry.name == name]
        self._remove(named)
        return bool(named)

    def delete_parked(self) -> int:
        """Remove every parked conversation, and return their number. Disk.

        No engine may have one of them loaded.
        """
        with self._lock:
            self._pinned = None
            parked = [entry for entry in self._entries.values() if entry.name is None]
        self._remove(parked)
        return len(parked)

    # -- eviction ---------------------------------------------------------------------------------

    def _supersedes(self, entry: CachedFile, old: CachedFile) -> bool:
        if old.id == entry.id:
            return False
        if old.name is not None:
            return old.name == entry.name
        begun = old.origin == entry.origin and entry.ids[: old.tokens] == old.ids
        return begun and old.id != self._pinned

    def _make_room(self, size_bytes: int, replaced: str | None) -> None:
        """Remove parked conversations until the file fits. Raises ``CacheUnsupported``."""
        with self._lock:
            named_bytes = sum(
                entry.file_bytes
                for entry in self._entries.values()
                if entry.name not in (None, replaced)
            )
            named_bytes += self._elsewhere_bytes
        if named_bytes + size_bytes > self.budget_bytes:
            raise CacheUnsupported(
                f"A prompt cache of {size_bytes} bytes does not fit: the board's budget is "
                f"{self.budget_bytes} bytes, of which named caches take {named_bytes}. Delete one, "
                "or raise the budget."
            )
        self._remove(self._room_for(size_bytes, replaced))

    def _room_for(self, size_bytes: int, replaced: str | None = None) -> list[CachedFile]:
        """Return the parked conversations to remove, the least recently used one first."""
        with self._lock:
            counted = [e for e in self._entries.values() if e.name is None or e.name != replaced]
        excess = sum(entry.file_bytes for entry in counted) + size_bytes - self.budget_bytes
        excess += self._elsewhere_bytes
        parked = [e for e in counted if e.name is None and e.id != self._pinned]
        going: list[CachedFile] = []
        for entry in sorted(parked, key=lambda e: e.used_s):
            if excess <= 0:
                break
            going.append(entry)
            excess -= entry.file_bytes
        return going

    def _remove(self, entries: Iterable[CachedFile]) -> None:
        for entry in entries:
            with self._lock:
                self._entries.pop(entry.id, None)
            self._files.remove(entry)


def _words(adapter: str | None) -> str:
    return "the base model" if adapter is None else f"the adapter {adapter}"


def _unwritten(error: OSError) -> CacheUnsupported:
    reason = error.strerror or str(error)
    return CacheUnsupported(f"The prompt cache cannot be written on this board: {reason}.")
