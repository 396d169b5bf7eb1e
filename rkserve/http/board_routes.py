"""Routes that change single boards: drain, restart and measurement."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import Response

from rkserve.api.admin import boards
from rkserve.api.admin.pause import StatusDone
from rkserve.api.json.schemas import Example
from rkserve.http.cluster_routes import ControlRoutes, answered
from rkserve.router.features.boards import BoardCalls
from rkserve.router.features.cluster_view import ClusterView
from rkserve.router.features.operations import Operations
from rkserve.router.service import Service

ONE = "/v1/boards/{board_id:path}"
NAME = {"board_id": "Its name; it may contain `/`."}
SIM_0 = {"board_id": "sim-0"}


def add_boards(app: FastAPI, service: Service, view: ClusterView) -> None:
    """Add the routes to the application."""
    routes, calls = ControlRoutes(app, service, "Boards"), BoardCalls(service, view)
    control = Operations(service)
    for call in boards.CALLS:
        change = partial(control.change, call.body)
        about = (call.answer, call.body, call.example, call.summary)
        routes.change(f"POST {call.path}", change, *about)

    @routes.changing(
        f"POST {ONE}/restart", StatusDone, boards.RestartBody, Example(path=SIM_0), paths=NAME
    )
    async def restart(request: Request, board_id: str) -> Response:
        """Replace the engine of a board; its requests continue."""
        return answered(await calls.restart(await routes.asked(request), board_id))

    @routes.changing(
        f"POST {ONE}/measure",
        boards.MeasureDone,
        boards.MeasureBody,
        Example({"seconds": 1}, SIM_0),
        paths=NAME,
    )
    async def measure(request: Request, board_id: str) -> Response:
        """Measure how fast a board generates, and compare that with what it should reach."""
        return answered(await calls.measure(await routes.asked(request), board_id))
