"""Keys by both clients, and the key that a client sends where its program names none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rkserve.client import Client, Conflict
from rkserve.client.keys import keys_file, own_key
from tests.support.cluster.control_clients import Use, both
from tests.support.cluster.fake_control import FakeControl, error, ok

URL = "http://head:8000"


@both
@pytest.mark.parametrize(
    ("use", "route", "body"),
    [
        pytest.param(
            lambda c: c.create_key("a", ["infer"], models="m", limits={"concurrent": 2}),
            "POST /v1/keys",
            {"name": "a", "scopes": ["infer"], "models": ["m"], "concurrent": 2},
            id="create",
        ),
        pytest.param(
            lambda c: c.rotate_key("key_1", 60.0),
            "POST /v1/keys/key_1/rotate",
            {"grace_s": 60.0},
            id="rotate",
        ),
        pytest.param(lambda c: c.revoke_key("key_1"), "DELETE /v1/keys/key_1", None, id="revoke"),
    ],
)
def test_a_change_is_sent_once_more_after_a_lost_connection_with_the_same_key(
    server: FakeControl, run: Callable[[FakeControl, Use], Any], use: Use, route: str, body: object
) -> None:
    server.on(route, httpx.ReadError("gone"), ok({"id": "key_1"}))
    assert run(server, use) == {"id": "key_1"}
    assert server.routes == [route] * 2
    assert len({request.headers["idempotency-key"] for request in server.asked}) == 1
    assert (json.loads(server.bodies[-1]) if body else server.bodies[-1]) == (body or b"")


@both
def test_keys_are_listed_and_a_name_that_is_taken_is_a_conflict(
    server: FakeControl, run: Callable[[FakeControl, Use], Any]
) -> None:
    server.on("GET /v1/keys", ok({"data": [{"id": "key_1"}]}))
    server.on("POST /v1/keys", error(409, "key_exists"))
    assert run(server, lambda c: c.api_keys()) == [{"id": "key_1"}]
    with pytest.raises(Conflict):
        run(server, lambda c: c.create_key("a"))


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with keys for two clusters."""
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    file = keys_file(environ)
    file.parent.mkdir()
    file.write_text(f"# mine\n\n{URL}/v1 rks-one\nhttp://other:8000/ rks-two\nhttp://third:8000\n")
    file.chmod(0o600)
    return environ


@pytest.mark.parametrize(
    ("url", "key"),
    [
        (URL, "rks-one"),
        ("http://other:8000", "rks-two"),
        ("http://third:8000", None),
        ("http://head:8001", None),
        ("https://head:8000", None),
    ],
)
def test_a_key_of_the_users_file_is_sent_to_its_cluster_alone(
    home: dict[str, str], url: str, key: str | None
) -> None:
    assert own_key(url, home) == key


def test_the_environment_goes_before_the_file(home: dict[str, str]) -> None:
    assert own_key(URL, {**home, "RKSERVE_API_KEY": "rks-three"}) == "rks-three"
    both_ = {**home, "RKSERVE_API_KEY": "rks-three", "RKSERVE_ADMIN_KEY": " rks-four\n"}
    assert own_key(URL, both_) == "rks-four"
    assert own_key(URL, {"XDG_CONFIG_HOME": "/nowhere"}) is None


def test_a_file_that_others_may_read_is_refused(home: dict[str, str]) -> None:
    keys_file(home).chmod(0o640)
    with pytest.raises(ValueError, match="chmod 600"):
        own_key(URL, home)


def test_a_client_without_a_key_sends_the_users(
    home: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RKSERVE_ADMIN_KEY", raising=False)
    monkeypatch.delenv("RKSERVE_API_KEY", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", home["XDG_CONFIG_HOME"])
    sent: list[str | None] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.headers.get("authorization"))
        return ok({"data": []})

    for given in (None, "rks-given"):
        with Client(URL, admin_key=given, transport=httpx.MockTransport(answer)) as client:
            client.api_keys()
    assert sent == ["Bearer rks-one", "Bearer rks-given"]
