"""The Router's FastAPI application: routes, error handlers and middleware, without Ray."""

from __future__ import annotations

import asyncio
import json
import logging
from functools import cache
from typing import Any, Literal
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import TypedDict

from rkserve import __version__
from rkserve.api.json.schemas import Example
from rkserve.core.errors import MethodNotAllowed, NoBoard, RequestError, RkserveError, RouteNotFound
from rkserve.core.request_record import record_of_request
from rkserve.http.auth import BrowserGuard, Gate, HostAllowList, ListenerGuard, host_names
from rkserve.http.board_routes import add_boards
from rkserve.http.catalog_routes import add_catalog
from rkserve.http.cluster_routes import add_cluster, add_join, add_updates
from rkserve.http.dialect_routes import add_dialects, error_of
from rkserve.http.generation_routes import add_control
from rkserve.http.gradio_routes import GradioCalls, add_gradio
from rkserve.http.key_routes import add_keys
from rkserve.http.log_routes import add_logs
from rkserve.http.openai_routes import add_openai
from rkserve.http.openapi import (
    FIGURES,
    GENERATION,
    JSON,
    OPEN,
    PLAIN,
    SERVICE,
    DescribedRoute,
    EndpointAnswer,
    EndpointParameter,
    Routes,
    returns,
)
from rkserve.http.streamed_answer import DIRECT
from rkserve.http.trainer_routes import add_trainers
from rkserve.http.view_routes import add_view
from rkserve.page import CLUSTER_FRONT, FRONT, PageFile, page_files
from rkserve.router.cluster_metrics import ClusterMetrics
from rkserve.router.features.cluster_view import ClusterView
from rkserve.router.features.generations import GenerationPeers
from rkserve.router.features.logs import RouterLogs
from rkserve.router.features.view_feed import ViewFeed
from rkserve.router.membership import Membership
from rkserve.router.request_log import failed
from rkserve.router.service import Service
from rkserve.router.stored_responses import Responses
from rkserve.router.usage_records import UsageRecords

log = logging.getLogger(__name__)

# FastAPI would make spans and logs of its own, with the texts of errors, wherever a library in the
# process has set OpenTelemetry's global providers, as Ray's tracing does.
NO_TELEMETRY: Any = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}


# A model's text is no page, whatever a browser that opens it finds in it.
NO_SNIFFING = (b"x-content-type-options", b"nosniff")


def make_app(
    service: Service,
    max_adapter_bytes: int,
    max_model_bytes: int,
    responses: Responses,
    peers: GenerationPeers | None = None,
    *,
    hosts: HostAllowList | None = None,
    gradio: GradioCalls | None = None,
    membership: Membership | None = None,
    metrics: ClusterMetrics | None = None,
    view: ClusterView | None = None,
    feed: ViewFeed | None = None,
    usage: UsageRecords | None = None,
    logs: RouterLogs | None = None,
) -> ASGIApp:
    """Return the ASGI application of one Router.

    ``peers`` are all Routers of the application, if there are several; ``responses`` are the stored
    responses, ``hosts`` the allowed host names, ``gradio`` the posted calls of Gradio's clients,
    ``membership`` the joining of boards, ``metrics`` those of the cluster, ``view`` and ``feed``
    the cluster as this Router sees it, ``usage`` that of API keys, and ``logs`` the logs of all
    Routers. Adapters and base weights have length limits of their own.
    """
    # Without redirects a trailing slash is a 404 in OpenAI's format instead of an empty 307.
    # The framework's API pages would load scripts from elsewhere; the document is our own, because
    # bodies are read by the handlers themselves.
    app = FastAPI(
        title="rkserve",
        version=__version__,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        telemetry=NO_TELEMETRY,
    )
    app.state.gate = Gate(service.keys)
    app.add_exception_handler(RkserveError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_error)
    _add_health(Routes(app, SERVICE), service, metrics or ClusterMetrics(service))
    add_openai(app, service, responses)
    add_dialects(app, service)
    add_gradio(app, service, gradio or GradioCalls())
    if service.config.page:
        add_page(app)
    add_document(app)
    view = view or ClusterView(service)
    usage = usage or UsageRecords(service.metrics.usage)
    # Before the calls of single boards: one of its paths fits those, too.
    add_view(app, service, view, feed or ViewFeed(view, service), usage)
    add_logs(app, service, logs)  # one of its paths fits that of a board, too
    add_boards(app, service, view)
    add_control(app, service, peers)
    add_cluster(app, service, max_adapter_bytes, max_model_bytes)
    add_catalog(app, service)
    add_keys(app, service)
    joining = membership or Membership(None)
    add_join(app, service, joining)
    add_updates(app, service, joining)
    add_trainers(app, service)
    allowed = service.config.allowed_origins
    inner: ASGIApp = _Direct(app)
    if allowed:
        inner = CORSMiddleware(
            inner, allowed, allow_methods=("*",), allow_headers=("*",), expose_headers=("*",)
        )
    _begin_counts(app, service)
    hosts = hosts or host_names(service.config)
    guarded = BrowserGuard(inner, hosts, allowed, _refusal)
    # Outside of everything, so that a 500 counts as well.
    return _Recorded(ListenerGuard(guarded, _refusal), service)


class HealthAnswer(TypedDict):
    """A Router that lives."""

    status: Literal["ok"]
    version: str


class ReadyAnswer(TypedDict):
    """A Router whose models are all served."""

    status: Literal["ready"]


def _add_health(route: Routes, service: Service, metrics: ClusterMetrics) -> None:
    @route("GET,HEAD /health", OPEN, returns(HealthAnswer, "It lives."))
    async def health(_: Request) -> JSONResponse:
        """Say that the Router lives."""
        return JSONResponse(HealthAnswer(status="ok", version=__version__))

    @route("GET,HEAD /ready", OPEN, returns(ReadyAnswer, "All models are served."), errors=(503,))
    async def ready(_: Request) -> JSONResponse:
        """Say whether every model has a board that serves."""
        if not service.keys.anonymous:
            service.keys.require_known()
        waiting = [m for m in service.fleet.models if not service.fleet.is_ready(m)]
        if waiting:
            raise NoBoard(waiting[0], service.fleet.why_not_ready(waiting[0]))
        return JSONResponse(ReadyAnswer(status="ready"))

    @route("GET /metrics", FIGURES, EndpointAnswer(200, "The metrics.", {PLAIN: str}))
    async def scrape(_: Request) -> PlainTextResponse:
        """Export the metrics of the whole cluster in Prometheus' text format."""
        return PlainTextResponse(await metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _begin_counts(app: FastAPI, service: Service) -> None:
    """Begin the counts of the calls that boards answer, with their most frequent errors: Prometheus
    does not see the increase by which a series appears.
    """
    for route in app.routes:
        if isinstance(route, DescribedRoute) and set(GENERATION) <= set(route.description.errors):
            for status in (200, 400, 429, 500, 503):
                service.metrics.requests.labels(route.path, str(status))


class _Direct:
    """Calls the handlers of generations without the framework's layers and its search through all
    routes.

    Plain ASGI. Errors are answered as in the framework, and all other routes are its own.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        found = [route for route in app.routes if isinstance(route, DescribedRoute)]
        self._routes = {
            (method, route.path): route
            for route in found
            if set(GENERATION) <= set(route.description.errors) and "{" not in route.path
            for method in route.methods or ()
            if _first_match(app, method, route.path) is route
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"].removeprefix(scope.get("root_path", "")) if "path" in scope else ""
        route = self._routes.get((scope.get("method", ""), path))
        if route is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope.update({"app": self._app, "route": route, "path_params": {}})
        request, failure = Request(scope, receive, send), None
        try:
            response: Response = await route.endpoint(request)
        except HTTPException as exc:
            response = await _on_http_error(request, exc)
        except Exception as exc:  # noqa: BLE001 - raised again after its answer
            response = await _on_error(request, exc)
            failure = None if isinstance(exc, RkserveError) else exc
        await response(scope, receive, send)
        if failure is not None:
            raise failure


def _first_match(app: FastAPI, method: str, path: str) -> Any:
    scope = {"type": "http", "method": method, "path": path, "root_path": ""}
    matches = (route for route in app.routes if route.matches(scope)[0] is Match.FULL)
    return next(matches, None)


class _Recorded:
    """Records, counts and logs requests, by the pattern of their route, never by the client's path.

    Plain ASGI: the framework's middleware class would pass every token through another queue.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app, self._service = app, service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[DIRECT] = send
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        log = self._service.log
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        record = log.begin(scope["method"], path, Headers(scope=scope))

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                record.route = getattr(scope.get("route"), "path", "unknown")
                self._service.metrics.requests.labels(record.route, str(record.status)).inc()
                more = [] if _has_type_rule(message) else [NO_SNIFFING]
                if record.trace is not None:
                    more.append((b"traceparent", record.trace.traceparent.encode()))
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except BaseException as exc:
            failed(record, exc)
            raise
        finally:
            record.route = record.route or getattr(scope.get("route"), "path", "unknown")
            log.end(record)


def _has_type_rule(message: Message) -> bool:
    return any(name == NO_SNIFFING[0] for name, _ in message["headers"])


def _refusal(request: Request, exc: RkserveError) -> ASGIApp:
    failed(record_of_request(), exc)
    status, headers, body = error_of(request)(exc)
    return JSONResponse(body, status, headers)


async def _on_error(request: Request, exc: Exception) -> JSONResponse:
    # The framework raises other exceptions again after this answer, and logs them.
    failed(record_of_request(), exc)
    status, headers, body = error_of(request)(exc)
    return JSONResponse(body, status, headers)


async def _on_http_error(request: Request, exc: Exception) -> JSONResponse:
    """Translate errors of the framework itself, such as unknown paths and methods."""
    assert isinstance(exc, HTTPException)
    path = quote(request.url.path)  # as it was sent; a text with markup would worry scanners
    refusal: RkserveError = RequestError(str(exc.detail))
    more = {name.lower(): value for name, value in (exc.headers or {}).items()}
    if exc.status_code == MethodNotAllowed.http_status:
        more["allow"] = ", ".join(_methods(request))
        refusal = MethodNotAllowed(f"{request.method} is not allowed on {path}.")
    elif exc.status_code == RouteNotFound.http_status:
        refusal = RouteNotFound(f"There is nothing at {path}.")
    failed(record_of_request(), refusal)
    _, headers, body = error_of(request)(refusal)
    return JSONResponse(body, exc.status_code, {**more, **headers})


def _methods(request: Request) -> list[str]:
    """Return the allowed methods of a path; the framework names those of one route only.

    Of several matching routes, the one with the fewest path parameters counts.
    """
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    found = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    path = min((route.path for route in found), key=lambda path: path.count("{"), default="")
    same = (route for route in found if route.path == path)
    return sorted({method for route in same for method in route.methods or ()})


_TYPES = ("text/html", "text/css", "text/javascript", "image/svg+xml", "text/markdown")
_TAGGED = {"etag": "What tells this content from another."}
_FILE = (
    EndpointAnswer(
        200,
        "The file.",
        dict.fromkeys(_TYPES, str),
        _TAGGED,
    ),
    EndpointAnswer(304, "It is the one that is known already."),
)
_KNOWN = EndpointParameter("if-none-match", "header", str, "The `etag` that is known already.")


def add_page(app: FastAPI) -> None:
    """Add the routes of both pages. The files are read once."""
    found, route = page_files(), Routes(app, "Pages")

    @route("GET,HEAD /", OPEN, *_FILE, headers=(_KNOWN,))
    async def page(request: Request) -> Response:
        """Send the chat page."""
        return _send(request, found[FRONT])

    @route("GET,HEAD /cluster", OPEN, *_FILE, headers=(_KNOWN,), operators=True)
    async def cluster_page(request: Request) -> Response:
        """Send the cluster's page."""
        return _send(request, found[CLUSTER_FRONT])

    @route(
        "GET,HEAD /page/{name:path}",
        OPEN,
        *_FILE,
        errors=(404,),
        paths={"name": "The name of the file; it may contain `/`."},
        headers=(_KNOWN,),
        example=Example(path={"name": "main.js"}),
    )
    async def file(request: Request, name: str) -> Response:
        """Send one of the pages' files."""
        if name not in found:
            raise RouteNotFound(f"There is nothing at {quote(request.url.path)}.")
        return _send(request, found[name])


def _send(request: Request, file: PageFile) -> Response:
    form = file.form(gzip_accepted=_accepts_gzip(request.headers.get("accept-encoding", "")))
    known = request.headers.get("if-none-match", "")
    if form.headers["etag"] in known:  # a proxy may have made it a weak one, or sent several
        return Response(status_code=304, headers={**form.headers})
    return Response(form.content, headers={**form.headers})


def _accepts_gzip(accepted: str) -> bool:
    """Return whether an Accept-Encoding header allows gzip with a weight above zero."""
    weights: dict[str, str] = {}
    for one in accepted.lower().split(","):
        coding, *parameters = [part.strip() for part in one.split(";")]
        weights[coding] = next((p[2:] for p in parameters if p.startswith("q=")), "1")
    weight = weights.get("gzip", weights.get("*", "0"))
    return bool(weight.strip("0."))


def add_document(app: FastAPI) -> None:
    """Add the route of the OpenAPI document.

    The document is built on first use, because that takes longer than a Router's start or its event
    loop may be blocked.
    """

    @cache
    def written() -> bytes:
        from rkserve.http.openapi import document  # late, see above

        return json.dumps(document(app), separators=(",", ":")).encode()

    this = returns(dict[str, Any], "This document.")

    @Routes(app, SERVICE)("GET /openapi.json", OPEN, this)
    async def openapi(_: Request) -> Response:
        """Describe all of these calls."""
        return Response(await asyncio.to_thread(written), media_type=JSON)
