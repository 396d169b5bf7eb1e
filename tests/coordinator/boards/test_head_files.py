"""Copies of the ledger on boards, and files that come back from them to the head."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from rkserve.control.operations import OperationState
from rkserve.coordinator.boards import head_files
from rkserve.coordinator.boards.head_files import PART_BYTES, LedgerCopier
from rkserve.coordinator.boards.roster import Roster
from rkserve.coordinator.state.ledger_files import LedgerBackup
from rkserve.core.coordinator_metrics import CoordinatorMetrics
from rkserve.core.errors import BoardSilent, LedgerFailed, StageFailed
from rkserve.fleet.fleet import Fleet
from tests.support.boards.fake_boards import eventually
from tests.support.cluster.fake_cluster import CONTENT, MODEL, FakeCluster, controlled, serving

pytestmark = pytest.mark.virtual_time

CLUSTER = "0123456789abcdef"
COPY_S = REST_S = 30.0  # a test has ten minutes


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_files, "COPY_S", COPY_S)
    monkeypatch.setattr(head_files, "REST_S", REST_S)


@dataclass
class House:
    """A head with backups, and boards on nodes of their own."""

    folder: Path
    cluster: FakeCluster
    wanted: int = 2
    now_s: float = 1.7e9
    made: int = 0
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        for board in self.cluster.boards.values():
            board.node = board.node or f"node-{board.board_id}"
        self.start()

    def start(self) -> None:
        """Start the Coordinator's part, as after a restart."""
        self.registry = CollectorRegistry()
        self.roster = Roster(Fleet({"only": self.cluster}, {"only": MODEL}))
        metrics = CoordinatorMetrics(self.registry)
        clock = {"now_s": lambda: self.now_s}
        self.copier = LedgerCopier(self.roster, metrics, CLUSTER, self.wanted, **clock)

    def back_up(self, content: bytes = b"") -> bytes:
        """Make another backup now, and return its content."""
        self.made += 1
        path = self.folder / f"backup-{self.made}"
        path.write_bytes(content or f"backup {self.made}".encode())
        self.copier.take(LedgerBackup(self.made, int(self.now_s), path))
        return path.read_bytes()

    async def look(self, after_s: float = 0.0) -> None:
        """Let time pass, and have the Coordinator look at it."""
        self.now_s += after_s
        await asyncio.sleep(after_s)
        await self.roster.refresh()
        await self.copier.look()

    def on(self, board: str) -> list[bytes]:
        """The backups on a board, in the order in which they came."""
        one = self.cluster[board]
        return [gzip.decompress(one.contents[copy.digest]) for copy in one.ledgers]

    @property
    def holders(self) -> list[str]:
        """The boards with copies."""
        return [name for name, one in self.cluster.boards.items() if one.ledgers]

    def figure(self, name: str) -> float | None:
        """A metric."""
        return self.registry.get_sample_value(f"rkserve_ledger_{name}")


def house(folder: Path, *boards: str, wanted: int = 2) -> House:
    return House(folder, FakeCluster.of(*boards), wanted)


async def test_the_newest_backup_is_copied_to_as_many_boards_as_are_wanted(tmp_path: Path) -> None:
    it = house(tmp_path, "a", "b", "c")
    await it.look()
    assert it.holders == []  # there is no backup
    first = it.back_up(b"many lines of a ledger\n" * 20_000)
    await it.look()
    assert it.holders == ["a", "b"]
    assert it.on("a") == it.on("b") == [first]
    assert it.figure("copies") == 2
    assert it.figure("copy_timestamp_seconds") == int(it.now_s)
    assert it.cluster["a"].ledgers[0].size_bytes < len(first) / 50


async def test_a_large_backup_goes_in_parts_that_ray_sends_within_the_call(tmp_path: Path) -> None:
    it, sizes = house(tmp_path, "a"), []
    take = it.cluster["a"].stage_chunk

    def chunk(digest: str, offset: int, data: bytes) -> int:
        sizes.append(len(data))
        return take(digest, offset, data)

    it.cluster["a"].stage_chunk = chunk  # type: ignore[method-assign] # a board that counts
    noise = b"".join(hashlib.sha256(bytes([n % 256, n // 256])).digest() for n in range(10_000))
    it.back_up(noise)
    await it.look()
    assert it.on("a") == [noise]
    assert len(sizes) > 4
    assert max(sizes) == PART_BYTES


async def test_none_are_sent_where_they_are_off(tmp_path: Path) -> None:
    it = house(tmp_path, "a", wanted=0)
    it.back_up()
    await it.look()
    assert not it.cluster["a"].asked["ledger_copies"]
    assert it.holders == []


async def test_a_board_gets_the_first_at_once_and_others_every_ten_minutes_at_most(
    tmp_path: Path,
) -> None:
    it = house(tmp_path, "a")
    first = it.back_up()
    await it.look()
    await it.look(COPY_S / 10)
    it.back_up()
    await it.look(COPY_S / 2)
    assert it.on("a") == [first]
    last = it.back_up()
    await it.look(COPY_S)
    assert it.on("a") == [first, last]
    for _ in range(3):
        await it.look(COPY_S)
    assert it.on("a") == [first, last]  # nothing has changed since
    assert [one.number for one in it.cluster["a"].ledgers] == [1, 2]


async def test_a_restart_sends_no_board_what_it_has_and_keeps_to_the_same_boards(
    tmp_path: Path,
) -> None:
    it = house(tmp_path, "b", "c", wanted=1)
    first = it.back_up()
    await it.look()
    it.cluster.boards["a"] = FakeCluster.of("a")["a"]
    it.start()
    it.back_up()
    await it.look(COPY_S / 2)
    assert it.on("b") == [first]  # the ten minutes hold over a restart, too
    assert it.holders == ["b"]
    assert it.figure("copies") == 1
    await it.look(COPY_S)
    assert (len(it.on("b")), it.holders) == (2, ["b"])


async def test_copies_are_on_different_nodes_and_none_is_on_the_head_s(tmp_path: Path) -> None:
    it = house(tmp_path, "a", "b", "c", "d", wanted=3)
    it.cluster["a"].on_head = True
    it.cluster["c"].node = it.cluster["b"].node
    it.back_up()
    await it.look()
    assert it.holders == ["b", "d"]


async def test_another_board_takes_the_place_of_one_that_is_gone_and_keeps_it(
    tmp_path: Path,
) -> None:
    it = house(tmp_path, "a", "b", wanted=1)
    it.back_up()
    await it.look()
    it.cluster["a"].dead = True
    it.back_up()
    await it.look(5)
    await it.look(5)
    assert len(it.on("b")) == 1
    it.cluster["a"].restart()
    it.back_up()
    await it.look(2 * COPY_S)
    assert (len(it.on("a")), len(it.on("b"))) == (1, 2)


@pytest.mark.parametrize("method", ["ledger_copies", "stage_begin", "stage_chunk", "stage_commit"])
async def test_a_board_that_fails_is_logged_once_and_another_one_gets_the_copy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    it = house(tmp_path, "a", "b", wanted=1)
    it.cluster["a"].refuses[method] = StageFailed("a", "its disk is full")
    it.back_up()
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            await it.look(REST_S / 3)
    assert it.holders == ["b"]
    assert sum("its disk is full" in line for line in caplog.messages) == 1
    assert it.cluster["a"].asked[method] <= 2
    del it.cluster["a"].refuses[method]
    it.cluster["b"].dead = True
    it.back_up()
    await it.look(REST_S)
    await it.look(5)
    assert it.on("a")[-1:] == [b"backup 2"]


async def test_a_silent_board_costs_a_look_seconds(tmp_path: Path) -> None:
    it = house(tmp_path, "a", "b", wanted=1)
    it.cluster["a"].refuses["ledger_copies"] = BoardSilent("a", "nothing came")
    it.back_up()
    await it.look()
    assert it.holders == ["b"]


async def test_a_restored_head_goes_on_above_the_numbers_of_the_copies(tmp_path: Path) -> None:
    it = house(tmp_path, "a", wanted=1)
    for _ in range(3):
        it.back_up()
        await it.look(COPY_S)
    it.made, it.now_s = 0, 0.0  # another disk, and a clock without a battery
    it.start()
    again = it.back_up(b"after the restoration")
    await it.look()
    assert it.on("a")[-1] == again
    assert [one.number for one in it.cluster["a"].ledgers] == [1, 2, 3, 4]
    assert it.cluster["a"].ledgers[-1].made_s == 0


async def test_a_backup_that_cannot_be_read_is_an_error_of_this_look(tmp_path: Path) -> None:
    it = house(tmp_path, "a")
    it.back_up()
    (tmp_path / "backup-1").unlink()
    with pytest.raises(LedgerFailed, match="cannot be copied to boards"):
        await it.look()
    it.back_up()
    await it.look()
    assert it.on("a") == [b"backup 2"]


async def test_the_coordinator_sends_what_is_backed_up(tmp_path: Path) -> None:
    async with controlled(tmp_path / "head", "a", report_s=1.0) as it:
        it.cluster["a"].node = "n"
        (tmp_path / "backup").write_bytes(b"a ledger")
        it.it.backed_up(LedgerBackup(1, int(it.now_s), tmp_path / "backup"))
        await eventually(lambda: bool(it.cluster["a"].ledgers))
        (copy,) = it.cluster["a"].ledgers
        assert copy.cluster == it.ledger.cluster
        await eventually(lambda: b"rkserve_ledger_copies 1.0" in it.it.metrics())


# -- the way back -------------------------------------------------------------------------------


async def test_files_that_the_head_lost_come_back_from_boards(tmp_path: Path) -> None:
    async with serving(tmp_path, "v1", "v2", report_s=0.2) as it:
        lost = dict(it.store.files)
        it.store.files.clear()
        it.cluster["a"].contents = dict.fromkeys(lost, b"damaged on its disk")
        assert await it.again()
        # The upload ends, and is counted, after the file is there.
        fetched = b'retrieved_artifacts_total{result="succeeded"} 2.0'
        await eventually(lambda: fetched in it.it.metrics())
        assert it.store.files == lost
        assert it.store.coming == {}
        it.cluster["c"].restart(disk=False)
        await eventually(lambda: it.follows)  # it gets the files from the head


async def test_a_file_that_no_board_has_is_named_and_sent_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, "v1", report_s=0.2) as it:
        it.store.files.clear()
        for name in "abc":
            it.cluster[name].restart(disk=False)
        with caplog.at_level(logging.ERROR):
            await it.again()
            await it.heard()
            await asyncio.sleep(30)
        named = [line for line in caplog.messages if "no board that is there has it" in line]
        assert len(named) == 1
        assert "adapter tone@v1" in named[0]
        assert not it.follows
        outcome = await it.stage(it.store.add("v1", CONTENT["v1"]))
        assert outcome.operation.state is OperationState.SUCCEEDED
        await eventually(lambda: it.follows)
