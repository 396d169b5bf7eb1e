"""A Router with all that its reference speaks of: two models, boards and a Coordinator that have
something to say to every call, and a stored response. Examples and ``make fuzz`` run against it.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import random
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from json import dumps
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rkserve.api import gradio
from rkserve.api.responses.stored import StoredResponse
from rkserve.config.router import RouterConfig
from rkserve.control.calls import OperationKind, StoredArtifact
from rkserve.control.operations import ControlOperation
from rkserve.core.board_report import (
    CacheEntry,
    CopyState,
    GenerationInfo,
    GenerationState,
    KvReport,
    ModelCopy,
)
from rkserve.core.desired_state import BaseVersion, Desired
from rkserve.core.errors import ArtifactNotFound, GenerationNotFound, OperationNotFound
from rkserve.core.files import private_folder
from rkserve.core.logs import LogLine, LogPage
from rkserve.core.messages import ControlAction, Kv
from rkserve.core.metrics import RouterMetrics
from rkserve.http.app import make_app
from rkserve.http.gradio_routes import GradioCalls, PendingCall
from rkserve.http.openapi import ApiDescription
from rkserve.router.coordinator_client import CoordinatorClient
from rkserve.router.dispatch.dispatch import open_dispatch, open_fleet
from rkserve.router.fleet_update import FleetUpdate, WheelFile, write_update
from rkserve.router.membership import ClusterTerms, Membership, write_terms
from rkserve.router.response_store import ResponseStore
from rkserve.router.service import Service
from rkserve.router.stored_responses import Responses
from tests.support.boards.embedding_boards import VectorBoards
from tests.support.boards.embedding_boards import model as embedding_model
from tests.support.boards.fake_boards import FakeBoards, answer
from tests.support.cluster.fake_head import FakeHead, line
from tests.support.http.router_house import MAX_ADAPTER_BYTES, MAX_MODEL_BYTES
from tests.support.http.router_house import model as chat_model
from tests.support.values.control_values import recorded

EVENT = "0" * 32  # the posted call of Gradio's examples
CHAT, EMBED = "sim-chat", "sim-embed"
BOARD = "sim-0"
GENERATION = "chatcmpl-1"
RESPONSE = f"resp_{'0' * 32}"
OPERATION = "op-1"
BASE = BaseVersion(CHAT, "step-7", "b" * 64, 5678)
_AFTER = {
    ControlAction.PAUSE: GenerationState.PAUSED,
    ControlAction.EDIT: GenerationState.PAUSED,
    ControlAction.RESUME: GenerationState.GENERATING,
    ControlAction.ABORT: GenerationState.ABORTING,
}


def chat_boards() -> FakeBoards:
    """A board that answers, holds one paused generation, and has caches."""
    boards = FakeBoards.answering(BOARD)
    boards.scripts = {f"replica of {BOARD}": [answer(BOARD, "Hel", "lo")]}
    boards.says = {
        ("", "generations"): [],
        ("", "control"): GenerationNotFound(GENERATION),
        ("", "caches"): [],
        ("", "delete_cache"): False,
        ("", "kv"): kv,
        ("", "clear_kv"): lambda _keep: kv("cleared"),
        ("", "build_cache"): lambda name, _ids, _ref: cache(name),
        ("", "forgive"): None,
        ("", "logs"): lambda _query: log_page("the engine is ready"),
        ("", "prefetch_model"): ModelCopy(CopyState.PRESENT, "0" * 64),
        (f"replica of {BOARD}", "generations"): [info()],
        (f"replica of {BOARD}", "control"): control,
        (f"replica of {BOARD}", "caches"): [cache("doc"), cache(None)],
        (f"replica of {BOARD}", "delete_cache"): lambda name: name == "doc",
    }
    return boards


def log_page(message: str) -> LogPage:
    """One line, of a process that has written no other."""
    return LogPage("0" * 16, (LogLine(1, 1.5, "INFO", "rkserve", message),), 1)


def talking_head() -> FakeHead:
    """A Coordinator that knows an adapter, base weights and an operation."""
    says = {
        "logs": lambda _query: log_page("the epoch is 3"),
        "find_weights": found_weights,
        "register_model": BASE,
        "operation": found_operation,
        "upload_end_model": BASE,
        "upload_part": lambda _upload, offset, data: offset + len(data),
    }
    return FakeHead(desired=Desired(lines=(line(),)), says=says)


def found_weights(_model: str, artifact: str) -> StoredArtifact:
    if artifact == f"{CHAT}@step-7":
        return StoredArtifact(BASE)
    raise ArtifactNotFound("There are no such weights.", "artifact")


def found_operation(name: str) -> ControlOperation:
    if name == OPERATION:
        return recorded(name, OperationKind.PAUSE)
    raise OperationNotFound(name)


def info(state: GenerationState = GenerationState.PAUSED) -> GenerationInfo:
    """The generation that is there."""
    return GenerationInfo(
        f"{GENERATION}/0",
        BOARD,
        CHAT,
        state,
        prompt_tokens=5,
        tokens=3,
        context_tokens=8,
        kv_positions=7,
        partial_output="Hello",
        kv=Kv.KEPT,
    )


def control(
    generation: str, action: ControlAction, _edit: object, choice: int | None
) -> list[GenerationInfo]:
    if generation != GENERATION or choice not in (None, 0):
        raise GenerationNotFound(generation)
    return [info(_AFTER[action])]


def kv(status: str = "ok") -> KvReport:
    return KvReport(BOARD, CHAT, (100,), 4096, 1000, status)


def cache(name: str | None) -> CacheEntry:
    return CacheEntry(BOARD, CHAT, name, 500, 3000)


_ITEM = {
    "id": f"msg_{'0' * 32}_i0",
    "type": "message",
    "status": "completed",
    "role": "user",
    "content": [{"type": "input_text", "text": "Hello"}],
}
_RESPONSE: dict[str, Any] = {
    "id": RESPONSE,
    "object": "response",
    "created_at": 1_700_000_000,
    "completed_at": None,
    "status": "completed",
    "background": False,
    "error": None,
    "incomplete_details": None,
    "model": CHAT,
    "output": [],
    "truncation": "disabled",
    "usage": None,
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "temperature": 0.8,
    "top_p": 0.9,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "service_tier": "default",
    "safety_identifier": None,
    "prompt_cache_key": None,
    "parallel_tool_calls": True,
    "max_tool_calls": None,
    "tool_choice": "auto",
    "tools": [],
    "reasoning": {"effort": None, "summary": None},
    "text": {"format": {"type": "text"}},
    "top_logprobs": 0,
    "previous_response_id": None,
    "store": True,
}


class MembershipOfExamples(Membership):
    """A membership to which the secret in the examples stands for that of the cluster's boards."""

    def member_folder(self, secret: bytes) -> Path:
        """Return the head's folder."""
        if secret != b"SECRET":
            return super().member_folder(secret)
        assert self._folder is not None
        return self._folder


def membership(folder: Path) -> Membership:
    """A head whose join token is that of the example, for as long as the tests run."""
    home = folder / "head"
    private_folder(home)
    (home / "token").write_text("secret")
    write_terms(home, ClusterTerms("192.0.2.1:6379", "2.60.0", "3.11", str(home / "token"), {}))
    digest = hashlib.sha256(b"JOIN_TOKEN").hexdigest()
    (home / "join_tokens.json").write_text(dumps([{"digest": digest, "expires_s": 1e12}]))
    rock = {"host": "rock-5b", "state": "waiting", "since_s": time.time()}
    (home / "boards.json").write_text(dumps([rock]))
    wheel = WheelFile("rkserve-0.2.0-py3-none-any.whl", "0" * 64, 7)
    (home / wheel.name).write_bytes(b"a wheel")
    write_update(home, FleetUpdate("u1", "0.2.0", str(home), (wheel,)))
    return MembershipOfExamples(home)


@dataclass
class ReferenceHouse:
    """The Router. ``kept`` is where its responses are stored."""

    kept: Path
    config: RouterConfig = field(default_factory=RouterConfig)
    head: FakeHead = field(default_factory=talking_head)
    _heard_s: float = -1.0  # when ``quick`` heard the boards, by the loop's clock

    def __post_init__(self) -> None:
        self.boards = {"chat": chat_boards(), "embed": VectorBoards.of("e")}
        self.boards["embed"].says = dict(self.boards["chat"].says)
        fleet = open_fleet(self.config, self.boards, {"chat": CHAT, "embed": EMBED})
        self.cluster = CoordinatorClient(self.head, fleet.obey)
        metrics = RouterMetrics(CollectorRegistry())
        dispatch = open_dispatch(self.config, fleet, metrics, random.Random(5))
        models = {CHAT: chat_model(), EMBED: embedding_model()}
        self.service = Service(self.config, models, dispatch, self.cluster, metrics)
        self.responses = Responses(self.config, self.kept)
        posted = GradioCalls()
        call = gradio.GradioCall(gradio.CHAT, ("Hello", [], "", "", 0))
        posted.keep(PendingCall(EVENT, "anybody", call, 100))
        limits = (MAX_ADAPTER_BYTES, MAX_MODEL_BYTES)
        self.app: ASGIApp = make_app(
            self.service, *limits, self.responses, gradio=posted, membership=membership(self.kept)
        )

    def remember(self) -> None:
        """Have the response stored that examples speak of, as it was at first."""
        store = ResponseStore(self.kept, 1 << 20, 3600.0)
        store.delete("anybody", RESPONSE)
        store.write("anybody", StoredResponse(RESPONSE, None, (_ITEM,), _RESPONSE))
        store.close()

    @property
    def framework(self) -> Any:
        """FastAPI's application, beneath what stands around it."""
        app: Any = self.app
        while not hasattr(app, "routes"):
            app = app._app
        return app

    async def refresh(self) -> None:
        """Hear boards and Coordinator."""
        await self.service.fleet.refresh()
        await self.cluster.refresh()

    async def __call__(
        self, method: str, url: str, *, host: str = "127.0.0.1", **rest: Any
    ) -> httpx.Response:
        """Make one request from a machine, by default this one."""
        await self.refresh()
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False, client=(host, 123))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.request(method, url, **rest)

    async def quick(
        self,
        method: str,
        url: str,
        content: bytes | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        json: Any = None,
    ) -> httpx.Response:
        """Make a request whose URL is quoted already, without an HTTP client around it.

        For tests of thousands of requests: a client, and hearing all boards again where no time has
        passed, take longer than most answers.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s != self._heard_s:
            await self.refresh()
            self._heard_s = now_s
        given = {"host": "localhost", "accept": "*/*", **(headers or {})}
        if json is not None:
            content = dumps(json).encode()
            given.setdefault("content-type", "application/json")
        if content is not None or method in ("POST", "PUT", "PATCH"):
            given["content-length"] = str(len(content or b""))
        path, _, query = url.partition("?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": unquote(path),
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "server": ("localhost", None),
            "client": ("127.0.0.1", 123),
            "headers": [
                (name.encode(), value if isinstance(value, bytes) else value.encode())
                for name, value in given.items()
            ],
        }
        sent: list[Message] = []
        over = asyncio.Event()
        asked: list[Message] = [
            {"type": "http.request", "body": content or b"", "more_body": False}
        ]

        async def receive() -> Message:
            if asked:
                return asked.pop()
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                over.set()

        # An unexpected exception is answered with a 500 before it is raised again.
        with suppress(Exception):
            await self.app(scope, receive, send)
        over.set()
        body = b"".join(one.get("body", b"") for one in sent[1:])
        return httpx.Response(sent[0]["status"], headers=sent[0]["headers"], content=body)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The application as a server calls it; it hears of its boards when it starts."""
        if scope["type"] != "lifespan":
            await self.app(scope, receive, send)
            return
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.refresh()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return


@functools.cache
def described_api() -> ApiDescription:
    """Return the endpoints of a Router with all of its routes."""
    with tempfile.TemporaryDirectory() as kept:
        house = ReferenceHouse(Path(kept))
        house.responses.close()
        return ApiDescription(house.framework)
