"""One simulated board: the times of a run, and the KV cache and files after it. Pure.

The rules are those of ``board.run.start`` and ``board.run.prompt_caching`` for a board that runs
one generation at a time; the clock is the formula of the simulator's profiles.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.scale.conversations import Context
from rkserve.core.block_hashes import (
    BLOCK,
    FILES,
    BlockHashes,
    CachedPrefixes,
    FilePrefix,
    LivePrefix,
    pack,
    seed_of,
)
from rkserve.native.sim.profiles import Profile


@dataclass(frozen=True, slots=True)
class Disk:
    """A board's disk tier. Files of ``budget_tokens`` fit; 0: it keeps none."""

    budget_tokens: int = 74_000  # 2 GiB at 28 KB each
    park_min: int = 256
    read_ms: float = 0.15  # each token: 28 KB at 190 MB/s
    write_ms: float = 0.28  # and at 100 MB/s


@dataclass(frozen=True, slots=True)
class Course:
    """The times of a run: its first token comes after ``ttft_ms``; the board is busy ``busy_ms``.

    ``cached`` tokens were not computed again, and ``prefill_ms`` is what the others took.
    """

    ttft_ms: float
    busy_ms: float
    cached: int
    prefill_ms: float
    decode_ms: float


@dataclass(slots=True)
class PaperBoard:
    """One board. Its files are in the order of their last use."""

    name: str
    profile: Profile
    disk: Disk = Disk()
    live: Context | None = None
    files: list[Context] = field(default_factory=list)
    prefill_tokens: int = 0
    prefill_ms: float = 0.0
    decode_tokens: int = 0
    decode_ms: float = 0.0
    _packed: bytes = b""
    _changed: bool = True
    _marks: dict[Context, FilePrefix] = field(default_factory=dict)

    def run(self, prompt: Context, answer: int) -> Course:
        """Make a run over the prompt that generates so many tokens."""
        reused = self.live.tokens if self.live is not None and prompt.extends(self.live) else 0
        hit = self._hit(prompt, reused)
        parking_ms = read_ms = write_ms = 0.0
        # The last token is given out and not computed.
        left = prompt.cut(prompt.tokens + answer - 1)
        if hit is None and reused:
            cached = reused
            self.live = left
        else:
            parking_ms = self._park()
            cached = 0 if hit is None else min(hit.common(prompt), prompt.tokens - 1)
            if hit is None:
                self.live = left
            else:
                read_ms = hit.tokens * self.disk.read_ms
                self._touch(hit)
                write_ms = self._keep(left)
                self.live = None
        fresh = prompt.tokens - cached
        prefill_ms = self.profile.prefill_ms(fresh, cached)
        decode_ms = (answer - 1) * self.profile.decode_ms(prompt.tokens + answer // 2)
        self.prefill_tokens += fresh
        self.prefill_ms += prefill_ms
        self.decode_tokens += answer - 1
        self.decode_ms += decode_ms
        self._changed = True
        ttft_ms = parking_ms + read_ms + prefill_ms
        return Course(ttft_ms, ttft_ms + decode_ms + write_ms, cached, prefill_ms, decode_ms)

    def clear(self) -> None:
        """The engine has gone, and the live context with it."""
        self.live, self._changed = None, True

    def holdings(self, adapter: str | None = None) -> bytes:
        """Return what its report says that it holds."""
        if self._changed:
            self._changed = False
            files = [one for one in self.files[-FILES:] if one.tokens >= BLOCK]
            self._marks = {one: self._marks.get(one) or _filed(one, adapter) for one in files}
            live = None
            if self.live is not None:
                live = LivePrefix.of(BlockHashes(self.live.ids(), seed_of(adapter)))
            park_min = self.disk.park_min if self.disk.budget_tokens else 0
            self._packed = pack(CachedPrefixes(True, park_min, live, tuple(self._marks.values())))
        return self._packed

    def _hit(self, prompt: Context, reused: int) -> Context | None:
        best = max(self.files, key=lambda one: one.common(prompt), default=None)
        if best is None or best.common(prompt) - reused < self.disk.park_min:
            return None
        return best

    def _park(self) -> float:
        live = self.live
        if live is None or live.tokens < self.disk.park_min or not self.disk.budget_tokens:
            return 0.0
        if any(one.common(live) == live.tokens for one in self.files):
            return 0.0
        return self._keep(live) + self.profile.decode_ms(live.tokens)

    def _keep(self, context: Context) -> float:
        self.files = [one for one in self.files if not context.extends(one)]
        used = sum(one.tokens for one in self.files) + context.tokens
        while self.files and used > self.disk.budget_tokens:
            used -= self.files.pop(0).tokens
        self.files.append(context)
        return context.tokens * self.disk.write_ms

    def _touch(self, hit: Context) -> None:
        self.files.remove(hit)
        self.files.append(hit)


def _filed(context: Context, adapter: str | None) -> FilePrefix:
    chain = BlockHashes(context.ids(), seed_of(adapter))
    return FilePrefix(len(chain), chain.marks)
