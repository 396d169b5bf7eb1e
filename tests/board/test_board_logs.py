"""Log lines of a board: each has the id of the request that it is about."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rkserve.core.errors import EngineDied, RunFailed
from rkserve.core.logs import LogQuery, LogRing
from rkserve.core.messages import GenerateRequest
from rkserve.core.request_record import log_for, request_id
from rkserve.native.runtime import RunEnd
from tests.support.boards.board_bench import SETTINGS, Bench, Listener, collect
from tests.support.boards.fakes import Script, tokens_of

pytestmark = pytest.mark.virtual_time

FAILS = Script(tokens_of("Hel"), end=RunEnd.FAILED)


@pytest.fixture
def lines() -> Iterator[Any]:
    """Return a function that returns the lines with these words, as their requests' ids."""
    ring, logger = LogRing(), logging.getLogger("rkserve.board")
    before = logger.level
    logger.addHandler(ring)
    logger.setLevel(logging.INFO)
    log_for("the test")  # of no board
    yield lambda words: [
        line.request_id for line in ring.page(LogQuery()).lines if words in line.message
    ]
    logger.removeHandler(ring)
    logger.setLevel(before)
    log_for("")


def asked(name: str) -> GenerateRequest:
    return GenerateRequest(f"{name}/0", "m", (1, 2, 3), 8)


async def test_a_run_that_fails_is_a_line_of_its_own_request(lines: Any) -> None:
    """Also where another request has started it, by its end."""
    async with Bench(Script(tokens_of("x"), pace_s=0.1), FAILS).running() as it:
        first = Listener(it.board, asked("first"))
        await asyncio.sleep(0.01)
        second = Listener(it.board, asked("second"))
        await first.task
        with pytest.raises(RunFailed):
            await second.end()
        assert lines("a run failed") == ["second/0"]


async def test_a_shared_run_has_the_ids_of_all_its_requests(lines: Any) -> None:
    settings = replace(SETTINGS, n_batch=2, batch_window_s=1.0)
    bench = Bench(FAILS, settings=settings)
    await bench.board.start()
    both = [Listener(bench.board, asked(name)) for name in ("one", "two")]
    for listener in both:
        with pytest.raises(RunFailed):
            await listener.end()
    await bench.board.stop()
    assert lines("a run failed") == ["one/0,two/0"]


async def test_what_outlives_a_request_is_not_logged_as_its_part(lines: Any) -> None:
    async with Bench(Script(tokens_of("Hel"), die_at=0)).running() as it:
        with pytest.raises(EngineDied):
            await collect(it.board.generate(asked("victim")))
        assert request_id() == "victim/0", "the test's own task has consumed it"
        await asyncio.sleep(1)
        assert lines("serves m") == ["the test", ""], "the start of the test's, and the recovery"
