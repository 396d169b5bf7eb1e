"""Prompt cache files: what helps a prompt, what goes, and that a hostile file is only a miss."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rkserve.board.answer.transcript import Ids
from rkserve.board.storage.prompt_cache import CacheStore
from rkserve.core.errors import CacheUnsupported, RequestError
from rkserve.core.files import check_cache_name
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
