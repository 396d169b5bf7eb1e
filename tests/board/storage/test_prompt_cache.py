"""Prompt cache files: what helps a prompt, what goes, and that a hostile file is only a miss."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from rkserve.board.answer.kv_plan import Ids
from rkserve.board.storage.cache_files import CacheFolder
from rkserve.board.storage.prompt_cache import CachedFile, CacheFingerprint, CacheStore
from rkserve.core.errors import CacheUnsupported, ConfigError, RequestError
from rkserve.core.name_rules import check_cache_name

SEAL = CacheFingerprint(
    model="m" * 64, release="1.3.0", template="t", tokenizer="k", load="ctx4096"
)
FIRST = (1, 2, 3, 4)
SECOND = (*FIRST, 5, 6)
OTHER = (9, 8, 7)


class Clock:
    """A time of day that goes on when it is told to, a second with every look."""

    def __init__(self) -> None:
        self.now_s = 1_000_000.0

    def __call__(self) -> float:
        self.now_s += 1
        return self.now_s


class Cabinet:
    """A folder with stores opened on it one after the other, as by one process after another."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        self._open: CacheStore | None = None

    def open(self, budget_bytes: int = 10_000, seal: CacheFingerprint = SEAL) -> CacheStore:
        self.close()
        self._open = CacheStore(self.folder, seal, budget_bytes, clock=self.clock)
        self._open.open()
        return self._open

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def files(self) -> list[str]:
        """The suffixes of all files of the store's, and nothing of its lock."""
        return sorted(file.name.partition(".")[2] for file in self.folder.glob("kv-*/*"))


@pytest.fixture
def cabinet(tmp_path: Path) -> Iterator[Cabinet]:
    made = Cabinet(tmp_path / "caches")
    yield made
    made.close()


def keep(
    store: CacheStore,
    ids: Ids = FIRST,
    *,
    name: str | None = None,
    adapter: str | None = None,
    size: int = 1000,
) -> CachedFile:
    """Do as the runtime does, and then as the board does."""
    path = store.reserve()
    path.write_bytes(os.urandom(size))
    return store.commit(path, ids, name, adapter)


def kept(store: CacheStore) -> set[tuple[str | None, Ids]]:
    return {(entry.name, entry.ids) for entry in store.entries()}


# -- finding --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        pytest.param((*FIRST, 5, 6), 4, id="the conversation goes on"),
        pytest.param((1, 2, 9), 2, id="only its beginning is the same"),
        pytest.param(FIRST, 3, id="the same ids: one is always computed"),
        pytest.param((1, 2), 1, id="a shorter one"),
        pytest.param((9, 2, 3), None, id="nothing in common"),
        pytest.param((1,), None, id="a single id: nothing would be saved"),
        pytest.param((), None, id="no ids"),
    ],
)
def test_a_prompt_finds_what_begins_as_it_does(
    cabinet: Cabinet, prompt: Ids, tokens: int | None
) -> None:
    store = cabinet.open()
    entry = keep(store)
    hit = store.find(prompt, None)
    assert (None if hit is None else hit.tokens) == tokens
    if hit is not None:
        assert (hit.entry, hit.path) == (entry, entry.path)
        assert store.verify(hit.entry)


def test_the_entry_that_saves_most_is_found(cabinet: Cabinet) -> None:
    store = cabinet.open()
    keep(store, (1, 2))
    best = keep(store, (1, 2, 3, 4, 8))
    keep(store, (1, 2, 3, 9))
    hit = store.find((1, 2, 3, 4, 5), None)
    assert hit is not None
    assert (hit.entry, hit.tokens) == (best, 4)


@pytest.mark.parametrize(
    ("built", "asked"),
    [
        pytest.param(None, "legal@2-abc-1", id="of the base model, for an adapter"),
        pytest.param("legal@2-abc-1", None, id="of an adapter, for the base model"),
        pytest.param("legal@2-abc-1", "legal@2-def-1", id="of an adapter of another content"),
    ],
)
def test_positions_of_another_adapter_are_never_found(
    cabinet: Cabinet, built: str | None, asked: str | None
) -> None:
    store = cabinet.open()
    keep(store, FIRST, adapter=built)
    keep(store, OTHER, name="mine", adapter=built)
    assert store.find(SECOND, asked) is None
    assert not store.holds(FIRST, asked)
    assert store.holds(FIRST, built)
    with pytest.raises(RequestError, match=r"'mine' was made with .* cannot be used with") as no:
        store.find(OTHER, asked, name="mine")
    assert no.value.param == "use_cache"


def test_a_cache_is_found_by_its_name_however_little_it_saves(cabinet: Cabinet) -> None:
    store = cabinet.open()
    keep(store, SECOND)
    mine = keep(store, FIRST, name="mine")
    for prompt, tokens in ((SECOND, 4), (OTHER, 0)):
        hit = store.find(prompt, None, name="mine")
        assert hit is not None
        assert (hit.entry, hit.tokens) == (mine, tokens)
    assert store.find(FIRST, None, name="yours") is None


def test_what_an_entry_covers_need_not_be_stored_again(cabinet: Cabinet) -> None:
    store = cabinet.open()
    keep(store, SECOND)
    assert store.holds(FIRST, None)
    assert store.holds(SECOND, None)
    assert not store.holds((*SECOND, 7), None)
    assert not store.holds(OTHER, None)


# -- keeping --------------------------------------------------------------------------------------


def test_a_parked_conversation_is_replaced_by_its_sequel(cabinet: Cabinet) -> None:
    store = cabinet.open()
    keep(store, FIRST)
    keep(store, FIRST, adapter="a")
    keep(store, (1, 2, 9))
    keep(store, FIRST, name="mine")
    keep(store, SECOND)
    assert kept(store) == {
        (None, SECOND),
        (None, FIRST),  # of the adapter
        (None, (1, 2, 9)),
        ("mine", FIRST),
    }
    assert len(cabinet.files()) == 2 * 4


def test_a_named_cache_is_replaced_by_one_of_its_name(cabinet: Cabinet) -> None:
    store = cabinet.open()
    store.pin(keep(store, FIRST, name="mine"))
    new = keep(store, OTHER, name="mine", adapter="a")
    assert store.entries() == [new]
    assert cabinet.files() == ["json", "kv"]


def test_the_longest_unused_parked_conversation_goes_first_and_named_ones_stay(
    cabinet: Cabinet,
) -> None:
    store = cabinet.open(budget_bytes=4000)
    keep(store, (10, 1), name="mine")
    old, used = keep(store, (11, 1)), keep(store, (12, 1))
    keep(store, (13, 1))
    assert store.verify(old)
    keep(store, (14, 1))
    assert kept(store) == {("mine", (10, 1)), (None, (11, 1)), (None, (13, 1)), (None, (14, 1))}
    assert not used.path.exists()
    assert store.used_bytes == 4000
    keep(store, (15, 1), size=3000)
    assert kept(store) == {("mine", (10, 1)), (None, (15, 1))}
    assert len(cabinet.files()) == 2 * 2


def test_what_the_runtime_has_loaded_is_spared_until_it_is_replaced(cabinet: Cabinet) -> None:
    store = cabinet.open(budget_bytes=2000)
    loaded = keep(store, FIRST)
    store.pin(loaded)
    keep(store, OTHER)
    sequel = keep(store, SECOND)
    assert kept(store) == {(None, FIRST), (None, SECOND)}
    assert loaded.path.exists()
    store.pin(sequel)
    keep(store, (*SECOND, 7))
    assert not loaded.path.exists(), "it was let go of, and is the beginning of what came"
    assert sequel.path.exists()


@pytest.mark.parametrize("name", [None, "mine"], ids=["parked", "named"])
def test_what_does_not_fit_beside_the_named_ones_is_refused_with_the_numbers(
    cabinet: Cabinet, name: str | None
) -> None:
    store = cabinet.open(budget_bytes=3000)
    keep(store, OTHER, name="other", size=2000)
    keep(store, (5, 5), size=1000)
    with pytest.raises(CacheUnsupported, match=r"1001 bytes .* 3000 bytes, .* take 2000"):
        keep(store, FIRST, name=name, size=1001)
    with pytest.raises(CacheUnsupported, match="1001 bytes"):
        store.reserve(expected_bytes=1001)
    assert kept(store) == {("other", OTHER), (None, (5, 5))}
    assert len(cabinet.files()) == 2 * 2


def test_a_named_cache_may_take_the_place_of_the_one_that_it_replaces(cabinet: Cabinet) -> None:
    store = cabinet.open(budget_bytes=3000)
    keep(store, FIRST, name="mine", size=2000)
    path = store.reserve(expected_bytes=2500, name="mine")
    path.write_bytes(b"x" * 2500)
    store.commit(path, SECOND, "mine")
    assert kept(store) == {("mine", SECOND)}
    assert store.used_bytes == 2500


def test_room_is_made_before_the_runtime_writes(cabinet: Cabinet) -> None:
    store = cabinet.open(budget_bytes=2000)
    keep(store, FIRST)
    keep(store, OTHER)
    store.reserve(expected_bytes=1500)
    assert store.entries() == []
    assert cabinet.files() == []


def test_what_was_abandoned_leaves_nothing(cabinet: Cabinet) -> None:
    store = cabinet.open()
    path = store.reserve()
    store.abandon(path)
    path.write_bytes(b"half")
    store.abandon(path)
    assert cabinet.files() == []


def test_a_cache_is_deleted_by_its_name_and_no_parked_one_with_it(cabinet: Cabinet) -> None:
    store = cabinet.open()
    mine = keep(store, FIRST, name="mine")
    keep(store, OTHER)
    assert store.delete("mine")
    assert not store.delete("mine")
    assert not store.delete("../lock")
    assert kept(store) == {(None, OTHER)}
    assert not store.verify(mine), "it was found before it was deleted"
    assert len(cabinet.files()) == 2


@pytest.mark.parametrize("name", ["a", "A-1_b.c", "9", "x" * 64])
def test_a_name_of_letters_digits_dots_and_dashes_is_one(name: str) -> None:
    assert check_cache_name(name) == name


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/etc/passwd", "a/b", "a\\b", "a\n", "a\0", " a", "é", "x" * 65]
)
def test_no_other_name_gets_near_the_disk(cabinet: Cabinet, name: str) -> None:
    store = cabinet.open()
    with pytest.raises(RequestError, match=r"'cache_name'.* at most 64 letters") as refused:
        keep(store, name=name)
    assert refused.value.param == "cache_name"
    assert store.entries() == []
    assert cabinet.files() == []


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


# -- other base weights ---------------------------------------------------------------------------

BASE = "b" * 64


def test_what_other_weights_have_computed_is_not_found_and_named_caches_wait_for_them(
    cabinet: Cabinet,
) -> None:
    store = cabinet.open()
    keep(store, FIRST, name="mine")
    keep(store, OTHER)
    store.reseal(BASE)
    assert store.entries() == []
    assert store.find((*FIRST, 5), None) is None
    keep(store, FIRST, name="mine")
    keep(store, (*FIRST, 7))
    store.reseal("")
    assert kept(store) == {("mine", FIRST)}  # what was parked is gone
    assert all(store.verify(entry) for entry in store.entries())
    store.reseal("")
    assert kept(store) == {("mine", FIRST)}
    store.reseal(BASE)
    assert kept(store) == {("mine", FIRST)}


def test_a_store_can_be_sealed_before_it_is_opened(cabinet: Cabinet) -> None:
    store = cabinet.open()
    store.reseal(BASE)
    keep(store, FIRST, name="mine")
    cabinet.close()
    after = CacheStore(cabinet.folder, SEAL, 10_000)
    after.reseal(BASE)
    after.open()
    assert kept(after) == {("mine", FIRST)}
    after.close()
    assert kept(cabinet.open()) == set()  # and it goes with a start under other weights
    assert cabinet.files() == []


def test_caches_that_wait_for_their_weights_take_their_part_of_the_budget(
    cabinet: Cabinet,
) -> None:
    store = cabinet.open(budget_bytes=10_000)
    keep(store, FIRST, name="mine", size=6000)
    store.reseal(BASE)
    with pytest.raises(CacheUnsupported, match="does not fit"):
        keep(store, FIRST, name="large", size=4500)
    keep(store, FIRST, size=2000)
    keep(store, OTHER, size=1900)
    assert kept(store) == {(None, OTHER)}
    store.reseal("")
    keep(store, FIRST, name="mine", size=9500)


def test_a_file_that_was_begun_under_other_weights_is_never_published(cabinet: Cabinet) -> None:
    store = cabinet.open()
    paths = [store.reserve(), store.reserve()]
    for path in paths:
        path.write_bytes(b"x" * 100)
    store.reseal(BASE)
    with pytest.raises(CacheUnsupported, match="were replaced"):
        store.commit(paths[0], FIRST)
    store.abandon(paths[1])
    assert (store.entries(), cabinet.files()) == ([], [])


# -- whatever happens -----------------------------------------------------------------------------

CONVERSATIONS = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(tuple)
KEEPING = st.tuples(
    CONVERSATIONS,
    st.sampled_from([None, None, "mine", "yours"]),
    st.sampled_from([None, "a"]),
    st.integers(1, 300),
)


@settings(deadline=None)  # disks take what they take
@given(steps=st.lists(KEEPING, max_size=12), prompt=CONVERSATIONS)
def test_what_is_found_begins_as_the_prompt_does_and_the_budget_holds(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[Ids, str | None, str | None, int]],
    prompt: Ids,
) -> None:
    cabinet = Cabinet(tmp_path_factory.mktemp("caches"))
    store = cabinet.open(budget_bytes=1000)
    for ids, name, adapter, size in steps:
        keep(store, ids, name=name, adapter=adapter, size=size)
        assert store.used_bytes <= 1000
    before = store.entries()
    assert cabinet.open(budget_bytes=1000).entries() == before
    cabinet.close()
    for adapter in (None, "a"):
        hit = store.find(prompt, adapter)
        if hit is None:
            begins = {entry.ids[0] for entry in before if entry.origin == adapter}
            assert prompt[0] not in begins or len(prompt) == 1
        else:
            assert hit.entry.ids[: hit.tokens] == prompt[: hit.tokens]
            assert hit.entry.origin == adapter
            assert 0 < hit.tokens < len(prompt)
