"""A rule about a cluster, the reasons that it finds, and its alert in Prometheus' words."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from string import Template
from typing import Literal, TypeAlias

from rkserve.config.router import ObjectivesConfig
from rkserve.verdicts.facts import ClusterFacts
from rkserve.verdicts.hardware import Shortfall

RUNBOOK = "docs/how-to/runbook.md"
Place: TypeAlias = Literal["board", "head", "anywhere"]


class Gravity(str, Enum):
    """The gravity of a rule, and the label of its alert."""

    CRITICAL = "critical"  # requests fail, or a board is missing: act now
    WARNING = "warning"  # answers are slower than they could be, or will be: act today


@dataclass(frozen=True, slots=True)
class Reason:
    """One finding of a rule: about the cluster, a model, or boards.

    ``sentence`` names no board. ``figure`` and ``limit`` are in ``unit``. ``command`` mends it, or
    is a comment where none can, and is typed on each board, on the head, or anywhere (``run_on``).
    """

    rule: str
    sentence: str
    command: str
    boards: tuple[str, ...] = ()
    model: str | None = None
    figure: float | None = None
    limit: float | None = None
    unit: str = ""
    evidence: tuple[str, ...] = ()
    run_on: Place = "anywhere"

    @property
    def about(self) -> str:
        """The subject of the sentence, with which a message begins; empty for the cluster."""
        if len(self.boards) > 1:
            return f"{len(self.boards)} boards, the first is {self.boards[0]}"
        return self.boards[0] if self.boards else self.model or ""

    @property
    def message(self) -> str:
        """The whole sentence."""
        return f"{self.about}: {self.sentence}" if self.about else self.sentence

    @property
    def distance(self) -> float:
        """The distance of the figure from its limit, relative to that; 0 without figures."""
        if self.figure is None or not self.limit:
            return 0.0
        return abs(self.figure - self.limit) / self.limit

    @classmethod
    def of(cls, rule: str, board: str, found: Shortfall) -> Reason:
        """Return the reason for a board's figure that is worse than it should be."""
        return cls(
            rule,
            found.sentence,
            found.command,
            boards=(board,),
            figure=found.figure,
            limit=found.limit,
            unit=found.unit,
            evidence=(found.evidence,),
            run_on="board",
        )

    def with_evidence(self, *more: str) -> Reason:
        """Return the reason with more evidence."""
        return replace(self, evidence=(*self.evidence, *more))


@dataclass(frozen=True, slots=True)
class PrometheusAlert:
    """The alert of a rule. ``expr`` and ``summary`` are PromQL and a template of Prometheus.

    ``expr`` may contain ``$ttft_s`` and ``$queue_wait_s``, the objectives. It fires after
    ``for_s``.
    """

    expr: str
    for_s: int
    summary: str

    def with_objectives(self, objectives: ObjectivesConfig) -> str:
        """Return the expression for these objectives."""
        values = {
            "ttft_s": f"{objectives.ttft_s:g}",
            "queue_wait_s": f"{objectives.queue_wait_s:g}",
        }
        return Template(self.expr).substitute(values)


@dataclass(frozen=True, slots=True)
class ClusterRule:
    """One rule: its condition over facts, and the same condition as an alert.

    ``explained_by`` are rules that are its cause where both fire for the same board or model; it is
    then evidence of that reason. With ``stops`` the cluster is not ready while it fires.
    """

    name: str
    gravity: Gravity
    find: Callable[[ClusterFacts], Iterator[Reason]]
    alert: PrometheusAlert
    explained_by: tuple[str, ...] = ()
    stops: bool = False

    @property
    def runbook(self) -> str:
        """The page and anchor of the documentation."""
        return f"{RUNBOOK}#{self.name.lower()}"
