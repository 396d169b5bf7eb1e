"""The text format: as the client library writes it, and merged without parsing."""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterable, Iterator

import pytest
from prometheus_client import generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from rkserve.core.exposition import (
    FamilyText,
    RouterFigures,
    family_text,
    label_text,
    merged,
    number_text,
    rendered,
)
from tests.support.boards.own_time import run_loop


class Figures(Collector):
    """A counter, a gauge and a histogram."""

    def collect(self) -> Iterator[Metric]:
        calls = CounterMetricFamily("calls", 'Calls by "route"\nand \\ status.', labels=("route",))
        calls.add_metric(('a"b\\c\nd',), 3)
        yield calls
        yield GaugeMetricFamily("level", "A level.", value=-0.25)
        took = HistogramMetricFamily("took_seconds", "Time.", labels=("model",))
        took.add_metric(("m",), [("0.5", 0), ("2.0", 1), ("+Inf", 1)], 1.5)
        yield took


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """All samples of a text; a series that is there twice fails the test."""
    found = [
        ((sample.name, tuple(sorted(sample.labels.items()))), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def text_of(families: Iterable[FamilyText]) -> str:
    return merged([families])


def test_the_text_is_that_of_the_client_library() -> None:
    text = generate_latest(Figures()).decode()
    assert samples(text_of(run_loop(rendered(Figures())))) == samples(text)


def test_every_sample_gets_the_label_of_its_router() -> None:
    text = text_of(run_loop(rendered(Figures(), label_text("router", "0@rock"))))
    labels = [dict(labels) for (_, labels) in samples(text)]
    assert len(labels) == 7  # a counter, a gauge, and three buckets with their sum and count
    assert {one["router"] for one in labels} == {"0@rock"}


def test_a_metric_of_two_routers_has_one_head_and_the_samples_of_both() -> None:
    parts = [run_loop(rendered(Figures(), label_text("router", name))) for name in "01"]
    text = merged(parts)
    assert text.count("# TYPE took_seconds histogram") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert [s.labels["router"] for s in families["level"].samples] == ["0", "1"]
    assert list(families) == ["calls", "level", "took_seconds"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.0, "1"),
        (0.0, "0"),
        (-3.0, "-3"),
        (0.1, "0.1"),
        (1e300, "1e+300"),
        (2.0**53, "9007199254740992.0"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (math.nan, "NaN"),
    ],
)
def test_numbers_are_written_exactly(value: float, text: str) -> None:
    assert number_text(value) == text
    assert math.isnan(value) or float(text) == value


def test_an_untyped_metric_is_called_so() -> None:
    family = Metric("odd", "Something.", "unknown")
    family.add_sample("odd", {}, 1.0)
    assert family_text(family).head.endswith("# TYPE odd untyped\n")


def test_of_a_router_that_has_ended_only_what_it_counted_remains() -> None:
    families = run_loop(rendered(Figures(), label_text("router", "0")))
    earlier = RouterFigures("1", families)
    figures = RouterFigures("0", families, (("m", 3),), ("tone",), ("calm",), (earlier,))
    last = figures.last()
    assert [one.name for one in last.families] == ["calls_total", "took_seconds"]
    assert last == RouterFigures("0", last.families)
    assert figures.alone().departed == ()


def test_figures_cross_between_versions_of_rkserve() -> None:
    figures = RouterFigures("0", run_loop(rendered(Figures())))
    assert pickle.loads(pickle.dumps(figures)) == figures
