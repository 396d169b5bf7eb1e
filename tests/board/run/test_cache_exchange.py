"""Prompt cache files that one board fetches from another, and what keeps it from doing so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.rules.hang_limits import RunTimeouts
from rkserve.board.run.cache_exchange import MOST_SENT
from rkserve.board.run.settings import BoardSettings
from rkserve.board.storage.prompt_cache import CacheFingerprint, CacheStore
from rkserve.config.router import ChannelConfig
from rkserve.core.block_hashes import CachedPrefixes, origin_of, unpack
from rkserve.core.desired_state import Desired
from rkserve.core.errors import BoardFailed, CacheNotFound, CacheUnsupported
from rkserve.core.messages import CacheOffer, CacheQuery, CacheSource, Finished, GenerateRequest
from rkserve.transport.cache_transfer import cache_key, fetched
from rkserve.transport.server import ChannelServer
from tests.board.run.test_prompt_caching import (
    LENGTH,
    SALT,
    A,
    B,
    CacheBench,
    follow_up,
    on_a_disk_of,
)
from tests.support.boards import fakes
from tests.support.boards.board_bench import Listener, request, spoken, talker, until
from tests.support.boards.channel_bench import ENCRYPTED, PATIENT
from tests.support.boards.fakes import Script
from tests.support.boards.own_time import run_loop
from tests.support.sim.sim_board import GREEDY, Sim, ask, chat

pytestmark = pytest.mark.virtual_time

PORTABLE = {"prompt_cache_portable": True}
SOURCE = CacheSource("board a", "127.0.0.1", 1, len(A) + LENGTH, b"")
FAST = 1e12
CALM = RunTimeouts(first_token_s=1e9, token_s=1e9, abort_s=1e9, least_s=1e9)


class Pair:
    """A board ``here`` that fetches files from another one."""

    def __init__(self, folder: Path, **here: Any) -> None:
        self.there = bench(folder / "there")
        self.asked: list[CacheQuery] = []
        limits = {"fetch_cache": self.fetch, **here.pop("limits", {})}
        self.here = bench(folder / "here", limits=limits, **here)
        self.tamper: Callable[[CacheOffer | bytes], CacheOffer | bytes] = lambda part: part
        self.stall: asyncio.Event | None = None

    async def fetch(
        self, _source: CacheSource, query: CacheQuery
    ) -> AsyncGenerator[CacheOffer | bytes, None]:
        self.asked.append(query)
        async with aclosing(self.there.board.send_cache(query)) as parts:
            async for part in parts:
                if self.stall is not None:
                    await self.stall.wait()
                yield self.tamper(part)

    async def ask(self, ids: tuple[int, ...], **extra: Any) -> Finished:
        """Ask the board here, as a Router would that knows of the file there."""
        client = Listener(self.here.board, request(*ids, max_tokens=20, source=SOURCE, **extra))
        await client.end()
        await until(lambda: self.here.board.report().running == 0)
        await self.here.board.caching.settled()
        assert client.finished is not None
        return client.finished


def bench(folder: Path, **extra: Any) -> CacheBench:
    limits = {"share_bytes_per_s": FAST, **extra.pop("limits", {})}
    quirks = {**PORTABLE, **extra.pop("quirks", {})}
    return CacheBench(folder, limits=limits, quirks=quirks, **extra)


def pair_test(body: Callable[[Pair], Awaitable[None]], folder: Path, **here: Any) -> None:
    async def main() -> None:
        pair = Pair(folder, **here)
        await pair.there.board.start()
        await pair.here.board.start()
        try:
            for ids in (A, B):  # the board there parks A
                await pair.there.ask(ids)
            pair.there.board.report()  # what makes its files known
            pair.here.board.report()
            on_a_disk_of(pair.here, FAST)
            await body(pair)
        finally:
            await pair.here.board.stop()
            await pair.there.board.stop()

    run_loop(main())


def held(one: CacheBench) -> CachedPrefixes:
    found = unpack(one.board.report().holdings)
    assert found is not None
    return found


def test_a_conversation_goes_on_at_another_board_from_the_file_of_the_first(
    tmp_path: Path,
) -> None:
    async def body(pair: Pair) -> None:
        finished = await pair.ask(follow_up(A))
        assert finished.usage.cached_tokens == len(A) + LENGTH
        report = pair.here.board.report()
        assert (report.cache_fetched, report.restored, report.cache_sent) == (1, 1, 0)
        assert report.cache_fetched_bytes == pair.there.board.report().cache_sent_bytes > 0
        assert pair.there.board.report().cache_sent == 1
        # The file is this board's own now.
        await pair.here.ask(B)
        assert (await pair.ask((*follow_up(A), 9))).usage.cached_tokens >= len(A) + LENGTH
        assert len(pair.asked) == 1

    pair_test(body, tmp_path)


def test_the_file_comes_while_the_request_waits_for_the_board(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        free = asyncio.Event()
        pair.here.scripts.append(Script([], model=talker(LENGTH), prefill=free))
        busy = Listener(pair.here.board, request(*B, max_tokens=20))
        asked = asyncio.ensure_future(pair.ask(follow_up(A)))
        await until(lambda: pair.here.board.report().cache_fetched == 1)
        assert not busy.finished
        free.set()
        assert (await asked).usage.cached_tokens == len(A) + LENGTH
        await busy.end()

    pair_test(body, tmp_path, limits={"patience": CALM})


LIMITS = [
    pytest.param({"quirks": {"prompt_cache_portable": False}}, id="not portable here"),
    pytest.param({"limits": {"share_bytes_per_s": 0.0}}, id="switched off"),
    pytest.param({"limits": {"park": False}}, id="no parking"),
]


@pytest.mark.parametrize("here", LIMITS)
def test_a_board_fetches_nothing_where_files_are_of_no_use(
    here: dict[str, Any], tmp_path: Path
) -> None:
    async def body(pair: Pair) -> None:
        assert (await pair.ask(follow_up(A))).usage.cached_tokens == 0
        assert pair.asked == []
        assert (held(pair.here).compatibility, held(pair.here).fetch_ms) == (0, 0.0)

    pair_test(body, tmp_path, **here)


def test_nothing_is_fetched_over_a_network_that_is_slower_than_the_prefill(
    tmp_path: Path,
) -> None:
    async def body(pair: Pair) -> None:
        costs = pair.here.board.caching.costs
        costs.network.set(0.9e6)  # 111 ms a token, which takes 100 ms to compute
        assert (await pair.ask(follow_up(A))).usage.cached_tokens == 0
        assert pair.asked == []
        assert held(pair.here).fetch_ms == pytest.approx(110, rel=0.1)

    pair_test(body, tmp_path)


def test_a_file_for_two_requests_is_fetched_once(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        pair.here.board.books.counters.prefill_ms = 1e15  # it waits for as long
        pair.stall = asyncio.Event()
        both = [asyncio.ensure_future(pair.ask((*follow_up(A), at))) for at in (1, 2)]
        await until(lambda: pair.here.board.report().queued + pair.here.board.report().running == 2)
        pair.stall.set()
        await asyncio.gather(*both)
        assert len(pair.asked) == 1

    pair_test(body, tmp_path)


def test_a_file_with_another_content_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    def changed(part: CacheOffer | bytes) -> CacheOffer | bytes:
        return part if isinstance(part, CacheOffer) else bytes([part[0] ^ 1]) + part[1:]

    async def body(pair: Pair) -> None:
        pair.tamper = changed
        assert (await pair.ask(follow_up(A))).usage.cached_tokens == 0
        report = pair.here.board.report()
        assert (report.cache_fetched, report.restored) == (0, 0)
        assert [*(tmp_path / "here").rglob("*.tmp")] == []

    pair_test(body, tmp_path)


def test_a_source_that_stalls_costs_no_longer_than_the_prefill(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        pair.stall = asyncio.Event()
        finished = await pair.ask(follow_up(A))
        assert finished.usage.cached_tokens == 0
        most_ms = 100 * (len(A) + LENGTH)
        assert 500 <= finished.timings.cache_ms <= most_ms + 200
        assert [*(tmp_path / "here").rglob("*.tmp")] == []

    pair_test(body, tmp_path)


def test_a_source_that_has_gone_is_a_prefill(tmp_path: Path) -> None:
    async def gone(*_: Any) -> AsyncGenerator[CacheOffer | bytes, None]:
        raise BoardFailed("board a", "the connection ended")
        yield b""

    async def body(pair: Pair) -> None:
        assert (await pair.ask(follow_up(A))).usage.cached_tokens == 0

    pair_test(body, tmp_path, limits={"fetch_cache": gone})


def test_a_conversation_of_another_salt_is_not_sent(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        finished = await pair.ask(follow_up(A), salt=SALT)
        assert finished.usage.cached_tokens == 0
        assert [query.origin for query in pair.asked] == [origin_of(None, SALT)]
        assert pair.there.board.report().cache_sent == 0

    pair_test(body, tmp_path)


def test_a_board_sends_its_files_only_where_they_are_of_use_and_few_at_once(
    tmp_path: Path,
) -> None:
    async def body(pair: Pair) -> None:
        send, known = pair.there.board.send_cache, held(pair.there).compatibility
        assert known == held(pair.here).compatibility != 0
        for query, error in (
            (CacheQuery(known + 1, None, A), CacheUnsupported),
            (CacheQuery(0, None, A), CacheUnsupported),
            (CacheQuery(known, None, (1, 2, 3)), CacheNotFound),
            (CacheQuery(known, "kind@v1", A), CacheNotFound),
        ):
            with pytest.raises(error):
                await anext(send(query))
        begun = [send(CacheQuery(known, None, A)) for _ in range(MOST_SENT)]
        for one in begun:
            assert isinstance(await anext(one), CacheOffer)
        with pytest.raises(CacheUnsupported):
            await anext(send(CacheQuery(known, None, A)))
        for one in begun:
            await one.aclose()
        assert isinstance(await anext(send(CacheQuery(known, None, A))), CacheOffer)

    pair_test(body, tmp_path)


def test_a_file_is_sent_at_the_limited_rate(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        settings: BoardSettings = pair.there.board.settings
        object.__setattr__(settings, "share_bytes_per_s", 100.0)
        query, size = CacheQuery(held(pair.there).compatibility, None, A), 0
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        async with aclosing(pair.there.board.send_cache(query)) as parts:
            async for part in parts:
                size += len(part) if isinstance(part, bytes) else 0
        assert loop.time() - begun_s == pytest.approx(size / 100.0, rel=0.2)

    pair_test(body, tmp_path)


def test_a_board_without_an_engine_still_names_its_files(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        known = held(pair.there)
        packed = pair.there.board._prefixes.packed(None)
        without = unpack(packed)
        assert without is not None
        assert (without.files, without.compatibility) == (known.files, known.compatibility)
        assert (without.live, without.appends) == (None, False)

    pair_test(body, tmp_path)


def test_what_a_router_reads_of_a_fetch_it_would_say_itself(tmp_path: Path) -> None:
    """The answer is that of a board that computes all of the context."""

    async def body(pair: Pair) -> None:
        asked = follow_up(A)
        client = Listener(pair.here.board, request(*asked, max_tokens=20, source=SOURCE))
        assert (await client.end())[0] == spoken(asked, LENGTH)

    pair_test(body, tmp_path)


def test_a_drained_board_writes_its_last_conversation_for_others(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        board = pair.there.board
        assert [file.tokens for file in board.caches()] == [len(A) + LENGTH]
        await board.adopt(Desired(epoch=1, drained=(board.board_id,)))
        await until(lambda: board.report().parked == 2)
        await board.caching.settled()
        finished = await pair.ask(follow_up(B))
        assert finished.usage.cached_tokens == len(B) + LENGTH

    pair_test(body, tmp_path)


def test_a_board_that_has_measured_nothing_takes_the_routers_estimate(tmp_path: Path) -> None:
    async def body(pair: Pair) -> None:
        counters = pair.here.board.books.counters
        counters.prefill_ms, counters.prefill_tokens = 0.0, 0
        for prefill_ms, cached in ((0.0, 0), (100.0, len(A) + LENGTH)):
            source = replace(SOURCE, prefill_ms=prefill_ms)
            client = Listener(
                pair.here.board, request(*follow_up(A), max_tokens=20, source=source, salt="")
            )
            await client.end()
            assert client.finished is not None
            assert client.finished.usage.cached_tokens == cached
            await until(lambda: pair.here.board.report().running == 0)
            await pair.here.board.clear_kv(keep_system_prompt=False)
            counters.prefill_ms, counters.prefill_tokens = 0.0, 0

    pair_test(body, tmp_path)


# -- with the simulated library, over sockets ---------------------------------------------------

STORY = "Repeat after me: " + " ".join(f"it was {n} o'clock," for n in range(100))
NEXT = chat(STORY, STORY.partition(": ")[2], "And then?")


def sim(place: Path, environ: dict[str, str] | None = None) -> Sim:
    place.mkdir()
    return Sim(
        place, sampling=GREEDY, quirks={"prompt_cache_portable": True}, environ=environ or {}
    )


def settings(place: Path) -> dict[str, Any]:
    return {
        "caches": CacheStore(place / "cache", CacheFingerprint("m", "r"), 1 << 30),
        "share_bytes_per_s": FAST,
        "fetch_cache": fetched,
        "platform": "RK3588",
    }


def finished(events: list[Any]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


def text(events: list[Any]) -> str:
    return "".join(getattr(event, "text", "") for event in events)


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        pytest.param(ENCRYPTED, False, id="portable"),
        pytest.param(PATIENT, True, id="refused by the library"),
    ],
)
def test_a_library_goes_on_from_the_file_of_another_board(
    config: ChannelConfig, bound: bool, tmp_path: Path
) -> None:
    async def main() -> None:
        there = sim(tmp_path / "there")
        here = sim(tmp_path / "here", {"RKSIM_CACHE_BOUND": "1"} if bound else {})
        async with AsyncExitStack() as stack:
            first = await stack.enter_async_context(there.board(**settings(there.place)))
            second = await stack.enter_async_context(here.board(**settings(here.place)))
            outlet = ChannelServer("b", config, first)  # type: ignore[arg-type] # Ray's calls are not made
            await outlet.listen("127.0.0.1")
            stack.push_async_callback(outlet.close)
            told = text(await ask(first, chat(STORY)))
            alone = await ask(first, NEXT, sampling=GREEDY)
            assert told
            await ask(first, chat("Hello"))  # displaces the story
            await first.caching.settled()
            assert first.report().parked
            known = [unpack(one.report().holdings) for one in (first, second)]
            assert known[0] is not None
            assert known[1] is not None
            assert known[0].compatibility == known[1].compatibility != 0
            counters = second.books.counters
            counters.prefill_ms, counters.prefill_tokens = 1e9, 1_000_000
            at = outlet.address
            assert at is not None
            source = CacheSource("b", at.host, at.port, 400, cache_key(at.key), at.fingerprint)
            events = [
                event
                async for event in second.generate(
                    GenerateRequest("r", second.settings.model, NEXT, 100, GREEDY, source=source)
                )
            ]
            assert text(events) == text(alone)
            await until(lambda: second.report().running == 0)
            assert second.report().cache_fetched == 1
            assert (finished(events).usage.cached_tokens > 400) is not bound

    fakes.run_loop(main(), 120.0)
