"""Base weights that are sent to a board's disk: there whole and verified, or not there."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from rkserve.board.storage.partial_files import PART_AGE_S, RESERVE_BYTES
from rkserve.board.storage.staged_artifacts import Intake, StagedAdapters, StagedWeights
from rkserve.core.desired_state import AdapterVersion, BaseVersion
from rkserve.core.errors import ConfigError, StageFailed
from rkserve.core.files import file_digest
from rkserve.core.messages import AdapterRef

CONTENT = bytes(range(256)) * 64
DIGEST = hashlib.sha256(CONTENT).hexdigest()
W1 = BaseVersion("qwen", "w1", DIGEST, len(CONTENT))
HALF = len(CONTENT) // 2


def opened(folder: Path, free: int = 1 << 40) -> StagedWeights:
    staged = StagedWeights(folder, "board-1", "qwen", free=lambda _: free)
    staged.open()
    return staged


def send(staged: StagedWeights, base: BaseVersion = W1, content: bytes = CONTENT) -> None:
    there = staged.begin(base)
    if there < len(content):
        assert staged.chunk(base.digest, there, content[there:]) == len(content)
    staged.commit(base)


def files(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


WHOLE = [f"{DIGEST}.json", f"{DIGEST}.rkllm"]


def test_weights_are_there_once_they_are_committed_and_not_before(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    assert staged.begin(W1) == 0
    assert staged.chunk(DIGEST, 0, CONTENT[:HALF]) == HALF
    assert staged.chunk(DIGEST, HALF, CONTENT[HALF:]) == len(CONTENT)
    assert (staged.path(W1), staged.keys) == (None, ())
    staged.commit(W1)
    assert staged.keys == (W1.key,)
    assert staged.path(W1) == tmp_path / f"{DIGEST}.rkllm"
    assert (tmp_path / f"{DIGEST}.rkllm").read_bytes() == CONTENT
    assert files(tmp_path) == WHOLE


def test_the_same_content_under_another_label_is_there_already(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    send(staged)
    other = BaseVersion("qwen", "w1-again", DIGEST, len(CONTENT))
    assert staged.begin(other) == len(CONTENT)
    staged.commit(other)
    assert staged.path(other) == staged.path(W1)
    assert staged.keys == (W1.key,)


def test_half_a_file_survives_a_restart_and_is_gone_on_with(tmp_path: Path) -> None:
    before = opened(tmp_path)
    before.begin(W1)
    before.chunk(DIGEST, 0, CONTENT[:HALF])
    after = opened(tmp_path)
    assert after.begin(W1) == HALF
    assert after.chunk(DIGEST, 0, CONTENT) == len(CONTENT)  # only the rest of it is written
    after.commit(W1)
    assert opened(tmp_path).path(W1) is not None


def test_one_corrupted_byte_is_noticed_and_the_next_try_begins_anew(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    staged.begin(W1)
    wrong = bytearray(CONTENT)
    wrong[HALF] ^= 1
    staged.chunk(DIGEST, 0, bytes(wrong))
    with pytest.raises(StageFailed, match="and was removed"):
        staged.commit(W1)
    assert (staged.path(W1), files(tmp_path)) == (None, [])
    send(staged)
    assert staged.path(W1) is not None


def test_a_disk_without_room_says_so_before_anything_is_sent(tmp_path: Path) -> None:
    need = len(CONTENT) + RESERVE_BYTES
    with pytest.raises(StageFailed, match="disk is full"):
        opened(tmp_path, need - 1).begin(W1)
    staged = opened(tmp_path, need)
    assert staged.begin(W1) == 0
    staged.chunk(DIGEST, 0, CONTENT[:HALF])
    # What is there already needs no room any more.
    assert opened(tmp_path, need - HALF).begin(W1) == HALF


@pytest.mark.parametrize(
    ("base", "words"),
    [
        pytest.param(BaseVersion("qwen", "w", "../" + DIGEST[3:], 5), "not a sha256", id="upwards"),
        pytest.param(BaseVersion("qwen", "w", DIGEST.upper(), 5), "not a sha256", id="capitals"),
        pytest.param(BaseVersion("qwen", "w", DIGEST, 0), "it is empty", id="nothing in it"),
        pytest.param(BaseVersion("gemma", "w", DIGEST, 5), "it serves qwen", id="another model"),
    ],
)
def test_nonsense_is_refused(tmp_path: Path, base: BaseVersion, words: str) -> None:
    staged = opened(tmp_path / "own")
    for call in (staged.begin, staged.commit, staged.remove):
        with pytest.raises(StageFailed, match=words):
            call(base)
    assert files(tmp_path) == []


def test_a_board_without_a_folder_takes_nothing(tmp_path: Path) -> None:
    staged = StagedWeights(None, "board-1", "qwen")
    staged.open()
    assert (staged.path(W1), staged.keys) == (None, ())
    with pytest.raises(StageFailed, match="keeps no weights"):
        staged.begin(W1)


def test_a_folder_that_cannot_be_used_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"staged weights .* cannot be used"):
        opened(tmp_path / "file")


def test_a_whole_file_is_read_once_and_again_only_when_it_has_changed(
    tmp_path: Path,
) -> None:
    send(opened(tmp_path))
    read: list[Path] = []

    def counted(path: Path) -> str:
        read.append(path)
        return file_digest(path)

    def is_there() -> bool:
        staged = StagedWeights(tmp_path, "board-1", "qwen", digest=counted)
        staged.open()
        return staged.path(W1) is not None

    assert is_there()
    assert read == []
    place = tmp_path / f"{DIGEST}.rkllm"
    os.utime(place, (1.0, 1.0))
    assert is_there()
    assert read == [place]
    assert is_there()
    assert read == [place]


@pytest.mark.parametrize("stamp", [b"", b"{", b"[]", b'{"stamp": 5}', b'{"stamp": []}', b"\xff"])
def test_a_damaged_stamp_costs_a_look_at_the_file(tmp_path: Path, stamp: bytes) -> None:
    send(opened(tmp_path))
    (tmp_path / f"{DIGEST}.json").write_bytes(stamp)
    assert opened(tmp_path).path(W1) is not None
    assert (tmp_path / f"{DIGEST}.json").read_bytes() != stamp


def test_a_file_that_was_changed_is_removed_and_can_be_sent_anew(tmp_path: Path) -> None:
    send(opened(tmp_path))
    (tmp_path / f"{DIGEST}.rkllm").write_bytes(CONTENT[::-1])
    staged = opened(tmp_path)
    assert (staged.path(W1), files(tmp_path)) == (None, [])
    send(staged)
    assert staged.path(W1) is not None


def test_a_file_that_is_changed_while_the_board_runs_is_sent_anew(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    send(staged)
    (tmp_path / f"{DIGEST}.rkllm").write_bytes(CONTENT[::-1])
    assert staged.begin(W1) == 0
    assert staged.path(W1) is None
    send(staged)
    assert (tmp_path / f"{DIGEST}.rkllm").read_bytes() == CONTENT


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.rkllm").write_bytes(b"x")
    (tmp_path / f"{'0' * 64}.rkllm").symlink_to(tmp_path / "mine.rkllm")
    assert opened(tmp_path).keys == ()
    assert (tmp_path / "mine.rkllm").read_bytes() == b"x"
    assert (tmp_path / f"{'0' * 64}.rkllm").is_symlink()


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    staged = opened(tmp_path / "own")
    outside = tmp_path / "outside"
    outside.write_bytes(CONTENT)
    (tmp_path / "own" / f"{DIGEST}.rkllm").symlink_to(outside)
    with pytest.raises(StageFailed, match="link"):
        staged.begin(W1)
    assert staged.remove(W1)  # the link, and not what it leads to
    assert outside.read_bytes() == CONTENT


def test_what_is_removed_is_gone_and_so_is_what_there_is_of_it(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    assert not staged.remove(W1)
    staged.begin(W1)
    staged.chunk(DIGEST, 0, CONTENT[:HALF])
    assert staged.remove(W1)
    assert files(tmp_path) == []
    send(staged)
    assert staged.remove(W1)
    assert (files(tmp_path), staged.keys, staged.path(W1)) == ([], (), None)


def test_a_staging_that_was_given_up_is_removed_after_a_day(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    staged.begin(W1)
    staged.chunk(DIGEST, 0, CONTENT[:HALF])
    part = tmp_path / ".parts" / f"{DIGEST}.part"
    long_ago = part.stat().st_mtime - PART_AGE_S - 60
    os.utime(part, (long_ago, long_ago))
    assert opened(tmp_path).begin(W1) == 0


# -- what comes to a board ------------------------------------------------------------------------

V1 = AdapterVersion(AdapterRef("legal", "v1", DIGEST), len(CONTENT))


def intake(folder: Path, *in_use: BaseVersion) -> tuple[Intake, StagedAdapters, StagedWeights]:
    adapters, weights = (
        StagedAdapters(folder / "adapters", "board-1", "qwen"),
        opened(folder / "weights"),
    )
    adapters.open()
    return Intake(adapters, weights, lambda base: base in in_use), adapters, weights


def test_adapters_and_weights_go_to_their_own_folders_even_with_the_same_content(
    tmp_path: Path,
) -> None:
    into, adapters, weights = intake(tmp_path)
    for version in (V1, W1):
        assert into.begin(version) == 0
        assert into.chunk(DIGEST, 0, CONTENT) == len(CONTENT)
        into.commit(version)
    assert adapters.present() == (V1,)
    assert weights.keys == (W1.key,)
    with pytest.raises(StageFailed, match="no transfer"):
        into.chunk(DIGEST, 0, CONTENT)
    assert into.remove(V1)
    assert into.remove(W1)
    assert not adapters.present()
    assert not weights.keys


def test_a_chunk_belongs_to_what_was_begun_last(tmp_path: Path) -> None:
    into, adapters, weights = intake(tmp_path)
    into.begin(V1)
    into.chunk(DIGEST, 0, CONTENT[:HALF])
    assert into.begin(W1) == 0
    assert into.chunk(DIGEST, 0, CONTENT) == len(CONTENT)
    into.commit(W1)
    assert (adapters.present(), weights.keys) == ((), (W1.key,))
    assert into.begin(V1) == HALF


def test_who_is_not_there_any_more_gets_no_chunk(tmp_path: Path) -> None:
    into, adapters, _ = intake(tmp_path)
    into.begin(W1)
    into.chunk(DIGEST, 0, CONTENT[:HALF])
    assert into.remove(W1)
    adapters.begin(V1)
    assert into.chunk(DIGEST, 0, CONTENT) == len(CONTENT)  # no weights that nobody wants
    into.commit(V1)
    into.begin(V1)
    assert into.begin(W1) == 0
    assert into.remove(V1)  # and what is begun since then goes on
    assert into.chunk(DIGEST, 0, CONTENT) == len(CONTENT)
    into.commit(W1)


def test_weights_that_the_board_needs_are_not_removed(tmp_path: Path) -> None:
    into, _, weights = intake(tmp_path, W1)
    send(weights)
    with pytest.raises(StageFailed, match="loaded"):
        into.remove(W1)
    assert weights.path(W1) is not None
