"""One file to many boards: each chunk once, each board for itself, none waits for another."""

from __future__ import annotations

import asyncio
import gc
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.storage.staged_artifacts import Intake, StagedAdapters, StagedWeights
from rkserve.coordinator.boards.transfer import ALIVE, TransferLimits, TransferResult, stage
from rkserve.core.desired_state import AdapterVersion, Artifact, BaseVersion
from rkserve.core.errors import (
    ArtifactNotFound,
    BoardFailed,
    BoardGone,
    BoardSilent,
    RkserveError,
    StageFailed,
)
from rkserve.core.messages import AdapterRef

pytestmark = pytest.mark.virtual_time

CHUNK = 1000
CONTENT = bytes(n * 7 % 251 for n in range(10 * CHUNK - 300))
CHUNKS = 10
DIGEST = hashlib.sha256(CONTENT).hexdigest()
V1 = AdapterVersion(AdapterRef("legal", "v1", DIGEST), len(CONTENT))
W1 = BaseVersion("qwen", "w1", DIGEST, len(CONTENT))
QUICK = TransferLimits(
    chunk_bytes=CHUNK,
    call_timeout_s=5.0,
    patience_s=5.0,
    first_delay_s=0.01,
    longest_delay_s=0.02,
    lag_s=2.0,
)
BOARDS = [f"board-{n}" for n in range(8)]


class Payload:
    """What stands for a chunk on its way. It counts how many there are."""

    def __init__(self, house: House, data: bytes) -> None:
        self.house, self.data = house, data
        house.alive += 1
        house.most_alive = max(house.most_alive, house.alive)

    def __del__(self) -> None:
        self.house.alive -= 1


@dataclass
class House:
    """The head's file and the boards, with real folders, and what is wrong with them."""

    folder: Path
    version: Artifact = V1
    reads: list[int] = field(default_factory=list)
    puts: int = 0
    alive: int = 0
    most_alive: int = 0
    calls: list[tuple[str, str]] = field(default_factory=list)
    boards: dict[str, Intake] = field(default_factory=dict)
    # What happens before a call: board, method, offset of the chunk; it may raise or wait.
    before: Callable[[str, str, int], Any] | None = None
    spoil: Callable[[str, int, bytes], bytes] = lambda _, __, data: data

    def board(self, board_id: str, free: int = 1 << 40) -> Intake:
        if board_id not in self.boards:
            own = self.folder / board_id
            adapters = StagedAdapters(own / "a", board_id, "qwen", free=lambda _: free)
            weights = StagedWeights(own / "w", board_id, "qwen", free=lambda _: free)
            adapters.open()
            weights.open()
            self.boards[board_id] = Intake(adapters, weights, lambda _: False)
        return self.boards[board_id]

    def restart(self, board_id: str) -> None:
        self.boards.pop(board_id)

    def read(self, offset: int, size: int) -> bytes:
        self.reads.append(offset)
        return CONTENT[offset : offset + size]

    def put(self, data: bytes) -> Payload:
        self.puts += 1
        return Payload(self, data)

    async def ask(self, board_id: str, method: str, *args: Any, timeout_s: float) -> Any:
        self.calls.append((board_id, method))
        offset = args[1] if method == "stage_chunk" else -1
        if self.before is not None:
            waits = self.before(board_id, method, offset)
            if waits is not None:
                try:
                    await asyncio.wait_for(waits, timeout_s)
                except (TimeoutError, asyncio.TimeoutError):
                    raise BoardSilent(board_id, "nothing came") from None
        await asyncio.sleep(0)
        staged = self.board(board_id)
        if method == "stage_begin":
            return staged.begin(*args)
        if method == "stage_commit":
            return staged.commit(*args)
        digest, _, payload = args
        return staged.chunk(digest, offset, self.spoil(board_id, offset, payload.data))

    async def run(
        self, boards: list[str] = BOARDS, pace: TransferLimits = QUICK
    ) -> dict[str, TransferResult]:
        return await asyncio.wait_for(
            stage(self.version, boards, self.read, self.put, self.ask, pace=pace), 60
        )

    def whole(self) -> list[str]:
        """The boards that have the version, as a restart of theirs would find it."""
        for board_id in list(self.boards):
            self.restart(board_id)
        size = self.version.size_bytes
        return [one for one in BOARDS if self.board(one).begin(self.version) == size]


@pytest.fixture(params=[V1, W1], ids=["adapter", "base"])
def house(tmp_path: Path, request: pytest.FixtureRequest) -> House:
    return House(tmp_path, request.param)


def failed(deliveries: dict[str, TransferResult]) -> dict[str, type[RkserveError]]:
    return {board: type(one.error) for board, one in deliveries.items() if one.error is not None}


@pytest.mark.promise(
    "Adapters", "It is staged in chunks, resumed, verified, and appears atomically"
)
@pytest.mark.parametrize("count", [1, 2, 8])
async def test_each_chunk_is_read_and_put_once_however_many_boards_there_are(
    house: House, count: int
) -> None:
    done = await house.run(BOARDS[:count])
    assert failed(done) == {}
    assert sorted(house.reads) == [n * CHUNK for n in range(CHUNKS)]
    assert house.puts == CHUNKS
    assert house.whole() == BOARDS[:count]
    assert all(one.sent_bytes == len(CONTENT) and one.tries == 1 for one in done.values())


async def test_few_chunks_are_alive_at_once_though_boards_differ_in_speed(
    house: House,
) -> None:
    def paces(board: str, method: str, offset: int) -> Any:
        return asyncio.sleep(0.002 * BOARDS.index(board))

    house.before = paces
    assert failed(await house.run()) == {}
    assert house.most_alive <= ALIVE
    assert house.alive == 0
    assert house.puts == CHUNKS


async def test_boards_that_have_it_are_sent_nothing(house: House) -> None:
    await house.run()
    house.reads.clear()
    done = await house.run()
    assert failed(done) == {}
    assert house.reads == []
    assert {(one.resumed_bytes, one.sent_bytes) for one in done.values()} == {(len(CONTENT), 0)}


@pytest.mark.promise(
    "Adapters", "It is staged in chunks, resumed, verified, and appears atomically"
)
async def test_each_board_goes_on_where_it_was_and_no_chunk_is_read_twice(house: House) -> None:
    for n, board in enumerate(BOARDS):
        house.board(board).begin(house.version)
        house.board(board).chunk(DIGEST, 0, CONTENT[: n * 1234])
    done = await house.run()
    assert failed(done) == {}
    assert house.puts == CHUNKS
    assert [one.resumed_bytes for one in done.values()] == [n * 1234 for n in range(8)]
    assert house.whole() == BOARDS


@pytest.mark.promise(
    "Adapters", "It is staged in chunks, resumed, verified, and appears atomically"
)
async def test_one_corrupted_byte_at_one_board_is_found_and_sent_again_to_that_one(
    house: House,
) -> None:
    left = [1]

    def spoil(board: str, offset: int, data: bytes) -> bytes:
        if board == "board-3" and offset == 4 * CHUNK and left:
            left.pop()
            return data[:500] + bytes([data[500] ^ 1]) + data[501:]
        return data

    house.spoil = spoil
    done = await house.run()
    assert failed(done) == {}
    assert {board: one.tries for board, one in done.items() if one.tries > 1} == {"board-3": 2}
    assert done["board-3"].sent_bytes == 2 * len(CONTENT)
    assert house.whole() == BOARDS


async def test_a_board_whose_bytes_are_always_wrong_is_given_up_and_the_others_have_it(
    house: House,
) -> None:
    house.spoil = lambda board, _, data: data[::-1] if board == "board-3" else data
    done = await house.run()
    assert failed(done) == {"board-3": StageFailed}
    assert done["board-3"].tries == QUICK.tries
    assert "was removed" in str(done["board-3"].error)
    assert house.whole() == [board for board in BOARDS if board != "board-3"]


async def test_a_full_disk_at_one_board_stops_none_of_the_others(house: House) -> None:
    house.board("board-5", free=0)
    done = await house.run()
    assert failed(done) == {"board-5": StageFailed}
    assert "disk is full" in str(done["board-5"].error)
    assert house.whole() == [board for board in BOARDS if board != "board-5"]
    assert house.puts == CHUNKS


@pytest.mark.parametrize("at", ["stage_begin", "stage_chunk", "stage_commit"])
async def test_a_board_that_dies_and_comes_back_goes_on_where_it_was(house: House, at: str) -> None:
    away = [6]

    def dies(board: str, method: str, offset: int) -> None:
        due = method == at and (at != "stage_chunk" or offset >= 5 * CHUNK)
        if board == "board-2" and away and (due or away[0] < 6):
            if away[0] == 6:
                house.board("board-2")
                house.restart("board-2")
            away[0] -= 1
            if away[0] == 0:
                away.pop()
            raise BoardGone(board, "it has no replica now")

    house.before = dies
    done = await house.run()
    assert failed(done) == {}
    assert done["board-2"].tries == 7
    assert done["board-2"].sent_bytes == len(CONTENT)  # nothing was sent twice
    assert house.whole() == BOARDS


async def test_a_board_that_stays_away_is_given_up_and_the_others_have_it(house: House) -> None:
    def gone(board: str, method: str, offset: int) -> None:
        if board == "board-0" and method == "stage_chunk":
            raise BoardGone(board, "it has no replica now")

    house.before = gone
    done = await house.run(pace=replace(QUICK, patience_s=0.1))
    assert failed(done) == {"board-0": BoardGone}
    assert house.whole() == BOARDS[1:]


async def test_the_others_do_not_wait_for_a_board_that_hangs(house: House) -> None:
    ended: list[str] = []

    def hangs(board: str, method: str, offset: int) -> Any:
        if method == "stage_commit":
            ended.append(board)
        if board == "board-0" and method == "stage_chunk" and offset == 2 * CHUNK:
            return asyncio.Event().wait()
        return None

    house.before = hangs
    pace = replace(QUICK, lag_s=0.05, call_timeout_s=1.0, patience_s=0.5)
    done = await house.run(pace=pace)
    assert failed(done) == {"board-0": BoardSilent}
    assert sorted(ended) == BOARDS[1:]
    assert all(one.ms < done["board-0"].ms for board, one in done.items() if board != "board-0")
    assert house.most_alive <= ALIVE


async def test_boards_that_hang_everywhere_block_the_rest_for_no_longer_than_a_call(
    house: House,
) -> None:
    stuck = {f"board-{n}": n * CHUNK for n in range(5)}

    def hangs(board: str, method: str, offset: int) -> Any:
        return asyncio.Event().wait() if stuck.get(board) == offset else None

    house.before = hangs
    pace = replace(QUICK, lag_s=0.02, call_timeout_s=0.2, patience_s=0.1)
    assert failed(await house.run(pace=pace)) == dict.fromkeys(stuck, BoardSilent)
    assert house.whole() == BOARDS[5:]
    assert house.most_alive <= ALIVE


async def test_the_time_limit_gives_up_late_boards_and_keeps_the_others(
    house: House,
) -> None:
    house.before = lambda board, *_: asyncio.Event().wait() if board == "board-7" else None
    done = await house.run(pace=replace(QUICK, lag_s=0.02, limit_s=1.0, call_timeout_s=60.0))
    assert failed(done) == {"board-7": BoardSilent}
    assert house.whole() == BOARDS[:7]


async def test_cancelling_it_stops_it_everywhere_and_the_next_one_goes_on(house: House) -> None:
    reached, alone = asyncio.Event(), asyncio.all_tasks()

    def stops(board: str, method: str, offset: int) -> Any:
        if offset == 5 * CHUNK:
            reached.set()
            return asyncio.Event().wait()
        return None

    house.before = stops
    task = asyncio.create_task(
        stage(house.version, BOARDS, house.read, house.put, house.ask, pace=QUICK)
    )
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    calls = len(house.calls)
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == alone
    assert len(house.calls) == calls
    gc.collect()  # chunks may be held by the tasks that were cancelled
    assert house.alive == 0
    house.before = None
    done = await house.run()
    assert failed(done) == {}
    assert max(one.resumed_bytes for one in done.values()) == 5 * CHUNK
    assert house.whole() == BOARDS


@pytest.mark.parametrize(
    "error", [OSError("the disk"), ArtifactNotFound("No file.")], ids=["disk", "gone"]
)
async def test_a_file_that_cannot_be_read_is_the_head_s_failure_and_no_board_s(
    house: House, error: Exception
) -> None:
    def read(offset: int, size: int) -> bytes:
        if offset >= 4 * CHUNK:
            raise error
        return CONTENT[offset : offset + size]

    house.read = read  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        await house.run()
    assert house.whole() == []


async def test_a_file_that_became_shorter_is_not_sent(house: House) -> None:
    house.read = lambda offset, size: CONTENT[offset : offset + size // 2]  # type: ignore[method-assign]
    with pytest.raises(OSError, match="has 500 of 1000 bytes at 0"):
        await house.run()


async def test_an_error_that_no_board_should_raise_is_not_tried_again(house: House) -> None:
    def odd(board: str, method: str, offset: int) -> None:
        if board == "board-1":
            raise RkserveError("It went wrong.")

    house.before = odd
    done = await house.run()
    assert failed(done) == {"board-1": RkserveError}
    assert done["board-1"].tries == 1


async def test_a_board_that_takes_nothing_is_given_up(house: House) -> None:
    async def ask(board_id: str, method: str, *args: Any, timeout_s: float) -> int:
        return 0

    house.ask = ask  # type: ignore[method-assign]
    done = await house.run(["board-0"])
    assert failed(done) == {"board-0": StageFailed}


async def test_a_transfer_to_no_boards_does_nothing(house: House) -> None:
    assert await house.run([]) == {}
    assert issubclass(BoardGone, BoardFailed)
