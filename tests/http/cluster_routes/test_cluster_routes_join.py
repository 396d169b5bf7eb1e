"""Joining and approval over HTTP, with the files of a head that `rkserve up` has started."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from rkserve.core.files import private_folder
from rkserve.http.app import make_app
from rkserve.router.membership import ClusterTerms, Membership, new_token, write_terms
from tests.support.boards.own_time import run_loop
from tests.support.http.router_house import MAX_ADAPTER_BYTES, MAX_MODEL_BYTES, house

ASKED = {"host": "rock", "ray": "2.60.0", "python": "3.11", "machine": "a" * 32}


class Head:
    """A head with approval, its Router, and a valid token."""

    def __init__(self, folder: Path) -> None:
        private_folder(folder)
        (folder / "cluster_token").write_text("secret")
        file = str(folder / "cluster_token")
        terms = ClusterTerms("192.0.2.1:6379", "2.60.0", "3.11", file, {}, approval=True)
        write_terms(folder, terms)
        self.token = new_token(folder, 60, time.time())
        self.house = house()
        self.house.app = make_app(
            self.house.service,
            MAX_ADAPTER_BYTES,
            MAX_MODEL_BYTES,
            self.house.responses,
            membership=Membership(folder),
        )

    def __call__(self, method: str, path: str, **rest: Any) -> httpx.Response:
        response: httpx.Response = run_loop(self.house(method, path, **rest))
        return response

    def join(self, **body: Any) -> httpx.Response:
        """Ask as a board of another machine."""
        headers = {"authorization": f"Bearer {self.token}"}
        board = {"host": "203.0.113.9", "headers": headers, "json": {**ASKED, **body}}
        return self("POST", "/v1/join", **board)


@pytest.fixture
def head(tmp_path: Path) -> Head:
    return Head(tmp_path / "node")


def test_a_board_waits_with_202_and_joins_once_it_is_approved(head: Head) -> None:
    first = head.join()
    assert (first.status_code, first.headers["retry-after"]) == (202, "5")
    assert first.json()["command"] == "rkserve approve rock"
    assert "secret" not in first.text
    listed = head("GET", "/v1/members").json()
    assert (listed["approval"], listed["data"][0]["state"]) == (True, "waiting")
    done = head("POST", "/v1/members/approve", json={"boards": ["rock"]})
    assert [one["state"] for one in done.json()["data"]] == ["joined"]
    second = head.join()
    assert (second.status_code, second.json()["cluster_token"]) == (200, "secret")
    assert "retry-after" not in second.headers


def test_all_that_wait_are_approved_and_a_denied_board_is_refused(head: Head) -> None:
    head.join()
    head("POST", "/v1/members/deny", json={"boards": ["rock"]})
    denied = head.join()
    assert (denied.status_code, denied.json()["error"]["code"]) == (403, "join_denied")
    head.join(host="pi", machine="b" * 32)
    done = head("POST", "/v1/members/approve", json={"all": True})
    assert [one["host"] for one in done.json()["data"]] == ["pi"]
    states = {one["host"]: one["state"] for one in head("GET", "/v1/members").json()["data"]}
    assert states == {"rock": "denied", "pi": "joined"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        pytest.param("approve", {"boards": ["pi"]}, 404, "boards", id="an unknown board"),
        pytest.param("deny", {"boards": ["pi"]}, 404, "boards", id="an unknown board to deny"),
        pytest.param("approve", {}, 400, "boards", id="no board"),
        pytest.param("deny", {"boards": []}, 400, "boards", id="an empty list"),
        pytest.param("deny", {"all": True}, 400, "all", id="all cannot be denied"),
    ],
)
def test_a_mistake_is_an_error_object(
    head: Head, path: str, body: dict[str, Any], status: int, param: str
) -> None:
    head.join()
    answer = head("POST", f"/v1/members/{path}", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", ""), ("POST", "/approve"), ("POST", "/deny")],
)
def test_only_the_operator_sees_and_decides(head: Head, method: str, path: str) -> None:
    answer = head(method, f"/v1/members{path}", host="203.0.113.9")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")


def test_a_head_without_rkserve_up_has_no_members() -> None:
    answer = run_loop(house()("GET", "/v1/members"))
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "join_refused")
