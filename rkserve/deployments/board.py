"""Ray's view of one board: a replica that owns a ``Board``, where everything worth testing is."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from pathlib import Path

import ray
from ray import serve

from rkserve.board.board import Board, BoardSettings
from rkserve.board.engine import EngineProcess, EngineSpec
from rkserve.board.slots import Slot, claim_slot
from rkserve.board.watchdog import Patience
from rkserve.config import BoardGroupConfig, engine_environ, resolve_folder
from rkserve.deployments.logs import log_with_serve
from rkserve.deployments.naming import Node, board_name, find_node
from rkserve.errors import BoardStartFailed, RkserveError
from rkserve.messages import BoardReport, Event, GenerateRequest
from rkserve.modelfolder import ModelFolder, open_model_folder
from rkserve.native.runtime import LoadParams

log = logging.getLogger(__name__)

MAX_REST_S = 30.0
UNREADABLE_COUNT = 3  # where the count cannot be read: rest 4 s rather than not at all


@dataclass(frozen=True, slots=True)
class Failures:
    """Start-ups of this board that failed in a row, remembered across replicas in a file.

    Ray starts a failed replica again at once and without end; on a small board that alone would
    keep a core busy, so each one rests before it tries.
    """

    path: Path

    def rest_s(self, now_s: float) -> float:
        """Seconds to wait before the next try."""
        count, last_s = self._read()
        if count == 0:
            return 0.0
        return max(0.0, min(2.0 ** (count - 1), MAX_REST_S) - (now_s - last_s))

    def add(self, now_s: float) -> None:
        """One more."""
        count, _ = self._read()
        fresh = self.path.with_suffix(".new")
        try:
            fresh.write_text(json.dumps({"count": count + 1, "time": now_s}), encoding="utf-8")
            fresh.replace(self.path)
        except OSError as exc:  # a full disk must not hide why the board failed
            log.warning("%s could not be written: %s", self.path, exc)

    def clear(self) -> None:
        """It works again."""
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
        self, group: BoardGroupConfig, state_dir: Path
    ) -> None:
        log_with_serve()
        self._replica = serve.get_replica_context().replica_id.unique_id
        state_dir = _on_this_node(state_dir)
        node = find_node(ray.nodes(), ray.get_runtime_context().get_node_id())
        self._slot = await _claim(group, state_dir, node)
        board_id = board_name(group, self._slot.index, node)
        failures = Failures(state_dir / f"{group.name}-{self._slot.index}.failures")
        await asyncio.sleep(failures.rest_s(time.time()))
        try:
            self._board = _build(group, board_id, node, state_dir)
            await self._board.start()
        except (RkserveError, OSError) as exc:
            failures.add(time.time())
            self._slot.release()
            raise BoardStartFailed(board_id, str(exc)) from None
        failures.clear()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event, None]:
        """Yield the events of one generation; see ``Board.generate``."""
        events = self._board.generate(request)
        try:
            async for event in events:
                yield event
        finally:
            await events.aclose()

    async def report(self) -> BoardReport:
        """Return the board's report, with the replica that wrote it."""
        return replace(self._board.report(), replica=self._replica)

    async def check_health(self) -> None:
        """Ray's question. Raises ``BoardFailed`` while the board cannot help itself."""
        self._board.check()

    async def __del__(self) -> None:
        """Ray's farewell: end the engine in order."""
        if hasattr(self, "_board"):
            await self._board.stop()


def _on_this_node(path: Path) -> Path:
    return path.expanduser()  # not earlier: the head's home may be another one


async def _claim(group: BoardGroupConfig, state_dir: Path, node: Node) -> Slot:
    """Claim a board of this node; a replaced replica may take a moment to let go of it."""
    slots = group.simulated.boards if group.simulated is not None else 1
    # A predecessor that is being redeployed may still be ending its answers.
    deadline_s = time.monotonic() + group.slot_timeout_s + group.drain_timeout_s
    while True:
        try:
            return claim_slot(state_dir, group.name, slots)
        except RkserveError as exc:
            if time.monotonic() >= deadline_s:
                raise BoardStartFailed(f"{group.name}@{node.name}", str(exc)) from None
        await asyncio.sleep(0.1)


def _build(group: BoardGroupConfig, board_id: str, node: Node, state_dir: Path) -> Board:
    folder = open_model_folder(resolve_folder(group.model))
    spec = _spec(group, board_id, folder, state_dir)
    patience = Patience(**group.patience.model_dump())
    settings = BoardSettings(
        board_id=board_id,
        model=folder.id,
        context_len=folder.settings.context_length,
        eos_ids=frozenset(folder.settings.eos_token_ids),
        sampling=folder.settings.sampling.values(),
        platform="simulated" if group.simulated is not None else _soc(),
        node=node.name,
        library=Path(spec.library).name,
        queue_limit=group.queue_limit,
        queue_timeout_s=group.queue_timeout_s,
        patience=patience,
        crash_limit=group.crash_limit,
        crash_window_s=group.crash_window_s,
        quarantine_s=group.quarantine_s,
    )
    return Board(settings, lambda: EngineProcess.start(board_id, spec))


def _spec(
    group: BoardGroupConfig, board_id: str, folder: ModelFolder, state_dir: Path
) -> EngineSpec:
    context_len = folder.settings.context_length
    return EngineSpec(
        library=str(_library(group)),
        params=LoadParams(
            model_path=str(folder.require_weights()),
            max_context_len=context_len,
            max_new_tokens=context_len,  # the ceiling; each request has its own limit below it
            sampling=folder.settings.sampling.values(),
            base_domain_id=group.base_domain_id,
            cpus=group.library_cpus,
        ),
        # Real engines are fenced per NPU domain, whatever group they belong to.
        fence=str(
            state_dir
            / (f"{board_id}.fence" if group.simulated else f"npu-{group.base_domain_id}.fence")
        ),
        text_mode=folder.tokenizer_file is None,
        environ=engine_environ(group, board_id),
        pin_cpus=group.pin_cpus,
        load_timeout_s=group.load_timeout_s,
    )


def _library(group: BoardGroupConfig) -> Path:
    if group.simulated is None:
        assert group.library is not None  # the configuration demands one of the two
        return group.library.expanduser()
    from rkserve.native.sim.build import ensure_built

    return ensure_built(group.simulated.release)


def _soc() -> str:
    """Return the SoC's name from the device tree, or the machine where there is none."""
    file = Path("/proc/device-tree/compatible")
    if not file.exists():
        return os.uname().machine
    names = file.read_bytes().decode(errors="replace").strip("\0").split("\0")
    return names[-1].split(",")[-1].upper()
