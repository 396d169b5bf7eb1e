"""What a board reports of its contexts is what a run finds there, and what a Router guesses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from rkserve.core.block_hashes import BLOCK, STRIDE, BlockHashes, CachedPrefixes, seed_of, unpack
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.messages import Delta, Finished
from rkserve.fleet.load import ModelBoards, PauseEffect
from rkserve.fleet.prefix_index import PrefixIndex
from rkserve.router.policies import RoutingRequest
from rkserve.router.queue.reservation import InFlightRequest
from tests.board.run.test_prompt_caching import LENGTH, CacheBench
from tests.support.boards.board_bench import spoken

pytestmark = pytest.mark.virtual_time

SHARED = tuple(range(9000, 9000 + 9 * BLOCK))
LONG = 2048  # of a context on these boards


class Told:
    """A Router's index, by reports or without them."""

    def __init__(self) -> None:
        self.index = PrefixIndex()
        self.boards = ModelBoards(Random(1), self.index)
        self.now_s = 0.0

    def hear(self, bench: CacheBench) -> None:
        self.now_s += 1
        known = self.boards.get("a")
        if known is not None:
            known.asked(self.now_s)
        held = bench.board.report().holdings
        report = BoardReport("a", "m", BoardState.READY, replica="a", queue_limit=1, holdings=held)
        self.boards.update("g", report, ready=True, held=PauseEffect.NOT)

    def begin(self, ids: tuple[int, ...]) -> InFlightRequest:
        self.now_s += 1
        board = self.boards.get("a")
        assert board is not None
        ask = RoutingRequest("r", "m", len(ids), 20, BlockHashes(ids, seed_of(None)))
        return InFlightRequest(self.boards, board, ask, self.now_s)

    def end(self, stay: InFlightRequest, said: tuple[int, ...], finished: Finished) -> None:
        self.now_s += 1
        stay.observe(Delta("", said))
        stay.observe(finished)
        stay.ended(self.now_s, left=False)


def bench_of(folder: Path, **extra: object) -> CacheBench:
    limits = {"park_min_tokens": 2 * BLOCK, "context_len": LONG}
    return CacheBench(folder, limits=limits, **extra)


def holdings(bench: CacheBench) -> CachedPrefixes:
    held = unpack(bench.board.report().holdings)
    assert held is not None
    return held


@pytest.mark.parametrize("seed", range(6))
async def test_what_a_run_finds_is_what_reports_and_guesses_said(seed: int, tmp_path: Path) -> None:
    rng = Random(seed)
    bench = bench_of(tmp_path)
    await bench.board.start()
    reported, guessed = Told(), Told()
    guessed.hear(bench)
    talks = [(*SHARED, *range(100 * n, 100 * n + 40)) for n in range(1, 4)]
    try:
        for _ in range(9):
            at = rng.randrange(len(talks))
            prompt = talks[at]
            reported.hear(bench)
            stays = [(told, told.begin(prompt)) for told in (reported, guessed)]
            finished = await bench.ask(prompt)
            said = tuple(map(int, spoken(prompt, LENGTH).split()))
            cached = finished.usage.cached_tokens
            for told, stay in stays:
                assert stay.expected.tokens <= cached < stay.expected.tokens + STRIDE * BLOCK
                if stay.expected.live:
                    assert stay.expected.tokens == cached
                told.end(stay, said, finished)
            talks[at] = (*prompt, *said, *rng.sample(range(5000), rng.choice((3, 40, 70))))
    finally:
        await bench.board.stop()


async def test_what_the_live_context_is_is_said_exactly(tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    await bench.board.start()
    try:
        assert holdings(bench) == CachedPrefixes(appends=True, park_min=2 * BLOCK)
        prompt = SHARED[:50]
        await bench.ask(prompt)
        live = holdings(bench).live
        assert live is not None
        ids = bench.board.slot.live.context.ids
        assert ids is not None
        assert ids[: len(prompt)] == prompt
        assert (live.tokens, live.tail) == (
            len(ids),
            BlockHashes(ids, seed_of(None)).tail(len(ids)),
        )
        assert bench.board.report().holdings is bench.board.report().holdings, "made once"
    finally:
        await bench.board.stop()


async def test_an_engine_that_has_gone_holds_files_and_nothing_live(tmp_path: Path) -> None:
    bench = bench_of(tmp_path)
    await bench.board.start()
    try:
        await bench.ask(SHARED)
        await bench.ask(SHARED[::-1])
        held = holdings(bench)
        assert held.live is not None
        assert [file.tokens // BLOCK for file in held.files] == [9]
        bench.engine.die("it was killed")
        held = holdings(bench)
        assert (held.live, len(held.files)) == (None, 1)
    finally:
        await bench.board.stop()


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        pytest.param({"n_batch": 2}, CachedPrefixes(), id="batches keep no context"),
        pytest.param(
            {"per_run_sampling": False},
            CachedPrefixes(appends=True),
            id="nothing ends a run that parks",
        ),
    ],
)
async def test_what_cannot_be_used_again_is_not_promised(
    facts: dict[str, object], expected: CachedPrefixes, tmp_path: Path
) -> None:
    bench = bench_of(tmp_path)
    await bench.board.start()
    try:
        bench.board.slot.live.facts = replace(bench.board.slot.live.facts, **facts)  # type: ignore[arg-type]
        assert holdings(bench) == expected
    finally:
        await bench.board.stop()


async def test_after_an_abort_only_what_pays_for_a_load_is_promised(tmp_path: Path) -> None:
    bench = bench_of(tmp_path, load_s=1.0)
    await bench.board.start()
    try:
        await bench.ask(SHARED)
        figures = bench.board.books.counters
        figures.prefill_tokens, figures.prefill_ms = 1000, 2500.0
        assert holdings(bench).park_min == 2 * BLOCK
        bench.board.slot.live.aborted = True
        assert holdings(bench).park_min == 401, "a load takes a second, and each token 2.5 ms"
    finally:
        await bench.board.stop()
