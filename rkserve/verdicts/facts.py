"""The facts about a running cluster that its rules judge: boards, traffic and control, as values.

Times are in seconds since 1970 unless a name says otherwise; durations end in ``_s`` too.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Literal, TypeAlias

from rkserve.config.router import ObjectivesConfig
from rkserve.core.board_report import BoardReport, BoardState, Hardware
from rkserve.core.desired_state import BoardTarget, Desired
from rkserve.core.skew import crosses_versions

# Windows of traffic by name, in seconds. Two together make an error budget's alert.
WindowName: TypeAlias = Literal["5m", "30m", "1h", "6h", "3d"]
WINDOWS: Mapping[WindowName, float] = MappingProxyType(
    {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "6h": 6 * 3600.0, "3d": 72 * 3600.0}
)
FEWEST = 20  # requests in a window below which its shares and percentiles say nothing


@dataclass(frozen=True, slots=True)
class BoardView:
    """One board as a Router sees it.

    ``state_since_s`` is the time since which it has its state. ``speed_tokens_per_s`` is that of
    decoding alone over the last minutes, None where too few tokens were decoded. ``at_work`` are
    the latest readings of its hardware that it took at work, None where it has not worked for some
    minutes. ``expected_tokens_per_s`` is the speed that its SoC and model should reach, and
    ``basis`` the origin of that figure. ``position_bytes`` is the size of a KV position, None if
    unknown.
    """

    report: BoardReport
    target: BoardTarget
    state_since_s: float = 0.0
    circuit: str = "closed"
    circuit_reason: str = ""
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    speed_tokens_per_s: float | None = None
    at_work: Hardware | None = None
    expected_tokens_per_s: float | None = None
    basis: str = ""

    @property
    def id(self) -> str:
        """The board's name."""
        return self.report.board_id

    @property
    def kind(self) -> tuple[str, str]:
        """SoC and model: boards of one kind should be equally fast."""
        hardware = self.report.hardware
        soc = hardware.soc if hardware is not None else ""
        return soc or self.report.platform, self.report.model

    @property
    def serves(self) -> bool:
        """True if requests are sent to it: it is ready and not drained, and its circuit is not
        open.
        """
        ready = self.report.state is BoardState.READY and self.circuit != "open"
        return ready and not self.target.drained


@crosses_versions
@dataclass(frozen=True, slots=True)
class TrafficCounts:
    """Counts of one model's requests at some Routers, since their start or within a window.

    Requests are ``good`` (answered in order, and the first token came within the target), ``late``
    (only the latter failed) or ``failed`` (by the service); those that their clients broke off, or
    that were wrong, are none of these. ``turned_away`` generations got no place at a board. Tokens
    of prompts were ``expected`` and ``found`` in KV caches. ``ttft`` and ``queue_wait`` are the
    counts of each bucket of these histograms, the last one without an upper bound.
    """

    good: int = 0
    late: int = 0
    failed: int = 0
    turned_away: int = 0
    expected: int = 0
    found: int = 0
    ttft: tuple[int, ...] = ()
    queue_wait: tuple[int, ...] = ()

    @property
    def judged(self) -> int:
        """The number of requests that count in the error budget."""
        return self.good + self.late + self.failed

    @property
    def bad_share(self) -> float:
        """The share of these that were not good; 0 without any."""
        return (self.late + self.failed) / self.judged if self.judged else 0.0

    def plus(self, other: TrafficCounts) -> TrafficCounts:
        """Return the counts of both together."""
        return self._with(other, 1)

    def minus(self, earlier: TrafficCounts) -> TrafficCounts:
        """Return the counts since ``earlier``."""
        return self._with(earlier, -1)

    def _with(self, other: TrafficCounts, sign: int) -> TrafficCounts:
        return TrafficCounts(
            self.good + sign * other.good,
            self.late + sign * other.late,
            self.failed + sign * other.failed,
            self.turned_away + sign * other.turned_away,
            self.expected + sign * other.expected,
            self.found + sign * other.found,
            _added(self.ttft, other.ttft, sign),
            _added(self.queue_wait, other.queue_wait, sign),
        )

    def packed(self) -> array[int]:
        """Return the counts in a form that takes 8 bytes for each."""
        scalars = (self.good, self.late, self.failed, self.turned_away, self.expected, self.found)
        return array("Q", (len(self.ttft), *scalars, *self.ttft, *self.queue_wait))

    @classmethod
    def unpacked(cls, packed: array[int]) -> TrafficCounts:
        """Return the counts of ``packed``."""
        buckets, good, late, failed, turned_away, expected, found, *rest = packed
        ttft, waits = tuple(rest[:buckets]), tuple(rest[buckets:])
        return cls(good, late, failed, turned_away, expected, found, ttft, waits)


def _added(one: Sequence[int], other: Sequence[int], sign: int) -> tuple[int, ...]:
    if not one or not other:  # a histogram without a sample yet
        return tuple(one) or tuple(sign * count for count in other)
    return tuple(a + sign * b for a, b in zip(one, other, strict=True))


NO_TRAFFIC = TrafficCounts()


class RequestPhase(str, Enum):
    """The phase of a request in flight at a Router."""

    QUEUED = "queued"  # it waits for its first board
    PREFILL = "prefill"
    DECODE = "decode"
    PAUSED = "paused"
    MOVING = "moving"  # it has lost its board, and waits for the next one


@crosses_versions
@dataclass(frozen=True, slots=True)
class RequestView:
    """A request in flight at a Router: its arrival, the replica that has it, and its key's name.

    ``key`` is empty for a call without a key.
    """

    id: str
    phase: RequestPhase
    since_s: float
    model: str
    board: str = ""
    failovers: int = 0
    key: str = ""


@crosses_versions
@dataclass(frozen=True, slots=True)
class RouterView:
    """The share of one Router in the facts: its windows of traffic, by model, and its requests.

    ``streams`` are its token streams of the last five minutes by path.
    """

    router: str
    traffic: Mapping[str, Mapping[str, TrafficCounts]] = field(default_factory=dict)
    streams: Mapping[str, int] = field(default_factory=dict)
    requests: tuple[RequestView, ...] = ()


# By model and name of the window.
Traffic: TypeAlias = Mapping[str, Mapping[str, TrafficCounts]]


def percentile(counts: Sequence[int], bounds: Sequence[float], share: float) -> float | None:
    """Estimate a percentile from a histogram's counts, as Prometheus' ``histogram_quantile`` does.

    It is linear within a bucket, and the last bound in the bucket without one; None without
    samples.
    """
    total = sum(counts)
    if not total:
        return None
    wanted, below, lower = share * total, 0, 0.0
    for count, upper in zip(counts, bounds, strict=False):
        if count and below + count >= wanted:
            return lower + (upper - lower) * (wanted - below) / count
        below, lower = below + count, upper
    return bounds[-1]


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Everything that the rules judge, at ``now_s``.

    ``epoch_since_s`` is the time at which the desired state came. ``streams`` are the token streams
    of the last five minutes by path, ``channel`` or ``ray``; ``has_channel`` is False where the
    configuration switches the channel off. ``ttft_bounds_s`` and ``wait_bounds_s`` are the upper
    bounds of the histograms of ``traffic``. ``requests`` are those in flight at the Routers that
    are ``routers_up``.
    """

    now_s: float
    models: tuple[str, ...]
    boards: tuple[BoardView, ...]
    desired: Desired = field(default_factory=Desired)
    epoch_since_s: float = 0.0
    objectives: ObjectivesConfig = field(default_factory=ObjectivesConfig)
    traffic: Traffic = field(default_factory=dict)
    ttft_bounds_s: tuple[float, ...] = ()
    wait_bounds_s: tuple[float, ...] = ()
    streams: Mapping[str, int] = field(default_factory=dict)
    has_channel: bool = True
    coordinator_reachable: bool = True
    coordinator_silent_s: float | None = None
    routers_up: tuple[str, ...] = ()
    routers_silent: tuple[str, ...] = ()
    requests: tuple[RequestView, ...] = ()

    def waiting(self, model: str) -> int:
        """Return the number of a model's requests that wait for a board."""
        waits = (RequestPhase.QUEUED, RequestPhase.MOVING)
        return sum(one.model == model and one.phase in waits for one in self.requests)

    def window(self, model: str, name: str) -> TrafficCounts:
        """Return the counts of a model in a window."""
        return self.traffic.get(model, {}).get(name, NO_TRAFFIC)
