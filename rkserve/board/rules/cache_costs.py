"""The costs of prompt cache files on one board's disk, and their gains. Pure.

A file saves the prefill of its tokens if its conversation comes back, and takes the time to write
it now and to read it then. Writing delays the request that displaces the conversation, so that it
must pay by the chance of a return; while the board idles it delays no request.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rkserve.core.messages import FETCH_GAIN

LATEST = 0.3  # the weight of one transfer in the average
LEAST_BYTES = 4 << 20  # a shorter transfer measures the run around it, not the disk
# A disk that was too slow for files is not measured by them any more: after each such time its rate
# counts as twice as high, until a file is tried again.
DOUBLES_S = 900.0
REMEMBERED = 32  # displaced conversations of which it is not known yet whether they come back
CONTINUED = 256  # conversations that were continued
# Before anything is known: the chance of a return of a conversation of one turn, and of several.
FIRST_CHANCE, LATER_CHANCE = 0.3, 0.6
PRIOR_WEIGHT = 2.0
FADING = 0.95  # of the weight of earlier outcomes, with each new one
MARGIN = 2.0  # of gain over cost: all of it is estimated, and the end of a conversation is not seen
FREE_MS = 10.0  # so short a transfer is no cost: a token takes several times as long
IDLE_SHARE = 0.1  # of the time of writing while the board idles that delays a request after all


@dataclass(slots=True)
class TransferRate:
    """The measured rate of one direction in bytes/s; None before the first measurement."""

    bytes_per_s: float | None = None
    _measured_s: float = 0.0

    def observe(self, size_bytes: int, seconds: float, now_s: float) -> None:
        """Learn from a transfer; the first one replaces an estimate that was ``set``."""
        if size_bytes < LEAST_BYTES or seconds <= 0:
            return
        rate = size_bytes / seconds
        if self.bytes_per_s is not None and self._measured_s:
            rate = self.bytes_per_s + (rate - self.bytes_per_s) * LATEST
        self.bytes_per_s, self._measured_s = rate, now_s

    def set(self, bytes_per_s: float) -> None:
        """Set an estimate from outside of runs."""
        self.bytes_per_s = bytes_per_s

    def ms(self, size_bytes: int, now_s: float) -> float:
        """Return the expected time of a transfer in ms; 0 before the first measurement."""
        if self.bytes_per_s is None:
            return 0.0
        doubled = max(0.0, now_s - self._measured_s) / DOUBLES_S if self._measured_s else 0.0
        factor = math.pow(2.0, min(doubled, 30.0))
        return size_bytes / (self.bytes_per_s * factor) * 1e3


@dataclass(slots=True)
class _Chance:
    """A share of recent outcomes, with a prior."""

    prior: float
    _seen: float = 0.0
    _returned: float = 0.0

    def add(self, *, returned: bool) -> None:
        self._seen = self._seen * FADING + 1
        self._returned = self._returned * FADING + returned

    def value(self, pending: float) -> float:
        """Return the chance; ``pending`` outcomes are not known yet and get less likely."""
        seen = self._seen + pending + PRIOR_WEIGHT
        return (self._returned + PRIOR_WEIGHT * self.prior) / seen


class ReturnStatistics:
    """The shares of displaced conversations that come back, by whether they had been continued.

    Contexts are given as the links of their block hashes (``core.block_hashes``). One counts as
    returned if a later prompt shares at least half of its blocks, the part that a file would save.
    """

    def __init__(self) -> None:
        self._first, self._later = _Chance(FIRST_CHANCE), _Chance(LATER_CHANCE)
        # By the link at half of a displaced context: whether it had been continued.
        self._left: OrderedDict[int, bool] = OrderedDict()
        self._continued: OrderedDict[int, None] = OrderedDict()  # by the same link

    def asked(self, links: Sequence[int], live: Sequence[int]) -> None:
        """Note a prompt, and the live context that it may continue."""
        own = set(links)
        if live and _middle(live) in own:
            self._continue(_middle(live))
        for link in [link for link in self._left if link in own]:
            self._chance(continued=self._left.pop(link)).add(returned=True)
            self._continue(link)

    def displaced(self, links: Sequence[int]) -> None:
        """Note that a context leaves the board's memory."""
        if not links:
            return
        self._left[_middle(links)] = self.is_continued(links)
        if len(self._left) > REMEMBERED:
            _, continued = self._left.popitem(last=False)
            self._chance(continued=continued).add(returned=False)

    def chance(self, links: Sequence[int]) -> float:
        """Return the chance that a context comes back."""
        continued = self.is_continued(links)
        # The longer a conversation has been away, in those displaced after it, the less it will
        # come back: prompts that never do are noticed before the first of them is forgotten.
        away = enumerate(reversed(self._left.values()))
        pending = sum(later for later, one in away if one is continued) / REMEMBERED
        return self._chance(continued=continued).value(pending)

    def is_continued(self, links: Sequence[int]) -> bool:
        """Return whether the context, or a shorter one that it extends, was continued before."""
        return any(link in self._continued for link in links)

    def _chance(self, *, continued: bool) -> _Chance:
        return self._later if continued else self._first

    def _continue(self, link: int) -> None:
        self._continued[link] = None
        self._continued.move_to_end(link)
        if len(self._continued) > CONTINUED:
            self._continued.popitem(last=False)


def _middle(links: Sequence[int]) -> int:
    return links[(len(links) - 1) // 2]


@dataclass
class CacheCosts:
    """The decisions on the files of one board.

    ``position_bytes`` are those of a token in a file: an estimate until the first file. ``clock``
    is monotonic, in seconds. Times of prefill are in ms per token; None before the board has
    prefilled anything.
    """

    position_bytes: int
    clock: Callable[[], float]
    writing: TransferRate = field(default_factory=TransferRate)
    reading: TransferRate = field(default_factory=TransferRate)
    network: TransferRate = field(default_factory=TransferRate)
    returns: ReturnStatistics = field(default_factory=ReturnStatistics)

    def read_ms(self, size_bytes: int) -> float:
        """Return the expected time of reading a file, in ms.

        Before the first reading it is that of writing, which is seldom faster.
        """
        rate = self.writing if self.reading.bytes_per_s is None else self.reading
        return rate.ms(size_bytes, self.clock())

    def write_ms(self, tokens: int) -> float:
        """Return the expected time of writing a file of so many tokens, in ms."""
        return self.writing.ms(tokens * self.position_bytes, self.clock())

    def restoring_pays(self, saved: int, size_bytes: int, prefill_ms: float | None) -> bool:
        """Return whether reading a file is faster than the prefill of the ``saved`` tokens."""
        read_ms = self.read_ms(size_bytes)
        return prefill_ms is None or read_ms <= FREE_MS or saved * prefill_ms > read_ms

    def fetch_ms(self, size_bytes: int) -> float:
        """Return the expected time of fetching a file from another board and reading it, in ms."""
        return self.network.ms(size_bytes, self.clock()) + self.read_ms(size_bytes)

    def fetching_pays(self, saved: int, tokens: int, prefill_ms: float) -> bool:
        """Return whether fetching and reading a file of ``tokens`` is faster than the prefill of
        the ``saved`` ones, by ``FETCH_GAIN``.
        """
        return saved * prefill_ms > FETCH_GAIN * self.fetch_ms(tokens * self.position_bytes)

    def parking_pays(
        self, links: Sequence[int], tokens: int, prefill_ms: float | None, *, idle: bool
    ) -> bool:
        """Return whether writing a context of so many tokens saves more time than it takes.

        With ``idle`` no request waits for it.
        """
        if prefill_ms is None:
            return True
        size_bytes = tokens * self.position_bytes
        cost_ms = self.write_ms(tokens) * (IDLE_SHARE if idle else 1.0)
        if cost_ms <= FREE_MS:
            return self.restoring_pays(tokens, size_bytes, prefill_ms)
        gain_ms = tokens * prefill_ms - self.read_ms(size_bytes)
        return self.returns.chance(links) * gain_ms > MARGIN * cost_ms

    def least_tokens(self, least: int, prefill_ms: float | None) -> int:
        """Return the number of tokens from which a file can pay, at least ``least``; 0: none can.

        All costs grow with the tokens alike, so that it is a property of the disk.
        """
        size_bytes = least * self.position_bytes
        return least if self.restoring_pays(least, size_bytes, prefill_ms) else 0
