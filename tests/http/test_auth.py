"""Requests by web pages: DNS rebinding, other origins, and bodies that are not JSON."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import httpx
import pytest
from pydantic import ValidationError
from starlette.types import Message

from rkserve.config.router import RouterConfig
from rkserve.core.errors import HostNotAllowed, RequestError
from rkserve.http.auth import HostAllowList
from tests.support.boards.own_time import run_loop
from tests.support.http.router_house import CHAT, House, chat, house, send

pytestmark = pytest.mark.virtual_time

MACHINES = ("Rock5b.fritz.box", "board-2")


def allowed(host: str, *configured: str) -> bool:
    """Return whether a Host header passes on machines of those names."""
    hosts = HostAllowList(configured, lambda: MACHINES)
    try:
        run_loop(hosts.check(host))
    except HostNotAllowed:
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "localhost.:8000",
        "app.localhost:8000",
        "127.0.0.1:8000",
        "192.168.1.20:8000",
        "[::1]:8000",
        "[fe80::1]",
        "rock5b:8000",
        "rock5b.fritz.box:8000",
        "rock5b.local:8000",
        "board-2.lan",
    ],
)
def test_addresses_and_the_machines_own_names_are_allowed(host: str) -> None:
    assert allowed(host)


@pytest.mark.parametrize(
    ("host", "configured", "passes"),
    [
        pytest.param("evil.com", (), False, id="another name"),
        pytest.param("127.0.0.1.evil.com", (), False, id="a name that begins like an address"),
        pytest.param("localhost.evil.com", (), False, id="a name that begins like localhost"),
        pytest.param("evil-rock5b.local", (), False, id="a name that ends like the machine's"),
        pytest.param("rock5b.com", (), False, id="the machine's name in a public domain"),
        pytest.param("0x7f.1", (), False, id="an odd spelling of an address"),
        pytest.param("llm.example.org:443", ("llm.example.org",), True, id="a configured one"),
        pytest.param("example.org", ("llm.example.org",), False, id="its parent"),
        pytest.param("a.b.example.org", ("*.example.org",), True, id="below a pattern"),
        pytest.param("badexample.org", ("*.example.org",), False, id="beside a pattern"),
        pytest.param("evil.com", ("*",), True, id="all"),
    ],
)
def test_other_names_must_be_configured(
    host: str, configured: tuple[str, ...], passes: bool
) -> None:
    assert allowed(host, *configured) is passes


@pytest.mark.parametrize(
    "host", ["x/public?", "a b", "", "u@localhost", "[::1", "a:b", "localhost:1:2"]
)
def test_a_malformed_host_is_refused_even_where_all_are_allowed(host: str) -> None:
    with pytest.raises(RequestError, match="malformed"):
        allowed(host, "*")


async def test_machines_that_join_are_found_without_a_lookup_for_each_request() -> None:
    asked = 0

    def names() -> Iterable[str]:
        nonlocal asked
        asked += 1
        return MACHINES

    hosts = HostAllowList((), names)
    for _ in range(3):
        await hosts.check("board-2:8000")
        with pytest.raises(HostNotAllowed):
            await hosts.check("evil.com")
    assert asked == 1


@pytest.mark.parametrize(
    ("method", "path"), [("POST", CHAT), ("GET", "/v1/audit"), ("GET", "/"), ("GET", "/metrics")]
)
def test_a_rebound_name_reaches_no_route_and_the_error_names_the_setting(
    method: str, path: str
) -> None:
    of = house()
    refused = send(of, method, path, headers={"host": "evil.com:8000"}, json=chat())
    assert refused.status_code == 421
    assert refused.json()["error"]["code"] == "host_not_allowed"
    assert "router.allowed_hosts" in refused.json()["error"]["message"]
    assert not of.boards.opened
    assert of.metric("rkserve_requests_total", route="unknown", status="421") == 1


def test_errors_have_the_dialect_of_the_route() -> None:
    refused = send(house(), "POST", "/v1/messages", headers={"host": "evil.com"}, json={})
    assert refused.status_code == 421
    assert refused.json()["type"] == "error"


def test_two_host_headers_are_refused() -> None:
    headers = httpx.Headers([("host", "localhost"), ("host", "evil.com")])
    assert send(house(), "GET", "/health", headers=headers).status_code == 400


PAGES = [
    pytest.param({"origin": "http://evil.com"}, 403, id="another origin"),
    pytest.param({"origin": "http://localhost:3000"}, 403, id="another port of this machine"),
    pytest.param({"origin": "null"}, 403, id="a sandboxed page"),
    pytest.param({"sec-fetch-site": "cross-site"}, 403, id="another site"),
    pytest.param(
        {"sec-fetch-site": "same-site", "origin": "http://a.localhost"}, 403, id="the same site"
    ),
    pytest.param({"origin": "http://localhost"}, 200, id="the page itself"),
    pytest.param({"origin": "http://localhost:80"}, 200, id="the page itself, with its port"),
    pytest.param(
        {"sec-fetch-site": "same-origin", "origin": "https://outside"}, 200, id="behind a proxy"
    ),
    pytest.param({"sec-fetch-site": "none"}, 200, id="typed by the user"),
    pytest.param({"sec-fetch-mode": "cors"}, 200, id="Node's fetch"),
]


@pytest.mark.parametrize(("headers", "status"), PAGES)
def test_pages_of_other_origins_are_refused(headers: dict[str, str], status: int) -> None:
    of = house()
    answer = send(of, "POST", CHAT, json=chat(), headers=headers)
    assert answer.status_code == status
    assert "access-control-allow-origin" not in answer.headers
    assert len(of.boards.opened) == (status == 200)
    if status == 403:
        assert answer.json()["error"]["code"] == "origin_not_allowed"
        assert "router.allowed_origins" in answer.json()["error"]["message"]


def test_a_link_of_another_site_may_lead_to_the_page_and_to_nothing_that_acts() -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    frame = {**link, "sec-fetch-dest": "iframe"}
    of = house()
    assert send(of, "GET", "/", headers=link).status_code == 200
    assert send(of, "GET", "/", headers=frame).status_code == 403
    assert send(of, "GET", "/v1/models", headers=link).status_code == 403
    assert send(of, "POST", "/pause", headers=link).status_code == 403


def test_a_configured_origin_gets_cors_headers_and_others_none() -> None:
    of = house()
    of = House(of.boards, RouterConfig(allowed_origins=("https://Chat.example.org",)))
    ours = {"origin": "https://chat.example.org", "sec-fetch-site": "cross-site"}
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    for body in (chat(), chat(stream=True)):
        answer = send(of, "POST", CHAT, json=body, headers=ours)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == ours["origin"]
    preflight = send(of, "OPTIONS", CHAT, headers={**ours, **asks})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ours["origin"]
    other = send(of, "OPTIONS", CHAT, headers={"origin": "https://evil.com", **asks})
    assert other.status_code == 403
    assert "access-control-allow-origin" not in other.headers


def test_a_websocket_of_another_host_is_closed_before_it_is_open() -> None:
    async def main() -> list[Message]:
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "websocket.connect"}

        async def send(message: Message) -> None:
            sent.append(message)

        headers = [(b"host", b"evil.com")]
        scope = {"type": "websocket", "path": "/", "headers": headers, "http_version": "1.1"}
        await house().app(scope, receive, send)
        return sent

    (closed,) = run_loop(main())
    assert closed["type"] == "websocket.close"
    assert closed["reason"] == "host_not_allowed"


BODY = b'{"model": "sim-chat", "messages": [{"role": "user", "content": "Hello"}]}'
FORM = "application/x-www-form-urlencoded"
BYTES = "application/octet-stream"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({"content-type": "application/json"}, 200, id="JSON"),
        pytest.param({"content-type": "Application/JSON; charset=utf-8"}, 200, id="with charset"),
        pytest.param({"content-type": "application/vnd.api+json"}, 200, id="a kind of JSON"),
        pytest.param({}, 200, id="no type, as Ollama's examples"),
        pytest.param({"content-type": FORM}, 200, id="curl -d"),
        pytest.param({"content-type": FORM, "referer": "http://a"}, 415, id="a browser's form"),
        pytest.param({"content-type": BYTES}, 200, id="aiohttp with bytes"),
        pytest.param(
            {"content-type": BYTES, "sec-fetch-site": "same-origin"}, 415, id="a browser's bytes"
        ),
        pytest.param({"origin": "http://localhost"}, 415, id="a browser without a type"),
        pytest.param({"content-type": "text/plain"}, 415, id="text"),
        pytest.param({"content-type": "text/plain;charset=UTF-8"}, 415, id="text with charset"),
        pytest.param({"content-type": "multipart/form-data; boundary=x"}, 415, id="a form"),
        pytest.param({"content-type": "application/jsonp"}, 415, id="almost JSON"),
        pytest.param({"content-encoding": "gzip"}, 415, id="compressed"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/tokenize", "/api/show", "/v1/messages"])
def test_bodies_are_json_by_their_headers(path: str, headers: dict[str, str], status: int) -> None:
    body: Any = BODY
    if path == "/v1/messages":
        body = BODY.replace(b"{", b'{"max_tokens": 3, ', 1)
    answer = send(house(), "POST", path, content=body, headers=headers)
    assert answer.status_code == status, answer.text
    if status == 415 and path == CHAT:
        assert answer.json()["error"]["code"] == "unsupported_media_type"


@pytest.mark.parametrize(
    "wrong",
    [
        {"allowed_hosts": ["http://a.org"]},
        {"allowed_hosts": ["a.org:8000"]},
        {"allowed_hosts": [""]},
        {"allowed_origins": ["a.org"]},
        {"allowed_origins": ["https://a.org/page"]},
    ],
)
def test_settings_that_cannot_match_are_refused(wrong: dict[str, list[str]]) -> None:
    with pytest.raises(ValidationError):
        RouterConfig.model_validate(wrong)
