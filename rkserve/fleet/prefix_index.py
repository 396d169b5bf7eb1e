"""An index of cached prefixes by board, from reports and this Router's own predictions. Pure.

A board has one live context, which a prompt can reuse only as a whole unless the board's runtime
finds common prefixes in it, and files, of which a prompt reuses the common prefix. The effect of
each request sent is predicted with the board's own rules, and the next report corrects it. Boards
are identified by small numbers (slots).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice

from rkserve.core.block_hashes import (
    BLOCK,
    FILES,
    BlockHashes,
    CachedPrefixes,
    FilePrefix,
    LivePrefix,
)
from rkserve.core.messages import FETCH_GAIN

LOOKED_AT = 16  # boards with the same prefix to compare; more do not help


@dataclass(frozen=True, slots=True)
class Reuse:
    """A board's cached prefix of a prompt: ``tokens`` in the live context, or in a file.

    With ``source`` the file is on the board of that slot, and has to be fetched from there.
    """

    tokens: int = 0
    live: bool = False
    source: int | None = None

    def __bool__(self) -> bool:
        return self.tokens > 0


NOTHING = Reuse()


@dataclass(slots=True)
class _Filed:
    """One file of a board; ``guessed_s`` is the time of the prediction, None if it was reported."""

    held: FilePrefix
    guessed_s: float | None = None


@dataclass(slots=True)
class _Store:
    """The cached contexts of one board. ``files`` are by last link, least recently used first.

    While ``runs`` of this Router are active there, they occupy the live context.
    """

    appends: bool = False
    prefix: bool = False  # a prompt may share only the beginning of the live context
    park_min: int = 0
    compatibility: int = 0
    fetch_ms: float = 0.0
    live: LivePrefix | None = None
    live_guessed_s: float | None = None
    files: dict[int, _Filed] = field(default_factory=dict)
    runs: int = 0


class PrefixIndex:
    """The cached prefixes of all boards of one model, at most ``files_per_board`` of each."""

    def __init__(self, files_per_board: int = FILES) -> None:
        self._most = files_per_board
        self._stores: dict[int, _Store] = {}
        self._kinds: Counter[int] = Counter()  # boards that exchange files, by compatibility
        # By link: the boards with files that lead through it, and how many. Mostly it is one board
        # with one file, which is remembered as its bare number.
        self._files: dict[int, int | dict[int, int]] = {}
        # By last full link, then by length and exact end: the boards whose live context that is.
        self._lives: dict[int, dict[tuple[int, int], set[int]]] = {}
        # By link: the boards whose live context leads through it, and may be shared in part.
        self._shared: dict[int, set[int]] = {}

    # -- lookups ----------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of contexts."""
        lives = sum(store.live is not None for store in self._stores.values())
        return lives + sum(len(store.files) for store in self._stores.values())

    @property
    def links(self) -> int:
        """The number of links in files, which determines the memory used."""
        return len(self._files)

    def holders(
        self, chain: BlockHashes, most: int = LOOKED_AT, also: Collection[int] = ()
    ) -> dict[int, Reuse]:
        """Return boards with a cached prefix of the prompt, the longest first.

        About ``most`` boards, and those of ``also`` that have any.
        """
        found: dict[int, Reuse] = {}
        files, lives = self._files, self._lives
        blocks = len(chain.links)
        for link in reversed(chain.links):
            if link in lives:
                self._extended(chain, link, found)
            if link in self._shared:
                tokens = blocks * BLOCK
                for slot in islice(self._shared[link], most + len(found)):
                    self._offer(slot, tokens, found)
            at = files.get(link)
            if at is not None:
                self._filed(at, _spared(chain, blocks), found, most)
            if len(found) >= most:
                others = [slot for slot in also if slot not in found]
                found.update(self._of(others, chain, blocks))
                return found
            blocks -= 1
        if chain.seed in lives:
            self._extended(chain, chain.seed, found)
        return found

    def reuse(self, slot: int, chain: BlockHashes) -> Reuse:
        """Return the board's cached prefix of the prompt."""
        return self._of((slot,), chain, len(chain.links)).get(slot, NOTHING)

    def sources(self, chain: BlockHashes) -> dict[int, Reuse]:
        """Return the longest file for the prompt among boards that exchange files.

        It is by their compatibility, and has the slot of its board as ``source``.
        """
        found: dict[int, Reuse] = {}
        for blocks in range(len(chain.links), 0, -1):
            if len(found) == len(self._kinds):
                break
            at = self._files.get(chain.links[blocks - 1])
            if at is None:
                continue
            tokens = _spared(chain, blocks)
            for slot in (at,) if isinstance(at, int) else islice(at, LOOKED_AT):
                kind = self._stores[slot].compatibility
                if kind and kind not in found:
                    found[kind] = Reuse(tokens, source=slot)
        return found

    def fetched(
        self, slot: int, own: Reuse, sources: Mapping[int, Reuse], prefill_ms: float
    ) -> Reuse:
        """Return the file to fetch for a board that has ``own``, or nothing.

        It saves ``park_min`` tokens over that, and ``FETCH_GAIN`` of the fetch's time; a token's
        prefill there takes ``prefill_ms``.
        """
        store = self._stores.get(slot)
        if store is None or not store.compatibility or not store.park_min:
            return NOTHING
        other = sources.get(store.compatibility, NOTHING)
        more = other.tokens - own.tokens
        if other.source == slot or more < store.park_min:
            return NOTHING
        least_ms = FETCH_GAIN * other.tokens * store.fetch_ms
        return other if more * prefill_ms > least_ms else NOTHING

    def fetch_ms(self, slot: int) -> float:
        """Return the time in which the board fetches and reads a token of a file, in ms."""
        store = self._stores.get(slot)
        return 0.0 if store is None else store.fetch_ms

    def _of(self, slots: Collection[int], chain: BlockHashes, blocks: int) -> dict[int, Reuse]:
        """Return the cached prefixes of boards whose files match at most ``blocks`` blocks."""
        left = [slot for slot in slots if slot in self._stores]
        found = {slot: self._live_reuse(self._stores[slot], chain) for slot in left}
        for count in range(blocks, 0, -1):
            if not left:
                break
            at = self._files.get(chain.links[count - 1])
            if at is None:
                continue
            tokens = _spared(chain, count)
            for slot in [one for one in left if _leads_to(at, one)]:
                left.remove(slot)
                # A board reads a file only if it saves clearly more than the live context.
                if tokens - found[slot].tokens >= self._stores[slot].park_min:
                    found[slot] = self._worth(slot, tokens) or found[slot]
        return {slot: reuse for slot, reuse in found.items() if reuse}

    @staticmethod
    def _live_reuse(store: _Store, chain: BlockHashes) -> Reuse:
        live = store.live
        if live is None:
            return NOTHING
        if live.dense:
            return Reuse(live.common(chain), live=True)
        if live.tokens >= len(chain) or not _ends_so(chain, live):
            return NOTHING
        return Reuse(live.tokens, live=True)

    def _has_file(self, slot: int, link: int) -> bool:
        at = self._files.get(link)
        return at is not None and _leads_to(at, slot)

    def live_tokens(self, slot: int) -> int:
        """Return the length of the live context that another prompt would displace."""
        store = self._stores.get(slot)
        return store.live.tokens if store is not None and store.live is not None else 0

    def parks(self, slot: int, tokens: int) -> bool:
        """Return whether a displaced context of that length is written to disk there."""
        store = self._stores.get(slot)
        return store is not None and 0 < store.park_min <= tokens

    def guessed(self, slot: int) -> bool:
        """Return whether the entry of the board contains predictions."""
        store = self._stores.get(slot)
        if store is None:
            return True
        return store.live_guessed_s is not None or any(
            filed.guessed_s is not None for filed in store.files.values()
        )

    def _extended(self, chain: BlockHashes, link: int, found: dict[int, Reuse]) -> None:
        for (tokens, tail), slots in self._lives[link].items():
            if tokens <= len(chain) and chain.tail(tokens) == tail:
                for slot in slots:
                    live = self._stores[slot].live
                    if tokens < len(chain) or (live is not None and live.dense):
                        self._offer(slot, tokens, found)

    def _offer(self, slot: int, tokens: int, found: dict[int, Reuse]) -> None:
        """Add the live context, unless a file or a longer part of it saves clearly more."""
        before = found.get(slot)
        margin = 0 if before is not None and before.live else self._stores[slot].park_min
        if before is None or before.tokens < tokens + margin:
            found[slot] = Reuse(tokens, live=True)

    def _filed(
        self, at: int | dict[int, int], tokens: int, found: dict[int, Reuse], most: int
    ) -> None:
        # Boards are mostly skipped for a reason that they share, so the scan is bounded.
        for slot in (at,) if isinstance(at, int) else islice(at, most + len(found)):
            if slot not in found:
                worth = self._worth(slot, tokens)
                if worth:
                    found[slot] = worth
                    if len(found) >= most:
                        return

    def _worth(self, slot: int, tokens: int) -> Reuse:
        park_min = self._stores[slot].park_min
        return Reuse(tokens) if 0 < park_min <= tokens else NOTHING

    # -- predictions ------------------------------------------------------------------------------

    def began(self, slot: int, chain: BlockHashes | None, now_s: float) -> Reuse:
        """Record the start of a run, which displaces the live context unless it extends it.

        ``chain`` is None for a prompt without known token IDs. Return the expected cached prefix.
        """
        store = self._stores.setdefault(slot, _Store())
        spared = self.reuse(slot, chain) if chain is not None else NOTHING
        store.runs += 1
        displaced = store.live
        self._set_live(slot, store, None, now_s)
        if displaced is not None and not self._has_file(slot, displaced.leaf):
            lost = displaced.tokens - spared.tokens if spared.live else displaced.tokens
            if lost >= store.park_min:
                self._park(slot, store, displaced, now_s)
        if spared.tokens and chain is not None and not spared.live:
            self._touch(store, chain)
        return spared

    def ended(
        self, slot: int, context: BlockHashes | None, now_s: float, *, from_file: bool = False
    ) -> None:
        """Record the end of a run. ``context`` is the context left, None if not reusable.

        A run that began ``from_file`` leaves its context in a file instead.
        """
        store = self._stores.setdefault(slot, _Store())
        store.runs = max(0, store.runs - 1)
        if context is None or not store.appends:
            self._set_live(slot, store, None, now_s)
        elif from_file and not store.prefix:
            self._set_live(slot, store, None, now_s)
            self._park(slot, store, LivePrefix.of(context), now_s)
        else:
            live = LivePrefix.of(context, dense=store.prefix)
            self._set_live(slot, store, live, now_s)

    def forget(self, slot: int, *, files: bool = True) -> None:
        """Remove the cached prefixes of a board; without ``files``, keep its files."""
        store = self._stores.get(slot)
        if store is None:
            return
        self._set_live(slot, store, None, None)
        if files:
            for leaf in list(store.files):
                self._drop(slot, store, leaf)
            self._turn(store, 0)
            del self._stores[slot]

    # -- reports ----------------------------------------------------------------------------------

    def update(self, slot: int, contents: CachedPrefixes, asked_s: float) -> None:
        """Take over the reported contents of a board that was asked at ``asked_s``.

        Predictions made after that time are kept, because the report may not include them.
        """
        store = self._stores.setdefault(slot, _Store())
        store.appends, store.prefix = contents.appends, contents.prefix
        store.park_min = contents.park_min
        store.fetch_ms = contents.fetch_ms
        self._turn(store, contents.compatibility)
        fresh = store.live_guessed_s is not None and store.live_guessed_s >= asked_s
        if not fresh and not store.runs:
            self._set_live(slot, store, contents.live, None)
        reported = {file.leaf: file for file in contents.files}
        for leaf, filed in list(store.files.items()):
            guessed_s = filed.guessed_s
            if leaf not in reported and (guessed_s is None or guessed_s < asked_s):
                self._drop(slot, store, leaf)
        for file in contents.files:
            self._file(slot, store, file, None)

    # -- storage ----------------------------------------------------------------------------------

    def _turn(self, store: _Store, compatibility: int) -> None:
        """Set the compatibility of a board; 0: it exchanges no files."""
        before, store.compatibility = store.compatibility, compatibility
        if compatibility:
            self._kinds[compatibility] += 1
        if before:
            self._kinds[before] -= 1
            if not self._kinds[before]:
                del self._kinds[before]

    def _set_live(
        self, slot: int, store: _Store, live: LivePrefix | None, guessed_s: float | None
    ) -> None:
        before = store.live
        if before is not None:
            ends = self._lives[before.leaf]
            slots = ends[before.tokens, before.tail]
            slots.discard(slot)
            if not slots:
                del ends[before.tokens, before.tail]
            if not ends:
                del self._lives[before.leaf]
            for link in before.marks if before.dense else ():
                self._shared[link].discard(slot)
                if not self._shared[link]:
                    del self._shared[link]
        if live is not None:
            ends = self._lives.setdefault(live.leaf, {})
            ends.setdefault((live.tokens, live.tail), set()).add(slot)
            for link in live.marks if live.dense else ():
                self._shared.setdefault(link, set()).add(slot)
        store.live, store.live_guessed_s = live, guessed_s

    def _park(self, slot: int, store: _Store, live: LivePrefix, now_s: float) -> None:
        """Predict that the context is written to disk, replacing those that it extends."""
        if not 0 < store.park_min <= live.tokens or not live.marks:
            return
        self._file(slot, store, live.filed, now_s)

    def _file(self, slot: int, store: _Store, file: FilePrefix, guessed_s: float | None) -> None:
        known = store.files.pop(file.leaf, None)
        if known is not None:
            store.files[file.leaf] = known  # moved to the end: the most recently used
            known.guessed_s = guessed_s
            return
        # A file that this one extends is replaced if it ended at one of the marks; the next report
        # corrects the rest.
        for link in file.marks[:-1]:
            if link in store.files:
                self._drop(slot, store, link)
        while len(store.files) >= self._most:
            self._drop(slot, store, next(iter(store.files)))
        store.files[file.leaf] = _Filed(file, guessed_s)
        for link in file.marks:
            self._count(link, slot, 1)

    def _touch(self, store: _Store, chain: BlockHashes) -> None:
        for link in reversed(chain.links):
            known = store.files.pop(link, None)
            if known is not None:
                store.files[link] = known
                return

    def _drop(self, slot: int, store: _Store, leaf: int) -> None:
        for link in store.files.pop(leaf).held.marks:
            self._count(link, slot, -1)

    def _count(self, link: int, slot: int, more: int) -> None:
        at = self._files.get(link)
        if at is None:
            self._files[link] = slot
            return
        if isinstance(at, int):
            if at == slot and more < 0:
                del self._files[link]
                return
            at = self._files[link] = {at: 1}
        count = at.get(slot, 0) + more
        if count:
            at[slot] = count
            return
        del at[slot]
        if not at:
            del self._files[link]
        elif len(at) == 1:
            ((other, many),) = at.items()
            if many == 1:
                self._files[link] = other


def _leads_to(at: int | dict[int, int], slot: int) -> bool:
    return at == slot if isinstance(at, int) else slot in at


def _spared(chain: BlockHashes, blocks: int) -> int:
    """Return the reusable tokens; at least one token of a prompt is always computed."""
    return min(blocks * BLOCK, len(chain) - 1)


def _ends_so(chain: BlockHashes, live: LivePrefix) -> bool:
    blocks = live.tokens // BLOCK
    leaf = chain.links[blocks - 1] if blocks else chain.seed
    return leaf == live.leaf and chain.tail(live.tokens) == live.tail
