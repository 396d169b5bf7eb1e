"""Files that survive a power cut, and folders that belong to this account alone."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rkserve.core.durable_files import (
    UnsafeFolder,
    check_cache_name,
    free_bytes,
    open_private,
    private_folder,
    sync,
    write_private,
)
from rkserve.core.errors import RequestError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_private_folder_is_created_or_closed_to_others(tmp_path: Path) -> None:
    fresh, readable = tmp_path / "a" / "b", tmp_path / "c"
    readable.mkdir(mode=0o755)
    for folder in (fresh, readable):
        private_folder(folder)
        assert mode(folder) == 0o700


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        pytest.param(lambda one: one.symlink_to("/tmp"), "symbolic link", id="a link"),
        pytest.param(lambda one: one.write_text(""), "is no folder", id="a file"),
        pytest.param(
            lambda one: (one.mkdir(), one.chmod(0o777)), "may write to", id="others may write"
        ),
    ],
)
def test_a_folder_that_others_may_have_prepared_is_refused(
    tmp_path: Path, prepare: object, why: str
) -> None:
    folder = tmp_path / "folder"
    assert callable(prepare)
    prepare(folder)
    with pytest.raises(UnsafeFolder, match=why):
        private_folder(folder)


def test_a_folder_that_others_could_replace_is_refused(tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    outer.chmod(0o777)
    with pytest.raises(UnsafeFolder, match="every account may rename it"):
        private_folder(outer / "inner")
    outer.chmod(0o1777)
    private_folder(outer / "inner")


def test_a_private_file_replaces_its_text_and_is_closed_to_others(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("something longer")
    file.chmod(0o644)
    write_private(file, "short")
    assert (file.read_text(), mode(file)) == ("short", 0o600)
    sync(file)
    sync(tmp_path)
    assert free_bytes(tmp_path) > 0


def test_a_file_that_is_a_link_or_a_pipe_is_refused(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    target.write_text("kept")
    link.symlink_to(target)
    os.mkfifo(pipe)
    for file in (link, pipe):
        with pytest.raises(UnsafeFolder, match="remove it"):
            open_private(file, os.O_RDWR)
    with pytest.raises(OSError, match="symbolic link"):
        sync(link)
    assert target.read_text() == "kept"


@pytest.mark.parametrize("name", ["a", "a" * 64, "v1.2_b-c", "0"])
def test_a_name_fits_into_a_path(name: str) -> None:
    assert check_cache_name(name) == name


@pytest.mark.parametrize("name", ["", "a" * 65, ".a", "-a", "a/b", "a@1", "a:b", "a b", "a\n", "ä"])
def test_another_name_is_refused_with_the_rule(name: str) -> None:
    with pytest.raises(RequestError, match="at most 64 letters") as failure:
        check_cache_name(name, "cache")
    assert failure.value.param == "cache"
    assert len(failure.value.message) < 250
