"""The fetch of a model: sources that fail or lie, resumption, full disks, and one at a time."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rkserve.board.operations.fetch_model import FetchPace, ModelFetch, NodeCopies, PieceSource
from rkserve.core.board_report import CopyState, ModelCopy
from rkserve.core.errors import ArtifactNotFound, BoardGone, CoordinatorAway
from rkserve.models.incoming import RESERVE_BYTES
from rkserve.models.index import ModelIndex, Piece, index_folder, read_piece
from rkserve.models.shelf import staging
from tests.models.test_incoming import contents
from tests.models.test_index import PIECE, folder_with
from tests.support.boards.board_bench import until

WEIGHTS = os.urandom(40 * PIECE + 17)
PACE = FetchPace(first_delay_s=0.01, longest_delay_s=0.05, busy_s=0.01)


@dataclass
class Machine:
    """A machine with a whole copy. ``alter`` changes what it sends, or raises."""

    name: str
    folder: Path
    alter: Callable[[Piece, bytes], bytes] = lambda _piece, data: data
    sent: list[tuple[str, int]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0

    async def piece(self, version: str, piece: Piece) -> bytes:
        """Send a piece."""
        assert len(version) == 64
        self.at_once += 1
        self.most_at_once = max(self.at_once, self.most_at_once)
        await asyncio.sleep(0)
        self.at_once -= 1
        data = self.alter(piece, read_piece(self.folder, piece))
        self.sent.append((piece.path, piece.number))
        return data


@dataclass
class Head:
    """A head with a catalogue of one model."""

    folder: Path
    machines: list[Machine]
    away: int = 0  # calls that fail
    lookups: int = 0

    async def index(self, name: str) -> ModelIndex:
        """Return the index."""
        if self.away:
            self.away -= 1
            raise CoordinatorAway("The Coordinator is being replaced.")
        assert name == "chat"
        return index_folder(self.folder, PIECE)

    async def sources(self, name: str, version: str) -> Sequence[PieceSource]:
        """Return the machines."""
        assert (name, len(version)) == ("chat", 64)
        self.lookups += 1
        await asyncio.sleep(0.01)  # a call over the network, while pieces are asked for
        return self.machines


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The model on the head."""
    return folder_with(tmp_path / "head" / "chat", WEIGHTS)


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """The folder of models of a board."""
    return tmp_path / "board"


def fetch_of(head: Head, shelf: Path, pace: FetchPace = PACE) -> ModelFetch:
    """Return a fetch, not begun."""
    return ModelFetch("chat", shelf, head, pace=pace, rng=random.Random(7))


async def run(fetch: ModelFetch) -> Path:
    """Fetch the model."""
    folder, version = await asyncio.wait_for(fetch.run(), 60)
    assert len(version) == 64
    return folder


async def test_a_model_is_fetched_a_few_pieces_at_a_time(source: Path, shelf: Path) -> None:
    machine = Machine("head", source)
    head = Head(source, [machine])
    fetch = fetch_of(head, shelf)
    folder = await run(fetch)
    assert contents(folder) == contents(source)
    assert len(machine.sent) == len(set(machine.sent)) == 43
    assert 1 < machine.most_at_once <= 3
    assert head.lookups == 1
    progress = fetch.progress
    assert (
        progress.fetched_bytes == progress.total_bytes == sum(map(len, contents(source).values()))
    )
    assert (progress.source, progress.corrupted) == ("head", 0)


async def test_boards_that_have_the_model_send_it_too(source: Path, shelf: Path) -> None:
    machines = [Machine(name, source) for name in ("head", "a", "b")]
    await run(fetch_of(Head(source, machines), shelf))
    assert all(machine.sent for machine in machines)
    assert sum(len(machine.sent) for machine in machines) == 43


async def test_a_board_that_leaves_is_avoided(source: Path, shelf: Path) -> None:
    def leaves(piece: Piece, _data: bytes) -> bytes:
        raise BoardGone("a", f"its replica has ended before {piece.number}")

    head, gone = Machine("head", source), Machine("a", source, leaves)
    folder = await run(fetch_of(Head(source, [head, gone]), shelf))
    assert contents(folder) == contents(source)
    assert len(head.sent) == 43


async def test_a_corrupted_piece_is_named_and_fetched_again(
    source: Path, shelf: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flipped: list[Piece] = []

    def flip(piece: Piece, data: bytes) -> bytes:
        if piece.number != 7 or flipped:
            return data
        flipped.append(piece)
        return b"\0" * len(data)

    machine = Machine("head", source, flip)
    fetch = fetch_of(Head(source, [machine]), shelf)
    folder = await run(fetch)
    assert contents(folder) == contents(source)
    assert machine.sent.count(("model.rkllm", 7)) == 2
    assert fetch.progress.corrupted == 1
    assert "piece 8 of model.rkllm (from byte 7168) from head was corrupted" in caplog.text


async def test_a_machine_that_sends_only_garbage_is_avoided(source: Path, shelf: Path) -> None:
    liar = Machine("a", source, lambda _piece, data: data[::-1])
    folder = await run(fetch_of(Head(source, [Machine("head", source), liar]), shelf))
    assert contents(folder) == contents(source)
    assert len(liar.sent) <= 3  # those that were on their way when the first one was checked


async def test_a_head_that_is_away_is_waited_for(source: Path, shelf: Path) -> None:
    fetch = fetch_of(Head(source, [Machine("head", source)], away=3), shelf)
    assert contents(await run(fetch)) == contents(source)


async def test_a_fetch_that_was_cut_off_is_resumed(source: Path, shelf: Path) -> None:
    first = Machine("head", source)
    task = asyncio.create_task(fetch_of(Head(source, [first]), shelf).run())
    await until(lambda: len(first.sent) >= 20)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not (shelf / "chat").exists()

    second = Machine("head", source)
    folder = await run(fetch_of(Head(source, [second]), shelf))
    assert contents(folder) == contents(source)
    assert len(second.sent) < 43 - 15


async def test_a_model_that_is_replaced_on_the_head_meanwhile_is_fetched_in_its_new_version(
    source: Path, shelf: Path, tmp_path: Path
) -> None:
    other = folder_with(tmp_path / "other" / "chat", WEIGHTS[::-1])
    head = Head(source, [])

    def refuse(piece: Piece, data: bytes) -> bytes:
        if piece.number == 20:  # as a head does that has another version by now
            head.folder, head.machines = other, [Machine("head", other)]
            raise ArtifactNotFound("chat is here in another version by now.", "version")
        return data

    head.machines = [Machine("head", source, refuse)]
    folder = await run(fetch_of(head, shelf))
    assert contents(folder) == contents(other)


async def test_a_copy_that_is_there_is_not_fetched(source: Path, shelf: Path) -> None:
    await run(fetch_of(Head(source, [Machine("head", source)]), shelf))
    idle = Machine("head", source)
    await run(fetch_of(Head(source, [idle]), shelf))
    assert idle.sent == []


async def test_a_model_is_fetched_once_on_a_node(source: Path, shelf: Path) -> None:
    machine = Machine("head", source)
    head = Head(source, [machine])
    folders = await asyncio.gather(*(run(fetch_of(head, shelf)) for _ in range(3)))
    assert set(folders) == {shelf / "chat"}
    assert len(machine.sent) == 43


async def test_another_fetch_of_the_node_is_followed(source: Path, shelf: Path) -> None:
    fetch = fetch_of(Head(source, [Machine("head", source)]), shelf)
    with staging(shelf / "chat", pieces=True) as staged:
        (staged / "model.rkllm.part").write_bytes(bytes(3 * PIECE))
        task = asyncio.create_task(fetch.run())
        await until(lambda: fetch.progress.fetched_bytes == 3 * PIECE)
        assert "another process of this node" in fetch.reason
    await asyncio.wait_for(task, 60)
    assert contents(shelf / "chat") == contents(source)


async def test_a_disk_without_room_is_named_until_there_is_some(source: Path, shelf: Path) -> None:
    free = [0]
    machine = Machine("head", source)
    fetch = ModelFetch(
        "chat", shelf, Head(source, [machine]), pace=PACE, free=lambda _folder: free[0]
    )
    task = asyncio.create_task(fetch.run())
    await until(lambda: fetch.is_blocked)
    assert "0.0 MB free" in fetch.reason
    assert "rkserve model rm" in fetch.reason
    assert machine.sent == []
    free[0] = RESERVE_BYTES * 2
    await asyncio.wait_for(task, 60)
    assert not fetch.is_blocked
    assert contents(shelf / "chat") == contents(source)


async def test_a_limit_of_the_rate_is_kept(source: Path, shelf: Path) -> None:
    loop = asyncio.get_running_loop()
    pace = FetchPace(max_bytes_per_s=len(WEIGHTS) * 4)
    began_s = loop.time()
    fetch = fetch_of(Head(source, [Machine("head", source)]), shelf, pace)
    await run(fetch)
    assert loop.time() - began_s > 0.2
    assert 0 < fetch.progress.bytes_per_s < len(WEIGHTS) * 8


# -- before a model is deployed --------------------------------------------------------------------


def copies_of(
    head: Head, shelf: Path, free: Callable[[Path], int] = lambda _: 1 << 40
) -> NodeCopies:
    """Return the copies of a node."""
    return NodeCopies(shelf, lambda: head, pace=PACE, free=free)


async def ended(copies: NodeCopies, *, again: bool = False) -> ModelCopy:
    """Ask for the model until its fetch has ended."""
    copy = copies.look("chat", None, again=again)
    assert copy.state is CopyState.FETCHING
    await until(lambda: copies.look("chat", None, again=False).state is not CopyState.FETCHING)
    return copies.look("chat", None, again=False)


async def test_a_prefetched_model_is_found_by_a_later_start(source: Path, shelf: Path) -> None:
    machine = Machine("head", source)
    head = Head(source, [machine])
    copy = await ended(copies_of(head, shelf))
    assert (copy.state, copy.reason) == (CopyState.PRESENT, "")
    assert copy.fetch.fetched_bytes == copy.fetch.total_bytes > len(WEIGHTS)
    assert contents(shelf / "chat") == contents(source)
    _, version = await fetch_of(head, shelf).run()
    assert version == copy.version
    assert len(machine.sent) == 43


async def test_a_prefetch_leaves_the_version_that_a_board_may_be_using(
    source: Path, shelf: Path, tmp_path: Path
) -> None:
    await run(fetch_of(Head(source, [Machine("head", source)]), shelf))
    other = folder_with(tmp_path / "other" / "chat", WEIGHTS[::-1])
    machine = Machine("head", other)
    head = Head(other, [machine])
    copies = copies_of(head, shelf)
    copy = await ended(copies)
    assert copy.state is CopyState.STAGED
    assert contents(shelf / "chat") == contents(source)
    assert (await ended(copies, again=True)).state is CopyState.STAGED
    sent = len(machine.sent)
    folder, version = await fetch_of(head, shelf).run()
    assert (contents(folder), version) == (contents(other), copy.version)
    assert len(machine.sent) == sent  # nothing came twice


async def test_a_prefetch_without_room_fails_with_the_figures_until_it_is_asked_for_again(
    source: Path, shelf: Path
) -> None:
    free, machine = [0], Machine("head", source)
    copies = copies_of(Head(source, [machine]), shelf, lambda _: free[0])
    copy = await ended(copies)
    assert copy.state is CopyState.FAILED
    assert "0.0 MB free" in copy.reason
    free[0] = RESERVE_BYTES * 2
    assert copies.look("chat", None, again=False) == copy
    assert machine.sent == []
    assert (await ended(copies, again=True)).state is CopyState.PRESENT
    assert contents(shelf / "chat") == contents(source)


async def test_a_prefetch_waits_for_a_head_that_is_away(source: Path, shelf: Path) -> None:
    copies = copies_of(Head(source, [Machine("head", source)], away=3), shelf)
    assert (await ended(copies)).state is CopyState.PRESENT


async def test_a_prefetch_that_is_closed_goes_on_later(source: Path, shelf: Path) -> None:
    first = Machine("head", source)
    copies = copies_of(Head(source, [first]), shelf)
    copies.look("chat", None, again=True)
    await until(lambda: len(first.sent) >= 20)
    await copies.close()
    assert not (shelf / "chat").exists()
    second = Machine("head", source)
    assert (await ended(copies_of(Head(source, [second]), shelf))).state is CopyState.PRESENT
    assert len(second.sent) < 43 - 15
