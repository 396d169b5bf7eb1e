"""The calls that create, list, rotate and revoke keys, at a Router with a real Coordinator."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from rkserve.config.router import RouterConfig
from rkserve.core.api_keys import PREFIX
from rkserve.core.errors import CoordinatorAway
from tests.support.boards.fake_boards import FakeBoards
from tests.support.cluster.fake_cluster import Control
from tests.support.http.coordinator_house import Ask, with_both
from tests.support.http.router_house import CHAT, House, chat, send

KEYS = "/v1/keys"


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


def run(folder: Path, work: Callable[[Ask, Control], Awaitable[None]]) -> None:
    with_both(folder, work)


def test_a_key_is_created_listed_rotated_and_revoked(tmp_path: Path) -> None:
    async def work(ask: Ask, control: Control) -> None:
        body = {"name": "team", "scopes": ["admin"], "concurrent": 2}
        answer = await ask("POST", KEYS, json=body)
        assert answer.headers["cache-control"] == "no-store"
        made = answer.json()
        secret = made["value"]
        assert secret.startswith(PREFIX)
        assert made["applied"]
        assert made["limits"]["concurrent"] == 2
        assert made["expires_at"] is None
        # An admin key has been made: from now on this machine needs one, too.
        assert (await ask("GET", KEYS)).status_code == 403
        listed = await ask("GET", KEYS, headers=bearer(secret))
        (row,) = listed.json()["data"]
        assert {**row, "value": secret, "applied": True, "routers_behind": 0} == made
        assert secret not in listed.text

        rotated = await ask("POST", f"{KEYS}/{made['id']}/rotate", headers=bearer(secret))
        other = rotated.json()["value"]
        assert (rotated.json()["id"], other != secret) == (made["id"], True)
        assert (await ask("GET", KEYS, headers=bearer(secret))).status_code == 401
        gone = await ask("DELETE", f"{KEYS}/{made['id']}", headers=bearer(other))
        assert gone.json() == {
            "id": made["id"],
            "object": "api_key.deleted",
            "deleted": True,
            "applied": True,
            "routers_behind": 0,
        }
        # Where no key may operate this machine does so, but it generates nothing without a key.
        assert (await ask("GET", KEYS)).status_code == 200
        assert (await ask("POST", CHAT, json=chat(), headers=bearer(other))).status_code == 401
        lines = control.ledger.audit()[::-1]
        assert [one.kind for one in lines] == ["key_create", "key_rotate", "key_revoke"]
        assert lines[1].who == f"team ({made['id']}) 127.0.0.1"
        text = json.dumps([dict(one.params) for one in lines])
        assert not any(each in text for each in (secret, other))

    run(tmp_path, work)


def test_a_repeat_is_answered_without_the_secret(tmp_path: Path) -> None:
    async def work(ask: Ask, _control: Control) -> None:
        key = {"idempotency-key": "once"}
        first = await ask("POST", KEYS, json={"name": "team"}, headers=key)
        again = await ask("POST", KEYS, json={"name": "team"}, headers=key)
        assert again.status_code == 200
        assert again.json() == {**first.json(), "value": None, "applied": False}
        other = await ask("POST", KEYS, json={"name": "other"}, headers=key)
        assert (other.status_code, other.json()["error"]["param"]) == (400, "Idempotency-Key")

    run(tmp_path, work)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        pytest.param("POST", KEYS, {}, 400, None, id="no name"),
        pytest.param("POST", KEYS, {"name": "a b\n"}, 400, None, id="a name of two lines"),
        pytest.param("POST", KEYS, {"name": "a", "scopes": []}, 400, None, id="no scope"),
        pytest.param("POST", KEYS, {"name": "a", "scopes": ["x"]}, 400, None, id="unknown scope"),
        pytest.param("POST", KEYS, {"name": "a", "secret": "x"}, 400, None, id="an own secret"),
        pytest.param("POST", KEYS, {"name": "a", "expires_in_s": 0}, 400, None, id="expired"),
        pytest.param("POST", KEYS, {"name": "team"}, 409, "key_exists", id="a name that is taken"),
        pytest.param(
            *("POST", f"{KEYS}/key_9/rotate", None, 404, "key_not_found"), id="rotate unknown"
        ),
        pytest.param("DELETE", f"{KEYS}/key_9", None, 404, "key_not_found", id="revoke unknown"),
    ],
)
def test_a_wrong_call_is_refused_with_an_error_object(  # noqa: PLR0917 - a table of calls
    tmp_path: Path, method: str, path: str, body: Any, status: int, code: str | None
) -> None:
    async def work(ask: Ask, _control: Control) -> None:
        await ask("POST", KEYS, json={"name": "team"})
        answer: httpx.Response = await ask(method, path, json=body)
        assert answer.status_code == status
        assert answer.json()["error"]["code"] == code

    run(tmp_path, work)


def test_a_name_of_the_file_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("tiger name=team\n")
    of = House(FakeBoards.answering("a"), RouterConfig(api_keys_file=file))
    assert send(of, "POST", KEYS, json={"name": "team"}).status_code == 409
    assert send(of, "POST", KEYS, json={"name": "other"}).status_code == 200


def test_without_the_coordinator_nothing_changes_and_known_keys_work() -> None:
    of = House(FakeBoards.answering("a"), RouterConfig(admin_key=SecretStr("boss")))
    made = send(of, "POST", KEYS, json={"name": "team"}, headers=bearer("boss")).json()
    of.head.says["change_key"] = CoordinatorAway("It is away.")
    of.head.says["api_keys"] = CoordinatorAway("It is away.")
    gone = send(of, "DELETE", f"{KEYS}/{made['id']}", headers=bearer("boss"))
    assert (gone.status_code, gone.json()["error"]["code"]) == (503, "coordinator_unavailable")
    answer = send(of, "POST", CHAT, json=chat(), headers=bearer(made["value"]))
    assert answer.status_code == 200


def test_a_key_is_for_its_models_alone() -> None:
    of = House(FakeBoards.answering("a"), RouterConfig(admin_key=SecretStr("boss")))

    def key(name: str, model: str) -> dict[str, str]:
        body = {"name": name, "models": [model]}
        return bearer(send(of, "POST", KEYS, json=body, headers=bearer("boss")).json()["value"])

    own, foreign = key("own", "sim-chat"), key("foreign", "another")
    text = {"model": "sim-chat", "prompt": "Hello"}
    calls = [("POST", CHAT, chat()), ("POST", "/v1/tokenize", text), ("POST", "/tokenize", text)]
    for method, path, body in calls:
        assert send(of, method, path, json=body, headers=own).status_code == 200
        refused = send(of, method, path, json=body, headers=foreign)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "model_not_allowed")
    for path in ("/v1/models/sim-chat", "/tokenizer_info"):
        assert send(of, "GET", path, headers=own).status_code == 200
        assert send(of, "GET", path, headers=foreign).status_code == 403
    listed = [send(of, "GET", "/v1/models", headers=one).json()["data"] for one in (own, foreign)]
    assert [len(rows) for rows in listed] == [len(listed[0]), 0]
    assert listed[0]


def test_limits_of_a_key_are_those_of_its_creation() -> None:
    of = House(FakeBoards.answering("a"), RouterConfig(admin_key=SecretStr("boss")))
    body = {"name": "team", "requests_per_minute": 1}
    secret = send(of, "POST", KEYS, json=body, headers=bearer("boss")).json()["value"]
    found = [send(of, "POST", CHAT, json=chat(), headers=bearer(secret)) for _ in range(2)]
    assert [one.status_code for one in found] == [200, 429]
    assert of.metric("rkserve_key_requests_total", key="team") == 1
