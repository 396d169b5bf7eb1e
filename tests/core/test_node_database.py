"""SQLite files shared by the processes of a node: whose they are, and what is written to them."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from rkserve.core.files import UnsafeFolder
from rkserve.core.node_database import NewerFile, atomic, open_shared

CREATE = ("CREATE TABLE counts (name TEXT, number INTEGER)",)


def test_a_file_is_created_once_for_this_account_alone(tmp_path: Path) -> None:
    file = tmp_path / "state" / "counts" / "file.sqlite3"
    one = open_shared(file, 1, CREATE)
    two = open_shared(file, 1, ("this is not read",))
    with atomic(one):
        one.execute("INSERT INTO counts VALUES ('a', 1)")
    assert two.execute("SELECT * FROM counts").fetchall() == [("a", 1)]
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in file.parent.iterdir()} == {0o600}
    one.close()
    two.close()


def test_an_error_undoes_the_transaction(tmp_path: Path) -> None:
    database = open_shared(tmp_path / "counts" / "file", 1, CREATE)

    def fail() -> None:
        with atomic(database):
            database.execute("INSERT INTO counts VALUES ('a', 1)")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert not database.in_transaction
    assert database.execute("SELECT * FROM counts").fetchall() == []
    database.close()


def test_files_of_newer_releases_and_links_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "counts" / "file"
    open_shared(file, 2, CREATE).close()
    with pytest.raises(NewerFile, match="its schema is 2, and this release reads up to 1"):
        open_shared(file, 1, CREATE)
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFolder):
        open_shared(file, 1, CREATE)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(("asked", "found"), [(True, 1), (False, 0)])
def test_deleted_content_is_overwritten_where_that_is_asked(
    asked: bool, found: int, tmp_path: Path
) -> None:
    database = open_shared(tmp_path / "counts" / "file", 1, CREATE, secure_delete=asked)
    assert database.execute("PRAGMA secure_delete").fetchone() == (found,)
    assert database.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    database.close()


def test_a_damaged_file_raises_sqlite_s_error(tmp_path: Path) -> None:
    file = tmp_path / "counts" / "file"
    open_shared(file, 1, CREATE).close()
    file.write_bytes(b"x" * 8192)
    with pytest.raises(sqlite3.DatabaseError):
        open_shared(file, 1, CREATE)
