"""Ray's replica of one board; the logic is in ``Board``."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from ray import serve

from rkserve import __version__
from rkserve.board.board import Board
from rkserve.board.operations.fetch_model import FetchPace, ModelFetch, NodeCopies
from rkserve.config.board_group import BoardGroupConfig
from rkserve.config.router import ChannelConfig
from rkserve.core.board_report import (
    AdapterTrial,
    BoardReport,
    BoardState,
    CacheEntry,
    CopyState,
    Emitted,
    GenerationInfo,
    KvReport,
    LedgerCopy,
    ModelCopy,
)
from rkserve.core.desired_state import Adoption, Artifact, Desired, Probe
from rkserve.core.errors import (
    ArtifactNotFound,
    BoardOutOfOrder,
    BoardStartFailed,
    RkserveError,
)
from rkserve.core.files import write_private
from rkserve.core.logs import LogPage, LogQuery
from rkserve.core.messages import (
    AdapterRef,
    CacheOffer,
    CacheQuery,
    ControlAction,
    Edit,
    EmbedRequest,
    Event,
    GenerateRequest,
    PassDelta,
)
from rkserve.deployments.board_factory import (
    BoardLocation,
    HardwareView,
    NodeSlot,
    assemble,
    claim_slot,
)
from rkserve.deployments.model_origin import RayModelOrigin
from rkserve.deployments.ray_metrics import RayBoardMetrics
from rkserve.deployments.replica import (
    Node,
    board_name,
    find_node,
    forget_admin_key,
    log_with_serve,
    settle,
)
from rkserve.models.index import ModelIndex, piece_of
from rkserve.models.shelf import known_index
from rkserve.transport.server import ChannelAddress, ChannelServer

log = logging.getLogger(__name__)

MAX_REST_S = 30.0
MODELS = "models"  # fetched ones, in the state folder
CHECK_S = 10.0  # for a comparison of a copy with the head's model
UNREADABLE_COUNT = 3  # if the count cannot be read: wait 4 s rather than not at all


@dataclass(frozen=True, slots=True)
class CatalogPlace:
    """A model's folder in the catalogue on the head, and the limit of its fetches."""

    folder: Path
    max_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Failures:
    """Consecutive failed start-ups of this board, stored in a file across replicas.

    Ray restarts a failed replica at once and endlessly, which would keep a core of a small board
    busy; so each replica waits before it tries.
    """

    path: Path

    def rest_s(self, now_s: float) -> float:
        """Seconds to wait before the next try."""
        count, last_s = self._read()
        if count == 0:
            return 0.0
        return max(0.0, min(2.0 ** (count - 1), MAX_REST_S) - (now_s - last_s))

    def add(self, now_s: float) -> None:
        """Count a failure."""
        count, _ = self._read()
        fresh = self.path.with_suffix(".new")
        try:
            write_private(fresh, json.dumps({"count": count + 1, "time": now_s}))
            fresh.replace(self.path)
        except OSError as exc:  # a full disk must not hide the reason of the board's failure
            log.warning("%s could not be written: %s", self.path, exc)

    def clear(self) -> None:
        """Reset the count after a successful start."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as exc:
            log.warning("%s could not be removed: %s", self.path, exc)

    def _read(self) -> tuple[int, float]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
            return int(found["count"]), float(found["time"])
        except FileNotFoundError:
            return 0, 0.0
        except (ValueError, KeyError, TypeError) as exc:
            log.warning("the count in %s is damaged and was ignored: %s", self.path, exc)
            return 0, 0.0
        except OSError as exc:
            log.warning("%s cannot be read: %s", self.path, exc)
            return UNREADABLE_COUNT, time.time()


class BoardReplica:
    """One replica, one board. The constructor returns once the model is loaded, or is fetched.

    Raises:
        BoardStartFailed: from the constructor, so that ``serve status`` shows the reason.
    """

    async def __init__(  # type: ignore[misc] # Ray awaits an async constructor
        self,
        group: BoardGroupConfig,
        state_dir: Path,
        channel: ChannelConfig,
        catalog: CatalogPlace | None = None,
    ) -> None:
        """``catalog`` is the place of a group's model in the head's catalogue."""
        forget_admin_key(os.environ)
        self._log_ring = log_with_serve()
        self._replica = serve.get_replica_context().replica_id.unique_id
        state_dir = _on_this_node(state_dir)
        node = find_node(ray.nodes(), ray.get_runtime_context().get_node_id())
        self._slot = await _claim(group, state_dir, node)
        board_id = board_name(group, self._slot.index, node)
        failures = Failures(state_dir / f"{group.name}-{self._slot.index}.failures")
        await asyncio.sleep(failures.rest_s(time.time()))
        self._hardware = HardwareView.of(group, state_dir / f"{board_id}.hardware")
        self._location = BoardLocation(board_id, node.name, state_dir)
        self._group, self._drain_s = group, group.drain_timeout_s
        self._opened: Board | None = None
        self._failure: BoardStartFailed | None = None
        self._copy: tuple[Path, ModelIndex] | None = None  # of a model of the catalogue
        self._fetch: ModelFetch | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._on_head = node.is_head
        # On the head the catalogue itself is served.
        self._copies = None if node.is_head else NodeCopies(state_dir / MODELS, RayModelOrigin)
        self._failures = failures
        if catalog is not None:
            await self._find_copy(catalog, state_dir / MODELS, is_head=node.is_head)
        if self._fetch is None:
            await self._open()
        self._outlet = await _listen(board_id, channel, self)
        if self._fetch is not None:
            self._fetching = asyncio.get_running_loop().create_task(
                self._open_fetched(self._fetch), name="fetch the model"
            )
        settle()

    async def _find_copy(self, catalog: CatalogPlace, models: Path, *, is_head: bool) -> None:
        """Use the catalogue itself on the head, or a copy on this node, or begin to fetch one."""
        name = catalog.folder.name
        if is_head:
            self._use(catalog.folder, None)
            return
        origin = RayModelOrigin()
        known = await asyncio.to_thread(known_index, models / name)
        if known is not None:
            try:
                wanted = await asyncio.wait_for(origin.index(name), CHECK_S)
            except (RkserveError, TimeoutError, asyncio.TimeoutError) as exc:
                # A board that has a whole copy needs no head to serve it.
                log.warning("the copy of %s was not compared with the head's: %s", name, exc)
                wanted = known
            if wanted.version == known.version:
                self._use(models / name, known)
                return
        pace = FetchPace(max_bytes_per_s=catalog.max_bytes_per_s)
        self._fetch = ModelFetch(name, models, origin, pace=pace)

    def _use(self, folder: Path, index: ModelIndex | None) -> None:
        self._group = self._group.model_copy(update={"model": folder})
        self._copy = None if index is None else (folder, index)

    async def _open(self) -> None:
        """Load the model. Raises ``BoardStartFailed``."""
        try:
            # Digests of models and libraries take a while.
            board = await asyncio.to_thread(
                assemble, self._group, self._location, self._hardware.platform
            )
            await board.start()
        except (RkserveError, OSError) as exc:
            self._failures.add(time.time())
            self._slot.release()
            raise BoardStartFailed(self._location.board_id, str(exc)) from None
        self._opened = board
        self._in_ray = RayBoardMetrics(self._location.board_id, board.settings.model)
        self._failures.clear()

    async def _open_fetched(self, fetch: ModelFetch) -> None:
        """Fetch the model, and load it. A failure makes the next health check fail."""
        folder, _ = await fetch.run()
        self._use(folder, await asyncio.to_thread(known_index, folder))
        try:
            await self._open()
        except BoardStartFailed as exc:
            log.error("%s", exc)  # noqa: TRY400 - the message is the reason
            self._failure = exc

    @property
    def _board(self) -> Board:
        """The board. Raises ``BoardOutOfOrder`` while its model is fetched."""
        if self._opened is None:
            raise BoardOutOfOrder(self._location.board_id, "it fetches its model")
        return self._opened

    async def generate(
        self, request: GenerateRequest, pass_on: PassDelta | None = None
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of one generation; see ``Board.generate``."""
        events = self._board.generate(request, pass_on=pass_on)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    async def embed(self, request: EmbedRequest) -> AsyncGenerator[Event, None]:
        """Yield the events of one request for vectors; see ``Board.embed``."""
        async with aclosing(self._board.embed(request)) as events:
            async for event in events:
                yield event

    async def channel(self) -> ChannelAddress | None:
        """Return the address for Routers' connections; None if there is none."""
        return self._outlet.address

    async def report(self) -> BoardReport:
        """Return the board's report, with the replica that wrote it."""
        if self._opened is None:
            return await self._report_fetch()
        report = self._opened.report()
        self._in_ray.update(report)
        hardware = await self._hardware.read(busy=report.running > 0)
        copy = "" if self._copy is None else self._copy[1].version
        return replace(
            report,
            replica=self._replica,
            hardware=hardware,
            copy=copy,
            version=__version__,
            on_head=self._on_head,
        )

    async def _report_fetch(self) -> BoardReport:
        """Return the report of a board without a model."""
        fetch = self._fetch
        assert fetch is not None  # without one, the constructor has opened the board
        hardware = await self._hardware.read(busy=False)
        blocked = fetch.is_blocked or self._failure is not None
        return BoardReport(
            board_id=self._location.board_id,
            model=fetch.name,
            state=BoardState.FAILED if blocked else BoardState.FETCHING,
            reason=fetch.reason if self._failure is None else self._failure.reason,
            platform=self._hardware.platform,
            node=self._location.node,
            pid=os.getpid(),
            replica=self._replica,
            hardware=hardware,
            fetch=fetch.progress,
            version=__version__,
        )

    async def send_cache(self, query: CacheQuery) -> AsyncGenerator[CacheOffer | bytes, None]:
        """Yield a prompt cache file for another board; see ``PromptCaching.send``."""
        async with aclosing(self._board.send_cache(query)) as parts:
            async for part in parts:
                yield part

    async def model_piece(self, name: str, version: str, path: str, number: int) -> bytes:
        """Return a piece of this board's copy of a model, for another board.

        Raises:
            ArtifactNotFound: it has no such copy.
        """
        if self._copy is None or self._copy[1].name != name:
            raise ArtifactNotFound(f"This board has no copy of {name}.", "model")
        folder, index = self._copy
        return await asyncio.to_thread(piece_of, index, folder, version, path, number)

    async def prefetch_model(
        self, name: str, max_bytes_per_s: float | None, again: bool
    ) -> ModelCopy:
        """Fetch a model of the catalogue for this node; see ``NodeCopies.look``."""
        if self._copies is None:
            return ModelCopy(CopyState.PRESENT, reason="the head serves its catalogue")
        return self._copies.look(name, max_bytes_per_s, again=again)

    async def logs(self, query: LogQuery) -> LogPage:
        """Return lines of this board's log, those of its engine included."""
        return self._log_ring.page(query)

    async def forgive(self) -> None:
        """Do not count the last loss of the engine; see ``Board.forgive``."""
        self._board.forgive()

    async def generations(self) -> list[GenerationInfo]:
        """Return the board's generations; see ``Board.generations``."""
        return self._board.generations()

    async def emitted(self) -> Emitted:
        """Return the token counts of the board's generations; see ``Board.emitted``."""
        return self._board.emitted()

    async def control(
        self, generation: str, action: ControlAction, edit: Edit | None, choice: int | None
    ) -> list[GenerationInfo]:
        """Pause, edit, resume or abort; see ``Board.control``.

        The effects, except those of an abort, have left the board on return.
        """
        done = await self._board.control(generation, action, edit, choice)
        if action is not ControlAction.ABORT:
            await self._board.given_out(done, action)
        return done

    async def kv(self) -> KvReport:
        """Return the contents of the KV cache."""
        return self._board.kv()

    async def clear_kv(self, keep_system_prompt: bool) -> KvReport:
        """Clear the KV cache; see ``Board.clear_kv``."""
        return await self._board.clear_kv(keep_system_prompt)

    async def build_cache(
        self, name: str, ids: tuple[int, ...], adapter: AdapterRef | None
    ) -> CacheEntry:
        """Build a named prompt cache; see ``Board.build_cache``."""
        return await self._board.build_cache(name, ids, adapter)

    async def caches(self) -> list[CacheEntry]:
        """Return the prompt caches on this board's disk."""
        return self._board.caches()

    async def delete_cache(self, name: str) -> bool:
        """Delete a named prompt cache; False if there is none."""
        return await self._board.delete_cache(name)

    async def adopt(self, desired: Desired) -> Adoption:
        """Adopt the desired state; see ``Board.adopt``."""
        return await self._board.adopt(desired)

    async def follow(self, desired: Desired) -> Adoption:
        """Adopt a later desired state; see ``StateAdopter.follow``."""
        return await self._board.follow(desired)

    async def load_adapter(
        self, ref: AdapterRef, prompt_ids: tuple[int, ...], tokens: int
    ) -> Probe:
        """Load an adapter and try it; see ``Board.load_adapter``."""
        return await self._board.load_adapter(ref, prompt_ids, tokens)

    async def try_adapter(
        self, ref: AdapterRef, prompt_ids: tuple[int, ...], tokens: int
    ) -> AdapterTrial:
        """Try an adapter in an engine that serves nothing; see ``AdapterProbes.try_fresh``."""
        return await self._board.try_adapter(ref, prompt_ids, tokens)

    async def renew(self, reason: str) -> None:
        """Replace the engine by a fresh one; see ``Board.refresh``."""
        await self._board.refresh(reason)

    async def restart_engine(self, reason: str) -> None:
        """Replace the engine at once; see ``Board.restart``."""
        await self._board.restart(reason)

    async def measure(self, seconds: float, wait: bool) -> Probe:
        """Measure the board's speed; see ``SpeedTrials.measure``."""
        return await self._board.measure(seconds, wait)

    async def abort_all(self, request_ids: tuple[str, ...] | None) -> int:
        """Abort generations; see ``Board.abort_all``."""
        return self._board.abort_all(request_ids)

    async def stage_begin(self, version: Artifact | LedgerCopy) -> int:
        """Return how many bytes of the version are on this board; see ``Intake.begin``."""
        return await asyncio.to_thread(self._board.intake.begin, version)

    async def stage_chunk(self, digest: str, offset: int, data: bytes) -> int:
        """Write a part of a file; see ``Intake.chunk``."""
        return await asyncio.to_thread(self._board.intake.chunk, digest, offset, data)

    async def stage_commit(self, version: Artifact | LedgerCopy) -> None:
        """Make the version present; see ``Intake.commit``."""
        await asyncio.to_thread(self._board.intake.commit, version)

    async def staged_part(self, version: Artifact, offset: int, size: int) -> bytes:
        """Return a part of a staged file; see ``Intake.read``."""
        return await asyncio.to_thread(self._board.intake.read, version, offset, size)

    async def ledger_copies(self, cluster: str) -> tuple[LedgerCopy, ...]:
        """Return this board's copies of a cluster's ledger; see ``LedgerCopies.of``."""
        return await asyncio.to_thread(self._board.ledger_copies, cluster)

    async def unstage(self, version: Artifact) -> bool:
        """Remove an unused version from the disk; see ``Intake.remove``."""
        return await asyncio.to_thread(self._board.intake.remove, version)

    async def check_health(self) -> None:
        """Raise ``BoardFailed`` while the board cannot recover by itself. Called by Ray."""
        if self._failure is not None:
            raise BoardStartFailed(*self._failure.args)
        if self._fetching is not None and self._fetching.done():
            self._fetching.result()  # an internal error
        if self._opened is not None:
            self._opened.check()

    async def __del__(self) -> None:
        """End the fetch or the engine in order. Called by Ray before the replica ends."""
        fetching: asyncio.Task[None] | None = getattr(self, "_fetching", None)
        if fetching is not None:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)
        copies: NodeCopies | None = getattr(self, "_copies", None)
        if copies is not None:
            await copies.close()
        if hasattr(self, "_outlet"):
            await self._outlet.drain(self._drain_s)
            await self._outlet.close()
        opened: Board | None = getattr(self, "_opened", None)
        if opened is not None:
            await opened.stop()


def _on_this_node(path: Path) -> Path:
    return path.expanduser()  # not earlier: the head's home may be another one


async def _listen(board_id: str, config: ChannelConfig, board: BoardReplica) -> ChannelServer:
    """Listen for Routers; without a free port, their calls come through Ray."""
    outlet = ChannelServer(board_id, config, board)
    if config.enabled:
        try:
            await outlet.listen(ray.util.get_node_ip_address())
        except OSError as exc:
            log.warning("board %s: Routers cannot connect to it: %s", board_id, exc)
    return outlet


async def _claim(group: BoardGroupConfig, state_dir: Path, node: Node) -> NodeSlot:
    """Claim a board of this node; a replaced replica may take a moment to release it."""
    slots = group.simulated.boards if group.simulated is not None else 1
    # A predecessor that is being redeployed may still be finishing its answers.
    deadline_s = time.monotonic() + group.slot_timeout_s + group.drain_timeout_s
    while True:
        try:
            return claim_slot(state_dir, group.name, slots)
        except RkserveError as exc:
            if time.monotonic() >= deadline_s:
                raise BoardStartFailed(f"{group.name}@{node.name}", str(exc)) from None
        await asyncio.sleep(0.1)
