"""What a board holds of contexts, as its report says it: a few numbers instead of the ids.

It knows the live context and the files; what a run would do with them ``opening`` decides.
"""

from __future__ import annotations

from rkserve.board.answer.kv_plan import Ids
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.core.block_hashes import (
    BLOCK,
    FILES,
    Chain,
    FileHeld,
    Holdings,
    LiveHeld,
    pack,
    seed_of,
)


class PrefixReport:
    """Says what one board holds. It remembers what it has hashed."""

    def __init__(self, caching: PromptCaching) -> None:
        self._caching = caching
        self._files: dict[str, FileHeld] = {}
        self._live: tuple[Ids, str | None, LiveHeld] | None = None
        self._packed: tuple[Holdings, bytes] = (Holdings(), pack(Holdings()))

    def packed(self, live: LoadedEngine | None) -> bytes:
        """Return what the board holds with that engine; nothing of use without one."""
        holdings = Holdings() if live is None else self._of(live)
        if holdings != self._packed[0]:
            self._packed = (holdings, pack(holdings))
        return self._packed[1]

    def _of(self, live: LoadedEngine) -> Holdings:
        if live.facts.n_batch > 1:
            return Holdings()  # a batch keeps no context
        park_min = self._caching.worth_from(live)
        return Holdings(
            appends=live.context.append,
            park_min=park_min,
            live=self._live_held(live),
            files=self._filed() if park_min else (),
        )

    def _live_held(self, live: LoadedEngine) -> LiveHeld | None:
        ids, origin = live.context.ids, live.context.origin
        if not ids or not live.context.append or not live.alive:
            return None
        known = self._live
        if known is None or known[0] is not ids or known[1] != origin:
            known = (ids, origin, LiveHeld.of(Chain(ids, seed_of(origin))))
            self._live = known
        return known[2]

    def _filed(self) -> tuple[FileHeld, ...]:
        """Return the files that a run would begin from, the last used one last."""
        entries = [entry for entry in self._caching.files() if len(entry.ids) >= BLOCK]
        entries = sorted(entries, key=lambda entry: (entry.used_s, entry.id))[-FILES:]
        files: dict[str, FileHeld] = {}
        for entry in entries:
            known = self._files.get(entry.id)
            if known is None:
                chain = Chain(tuple(entry.ids), seed_of(entry.origin))
                known = FileHeld(len(chain), chain.marks)
            files[entry.id] = known
        self._files = files
        return tuple(files.values())
