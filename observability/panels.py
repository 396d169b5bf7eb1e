"""Panels of Grafana dashboards as objects, and their JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Grafana's own variable: at least four scrapes, so that a rate never misses its samples.
RATE = "$__rate_interval"
WIDTH, HEIGHT, STAT_HEIGHT = 24, 8, 4
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class PanelQuery:
    """One query of a panel, and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. ``key`` is unique among all dashboards, and its ID never changes.

    ``kind`` is Grafana's, ``unit`` one of its units.
    """

    key: int
    title: str
    about: str
    queries: tuple[PanelQuery, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 12

    @property
    def height(self) -> int:
        """Its height in Grafana's grid."""
        return STAT_HEIGHT if self.kind == "stat" else HEIGHT

    def json(self, x: int, y: int) -> dict[str, Any]:
        """Return the panel at a place of the grid, as Grafana reads it."""
        targets = [
            {
                "datasource": _SOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                "refId": chr(ord("A") + number),
                **({"instant": True} if self.kind == "stat" else {}),
            }
            for number, query in enumerate(self.queries)
        ]
        return {
            "id": self.key,
            "type": self.kind,
            "title": self.title,
            "description": self.about,
            "datasource": _SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "fieldConfig": {"defaults": {"unit": self.unit, "min": 0}, "overrides": []},
            "targets": targets,
        }


@dataclass(frozen=True, slots=True)
class Question:
    """A question of an operator, and the panels that answer it."""

    text: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard: questions in the order in which they come up."""

    uid: str
    title: str
    about: str
    questions: tuple[Question, ...]

    @property
    def panels(self) -> Iterator[Panel]:
        """All of its panels."""
        for question in self.questions:
            yield from question.panels

    def json(self) -> dict[str, Any]:
        """Return the dashboard as Grafana reads it."""
        return {
            "uid": self.uid,
            "title": self.title,
            "description": self.about,
            "tags": ["rkserve"],
            "editable": True,
            "schemaVersion": 39,
            "refresh": "15s",
            "time": {"from": "now-1h", "to": "now"},
            "templating": {
                "list": [
                    {
                        "name": "datasource",
                        "type": "datasource",
                        "query": "prometheus",
                        "label": "Prometheus",
                    }
                ]
            },
            "links": [
                {"type": "dashboards", "tags": ["rkserve"], "title": "rkserve", "asDropdown": True}
            ],
            "panels": [*self._placed()],
        }

    def _placed(self) -> Iterator[dict[str, Any]]:
        y = 0
        for number, question in enumerate(self.questions):
            # IDs of rows are below those of all panels.
            yield {
                "id": number + 1,
                "type": "row",
                "title": question.text,
                "collapsed": False,
                "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1},
                "panels": [],
            }
            y += 1
            x = height = 0
            for panel in question.panels:
                if x + panel.width > WIDTH:
                    x, y, height = 0, y + height, 0
                yield panel.json(x, y)
                x, height = x + panel.width, max(height, panel.height)
            y += height


def rate(metric: str, by: str, where: str = "", over: str = RATE) -> str:
    """Return the rate of a counter, summed by labels: over Routers, or boards, or both."""
    return f"sum by ({by}) (rate({metric}{where}[{over}]))"


def quantile(share: float, histogram: str, by: str = "", over: str = RATE) -> str:
    """Return a quantile of a histogram over all Routers. Rare events need a long time ``over``."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({share:g}, {rate(f'{histogram}_bucket', labels, over=over)})"


def quantiles(histogram: str, by: str = "model", over: str = RATE) -> tuple[PanelQuery, ...]:
    """Return the median and the 95th percentile of a histogram."""
    series = f"{{{{{by}}}}} " if by else ""
    return tuple(
        PanelQuery(quantile(share, histogram, by, over), f"{series}{name}")
        for share, name in ((0.5, "p50"), (0.95, "p95"))
    )


def ratio(part: str, whole: str, by: str) -> str:
    """Return the ratio of two counters' rates; none where the whole does not grow."""
    return f"{rate(part, by)} / ({rate(whole, by)} > 0)"
