"""Every panel asks for metrics and labels that exist, and answers its question honestly."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from observability.dashboards import DASHBOARDS
from observability.metric_table import all_metrics
from observability.panels import Dashboard, Panel
from observability.promql import faults_of, labels_of, metrics_of

LABELS = {name: set(row.labels) for row in all_metrics() for name in row.samples}
PANELS = [panel for dashboard in DASHBOARDS.values() for panel in dashboard.panels]
EACH = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: f"{panel.key} {panel.title}")


@EACH
def test_every_metric_and_label_of_a_panel_exists(panel: Panel) -> None:
    for query in panel.queries:
        uses = [*metrics_of(query.expr)]
        assert uses, query.expr
        known: set[str] = {"le"}
        for use in uses:
            assert use.name in LABELS, use.name
            assert set(use.labels) <= LABELS[use.name], query.expr
            known |= LABELS[use.name]
        assert labels_of(query.expr) <= known, query.expr
        shown = set(re.findall(r"\{\{(\w+)\}\}", query.legend))
        assert shown <= labels_of(query.expr), f"{query.legend} of {query.expr}"


@EACH
def test_no_panel_shows_a_raw_counter_a_raw_bucket_or_a_bare_average(panel: Panel) -> None:
    assert [fault for query in panel.queries for fault in faults_of(query.expr)] == []


def test_ids_of_panels_are_unique_and_titles_within_a_dashboard() -> None:
    assert max(Counter(panel.key for panel in PANELS).values()) == 1
    for dashboard in DASHBOARDS.values():
        places = [
            (question.text, panel.title)
            for question in dashboard.questions
            for panel in question.panels
        ]
        assert len(places) == len(set(places))


@pytest.mark.parametrize("dashboard", DASHBOARDS.values(), ids=DASHBOARDS)
def test_a_dashboard_is_ordered_by_questions_and_its_panels_do_not_overlap(
    dashboard: Dashboard,
) -> None:
    made = dashboard.json()
    rows = [panel["title"] for panel in made["panels"] if panel["type"] == "row"]
    assert rows == [question.text for question in dashboard.questions]
    assert all(row.endswith("?") for row in rows)
    ids = [panel["id"] for panel in made["panels"]]
    assert len(ids) == len(set(ids))
    cells: set[tuple[int, int]] = set()
    for panel in made["panels"]:
        at = panel["gridPos"]
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert x < 24
                assert (x, y) not in cells, panel["title"]
                cells.add((x, y))


def test_series_of_routers_are_summed() -> None:
    """A panel that forgot so would show as many lines as there are Routers."""
    for panel in PANELS:
        for query in panel.queries:
            routers = any("router" in LABELS[use.name] for use in metrics_of(query.expr))
            assert not routers or re.search(r"\b(sum|max|count|min)\b", query.expr), query.expr
