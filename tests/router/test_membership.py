"""Join tokens, versions, and the boards that have joined."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from rkserve.api.admin.join import JoinBody
from rkserve.api.json.schemas import read_model
from rkserve.core.errors import Forbidden, JoinRefused, RateLimited
from rkserve.core.files import private_folder
from rkserve.router.membership import (
    FOLDER,
    MOST_TOKENS,
    REFUSALS,
    ClusterTerms,
    MemberBoard,
    Membership,
    new_token,
    notes_on,
    write_terms,
)

A, B = "a" * 32, "b" * 32
ASKED = {"host": "rock", "ray": "2.60.0", "python": "3.11"}


class Clock:
    """Seconds that a test moves."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


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


def test_a_token_admits_until_it_expires(head: Path, clock: Clock) -> None:
    token = new_token(head, 60, clock.now_s).encode()
    membership = Membership(head, clock)
    answer = membership.admit(membership.check(token), body())
    assert answer == {
        "ray_address": "192.0.2.1:6379",
        "ray_version": "2.60.0",
        "cluster_token": "the cluster's",
        "environ": {"RAY_AUTH_MODE": "x"},
        "notes": [],
    }
    clock.now_s += 61
    with pytest.raises(Forbidden, match="unknown or has expired"):
        membership.check(token)


@pytest.mark.parametrize("token", [b"", b"wrong", "é".encode("latin-1"), b"x" * 10_000])
def test_without_a_token_there_is_no_answer(head: Path, clock: Clock, token: bytes) -> None:
    new_token(head, 60, clock.now_s)
    with pytest.raises(Forbidden):
        Membership(head, clock).check(token)


def test_no_file_holds_a_join_token(head: Path, clock: Clock) -> None:
    token = new_token(head, 60, clock.now_s)
    for file in head.iterdir():
        assert token not in file.read_text()
        assert file.stat().st_mode & 0o077 == 0 or file.name == "cluster_token"


def test_refused_tokens_are_limited_and_valid_ones_wait_too(head: Path, clock: Clock) -> None:
    token = new_token(head, 600, clock.now_s).encode()
    membership = Membership(head, clock)
    for _ in range(REFUSALS):
        with pytest.raises(Forbidden):
            membership.check(b"guess")
    with pytest.raises(RateLimited) as caught:
        membership.check(token)
    assert caught.value.retry_after_s == 60
    clock.now_s += 60
    assert membership.check(token) == head


def test_old_tokens_go(head: Path, clock: Clock) -> None:
    tokens = [new_token(head, 60, clock.now_s).encode() for _ in range(MOST_TOKENS + 1)]
    membership = Membership(head, clock)
    assert membership.check(tokens[-1]) == head
    assert membership.check(tokens[1]) == head
    with pytest.raises(Forbidden):
        membership.check(tokens[0])


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
    head: Path, clock: Clock, changes: dict[str, str], sentence: str
) -> None:
    with pytest.raises(JoinRefused) as caught:
        Membership(head, clock).admit(head, body(**changes))
    assert sentence in caught.value.message
    assert not (head / "boards.json").exists()


def test_a_head_that_takes_no_boards_says_so(tmp_path: Path) -> None:
    for membership in (Membership.of({}), Membership.of({FOLDER: str(tmp_path)})):
        with pytest.raises(JoinRefused, match="was not started by `rkserve up`"):
            membership.check(b"x")


@pytest.mark.parametrize("file", ["cluster.json", "boards.json"])
def test_damaged_files_are_named(head: Path, clock: Clock, file: str) -> None:
    (head / file).write_text("{")
    with pytest.raises(JoinRefused, match=rf"{file} is damaged"):
        Membership(head, clock).admit(head, body())


@pytest.mark.parametrize(
    ("board", "other", "note"),
    [
        pytest.param(
            MemberBoard("two", A, B), MemberBoard("one", A, A), "its card is a copy", id="a copy"
        ),
        pytest.param(
            MemberBoard("two", A, A), MemberBoard("one", A, A), "joined as one; it is", id="renamed"
        ),
        pytest.param(
            MemberBoard("two", A), MemberBoard("one", A), "joined as one; it is", id="no serial"
        ),
        pytest.param(
            MemberBoard("one", B, A), MemberBoard("one", A, A), "another system", id="a new card"
        ),
        pytest.param(
            MemberBoard("one", B, B), MemberBoard("one", A, A), "as one, too", id="one name for two"
        ),
        pytest.param(MemberBoard("one", A, A), MemberBoard("one", A, A), "", id="itself"),
        pytest.param(MemberBoard("two", B, B), MemberBoard("one", A, A), "", id="another board"),
        pytest.param(MemberBoard("one"), MemberBoard("two"), "", id="nothing known"),
    ],
)
def test_boards_are_told_apart(board: MemberBoard, other: MemberBoard, note: str) -> None:
    found = [*notes_on(board, [other])]
    assert len(found) == bool(note)
    assert note in "".join(found)


def test_a_board_that_joins_again_replaces_its_entry(head: Path, clock: Clock) -> None:
    membership = Membership(head, clock)
    membership.admit(head, body(machine=A, serial=A))
    clock.now_s += 5
    answer = membership.admit(head, body(host="new", machine=A, serial=A))
    assert ["joined as rock" in note for note in answer["notes"]] == [True]
    membership.admit(head, body(host="other", machine=B, serial=B))
    found = json.loads((head / "boards.json").read_text())
    assert found == [
        asdict(MemberBoard("new", A, A, 1005.0)),
        asdict(MemberBoard("other", B, B, 1005.0)),
    ]
