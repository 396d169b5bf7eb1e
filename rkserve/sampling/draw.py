"""Sampling of a token from a row of logits: bias, penalties, temperature, top-k/p, draw. Pure.

A draw depends on the seed, the choice and the position in the answer only, so that another board
continues a transcript with the tokens that the first one would have drawn. The module knows numpy
and no runtime, and of a grammar only the mask of allowed ids.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rkserve.core.run_params import Sampling, Scored

Row = NDArray[np.float32]
Allowed = NDArray[np.bool_]
Ids = NDArray[np.int64]

_MASK = (1 << 64) - 1
# JSON has no infinity: the log-probability of a token that the model itself masks.
LEAST_LOGPROB = -9999.0
_ZIPF_RANKS = 100  # from which mirostat's first version estimates the exponent, as its paper does
_TINY, _NEAR, _MOST_BITS = 1e-30, 1e-6, 64.0
_DEPTH = 50.0  # of a token's logit below the likeliest's, at temperature 1


def uniform(seed: int, choice: int, place: int) -> float:
    """Return the number in [0, 1) that decides the token at a position of an answer.

    Philox is a function of key and counter, and numpy keeps its stream the same over releases.
    """
    # Arrays, because numpy would turn lists into floats, which do not hold 64 bits.
    key = np.array([seed & _MASK, choice], np.uint64)
    generator = np.random.Philox(key=key, counter=np.array([place, 0, 0, 0], np.uint64))
    return (int(generator.random_raw()) >> 11) * 2.0**-53  # as many bits as a float has


@dataclass(slots=True)
class Sampler:
    """The sampler of one generation; ``context`` are the ids before the answer.

    OpenAI's two penalties apply to the answer, RKLLM's factor to the whole context. The ``ends``
    are masked until the answer has ``least`` tokens. Mirostat (Basu et al., 2021; both versions)
    replaces top-k and top-p; its state makes a draw depend on those before it.
    """

    sampling: Sampling
    seed: int
    choice: int = 0
    min_p: float = 0.0
    logit_bias: Sequence[tuple[int, float]] = ()
    context: Iterable[int] = ()
    generated: Sequence[int] = ()
    ends: frozenset[int] = frozenset()
    least: int = 0
    _counts: Counter[int] = field(init=False)
    _seen: dict[int, None] = field(init=False)
    _seen_ids: Ids | None = field(init=False, default=None)  # of `_seen`, until the next new one
    _place: int = field(init=False)
    _most_bits: float = field(init=False)  # mirostat's limit of a token's surprise

    def __post_init__(self) -> None:
        self._most_bits = 2 * self.sampling.mirostat_tau
        self._counts = Counter(self.generated)
        self._seen = dict.fromkeys((*self.context, *self.generated))
        self._place = len(self.generated)

    def choose(self, row: Row, allowed: Allowed | None = None) -> int | None:
        """Return the next token; None if every token is masked.

        ``allowed`` has one entry per id; ids beyond its end are not allowed.
        """
        # In single precision: doubles of a vocabulary of 150,000 take milliseconds.
        logits = row.copy() if np.isfinite(row).all() else _finite(row).astype(np.float32)
        self._adjust(logits)
        if self._place < self.least:
            logits[_within(self.ends, len(logits))] = -np.inf
        if allowed is not None:
            logits[: len(allowed)][~allowed[: len(logits)]] = -np.inf
            logits[len(allowed) :] = -np.inf
        best = int(np.argmax(logits))
        if np.isneginf(logits[best]):
            return None
        if self.sampling.temperature == 0 or self.sampling.top_k == 1:
            return best
        if self.sampling.mirostat:
            ids, shares = self._expected(logits)
        else:
            ids, shares = self._candidates(logits)
        total = shares.sum()
        at = uniform(self.seed, self.choice, self._place) * total
        drawn = min(int(np.searchsorted(np.cumsum(shares), at, side="right")), len(ids) - 1)
        if self.sampling.mirostat:
            error = float(-np.log2(shares[drawn] / total)) - self.sampling.mirostat_tau
            self._most_bits -= self.sampling.mirostat_eta * error
        return int(ids[drawn])

    def take(self, token_id: int) -> None:
        """Record the chosen token."""
        self._counts[token_id] += 1
        if token_id not in self._seen:
            self._seen[token_id] = self._seen_ids = None
        self._place += 1

    def catch_up(self, ids: Sequence[int]) -> None:
        """Record tokens chosen elsewhere: ``generated`` has all since the sampler was made."""
        for token_id in ids[self._place - len(self.generated) :]:
            self.take(token_id)

    def _adjust(self, logits: Row) -> None:
        for token_id, bias in self.logit_bias:
            if token_id < len(logits):
                logits[token_id] += bias
        how = self.sampling
        if how.repeat_penalty != 1.0:
            if self._seen_ids is None:
                self._seen_ids = _within(self._seen, len(logits))
            ids = self._seen_ids
            before = logits[ids]
            logits[ids] = np.where(
                before > 0, before / how.repeat_penalty, before * how.repeat_penalty
            )
        if how.frequency_penalty or how.presence_penalty:
            ids = _within(self._counts, len(logits))
            times = np.array([self._counts[int(i)] for i in ids], dtype=np.float64)
            logits[ids] -= times * how.frequency_penalty + how.presence_penalty

    def _candidates(self, logits: Row) -> tuple[Ids, NDArray[np.float64]]:
        """Return the ids that remain after min-p, top-k and top-p, and their shares."""
        how = self.sampling
        # Most ids are ruled out before anything is computed for them.
        least = _least_shown(logits, how.temperature, self.min_p)
        if 0 < how.top_k < len(logits):
            least = max(least, np.partition(logits, -how.top_k)[-how.top_k])
        ids = np.flatnonzero(logits >= least)
        if 0 < how.top_k < len(ids):
            # Among equals the lower ids are kept, independent of the sort order.
            above, equal = ids[logits[ids] > least], ids[logits[ids] == least]
            ids = np.concatenate((above, equal[: how.top_k - len(above)]))
        shares = _shares(logits[ids], how.temperature)
        return _nucleus(ids, shares, how.top_p) if how.top_p < 1 else (ids, shares)

    def _expected(self, logits: Row) -> tuple[Ids, NDArray[np.float64]]:
        """Return mirostat's candidates and their shares, the likeliest first."""
        temperature = self.sampling.temperature
        ids = np.flatnonzero(logits >= _least_shown(logits, temperature))
        shares = _shares(logits[ids], temperature)
        order = np.lexsort((ids, -shares))
        ids, shares = ids[order], shares[order] / shares.sum()
        if self.sampling.mirostat == 1:
            count = _zipf_count(shares, self._most_bits)
        else:
            count = int(np.count_nonzero(-np.log2(np.maximum(shares, _TINY)) <= self._most_bits))
        return ids[: max(1, count)], shares[: max(1, count)]


def _least_shown(logits: Row, temperature: float, min_p: float = 0.0) -> np.float32:
    """Return the least logit that is not ruled out: e^-50 of the likeliest is never drawn."""
    depth = min(_DEPTH, -math.log(min_p)) if min_p > 0 else _DEPTH
    least = float(logits.max()) - depth * temperature
    lowest = float(np.finfo(np.float32).min)
    return np.float32(max(least, lowest))  # above minus infinity, which is a masked token


def _shares(logits: Row, temperature: float) -> NDArray[np.float64]:
    scaled = logits.astype(np.float64) / temperature
    shares: NDArray[np.float64] = np.exp(scaled - scaled.max())
    return shares


def _zipf_count(shares: NDArray[np.float64], most_bits: float) -> int:
    """Return how many tokens have the surprise ``most_bits`` on average, were they Zipf's."""
    first = np.maximum(shares[:_ZIPF_RANKS], _TINY)
    if len(first) == 1:
        return 1
    ranks = np.arange(1, len(first), dtype=np.float64)
    steps, falls = np.log((ranks + 1) / ranks), np.log(first[:-1] / first[1:])
    slope = max(float((steps * falls).sum() / (steps**2).sum()), _TINY)
    excess = slope - 1
    if abs(excess) < _NEAR:
        return len(shares)
    whole = excess * 2.0 ** min(most_bits, _MOST_BITS) / (1 - float(len(shares)) ** -excess)
    power = np.log(max(whole, 1.0)) / slope  # of e; itself it may not fit a float
    return int(np.exp(power)) if power < np.log(len(shares)) else len(shares)


def _nucleus(ids: Ids, shares: NDArray[np.float64], top_p: float) -> tuple[Ids, Any]:
    """Return the likeliest ids that reach the share ``top_p``, likeliest first."""
    total = shares.sum()
    # The ids below this share cannot belong to the nucleus: they need not be sorted.
    kept = shares >= (1 - top_p) * total / len(shares)
    ids, shares = ids[kept], shares[kept]
    order = np.lexsort((ids, -shares))
    ids, shares = ids[order], shares[order]
    upto = int(np.searchsorted(np.cumsum(shares), top_p * total, side="left"))
    return ids[: upto + 1], shares[: upto + 1]


def scores(rows: NDArray[np.float32], ids: Sequence[int], top: int) -> list[Scored]:
    """Return ``score`` of each row and its id."""
    # Row by row: a whole block would take several times its memory again.
    return [score(row, token_id, top) for row, token_id in zip(rows, ids, strict=True)]


def score(given: Row, token_id: int, top: int, also: Sequence[int] = ()) -> Scored:
    """Return a token's log-probability, those of the likeliest tokens and of ``also``."""
    row = _finite(given)
    norm = _log_of_sum(row)
    count = min(top, len(row))
    best: Iterable[Any] = ()
    if count:
        least = np.partition(row, len(row) - count)[len(row) - count]
        ids = np.flatnonzero(row >= least)
        best = ids[np.lexsort((ids, -row[ids]))][:count]
    chosen = [int(i) for i in best]
    chosen += [i for i in also if 0 <= i < len(row) and i not in chosen]
    logit = row[token_id] if 0 <= token_id < len(row) else -np.inf
    return Scored(_logprob(logit, norm), tuple((i, _logprob(row[i], norm)) for i in chosen))


def _finite(row: NDArray[Any]) -> NDArray[np.float64]:
    """Return the row in double precision; NaN becomes impossible."""
    most = float(np.finfo(np.float32).max)
    return np.nan_to_num(row.astype(np.float64), nan=-np.inf, posinf=most, neginf=-np.inf)


def _log_of_sum(row: NDArray[np.float64]) -> float:
    highest = float(row.max())
    if highest == -np.inf:
        return 0.0
    return highest + float(np.log(np.exp(row - highest).sum()))


def _logprob(logit: Any, norm: float) -> float:
    value = float(logit) - norm
    return round(value, 6) if value > LEAST_LOGPROB else LEAST_LOGPROB


def _within(ids: Iterable[int], size: int) -> NDArray[np.int64]:
    return np.array(sorted(i for i in ids if i < size), dtype=np.int64)
