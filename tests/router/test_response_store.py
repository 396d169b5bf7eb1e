"""Responses on the disk of one node: whose they are, how long they stay, what cannot be read."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rkserve.api.responses.stored import StoredResponse
from rkserve.core.errors import BodyTooLarge, ResponsesFailed
from rkserve.core.node_database import LOCK
from rkserve.router.response_store import FILE, ResponseStore, remove_all
from tests.support.boards.own_time import SetClock

MINE, OTHERS = "mine", "another key's"
A, B, C = (f"resp_{letter * 32}" for letter in "abc")
DAY_S = 86400.0


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def store(tmp_path: Path, clock: SetClock) -> Iterator[ResponseStore]:
    opened = ResponseStore(tmp_path / "kept", 1 << 20, DAY_S, clock=clock)
    yield opened
    opened.close()


def kept(response_id: str, previous: str | None = None, text: str = "Hello") -> StoredResponse:
    item = {"type": "message", "id": f"msg_{response_id[5:]}_i0", "role": "user", "content": text}
    return StoredResponse(response_id, previous, (item,), {"id": response_id, "output": []})


def ids(chain: list[StoredResponse]) -> list[str]:
    return [one.id for one in chain]


def test_what_was_written_is_read_again_by_its_owner_only(store: ResponseStore) -> None:
    one = kept(A, text="Grüß dich \x00 \U0001f30a")
    store.write(MINE, one)
    found = store.read(MINE, A)
    assert found is not None
    assert (found.id, found.previous, found.items, found.response) == (
        *(A, None, one.items),
        one.response,
    )
    assert found.size > 40
    assert store.read(OTHERS, A) is None
    assert store.chain(OTHERS, A, 1 << 20) == []
    assert not store.delete(OTHERS, A)
    assert store.delete(MINE, A)
    assert not store.delete(MINE, A)
    assert store.read(MINE, A) is None


def test_several_routers_of_a_node_share_the_file(tmp_path: Path, store: ResponseStore) -> None:
    second = ResponseStore(tmp_path / "kept", 1 << 20, 1e10)
    store.write(MINE, kept(A))
    second.write(MINE, kept(B, A))
    assert ids(store.chain(MINE, B, 1 << 20)) == [B, A]
    assert second.delete(MINE, A)
    assert store.read(MINE, A) is None
    second.close()


def test_a_chain_ends_where_another_key_s_begins(store: ResponseStore) -> None:
    store.write(OTHERS, kept(A))
    store.write(MINE, kept(B, A))
    assert ids(store.chain(MINE, B, 1 << 20)) == [B]


def test_a_chain_is_not_read_beyond_what_one_request_may_bring(store: ResponseStore) -> None:
    store.write(MINE, kept(A, text="x" * 5000))
    store.write(MINE, kept(B, A))
    with pytest.raises(BodyTooLarge):
        store.chain(MINE, B, 4000)
    assert ids(store.chain(MINE, B, 6000)) == [B, A]
    assert ids(store.chain(MINE, B, None)) == [B]


def test_what_is_too_old_is_gone_but_not_what_a_conversation_goes_on_from(
    store: ResponseStore, clock: SetClock
) -> None:
    store.write(MINE, kept(A))
    store.write(MINE, kept(C))
    clock.now_s += DAY_S * 0.75
    assert ids(store.chain(MINE, A, 1 << 20)) == [A]
    store.write(MINE, kept(B, A))
    clock.now_s += DAY_S * 0.5
    assert store.read(MINE, C) is None, "before it is removed"
    assert not store.delete(MINE, C)
    store.sweep()
    assert ids(store.chain(MINE, B, 1 << 20)) == [B, A]
    clock.now_s += DAY_S * 2
    store.sweep()
    assert store.chain(MINE, B, 1 << 20) == []


def test_the_longest_unused_go_where_there_is_too_much(tmp_path: Path, clock: SetClock) -> None:
    store = ResponseStore(tmp_path, 20_000, DAY_S, clock=clock)
    names = [f"resp_{number:032x}" for number in range(6)]
    for name in names[:4]:
        clock.now_s += 1
        store.write(MINE, kept(name, text="x" * 4000))
    clock.now_s += 1
    store.chain(MINE, names[0], 1 << 20)  # somebody goes on from the first one
    for name in names[4:]:
        clock.now_s += 1
        store.write(MINE, kept(name, text="x" * 4000))
    left = [name for name in names if store.read(MINE, name) is not None]
    assert left == [names[0], *names[3:]]
    store.write(MINE, kept(A, text="x" * 30_000))
    assert store.read(MINE, A) is not None, "one that is longer than all may be stays by itself"
    assert store.read(MINE, names[0]) is None
    store.close()


CRASH = """
import os, sys
from pathlib import Path
from rkserve.router.response_store import ResponseStore
from rkserve.api.responses.stored import StoredResponse
store = ResponseStore(Path(sys.argv[1]), 1 << 20, 1e10)
store.write("mine", StoredResponse(sys.argv[2], None, (), {"status": "completed", "output": []}))
store._database.execute("BEGIN IMMEDIATE")
store._database.execute(
    "INSERT INTO responses (id, owner, used_s, bytes, items, response) "
    "VALUES (?, 'mine', 2e10, 1, '[]', '{}')", (sys.argv[3],))
os._exit(9)
"""


def test_a_router_that_dies_while_it_writes_leaves_what_was_written_before(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", CRASH, str(tmp_path), A, B], check=False)
    assert ended.returncode == 9
    store = ResponseStore(tmp_path, 1 << 20, 1e10)
    assert store.read(MINE, A) is not None
    assert store.read(MINE, B) is None
    store.write(MINE, kept(B))
    store.close()


def test_nobody_else_can_read_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "responses"
    store = ResponseStore(folder, 1 << 20, DAY_S)
    assert folder.stat().st_mode & 0o777 == 0o700
    store.close()
    if os.getuid() == 0:
        os.chown(folder, 12345, 12345)
        with pytest.raises(ResponsesFailed, match="not Ray's user's alone"):
            ResponseStore(folder, 1 << 20, DAY_S)


@pytest.mark.parametrize("name", [FILE, LOCK])
def test_a_link_in_the_place_of_a_file_is_refused_and_followed_by_nothing(
    name: str, tmp_path: Path
) -> None:
    folder, elsewhere = tmp_path / "responses", tmp_path / "elsewhere"
    folder.mkdir(mode=0o700)
    elsewhere.write_text("another's")
    (folder / name).symlink_to(elsewhere)
    with pytest.raises(ResponsesFailed):
        ResponseStore(folder, 1 << 20, DAY_S)
    assert elsewhere.read_text() == "another's"


def test_its_files_are_for_this_account_only(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "responses", 1 << 20, DAY_S)
    store.write(MINE, kept(A))
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "responses").iterdir()}
    store.close()
    assert FILE in modes
    assert set(modes.values()) == {0o600}, modes


@pytest.mark.parametrize("spoil", ["damaged", "newer", "no folder"])
def test_a_file_that_cannot_be_used_is_told_in_a_sentence_without_its_folder(
    tmp_path: Path, spoil: str
) -> None:
    folder = tmp_path / "kept"
    if spoil == "no folder":
        folder.write_text("a file in its place")
    else:
        ResponseStore(folder, 1 << 20, DAY_S).close()
    if spoil == "damaged":
        (folder / FILE).write_bytes(b"x" * 8192)
    elif spoil == "newer":
        database = sqlite3.connect(folder / FILE)
        database.execute("PRAGMA user_version = 9")
        database.close()
    with pytest.raises(ResponsesFailed) as caught:
        ResponseStore(folder, 1 << 20, DAY_S)
    assert str(tmp_path) not in caught.value.message
    assert caught.value.http_status == 503


def test_a_full_disk_refuses_the_new_one_and_keeps_the_old(store: ResponseStore) -> None:
    store.write(MINE, kept(A))
    (pages,) = store._database.execute("PRAGMA page_count").fetchone()
    store._database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(ResponsesFailed, match="full"):
        store.write(MINE, kept(B, text="x" * 100_000))
    assert store.read(MINE, A) is not None
    store._database.execute("PRAGMA max_page_count = 100000")
    store.write(MINE, kept(B))


def test_what_was_kept_is_removed_as_a_whole(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path, 1 << 20, DAY_S)
    store.write(MINE, kept(A))
    store.close()
    remove_all(tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == ["lock"]
    remove_all(tmp_path / "none")


def test_a_damaged_response_is_told_in_a_sentence_and_can_be_removed(store: ResponseStore) -> None:
    store.write(MINE, kept(A))
    store._database.execute("UPDATE responses SET items = '[1, '")
    with pytest.raises(ResponsesFailed):
        store.read(MINE, A)
    with pytest.raises(ResponsesFailed):
        store.chain(MINE, A, 1 << 20)
    assert store.delete(MINE, A)
    assert store.read(MINE, A) is None
