"""What a Router knows of what boards hold, against the rules of a board written down plainly."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rkserve.core.block_hashes import (
    BLOCK,
    STRIDE,
    BlockHashes,
    CachedPrefixes,
    FilePrefix,
    LivePrefix,
    seed_of,
)
from rkserve.fleet.prefix_index import NOTHING, PrefixIndex, Reuse

Ids = tuple[int, ...]
SEEDS = (seed_of(None), seed_of("kind@v1"))
PARK_MIN = 2 * BLOCK
BOARDS, MOST = 3, 4


def marks_of(ids: Ids) -> list[int]:
    """How many tokens lead up to each mark of a file."""
    blocks = len(ids) // BLOCK
    return [*range(STRIDE, blocks, STRIDE), *([blocks] if blocks else [])]


@dataclass
class Plain:
    """One board, by what is written in ``board.opening``: ids and no hashes."""

    prefix: bool = False
    live: tuple[int, Ids] | None = None
    files: list[tuple[int, Ids]] = field(default_factory=list)

    def in_live(self, held: Ids, prompt: Ids) -> int:
        whole = prompt[: len(held)] == held
        if whole and (len(held) < len(prompt) or (self.prefix and len(held) == len(prompt))):
            return len(held)
        most = min(len(held), len(prompt)) // BLOCK if self.prefix else 0
        sizes = range(most * BLOCK, 0, -BLOCK)
        return next((size for size in sizes if held[:size] == prompt[:size]), 0)

    def in_file(self, seed: int, prompt: Ids) -> int:
        spared = [
            min(BLOCK * mark, len(prompt) - 1)
            for of, ids in self.files
            for mark in marks_of(ids)
            if of == seed
            and BLOCK * mark <= len(prompt)
            and ids[: BLOCK * mark] == prompt[: BLOCK * mark]
        ]
        most = max(spared, default=0)
        return most if most >= PARK_MIN else 0

    def reuse(self, seed: int, prompt: Ids) -> Reuse:
        live = 0
        if self.live is not None and self.live[0] == seed:
            live = self.in_live(self.live[1], prompt)
        filed = self.in_file(seed, prompt)
        if filed and filed - live >= PARK_MIN:
            return Reuse(filed)
        return Reuse(live, live=True) if live else NOTHING

    def has(self, seed: int, ids: Ids) -> bool:
        """Whether a file is known to hold all whole blocks of it."""
        whole = ids[: len(ids) // BLOCK * BLOCK]
        return any(
            of == seed and other[: BLOCK * mark] == whole
            for of, other in self.files
            for mark in marks_of(other)
        )

    def keep(self, seed: int, ids: Ids) -> None:
        if len(ids) < PARK_MIN:
            return
        whole = len(ids) // BLOCK * BLOCK
        for at, (of, other) in enumerate(self.files):
            same = len(other) // BLOCK * BLOCK == whole and other[:whole] == ids[:whole]
            if of == seed and same:
                self.files.append(self.files.pop(at))
                return
        beginnings = [ids[: BLOCK * mark] for mark in marks_of(ids)[:-1]]
        self.files = [
            (of, other)
            for of, other in self.files
            if of != seed or other[: len(other) // BLOCK * BLOCK] not in beginnings
        ]
        self.files = [*self.files, (seed, ids)][-MOST:]

    def use(self, seed: int, prompt: Ids) -> None:
        """The file whose end agrees goes to the end of the line, the longest of them."""
        for blocks in range(len(prompt) // BLOCK, 0, -1):
            for at, (of, ids) in enumerate(self.files):
                if (
                    of == seed
                    and len(ids) // BLOCK == blocks
                    and ids[: blocks * BLOCK] == prompt[: blocks * BLOCK]
                ):
                    self.files.append(self.files.pop(at))
                    return


# Words of different lengths, some of them whole blocks: contexts agree often, and end anywhere.
WORDS = [tuple(range(100 * n, 100 * n + size)) for n, size in enumerate((1, 7, 32, 64, 96, 256))]
CONTEXTS = st.lists(st.sampled_from(WORDS), min_size=1, max_size=7).map(lambda w: sum(w, ()))
SLOTS = st.integers(0, BOARDS - 1)
KEYS = st.sampled_from(SEEDS)


class Index(RuleBasedStateMachine):
    """Runs, reports and clears in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(MOST)
        self.plain = [Plain(prefix=slot == 0) for slot in range(BOARDS)]
        self.now_s = 0.0
        for slot, plain in enumerate(self.plain):
            self.index.update(slot, CachedPrefixes(True, PARK_MIN, prefix=plain.prefix), 0.0)

    @rule(slot=SLOTS, seed=KEYS, prompt=CONTEXTS, answer=CONTEXTS, well=st.booleans())
    def run(self, slot: int, seed: int, prompt: Ids, answer: Ids, well: bool) -> None:
        self.now_s += 1
        plain, chain = self.plain[slot], BlockHashes(prompt, seed)
        expected = plain.reuse(seed, prompt)
        assert self.index.began(slot, chain, self.now_s) == expected
        before, plain.live = plain.live, None
        lost = 0 if before is None else len(before[1])
        if expected.live:
            lost = lost - expected.tokens if plain.prefix else 0
        if before is not None and lost >= PARK_MIN and not plain.has(*before):
            plain.keep(*before)
        if expected.tokens and not expected.live:
            plain.use(seed, prompt)
        file = expected.tokens > 0 and not expected.live
        context = chain.extended(answer) if well else None
        self.index.ended(slot, context, self.now_s, from_file=file)
        if context is not None and file and not plain.prefix:
            plain.keep(seed, context.ids)
        elif context is not None:
            plain.live = (seed, context.ids)

    @rule(slot=SLOTS, seed=KEYS, live=st.none() | CONTEXTS, files=st.lists(CONTEXTS, max_size=MOST))
    def report(self, slot: int, seed: int, live: Ids | None, files: list[Ids]) -> None:
        """Something else was done there, such as by another Router."""
        self.now_s += 1
        plain = self.plain[slot]
        plain.live = None if live is None else (seed, live)
        known, plain.files = plain.files, []
        kept = [ids for ids in files if len(ids) >= PARK_MIN]
        wanted = [(seed, ids) for ids in kept]
        plain.files = [one for one in known if _like(one, wanted)]
        for _, ids in wanted:
            plain.keep(seed, ids)
        told = tuple(FilePrefix(len(ids), BlockHashes(ids, seed).marks) for ids in kept)
        dense = plain.prefix
        held = None if live is None else LivePrefix.of(BlockHashes(live, seed), dense=dense)
        told_of = CachedPrefixes(True, PARK_MIN, held, told, dense)
        self.index.update(slot, told_of, self.now_s + 0.5)

    @rule(slot=SLOTS, files=st.booleans())
    def forget(self, slot: int, files: bool) -> None:
        self.index.forget(slot, files=files)
        self.plain[slot].live = None
        if files:
            plain = self.plain[slot]
            plain.files = []
            self.index.update(slot, CachedPrefixes(True, PARK_MIN, prefix=plain.prefix), self.now_s)

    @rule(seed=KEYS, prompt=CONTEXTS)
    def ask(self, seed: int, prompt: Ids) -> None:
        chain = BlockHashes(prompt, seed)
        found = self.index.holders(chain, BOARDS)
        for slot, plain in enumerate(self.plain):
            expected = plain.reuse(seed, prompt)
            assert self.index.reuse(slot, chain) == expected
            assert found.get(slot, NOTHING) == expected
            few = self.index.holders(chain, 1, also=(slot,))
            assert few.get(slot, NOTHING) == expected

    @invariant()
    def bounded(self) -> None:
        assert len(self.index) <= BOARDS * (MOST + 1)
        marks = {
            (of, ids[: mark * BLOCK])
            for plain in self.plain
            for of, ids in plain.files
            for mark in marks_of(ids)
        }
        assert self.index.links == len(marks)


def _like(one: tuple[int, Ids], others: list[tuple[int, Ids]]) -> bool:
    seed, ids = one
    whole = len(ids) // BLOCK * BLOCK
    return any(
        of == seed and len(other) // BLOCK * BLOCK == whole and other[:whole] == ids[:whole]
        for of, other in others
    )


TestIndex = Index.TestCase
TestIndex.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)

SEED = SEEDS[0]
TALK = tuple(range(1000, 1000 + 20 * BLOCK + 5))


def board(
    index: PrefixIndex, slot: int, live: Ids | None = None, *files: Ids, prefix: bool = False
) -> None:
    held = None if live is None else LivePrefix.of(BlockHashes(live, SEED), dense=prefix)
    filed = tuple(FilePrefix(len(ids), BlockHashes(ids, SEED).marks) for ids in files)
    index.update(slot, CachedPrefixes(True, PARK_MIN, held, filed, prefix), 0.0)


@pytest.mark.parametrize(
    ("live", "prompt", "spared"),
    [
        pytest.param(TALK[:10], TALK[:11], 10, id="extended by one"),
        pytest.param(TALK[:333], TALK, 333, id="extended by much"),
        pytest.param(TALK[:10], TALK[:10], 0, id="the same again finds nothing"),
        pytest.param(TALK[:333], TALK[:300], 0, id="of a longer one nothing"),
        pytest.param((*TALK[:333], 7), TALK, 0, id="one token that differs"),
    ],
)
def test_a_live_context_is_of_use_as_a_whole_only(live: Ids, prompt: Ids, spared: int) -> None:
    index = PrefixIndex()
    board(index, 5, live)
    found = index.holders(BlockHashes(prompt, SEED))
    assert found == ({5: Reuse(spared, live=True)} if spared else {})


@pytest.mark.parametrize(
    ("live", "prompt", "spared"),
    [
        pytest.param(TALK[:333], TALK, 333, id="extended"),
        pytest.param(TALK[:333], TALK[:333], 333, id="the same again"),
        pytest.param(TALK[:333], TALK[:300], 9 * BLOCK, id="the blocks of a shorter one"),
        pytest.param((*TALK[:333], 7), TALK, 10 * BLOCK, id="the blocks before a difference"),
        pytest.param((7, *TALK[1:]), TALK, 0, id="another beginning"),
    ],
)
def test_a_live_context_is_of_use_in_part_where_the_runtime_reuses_prefixes(
    live: Ids, prompt: Ids, spared: int
) -> None:
    index = PrefixIndex()
    board(index, 5, live, prefix=True)
    found = index.holders(BlockHashes(prompt, SEED))
    assert found == ({5: Reuse(spared, live=True)} if spared else {})
    assert index.reuse(5, BlockHashes(prompt, SEED)) == (found.get(5) or NOTHING)
    index.forget(5)
    assert index.holders(BlockHashes(prompt, SEED)) == {}


def test_of_a_file_is_used_what_agrees_at_its_marks() -> None:
    index = PrefixIndex()
    board(index, 5, None, TALK)
    other = (*TALK[: 9 * BLOCK], *range(50, 300))
    assert index.holders(BlockHashes(other, SEED)) == {5: Reuse(8 * BLOCK)}
    assert index.holders(BlockHashes((*TALK, 1), SEED)) == {5: Reuse(20 * BLOCK)}


def test_a_report_that_was_asked_for_before_does_not_undo_what_was_sent_since() -> None:
    index = PrefixIndex()
    board(index, 1, TALK[:100])
    index.began(1, BlockHashes(TALK[:300], SEED), 10.0)
    index.update(
        1, CachedPrefixes(True, PARK_MIN, LivePrefix.of(BlockHashes(TALK[:100], SEED))), 9.0
    )
    assert index.holders(BlockHashes(TALK, SEED)) == {}, "the run that goes on has it"
    index.ended(1, BlockHashes(TALK[:350], SEED), 12.0)
    index.update(1, CachedPrefixes(True, PARK_MIN), 11.0)
    assert index.holders(BlockHashes(TALK, SEED)) == {1: Reuse(350, live=True)}
    index.update(1, CachedPrefixes(True, PARK_MIN), 13.0)
    assert index.holders(BlockHashes(TALK, SEED)) == {}


def test_what_is_displaced_is_expected_on_the_disk_until_a_report_says_otherwise() -> None:
    index = PrefixIndex()
    board(index, 1, TALK[:300])
    assert index.began(1, BlockHashes(tuple(range(200)), SEED), 10.0) == NOTHING
    assert index.holders(BlockHashes(TALK, SEED)) == {1: Reuse(288)}
    index.ended(1, None, 11.0)
    index.update(1, CachedPrefixes(True, PARK_MIN), 12.0)
    assert index.holders(BlockHashes(TALK, SEED)) == {}
    assert index.links == 0


@given(st.integers(20, 40))
def test_many_boards_that_hold_one_beginning_are_not_all_looked_at(count: int) -> None:
    index = PrefixIndex()
    for slot in range(count):
        board(index, slot, None, TALK[: 8 * BLOCK])
    chain = BlockHashes(TALK, SEED)
    found = index.holders(chain, 16)
    assert len(found) == 16
    last = count - 1
    assert set(index.holders(chain, 16, also=(0, last))) == {*found, last}
    assert index.reuse(last, chain) == Reuse(8 * BLOCK)
