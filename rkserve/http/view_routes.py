"""Routes of the cluster's view: verdict, live events, the history of a board, and usage."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from rkserve.api.admin.cluster_view import (
    MAX_SECONDS,
    BoardHistoryAnswer,
    KeyUsageAnswer,
    SnapshotEvent,
    UsageQuery,
    VerdictAnswer,
    ViewQuery,
)
from rkserve.api.admin.query import ControlRequest
from rkserve.api.admin.view_document import board_history, usage_answer, verdict_answer
from rkserve.api.json.schemas import Example
from rkserve.http.auth import may_operate, while_admitted
from rkserve.http.bodies import query_of
from rkserve.http.openapi import EVENTS, FIGURES, READ, EndpointAnswer, Routes, returns
from rkserve.http.streamed_answer import StreamedAnswer
from rkserve.router.features.cluster_view import ClusterView
from rkserve.router.features.view_feed import ViewFeed
from rkserve.router.service import Service
from rkserve.router.usage_records import UsageRecords

# A reader that takes nothing for so long has gone, or has no use for what is live.
STUCK_S = 60.0
_HEADERS: Mapping[str, str] = {
    "content-type": EVENTS,
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_STREAM = EndpointAnswer(
    200,
    "The events, until the stream ends after a quarter of an hour: call again.",
    {EVENTS: str},
    pieces={EVENTS: SnapshotEvent},
)


def add_view(
    app: FastAPI, service: Service, view: ClusterView, feed: ViewFeed, records: UsageRecords
) -> None:
    """Add the routes to the application."""
    route = Routes(app, "Cluster")

    @route("GET /v1/cluster/verdict", READ, returns(VerdictAnswer, "The verdict."))
    async def verdict(_: Request) -> Response:
        """Judge the cluster: ready, degraded or not ready, with reasons and commands."""
        await asyncio.gather(view.look(), service.cluster.catch_up(), service.fleet.refresh())
        return JSONResponse(verdict_answer(*view.verdict()))

    @route(
        "GET /v1/cluster/events",
        READ,
        _STREAM,
        errors=(400, 429),
        query=ViewQuery,
        example=Example(query={"seconds": "0"}),
        says="Server-sent events. The data of the first one, `snapshot`, has the whole `view` and "
        "the `history` of half an hour. The data of each `delta` is a JSON Merge Patch (RFC 7396) "
        "of the `view`; one comes every five seconds, and at once when the state of a board "
        "changes. Another `snapshot` replaces everything. The operator's view has operations and "
        "the names of keys.",
    )
    async def events(request: Request) -> Response:
        """Watch the cluster live."""
        asked = ControlRequest(query_of(request)).read(ViewQuery).seconds
        reader = await feed.open(operator=may_operate(request))

        async def close() -> None:
            reader.close()

        stream = reader.events(MAX_SECONDS if asked is None else asked)
        admitted = while_admitted(request, stream)
        return StreamedAnswer(admitted, close, _HEADERS, send_limit_s=STUCK_S)

    @route(
        "GET /v1/usage",
        FIGURES,
        returns(KeyUsageAnswer, "The usage, the latest day first."),
        errors=(400,),
        query=UsageQuery,
        example=Example(query={"days": "8"}),
        says="Requests and tokens are those of `rkserve_key_*`; an answer's tokens count on the "
        "day of its end. Board time includes pauses on a board. The Routers of a node add theirs "
        "to a file in its `state_dir` every 10 s, and keep the last 62 days with usage.",
    )
    async def usage(request: Request) -> Response:
        """Show the usage of the last days by API key."""
        asked = ControlRequest(query_of(request)).read(UsageQuery)
        return JSONResponse(usage_answer(await records.report(asked.days)))

    @Routes(app, "Boards")(
        "GET /v1/boards/{board_id:path}/history",
        READ,
        returns(BoardHistoryAnswer, "The last half an hour."),
        errors=(404,),
        paths={"board_id": "Its name; it may contain `/`."},
        example=Example(path={"board_id": "sim-0"}),
    )
    async def history(_: Request, board_id: str) -> Response:
        """Show what a board did in the last half an hour."""
        return JSONResponse(board_history(board_id, view.history(board_id), view.sampled_s))
