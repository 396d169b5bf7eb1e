"""Routes of the operator's view of the logs: lines of JSON, which may follow as they come."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

from fastapi import FastAPI, Request
from fastapi.responses import Response

from rkserve.api.admin.logs import LogEntry, LogsQuery
from rkserve.api.admin.query import ControlRequest
from rkserve.api.json.schemas import Example
from rkserve.http.auth import while_admitted
from rkserve.http.bodies import query_of
from rkserve.http.openapi import LINES, OPERATE, EndpointAnswer, Routes
from rkserve.http.streamed_answer import StreamedAnswer
from rkserve.router.features.logs import Logs, RouterLogs
from rkserve.router.service import Service

_HEADERS = {"content-type": LINES, "cache-control": "no-cache", "x-accel-buffering": "no"}
_LINES = EndpointAnswer(
    200,
    "A line of JSON for each log line; empty lines keep the connection open.",
    {LINES: str},
    pieces={LINES: LogEntry},
)
_LAST_TEN = {"tail": "10"}


def add_logs(app: FastAPI, service: Service, routers: RouterLogs | None) -> None:
    """Add the routes to the application; ``routers`` are the logs of all Routers."""
    logs = Logs(service, routers)

    @Routes(app, "Boards")(
        "GET /v1/boards/{board_id:path}/logs",
        OPERATE,
        _LINES,
        errors=(400, 404, 503),
        paths={"board_id": "Its name; it may contain `/`."},
        query=LogsQuery,
        example=Example(path={"board_id": "sim-0"}, query=_LAST_TEN),
        says="The lines of its replica and of its engine, whose last words come first where other "
        "lines have followed them.",
    )
    async def board(request: Request, board_id: str) -> Response:
        """Show the log of one board."""
        return _streamed(request, await logs.of_board(board_id, _asked(request)))

    @Routes(app, "Cluster")(
        "GET /v1/logs",
        OPERATE,
        _LINES,
        errors=(400,),
        query=LogsQuery,
        example=Example(query=_LAST_TEN),
        says="A process that does not answer is a line of its own.",
    )
    async def everything(request: Request) -> Response:
        """Show the logs of all boards, of all Routers and of the Coordinator."""
        return _streamed(request, await logs.of_all(_asked(request)))


def _asked(request: Request) -> LogsQuery:
    return ControlRequest(query_of(request)).read(LogsQuery)


def _streamed(request: Request, batches: AsyncGenerator[list[LogEntry], None]) -> Response:
    async def lines() -> AsyncGenerator[bytes, None]:
        async with aclosing(while_admitted(request, batches)) as admitted:
            async for batch in admitted:
                # In ASCII: clients split lines at characters that JSON does not escape, too.
                text = "".join(f"{json.dumps(entry, separators=(',', ':'))}\n" for entry in batch)
                yield text.encode("ascii") or b"\n"

    return StreamedAnswer(lines(), batches.aclose, _HEADERS)
