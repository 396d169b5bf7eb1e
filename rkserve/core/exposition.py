"""Prometheus' text format: metrics rendered family by family, and those of several Routers merged.

A Router renders its own metrics with its label, so that merging them with those of others joins
texts and parses none.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from rkserve.core.skew import crosses_versions

# Samples rendered before other tasks have a turn: about a millisecond, since tokens wait meanwhile.
SLICE = 400
# Whole numbers up to here are exact in a float, and are written as such.
_EXACT = 2.0**53
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


@crosses_versions
@dataclass(frozen=True, slots=True)
class FamilyText:
    """One metric as text: its name, its type, its ``HELP`` and ``TYPE`` lines, and its samples."""

    name: str
    kind: str
    head: str
    samples: str


@crosses_versions
@dataclass(frozen=True, slots=True)
class RouterFigures:
    """The metrics of one Router, and what others add to their own to describe the cluster.

    ``queued`` is the number of generations in its queue by model, ``running`` and ``waiting`` are
    the adapters of its calls that boards have accepted and of those that wait for one. ``departed``
    are Routers that have ended, as they reported themselves.
    """

    router: str
    families: tuple[FamilyText, ...] = ()
    queued: tuple[tuple[str, int], ...] = ()
    running: tuple[str, ...] = ()
    waiting: tuple[str, ...] = ()
    departed: tuple[RouterFigures, ...] = ()

    def last(self) -> RouterFigures:
        """Return what remains true when the Router has ended: its counters and histograms."""
        kept = tuple(one for one in self.families if one.kind != "gauge")
        return RouterFigures(self.router, kept)

    def alone(self) -> RouterFigures:
        """Return the figures without those of Routers that have ended."""
        return replace(self, departed=())


@lru_cache(maxsize=8192)
def label_text(name: str, value: str) -> str:
    """Return a label as in the text format, such as ``router="0"``."""
    return f'{name}="{value.translate(_ESCAPES)}"'


def number_text(value: float) -> str:
    """Return a sample's value as in the text format."""
    if value == math.inf:
        return "+Inf"
    if value == -math.inf:
        return "-Inf"
    if math.isnan(value):
        return "NaN"
    if abs(value) < _EXACT and value == int(value):
        return str(int(value))
    return repr(float(value))


def family_text(family: Metric, label: str = "") -> FamilyText:
    """Render a metric; ``label`` is added to each of its samples."""
    name = f"{family.name}_total" if family.type == "counter" else family.name
    kind = "untyped" if family.type == "unknown" else family.type
    about = family.documentation.translate(_HELP_ESCAPES)
    return FamilyText(
        name,
        kind,
        f"# HELP {name} {about}\n# TYPE {name} {kind}\n",
        "".join(_lines(family, (label,) if label else ())),
    )


def _lines(family: Metric, more: tuple[str, ...]) -> Iterator[str]:
    for sample in family.samples:
        pairs = [label_text(name, value) for name, value in sample.labels.items()]
        inside = ",".join((*pairs, *more))
        yield f"{sample.name}{f'{{{inside}}}' if inside else ''} {number_text(sample.value)}\n"


async def rendered(collector: Collector, label: str = "") -> tuple[FamilyText, ...]:
    """Render all metrics of a collector or registry, with pauses for other tasks."""
    found, lines = [], 0
    for family in collector.collect():
        found.append(family_text(family, label))
        lines += len(family.samples)
        if lines >= SLICE:
            lines = 0
            await asyncio.sleep(0)
    return tuple(found)


def merged(parts: Iterable[Iterable[FamilyText]]) -> str:
    """Return the text of several sets of metrics, in which a metric of several of them is one."""
    heads: dict[str, str] = {}
    samples: dict[str, list[str]] = {}
    for part in parts:
        for family in part:
            heads.setdefault(family.name, family.head)
            samples.setdefault(family.name, []).append(family.samples)
    return "".join(f"{head}{''.join(samples[name])}" for name, head in heads.items())
