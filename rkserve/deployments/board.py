"""Ray's replica of one board; the logic is in ``Board``."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from ray import serve

from rkserve.config.board_group import BoardGroupConfig
from rkserve.config.router import ChannelConfig
from rkserve.core.board_report import BoardReport, CacheEntry, Emitted, GenerationInfo, KvReport
from rkserve.core.desired_state import Adoption, Artifact, Desired, Probe
from rkserve.core.errors import BoardStartFailed, RkserveError
from rkserve.core.files import write_private
from rkserve.core.messages import (
    AdapterRef,
    ControlAction,
    Edit,
    EmbedRequest,
    Event,
    GenerateRequest,
)
from rkserve.deployments.board_factory import (
    BoardLocation,
    HardwareView,
    NodeSlot,
    assemble,
    claim_slot,
)
from rkserve.deployments.replica import Node, board_name, find_node, log_with_serve
from rkserve.transport.server import ChannelAddress, ChannelServer

log = logging.getLogger(__name__)

MAX_REST_S = 30.0
UNREADABLE_COUNT = 3  # if the count cannot be read: wait 4 s rather than not at all


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
    """One replica, one board. The constructor returns once the model is loaded.

    Raises:
        BoardStartFailed: from the constructor, so that ``serve status`` shows the reason.
    """

    async def __init__(  # type: ignore[misc] # Ray awaits an async constructor
        self, group: BoardGroupConfig, state_dir: Path, channel: ChannelConfig
    ) -> None:
        log_with_serve()
        self._replica = serve.get_replica_context().replica_id.unique_id
        state_dir = _on_this_node(state_dir)
        node = find_node(ray.nodes(), ray.get_runtime_context().get_node_id())
        self._slot = await _claim(group, state_dir, node)
        board_id = board_name(group, self._slot.index, node)
        failures = Failures(state_dir / f"{group.name}-{self._slot.index}.failures")
        await asyncio.sleep(failures.rest_s(time.time()))
        self._hardware = HardwareView.of(group, state_dir / f"{board_id}.hardware")
        try:
            place = BoardLocation(board_id, node.name, state_dir)
            # Digests of models and libraries take a while.
            self._board = await asyncio.to_thread(assemble, group, place, self._hardware.platform)
            await self._board.start()
        except (RkserveError, OSError) as exc:
            failures.add(time.time())
            self._slot.release()
            raise BoardStartFailed(board_id, str(exc)) from None
        self._drain_s = group.drain_timeout_s
        self._outlet = await _listen(board_id, channel, self)
        failures.clear()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Yield the events of one generation; see ``Board.generate``."""
        events = self._board.generate(request)
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
        report = self._board.report()
        hardware = await self._hardware.read(busy=report.running > 0)
        return replace(report, replica=self._replica, hardware=hardware)

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

    async def load_adapter(
        self, ref: AdapterRef, prompt_ids: tuple[int, ...], tokens: int
    ) -> Probe:
        """Load an adapter and try it; see ``Board.load_adapter``."""
        return await self._board.load_adapter(ref, prompt_ids, tokens)

    async def renew(self, reason: str) -> None:
        """Replace the engine by a fresh one; see ``Board.refresh``."""
        await self._board.refresh(reason)

    async def abort_all(self, request_ids: tuple[str, ...] | None) -> int:
        """Abort generations; see ``Board.abort_all``."""
        return self._board.abort_all(request_ids)

    async def stage_begin(self, version: Artifact) -> int:
        """Return how many bytes of the version are on this board; see ``Intake.begin``."""
        return await asyncio.to_thread(self._board.intake.begin, version)

    async def stage_chunk(self, digest: str, offset: int, data: bytes) -> int:
        """Write a part of a file; see ``Intake.chunk``."""
        return await asyncio.to_thread(self._board.intake.chunk, digest, offset, data)

    async def stage_commit(self, version: Artifact) -> None:
        """Make the version present; see ``Intake.commit``."""
        await asyncio.to_thread(self._board.intake.commit, version)

    async def unstage(self, version: Artifact) -> bool:
        """Remove an unused version from the disk; see ``Intake.remove``."""
        return await asyncio.to_thread(self._board.intake.remove, version)

    async def check_health(self) -> None:
        """Raise ``BoardFailed`` while the board cannot recover by itself. Called by Ray."""
        self._board.check()

    async def __del__(self) -> None:
        """End the engine in order. Called by Ray before the replica ends."""
        if hasattr(self, "_outlet"):
            await self._outlet.drain(self._drain_s)
            await self._outlet.close()
        if hasattr(self, "_board"):
            await self._board.stop()


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
