"""What is sent to a board's disk: it is there whole and verified, or it is not there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from rkserve.board.storage.partial_files import PART_AGE_S, RESERVE_BYTES
from rkserve.board.storage.staged_artifacts import StagedAdapters
from rkserve.core.desired_state import AdapterVersion
from rkserve.core.errors import AdapterBroken, ConfigError, StageFailed
from rkserve.core.messages import AdapterRef
from rkserve.models.adapters import AdapterFolder, open_adapter
from tests.support.paths import PROJECT

CONTENT = bytes(range(256)) * 64
DIGEST = hashlib.sha256(CONTENT).hexdigest()
V1 = AdapterVersion(AdapterRef("legal", "v1", DIGEST, 0.5), len(CONTENT))
HALF = len(CONTENT) // 2


def version_of(content: bytes, version: str = "v1") -> AdapterVersion:
    digest = hashlib.sha256(content).hexdigest()
    return AdapterVersion(AdapterRef("legal", version, digest), len(content))


def opened(folder: Path, free: int = 1 << 40) -> StagedAdapters:
    staged = StagedAdapters(folder, "board-1", "qwen", free=lambda _: free)
    staged.open()
    return staged


def send(staged: StagedAdapters, version: AdapterVersion = V1, content: bytes = CONTENT) -> None:
    there = staged.begin(version)
    assert staged.chunk(version.ref.digest, there, content[there:]) == len(content)
    staged.commit(version)


def files(folder: Path) -> list[str]:
    return sorted(str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file())


WHOLE = ["legal/v1/adapter.rkllm", "legal/v1/manifest.json"]


@pytest.mark.promise(
    "Adapters", "It is staged in chunks, resumed, verified, and appears atomically"
)
def test_a_version_is_present_once_it_is_committed_and_not_before(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    assert staged.begin(V1) == 0
    assert staged.chunk(DIGEST, 0, CONTENT[:HALF]) == HALF
    assert staged.chunk(DIGEST, HALF, CONTENT[HALF:]) == len(CONTENT)
    assert staged.present() == ()
    staged.commit(V1)
    assert staged.present() == (V1,)
    assert files(tmp_path) == WHOLE
    assert (tmp_path / WHOLE[0]).read_bytes() == CONTENT
    manifest = json.loads((tmp_path / WHOLE[1]).read_text())
    assert manifest == {
        "scale": 0.5,
        "sha256": DIGEST,
        "size": len(CONTENT),
        "base_model": "qwen",
    }
    assert staged.shelf is not None
    assert open_adapter([staged.shelf], V1.ref).path == tmp_path / WHOLE[0]


def test_what_is_present_need_not_be_sent_again(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    send(staged)
    assert staged.begin(V1) == len(CONTENT)
    staged.commit(V1)
    assert staged.present() == (V1,)


def test_half_a_file_survives_a_restart_and_is_gone_on_with(tmp_path: Path) -> None:
    before = opened(tmp_path)
    before.begin(V1)
    before.chunk(DIGEST, 0, CONTENT[:HALF])
    after = opened(tmp_path)
    assert after.present() == ()
    with pytest.raises(StageFailed, match=r"no transfer of .* has been begun"):
        after.chunk(DIGEST, HALF, CONTENT[HALF:])
    assert after.begin(V1) == HALF
    assert after.chunk(DIGEST, 0, CONTENT) == len(CONTENT)  # only the rest of it is written
    after.commit(V1)
    assert opened(tmp_path).present() == (V1,)


@pytest.mark.parametrize(
    ("offset", "data", "there"),
    [
        pytest.param(0, CONTENT[:HALF], HALF, id="the same once more"),
        pytest.param(10, CONTENT[10 : HALF + 5], HALF + 5, id="one that overlaps"),
        pytest.param(HALF + 1, CONTENT[HALF + 1 :], HALF, id="one that leaves a gap"),
        pytest.param(-1, b"x", HALF, id="one before the beginning"),
        pytest.param(HALF, b"", HALF, id="nothing"),
    ],
)
def test_a_chunk_adds_what_is_new_in_it_and_leaves_no_gap(
    tmp_path: Path, offset: int, data: bytes, there: int
) -> None:
    staged = opened(tmp_path)
    staged.begin(V1)
    staged.chunk(DIGEST, 0, CONTENT[:HALF])
    assert staged.chunk(DIGEST, offset, data) == there
    assert staged.chunk(DIGEST, there, CONTENT[there:]) == len(CONTENT)
    staged.commit(V1)


def test_more_bytes_than_were_announced_are_refused(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    staged.begin(V1)
    with pytest.raises(StageFailed, match="the chunk ends beyond the file"):
        staged.chunk(DIGEST, 0, CONTENT + b"x")


def test_one_corrupted_byte_is_noticed_and_the_next_try_begins_anew(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    staged.begin(V1)
    wrong = bytearray(CONTENT)
    wrong[HALF] ^= 1
    staged.chunk(DIGEST, 0, bytes(wrong))
    with pytest.raises(StageFailed, match="and was removed"):
        staged.commit(V1)
    assert (staged.present(), files(tmp_path)) == ((), [])
    assert staged.begin(V1) == 0
    send(staged)
    assert staged.present() == (V1,)


def test_an_unfinished_file_is_not_committed_and_can_be_finished(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    staged.begin(V1)
    staged.chunk(DIGEST, 0, CONTENT[:HALF])
    with pytest.raises(StageFailed, match=f"{HALF} of {len(CONTENT)} bytes"):
        staged.commit(V1)
    send(staged)
    assert staged.present() == (V1,)


@pytest.mark.parametrize(
    ("ref", "size", "words"),
    [
        pytest.param(AdapterRef("../x", "v1", DIGEST), 5, "not the name", id="a name upwards"),
        pytest.param(AdapterRef("a", "..", DIGEST), 5, "not the name", id="a version upwards"),
        pytest.param(AdapterRef("/etc", "v1", DIGEST), 5, "not the name", id="an absolute name"),
        pytest.param(AdapterRef(".parts", "v1", DIGEST), 5, "not the name", id="our own folder"),
        pytest.param(AdapterRef("a", "v\n1", DIGEST), 5, "not the name", id="a line break"),
        pytest.param(
            AdapterRef("a", "v1", "../../" + DIGEST[6:]), 5, "not a sha256", id="a digest"
        ),
        pytest.param(AdapterRef("a", "v1", DIGEST.upper()), 5, "not a sha256", id="capitals"),
        pytest.param(AdapterRef("a", "v1", DIGEST), 0, "it is empty", id="nothing in it"),
    ],
)
def test_names_that_climb_out_and_other_nonsense_are_refused(
    tmp_path: Path, ref: AdapterRef, size: int, words: str
) -> None:
    staged = opened(tmp_path / "own")
    version = AdapterVersion(ref, size)
    for call in (staged.begin, staged.commit, staged.remove):
        with pytest.raises(StageFailed, match=words):
            call(version)
    with pytest.raises(StageFailed, match="no transfer"):
        staged.chunk(ref.digest, 0, b"x")
    assert files(tmp_path) == []


@pytest.mark.parametrize("where", ["legal", "legal/v1", ".parts"])
def test_a_link_in_the_place_of_a_folder_is_not_followed(tmp_path: Path, where: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    staged = opened(tmp_path / "own")
    link = tmp_path / "own" / where
    link.parent.mkdir(exist_ok=True)
    if link.is_dir():
        link.rmdir()
    link.symlink_to(outside)
    with pytest.raises(StageFailed, match="link"):
        send(staged)
    assert files(outside) == []


def test_a_board_without_a_folder_takes_nothing(tmp_path: Path) -> None:
    staged = StagedAdapters(None, "board-1", "qwen")
    staged.open()
    assert (staged.shelf, staged.present()) == (None, ())
    with pytest.raises(StageFailed, match="keeps no adapters"):
        staged.begin(V1)


def test_a_folder_that_cannot_be_used_is_said_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"staged adapters .* cannot be used"):
        opened(tmp_path / "file" / "own")


# -- after a restart ------------------------------------------------------------------------------


def test_what_is_there_is_read_again_after_a_restart(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    send(staged)
    other = version_of(b"other", "v2")
    send(staged, other, b"other")
    assert opened(tmp_path).present() == (V1, other)
    file = tmp_path / WHOLE[0]
    file.write_bytes(CONTENT[:-1] + b"!")
    after = opened(tmp_path)
    assert after.present() == (other,)
    assert after.begin(V1) == 0
    send(after)
    assert opened(tmp_path).present() == (V1, other)


def test_a_file_that_lost_its_manifest_is_announced_anew_without_being_sent(
    tmp_path: Path,
) -> None:
    # As after a power cut between the two renames.
    send(opened(tmp_path))
    (tmp_path / WHOLE[1]).unlink()
    after = opened(tmp_path)
    assert after.present() == ()
    assert after.begin(V1) == len(CONTENT)
    after.commit(V1)
    assert (after.present(), files(tmp_path)) == ((V1,), WHOLE)


def test_a_file_that_vanished_while_it_was_present_is_sent_again(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    send(staged)
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    assert staged.begin(V1) == 0
    assert staged.present() == ()
    send(staged)
    assert staged.present() == (V1,)


def test_parts_of_long_ago_are_removed_and_fresh_ones_kept(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    other = version_of(b"other", "v2")
    for version, data in ((V1, CONTENT[:5]), (other, b"ot")):
        staged.begin(version)
        staged.chunk(version.ref.digest, 0, data)
    old = tmp_path / ".parts" / f"{DIGEST}.part"
    past_s = old.stat().st_mtime - PART_AGE_S - 5
    os.utime(old, (past_s, past_s))
    after = opened(tmp_path)
    assert (after.begin(V1), after.begin(other)) == (0, 2)


# -- other contents, removal ----------------------------------------------------------------------


@pytest.mark.promise(
    "Adapters", "A version is identified by content: digest, size, base model, scale"
)
def test_another_content_takes_the_place_of_one_of_the_same_name(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    send(staged)
    fresh = version_of(b"fresh")
    assert staged.begin(fresh) == 0
    send(staged, fresh, b"fresh")
    assert staged.present() == opened(tmp_path).present() == (fresh,)
    assert staged.remove(V1) is False  # that name has another content now
    assert staged.present() == (fresh,)


@pytest.mark.promise(
    "Adapters", "A version is identified by content: digest, size, base model, scale"
)
def test_another_scale_is_another_version_and_needs_no_bytes(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    send(staged)
    louder = AdapterVersion(replace(V1.ref, scale=2.0), V1.size_bytes)
    assert staged.begin(louder) == louder.size_bytes
    staged.commit(louder)
    assert staged.present() == opened(tmp_path).present() == (louder,)


def test_a_version_is_removed_with_its_folders_and_its_part(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    send(staged)
    other = version_of(b"other", "v2")
    staged.begin(other)
    staged.chunk(other.ref.digest, 0, b"oth")
    assert staged.remove(V1) is True
    assert staged.remove(V1) is False
    assert staged.remove(other) is True
    assert (staged.present(), files(tmp_path)) == ((), [])
    assert not (tmp_path / "legal").exists()


def test_two_who_send_the_same_at_once_do_no_harm(tmp_path: Path) -> None:
    staged = opened(tmp_path)
    start, errors = threading.Barrier(2), []

    def sender() -> None:
        start.wait()
        try:
            for _ in range(3):  # the other's commit ends the staging; begin anew, as senders do
                try:
                    there = staged.begin(V1)
                    while there < len(CONTENT):
                        there = staged.chunk(DIGEST, there, CONTENT[there : there + 512])
                    return staged.commit(V1)
                except StageFailed as exc:
                    if "no transfer" not in str(exc):
                        raise
        except StageFailed as exc:
            errors.append(exc)

    threads = [threading.Thread(target=sender) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert staged.present() == opened(tmp_path).present() == (V1,)
    assert files(tmp_path) == WHOLE


# -- a full disk ----------------------------------------------------------------------------------


def test_what_does_not_fit_on_the_disk_is_refused_before_it_comes(tmp_path: Path) -> None:
    enough = len(CONTENT) + RESERVE_BYTES
    with pytest.raises(StageFailed, match="its disk is full: 32 MiB are free"):
        opened(tmp_path, free=enough - 1).begin(V1)
    staged = opened(tmp_path, free=enough)
    staged.begin(V1)
    staged.chunk(DIGEST, 0, CONTENT[:HALF])
    assert opened(tmp_path, free=enough - HALF).begin(V1) == HALF  # the rest is what it needs


CHILD = textwrap.dedent("""
    import hashlib, pathlib, resource, sys
    from rkserve.board.storage.staged_artifacts import StagedAdapters
    from rkserve.core.desired_state import AdapterVersion
    from rkserve.core.errors import StageFailed
    from rkserve.core.messages import AdapterRef
    folder, limit = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    if limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    content = b"x" * (2 << 20)
    digest = hashlib.sha256(content).hexdigest()
    version = AdapterVersion(AdapterRef("a", "1", digest), len(content))
    staged = StagedAdapters(folder, "board-1", "qwen", free=lambda _: 1 << 40)
    staged.open()
    staged.begin(version)
    try:
        staged.chunk(digest, 0, content)
    except StageFailed as exc:
        print("refused:", exc)
    print("left:", [f.name for f in folder.rglob("*") if f.is_file()], staged.present())
    small = AdapterVersion(AdapterRef("b", "1", hashlib.sha256(b"y").hexdigest()), 1)
    staged.begin(small)
    staged.chunk(small.ref.digest, 0, b"y")
    staged.commit(small)
    print("then:", [one.ref.name for one in staged.present()])
""")


def child(folder: Path, limit: int, *prefix: str) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-c", CHILD, str(folder), str(limit)]
    root = PROJECT
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, cwd=root
    )


FULL_AND_TIDY = (
    r"refused: Board board-1 did not get the file: its disk is full",
    "left: [] ()",
    "then: ['b']",
)


def test_a_limit_that_is_met_while_writing_leaves_nothing_behind(tmp_path: Path) -> None:
    done = child(tmp_path, 1 << 20)
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in FULL_AND_TIDY), done.stdout


def test_a_disk_that_is_really_full_leaves_nothing_behind_and_room_for_others(
    tmp_path: Path,
) -> None:
    mount = (
        "unshare",
        "-rm",
        "sh",
        "-c",
        f'mount -t tmpfs -o size=1m none {tmp_path} && exec "$@"',
    )
    if subprocess.run([*mount, "sh", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a small disk of its own")
    done = child(tmp_path, 0, *mount, "sh")
    assert done.returncode == 0, done.stderr
    assert all(words in done.stdout for words in FULL_AND_TIDY), done.stdout


# -- what the engine gets -------------------------------------------------------------------------


def test_a_staged_version_goes_before_that_of_the_model_folder_if_it_is_the_one_meant(
    tmp_path: Path,
) -> None:
    staged = opened(tmp_path / "own")
    send(staged)
    place = tmp_path / "qwen" / "adapters" / "legal" / "v1"
    place.mkdir(parents=True)
    (place / "adapter.rkllm").write_bytes(b"older")
    assert staged.shelf is not None
    shelves = [staged.shelf, AdapterFolder.of_model(tmp_path / "qwen")]
    assert open_adapter(shelves, V1.ref).path == tmp_path / "own" / WHOLE[0]
    older = version_of(b"older").ref
    assert open_adapter(shelves, older).path == place / "adapter.rkllm"
    with pytest.raises(AdapterBroken, match=f"has the sha256 {DIGEST[:12]}"):
        open_adapter(shelves, version_of(b"none of them").ref)
    with pytest.raises(AdapterBroken, match="missing"):
        open_adapter(shelves, AdapterRef("legal", "v9", DIGEST))
    with pytest.raises(AdapterBroken, match="serves no adapters"):
        open_adapter([], V1.ref)
