"""Calls on one board: a restart of its engine, and a measurement that is judged."""

from __future__ import annotations

from statistics import median
from typing import cast

from rkserve.api.admin.boards import (
    ExpectedEntry,
    MeasureBody,
    RestartBody,
    SpeedEntry,
    judged,
)
from rkserve.api.admin.pause import OperationBody
from rkserve.api.admin.query import ControlRequest
from rkserve.core.board_report import BoardReport
from rkserve.core.desired_state import Scope
from rkserve.core.errors import BoardNotFound
from rkserve.router.features.cluster_view import ClusterView, expectation
from rkserve.router.features.operations import AdminAnswer, Operations
from rkserve.router.service import Service
from rkserve.verdicts.board_rules import FEWEST_OF_A_KIND, SLOW

FIGURES = ("prefill_tokens_per_s", "decode_tokens_per_s", "tokens")


class BoardCalls:
    """Calls on single boards at one Router."""

    def __init__(self, service: Service, view: ClusterView) -> None:
        self._fleet, self._view = service.fleet, view
        self._control = Operations(service)

    async def restart(self, asked: ControlRequest, board_id: str) -> AdminAnswer:
        """Replace a board's engine. Raises ``BoardNotFound``."""
        _, answer = await self._change(asked.read(RestartBody), asked, board_id)
        return answer

    async def measure(self, asked: ControlRequest, board_id: str) -> AdminAnswer:
        """Measure a board, and compare it with what it should reach. Raises ``BoardNotFound``."""
        report, answer = await self._change(asked.read(MeasureBody), asked, board_id)
        assert not isinstance(answer.body, str)  # an operation's answer is an object
        if "error" in answer.body:
            return answer
        results = cast("dict[str, dict[str, float]]", answer.body["results"])
        found = results.get(board_id)
        measured = None
        if found is not None:
            measured = cast("SpeedEntry", {name: found[name] for name in FIGURES})
        about = judged(board_id, measured, _expected(report), self._peers(report))
        return AdminAnswer(answer.status, {"board": board_id, **about, **answer.body})

    async def _change(
        self, call: OperationBody, asked: ControlRequest, board_id: str
    ) -> tuple[BoardReport, AdminAnswer]:
        report = next((one for one in self._fleet.reports() if one.board_id == board_id), None)
        if report is None:
            raise BoardNotFound(board_id[:80])
        scope = Scope((report.model,), (board_id,))
        return report, await self._control.within(scope, call, asked)

    def _peers(self, report: BoardReport) -> ExpectedEntry | None:
        """Return the median speed of the other boards of this SoC and model, if it is known."""
        boards = self._view.facts().boards
        kind = next((one.kind for one in boards if one.id == report.board_id), None)
        others = [
            one.speed_tokens_per_s
            for one in boards
            if one.kind == kind and one.id != report.board_id and one.speed_tokens_per_s is not None
        ]
        if len(others) < FEWEST_OF_A_KIND - 1:
            return None
        middle = median(others)
        basis = f"the median of {len(others)} other boards of its SoC and model"
        return _entry(middle, SLOW, basis)


def _expected(report: BoardReport) -> ExpectedEntry | None:
    found = expectation(report)
    if found is None:
        return None
    return _entry(found.decode_tokens_per_s, found.slow_share, found.basis)


def _entry(tokens_per_s: float, least_share: float, basis: str) -> ExpectedEntry:
    return {
        "decode_tokens_per_s": round(tokens_per_s, 2),
        "least_tokens_per_s": round(least_share * tokens_per_s, 2),
        "basis": basis,
    }
