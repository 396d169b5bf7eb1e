"""Routers of one cluster without Ray, and a scraper that counts as Prometheus does."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rkserve.core.exposition import RouterFigures
from rkserve.router.cluster_metrics import ClusterMetrics
from tests.support.http.router_house import House

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
Series = tuple[str, frozenset[tuple[str, str]]]


def parsed(text: str) -> dict[Series, float]:
    """Return the samples of a scrape; a series that is there twice is an error."""
    found: dict[Series, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        match = _SAMPLE.fullmatch(line)
        assert match is not None, line
        series = (match[1], frozenset(_LABEL.findall(match[2] or "")))
        assert series not in found, f"twice: {line}"
        found[series] = float(match[3])
    return found


@dataclass
class Scraper:
    """The increase of every counter over all scrapes, as Prometheus computes it.

    The first sample of a series counts for nothing, and a lower one than before begins anew.
    """

    last: dict[Series, float] = field(default_factory=dict)
    increases: dict[Series, float] = field(default_factory=dict)

    def take(self, text: str) -> None:
        """Take a scrape."""
        for series, value in parsed(text).items():
            before = self.last.get(series)
            if before is not None:
                gained = value - before if value >= before else value
                self.increases[series] = self.increases.get(series, 0.0) + gained
            self.last[series] = value

    def increase(self, name: str, **labels: str) -> float:
        """Return ``sum(increase())`` of a metric over all scrapes."""
        return sum(
            gained
            for (found, of), gained in self.increases.items()
            if found == name and labels.items() <= set(of)
        )

    def value(self, name: str, **labels: str) -> float | None:
        """Return the sum of a metric's samples in the last scrape; None if there is none."""
        found = [
            value
            for (one, of), value in self.last.items()
            if one == name and labels.items() <= set(of)
        ]
        return sum(found) if found else None


class ClusterOfRouters:
    """Routers that reach each other by calls. ``silent`` ones, by name, do not answer."""

    def __init__(self, count: int, make: Callable[[], House]) -> None:
        self._make = make
        self.houses: dict[str, House] = {}
        self.metrics: dict[str, ClusterMetrics] = {}
        self.silent: set[str] = set()
        for number in range(count):
            self.join(str(number))

    def join(self, name: str) -> None:
        """Let a Router begin under a name."""
        house = self._make()
        self.houses[name] = house
        self.metrics[name] = ClusterMetrics(house.service, name, _Peers(self, name))
        house.use_metrics(self.metrics[name])

    def kill(self, name: str) -> None:
        """End a Router without a word."""
        del self.houses[name], self.metrics[name]


class _Peers:
    def __init__(self, cluster: ClusterOfRouters, name: str) -> None:
        self._cluster, self._name = cluster, name

    def _others(self) -> list[ClusterMetrics]:
        return [
            one
            for name, one in self._cluster.metrics.items()
            if name != self._name and name not in self._cluster.silent
        ]

    async def figures(self, timeout_s: float) -> tuple[Sequence[RouterFigures], Sequence[str]]:
        assert timeout_s > 0
        silent = sorted(self._cluster.silent - {self._name})
        return [await one.own() for one in self._others()], silent

    async def began(self, router: str) -> None:
        for one in self._others():
            one.forget(router)

    async def ended(self, figures: RouterFigures) -> None:
        for one in self._others():
            one.keep(figures)
