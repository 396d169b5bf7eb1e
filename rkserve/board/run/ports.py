"""The parts of a board that its modules share: the engine slot, the books and the run queue.

A module takes only those that it needs, beside the settings and the prompt caches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from rkserve.board.rules.admission import Admission
from rkserve.board.rules.counters import BoardCounters, VersionCounters
from rkserve.board.rules.obligations import Obligations
from rkserve.board.run.job import Job
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.core.messages import AdapterRef

T = TypeVar("T")


class EngineSlot(Protocol):
    """The place of the board's engine. One engine follows another in it, or a sleep."""

    @property
    def live(self) -> LoadedEngine:
        """The engine that is loaded now, or the last one."""

    @property
    def free(self) -> bool:
        """True where a run could start now. Raises ``BoardFailed`` on a board out of order."""

    @property
    def asleep(self) -> bool:
        """True while the model is unloaded."""

    def require_open(self) -> None:
        """Raise ``BoardFailed`` where the board is out of order."""

    def require_awake(self) -> None:
        """Raise ``BoardAsleep`` where the model is unloaded, or about to be."""

    async def renew(self, reason: str) -> None:
        """Replace the engine by a fresh one, after its conversation was parked."""

    async def with_adapter(self, ref: AdapterRef | None) -> LoadedEngine:
        """Return the engine with this adapter loaded; see ``AdapterLoader.ready``."""


@dataclass(slots=True)
class BoardBooks:
    """The records of one board: requests, counters, and the desired state.

    ``jobs`` are the requests with a consumer, by ticket. ``free_since_s`` is when the last run
    ended, ``asked_s`` when the last request came or left, both on the event loop's clock.
    """

    obligations: Obligations
    counters: BoardCounters = field(default_factory=BoardCounters)
    versions: VersionCounters = field(default_factory=VersionCounters)
    jobs: dict[int, Job] = field(default_factory=dict)
    free_since_s: float = 0.0
    asked_s: float = 0.0


class RunQueue(Protocol):
    """The queue for the board's next run."""

    admission: Admission

    def pump(self) -> None:
        """Start or expire queued work as admission decides now."""

    def requeue(self, job: Job) -> None:
        """Queue the job again, ahead of requests that have not had a run yet."""

    def schedule(
        self,
        work: Callable[[], Awaitable[T]],
        *,
        first: bool,
        barred: Callable[[], bool] = lambda: False,
    ) -> asyncio.Future[T]:
        """Run ``work`` between two runs: ``first`` ahead of others, or in turn (QueueFull).

        It does not begin while ``barred`` returns True. Cancelling the future withdraws work that
        has not begun.
        """

    def is_barred(self, ticket: int) -> bool:
        """True while the engine task with this ticket must not begin."""

    def reject_tasks(self) -> None:
        """End the queued engine tasks with ``BoardAsleep``: there is no engine any more."""
