"""The table of scopes: every route, with every kind of caller, and attempts to get around it."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from starlette.types import Message

from rkserve.config.router import RouterConfig
from rkserve.core.api_keys import ApiKey, KeyScope, KeyTable, digest_of
from rkserve.core.logs import LogRing
from rkserve.http.auth import LISTENER, PEER, Access, Gate, Listener
from rkserve.http.openapi import DescribedRoute, Endpoint
from rkserve.router.auth.key_ring import WRONG_KEYS, KeyRing, open_keys
from tests.support.boards.fake_boards import FakeBoards
from tests.support.boards.own_time import run_loop
from tests.support.cluster.fake_head import FakeHead
from tests.support.http.reference_house import ReferenceHouse, described_api
from tests.support.http.router_house import CHAT, House, chat, send

ENDPOINTS = described_api().endpoints
NETWORK = "192.0.2.7"
ADMIN = "boss"
# The callers beside those with one scope; none may call anything that is not open.
NOBODY = ("none", "wrong", "revoked", "expired")
CALLERS = (*NOBODY, *(one.value for one in KeyScope), "configured admin")
# What each scope opens beside its own.
OPENS = {
    "infer": {Access.INFER, Access.CONTROL, Access.LIST},
    "read": {Access.READ, Access.LIST, Access.FIGURES},
    "operate": {Access.OPERATE, Access.READ, Access.LIST, Access.CONTROL, Access.FIGURES},
    "admin": set(Access),
    "configured admin": set(Access),
}


def key(name: str, scope: KeyScope, **more: Any) -> ApiKey:
    return ApiKey(f"key_{name}", name, digest_of(name.encode()).hex(), "", (scope,), **more)


TABLE = KeyTable(
    9,
    (
        *(key(one.value, one) for one in KeyScope),
        key("expired", KeyScope.ADMIN, expires_s=time.time() - 1),
    ),
)


def ident(one: Endpoint) -> str:
    return f"{one.method} {one.path}"


@pytest.fixture(scope="module")
def of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReferenceHouse]:
    """Return a Router that knows keys of every kind."""
    folder = tmp_path_factory.mktemp("scopes")
    made = ReferenceHouse(folder / "kept", RouterConfig(admin_key=SecretStr(ADMIN)))
    made.service.keys.take(TABLE)
    made.service.keys.changed.clear()
    yield made
    made.responses.close()


def headers_of(caller: str) -> dict[str, str]:
    secret = {"none": "", "wrong": "rks-wrong", "configured admin": ADMIN}.get(caller, caller)
    return {"authorization": f"Bearer {secret}"} if secret else {}


def test_every_route_of_the_application_states_its_access(of: ReferenceHouse) -> None:
    assert of.framework.routes
    for route in of.framework.routes:
        assert isinstance(route, DescribedRoute), route
        assert isinstance(route.description.access, Access)


OPEN_ROUTES = {
    *("GET /", "HEAD /", "GET /cluster", "HEAD /cluster", "GET /page/{name}", "HEAD /page/{name}"),
    *("GET /health", "HEAD /health", "GET /ready", "HEAD /ready", "GET /openapi.json"),
    *("GET /version", "GET /api/version", "HEAD /api/version", "GET /health_generate"),
    *("GET /ping", "POST /ping"),
    # These have secrets of their own: a join token, and that of the boards.
    *("POST /v1/join", "POST /v1/heartbeat", "GET /v1/update/files/{sha256}"),
}


def test_the_routes_without_a_key_are_these() -> None:
    assert {ident(one) for one in ENDPOINTS if one.access is Access.OPEN} == OPEN_ROUTES


def test_keys_are_for_those_with_the_scope_admin_alone() -> None:
    found = {one.access for one in ENDPOINTS if one.path.startswith("/v1/keys")}
    assert found == {Access.ADMIN}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/lora_adapters", {"name": "tone", "path": "/srv/x"}),
        ("/v1/weights", {"path": "/srv/x"}),
        (
            "/v1/catalog/models",
            {
                "name": "chat",
                "piece_bytes": 4096,
                "files": [
                    {"path": "m.rkllm", "bytes": 1, "sha256": "0" * 64, "pieces": ["0" * 64]}
                ],
            },
        ),
    ],
    ids=["adapters", "weights", "models"],
)
def test_only_an_admin_may_send_an_older_signed_version(
    of: ReferenceHouse, path: str, body: dict[str, Any]
) -> None:
    of.framework.state.gate = Gate(of.service.keys)  # no wrong keys yet

    async def ask() -> dict[str, tuple[int, str]]:
        transport = httpx.ASGITransport(of.app, client=(NETWORK, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            found = {}
            for caller in ("operate", "admin", "configured admin"):
                sent = {**body, "allow_older": True}
                one = await client.post(path, json=sent, headers=headers_of(caller))
                found[caller] = one.status_code, one.text
            return found

    said = run_loop(ask())
    assert said["operate"][0] == 403
    assert "'allow_older' needs a key with the scope 'admin'" in said["operate"][1]
    assert said["admin"][0] == said["configured admin"][0] == 200, said


@pytest.mark.parametrize("one", [e for e in ENDPOINTS if e.access is not Access.OPEN], ids=ident)
def test_a_route_admits_the_callers_of_its_scopes_and_no_other(
    of: ReferenceHouse, one: Endpoint
) -> None:
    of.framework.state.gate = Gate(of.service.keys)  # no wrong keys yet
    path = one.path.format(**one.example.path)

    async def ask() -> dict[str, int]:
        transport = httpx.ASGITransport(of.app, client=(NETWORK, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return {
                # A body of no type is refused before anything runs, but after the caller's check.
                caller: (
                    await client.request(
                        one.method,
                        path,
                        params={"unknown parameter": "1"},
                        headers={**headers_of(caller), "content-type": "text/x-none"},
                        content=b"x",
                    )
                ).status_code
                for caller in CALLERS
            }

    statuses = run_loop(ask())
    assert all(status < 500 for status in statuses.values())
    refused = {caller: statuses[caller] for caller in statuses if statuses[caller] in (401, 403)}
    expected = {
        caller: 401 if caller in NOBODY[1:] else 403
        for caller in CALLERS
        if one.access not in OPENS.get(caller, set())
    }
    if one.access not in (Access.OPERATE, Access.ADMIN):
        expected["none"] = 401
    assert refused == expected


TRICKS = [
    *("//v1/keys", "/v1//keys", "/v1/keys/", "/v1/keys;x", "/v1/keys;x=1", "/V1/KEYS", "/v1/Keys"),
    *("/./v1/keys", "/v1/../v1/keys", "/%76%31/keys", "/v1%2fkeys", "/v1/keys%00", "/v1/keys%20"),
    *("/v1/keys%2f", "/page/../v1/keys", "/page/%2e%2e/v1/keys", "/health/../v1/keys", "/v1/keys?"),
    *("/v1/keys#x", "/v1/models/../keys", "/v1/boards/..%2fkeys", "\\v1\\keys", "/v1/%6beys"),
]


@pytest.mark.parametrize("path", TRICKS)
@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer infer"}], ids=["none", "infer"])
def test_no_way_of_writing_a_path_gets_around_its_scope(
    of: ReferenceHouse, path: str, headers: dict[str, str]
) -> None:
    of.framework.state.gate = Gate(of.service.keys)
    sent = [(name.encode(), value.encode()) for name, value in headers.items()]
    raw = path.partition("#")[0].encode()
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": httpx.URL(f"http://x{path}").path if path.startswith("/") else path,
        "raw_path": raw,
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), *sent],
        "client": (NETWORK, 1),
    }
    statuses: list[int] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send_(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def call() -> None:
        await of.app(scope, receive, send_)

    run_loop(call())
    assert statuses[0] in (401, 403, 404)


# -- the port of clients, and that of operators ---------------------------------------------------


async def raw(
    of: ReferenceHouse,
    method: str,
    path: str,
    listener: Listener,
    *,
    root: str = "",
    key: str = ADMIN,
) -> tuple[int, str, Any]:
    """Make a request that HAProxy has marked; return status, code and route."""
    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": root + (httpx.URL(f"http://x{path}").path if path.startswith("/") else path),
        "raw_path": (root + path).encode(),
        "query_string": b"unknown=1",
        "root_path": root,
        "headers": [
            (b"host", b"localhost"),
            (b"authorization", f"Bearer {key}".encode()),
            (b"content-type", b"text/x-none"),  # refused by handlers that take a body
        ],
        "client": (NETWORK, 1),
        LISTENER: listener,
    }
    status, body = 0, b""

    async def receive() -> Message:
        return {"type": "http.request", "body": b"x", "more_body": False}

    async def send_(message: Message) -> None:
        nonlocal status, body
        status = message.get("status", status)
        body += message.get("body", b"")

    await of.app(scope, receive, send_)
    code = json.loads(body)["error"]["code"] if status == 403 else ""
    return status, code, scope.get("route")


def test_what_clients_of_models_do_not_call_is_for_the_control_port() -> None:
    control = {ident(one) for one in ENDPOINTS if one.is_control}
    stays = {ident(one) for one in ENDPOINTS if KeyScope.INFER in one.access.value} | OPEN_ROUTES
    pages = {"GET /cluster", "HEAD /cluster"}
    assert control == {ident(one) for one in ENDPOINTS} - (stays - pages)
    known = {"GET /metrics", "POST /v1/keys", "POST /pause", "GET /v1/cluster", "GET /v1/boards"}
    assert known | pages <= control


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def test_each_method_of_each_control_route_is_refused_at_the_port_of_clients_and_no_other(
    of: ReferenceHouse,
) -> None:
    places = {one.path.format(**one.example.path) for one in ENDPOINTS}
    every = {(method, path) for path in places for method in METHODS}
    described = {(one.method, one.path.format(**one.example.path)) for one in ENDPOINTS}

    async def refused(listener: Listener, calls: set[tuple[str, str]]) -> set[str]:
        found = set()
        for method, path in calls:
            # Without a key: what comes through is refused for that, and does nothing.
            status, code, route = await raw(of, method, path, listener, key="")
            if code == "control_port_only":
                found.add(f"{method} {route.path.replace(':path}', '}')}")
            elif listener is Listener.CLIENT and status != 405:
                assert not route.description.is_control, (method, path)
        return found

    control = {ident(one) for one in ENDPOINTS if one.is_control}
    assert run_loop(refused(Listener.CLIENT, every)) == control
    for listener in (Listener.CONTROL, Listener.ANY):
        assert run_loop(refused(listener, described)) == set()


@pytest.mark.parametrize("root", ["", "/llm"], ids=["at the root", "below a prefix"])
def test_no_way_of_writing_a_path_gets_a_control_call_through_the_port_of_clients(
    of: ReferenceHouse, root: str
) -> None:
    async def ask() -> int:
        routed = 0
        for path in ("/v1/keys", *TRICKS, "/%6detrics", "//pause", "/x/../pause", "/METRICS/"):
            for method in ("GET", "POST"):
                _, code, route = await raw(of, method, path, Listener.CONTROL, root=root)
                reaches = route is not None and route.description.is_control
                assert code != "control_port_only"
                status, code, route = await raw(of, method, path, Listener.CLIENT, root=root)
                if reaches or code == "control_port_only":
                    assert (status, code) in ((403, "control_port_only"), (405, ""))
                    routed += 1
        return routed

    assert run_loop(ask()) > 5, "percent-encoded ones are routed"


def test_the_refusal_names_the_port_and_not_its_address_whatever_the_key(
    of: ReferenceHouse,
) -> None:
    inner = of.app

    async def marked(scope: Any, receive: Any, send_: Any) -> None:
        await inner({**scope, LISTENER: Listener.CLIENT}, receive, send_)

    async def ask() -> set[str]:
        transport = httpx.ASGITransport(marked, client=(NETWORK, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return {
                (await client.post("/v1/keys", headers=headers_of(caller))).text
                for caller in CALLERS
            }

    (told,) = run_loop(ask())
    error = json.loads(told)["error"]
    assert error["code"] == "control_port_only"
    assert "control port" in error["message"]
    assert not re.search(r"\d", error["message"])


def test_a_request_beside_haproxy_is_refused_before_its_body_is_read(of: ReferenceHouse) -> None:
    sent: list[Message] = []

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send_(message: Message) -> None:
        sent.append(message)

    async def ask() -> None:
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "headers": []}
        for path in (CHAT, "/health", "/nothing", "/api/chat"):
            place = {"path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""}
            marked = {**scope, **place, "client": None, LISTENER: Listener.BESIDE}
            await of.app(marked, receive, send_)
        await of.app({"type": "websocket", LISTENER: Listener.BESIDE}, receive, send_)

    run_loop(ask())
    starts = [one for one in sent if one["type"] == "http.response.start"]
    assert [one["status"] for one in starts] == [403] * 4
    assert all((b"connection", b"close") in one["headers"] for one in starts)
    assert b"haproxy_bypassed" in sent[1]["body"]
    assert sent[-1] == {"type": "websocket.close", "code": 1008, "reason": "haproxy_bypassed"}


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param([("authorization", "Bearer " + "x" * 2**20)], id="a megabyte"),
        pytest.param([("authorization", bytes(range(1, 256)))], id="every byte"),
        pytest.param([("authorization", b"Bearer \x00\xff\x80")], id="bytes that are no text"),
        pytest.param([("authorization", "Bearer")], id="no key"),
        pytest.param([("authorization", "Bearer a b")], id="two words"),
        pytest.param([("authorization", "")], id="nothing"),
        pytest.param([("authorization", "Bearer admin")] * 2, id="two that are right"),
        pytest.param(
            [("authorization", "Bearer wrong"), ("authorization", "Bearer admin")],
            id="two, the second of which is right",
        ),
        pytest.param([("x-api-key", "admin")] * 2, id="two of Anthropic's"),
        pytest.param([("x-api-key", "\xff" * 9000)], id="a long one of Anthropic's"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/keys", "/v1/models", "/v1/cluster"])
def test_odd_headers_are_refused_and_never_a_500(
    of: ReferenceHouse, path: str, headers: list[tuple[str, str | bytes]]
) -> None:
    of.framework.state.gate = Gate(of.service.keys)
    raw = [
        (name.encode(), value if isinstance(value, bytes) else value.encode("latin-1"))
        for name, value in headers
    ]
    answer = run_loop(of("GET", path, headers=raw, host=NETWORK))
    # Without a bearer a call has no key.
    assert answer.status_code in ((400, 401, 403) if path == "/v1/keys" else (400, 401))


def test_anthropic_s_header_has_the_same_keys(of: ReferenceHouse) -> None:
    for secret, status in (("read", 200), ("infer", 403), ("wrong", 401)):
        answer = run_loop(of("GET", "/v1/boards", headers={"x-api-key": secret}, host=NETWORK))
        assert answer.status_code == status


def test_a_refusal_names_the_key_to_make(of: ReferenceHouse) -> None:
    told = {
        path: run_loop(of("GET", path, host=NETWORK)).json()["error"]["message"]
        for path in ("/v1/models", "/v1/cluster/verdict", "/v1/audit")
    }
    assert told["/v1/models"].endswith("rkserve keys create NAME")
    assert told["/v1/cluster/verdict"].endswith("rkserve keys create NAME --scope read")
    assert "the scope 'operate', such as the admin key" in told["/v1/audit"]


def test_a_browser_on_a_machine_without_keys_is_refused_with_the_command_that_makes_one() -> None:
    page = {"origin": "http://localhost"}
    answer = send(House(FakeBoards([])), "POST", "/pause", headers=page)
    told = answer.json()["error"]["message"]
    assert (answer.status_code, "rkserve keys create NAME --scope operate" in told) == (403, True)
    assert "no browser" in told


# -- wrong keys -----------------------------------------------------------------------------------


def closed() -> House:
    """Return a Router that the network reaches, with one key."""
    of = House(FakeBoards.answering("a"), RouterConfig(admin_key=SecretStr(ADMIN)))
    of.service.keys.take(TABLE)
    return of


def test_after_twenty_wrong_keys_an_address_is_refused_and_a_right_key_still_works() -> None:
    of = closed()
    wrong = {"authorization": "Bearer wrong"}
    for _ in range(WRONG_KEYS):
        assert send(of, "POST", CHAT, json=chat(), headers=wrong, host=NETWORK).status_code == 401
    refused = send(of, "POST", CHAT, json=chat(), headers=wrong, host=NETWORK)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "too_many_wrong_keys")
    assert 1 <= int(refused.headers["retry-after"]) <= 3
    right = {"authorization": "Bearer infer"}
    assert send(of, "POST", CHAT, json=chat(), headers=right, host=NETWORK).status_code == 200
    assert send(of, "POST", CHAT, json=chat(), host=NETWORK).status_code == 401, "no key is no try"
    other = send(of, "POST", CHAT, json=chat(), headers=wrong, host="192.0.2.8")
    assert other.status_code == 401


def test_a_forged_address_is_no_address_of_its_own() -> None:
    of = closed()
    for number in range(WRONG_KEYS + 1):
        headers = {"authorization": "Bearer wrong", "x-forwarded-for": f"192.0.2.{number}"}
        answer = send(of, "POST", CHAT, json=chat(), headers=headers, host=NETWORK)
    assert answer.status_code == 429


def test_an_address_that_a_proxy_has_named_counts() -> None:
    of = closed()
    found: list[int] = []
    inner = of.app

    async def behind(scope: Any, receive: Any, send_: Any) -> None:
        await inner({**scope, PEER: f"203.0.113.{len(found)}"}, receive, send_)

    of.app = behind
    for _ in range(WRONG_KEYS + 1):
        headers = {"authorization": "Bearer wrong"}
        found.append(send(of, "GET", "/v1/models", headers=headers).status_code)
    assert set(found) == {401}


# -- callers without a key ------------------------------------------------------------------------


def test_a_service_that_the_network_reaches_is_closed_without_any_key() -> None:
    of = House(FakeBoards.answering("a"))
    of.use_keys(KeyRing(open_keys(of.config), local_only=False))
    for method, path, body in (("POST", CHAT, chat()), ("GET", "/v1/models", None)):
        answer = send(of, method, path, json=body, host=NETWORK)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert "rkserve keys create" in answer.json()["error"]["message"]
    assert send(of, "POST", "/pause", host=NETWORK).status_code == 403


def test_an_open_service_takes_callers_without_a_key_and_with_a_wrong_one() -> None:
    of = House(FakeBoards.answering("a"))
    of.use_keys(KeyRing(open_keys(of.config), local_only=False, open_to_all=True))
    for headers in ({}, {"authorization": "Bearer whatever"}):
        answer = send(of, "POST", CHAT, json=chat(), headers=headers, host=NETWORK)
        assert answer.status_code == 200
    assert send(of, "POST", "/pause", host=NETWORK).status_code == 403


def test_an_open_service_is_ready_before_the_keys_are_known() -> None:
    of = House(FakeBoards.answering("a"))
    of.use_keys(KeyRing(open_keys(of.config), table=None, open_to_all=True))
    assert send(of, "GET", "/ready").status_code == 200
    assert send(of, "POST", CHAT, json=chat()).status_code == 200
    assert send(of, "POST", "/pause", host=NETWORK).json()["error"]["code"] == "keys_unknown"


def test_before_the_keys_are_known_a_router_is_not_ready_and_refuses_for_a_moment() -> None:
    of = House(FakeBoards.answering("a"))
    of.use_keys(KeyRing(open_keys(of.config), table=None))
    for headers in ({}, {"authorization": "Bearer infer"}):
        answer = send(of, "POST", CHAT, json=chat(), headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "keys_unknown")
        assert answer.headers["retry-after"] == "3"
    assert send(of, "GET", "/ready").status_code == 503
    assert send(of, "GET", "/health").status_code == 200
    of.service.keys.take(KeyTable())
    assert send(of, "GET", "/ready").status_code == 200
    assert send(of, "POST", CHAT, json=chat()).status_code == 200


# -- streams without an end -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/v1/logs?follow=true", "/v1/boards/a/logs?follow=true", "/v1/cluster/events"]
)
@pytest.mark.parametrize("end", ["revoked", "expired", "rotated", "this machine's"])
def test_a_stream_ends_with_its_key(path: str, end: str) -> None:
    now_s = [1000.0]
    digest, other = (digest_of(one).hex() for one in (b"secret", b"other"))
    expires_s = 1060.0 if end == "expired" else None
    key = ApiKey("key_1", "ops", digest, "", (KeyScope.OPERATE,), expires_s=expires_s)
    local = end == "this machine's"
    boards = FakeBoards.answering("a")
    boards.says["replica of a", "logs"] = LogRing().page
    of = House(boards, RouterConfig(ping_s=5.0), head=FakeHead(says={"logs": LogRing().page}))
    known = KeyTable() if local else KeyTable(1, (key,))
    of.use_keys(KeyRing(open_keys(of.config), table=known, now_s=lambda: now_s[0]))

    async def main() -> None:
        headers = {} if local else {"authorization": "Bearer secret"}
        stream = asyncio.create_task(of("GET", path, headers=headers))
        await asyncio.sleep(60.0)
        assert not stream.done()
        now_s[0] += 60.0
        if local:
            of.service.keys.take(KeyTable(1, (key,)))
        elif end != "expired":
            left = () if end == "revoked" else (replace(key, digest=other),)
            of.service.keys.take(KeyTable(2, left))
        await asyncio.sleep(of.config.ping_s + 2.0)
        assert stream.done()
        assert (await stream).status_code == 200
        assert of.feed.readers == 0

    run_loop(main())
