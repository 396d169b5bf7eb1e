"""The boards that have joined, wait or are denied: identities, states, names and notes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rkserve.core.errors import JoinRefused, MemberNotFound, RequestError
from rkserve.core.files import private_folder
from rkserve.router import members
from rkserve.router.fleet_update import MemberNews, write_news
from rkserve.router.members import (
    APPROVED_S,
    DENIED,
    JOINED,
    WAITING,
    WAITING_S,
    MemberBoard,
    Members,
    next_state,
    notes_on,
    shortest_name,
)

A, B = "a" * 32, "b" * 32
ONE, TWO = MemberBoard("rock", A, A, 1.0), MemberBoard("rock", B, B, 2.0)


@pytest.fixture
def boards(tmp_path: Path) -> Members:
    private_folder(tmp_path / "node")
    return Members(tmp_path / "node")


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
        pytest.param(MemberBoard("one"), MemberBoard("one"), "", id="itself, without an identity"),
    ],
)
def test_boards_are_told_apart(board: MemberBoard, other: MemberBoard, note: str) -> None:
    found = [*notes_on(board, [other])]
    assert len(found) == bool(note)
    assert note in "".join(found)


@pytest.mark.parametrize(
    ("board", "earlier", "approval", "state"),
    [
        pytest.param(ONE, None, False, JOINED, id="no approval"),
        pytest.param(ONE, None, True, WAITING, id="new"),
        pytest.param(ONE, replace(ONE, state=WAITING), True, WAITING, id="waits"),
        pytest.param(ONE, replace(ONE, state=WAITING), False, JOINED, id="approval was turned off"),
        pytest.param(ONE, replace(ONE, state=JOINED), True, JOINED, id="approved"),
        pytest.param(ONE, replace(ONE, state=DENIED), False, DENIED, id="denied"),
        pytest.param(
            MemberBoard("rock", token="t"),
            MemberBoard("rock", state=JOINED, token="t"),
            True,
            JOINED,
            id="no identity, and the token of its approval",
        ),
        pytest.param(
            MemberBoard("rock", token="u"),
            MemberBoard("rock", state=JOINED, token="t"),
            True,
            WAITING,
            id="no identity, and another token",
        ),
    ],
)
def test_the_state_of_a_board_follows_from_its_earlier_one(
    board: MemberBoard, earlier: MemberBoard | None, approval: bool, state: str
) -> None:
    assert next_state(board, earlier, approval=approval) == state


def test_a_token_outlives_its_end_only_while_its_board_waits(boards: Members) -> None:
    assert boards.ask(ONE, approval=True).board.token_until_s == ONE.since_s + WAITING_S
    boards.decide(["rock"], JOINED, 50.0)
    assert [one.token_until_s for one in boards.read(50.0)] == [50.0 + APPROVED_S]
    assert boards.ask(ONE, approval=True).board.token_until_s == 0.0
    boards.decide(["rock"], DENIED, 60.0)
    assert [one.token_until_s for one in boards.read(60.0)] == [0.0]


def test_boards_of_one_name_are_decided_by_id(boards: Members) -> None:
    assert boards.ask(ONE, approval=True).name == "rock"
    second = boards.ask(TWO, approval=True)
    assert second.name == second.board.id == TWO.id
    assert "Another board has joined as rock" in second.notes[0]
    with pytest.raises(RequestError, match=rf"2 boards are called rock: .*{ONE.id} \(waiting\)"):
        boards.decide(["rock"], JOINED, 3.0)
    with pytest.raises(MemberNotFound, match="No board 'pi' has asked to join"):
        boards.decide([TWO.id, "pi"], JOINED, 3.0)
    (done,) = boards.decide([TWO.id], DENIED, 3.0)
    assert (done["id"], done["state"], done["since_s"]) == (TWO.id, "denied", 3.0)
    (done,) = boards.decide([], JOINED, 4.0, everything=True)
    assert (done["id"], done["state"]) == (ONE.id, "joined")
    assert boards.decide([], JOINED, 5.0, everything=True) == []
    assert [one.state for one in boards.read(5.0)] == [JOINED, DENIED]


def test_a_board_that_waits_is_written_once(boards: Members, tmp_path: Path) -> None:
    assert not boards.ask(ONE, approval=True).repeated
    before = (tmp_path / "node" / "boards.json").stat()
    assert boards.ask(replace(ONE, since_s=9.0), approval=True).repeated
    assert (tmp_path / "node" / "boards.json").stat().st_ino == before.st_ino
    assert [one.since_s for one in boards.read(9.0)] == [1.0]


def test_so_many_boards_may_wait_and_no_more(
    boards: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "MOST_WAITING", 1)
    for _ in range(2):
        boards.ask(ONE, approval=True)
    with pytest.raises(JoinRefused, match="1 boards wait already: approve or deny"):
        boards.ask(TWO, approval=True)
    boards.decide(["rock"], JOINED, 3.0)
    boards.ask(TWO, approval=True)


def test_a_board_alone_with_its_host_name_is_called_by_it() -> None:
    assert shortest_name(ONE, [ONE, MemberBoard("pi", B)]) == "rock"


def test_boards_that_joined_before_there_were_approvals_have_joined(boards: Members) -> None:
    earlier = {"host": "rock", "machine": A, "serial": A, "joined_s": 1.0}
    private_folder(boards._folder)
    (boards._folder / "boards.json").write_text(json.dumps([earlier]))
    assert boards.read(5.0) == [ONE]


@pytest.mark.parametrize("text", ["[1]", '[{"host": "rock", "state": "odd"}]', '[{"x": 1}]', "{"])
def test_a_damaged_file_is_named(boards: Members, text: str) -> None:
    private_folder(boards._folder)
    (boards._folder / "boards.json").write_text(text)
    with pytest.raises(OSError, match=r"boards\.json is damaged"):
        boards.read(5.0)


def test_a_board_is_listed_with_its_last_heartbeat(boards: Members, tmp_path: Path) -> None:
    for one in (ONE, replace(TWO, host="two")):
        boards.ask(one, approval=False)
    for at_s, key in ((5.0, A), (9.0, B)):
        write_news(tmp_path / "node", MemberNews(key, "rock", "0.1.0", at_s=at_s))
    found = {one["host"]: one.get("seen_s") for one in boards.entries(10.0)}
    assert found == {"rock": 9.0, "two": None}
