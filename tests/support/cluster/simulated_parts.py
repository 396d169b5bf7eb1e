"""The parts of a simulated cluster: messages, engines, boards' machines, links and the head."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rkserve.board.board import Board
from rkserve.board.engine.protocol import OnToken, RunCommand
from rkserve.board.rules.hang_limits import RunTimeouts
from rkserve.board.run.settings import BoardSettings
from rkserve.config.serve_config import CoordinatorConfig
from rkserve.coordinator.boards.transfer import TransferLimits
from rkserve.coordinator.coordinator import Coordinator, CoordinatorPorts
from rkserve.coordinator.state.ledger import Ledger
from rkserve.core.board_report import BoardReport
from rkserve.core.errors import (
    BoardFailed,
    BoardGone,
    BoardSilent,
    BoardStartFailed,
    CoordinatorAway,
    RkserveError,
)
from rkserve.core.messages import (
    Event,
    GenerateRequest,
)
from rkserve.fleet.fleet import Fleet
from tests.support.boards.fakes import EOS, QUIRKS, FakeEngine, Play, Script
from tests.support.cluster.fake_cluster import MODEL, FakeStore
from tests.support.cluster.simulated_history import CLIENT, HEAD, History, next_token, now_s

TOKEN_S = 0.02
CONNECTION_S = 5.0  # a connection without a heartbeat for so long is given up
PATIENCE = RunTimeouts(first_token_s=3.0, prefill_per_token_s=0.0, token_s=3.0, abort_s=0.5)
PACE = TransferLimits(
    chunk_bytes=64, patience_s=2.0, tries=3, first_delay_s=0.05, longest_delay_s=0.5
)


@dataclass
class Network:
    """Messages between the parties of the cluster, named by strings."""

    rng: random.Random
    loss: float = 0.01
    slowest_s: float = 0.05
    _cut: dict[tuple[str, str], float] = field(default_factory=dict)
    _healed: asyncio.Event = field(default_factory=asyncio.Event)

    def cut(self, source: str, target: str) -> None:
        """Hold back every message in this direction."""
        self._cut.setdefault((source, target), now_s())

    def heal(self) -> None:
        """Let every message pass, also those that were held back."""
        self._cut.clear()
        self._healed.set()
        self._healed = asyncio.Event()

    def silent(self, one: str, other: str) -> bool:
        """Whether a connection of both has been without messages for too long."""
        cuts = [self._cut.get(pair) for pair in ((one, other), (other, one))]
        return any(at is not None and now_s() - at > CONNECTION_S for at in cuts)

    async def carry(self, source: str, target: str) -> bool:
        """Deliver a message; False where it is lost."""
        if self.rng.random() < self.loss:
            return False
        await asyncio.sleep(self.rng.random() ** 4 * self.slowest_s)
        while (source, target) in self._cut:
            await self._healed.wait()
        return True


class Engine(FakeEngine):
    """An engine whose tokens tell its weights; clients' tokens are noted with their time."""

    def __init__(self, base: str, emitted: Callable[[str | None], None]) -> None:
        self._emitted, self._adapter = emitted, None

        def script(command: RunCommand) -> Script:
            if not command.resume:
                self._adapter = command.adapter
            model = partial(next_token, base, self._adapter)
            return Script([], model=model, pace_s=TOKEN_S)

        super().__init__(script, quirks=QUIRKS)

    def _emit(self, play: Play, live: list[tuple[int, int, bytes]], on_token: OnToken) -> bool:
        if self.kv[:1] == [CLIENT]:
            self._emitted(self._adapter)
        return super()._emit(play, live, on_token)


@dataclass
class Node:
    """One board's machine: its disk, and the replica of the moment."""

    name: str
    folder: Path
    history: History
    life: int = 0
    board: Board | None = None
    engine: Engine | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def replica(self) -> str:
        return f"{self.name}/{self.life}"

    async def start(self) -> None:
        """Start the next replica on the disk that there is."""
        self.life += 1
        self.ended = asyncio.Event()
        settings = BoardSettings(
            self.name,
            MODEL,
            context_len=256,
            eos_ids=frozenset({EOS}),
            patience=PATIENCE,
            crash_limit=1000,
            quarantine_s=0.5,
            vocab_size=10_000,
            governed=True,
            staged_dir=self.folder / "staged",
            weights_dir=self.folder / "weights",
            base_file=self.folder / "base",
            asleep_file=self.folder / "asleep",
            base_rest_s=1.0,
            load_patience_s=0.5,
            queue_timeout_s=60.0,
        )
        board = Board(settings, self._start_engine)
        await board.start()
        self.board = board

    async def _start_engine(self, weights: Path | None) -> Engine:
        await asyncio.sleep(0.2)
        base = ""
        if weights is not None:
            base = hashlib.sha256(await asyncio.to_thread(weights.read_bytes)).hexdigest()
        self.engine = Engine(base, lambda adapter: self.history.token(self.name, adapter))
        return self.engine

    async def crash(self) -> None:
        """End the replica: no call gets an answer any more."""
        board, self.board = self.board, None
        self.ended.set()
        if board is not None:
            await board.stop()


class Link:
    """``BoardLink`` of one party to all boards."""

    def __init__(self, me: str, nodes: dict[str, Node], network: Network, tasks: Tasks) -> None:
        self._me, self._nodes, self._network, self._tasks = me, nodes, network, tasks
        self.complete = False

    async def ask(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        """Call; the board may execute a call whose caller has given up."""
        task = self._tasks.start(self._deliver(replica, method, args))
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            raise BoardSilent(replica, f"nothing came within {timeout_s:g} s")
        return task.result()

    async def _deliver(self, replica: str, method: str, args: tuple[Any, ...]) -> Any:
        node = self._nodes[replica.partition("/")[0]]
        lost = BoardFailed(replica, "the connection ended")
        if not await self._network.carry(self._me, node.name):
            raise lost
        board = node.board
        if board is None or node.replica != replica:
            raise BoardGone(replica, "its replica died")
        work = self._tasks.start(_call(board, method, args))
        over = asyncio.ensure_future(node.ended.wait())
        await asyncio.wait({work, over}, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if not work.done():
            work.cancel()
            raise BoardGone(replica, "its replica died")
        answer = work.result()
        if not await self._network.carry(node.name, self._me):
            raise lost
        return replace(answer, replica=replica) if isinstance(answer, BoardReport) else answer

    def cache_source(self, replica: str, tokens: int) -> None:
        return None

    async def ask_all(
        self, method: str, *args: Any, timeout_s: float, take: Callable[[Any], None]
    ) -> None:
        """See ``BoardLink``."""

        async def one(node: Node) -> None:
            with suppress(RkserveError):
                take(await self.ask(node.replica, method, *args, timeout_s=timeout_s))

        await asyncio.gather(*(one(node) for node in self._nodes.values()))

    async def reports(self) -> list[BoardReport]:
        """See ``BoardLink``; a replica that is being started is none yet."""
        found: list[BoardReport] = []
        there = [node for node in self._nodes.values() if node.board is not None]

        async def one(node: Node) -> None:
            with suppress(RkserveError):
                found.append(await self.ask(node.replica, "report", timeout_s=0.5))

        await asyncio.gather(*(one(node) for node in there))
        self.complete = len(found) == len(there)
        return found

    def has_new(self) -> bool:
        """See ``BoardLink``."""
        return False

    async def has_running(self) -> bool:
        """See ``BoardLink``."""
        return True

    async def start_failure(self) -> BoardStartFailed | None:
        """See ``BoardLink``."""
        return None

    async def open(
        self, request: GenerateRequest, replica: str, take: object = None
    ) -> AsyncGenerator[Event, None]:
        """Stream; the party that no longer hears the other ends its side after a while."""
        node = self._nodes[replica.partition("/")[0]]
        coming: asyncio.Queue[Event | RkserveError | None] = asyncio.Queue()
        pump = self._tasks.start(self._pump(node, replica, request, coming))
        try:
            while True:
                try:
                    event = await asyncio.wait_for(coming.get(), 0.5)
                except (TimeoutError, asyncio.TimeoutError):
                    if self._network.silent(self._me, node.name):
                        raise BoardFailed(replica, "the connection ended") from None
                    continue
                if event is None:
                    return
                if isinstance(event, RkserveError):
                    raise event
                yield event
        finally:
            self._tasks.start(self._hang_up(node, pump))

    async def _pump(
        self,
        node: Node,
        replica: str,
        request: GenerateRequest,
        coming: asyncio.Queue[Event | RkserveError | None],
    ) -> None:
        """The board's side of a stream."""
        try:
            if not await self._network.carry(self._me, node.name):
                raise BoardFailed(replica, "the connection ended")
            board = node.board
            if board is None or node.replica != replica:
                raise BoardGone(replica, "its replica died")
            async with aclosing(board.generate(request)) as events:
                async for event in events:
                    if not await self._network.carry(node.name, self._me):
                        raise BoardFailed(replica, "the connection ended")
                    if node.ended.is_set():
                        raise BoardGone(replica, "its replica died")
                    coming.put_nowait(event)
            coming.put_nowait(None)
        except RkserveError as exc:
            coming.put_nowait(exc)

    async def _hang_up(self, node: Node, pump: asyncio.Task[None]) -> None:
        """Let the board know that the Router no longer listens."""
        if not pump.done():
            gone_s = now_s() + CONNECTION_S
            said = self._tasks.start(self._network.carry(self._me, node.name))
            await asyncio.wait({said}, timeout=max(0.0, gone_s - now_s()))
            pump.cancel()


async def _call(board: Board, method: str, args: tuple[Any, ...]) -> Any:
    """Do as ``deployments.board`` does with a call."""
    named: dict[str, Callable[..., Any]] = {
        "stage_begin": board.intake.begin,
        "stage_chunk": board.intake.chunk,
        "stage_commit": board.intake.commit,
        "unstage": board.intake.remove,
        "staged_part": board.intake.read,
        "renew": board.refresh,
        "restart_engine": board.restart,
    }
    said = named.get(method, getattr(board, method, None))
    assert said is not None, method
    result = said(*args)
    return await result if isinstance(result, Awaitable) else result


class Tasks:
    """The tasks of the world, ended with it; an error that is none of rkserve's fails the run."""

    def __init__(self) -> None:
        self._running: dict[asyncio.Task[Any], None] = {}
        self.failed: list[BaseException] = []

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._running[task] = None
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.pop(task, None)
        if task.cancelled():
            return
        exc = task.exception()
        if exc is not None and not isinstance(exc, RkserveError):
            self.failed.append(exc)

    async def end(self) -> None:
        for task in list(self._running):
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


class Head:
    """The Coordinator's process on the head: its ledger outlives it."""

    def __init__(self, folder: Path, link: Link) -> None:
        self._folder, self._link = folder, link
        self.store = FakeStore()
        self.it: Coordinator | None = None
        self.ended = asyncio.Event()
        self.kept: Ledger | None = None

    async def start(self) -> None:
        """Start the next one."""
        self.kept = Ledger.open(self._folder)
        self.kept._database.execute("PRAGMA synchronous = OFF")
        config = CoordinatorConfig(
            data_dir=self._folder, report_s=0.5, operation_timeout_s=20.0, stage_timeout_s=20.0
        )
        outside = CoordinatorPorts(
            Fleet({"g": self._link}, {"g": MODEL}),
            self.kept,
            self.store,
            lambda data: data,
            now_s=now_s,  # its default was bound before the clock was replaced
            elapsed_s=now_s,
            pace=PACE,
        )
        it = Coordinator(config, outside)
        self.ended = asyncio.Event()
        await it.start()
        self.it = it

    async def crash(self) -> None:
        """End it in the middle of its work."""
        it, self.it = self.it, None
        self.ended.set()
        if it is not None and self.kept is not None:
            await it.stop()
            self.kept.close()
            self.kept = None


class HeadLink:
    """``CoordinatorLink`` of one Router."""

    def __init__(self, me: str, head: Head, network: Network, tasks: Tasks) -> None:
        self._me, self._head, self._network, self._tasks = me, head, network, tasks

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call; the Coordinator may execute a call whose caller has given up."""
        task = self._tasks.start(self._deliver(method, args))
        done, _ = await asyncio.wait({task}, timeout=timeout_s)
        if not done:
            raise CoordinatorAway(f"The Coordinator did not answer within {timeout_s:g} s.")
        return task.result()

    async def _deliver(self, method: str, args: tuple[Any, ...]) -> Any:
        away = CoordinatorAway("The connection to the Coordinator was lost.")
        if not await self._network.carry(self._me, HEAD) or self._head.it is None:
            raise away
        said = getattr(self._head.it, method)(*args)
        if isinstance(said, Coroutine):
            work = self._tasks.start(said)
            over = asyncio.ensure_future(self._head.ended.wait())
            await asyncio.wait({work, over}, return_when=asyncio.FIRST_COMPLETED)
            over.cancel()
            if not work.done():
                work.cancel()
                raise away
            said = work.result()
        if not await self._network.carry(HEAD, self._me):
            raise away
        return said
