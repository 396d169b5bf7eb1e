"""Log lines of boards, Routers and the Coordinator as one Router gets them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest

from rkserve.api.admin.logs import LogEntry, LogsQuery
from rkserve.core.errors import BoardFailed, BoardNotFound
from rkserve.core.logs import LogPage, LogQuery, LogRing
from rkserve.core.request_record import log_for
from rkserve.router.features.logs import Logs, OwnLogs
from tests.support.boards.fake_boards import FakeBoards, report
from tests.support.cluster.fake_head import FakeHead
from tests.support.http.router_house import House

pytestmark = pytest.mark.virtual_time

FOLLOW = LogsQuery(follow=True)


class Process:
    """A process that logs, one line a second; a restart begins a new one."""

    clock = 0

    def __init__(self) -> None:
        self.ring = LogRing()

    def logs(self, *messages: str, request: str = "") -> None:
        for message in messages:
            Process.clock += 1
            record = logging.LogRecord("rkserve.x", logging.INFO, "", 1, message, None, None)
            record.created = float(Process.clock)
            log_for(request)
            self.ring.handle(record)
            log_for("")

    def page(self, query: LogQuery) -> LogPage:
        return self.ring.page(query)


class Cluster:
    """Boards a and b, a Coordinator and a Router, each with a log."""

    def __init__(self) -> None:
        names = ("a", "b", "coordinator", "router")
        self.of: dict[str, Process] = {name: Process() for name in names}
        boards = FakeBoards([report("a"), report("b")])
        for name in "ab":
            boards.says[f"replica of {name}", "logs"] = self._of(name)
        self.boards = boards
        self.house = House(boards, head=FakeHead(says={"logs": self._of("coordinator")}))
        self.logs = Logs(self.house.service, OwnLogs(self.of["router"].ring))

    def _of(self, name: str) -> Any:
        def page(query: LogQuery) -> LogPage:
            return self.of[name].page(query)  # of the process that it is then

        return page

    async def met(self) -> Cluster:
        await self.house.service.fleet.refresh()
        return self


def words(batch: list[LogEntry]) -> list[str]:
    return [f"{entry['source']}: {entry['message']}" for entry in batch]


async def test_a_boards_last_lines_come_and_then_nothing() -> None:
    cluster = await Cluster().met()
    cluster.of["a"].logs("one", "two", "three")
    batches = [one async for one in await cluster.logs.of_board("a", LogsQuery(tail=2))]
    assert [words(one) for one in batches] == [["a: two", "a: three"]]


async def test_new_lines_follow_and_a_quiet_log_is_kept_open_by_pings() -> None:
    cluster = await Cluster().met()
    cluster.of["a"].logs("one")
    async with aclosing(await cluster.logs.of_board("a", FOLLOW)) as batches:
        assert words(await anext(batches)) == ["a: one"]
        cluster.of["a"].logs("two", "three")
        assert words(await anext(batches)) == ["a: two", "a: three"]
        assert await anext(batches) == []
    asked = len(cluster.boards.asked)
    await asyncio.sleep(60)
    assert len(cluster.boards.asked) == asked, "a reader that has left costs nothing"


async def test_a_board_that_was_restarted_is_followed_from_its_first_line() -> None:
    cluster = await Cluster().met()
    cluster.of["a"].logs("one", "two")
    async with aclosing(await cluster.logs.of_board("a", FOLLOW)) as batches:
        await anext(batches)
        cluster.of["a"] = Process()
        cluster.of["a"].logs("anew")
        assert words(await anext(batches)) == ["a: anew"]


async def test_lines_that_were_dropped_meanwhile_are_counted() -> None:
    cluster = await Cluster().met()
    cluster.of["a"].logs("one")
    async with aclosing(await cluster.logs.of_board("a", FOLLOW)) as batches:
        await anext(batches)
        cluster.of["a"].logs(*map(str, range(1500)))
        found = words(await anext(batches))
    assert found[:2] == ["a: 500 lines were dropped", "a: 500"]
    assert (found[-1], len(found)) == ("a: 1499", 1001)


async def test_all_logs_come_in_order_of_time_and_each_tells_its_process() -> None:
    cluster = await Cluster().met()
    for name in ("b", "router", "a", "coordinator", "b"):
        cluster.of[name].logs("hi")
    async with aclosing(await cluster.logs.of_all(FOLLOW)) as batches:
        first = await anext(batches)
        assert words(first) == ["b: hi", "router: hi", "a: hi", "coordinator: hi", "b: hi"]
        cluster.of["router"].logs("later")
        assert words(await anext(batches)) == ["router: later"]


async def test_a_board_that_joins_is_followed_too() -> None:
    cluster = await Cluster().met()
    async with aclosing(await cluster.logs.of_all(FOLLOW)) as batches:
        assert await anext(batches) == []
        cluster.of["c"] = Process()
        cluster.boards.reported.append(report("c"))
        cluster.boards.says["replica of c", "logs"] = cluster._of("c")
        await cluster.house.service.fleet.refresh()
        cluster.of["c"].logs("hello")
        assert words(await anext(batches)) == ["c: hello"]
        cluster.of["c"].logs("more")
        assert words(await anext(batches)) == ["c: more"]


async def test_a_process_without_an_answer_is_a_line_once_until_it_answers() -> None:
    cluster = await Cluster().met()
    cluster.boards.says["replica of a", "logs"] = BoardFailed("a", "it is frozen")
    cluster.of["b"].logs("hi")
    async with aclosing(await cluster.logs.of_all(FOLLOW)) as batches:
        first = words(await anext(batches))
        assert sorted(first) == [
            "a: Board a failed while it answered: it is frozen.",
            "b: hi",
        ]
        cluster.boards.says["replica of a", "logs"] = cluster._of("a")
        cluster.of["a"].logs("back")
        assert words(await anext(batches)) == ["a: back"]


@pytest.mark.parametrize(
    ("board", "error"),
    [
        pytest.param("nobody", BoardNotFound, id="an unknown board"),
        pytest.param("a", BoardFailed, id="a silent one"),
    ],
)
async def test_a_board_without_lines_is_an_error_before_the_answer_begins(
    board: str, error: type[Exception]
) -> None:
    cluster = await Cluster().met()
    cluster.boards.says["replica of a", "logs"] = BoardFailed("a", "it is frozen")
    with pytest.raises(error):
        await cluster.logs.of_board(board, LogsQuery())


async def test_only_the_lines_of_one_request_are_chosen_also_of_a_shared_run() -> None:
    cluster = await Cluster().met()
    cluster.of["a"].logs("mine", request="chatcmpl-1/0,chatcmpl-2/0")
    cluster.of["a"].logs("another", request="chatcmpl-3/0")
    cluster.of["router"].logs("mine too", request="chatcmpl-2")
    query = LogsQuery(request_id="chatcmpl-2")
    (batch,) = [one async for one in await cluster.logs.of_all(query)]
    assert words(batch) == ["a: mine", "router: mine too"]


async def test_several_routers_are_asked_at_once_and_have_names() -> None:
    cluster = await Cluster().met()
    routers = {name: Process() for name in ("router-1", "router-2")}

    class Peers:
        async def logs(self, after: Mapping[str, int], tail: int) -> list[LogPage]:
            return [
                replace(one.page(LogQuery(after.get(one.ring.process), tail)), source=name)
                for name, one in routers.items()
            ]

    logs = Logs(cluster.house.service, Peers())
    routers["router-2"].logs("x")
    routers["router-1"].logs("y")
    async with aclosing(await logs.of_all(FOLLOW)) as batches:
        assert words(await anext(batches)) == ["router-2: x", "router-1: y"]
        routers["router-1"].logs("z")
        assert words(await anext(batches)) == ["router-1: z"]
