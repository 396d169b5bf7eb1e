"""The fetch of a catalogue model to a node: from the head, or from boards that have it, in pieces.

It goes on until the model is there: errors are retried, and named in the board's report. One
process of a node fetches at a time; the others follow its progress on the disk.

Before a model is deployed, any board fetches it on behalf of its node. Such a fetch ends where only
an operator can help, and leaves an earlier version in its place, which a running board may use.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from rkserve.core.board_report import CopyState, FetchProgress, ModelCopy
from rkserve.core.errors import (
    ArtifactNotFound,
    BoardFailed,
    ConfigError,
    DiskFull,
    PieceCorrupted,
    RkserveError,
)
from rkserve.core.files import free_bytes
from rkserve.models.incoming import IncomingModel
from rkserve.models.index import ModelIndex, Piece
from rkserve.models.shelf import ModelBusy, known_index, model_path, staged_bytes, staging

log = logging.getLogger(__name__)

WINDOW = 3  # pieces that are on their way: they are all of a model that is in memory
TRIES = 4  # of one piece, before the sources are looked up again
RATE_S = 10.0  # the rate is that of these last seconds
REFRESH_S = 15.0  # how often boards that have become sources are looked for
HOPELESS = (DiskFull, ArtifactNotFound, ConfigError)  # these need an operator


class PieceSource(Protocol):
    """A machine that has the model whole."""

    @property
    def name(self) -> str:
        """The name in messages: a board's, or ``head``."""

    async def piece(self, version: str, piece: Piece) -> bytes:
        """Return a piece, unverified. Raises ``RkserveError``."""


class ModelOrigin(Protocol):
    """The head's catalogue."""

    async def index(self, name: str) -> ModelIndex:
        """Return the index of a model. Raises ``RkserveError``."""

    async def sources(self, name: str, version: str) -> Sequence[PieceSource]:
        """Return the machines that have that version whole. Raises ``RkserveError``."""


@dataclass(frozen=True, slots=True)
class FetchPace:
    """The times of a fetch, in seconds; ``max_bytes_per_s`` of None is without a limit."""

    first_delay_s: float = 1.0
    longest_delay_s: float = 30.0
    busy_s: float = 1.0
    max_bytes_per_s: float | None = None


class ModelFetch:
    """One fetch of a model into ``models``. Use it from one event loop."""

    def __init__(
        self,
        name: str,
        models: Path,
        origin: ModelOrigin,
        *,
        pace: FetchPace = FetchPace(),
        free: Callable[[Path], int] = free_bytes,
        rng: random.Random | None = None,
        prefetch: bool = False,
    ) -> None:
        """``free`` returns the free bytes of a disk.

        With ``prefetch`` the model is for a later start: an earlier version stays in its place, and
        ``run`` ends where an operator is needed.
        """
        self.name = name
        self._target = model_path(models, name)
        self._origin = origin
        self._pace = pace
        self._free = free
        self._rng = rng or random.Random()
        self._prefetch = prefetch
        self._sources: list[PieceSource] = []
        self._looked_s = float("-inf")
        self._looking = asyncio.Lock()
        self._avoided: set[str] = set()  # names of sources that failed
        self._marks: deque[tuple[float, int]] = deque()  # times and bytes, for the rate
        self.progress = FetchProgress()
        self.reason = "looks up the model on the head"
        self.is_blocked = False  # it waits for an operator
        self.is_staged = False  # it is whole, and an earlier version has its place

    async def run(self) -> tuple[Path, str]:
        """Fetch the model; return its folder and its version, once it is complete.

        Raises:
            RkserveError: a prefetch needs an operator.
        """
        delay_s, before = self._pace.first_delay_s, -1
        while True:
            try:
                return self._target, await self._once()
            except ModelBusy:
                await self._follow_other()
                continue
            except (RkserveError, OSError) as exc:
                if self._prefetch and isinstance(exc, HOPELESS):
                    raise
                self._failed(exc)
            if self.progress.fetched_bytes > before:
                delay_s = self._pace.first_delay_s
            before = self.progress.fetched_bytes
            await asyncio.sleep(delay_s)
            delay_s = min(2 * delay_s, self._pace.longest_delay_s)

    def _failed(self, exc: RkserveError | OSError) -> None:
        reason = str(exc)
        if reason != self.reason:
            log.warning("model %s is not complete yet; trying again: %s", self.name, reason)
        self.reason, self.is_blocked = reason, isinstance(exc, DiskFull)
        self._marks.clear()
        self.progress = replace(self.progress, bytes_per_s=0.0)

    async def _once(self) -> str:
        """Fetch the missing pieces, and publish the model. Raises ``RkserveError``, ``OSError``."""
        index = await self._origin.index(self.name)
        if await asyncio.to_thread(self._is_there, index):
            return index.version
        self._looked_s = float("-inf")
        self._avoided.clear()
        self.progress = replace(self.progress, total_bytes=index.total_bytes)
        async with self._staging() as staged:
            # Another process may have ended its fetch before the lock was taken.
            if await asyncio.to_thread(self._is_there, index):
                return index.version
            incoming = IncomingModel(index, staged, self._target, free=self._free)
            self._note(await asyncio.to_thread(incoming.begin))
            self.is_blocked, self.reason = False, ""
            while True:
                await self._pull(incoming)
                if self._prefetch and self._target.exists():
                    self.is_staged = True
                    return index.version
                self.reason = "verifies the model"
                damaged = await asyncio.to_thread(incoming.finish)
                if not damaged:
                    self.reason = "loads the model"
                    return index.version
                for piece in damaged:
                    self._corrupted(f"{piece.title} was damaged on this disk")
                self._note(incoming.present_bytes)

    def _is_there(self, index: ModelIndex) -> bool:
        known = known_index(self._target)
        return known is not None and known.version == index.version

    @asynccontextmanager
    async def _staging(self) -> AsyncIterator[Path]:
        """Enter and leave ``shelf.staging`` in threads: it touches the disk."""
        with ExitStack() as stack:
            yield await asyncio.to_thread(stack.enter_context, staging(self._target, pieces=True))

    async def _pull(self, incoming: IncomingModel) -> None:
        """Fetch all missing pieces, a few at a time, and write them in order."""
        left = iter(await asyncio.to_thread(list, incoming.missing()))
        version, coming = incoming.index.version, deque[tuple[Piece, asyncio.Task[bytes]]]()
        began_s, began_bytes = time.monotonic(), self.progress.fetched_bytes
        try:
            while True:
                while len(coming) < WINDOW and (piece := next(left, None)) is not None:
                    coming.append((piece, asyncio.create_task(self._fetched(version, piece))))
                if not coming:
                    return
                piece, task = coming.popleft()
                try:
                    await asyncio.to_thread(incoming.write, piece, await task)
                finally:
                    task.cancel()
                self._note(self.progress.fetched_bytes + piece.size_bytes)
                await self._hold_back(began_s, self.progress.fetched_bytes - began_bytes)
        finally:
            for _, task in coming:
                task.cancel()
            await asyncio.gather(*(task for _, task in coming), return_exceptions=True)

    async def _hold_back(self, began_s: float, fetched_bytes: int) -> None:
        if self._pace.max_bytes_per_s is not None:
            due_s = began_s + fetched_bytes / self._pace.max_bytes_per_s
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))

    async def _fetched(self, version: str, piece: Piece) -> bytes:
        """Return a piece, verified, from whichever source has it. Raises ``RkserveError``."""
        last: RkserveError | None = None
        for _ in range(TRIES):
            source = await self._choose(version)
            try:
                data = await source.piece(version, piece)
                await asyncio.to_thread(piece.check, data)
            except PieceCorrupted as exc:
                self._corrupted(f"{piece.title} from {source.name} was corrupted")
                self._avoided.add(source.name)
                last = exc
            except RkserveError as exc:
                log.info("%s did not send %s: %s", source.name, piece.title, exc)
                self._avoided.add(source.name)
                last = exc
            else:
                self.progress = replace(self.progress, source=source.name)
                return data
        assert last is not None  # each try but a successful one has set it
        raise last

    def _corrupted(self, what: str) -> None:
        self.reason = f"{what} and is fetched again"
        log.warning("model %s: %s", self.name, self.reason)
        self.progress = replace(self.progress, corrupted=self.progress.corrupted + 1)

    async def _choose(self, version: str) -> PieceSource:
        """Return a source at random; those that failed only if there is no other."""
        # Pieces that are asked for at the same time share one call, and wait for it.
        async with self._looking:
            if time.monotonic() - self._looked_s > REFRESH_S:
                self._sources = list(await self._origin.sources(self.name, version))
                self._looked_s = time.monotonic()
        if not self._sources:
            raise BoardFailed("head", f"no machine has {self.name} whole")
        good = [one for one in self._sources if one.name not in self._avoided]
        return self._rng.choice(good or self._sources)

    async def _follow_other(self) -> None:
        """Show the progress of the process that has the lock, for a moment."""
        self.reason, self.is_blocked = "another process of this node fetches the model", False
        self._note(await asyncio.to_thread(staged_bytes, self._target))
        await asyncio.sleep(self._pace.busy_s)

    def _note(self, fetched_bytes: int) -> None:
        """Note the progress, and with it the rate."""
        now_s = time.monotonic()
        if self._marks and fetched_bytes < self._marks[-1][1]:
            self._marks.clear()
        self._marks.append((now_s, fetched_bytes))
        while len(self._marks) > 1 and now_s - self._marks[1][0] > RATE_S:
            self._marks.popleft()
        since_s, bytes_then = self._marks[0]
        took_s = now_s - since_s
        rate = (fetched_bytes - bytes_then) / took_s if took_s > 0 else 0.0
        self.progress = replace(
            self.progress, fetched_bytes=fetched_bytes, bytes_per_s=round(rate, 1)
        )


class NodeCopies:
    """The models that a board fetches on behalf of its node, for groups that are deployed later."""

    def __init__(
        self,
        models: Path,
        origin: Callable[[], ModelOrigin],
        *,
        pace: FetchPace = FetchPace(),
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        """``origin`` is called when a fetch begins; ``free`` returns the free bytes of a disk."""
        self._models = models
        self._origin = origin
        self._pace = pace
        self._free = free
        self._fetches: dict[str, tuple[ModelFetch, asyncio.Task[ModelCopy]]] = {}

    def look(self, name: str, max_bytes_per_s: float | None, *, again: bool) -> ModelCopy:
        """Return the state of a model's copy, and begin to fetch it if that has not begun.

        With ``again`` a fetch that has ended is begun anew, which compares the copy with the head.

        Raises:
            ConfigError: the name leads out of the folder of models.
        """
        if name not in self._fetches or (again and self._fetches[name][1].done()):
            pace = replace(self._pace, max_bytes_per_s=max_bytes_per_s)
            fetch = ModelFetch(
                name, self._models, self._origin(), pace=pace, free=self._free, prefetch=True
            )
            task = asyncio.get_running_loop().create_task(_prefetched(fetch), name=f"fetch {name}")
            self._fetches[name] = fetch, task
        fetch, task = self._fetches[name]
        if not task.done():
            return ModelCopy(CopyState.FETCHING, "", fetch.reason, fetch.progress)
        return task.result()

    async def close(self) -> None:
        """End all fetches; another process goes on with them."""
        tasks = [task for _, task in self._fetches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _prefetched(fetch: ModelFetch) -> ModelCopy:
    """Fetch a model, and return the copy, or why there is none."""
    try:
        _, version = await fetch.run()
    except RkserveError as exc:
        log.warning("model %s is not fetched any more: %s", fetch.name, exc)
        return ModelCopy(CopyState.FAILED, "", str(exc), fetch.progress)
    state = CopyState.STAGED if fetch.is_staged else CopyState.PRESENT
    return ModelCopy(state, version, "", fetch.progress)
