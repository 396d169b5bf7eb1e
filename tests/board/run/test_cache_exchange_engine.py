"""A prompt cache file of one board that another one's library loads, over the channel."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.storage.prompt_cache import CacheFingerprint, CacheStore
from rkserve.config.router import ChannelConfig
from rkserve.core.block_hashes import unpack
from rkserve.core.messages import CacheSource, Finished, GenerateRequest
from rkserve.transport.cache_transfer import cache_key, fetched
from rkserve.transport.server import ChannelServer
from tests.support.boards.board_bench import until
from tests.support.boards.channel_bench import ENCRYPTED, PATIENT
from tests.support.boards.fakes import run_loop
from tests.support.sim.sim_board import GREEDY, Sim, ask, chat

STORY = "Repeat after me: " + " ".join(f"it was {n} o'clock," for n in range(100))
NEXT = chat(STORY, STORY.partition(": ")[2], "And then?")
FAST = 1e12


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
            outlet = ChannelServer("b", config, first)  # type: ignore[arg-type]
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

    run_loop(main(), 120.0)
