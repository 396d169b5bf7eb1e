"""The order of an update and the boards' news, as files that versions a minor apart share."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from rkserve.core.files import private_folder
from rkserve.router.fleet_update import (
    FRESH_S,
    NEWS,
    ORDER,
    REWRITE_S,
    FleetUpdate,
    MemberNews,
    WheelFile,
    fresh,
    member_secret,
    read_news,
    read_update,
    write_news,
    write_update,
)

UPDATE = FleetUpdate("u1", "0.2.0", "/srv", (WheelFile("a.whl", "0" * 64, 5),), go=("k1",))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    private_folder(tmp_path / "node")
    return tmp_path / "node"


def test_an_order_is_read_as_it_was_written(folder: Path) -> None:
    assert read_update(folder) is None
    write_update(folder, UPDATE)
    assert read_update(folder) == UPDATE


def test_fields_of_a_later_version_are_left_out(folder: Path) -> None:
    write_update(folder, UPDATE)
    path = folder / ORDER
    found = json.loads(path.read_text())
    found["files"][0]["colour"] = found["colour"] = "blue"
    path.write_text(json.dumps(found))
    assert read_update(folder) == UPDATE
    write_news(folder, MemberNews("k1", "one", "0.1.0", at_s=1.0))
    file = folder / NEWS / "k1.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "colour": "blue"}))
    assert [one.host for one in read_news(folder)] == ["one"]


def test_an_order_says_which_boards_may_switch() -> None:
    for key, go in (("k1", True), ("k2", False)):
        order = UPDATE.order_for(key)
        assert order is not None
        assert order["go"] is go
        assert order["files"] == [{"name": "a.whl", "sha256": "0" * 64, "size": 5}]
    assert replace(UPDATE, ended=True).order_for("k1") is None


def test_news_are_written_when_they_change_or_grow_old(folder: Path) -> None:
    news = MemberNews("k1", "one", "0.1.0", at_s=100.0)
    write_news(folder, news)
    write_news(folder, replace(news, at_s=100.0 + REWRITE_S / 2))
    assert read_news(folder) == [news]
    later = replace(news, at_s=100.0 + REWRITE_S)
    write_news(folder, later)
    changed = replace(later, stage="installing", at_s=later.at_s + 0.1)
    assert read_news(folder) == [later]
    write_news(folder, changed)
    write_news(folder, MemberNews("k2", "another", "0.1.0", at_s=later.at_s))
    assert [one.host for one in read_news(folder)] == ["another", "one"]
    assert fresh(read_news(folder), later.at_s + FRESH_S) == [changed]
    assert (folder / NEWS / "k1.json").stat().st_mode & 0o777 == 0o600


def test_a_damaged_file_is_named(folder: Path) -> None:
    (folder / ORDER).write_text("{")
    with pytest.raises(OSError, match=r"update\.json is damaged"):
        read_update(folder)


def test_the_secret_is_not_the_token() -> None:
    assert "the token" not in member_secret("the token")
    assert member_secret("the token") != member_secret("another")
