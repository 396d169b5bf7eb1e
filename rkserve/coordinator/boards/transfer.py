"""Transfer of one file to many boards: chunk order, retries and limits; and the boards' locks.

Boards that keep up share every chunk: it is read and put once, and released when the last of them
has it. A slow or failing board continues alone, at its own pace and cost. Reading, putting and
calling boards are passed in; ``Stager`` does so for the head's store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rkserve.control.operations import BoardOutcome, ResultStatus
from rkserve.coordinator.boards.roster import Roster, result_of
from rkserve.core.board_report import LedgerCopy
from rkserve.core.coordinator_metrics import CoordinatorMetrics
from rkserve.core.desired_state import Artifact
from rkserve.core.errors import BoardFailed, BoardGone, BoardSilent, RkserveError, StageFailed

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
ALIVE = 4

# Return a part of the file, from an offset; called in a thread.
Read = Callable[[int, int], bytes]
# Return the value sent to boards in place of a chunk, such as a reference; called in a thread.
Put = Callable[[bytes], Any]
# Return the lock of a board, which is held during a transfer.
LockOf = Callable[[str], asyncio.Lock]


class CallBoard(Protocol):
    """Calls a method of a board's current replica."""

    def __call__(
        self, board_id: str, method: str, /, *args: Any, timeout_s: float
    ) -> Awaitable[Any]:
        """Return the answer. Raises ``RkserveError``; ``BoardFailed`` if none can come."""


@dataclass(frozen=True, slots=True)
class TransferLimits:
    """The limits of a transfer. Times in seconds.

    A board whose calls fail for ``patience_s`` without progress is given up; until then its replica
    may be replaced. A board that itself reports an error is asked ``tries`` times,
    ``first_delay_s`` and then twice as long apart. A board whose call takes ``lag_s`` no longer
    delays the others. After ``limit_s`` every unfinished board is given up.
    """

    chunk_bytes: int = CHUNK_BYTES
    call_timeout_s: float = 20.0
    commit_timeout_s: float = 120.0
    patience_s: float = 30.0
    tries: int = 3
    first_delay_s: float = 0.2
    longest_delay_s: float = 2.0
    lag_s: float = 2.0
    limit_s: float | None = None


@dataclass(frozen=True, slots=True)
class TransferResult:
    """The result of a transfer to one board. ``error`` of None: the version is there, verified.

    ``resumed_bytes`` of the file were already there. ``tries`` counts the attempts.
    """

    board_id: str
    error: RkserveError | None
    sent_bytes: int
    resumed_bytes: int
    tries: int
    ms: float


async def stage(
    version: Artifact | LedgerCopy,
    board_ids: Iterable[str],
    read: Read,
    put: Put,
    ask: CallBoard,
    *,
    lock_of: LockOf = lambda _board_id: asyncio.Lock(),
    pace: TransferLimits = TransferLimits(),
) -> dict[str, TransferResult]:
    """Deliver a version to boards, and return each one's result.

    A board is locked only during its own transfer, and a board locked by another task does not
    delay the others.

    Cancellation stops the transfer everywhere; the next one continues from the bytes that boards
    have.

    Raises:
        OSError, RkserveError: the file cannot be read here.
    """
    chunks = _Chunks(version.size_bytes, read, put, pace.chunk_bytes)
    lanes = [
        _Lane(
            board,
            version,
            chunks=chunks,
            ask=ask,
            lock=lock_of(board),
            pace=pace,
        )
        for board in dict.fromkeys(board_ids)
    ]
    for lane in lanes:
        chunks.enter(lane)
    tasks = [asyncio.create_task(lane.go()) for lane in lanes]
    try:
        if tasks:
            await asyncio.wait(tasks, timeout=pace.limit_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()  # None for a lane that ended in order
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await chunks.close()
    return {lane.board_id: lane.delivery() for lane in lanes}


@dataclass
class _Chunk:
    """One live chunk: its payload, pending or ready, and the number of calls that send it."""

    payload: asyncio.Task[Any]
    users: int = 0


class _Chunks:
    """The live chunks: at most ``ALIVE``, one of them for boards that do not keep up.

    Boards that keep up stay within the remaining number of chunks, so that each chunk is read once
    for all of them.
    """

    def __init__(self, size_bytes: int, read: Read, put: Put, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._size_bytes = size_bytes
        self._read = read
        self._put = put
        self._alive: dict[int, _Chunk] = {}
        self._in_step: set[_Lane] = set()
        self._moved = asyncio.Condition()

    def enter(self, lane: _Lane) -> None:
        """Add a board that the others wait for."""
        self._in_step.add(lane)

    async def leave(self, lane: _Lane) -> None:
        """Stop waiting for a board."""
        if lane in self._in_step:
            self._in_step.discard(lane)
            await self.moved()

    async def moved(self) -> None:
        """Update the chunks after a board's change of position."""
        async with self._moved:
            self._sweep()
            self._moved.notify_all()

    async def take(self, lane: _Lane, index: int) -> Any:
        """Return a chunk's payload once there is room for it; return it with ``give_back``."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._may(lane, index))
            if index not in self._alive:
                self._alive[index] = _Chunk(asyncio.create_task(self._load(index)))
            chunk = self._alive[index]
            chunk.users += 1
        try:
            # A cancelled lane must not cancel the chunk for the others.
            return await asyncio.shield(chunk.payload)
        except BaseException:
            await self.give_back(index)
            raise

    async def give_back(self, index: int) -> None:
        """Release a chunk after a call."""
        self._alive[index].users -= 1
        await self.moved()

    async def close(self) -> None:
        """Release all chunks."""
        payloads = [chunk.payload for chunk in self._alive.values()]
        self._alive.clear()
        for payload in payloads:
            payload.cancel()
        await asyncio.gather(*payloads, return_exceptions=True)

    def _may(self, lane: _Lane, index: int) -> bool:
        if index in self._alive:
            return True
        window = self._window()
        if len(self._alive) >= ALIVE:
            return False
        if lane in self._in_step:
            return index in window
        return all(one in window for one in self._alive)

    def _window(self) -> range:
        """Return the chunks that boards that keep up may use now."""
        if not self._in_step:
            return range(0)
        start = min(lane.index for lane in self._in_step)
        return range(start, start + ALIVE - 1)

    def _sweep(self) -> None:
        """Release the chunks that are not being sent and that no board that keeps up will need."""
        window = self._window()
        for index in [i for i, one in self._alive.items() if not one.users and i not in window]:
            self._alive.pop(index).payload.cancel()

    async def _load(self, index: int) -> Any:
        offset = index * self.chunk_bytes
        size = min(self.chunk_bytes, self._size_bytes - offset)
        return await asyncio.to_thread(self._read_and_put, offset, size)

    def _read_and_put(self, offset: int, size: int) -> Any:
        data = self._read(offset, size)
        if len(data) != size:
            raise OSError(f"the file has {len(data)} of {size} bytes at {offset}")
        return self._put(data)


class _Refused(Exception):
    """A call to a board failed with ``error``; local failures are other exceptions."""

    def __init__(self, error: RkserveError) -> None:
        super().__init__(error)
        self.error = error


class _Lane:
    """The transfer to one board. ``index`` is the chunk that it needs next."""

    def __init__(
        self,
        board_id: str,
        version: Artifact | LedgerCopy,
        *,
        chunks: _Chunks,
        ask: CallBoard,
        lock: asyncio.Lock,
        pace: TransferLimits,
    ) -> None:
        self.board_id = board_id
        self.index = 0
        self._version = version
        self._chunks = chunks
        self._ask = ask
        self._lock = lock
        self._pace = pace
        self._began_s = self._ended_s = time.monotonic()
        self._done = False
        self._error: RkserveError | None = None
        self._failing_since_s: float | None = None  # the first failure after the last gain
        self._refusals = 0
        self._tries = 0
        self._sent_bytes = 0
        self._resumed_bytes: int | None = None

    async def go(self) -> None:
        """Deliver the version, within the limits of retries and time."""
        try:
            if self._lock.locked():
                await self._chunks.leave(self)
            async with self._lock:
                await self._bring()
        finally:
            self._ended_s = time.monotonic()
            await self._chunks.leave(self)

    async def _bring(self) -> None:
        delay_s = self._pace.first_delay_s
        while (error := await self._tried()) is not None:
            await self._chunks.leave(self)
            if not self._worth_another_try(error):
                self._error = error
                return
            log.info("staging goes on in %.1f s: %s", delay_s, error)
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._pace.longest_delay_s)
        self._done = True

    def delivery(self) -> TransferResult:
        """Return the result, or that the transfer did not end in time."""
        error = self._error
        if error is None and not self._done:
            took_s = self._ended_s - self._began_s
            error = BoardSilent(self.board_id, f"the file was not there within {took_s:.1f} s")
        return TransferResult(
            board_id=self.board_id,
            error=error,
            sent_bytes=self._sent_bytes,
            resumed_bytes=self._resumed_bytes or 0,
            tries=self._tries,
            ms=(self._ended_s - self._began_s) * 1e3,
        )

    async def _tried(self) -> RkserveError | None:
        """Try once; return the error of a failed call to the board."""
        try:
            await self._once()
        except _Refused as refused:
            return refused.error
        return None

    async def _once(self) -> None:
        """Deliver the missing part. Raises ``_Refused``."""
        size, pace = self._version.size_bytes, self._pace
        self._tries += 1
        there = await self._call("stage_begin", self._version, timeout_s=pace.call_timeout_s)
        if self._resumed_bytes is None:
            self._resumed_bytes = there
        while there < size:
            await self._move_to(there // self._chunks.chunk_bytes)
            now = await self._send(self.index)
            if now <= there:
                raise _Refused(
                    StageFailed(self.board_id, f"it has {now} bytes after one more than {there}")
                )
            there = now
            self._failing_since_s = None
        await self._chunks.leave(self)
        await self._call("stage_commit", self._version, timeout_s=pace.commit_timeout_s)

    async def _move_to(self, index: int) -> None:
        if index != self.index:
            self.index = index
            await self._chunks.moved()

    async def _send(self, index: int) -> int:
        """Send a chunk; return how many bytes the board has then."""
        offset = index * self._chunks.chunk_bytes
        payload = await self._chunks.take(self, index)
        try:
            now: int = await self._call(
                "stage_chunk",
                self._version.digest,
                offset,
                payload,
                timeout_s=self._pace.call_timeout_s,
            )
        finally:
            await self._chunks.give_back(index)
        self._sent_bytes += min(self._chunks.chunk_bytes, self._version.size_bytes - offset)
        return now

    async def _call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call the board; during a slow call the others continue without it. Raises
        ``_Refused``.
        """
        call = asyncio.ensure_future(self._ask(self.board_id, method, *args, timeout_s=timeout_s))
        try:
            done, _ = await asyncio.wait({call}, timeout=self._pace.lag_s)
            if not done:
                await self._chunks.leave(self)
            answer = await call
        except RkserveError as exc:
            # The error is kept for the result; its frames would keep the chunk alive.
            exc.__cause__ = exc.__context__ = None
            raise _Refused(exc.with_traceback(None)) from None
        finally:
            call.cancel()
        return answer

    def _worth_another_try(self, error: RkserveError) -> bool:
        if isinstance(error, StageFailed):
            self._refusals += 1
            return self._refusals < self._pace.tries
        if self._failing_since_s is None:
            self._failing_since_s = time.monotonic()
        failing_s = time.monotonic() - self._failing_since_s
        return isinstance(error, BoardFailed) and failing_s < self._pace.patience_s


class Stager:
    """Delivers files to boards. Use it from one event loop."""

    def __init__(
        self,
        roster: Roster,
        read: Callable[[str, int, int], bytes],
        put: Put,
        metrics: CoordinatorMetrics,
        *,
        timeout_s: float,
        pace: TransferLimits,
    ) -> None:
        """``read`` returns a part of a file by its digest, an offset and a size; it blocks. ``put``
        turns a chunk into the value sent to boards: a reference that each of them fetches.
        """
        self._pace = pace
        self._roster = roster
        self._read = read
        self._put = put
        self._metrics = metrics
        self._timeout_s = timeout_s
        self._locks: dict[str, asyncio.Lock] = {}

    def at(self, board_id: str) -> asyncio.Lock:
        """Return the lock of a board: only its holder delivers files or loads there."""
        return self._locks.setdefault(board_id, asyncio.Lock())

    async def bring(self, version: Artifact, board_id: str) -> None:
        """Deliver a version to one board, whose lock the caller holds.

        Raises:
            RkserveError: it was not delivered.
        """
        # The board's own lock is held by the caller.
        held = asyncio.Lock()
        result = (await self._stage(version, [board_id], lambda _: held))[board_id]
        if isinstance(result, RkserveError):
            raise result

    async def spread(
        self, version: Artifact, board_ids: Iterable[str], timeout_s: float | None = None
    ) -> dict[str, BoardOutcome]:
        """Deliver a version to boards, to each as soon as its lock is free; return the results."""
        boards = sorted(set(board_ids))
        began_s = time.monotonic()
        ended = await self._stage(version, boards, self.at, timeout_s)
        results: dict[str, BoardOutcome] = {}
        for board in boards:
            answer = ended[board]
            took_ms = (time.monotonic() - began_s) * 1e3
            if isinstance(answer, RkserveError):
                results[board] = result_of(answer, took_ms)
            else:
                results[board] = BoardOutcome(ResultStatus.OK, answer["stage_ms"], details=answer)
        return results

    async def _stage(
        self,
        version: Artifact,
        boards: list[str],
        lock_of: LockOf,
        timeout_s: float | None = None,
    ) -> dict[str, RkserveError | dict[str, Any]]:
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        digest = version.digest
        try:
            deliveries = await stage(
                version,
                boards,
                lambda offset, size: self._read(digest, offset, size),
                self._put,
                self._ask,
                lock_of=lock_of,
                pace=replace(self._pace, limit_s=limit_s),
            )
        except (OSError, RkserveError) as exc:
            why = f"the file cannot be read on the head node: {exc}"
            return {board: StageFailed(board, why) for board in boards}
        ended: dict[str, RkserveError | dict[str, Any]] = {}
        for board, one in deliveries.items():
            self._metrics.staged_bytes.inc(one.sent_bytes)
            if one.error is not None:
                code = one.error.code or "internal_error"
                self._metrics.board_failures.labels("stage", code).inc()
                ended[board] = one.error
                continue
            self._metrics.stage.observe(one.ms / 1e3)
            ended[board] = {
                "stage_ms": round(one.ms, 3),
                "sent_bytes": one.sent_bytes,
                "resumed_bytes": one.resumed_bytes,
                "tries": one.tries,
            }
        return ended

    async def _ask(self, board_id: str, method: str, *args: Any, timeout_s: float) -> Any:
        address = self._roster.address(board_id)
        if address is None:
            raise BoardGone(board_id, "it has no replica now")
        return await self._roster.ask_one(address, method, *args, timeout_s=timeout_s)
