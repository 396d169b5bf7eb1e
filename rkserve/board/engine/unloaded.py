"""What stands in for the engine of a board that sleeps, and the mark that outlives its replica.

A board that sleeps has no engine, and yet has to say what its runtime is like: which sampling it
takes, how many inputs. The mark is a file beside the board's other state. It keeps a replica that
starts again from loading a model that nobody wants; who wakes the board is not decided here.
"""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rkserve.board.engine.protocol import EngineFacts, OnScores, OnToken, RunCommand, RunEnded
from rkserve.core.durable_files import write_private
from rkserve.core.errors import EngineDied

log = logging.getLogger(__name__)

WHY = "its model is unloaded"


class UnloadedEngine:
    """The ``Engine`` of a board without one: it has ended, holds nothing, and does nothing."""

    pid = 0

    def __init__(self, board_id: str, facts: EngineFacts) -> None:
        """``facts`` are those of the engine before it."""
        self._board_id = board_id
        self.facts = facts
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.died.set_result(WHY)

    def run(
        self, command: RunCommand, on_token: OnToken, on_scores: OnScores | None = None
    ) -> asyncio.Future[RunEnded]:
        """There is nobody to make it."""
        del command, on_token, on_scores
        return self._refused()

    def call(self, method: str, **args: Any) -> asyncio.Future[Any]:
        """There is nobody to make it."""
        del method, args
        return self._refused()

    def _refused(self) -> asyncio.Future[Any]:
        refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        refused.set_exception(EngineDied(self._board_id, WHY))
        return refused

    def pause(self, run_id: int) -> None:
        """There is no run."""

    def abort(self, run_id: int) -> None:
        """There is no run."""

    def silent_s(self) -> float:
        """Nothing is expected of it."""
        return 0.0

    async def stop(self) -> None:
        """It has ended."""

    async def kill(self) -> bool:
        """It has ended."""
        return True


class SleepMarker:
    """The file that says that a board sleeps. All methods touch the disk; none of them raises.

    It is a convenience: where it is missing or damaged, a model is loaded for nothing.
    """

    def __init__(self, path: Path | None) -> None:
        """``path`` of None remembers nothing."""
        self._path = path

    def read(self, n_batch: int) -> EngineFacts | None:
        """Return what the engine was like that was unloaded; None where the board was awake."""
        if self._path is None:
            return None
        try:
            facts = _facts(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as exc:
            log.warning("%s is damaged, and the model is loaded: %s", self._path, exc)
            self.remove()
            return None
        return replace(facts, n_batch=n_batch)  # it may have been configured anew since

    def write(self, facts: EngineFacts) -> None:
        """Note that the board sleeps."""
        if self._path is None:
            return
        fresh = self._path.with_suffix(".asleep.new")
        content = json.dumps(asdict(replace(facts, quirks=dict(facts.quirks))))
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_private(fresh, content)
            fresh.replace(self._path)
        except OSError as exc:
            log.warning("%s cannot be written; a restart loads the model: %s", self._path, exc)

    def remove(self) -> None:
        """Note that the board is awake, or about to be."""
        if self._path is None:
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as exc:
            log.warning("%s cannot be removed: %s", self._path, exc)


def _facts(found: Any) -> EngineFacts:
    """Raises ``KeyError``, ``TypeError``, ``ValueError`` for what was not written here."""
    quirks = {str(name): bool(value) for name, value in dict(found["quirks"]).items()}
    if not isinstance(found["per_run_sampling"], bool) or not isinstance(found["release"], str):
        raise TypeError("it is not what was written")
    return EngineFacts(
        release=found["release"],
        per_run_sampling=found["per_run_sampling"],
        quirks=quirks,
        load_s=float(found["load_s"]),
        n_batch=int(found["n_batch"]),
    )
