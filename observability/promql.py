"""Metrics, labels and faults of PromQL expressions, as far as dashboards and rules use them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SELECTOR = re.compile(r"\b(rkserve_\w+)(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(?:=~|!~|!=|=)\s*"')
_GROUPING = re.compile(r"\b(?:by|on|group_left|group_right|without|ignoring)\s*\(([^)]*)\)")


@dataclass(frozen=True, slots=True)
class MetricUse:
    """A metric in an expression, with the labels that its selector has."""

    name: str
    labels: tuple[str, ...]


def metrics_of(expr: str) -> Iterator[MetricUse]:
    """Yield every selector of an expression."""
    for name, inside in _SELECTOR.findall(expr):
        yield MetricUse(name, tuple(_MATCHER.findall(inside)))


def labels_of(expr: str) -> set[str]:
    """Return the labels by which an expression groups and joins."""
    groups = ",".join(_GROUPING.findall(expr))
    return {label.strip() for label in groups.split(",") if label.strip()}


def faults_of(expr: str) -> Iterator[str]:
    """Yield what makes the answer of an expression wrong or useless."""
    for suffix in ("_bucket", "_sum", "_count", "_total"):
        for match in re.finditer(rf"\brkserve_\w+{suffix}\b(?:\{{[^}}]*\}})?(\[)?", expr):
            if not match[1]:
                yield f"{match[0]} counts from the start of a process: take its rate or increase"
    for match in re.finditer(r"\brkserve_\w+_bucket\b", expr):
        if "histogram_quantile(" not in expr[: match.start()]:
            yield f"{match[0]} is a raw bucket: take a quantile"
    for match in re.finditer(r"\b(rkserve_\w+)_sum\b", expr):
        if f"{match[1]}_count" in expr:
            yield f"{match[1]}: an average hides the slow ones: take a quantile"
