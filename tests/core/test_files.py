"""Durable writes, folders of this account alone, and digests: their differences, their cache."""

from __future__ import annotations

import hashlib
import os
import stat
import sys
from pathlib import Path

import pytest

from rkserve.core.errors import RequestError
from rkserve.core.files import (
    BLOCK_BYTES,
    BLOCKS,
    CachedDigest,
    UnsafeFolder,
    check_cache_name,
    content_digest,
    file_digest,
    free_bytes,
    open_private,
    private_folder,
    sync,
    write_private,
)


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


def test_a_file_s_digest_is_its_sha256(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"x" * 3_000_000)
    assert file_digest(file) == hashlib.sha256(b"x" * 3_000_000).hexdigest()


def sparse(path: Path, size: int) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


def write_at(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        file.write(b"\x01")


SIZE = 4 * BLOCKS * BLOCK_BYTES


@pytest.mark.parametrize(
    "position",
    [
        pytest.param(0, id="its first byte"),
        pytest.param(SIZE - 1, id="its last byte"),
        pytest.param((SIZE - BLOCK_BYTES) * 31 // (BLOCKS - 1), id="a block in the middle"),
    ],
)
def test_large_files_are_told_apart_by_their_blocks(tmp_path: Path, position: int) -> None:
    one, other = sparse(tmp_path / "one", SIZE), sparse(tmp_path / "other", SIZE)
    assert content_digest(one) == content_digest(other)
    write_at(other, position)
    assert content_digest(one) != content_digest(other)


def test_large_files_are_told_apart_by_their_sizes(tmp_path: Path) -> None:
    assert content_digest(sparse(tmp_path / "a", SIZE)) != content_digest(
        sparse(tmp_path / "b", SIZE + 1)
    )


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1])
def test_every_byte_of_a_small_file_counts(tmp_path: Path, size: int) -> None:
    digests = {content_digest(sparse(tmp_path / "zeros", size))}
    for position in {0, size // 2, size - 1} - {-1} if size else set():
        file = sparse(tmp_path / f"at-{position}", size)
        write_at(file, position)
        digests.add(content_digest(file))
    assert len(digests) == 1 + len({0, size // 2, size - 1} if size else set())


def bytes_read() -> int:
    """What this process has read from files so far, cached or not."""
    (line,) = (x for x in Path("/proc/self/io").read_text().splitlines() if x.startswith("rchar"))
    return int(line.split()[1])


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel what was read")
def test_an_unchanged_file_is_read_once_and_a_changed_one_again(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"a" * 1_000_000)
    first = file_digest(file)
    before = bytes_read()
    assert file_digest(file) == first
    assert bytes_read() - before < 500_000
    times = file.stat()
    file.write_bytes(b"b" * 1_000_000)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert file_digest(file) == hashlib.sha256(b"b" * 1_000_000).hexdigest()


@pytest.mark.parametrize("digest", [file_digest, content_digest])
def test_what_is_no_file_has_no_digest(tmp_path: Path, digest: object) -> None:
    assert callable(digest)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "pipe"):
        with pytest.raises(OSError, match=path.name):
            digest(path)


def test_a_kept_digest_outlives_its_process_and_not_a_change_of_the_file(tmp_path: Path) -> None:
    file, record = tmp_path / "model", tmp_path / "model.digest"
    file.write_bytes(b"one")
    first = CachedDigest(file, record)
    assert first.known is None
    assert first.get() == first.known == hashlib.sha256(b"one").hexdigest()
    assert record.stat().st_mode & 0o777 == 0o600
    # A successor that could not read a byte of the file still knows it: it reads the record.
    second = CachedDigest(file, record)
    second.stop()
    assert second.get() == first.get()
    file.write_bytes(b"two")
    assert first.get() == hashlib.sha256(b"two").hexdigest()
    with pytest.raises(OSError, match="cancelled"):
        stopped(CachedDigest(file, None)).get()


def stopped(digest: CachedDigest) -> CachedDigest:
    digest.stop()
    return digest


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"stamp": [1], "digest": ""}', '{"stamp": [1, 2, 3, 4, 5], "digest": "x"}'],
)
def test_a_damaged_record_of_a_digest_is_computed_anew(tmp_path: Path, content: str) -> None:
    file, record = tmp_path / "model", tmp_path / "model.digest"
    file.write_bytes(b"one")
    record.write_text(content, encoding="utf-8")
    assert CachedDigest(file, record).get() == hashlib.sha256(b"one").hexdigest()
    assert hashlib.sha256(b"one").hexdigest() in record.read_text(encoding="utf-8")


def test_a_record_that_cannot_be_written_costs_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"one")
    assert CachedDigest(file, tmp_path / "no" / "folder").get() == file_digest(file)
