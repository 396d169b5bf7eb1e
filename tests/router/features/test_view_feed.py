"""Live events of the cluster's view: what readers get, how much of it, and at what cost."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest
from pydantic import TypeAdapter

from rkserve.api.admin.cluster_view import SnapshotEvent
from rkserve.config.router import RouterConfig
from rkserve.control.calls import OperationKind
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.errors import TooManyViewers
from rkserve.core.merge_patch import patched
from rkserve.core.messages import GenerateRequest
from rkserve.router.dispatch.failover import GenerationProgress, RequestLocation
from rkserve.router.features.view_feed import PING, RING
from rkserve.router.queue.admission import QueueTerms
from rkserve.verdicts.history import EVERY_S, POINTS
from tests.support.boards.fake_boards import FakeBoards, report
from tests.support.boards.own_time import run_loop
from tests.support.cluster.fake_head import FakeHead
from tests.support.http.router_house import House
from tests.support.values.cluster_facts import HEALTHY
from tests.support.values.control_values import recorded

MODEL = "sim-chat"
BYTES_PER_MINUTE = 60_000
CPU_SHARE = 0.01


def decoded(chunk: bytes) -> list[tuple[str, Any]]:
    """The events of a chunk, by name and data."""
    found = []
    for block in chunk.decode().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "event" in fields:
            found.append((fields["event"], json.loads(fields["data"])))
    return found


class Reader:
    """A reader who keeps the document, as the page does."""

    def __init__(self, events: AsyncGenerator[bytes, None]) -> None:
        self.events, self.view, self.history = events, {}, {}
        self.names: list[str] = []

    view: dict[str, Any]
    history: dict[str, Any]

    async def read(self) -> bytes:
        """Take one chunk."""
        chunk = await anext(self.events)
        for name, data in decoded(chunk):
            self.names.append(name)
            if name == "snapshot":
                TypeAdapter(SnapshotEvent).validate_python(data, strict=True)
                self.view, self.history = data["view"], data["history"]
            else:
                self.view = patched(self.view, data)
        return chunk


async def reading(of: House, *, operator: bool = False, seconds: float = 900) -> Reader:
    """A reader who has the snapshot."""
    await of.service.fleet.refresh()
    found = Reader((await of.feed.open(operator=operator)).events(seconds))
    await found.read()
    return found


def test_a_reader_gets_a_snapshot_and_then_what_changes() -> None:
    async def look() -> None:
        of = House(FakeBoards([report("a"), report("b")]))
        one = await reading(of)
        assert one.names == ["snapshot"]
        assert one.view["order"] == ["a", "b"]
        assert one.view["operator"] is False
        of.boards.reported = [report("a", running=1), report("b", running=1, queued=2)]
        await of.service.fleet.refresh()
        of.view.sample()
        chunk = await one.read()
        assert one.names == ["snapshot", "delta"]
        assert one.view["now"]["running"] == [1, 1]
        assert one.view["tick"] == 1
        assert len(chunk) < 300

    run_loop(look())


def test_a_change_of_a_board_s_state_is_sent_at_once() -> None:
    async def look() -> None:
        of = House(FakeBoards([report("a"), report("b")]))
        one = await reading(of)
        of.boards.reported = [report("a")]
        await of.service.fleet.refresh()
        began_s = asyncio.get_running_loop().time()
        await one.read()
        assert asyncio.get_running_loop().time() - began_s < 1
        assert one.view["boards"]["b"]["state"] == "lost"
        assert one.view["boards"]["b"]["rules"] == ["BoardLost"]
        assert one.view["tick"] == 0  # it was no sample

    run_loop(look())


def test_changes_at_short_intervals_are_one_delta() -> None:
    async def look() -> None:
        of = House(FakeBoards([report("a")]))
        one = await reading(of)
        for state in (BoardState.HUNG, BoardState.RECOVERING, BoardState.READY):
            of.boards.reported = [report("a", state=state, running=2)]
            await of.service.fleet.refresh()
        await one.read()
        assert one.names == ["snapshot", "delta"]
        assert one.view["boards"]["a"]["state"] == "ready"
        assert one.view["now"]["running"] == [2]

    run_loop(look())


def test_all_readers_get_the_same_bytes() -> None:
    async def look() -> None:
        of = House(FakeBoards([report("a")]))
        readers = [await reading(of) for _ in range(3)]
        of.boards.reported = [report("a", running=1)]
        await of.service.fleet.refresh()
        of.view.sample()
        chunks = [await one.read() for one in readers]
        assert chunks[0] == chunks[1] == chunks[2]
        assert all(one.view == readers[0].view for one in readers)

    run_loop(look())


def test_a_reader_who_falls_behind_gets_a_snapshot_and_nothing_is_kept_for_him() -> None:
    async def look() -> None:
        of = House(FakeBoards([report("a")]))
        slow, quick = await reading(of), await reading(of)
        for number in range(RING + 5):
            of.boards.reported = [report("a", queued=number % 7)]
            await of.service.fleet.refresh()
            of.view.sample()
            of.feed.publish()
            await quick.read()
        assert set(quick.names[1:]) == {"delta"}
        await slow.read()
        assert slow.names == ["snapshot", "snapshot"]
        assert slow.view == quick.view
        (audience, _) = of.feed._audiences
        assert len(audience._deltas) == RING

    run_loop(look())


def test_a_reader_who_missed_a_few_deltas_gets_them_together() -> None:
    async def look() -> None:
        of = House(FakeBoards([report("a")]))
        one = await reading(of)
        for number in range(1, 4):
            of.boards.reported = [report("a", queued=number)]
            await of.service.fleet.refresh()
            of.view.sample()
            of.feed.publish()
        await one.read()
        assert one.names == ["snapshot", *["delta"] * 3]
        assert one.view["now"]["queued"] == [3]

    run_loop(look())


def test_a_quiet_stream_has_comments_and_ends_after_its_time() -> None:
    async def look() -> None:
        of = House(FakeBoards([report("a")]))
        one = await reading(of, seconds=25)
        chunks = [chunk async for chunk in one.events]
        assert chunks == [PING] * 3  # after 10, 20 and 25 s

    run_loop(look())


def test_readers_beyond_the_limit_are_refused_until_one_leaves() -> None:
    async def look() -> None:
        of = House(FakeBoards([report("a")]), RouterConfig(max_viewers=2))
        first = await of.feed.open(operator=False)
        await of.feed.open(operator=True)
        with pytest.raises(TooManyViewers, match="2 viewers"):
            await of.feed.open(operator=False)
        first.close()
        first.close()
        assert of.feed.readers == 1
        await of.feed.open(operator=False)

    run_loop(look())


def test_without_readers_nothing_is_made_or_kept() -> None:
    async def look() -> None:
        of = House(FakeBoards([report("a")]))
        reader = await of.feed.open(operator=False)
        reader.close()
        of.boards.reported = [report("a", state=BoardState.HUNG)]
        await of.service.fleet.refresh()
        of.view.sample()
        assert all(one.document is None for one in of.feed._audiences)

    run_loop(look())


def test_the_operator_sees_operations_of_late() -> None:
    async def look() -> None:
        now_s = time.time()
        records = [
            recorded("op-3", OperationKind.PAUSE, created_s=now_s),
            replace(recorded("op-2", OperationKind.RESUME), finished_s=now_s - 60),
            replace(recorded("op-1", OperationKind.PAUSE), finished_s=now_s - 6000),
        ]
        head = FakeHead(says={"operations": records})
        of = House(FakeBoards([report("a")]), head=head)
        await of.cluster.refresh()
        one, client = await reading(of, operator=True), await reading(of)
        assert [*one.view["operations"]] == ["op-3", "op-2"]
        assert client.view["operations"] == {}
        head.away = True
        await of.feed._prepare()
        of.feed.publish()
        assert [*one.view["operations"]] == ["op-3", "op-2"]

    run_loop(look())


def test_a_snapshot_has_the_sparklines_of_half_an_hour() -> None:
    async def look() -> None:
        of = House(FakeBoards([report("a", running=1)]))
        await of.service.fleet.refresh()
        for _ in range(POINTS):
            of.view.sample()
        one = await reading(of)
        assert one.history["columns"]["a"]["running"] == [1] * 60
        assert one.history["every_s"] * 60 == POINTS * EVERY_S
        assert one.history["states"]["a"] == [{"state": "ready", "points": 60}]

    run_loop(look())


# -- what fifty busy boards cost ------------------------------------------------------------------


class BusyFleet:
    """Fifty boards that decode, and 64 streams that come and go."""

    def __init__(self, boards: int = 50, streams: int = 64, lasting_s: float = 20.0) -> None:
        self.rng = random.Random(3)
        self.of = House(FakeBoards([]))
        self.names = [f"rock-5b-{number:02d}" for number in range(boards)]
        self.streams, self.lasting_s = streams, lasting_s
        self.tokens = dict.fromkeys(self.names, 0)
        self.began: dict[str, float] = {}

    def reports(self, now_s: float) -> list[BoardReport]:
        """What the boards report at a time."""
        return [self._report(name, now_s) for name in self.names]

    def _report(self, name: str, now_s: float) -> BoardReport:
        rng, tokens = self.rng, self.tokens[name] + self.rng.randint(40, 65)
        self.tokens[name] = tokens
        hardware = replace(
            HEALTHY,
            npu_load=tuple(float(rng.randint(40, 55)) for _ in range(3)),
            temperature_c=rng.uniform(55, 65),
            memory_available_bytes=rng.randint(9_000, 9_100) * 10**6,
        )
        return report(
            name,
            hardware=hardware,
            running=1,
            queued=rng.randint(0, 1),
            context_len=4096,
            kv_positions=rng.randint(200, 2000),
            prompt_tokens=100 * tokens,
            cached_tokens=rng.randint(55, 60) * tokens,
            prefill_tokens=int(40 * now_s),
            decode_tokens=tokens,
            decode_ms=80.0 * tokens,
            requests=tokens,
        )

    def stream(self, now_s: float) -> None:
        """End the streams that are over, and begin others in their places."""
        known = self.of.service.unassigned.known
        for request_id, began_s in list(self.began.items()):
            if now_s - began_s > self.lasting_s:
                del self.began[request_id], known[request_id]
        while len(self.began) < self.streams:
            request_id = f"chatcmpl-{uuid.uuid4().hex}/0"
            progress = GenerationProgress(GenerateRequest(request_id, MODEL, (1, 2), 9), 8)
            terms = QueueTerms(flow="alice", came_s=time.monotonic())
            location = RequestLocation(progress, self.of.service.fleet, known, terms)
            location.replica = f"replica of {self.rng.choice(self.names)}"
            known[request_id] = location
            self.began[request_id] = now_s + self.rng.uniform(-5, 5)
        for location in known.values():
            if self.rng.random() < 0.5 and not location.progress.begun:
                location.progress._news.append(object())  # type: ignore[arg-type]


@pytest.mark.parametrize("lasting_s", [20.0, 2.0], ids=["long answers", "short answers"])
def test_fifty_busy_boards_take_few_bytes_and_little_time(
    lasting_s: float, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = BusyFleet(lasting_s=lasting_s)
    of, minutes = fleet.of, 2
    spent = {"publish": 0.0, "read": 0.0}

    async def watch() -> tuple[int, int, Reader]:
        of.boards.reported = fleet.reports(0)
        fleet.stream(0)
        one = await reading(of, operator=True)
        first = len(await snapshot_of(of))
        size = 0
        for step in range(1, minutes * 12 + 1):
            of.boards.reported = fleet.reports(step * EVERY_S)
            fleet.stream(step * EVERY_S)
            await asyncio.sleep(EVERY_S)
            await of.service.fleet.refresh()
            began_s = time.process_time()
            of.view.sample()
            spent["publish"] += time.process_time() - began_s
            began_s = time.process_time()
            chunk = await anext(one.events)
            spent["read"] += time.process_time() - began_s
            size += len(chunk)
        return first, size, one

    first, size, _ = run_loop(watch())
    per_minute = size / minutes
    share, each = (spent[name] / (60 * minutes) for name in ("publish", "read"))
    lines = (
        f"\n50 boards, 64 streams of {lasting_s:.0f} s: {per_minute / 1000:.1f} KB a minute for "
        f"each viewer, after a snapshot of {first / 1000:.0f} KB;",
        f"sampling and encoding {share:.2%} of a core for all viewers together, and {each:.4%} for "
        "each.\n",
    )
    with capsys.disabled():
        sys.stdout.write("\n".join(lines))
    assert per_minute <= BYTES_PER_MINUTE
    assert share <= CPU_SHARE


async def snapshot_of(of: House) -> bytes:
    """The first event of another reader."""
    reader = await of.feed.open(operator=True)
    try:
        return await anext(reader.events())
    finally:
        reader.close()
