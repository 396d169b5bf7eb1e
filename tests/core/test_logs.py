"""Request ids of tasks, and the latest log lines of a process."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import pytest

from rkserve.core.logs import (
    ENGINE,
    KEPT_CHARS,
    KEPT_ENGINE_LINES,
    KEPT_LINES,
    PAGE_LINES,
    LogPage,
    LogQuery,
    LogRing,
)
from rkserve.core.request_record import LoggedRequest, apart, log_for, request_id, safe_id


def record(message: str, **extra: Any) -> logging.LogRecord:
    made = logging.LogRecord("rkserve.x", logging.INFO, __file__, 1, message, None, None)
    vars(made).update(extra)
    return made


def ring_of(*messages: str) -> LogRing:
    ring = LogRing()
    for message in messages:
        ring.handle(record(message))
    return ring


def messages(page: LogPage) -> list[str]:
    return [line.message for line in page.lines]


async def test_a_task_has_the_request_of_its_creator_whose_id_may_change() -> None:
    request = LoggedRequest("first")
    log_for(request)

    async def look() -> str:
        await asyncio.sleep(0)
        return request_id()

    task = asyncio.create_task(look())
    request.id = "second"
    assert await task == "second"
    assert await apart(asyncio.create_task, look()) == ""
    assert request_id() == "second"


@pytest.mark.parametrize(
    ("foreign", "logged"),
    [
        pytest.param("abc-1_2.3:4", "abc-1_2.3:4", id="what most programs send"),
        pytest.param("a b\n\x1b[31mc\"d'é", "a_b___31mc_d__", id="no control characters"),
        pytest.param("x" * 100, "x" * 64, id="no long ones"),
    ],
)
def test_an_id_of_a_client_is_logged_in_few_characters(foreign: str, logged: str) -> None:
    assert safe_id(foreign) == logged


def test_a_page_has_the_last_lines_or_those_after_a_number() -> None:
    ring = ring_of("a", "b", "c")
    assert messages(ring.page(LogQuery(tail=2))) == ["b", "c"]
    assert messages(ring.page(LogQuery(tail=0))) == []
    assert messages(ring.page(LogQuery(after=1))) == ["b", "c"]
    assert ring.page(LogQuery(after=3)) == LogPage(ring.process, (), 3)


def test_a_line_has_its_request_and_its_arguments_in_place() -> None:
    ring = LogRing()
    log_for("r/0")
    made = logging.LogRecord("rkserve.x", logging.WARNING, "", 1, "%s of %d", ("one", 2), None)
    ring.handle(made)
    log_for("")
    (line,) = ring.page(LogQuery()).lines
    assert (line.message, line.level, line.logger) == ("one of 2", "WARNING", "rkserve.x")
    assert (line.request_id, line.time_s, line.number) == ("r/0", made.created, 1)


def test_a_line_of_an_error_ends_with_its_traceback() -> None:
    ring = LogRing()
    try:
        int("x")
    except ValueError:
        ring.handle(record("it failed", exc_info=sys.exc_info()))
    (found,) = messages(ring.page(LogQuery()))
    assert found.startswith("it failed\nTraceback")
    assert "ValueError: invalid literal" in found.splitlines()[-1]


def test_old_lines_are_dropped_by_their_number_and_by_their_length() -> None:
    ring = ring_of(*map(str, range(KEPT_LINES + 5)))
    assert messages(ring.page(LogQuery(after=0)))[0] == "5"
    long = ring_of(*(["x" * 8000] * 100))
    lines = 0
    page = long.page(LogQuery(after=0))
    while True:
        lines += len(page.lines)
        if not page.more:
            break
        page = long.page(LogQuery(page.last))
    assert lines == KEPT_CHARS // 8000


def test_a_page_is_short_and_tells_of_more() -> None:
    ring = ring_of(*map(str, range(PAGE_LINES + 1)))
    page = ring.page(LogQuery(after=0))
    assert (len(page.lines), page.last, page.more) == (PAGE_LINES, PAGE_LINES, True)
    rest = ring.page(LogQuery(page.last))
    assert (messages(rest), rest.more) == ([str(PAGE_LINES)], False)


def test_the_engines_last_words_stay_however_many_lines_follow_them() -> None:
    ring = LogRing()
    for at in range(KEPT_ENGINE_LINES + 1):
        ring.handle(record(f"E {at}", **{ENGINE: 7}))
    for at in range(KEPT_LINES):
        ring.handle(record(str(at)))
    assert messages(ring.page(LogQuery(tail=2))) == ["998", "999"]
    page = ring.page(LogQuery(tail=2, engine=True))
    assert messages(page) == [*(f"E {at + 1}" for at in range(KEPT_ENGINE_LINES)), "998", "999"]
    assert page.lines[0].engine_pid == 7
    assert messages(ring.page(LogQuery(page.last))) == []
