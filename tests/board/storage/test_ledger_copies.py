"""Copies of ledgers on a board: whole, private, by cluster, and few."""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path

import pytest

from rkserve.board.storage.ledger_copies import FOLDER, KEPT, LedgerCopies, copies_of_node, named
from rkserve.board.storage.partial_files import PARTS, RESERVE_BYTES
from rkserve.core.board_report import LedgerCopy
from rkserve.core.errors import StageFailed

MINE, OTHER = "0123456789abcdef", "fedcba9876543210"


def content_of(number: int) -> bytes:
    return f"copy {number}".encode() * 100


def copy_of(number: int, cluster: str = MINE) -> LedgerCopy:
    content = content_of(number)
    digest = hashlib.sha256(content).hexdigest()
    return LedgerCopy(cluster, number, 1_700_000_000 + number, digest, len(content))


def send(copies: LedgerCopies, copy: LedgerCopy, content: bytes | None = None) -> None:
    content = content_of(copy.number) if content is None else content
    there = copies.begin(copy)
    while there < len(content):
        there = copies.chunk(copy.digest, there, content[there : there + 300])
    copies.commit(copy)


def kept_in(folder: Path, free: int = 1 << 40) -> LedgerCopies:
    return LedgerCopies(folder / FOLDER / "board-1", "board-1", free=lambda _: free)


def test_a_copy_is_whole_and_for_its_account_only(tmp_path: Path) -> None:
    copies = kept_in(tmp_path)
    assert copies.of(MINE) == ()
    assert not (tmp_path / FOLDER).exists()  # nothing is made before a copy comes
    send(copies, copy_of(1))
    assert kept_in(tmp_path).of(MINE) == (copy_of(1),)
    ((path,),) = copies_of_node(tmp_path).values()
    assert path.read_bytes() == content_of(1)
    assert named(path) == (1, copy_of(1).made_s)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in (path.parent, path.parent.parent, tmp_path / FOLDER):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert list((path.parent.parent / PARTS).iterdir()) == []


def test_the_newest_copies_of_each_cluster_are_kept_and_no_other_head_learns_of_them(
    tmp_path: Path,
) -> None:
    copies = kept_in(tmp_path)
    send(copies, copy_of(1, OTHER))
    for number in range(1, KEPT + 3):
        send(copies, copy_of(number))
    numbers = [one.number for one in copies.of(MINE)]
    assert numbers == [*range(KEPT + 2, 2, -1)]
    assert copies.of(OTHER) == (copy_of(1, OTHER),)
    assert {one: len(found) for one, found in copies_of_node(tmp_path).items()} == {
        MINE: KEPT,
        OTHER: 1,
    }


def test_a_copy_of_a_lower_number_is_kept_beside_those_of_a_later_time(tmp_path: Path) -> None:
    copies = kept_in(tmp_path)
    for number in (7, 8, 9, 2):
        send(copies, copy_of(number))
    assert [one.number for one in copies.of(MINE)] == [9, 8, 2]


def test_a_copy_that_is_there_is_not_sent_again_and_one_that_was_cut_goes_on(
    tmp_path: Path,
) -> None:
    first, copy = kept_in(tmp_path), copy_of(1)
    assert first.begin(copy) == 0
    assert first.chunk(copy.digest, 0, content_of(1)[:300]) == 300
    again = kept_in(tmp_path)  # after a restart
    assert again.begin(copy) == 300
    again.chunk(copy.digest, 300, content_of(1)[300:])
    again.commit(copy)
    assert again.begin(copy) == copy.size_bytes
    again.commit(copy)
    assert again.of(MINE) == (copy,)


def test_damaged_content_takes_no_copy_s_place(tmp_path: Path) -> None:
    copies, copy = kept_in(tmp_path), copy_of(2)
    send(copies, copy_of(1))
    with pytest.raises(StageFailed, match="sha256"):
        send(copies, copy, b"x" * copy.size_bytes)
    assert copies.of(MINE) == (copy_of(1),)


def test_a_full_disk_and_a_bad_folder_fail_the_sender(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="its disk is full"):
        kept_in(tmp_path, RESERVE_BYTES).begin(copy_of(1))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / FOLDER).symlink_to(tmp_path)
    with pytest.raises(StageFailed, match="symbolic link"):
        kept_in(tmp_path / "state").begin(copy_of(1))
    with pytest.raises(StageFailed, match="keeps no copies"):
        LedgerCopies(None, "board-1").begin(copy_of(1))


@pytest.mark.parametrize("cluster", ["", "..", "../0123456789abcd", PARTS, MINE.upper()])
def test_a_cluster_s_name_leads_out_of_no_folder(tmp_path: Path, cluster: str) -> None:
    with pytest.raises(StageFailed, match="is not the name of a cluster"):
        kept_in(tmp_path).begin(copy_of(1, cluster))
    with pytest.raises(StageFailed, match="is not the name of a cluster"):
        kept_in(tmp_path).of(cluster)


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    copies = kept_in(tmp_path)
    send(copies, copy_of(1))
    ((path,),) = copies_of_node(tmp_path).values()
    others = [path.with_name("letter.txt"), path.with_name("ledger-000009-x.sqlite3.gz")]
    for other in others:
        other.write_text("Dear reader", encoding="utf-8")
    for number in range(2, 7):
        send(copies, copy_of(number))
    assert len(copies.of(MINE)) == KEPT
    assert all(other.exists() for other in others)
