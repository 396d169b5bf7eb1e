"""Chains of token blocks: equal links mean equal beginnings, and nothing gets lost on the way."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.core.block_hashes import (
    BLOCK,
    STRIDE,
    BlockHashes,
    CachedPrefixes,
    FilePrefix,
    LivePrefix,
    adapter_of,
    origin_of,
    owned,
    pack,
    salted,
    seed_of,
    unpack,
)
from rkserve.core.messages import AdapterRef

SEED = seed_of(None)
IDS = st.lists(st.integers(0, 200_000), max_size=5 * BLOCK).map(tuple)


@given(IDS, IDS)
def test_links_agree_exactly_as_far_as_whole_blocks_do(
    one: tuple[int, ...], two: tuple[int, ...]
) -> None:
    chains = BlockHashes(one, SEED), BlockHashes(one[: len(one) // 2] + two, SEED)
    same = 0
    while (
        same < min(len(chains[0].links), len(chains[1].links))
        and chains[0].ids[: (same + 1) * BLOCK] == chains[1].ids[: (same + 1) * BLOCK]
    ):
        same += 1
    agree = [a == b for a, b in zip(chains[0].links, chains[1].links, strict=False)]
    assert agree == [True] * same + [False] * (len(agree) - same)


@given(IDS, IDS)
def test_a_chain_that_is_extended_is_the_chain_of_all_ids(
    begin: tuple[int, ...], more: tuple[int, ...]
) -> None:
    extended, whole = BlockHashes(begin, SEED).extended(more), BlockHashes(begin + more, SEED)
    assert (extended.ids, extended.links) == (whole.ids, whole.links)
    assert extended.tail(len(begin)) == BlockHashes(begin, SEED).tail(len(begin))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(seed_of("kind@v1-0123456789ab-1"), id="an adapter"),
        pytest.param(seed_of(origin_of(None, salted("tenant"))), id="a salt"),
        pytest.param(seed_of("kind@v1-0123456789ab-0.5"), id="another scale of it"),
    ],
)
def test_under_another_key_no_link_agrees(other: int) -> None:
    ids = tuple(range(3 * BLOCK))
    assert not set(BlockHashes(ids, SEED).links) & set(BlockHashes(ids, other).links)
    assert BlockHashes(ids, SEED).tail(5) != BlockHashes(ids, other).tail(5)


@pytest.mark.parametrize(
    ("tokens", "blocks"),
    [
        pytest.param(BLOCK - 1, [], id="not one block"),
        pytest.param(BLOCK, [1], id="one block"),
        pytest.param(STRIDE * BLOCK, [STRIDE], id="exactly one stride"),
        pytest.param((STRIDE + 1) * BLOCK + 5, [STRIDE, STRIDE + 1], id="a stride and more"),
        pytest.param(2 * STRIDE * BLOCK, [STRIDE, 2 * STRIDE], id="exactly two"),
    ],
)
def test_marks_are_every_stride_and_the_last(tokens: int, blocks: list[int]) -> None:
    chain = BlockHashes(tuple(range(tokens)), SEED)
    assert chain.marks == tuple(chain.links[at - 1] for at in blocks)


@given(st.lists(IDS, max_size=4), IDS, st.booleans(), st.booleans(), st.integers(0, 4096))
def test_what_is_packed_comes_out(
    files: list[tuple[int, ...]], live: tuple[int, ...], appends: bool, prefix: bool, park_min: int
) -> None:
    held = tuple(
        FilePrefix(len(ids), BlockHashes(ids, SEED).marks) for ids in files if len(ids) >= BLOCK
    )
    lives = LivePrefix.of(BlockHashes(live, SEED), dense=prefix) if live else None
    holdings = CachedPrefixes(appends, park_min, lives, held, prefix)
    assert unpack(pack(holdings)) == holdings


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"\0" * 80, id="another hash"),
        pytest.param(
            pack(CachedPrefixes(True, 256, None, (FilePrefix(64, (1, 2)),)))[:-3], id="cut off"
        ),
    ],
)
def test_what_nobody_packed_here_is_not_believed(data: bytes) -> None:
    assert unpack(data) is None


def test_other_processes_hash_alike() -> None:
    code = (
        "from rkserve.core.block_hashes import BlockHashes, SCHEME, seed_of;"
        "print(SCHEME, BlockHashes(tuple(range(70)), seed_of('a@1')).links)"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1


ADAPTERS = (None, AdapterRef("kind", "1", "1" * 64).key, AdapterRef("kind", "1", "1" * 64, 1e9).key)
SALTS = ("", salted("a"), salted("b"), salted(""), salted("\ud800"))


def test_two_of_them_agree_only_where_adapter_and_salt_do() -> None:
    pairs = list(itertools.product(ADAPTERS, SALTS))
    assert len({origin_of(*pair) for pair in pairs}) == len(pairs)


def test_the_salts_of_callers_are_their_own() -> None:
    made = [owned(caller, salt) for caller in ("a", "b", "a#b") for salt in SALTS]
    assert len({*made, *SALTS}) == len(made) + len(SALTS)


def test_an_origin_tells_its_adapter_and_without_a_salt_is_its_key() -> None:
    for adapter, salt in itertools.product(ADAPTERS, SALTS):
        assert adapter_of(origin_of(adapter, salt)) == adapter
    assert [origin_of(adapter) for adapter in ADAPTERS] == [*ADAPTERS]


def test_what_stands_for_a_salt_does_not_show_it() -> None:
    assert "tenant" not in salted("tenant")
    assert salted("tenant") == salted("tenant")
