"""How long a request will keep its place, from what such requests have taken. Pure.

A queue that knows it can say when a place comes free, and refuse early what would come too late.
Deadlines are kept with ``safe_ms``, which most requests stay under, and shares of service are
counted in ``likely_ms``, what they take on average.
"""

from __future__ import annotations

from dataclasses import dataclass, field

LATEST = 0.1  # how much one answer counts
FEW = 4  # answers, before which a mean says little
SAFE = 2.0  # mean deviations above the mean, which few answers exceed
MOST_RATIO = 8.0  # one run that was disturbed says nothing of the next one


@dataclass(frozen=True, slots=True)
class Asked:
    """What can be known of a request before it runs. ``prompt_tokens`` is at least 1."""

    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Took:
    """What one answer took. ``held_ms`` is how long it kept its place, without its pauses."""

    prefill_tokens: int
    prefill_ms: float
    decode_tokens: int
    decode_ms: float
    tokens: int
    held_ms: float


@dataclass(frozen=True, slots=True)
class Expected:
    """How long a request will keep its place: on average, and with few exceptions."""

    likely_ms: float
    safe_ms: float


@dataclass(slots=True)
class _Mean:
    """A mean that follows what comes; the first few count alike."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) * max(LATEST, 1 / self.count)


@dataclass(slots=True)
class Expectation:
    """What answers of one model take, on whichever board.

    Lengths are remembered by the limit that the client set, as powers of two: who asks for 4,000
    tokens at most does not tell what those get who ask for 100.
    """

    _prefill_ms: _Mean = field(default_factory=_Mean)  # of one token
    _decode_ms: _Mean = field(default_factory=_Mean)
    _fresh: _Mean = field(default_factory=_Mean)  # share of a prompt that is not in a KV cache
    _lengths: dict[int, _Mean] = field(default_factory=dict)
    # What a request kept its place for, compared with what was expected of its tokens.
    _ratio: _Mean = field(default_factory=_Mean)
    _spread: _Mean = field(default_factory=_Mean)

    def of(self, asked: Asked) -> Expected | None:
        """Return what is expected; None before enough answers have ended."""
        plain_ms = self._plain_ms(asked)
        if plain_ms is None or self._ratio.count < FEW:
            return None
        ratio = self._ratio.value
        return Expected(plain_ms * ratio, plain_ms * (ratio + SAFE * self._spread.value))

    def heard(self, asked: Asked, took: Took) -> None:
        """Learn from an answer that ended in order."""
        plain_ms = self._plain_ms(asked)
        if plain_ms:
            ratio = min(MOST_RATIO, took.held_ms / plain_ms)
            self._spread.add(abs(ratio - self._ratio.value) if self._ratio.count else ratio / 2)
            self._ratio.add(ratio)
        if took.prefill_tokens > 0 and took.prefill_ms > 0:
            self._prefill_ms.add(took.prefill_ms / took.prefill_tokens)
        if took.decode_tokens > 0 and took.decode_ms > 0:
            self._decode_ms.add(took.decode_ms / took.decode_tokens)
        self._fresh.add(min(1.0, took.prefill_tokens / asked.prompt_tokens))
        self._lengths.setdefault(asked.max_tokens.bit_length(), _Mean()).add(took.tokens)

    @property
    def typical_ms(self) -> float | None:
        """What an answer takes of which nothing is known; None before the first one."""
        lengths = [mean.value for mean in self._lengths.values()]
        if not lengths or not self._decode_ms.count:
            return None
        return self._decode_ms.value * sum(lengths) / len(lengths)

    def _plain_ms(self, asked: Asked) -> float | None:
        if not self._decode_ms.count and not self._prefill_ms.count:
            return None
        mean = self._lengths.get(asked.max_tokens.bit_length())
        tokens = asked.max_tokens if mean is None else min(asked.max_tokens, mean.value)
        fresh = self._fresh.value * asked.prompt_tokens
        return fresh * self._prefill_ms.value + tokens * self._decode_ms.value
