"""The folder of prompt cache files: what is damaged, forged or refused by the disk is a miss."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from rkserve.board.storage.cache_files import CacheFolder, FolderSpace, _file_system
from rkserve.board.storage.prompt_cache import CachedFile, CacheFingerprint, CacheStore
from rkserve.core.errors import CacheUnsupported, ConfigError
from tests.support.boards.cache_cabinet import (
    FIRST,
    OTHER,
    SEAL,
    SECOND,
    Cabinet,
    keep,
    kept,
)


@pytest.fixture
def cabinet(tmp_path: Path) -> Iterator[Cabinet]:
    made = Cabinet(tmp_path / "caches")
    yield made
    made.close()


# -- over restarts --------------------------------------------------------------------------------


def test_all_of_it_is_there_after_a_restart(cabinet: Cabinet) -> None:
    store = cabinet.open()
    long = tuple(range(0, 160_000, 10))
    first = keep(store, long, name="mine", adapter="legal@2-abc-1")
    keep(store, FIRST)
    assert store.verify(first)
    before = store.entries()
    store = cabinet.open()
    assert store.entries() == before
    assert store.used_bytes == 2000
    hit = store.find((*long, 7), "legal@2-abc-1")
    assert hit is not None
    assert hit.tokens == len(long)
    assert store.verify(hit.entry)


def test_the_order_of_use_survives_a_restart(cabinet: Cabinet) -> None:
    store = cabinet.open()
    first = keep(store, (1, 1))
    keep(store, (2, 2))
    assert store.verify(first)
    store = cabinet.open(budget_bytes=1500)
    assert kept(store) == {(None, (1, 1))}


def test_named_caches_survive_a_smaller_budget_and_it_is_said(
    cabinet: Cabinet, caplog: pytest.LogCaptureFixture
) -> None:
    store = cabinet.open()
    keep(store, FIRST, name="mine")
    keep(store, OTHER)
    with caplog.at_level(logging.WARNING):
        store = cabinet.open(budget_bytes=500)
    assert kept(store) == {("mine", FIRST)}
    assert "1000 bytes, and the budget is 500" in caplog.text


@pytest.mark.parametrize("change", ["model", "release", "template", "tokenizer", "load"])
def test_under_another_seal_nothing_is_found_and_the_files_go(
    cabinet: Cabinet, change: str
) -> None:
    keep(cabinet.open(), FIRST, name="mine")
    store = cabinet.open(seal=replace(SEAL, **{change: "another"}))
    assert store.entries() == []
    assert cabinet.files() == []
    assert len(list(cabinet.folder.glob("kv-*"))) == 1


def test_files_of_others_in_the_folder_are_left_alone(cabinet: Cabinet) -> None:
    store = cabinet.open()
    keep(store, FIRST)
    (inside,) = cabinet.folder.glob("kv-*")
    precious = [
        cabinet.folder / "notes.txt",
        cabinet.folder / "photos" / "cat.jpg",
        inside / "0123456789abcdef.kv.bak",
        cabinet.folder / f"kv-{'a' * 16}" / "letter.txt",
    ]
    for file in precious:
        file.parent.mkdir(exist_ok=True)
        file.write_text("precious")
    store = cabinet.open()
    store = cabinet.open(seal=replace(SEAL, model="another"))
    assert [file.read_text() for file in precious] == ["precious"] * 4
    assert store.entries() == []


def test_an_interrupted_write_leaves_nothing_behind(cabinet: Cabinet) -> None:
    store = cabinet.open()
    store.reserve().write_bytes(b"the engine died here")
    orphan = keep(store, FIRST)
    orphan.manifest.rename(orphan.manifest.with_suffix(".json.tmp"))  # the power went here
    store = cabinet.open()
    assert store.entries() == []
    assert cabinet.files() == []


def test_of_two_caches_of_a_name_the_newer_one_counts(cabinet: Cabinet) -> None:
    store = cabinet.open()
    old = keep(store, FIRST, name="mine")
    saved = {file: file.read_bytes() for file in (old.path, old.manifest)}
    new = keep(store, SECOND, name="mine")
    for file, content in saved.items():  # as if the process had died before it removed them
        file.write_bytes(content)
    store = cabinet.open()
    assert [entry.id for entry in store.entries()] == [new.id]
    assert cabinet.files() == ["json", "kv"]


def test_only_one_process_uses_a_folder(cabinet: Cabinet) -> None:
    cabinet.open()
    code = (
        "import sys; from pathlib import Path\n"
        "from rkserve.board.storage.prompt_cache import CacheFingerprint, CacheStore\n"
        "CacheStore(Path(sys.argv[1]), CacheFingerprint('m', '1.3.0'), 1).open()\n"
    )
    command = [sys.executable, "-c", code, str(cabinet.folder)]
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "ConfigError" in second.stderr
    assert "is used by another process" in second.stderr
    cabinet.close()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


# -- hostile files --------------------------------------------------------------------------------


def edited(entry: CachedFile, **changes: object) -> None:
    """Change what a manifest says, and make its digest fit again."""
    body = json.loads(entry.manifest.read_bytes())
    del body["manifest_sha256"]
    body |= changes
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    entry.manifest.write_text(json.dumps(body | {"manifest_sha256": digest}))


def in_place(entry: CachedFile) -> None:
    """One bit flips, and no time says so."""
    times = entry.path.stat()
    data = bytearray(entry.path.read_bytes())
    data[500] ^= 1
    entry.path.write_bytes(data)
    os.utime(entry.path, ns=(times.st_atime_ns, times.st_mtime_ns))


def linked(entry: CachedFile) -> None:
    target = entry.path.rename(entry.path.parent.parent / "elsewhere")
    entry.path.symlink_to(target)


def folder_instead(entry: CachedFile) -> None:
    entry.path.unlink()
    entry.path.mkdir()


def pipe_instead(entry: CachedFile) -> None:
    entry.path.unlink()
    os.mkfifo(entry.path)


DAMAGE_OF_THE_FILE = [
    pytest.param(in_place, id="a flipped bit"),
    pytest.param(lambda e: os.truncate(e.path, 999), id="truncated"),
    pytest.param(lambda e: os.truncate(e.path, 0), id="emptied"),
    pytest.param(lambda e: e.path.write_bytes(e.path.read_bytes() + b"x"), id="longer"),
    pytest.param(lambda e: e.path.write_bytes(os.urandom(1000)), id="another content"),
    pytest.param(lambda e: e.path.unlink(), id="gone"),
    pytest.param(linked, id="a link to the very content"),
    pytest.param(
        lambda e: os.link(e.path, e.path.parent.parent / "two"), id="a second name of the file"
    ),
    pytest.param(folder_instead, id="a folder"),
    pytest.param(pipe_instead, id="a pipe, which would never end"),
]


@pytest.mark.parametrize("damage", DAMAGE_OF_THE_FILE)
@pytest.mark.parametrize("restart", [False, True], ids=["while it is open", "before a restart"])
def test_a_damaged_file_is_a_miss_and_the_others_are_found(
    cabinet: Cabinet, damage: Callable[[CachedFile], object], restart: bool
) -> None:
    store = cabinet.open()
    keep(store, (1, 2, 9))
    bad = keep(store, SECOND, name="mine")
    assert store.verify(bad)
    damage(bad)
    if restart:
        store = cabinet.open()
    hit = store.find(SECOND, None)
    if hit is not None and hit.entry.id == bad.id:
        assert not store.verify(hit.entry)
        hit = store.find(SECOND, None)
    assert hit is not None
    assert (hit.entry.ids, hit.tokens) == ((1, 2, 9), 2)
    assert store.verify(hit.entry)
    assert store.find(SECOND, None, name="mine") is None
    assert not bad.manifest.exists()
    assert not bad.path.is_file()


def test_swapped_files_are_misses(cabinet: Cabinet) -> None:
    store = cabinet.open()
    one, two = keep(store, FIRST), keep(store, OTHER)
    spare = one.path.rename(one.path.parent / "spare")
    two.path.rename(one.path)
    spare.rename(two.path)
    store = cabinet.open()
    assert [store.verify(entry) for entry in store.entries()] == [False, False]
    assert cabinet.files() == []


def test_swapped_manifests_are_misses(cabinet: Cabinet) -> None:
    store = cabinet.open()
    one, two = keep(store, FIRST), keep(store, OTHER)
    first, second = one.manifest.read_bytes(), two.manifest.read_bytes()
    one.manifest.write_bytes(second)
    two.manifest.write_bytes(first)
    assert cabinet.open().entries() == []
    assert cabinet.files() == []


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"{", id="no JSON"),
        pytest.param(b"[]", id="a list"),
        pytest.param(b"null", id="null"),
        pytest.param(b"{}", id="an empty object"),
        pytest.param(b'{"manifest_sha256": 1}', id="a digest of nothing"),
        pytest.param(b"\xff\xfe\x00", id="no text"),
        pytest.param(b"[" * 100_000, id="nested without end"),
    ],
)
def test_an_unreadable_manifest_is_a_miss(cabinet: Cabinet, content: bytes) -> None:
    bad = keep(cabinet.open())
    bad.manifest.write_bytes(content)
    store = cabinet.open()
    assert store.find(SECOND, None) is None
    assert cabinet.files() == []


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(lambda said: said.replace(b"[1, 2, 3, 4]", b"[1, 2, 3, 5]"), id="one id"),
        pytest.param(lambda said: said + b" " * (2 << 20), id="larger than any of ours"),
    ],
)
def test_a_manifest_that_can_still_be_read_is_a_miss_if_it_was_damaged(
    cabinet: Cabinet, damage: Callable[[bytes], bytes]
) -> None:
    bad = keep(cabinet.open())
    said = bad.manifest.read_bytes()
    assert damage(said) != said
    bad.manifest.write_bytes(damage(said))
    assert cabinet.open().find(SECOND, None) is None
    assert cabinet.files() == []


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"version": 3}, id="a later version"),
        pytest.param({"version": 1}, id="one that knew no salt"),
        pytest.param({"version": None}, id="no version"),
        pytest.param({"seal": "0" * 64}, id="a foreign seal"),
        pytest.param({"id": "0" * 16}, id="another id"),
        pytest.param({"name": 7}, id="a name that is none"),
        pytest.param({"name": "../../etc"}, id="a name that climbs"),
        pytest.param({"origin": []}, id="an origin that is none"),
        pytest.param({"ids": None}, id="no ids"),
        pytest.param({"ids": "1234"}, id="ids in letters"),
        pytest.param({"ids": [1, 2, "3"]}, id="an id in letters"),
        pytest.param({"ids": [1, [2], 3]}, id="ids within ids"),
        pytest.param({"file_bytes": 999}, id="another size"),
        pytest.param({"file_bytes": None}, id="no size"),
        pytest.param({"sha256": 5}, id="a digest that is none"),
        pytest.param({"created_s": "now"}, id="a time in letters"),
        pytest.param({"created_s": float("nan")}, id="no time at all"),
    ],
)
def test_a_forged_manifest_is_a_miss(cabinet: Cabinet, changes: dict[str, object]) -> None:
    edited(keep(cabinet.open()), **changes)
    store = cabinet.open()
    assert store.find(SECOND, None) is None
    assert cabinet.files() == []


def test_a_forged_digest_is_a_miss_when_the_file_is_read(cabinet: Cabinet) -> None:
    edited(keep(cabinet.open()), sha256="0" * 64)
    store = cabinet.open()
    hit = store.find(SECOND, None)
    assert hit is not None
    assert not store.verify(hit.entry)
    assert cabinet.files() == []


def test_a_manifest_that_links_elsewhere_is_a_miss_and_the_target_is_unharmed(
    cabinet: Cabinet,
) -> None:
    entry = keep(cabinet.open())
    target = entry.manifest.rename(cabinet.folder / "elsewhere.json")
    entry.manifest.symlink_to(target)
    assert cabinet.open().entries() == []
    assert target.exists()


def test_a_seal_s_folder_that_links_elsewhere_is_refused(cabinet: Cabinet, tmp_path: Path) -> None:
    entry = keep(cabinet.open())
    elsewhere = entry.path.parent.rename(tmp_path / "elsewhere")
    entry.path.parent.symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="is a link"):
        cabinet.open()
    assert (elsewhere / entry.path.name).exists()


def test_a_foreign_seal_s_folder_that_links_elsewhere_is_not_emptied(
    cabinet: Cabinet, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    precious = tmp_path / "elsewhere" / f"{'a' * 16}.kv"
    precious.write_text("precious")
    cabinet.folder.mkdir()
    (cabinet.folder / f"kv-{'b' * 16}").symlink_to(tmp_path / "elsewhere")
    cabinet.open()
    assert precious.exists()


def test_what_people_wrote_is_readable_for_the_owner_only(cabinet: Cabinet) -> None:
    entry = keep(cabinet.open())
    modes = [path.stat().st_mode & 0o777 for path in (entry.path, entry.manifest)]
    assert modes == [0o600, 0o600]
    assert entry.path.parent.stat().st_mode & 0o777 == 0o700
    entry.path.parent.chmod(0o755)
    cabinet.open()
    assert entry.path.parent.stat().st_mode & 0o777 == 0o700


# -- a disk that refuses --------------------------------------------------------------------------


@contextmanager
def disk_full_after(size: int) -> Iterator[None]:
    """Have the kernel refuse to let a file of this process grow beyond ``size``."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_refuses_a_cache_and_keeps_those_that_there_are(cabinet: Cabinet) -> None:
    store = cabinet.open()
    keep(store, FIRST, name="mine")
    path = store.reserve()
    path.write_bytes(os.urandom(1000))
    with (
        disk_full_after(100),
        pytest.raises(CacheUnsupported, match="cannot be written on this board: File too large"),
    ):
        store.commit(path, OTHER, "mine")
    assert kept(store) == {("mine", FIRST)}
    assert cabinet.files() == ["json", "kv"]
    assert kept(cabinet.open()) == {("mine", FIRST)}


def test_a_folder_that_went_away_refuses_a_cache(cabinet: Cabinet) -> None:
    store = cabinet.open()
    entry = keep(store)
    for file in (entry.path, entry.manifest):
        file.unlink()
    entry.path.parent.rmdir()
    entry.path.parent.write_text("a file instead")
    with pytest.raises(CacheUnsupported, match="cannot be written"):
        store.reserve()
    assert not store.verify(entry)


@pytest.mark.parametrize(
    ("write", "words"),
    [
        pytest.param(lambda path: path.parent, "is missing", id="nothing"),
        pytest.param(lambda path: path.touch(), "the file is empty", id="an empty file"),
        pytest.param(lambda path: path.symlink_to("/etc/passwd"), "plain file", id="a link"),
        pytest.param(lambda path: path.mkdir(), "plain file", id="a folder"),
    ],
)
def test_a_runtime_that_writes_no_file_is_told(
    cabinet: Cabinet, write: Callable[[Path], object], words: str
) -> None:
    store = cabinet.open()
    path = store.reserve()
    write(path)
    with pytest.raises(CacheUnsupported, match=f"The runtime wrote no prompt cache: .*{words}"):
        store.commit(path, FIRST)
    assert store.entries() == []


def test_only_a_reserved_file_is_taken(cabinet: Cabinet, tmp_path: Path) -> None:
    store = cabinet.open()
    foreign = tmp_path / f"{'a' * 16}.kv.tmp"
    foreign.write_text("precious")
    for use in (lambda path: store.commit(path, FIRST), store.abandon):
        for path in (foreign, keep(store).path, cabinet.folder / "lock"):
            with pytest.raises(ValueError, match="was not reserved"):
                use(path)
            assert path.exists()


def test_a_folder_that_cannot_be_made_is_an_error_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"prompt caches .* cannot be used: Not a directory"):
        CacheStore(tmp_path / "file" / "caches", SEAL, 1).open()


def test_a_cache_that_is_deleted_while_it_is_read_is_a_miss(tmp_path: Path) -> None:
    now: list[Callable[[], object]] = []

    def clock() -> float:
        for happens in now:
            happens()
        return 1.0

    store = CacheStore(tmp_path, SEAL, 10_000, clock=clock)
    store.open()
    mine = keep(store, name="mine")
    now.append(lambda: store.delete("mine"))
    assert not store.verify(mine)
    assert store.entries() == []
    store.close()


def test_a_file_that_is_still_written_to_is_not_published(tmp_path: Path) -> None:
    files = CacheFolder(tmp_path, SEAL)
    assert files.open() == []
    path = files.reserve("a" * 16)
    path.write_bytes(b"x" * 100)
    written = files.examine(path)
    path.write_bytes(b"y" * 100)
    entry = CachedFile(
        "a" * 16, path.with_suffix(""), None, None, FIRST, 100, written.sha256, 1.0, 1.0
    )
    with pytest.raises(OSError, match="was changed while it was published"):
        files.publish(path, entry, written)
    files.close()
    assert [file.name for file in tmp_path.glob("kv-*/*")] == []


def test_calls_from_several_threads_leave_files_and_entries_in_step(cabinet: Cabinet) -> None:
    store = cabinet.open(budget_bytes=3000)

    def work(n: int) -> int:
        for turn in range(25):
            name = "mine" if (n + turn) % 4 == 0 else None
            keep(store, (n, turn % 3, turn), name=name, size=200 + turn)
            hit = store.find((n, turn % 3, turn, 1), None)
            if hit is not None:
                store.verify(hit.entry)
            if turn % 10 == 9:
                store.delete("mine")
        return n

    with ThreadPoolExecutor(4) as threads:
        assert sorted(threads.map(work, range(4))) == [0, 1, 2, 3]
    on_disk = {file.stem for file in cabinet.folder.glob("kv-*/*.kv")}
    assert on_disk == {entry.id for entry in store.entries()}
    assert cabinet.files() == ["json"] * len(on_disk) + ["kv"] * len(on_disk)
    assert all(store.verify(entry) for entry in store.entries())


# -- the disk -------------------------------------------------------------------------------------

GIB = 1 << 30


@pytest.mark.parametrize(
    ("kind", "total", "free", "used", "limit"),
    [
        pytest.param("ext4", 100 * GIB, 50 * GIB, 0, 2 * GIB, id="room"),
        pytest.param("ext4", 16 * GIB, 1 * GIB, 0, GIB - (16 * GIB) // 20, id="little room"),
        pytest.param("ext4", 16 * GIB, GIB // 8, 0, 0, id="none"),
        pytest.param("ext4", 16 * GIB, GIB, GIB, 2 * GIB - (16 * GIB) // 20, id="own files count"),
        pytest.param("tmpfs", 4 * GIB, 4 * GIB, 0, GIB // 4, id="in memory"),
        pytest.param("ramfs", 0, 0, 0, 0, id="in memory of no known size"),
    ],
)
def test_the_budget_is_limited_to_the_room_there_is(
    kind: str, total: int, free: int, used: int, limit: int
) -> None:
    assert FolderSpace(kind, total, free).limit(2 * GIB, used) == limit


def test_a_folder_in_memory_is_limited_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CacheFolder, "space", lambda _: FolderSpace("tmpfs", 16 << 20, 16 << 20))
    store = CacheStore(tmp_path / "kv", CacheFingerprint("m", "r"), 2 * GIB)
    store.open()
    assert store.budget_bytes == 1 << 20
    assert "limited to 1 MiB instead of 2048 MiB" in caplog.text
    assert "in memory (tmpfs): set prompt_cache.folder to a disk" in caplog.text
    store.close()


def test_the_folder_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    store = CacheStore(tmp_path / "kv", CacheFingerprint("m", "r"), GIB)
    store.open()
    before = sorted(path.name for path in (tmp_path / "kv").iterdir())
    written, read = store.measure()
    assert min(written, read) > 1e5
    assert sorted(path.name for path in (tmp_path / "kv").iterdir()) == before
    store.close()


def test_the_file_system_of_a_folder_is_that_of_the_nearest_mount() -> None:
    assert _file_system(Path("/proc/self")) == "proc"
    assert _file_system(Path("/")) not in {"", "proc"}
