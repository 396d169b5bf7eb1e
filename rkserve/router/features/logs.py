"""The latest log lines of boards, Routers and the Coordinator, and those that follow.

Each process keeps its latest lines in memory. A Router asks for those after the last one that it
has, and asks no process without readers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from rkserve.api.admin.logs import LogEntry, LogsQuery, log_entry
from rkserve.core.errors import BoardNotFound, RkserveError
from rkserve.core.logs import PAGE_LINES, LogLine, LogPage, LogQuery, LogRing
from rkserve.router.service import Service

POLL_S = 0.5
WAITING = 64  # batches of lines for a client that does not read; the boards keep the others
COORDINATOR, ROUTER = "coordinator", "router"
LOGGER = "rkserve.router.features.logs"  # of lines about the log itself


class RouterLogs(Protocol):
    """The logs of all Routers."""

    async def logs(self, after: Mapping[str, int], tail: int) -> list[LogPage]:
        """Return lines of each Router: those after a number, by process, else the last ones.

        Raises:
            BoardFailed: they did not answer.
        """


class OwnLogs:
    """``RouterLogs`` of the only Router."""

    def __init__(self, ring: LogRing) -> None:
        self._ring = ring

    async def logs(self, after: Mapping[str, int], tail: int) -> list[LogPage]:
        """Return lines of this Router."""
        return [self._ring.page(LogQuery(after.get(self._ring.process), tail))]


class _Unread:
    """The lines of one source that were not read yet, and the processes that it had."""

    def __init__(self, source: str, tail: int, *, engine: bool = False) -> None:
        self._source, self.tail, self._engine = source, tail, engine
        self.after: dict[str, int] = {}  # by process: the number of the last line that was read
        self._trouble = ""

    @property
    def query(self) -> LogQuery:
        """The next query of a source that is one process."""
        return LogQuery(next(iter(self.after.values()), None), self.tail, self._engine)

    def take(self, page: LogPage) -> list[LogEntry]:
        """Return the lines of a page, after a note on lines that were dropped before them."""
        before = self.after.get(page.process)
        self.after[page.process] = page.last
        self._trouble = ""
        source = page.source or self._source
        found = [log_entry(source, line) for line in page.lines]
        if before is not None and page.lines and (lost := page.lines[0].number - before - 1) > 0:
            return [self._note(f"{lost} lines were dropped", source), *found]
        return found

    def failed(self, exc: RkserveError) -> list[LogEntry]:
        """Return a line about a source that does not answer, unless it is the same as before."""
        if self._trouble == exc.message:
            return []
        self._trouble = exc.message
        return [self._note(exc.message, self._source)]

    def _note(self, message: str, source: str) -> LogEntry:
        return log_entry(source, LogLine(0, time.time(), "WARNING", LOGGER, message))


_Read = Callable[[], Awaitable[list[LogEntry]]]


class Logs:
    """The logs of a cluster, as one Router gets them."""

    def __init__(self, service: Service, routers: RouterLogs | None = None) -> None:
        self._service, self._fleet = service, service.fleet
        self._routers = routers
        self._limit_s = service.config.report_timeout_s

    async def of_board(
        self, board_id: str, query: LogsQuery
    ) -> AsyncGenerator[list[LogEntry], None]:
        """Return the batches of one board's lines, the first of which it has answered.

        Raises:
            BoardNotFound, BoardFailed: there is no such board, or it does not answer.
        """
        unread = _Unread(board_id, _tail(query), engine=True)
        first = await self._read_board(board_id, unread)
        return self._batches({board_id: unread}, first, query)

    async def of_all(self, query: LogsQuery) -> AsyncGenerator[list[LogEntry], None]:
        """Return the batches of the lines of all processes, in the order of their times."""
        sources = self._sources(query)
        read = [self._settled(name, unread) for name, unread in sources.items()]
        first = [entry for lines in await asyncio.gather(*read) for entry in lines]
        return self._batches(sources, first, query, joining=True)

    async def _batches(
        self,
        sources: dict[str, _Unread],
        first: list[LogEntry],
        query: LogsQuery,
        *,
        joining: bool = False,
    ) -> AsyncGenerator[list[LogEntry], None]:
        """Yield the first lines, and with ``follow`` later ones; an empty batch is a ping.

        With ``joining`` boards that join are followed too.
        """
        lines = _chosen(sorted(first, key=lambda entry: entry["time_s"]), query)
        if lines or query.follow:
            yield lines
        if not query.follow:
            return
        queue: asyncio.Queue[list[LogEntry]] = asyncio.Queue(WAITING)
        tasks: dict[str, asyncio.Task[None]] = {}
        loop = asyncio.get_running_loop()
        try:
            pinged_s = loop.time()
            while True:
                if joining:
                    sources = {**self._sources(LogsQuery()), **sources}
                for name, unread in sources.items():
                    if name not in tasks:
                        tasks[name] = loop.create_task(self._follow(name, unread, queue))
                try:
                    lines = _chosen(await asyncio.wait_for(queue.get(), POLL_S), query)
                except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
                    lines = []
                if lines or loop.time() - pinged_s >= self._service.config.ping_s:
                    pinged_s = loop.time()
                    yield lines
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)

    async def _follow(
        self, name: str, unread: _Unread, queue: asyncio.Queue[list[LogEntry]]
    ) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            if lines := await self._settled(name, unread):
                await queue.put(lines)

    def _sources(self, query: LogsQuery) -> dict[str, _Unread]:
        names = [one.board_id for one in self._fleet.addresses() if not one.upstream]
        names += [COORDINATOR, *([ROUTER] if self._routers is not None else [])]
        return {name: _Unread(name, _tail(query)) for name in names}

    async def _settled(self, name: str, unread: _Unread) -> list[LogEntry]:
        """Return the unread lines of a source, or a line about its failure."""
        try:
            if name == COORDINATOR:
                return await self._read(unread, self._service.cluster.logs)
            if name == ROUTER:
                return await self._read_routers(unread)
            return await self._read_board(name, unread)
        except RkserveError as exc:
            return unread.failed(exc)

    async def _read_board(self, board_id: str, unread: _Unread) -> list[LogEntry]:
        found = [one for one in self._fleet.addresses() if one.board_id == board_id]
        if not found:
            raise BoardNotFound(board_id)
        address = found[0]
        link = self._fleet.links[address.group]

        async def ask(query: LogQuery) -> LogPage:
            page: LogPage = await link.ask(address.replica, "logs", query, timeout_s=self._limit_s)
            return page

        return await self._read(unread, ask)

    async def _read(
        self, unread: _Unread, ask: Callable[[LogQuery], Awaitable[LogPage]]
    ) -> list[LogEntry]:
        """Return all unread lines of a process, or of its successor."""
        lines: list[LogEntry] = []
        page = await ask(unread.query)
        if unread.after and page.process not in unread.after:
            unread.after.clear()  # it was replaced
            page = await ask(LogQuery(0))
        lines += unread.take(page)
        while page.more:
            page = await ask(LogQuery(page.last))
            lines += unread.take(page)
        return lines

    async def _read_routers(self, unread: _Unread) -> list[LogEntry]:
        assert self._routers is not None
        lines: list[LogEntry] = []
        more = True
        while more:
            pages = await self._routers.logs(unread.after, unread.tail)
            lines += [entry for page in pages for entry in unread.take(page)]
            more = any(page.more for page in pages)
        return lines


def _tail(query: LogsQuery) -> int:
    return PAGE_LINES if query.tail is None else query.tail


def _chosen(lines: Sequence[LogEntry], query: LogsQuery) -> list[LogEntry]:
    wanted = query.request_id
    if wanted is None:
        return list(lines)
    return [
        line
        for line in lines
        if any(one.startswith(wanted) for one in line["request_id"].split(","))
    ]
