"""Files in transfer: they grow under their digest, and leave as a whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

import pytest

from rkserve.board.storage.partial_files import (
    PART_AGE_S,
    PARTS,
    RESERVE_BYTES,
    PartialFiles,
    own_folder,
    size_of,
)
from rkserve.core.errors import ConfigError, StageFailed

CONTENT = bytes(range(256)) * 8
SIZE = len(CONTENT)
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def opened(folder: Path, free: int = 1 << 40) -> PartialFiles:
    parts = PartialFiles(folder, "board-1", "weights", free=lambda _: free)
    parts.open()
    return parts


def part_of(folder: Path) -> Path:
    return folder / PARTS / f"{DIGEST}.part"


def test_chunks_make_a_file_that_only_its_owner_reads(tmp_path: Path) -> None:
    parts = opened(tmp_path)
    assert parts.begin(DIGEST, SIZE) == 0
    assert parts.chunk(DIGEST, 0, CONTENT[:1000]) == 1000
    assert parts.chunk(DIGEST, 2000, CONTENT[2000:]) == 1000  # a gap: nothing is taken
    assert parts.chunk(DIGEST, 500, CONTENT[500:]) == SIZE  # only the new bytes are added
    whole = parts.verified(DIGEST, SIZE)
    assert whole.read_bytes() == CONTENT
    assert stat.S_IMODE(whole.stat().st_mode) == 0o600


def test_a_restart_continues_a_transfer_only_after_it_was_begun_again(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.begin(DIGEST, SIZE)
    first.chunk(DIGEST, 0, CONTENT[:1000])
    second = opened(tmp_path)
    with pytest.raises(StageFailed, match="no transfer of"):
        second.chunk(DIGEST, 1000, CONTENT[1000:])
    assert second.begin(DIGEST, SIZE) == 1000
    assert second.chunk(DIGEST, 1000, CONTENT[1000:]) == SIZE


def test_a_part_that_is_longer_than_announced_begins_anew(tmp_path: Path) -> None:
    parts = opened(tmp_path)
    part_of(tmp_path).write_bytes(CONTENT + b"more")
    assert parts.begin(DIGEST, SIZE) == 0
    with pytest.raises(StageFailed, match=f"beyond the file's {SIZE} bytes"):
        parts.chunk(DIGEST, 0, CONTENT + b"more")


def test_an_incomplete_file_stays_and_a_wrong_one_is_removed(tmp_path: Path) -> None:
    parts = opened(tmp_path)
    parts.begin(DIGEST, SIZE)
    parts.chunk(DIGEST, 0, CONTENT[:1000])
    with pytest.raises(StageFailed, match=f"1000 of {SIZE} bytes"):
        parts.verified(DIGEST, SIZE)
    parts.chunk(DIGEST, 1000, bytes(SIZE - 1000))
    with pytest.raises(StageFailed, match="and was removed"):
        parts.verified(DIGEST, SIZE)
    assert not part_of(tmp_path).exists()


def test_a_discarded_transfer_has_to_be_begun_again(tmp_path: Path) -> None:
    parts = opened(tmp_path)
    assert not parts.discard(DIGEST)
    parts.begin(DIGEST, SIZE)
    parts.chunk(DIGEST, 0, CONTENT)
    assert parts.discard(DIGEST)
    with pytest.raises(StageFailed, match="no transfer"):
        parts.chunk(DIGEST, 0, CONTENT)


def test_the_reserve_of_the_disk_is_kept(tmp_path: Path) -> None:
    assert opened(tmp_path / "a", SIZE + RESERVE_BYTES).begin(DIGEST, SIZE) == 0
    with pytest.raises(StageFailed, match="its disk is full"):
        opened(tmp_path / "b", SIZE + RESERVE_BYTES - 1).begin(DIGEST, SIZE)


def test_an_abandoned_transfer_is_removed_when_the_folder_is_opened(tmp_path: Path) -> None:
    opened(tmp_path)
    old, fresh = part_of(tmp_path), tmp_path / PARTS / "fresh.part"
    for part in (old, fresh):
        part.write_bytes(b"x")
    seen_s = old.stat().st_mtime - PART_AGE_S - 60
    os.utime(old, (seen_s, seen_s))
    opened(tmp_path)
    assert (old.exists(), fresh.exists()) == (False, True)


@pytest.mark.parametrize(
    ("digest", "size", "message"), [("../x", 1, "not a sha256"), (DIGEST, 0, "it is empty")]
)
def test_an_impossible_file_is_refused(
    tmp_path: Path, digest: str, size: int, message: str
) -> None:
    with pytest.raises(StageFailed, match=message):
        opened(tmp_path).check(digest, size)


def test_a_board_without_a_folder_keeps_nothing() -> None:
    parts = PartialFiles(None, "board-1", "weights")
    with pytest.raises(StageFailed, match="keeps no weights"):
        parts.begin(DIGEST, SIZE)


def test_a_link_is_no_folder_of_ours(tmp_path: Path) -> None:
    (tmp_path / PARTS).symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError, match="it is a link"):
        own_folder(tmp_path / PARTS)
    with pytest.raises(ConfigError, match="staged weights"):
        opened(tmp_path)


def test_errors_of_the_system_name_the_step_and_a_full_disk(tmp_path: Path) -> None:
    parts = opened(tmp_path)
    for code, message in (
        (errno.EACCES, "it cannot be removed: Permission denied"),
        (errno.ENOSPC, "it cannot be removed, its disk is full: No space left on device"),
    ):
        with (
            pytest.raises(StageFailed, match=message),
            parts.disk_errors("it cannot be removed"),
        ):
            raise OSError(code, os.strerror(code))


def test_a_missing_file_has_no_bytes(tmp_path: Path) -> None:
    assert size_of(tmp_path / "missing") == 0
