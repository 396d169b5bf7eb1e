"""Join tokens, versions, and approval."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rkserve import __version__
from rkserve.api.admin.heartbeat import HeartbeatBody
from rkserve.api.admin.join import JoinAnswer, JoinBody, JoinWaiting, MemberState
from rkserve.api.json.schemas import read_model
from rkserve.core.errors import Forbidden, JoinDenied, JoinRefused, RateLimited, RouteNotFound
from rkserve.core.files import private_folder
from rkserve.router.fleet_update import (
    FleetUpdate,
    WheelFile,
    member_secret,
    read_news,
    write_update,
)
from rkserve.router.members import WAITING_S
from rkserve.router.membership import (
    FOLDER,
    MOST_TOKENS,
    REFUSALS,
    ClusterTerms,
    Membership,
    new_token,
    read_terms,
    write_terms,
)
from tests.support.boards.own_time import SetClock

A, B = "a" * 32, "b" * 32
TOKEN = b"a join token"
ASKED = {"host": "rock", "ray": "2.60.0", "python": "3.11"}


@pytest.fixture
def clock() -> SetClock:
    return SetClock(1000.0)


@pytest.fixture
def head(tmp_path: Path) -> Path:
    folder = tmp_path / "node"
    private_folder(folder)
    (folder / "cluster_token").write_text("the cluster's\n")
    terms = ClusterTerms(
        "192.0.2.1:6379", "2.60.0", "3.11", str(folder / "cluster_token"), {"RAY_AUTH_MODE": "x"}
    )
    write_terms(folder, terms)
    return folder


def body(**changes: str) -> JoinBody:
    return read_model(JoinBody, {**ASKED, **changes})


def test_a_token_admits_until_it_expires(head: Path, clock: SetClock) -> None:
    token = new_token(head, 60, clock.now_s).encode()
    membership = Membership(head, clock)
    answer = membership.admit(membership.check(token, body()), token, body())
    assert answer == {
        "ray_address": "192.0.2.1:6379",
        "ray_version": "2.60.0",
        "cluster_token": "the cluster's",
        "environ": {"RAY_AUTH_MODE": "x"},
        "notes": [],
        "version": __version__,
    }
    clock.now_s += 61
    with pytest.raises(Forbidden, match="unknown or has expired"):
        membership.check(token, body())


@pytest.mark.parametrize("token", [b"", b"wrong", "é".encode("latin-1"), b"x" * 10_000])
def test_without_a_token_there_is_no_answer(head: Path, clock: SetClock, token: bytes) -> None:
    new_token(head, 60, clock.now_s)
    with pytest.raises(Forbidden):
        Membership(head, clock).check(token, body())


def test_no_file_holds_a_join_token(head: Path, clock: SetClock) -> None:
    token = new_token(head, 60, clock.now_s)
    for file in head.iterdir():
        assert token not in file.read_text()
        assert file.stat().st_mode & 0o077 == 0 or file.name == "cluster_token"


def test_refused_tokens_are_limited_and_valid_ones_wait_too(head: Path, clock: SetClock) -> None:
    token = new_token(head, 600, clock.now_s).encode()
    membership = Membership(head, clock)
    for _ in range(REFUSALS):
        with pytest.raises(Forbidden):
            membership.check(b"guess", body())
    with pytest.raises(RateLimited) as caught:
        membership.check(token, body())
    assert caught.value.retry_after_s == 60
    clock.now_s += 60
    assert membership.check(token, body()) == head


def test_old_tokens_go(head: Path, clock: SetClock) -> None:
    tokens = [new_token(head, 60, clock.now_s).encode() for _ in range(MOST_TOKENS + 1)]
    membership = Membership(head, clock)
    assert membership.check(tokens[-1], body()) == head
    assert membership.check(tokens[1], body()) == head
    with pytest.raises(Forbidden):
        membership.check(tokens[0], body())


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param(
            {"ray": "2.59.1"},
            "Ray is 2.59.1 on rock and 2.60.0 on the head; a node joins only with the same. "
            "On the board: pip install 'ray[serve]==2.60.0'",
            id="ray",
        ),
        pytest.param(
            {"python": "3.12"}, "Python is 3.12 on rock and 3.11 on the head", id="python"
        ),
    ],
)
def test_other_versions_are_one_sentence(
    head: Path, clock: SetClock, changes: dict[str, str], sentence: str
) -> None:
    with pytest.raises(JoinRefused) as caught:
        Membership(head, clock).admit(head, TOKEN, body(**changes))
    assert sentence in caught.value.message
    assert not (head / "boards.json").exists()


def test_a_head_that_takes_no_boards_says_so(tmp_path: Path) -> None:
    for membership in (Membership.of({}), Membership.of({FOLDER: str(tmp_path)})):
        with pytest.raises(JoinRefused, match="was not started by `rkserve up`"):
            membership.check(b"x", body())


@pytest.mark.parametrize("file", ["cluster.json", "boards.json"])
def test_damaged_files_are_named(head: Path, clock: SetClock, file: str) -> None:
    (head / file).write_text("{")
    with pytest.raises(JoinRefused, match=rf"{file} is damaged"):
        Membership(head, clock).admit(head, TOKEN, body())


def test_a_board_that_joins_again_replaces_its_entry(head: Path, clock: SetClock) -> None:
    membership = Membership(head, clock)
    membership.admit(head, TOKEN, body(machine=A, serial=A))
    clock.now_s += 5
    answer = membership.admit(head, TOKEN, body(host="new", machine=A, serial=A))
    assert ["joined as rock" in note for note in answer["notes"]] == [True]
    membership.admit(head, TOKEN, body(host="other", machine=B, serial=B))
    found = [(one["host"], one["since_s"]) for one in membership.listed()["data"]]
    assert found == [("new", 1000.0), ("other", 1005.0)]


@pytest.fixture
def careful(head: Path) -> Path:
    """A head whose boards need approval."""
    terms = ClusterTerms(**json.loads((head / "cluster.json").read_text()))
    write_terms(head, replace(terms, approval=True))
    return head


def test_a_board_waits_until_it_is_approved_and_needs_no_second_approval(
    careful: Path, clock: SetClock
) -> None:
    token = new_token(careful, 60, clock.now_s).encode()
    asked = body(machine=A, serial=A)

    def ask() -> JoinAnswer | JoinWaiting:
        membership = Membership(careful, clock)  # another Router, or the head after a restart
        return membership.admit(membership.check(token, asked), token, asked)

    waiting = ask()
    (entry,) = Membership(careful, clock).listed()["data"]
    assert waiting == {
        "state": "waiting",
        "id": entry["id"],
        "command": "rkserve approve rock",
        "notes": [],
    }
    clock.now_s += 3600  # its token has expired, which no longer admits others
    assert ask() == waiting
    with pytest.raises(Forbidden):
        Membership(careful, clock).check(token, body(machine=B, serial=A))
    membership = Membership(careful, clock)
    assert membership.listed()["approval"] is True
    (done,) = membership.decide(["rock"], MemberState.JOINED, "local")["data"]
    assert done["state"] == "joined"
    answer = ask()
    assert "ray_address" in answer
    clock.now_s += 3600
    with pytest.raises(Forbidden):
        ask()
    token = new_token(careful, 60, clock.now_s).encode()
    assert "ray_address" in ask()


def test_a_board_that_waits_for_a_day_is_forgotten(careful: Path, clock: SetClock) -> None:
    membership = Membership(careful, clock)
    membership.admit(careful, TOKEN, body())
    clock.now_s += WAITING_S + 1
    assert membership.listed()["data"] == []
    with pytest.raises(Forbidden):
        membership.check(TOKEN, body())


def test_a_denied_board_is_refused_until_it_is_approved(head: Path, clock: SetClock) -> None:
    membership = Membership(head, clock)
    membership.admit(head, TOKEN, body(machine=A))
    membership.decide(["rock"], MemberState.DENIED, "local")
    with pytest.raises(JoinDenied, match=r"has denied rock\. `rkserve approve rock` on the head"):
        membership.admit(head, TOKEN, body(machine=A))
    membership.decide(["rock"], MemberState.JOINED, "local")
    assert "ray_address" in membership.admit(head, TOKEN, body(machine=A))


def test_a_copied_card_and_a_new_host_name_are_noted_while_a_board_waits(
    careful: Path, clock: SetClock
) -> None:
    membership = Membership(careful, clock)
    membership.admit(careful, TOKEN, body(machine=A, serial=A))
    waiting = membership.admit(careful, TOKEN, body(host="copy", machine=A, serial=B))
    assert "its card is a copy" in waiting["notes"][0]
    # In the list a note is on the board that came later.
    assert [len(one["notes"]) for one in membership.listed()["data"]] == [0, 1]
    membership.decide([], MemberState.JOINED, "local", everything=True)
    renamed = membership.admit(careful, TOKEN, body(host="new", machine=A, serial=A))
    assert any("joined as rock; it is called <group>@new" in note for note in renamed["notes"])
    listed = membership.listed()["data"]
    assert [(one["host"], one["state"]) for one in listed] == [
        ("copy", "joined"),
        ("new", "joined"),
    ]


@pytest.mark.parametrize(
    "text", ["{", "[{}]", '[{"host": "a", "state": "x"}]', '[{"state": "joined"}]']
)
def test_a_damaged_list_of_boards_is_named(head: Path, clock: SetClock, text: str) -> None:
    (head / "boards.json").write_text(text)
    membership = Membership(head, clock)
    with pytest.raises(JoinRefused, match=r"boards\.json is damaged"):
        membership.listed()
    with pytest.raises(JoinRefused, match=r"boards\.json is damaged"):
        membership.decide(["a"], MemberState.JOINED, "local")


# -- heartbeats -----------------------------------------------------------------------------------

SECRET = member_secret("the cluster's").encode()


def beat(**changes: object) -> HeartbeatBody:
    given = {"key": A, "host": "rock", "version": __version__, **changes}
    return read_model(HeartbeatBody, given)


def test_a_heartbeat_brings_news_and_gets_the_order(head: Path, clock: SetClock) -> None:
    membership = Membership(head, clock)
    order, terms = membership.beat(SECRET, beat(stage="installing", colour="blue"))
    assert (order, [*terms.measures]) == (None, [])
    (news,) = read_news(head)
    assert (news.host, news.stage, news.at_s) == ("rock", "installing", 1000.0)
    write_update(head, FleetUpdate("u1", "0.2.0", go=(A,)))
    order, _ = membership.beat(SECRET, beat())
    assert order is not None
    assert (order["update"], order["go"]) == ("u1", True)


@pytest.mark.parametrize("secret", [b"", b"the cluster's", b"x" * 64])
def test_a_heartbeat_of_another_cluster_is_refused(head: Path, secret: bytes) -> None:
    with pytest.raises(Forbidden, match="of another cluster"):
        Membership(head).beat(secret, beat())
    assert read_news(head) == []


def test_a_board_two_minor_versions_away_is_refused(head: Path, clock: SetClock) -> None:
    membership = Membership(head, clock)
    with pytest.raises(JoinRefused, match="at most one minor version apart"):
        membership.beat(SECRET, beat(version="0.9.0"))
    token = new_token(head, 60, clock.now_s).encode()
    far = body(version="0.9.0")
    folder = membership.check(token, far)
    with pytest.raises(JoinRefused, match="at most one minor version apart"):
        membership.admit(folder, token, far)
    membership.beat(SECRET, beat(version="0.2.0"))


def test_only_files_of_the_update_that_goes_on_are_sent(head: Path, tmp_path: Path) -> None:
    membership = Membership(head)
    files = (WheelFile("wheels/a.whl", "0" * 64, 1),)
    write_update(head, FleetUpdate("u1", "0.2.0", str(tmp_path), files))
    assert membership.wheel(SECRET, "0" * 64) == tmp_path / "wheels" / "a.whl"
    with pytest.raises(RouteNotFound):
        membership.wheel(SECRET, "1" * 64)
    with pytest.raises(Forbidden):
        membership.wheel(b"no secret", "0" * 64)
    write_update(head, FleetUpdate("u1", "0.2.0", str(tmp_path), files, ended=True))
    with pytest.raises(RouteNotFound):
        membership.wheel(SECRET, "0" * 64)


def test_the_heads_part_of_another_version_is_read(head: Path) -> None:
    path = head / "cluster.json"
    found = json.loads(path.read_text())
    del found["measures"]
    path.write_text(json.dumps({**found, "colour": "blue"}))
    assert read_terms(head).measures == ()
