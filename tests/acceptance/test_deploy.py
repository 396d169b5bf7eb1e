"""A cluster in operation: a changed configuration, a replica that freezes, what the logs say."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import httpx
import pytest

from rkserve.core.board_report import BoardReport
from rkserve.fleet.measurements import UNUSED_S
from tests.support.cluster.local_cluster import START_S, App, LocalCluster, wait_for
from tests.support.http.talk import CHAT, MODEL, chat_body, streaming

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# What a client may be told while boards come and go.
PASSING = {429, 503}


GROUP = "trio"
ROUTER = {"report_s": 0.5, "report_timeout_s": 2.0, "accept_timeout_s": 2.0}


@pytest.fixture(scope="module")
def trio(ray_cluster: LocalCluster) -> Iterator[App]:
    """Three boards, any of which may freeze: Ray itself looks after them at its leisure.

    The last test deploys them anew with another configuration.
    """
    yield _deploy(ray_cluster, 3, queue_limit=64)
    ray_cluster.delete(GROUP)


def _deploy(cluster: LocalCluster, boards: int, queue_limit: int) -> App:
    patient = {"router": dict(ROUTER), "health_check_timeout_s": 30.0}
    return App.deploy(cluster, GROUP, boards, queue_limit=queue_limit, **patient)


# -- a replica that freezes -----------------------------------------------------------------------

# A Router that knows a board to be silent sends nothing there.
# A board that froze with a token counts as slow, and as one of its kind after UNUSED_S.
AGAIN_S = 3 * UNUSED_S
KNOWN_WITHIN_S = 25.0
PROMPTLY_S = 5.0


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process as a debugger or a thrashing disk does: it is there, and does nothing."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):  # Ray may have given it up
            os.kill(pid, signal.SIGCONT)


def _listed(http: httpx.Client) -> dict[str, str]:
    """Return the state of each board as the Router sees it."""
    boards = http.get(f"/v1/models/{MODEL}").json()["rkserve"]["boards"]
    return {board["id"]: board["state"] for board in boards}


def _timed(http: httpx.Client, number: int) -> tuple[float, str]:
    """Have a number repeated; return how long it took, and which board it was."""
    began_s = time.monotonic()
    response = http.post(CHAT, json=chat_body(f"Repeat after me: {number}"))
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == str(number)
    return time.monotonic() - began_s, response.headers["x-rkserve-board"]


def _answering(http: httpx.Client) -> set[str]:
    """Return the boards that answer a burst of new prompts."""
    first = time.monotonic_ns() % 10**9
    with ThreadPoolExecutor(24) as pool:
        return {board for _, board in pool.map(partial(_timed, http), range(first, first + 24))}


@pytest.mark.long
def test_a_frozen_replica_takes_no_other_board_with_it(trio: App) -> None:
    well = trio.settled()
    cold = well[1].board_id
    others = {report.board_id for report in well} - {cold}

    with trio.http_sync() as http:
        with frozen(well[1].pid):
            froze_s = time.monotonic()
            # Whoever is sent there before the Router knows is passed on, a little later.
            slowest_s = max(_timed(http, number)[0] for number in range(6))
            wait_for(
                "the board counts as lost", lambda: _listed(http)[cold] == "lost", KNOWN_WITHIN_S
            )
            known_s = time.monotonic() - froze_s
            for number in range(12):
                took_s, board = _timed(http, number)
                assert board in others
                assert took_s < PROMPTLY_S
                listed = _listed(http)
                assert listed.pop(cold) == "lost"
                assert set(listed.values()) == {"ready"}, listed
        thawed_s = time.monotonic()
        wait_for("the board is ready again", lambda: _listed(http)[cold] == "ready", START_S)
        back_s = time.monotonic() - thawed_s
        # Other boards have these prompts in their caches, and one request at a time goes there.
        wait_for("the board answers again", lambda: cold in _answering(http), AGAIN_S)
    print(  # noqa: T201
        f"slowest answer after the freeze {slowest_s:.1f} s, known after {known_s:.1f} s, "
        f"ready {back_s:.1f} s after the thaw"
    )
    assert known_s < KNOWN_WITHIN_S
    assert [report.board_id for report in trio.settled()] == [r.board_id for r in well]


# -- a changed configuration ----------------------------------------------------------------------


@dataclass
class Customers:
    """Clients that ask one thing after the other, and what became of that."""

    http: httpx.AsyncClient
    statuses: Counter[int] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    answered_s: list[float] = field(default_factory=list)
    more: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def coming(self, number: int) -> AsyncIterator[None]:
        """Have so many clients ask during the block; what they asked last is answered after it."""
        closing = asyncio.Event()

        async def ask_on() -> None:
            while not closing.is_set():
                await self._ask()

        clients = [asyncio.create_task(ask_on()) for _ in range(number)]
        try:
            yield
        finally:
            closing.set()
            await asyncio.gather(*clients)

    async def served(self, number: int) -> None:
        """Wait until so many more were served."""
        goal = self.statuses[200] + number
        async with self.more:
            reached = self.more.wait_for(lambda: self.statuses[200] >= goal)
            await asyncio.wait_for(reached, START_S)

    @property
    def longest_gap_s(self) -> float:
        """The longest time in which nobody was served."""
        return max(after - before for before, after in pairwise(self.answered_s))

    async def _ask(self) -> None:
        """Have a number repeated; what is no right answer must be one of OpenAI's errors."""
        said = str(self.statuses.total())
        response = await self.http.post(CHAT, json=chat_body(f"Repeat after me: {said}"))
        if response.status_code == 200:
            assert response.json()["choices"][0]["message"]["content"] == said
            self.answered_s.append(time.monotonic())
        else:
            error = response.json()["error"]
            assert error["code"], response.text
            assert int(response.headers["retry-after"]) >= 1
            self.refusals[error["message"]] += 1
            await asyncio.sleep(0.1)  # not the second that it says: how long is of interest
        async with self.more:
            self.statuses[response.status_code] += 1
            self.more.notify_all()


@pytest.mark.long
@pytest.mark.parametrize(
    "boards",
    [pytest.param(3, id="a shorter queue"), pytest.param(2, id="and one board fewer")],
)
def test_a_changed_configuration_replaces_the_boards_while_requests_are_served(
    trio: App, boards: int
) -> None:
    """`serve deploy` with an edited file."""
    before = trio.settled()
    for report in before:
        trio.cluster.control(report.board_id, "time_scale=0.5")

    async def through() -> tuple[Customers, list[BoardReport]]:
        async with trio.http() as http:
            customers = Customers(http)
            async with customers.coming(2):
                await customers.served(5)
                async with streaming(http, "Write 60 tokens") as under_way:
                    await under_way.read(deltas=1)
                    after = await asyncio.to_thread(_redeploy, trio.cluster, boards)
                    await under_way.read()
                    assert (under_way.error, under_way.finish_reason) == (None, "stop")
                await customers.served(5)
            return customers, after

    customers, after = asyncio.run(through())
    print(  # noqa: T201
        f"statuses while it was deployed anew: {dict(customers.statuses)}; "
        f"nobody was served for {customers.longest_gap_s:.1f} s at most; {customers.refusals}"
    )
    assert [report.queue_limit for report in after] == [boards] * boards
    assert [report.board_id for report in after] == [f"{GROUP}-{i}" for i in range(boards)]
    assert not {report.pid for report in before} & {report.pid for report in after}
    assert set(customers.statuses) <= {200, *PASSING}


def _redeploy(cluster: LocalCluster, boards: int) -> list[BoardReport]:
    changed = _deploy(cluster, boards, queue_limit=boards)

    def all_anew() -> list[BoardReport] | None:
        found = changed.reports()
        limits = [report.queue_limit for report in found]
        return found if limits == [boards] * boards else None

    return wait_for(f"{boards} boards with the new limit", all_anew, START_S)


# -- what the logs say ----------------------------------------------------------------------------


def test_the_log_of_a_replica_holds_the_lines_of_its_board(boards: App) -> None:
    """In the file that Serve keeps for that replica, which the dashboard shows."""
    for report in boards.settled():
        serves = f"board {report.board_id} serves {MODEL} on RKLLM {report.release}"
        logs = _replica_logs(boards.cluster, report)
        assert logs, f"Serve keeps no log of {report.replica}"
        assert any(serves in log for log in logs), f"no {serves!r} in {logs}"


def _replica_logs(cluster: LocalCluster, report: BoardReport) -> list[str]:
    files = (cluster.folder / "ray").glob(f"session_*/logs/serve/*{report.replica}*.log")
    return [file.read_text(encoding="utf-8") for file in files]
