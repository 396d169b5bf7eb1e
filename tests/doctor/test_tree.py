"""Reads below a root: bounded, and never more than a note where something is odd."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rkserve.doctor.tree import MAX_BYTES, Tree


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    (tmp_path / "root").mkdir()
    return Tree(tmp_path / "root")


def notes(tree: Tree) -> list[tuple[str, str]]:
    return [(one.path, one.reason) for one in tree.unread]


def test_a_missing_file_is_no_note(tree: Tree) -> None:
    (tree.root / "file").write_text("1")
    assert tree.text("nothing") is None
    assert tree.number("file/below") is None
    assert tree.names("nothing") == []
    assert tree.link("nothing") is None
    assert tree.stat("nothing") is None
    assert notes(tree) == []


def test_a_number_is_a_number(tree: Tree) -> None:
    for name, text in {"a": "42\n", "b": "-7", "c": "", "d": "1e9", "e": "9" * 99}.items():
        (tree.root / name).write_text(text)
    assert [tree.number(name) for name in "abcde"] == [42, -7, None, None, None]
    assert [path for path, _ in notes(tree)] == ["/c", "/d", "/e"]


def test_a_folder_and_a_pipe_are_no_files(tree: Tree) -> None:
    (tree.root / "folder").mkdir()
    os.mkfifo(tree.root / "pipe")
    assert tree.text("folder") is None
    assert tree.text("pipe") is None
    assert notes(tree) == [
        ("/folder", "it is no regular file"),
        ("/pipe", "it is no regular file"),
    ]


def test_a_long_file_is_read_to_the_limit(tree: Tree) -> None:
    with (tree.root / "long").open("wb") as file:
        file.truncate(1 << 33)
    text = tree.private_text("long")
    assert text is not None
    assert len(text) == MAX_BYTES


def test_links_stay_in_the_tree(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("secret")
    (tree.root / "inside").write_text("text")
    (tree.root / "a").symlink_to("inside")
    (tree.root / "b").symlink_to("../outside")
    (tree.root / "c").symlink_to(tmp_path / "outside")
    (tree.root / "d").symlink_to("d")
    assert [tree.text(name) for name in "abcd"] == ["text", None, None, None]
    assert [path for path, _ in notes(tree)] == ["/b", "/c", "/d"]
    assert tree.private_text("c") is None


def test_the_root_of_this_machine_follows_links() -> None:
    assert Tree(Path("/")).text("proc/self/comm")
