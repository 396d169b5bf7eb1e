"""What the checks of expressions find, and what they let pass."""

from __future__ import annotations

import pytest

from observability.promql import MetricUse, faults_of, labels_of, metrics_of


def test_metrics_and_labels_of_an_expression_are_found() -> None:
    selector = 'rkserve_a_bucket{model="m",state=~"x|y"}'
    expr = f"sum by (model, le) (rate({selector}[5m])) / on (board) rkserve_b"
    assert [*metrics_of(expr)] == [
        MetricUse("rkserve_a_bucket", ("model", "state")),
        MetricUse("rkserve_b", ()),
    ]
    assert labels_of(expr) == {"model", "le", "board"}


@pytest.mark.parametrize(
    ("expr", "words"),
    [
        ("rkserve_a_total", "take its rate"),
        ('sum(rkserve_a_total{x="y"})', "take its rate"),
        ("sum by (le) (rate(rkserve_a_bucket[5m]))", "raw bucket"),
        ("rate(rkserve_a_sum[5m]) / rate(rkserve_a_count[5m])", "average"),
    ],
)
def test_faults_are_found(expr: str, words: str) -> None:
    assert any(words in fault for fault in faults_of(expr))


@pytest.mark.parametrize(
    "expr",
    [
        "histogram_quantile(0.95, sum by (le) (rate(rkserve_a_bucket[5m])))",
        "sum(increase(rkserve_a_count[5m]))",
        "max(rkserve_gauge)",
    ],
)
def test_good_expressions_have_no_fault(expr: str) -> None:
    assert [*faults_of(expr)] == []
