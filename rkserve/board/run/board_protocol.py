"""What a board lends to those who work on it: its engine, its figures, its queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from rkserve.board.rules.admission import Admission
from rkserve.board.rules.counters import BoardCounters, VersionCounters
from rkserve.board.rules.obligations import Obligations
from rkserve.board.run.adapter_loading import AdapterLoader
from rkserve.board.run.job import Job
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.core.messages import EmbedRequest, Event
from rkserve.core.run_params import EncoderShape, Guided, Sampling

T = TypeVar("T")


class EmbeddingCalls(Protocol):
    """Those who wait for vectors; see ``embedding.Embedding``."""

    def events(self, request: EmbedRequest) -> AsyncGenerator[Event, None]:
        """Yield what becomes of a request."""

    @property
    def busy(self) -> bool:
        """Whether there is anybody."""

    def told(self) -> None:
        """The board was told something new."""

    def awaited(self) -> Iterable[asyncio.Future[None]]:
        """Yield what may change with those that a pause waits for."""


class Stage(Protocol):
    """The board, as its conductor and its control see it."""

    board_id: str
    model: str
    context_len: int
    n_batch: int
    eos_ids: frozenset[int]
    tokenizer_file: Path | None
    encoder: EncoderShape | None
    sampling: Sampling  # what the model is loaded with
    guided: Guided
    text_mode: bool  # prompts are texts: their ids are known to nobody
    batch_window_s: float
    free_since_s: float  # when the last run let go of it
    asked_s: float  # when the last request came or left
    pause_timeout_s: float
    max_paused: int
    figures: BoardCounters
    versions: VersionCounters
    charge: Obligations
    admission: Admission
    caching: PromptCaching
    adapting: AdapterLoader
    embedding: EmbeddingCalls
    jobs: dict[int, Job]
    position_bytes: int | None

    def require_open(self) -> None:
        """Raise ``BoardFailed`` where the board is out of order."""

    @property
    def free(self) -> bool:
        """Whether it could start something now. Raises ``BoardFailed`` where it is out of order."""

    @property
    def live(self) -> LoadedEngine:
        """The engine that is loaded now, or the last one."""

    async def renew(self, reason: str) -> None:
        """Replace the engine by a fresh one, after its conversation was parked."""

    def requeue(self, job: Job) -> None:
        """Let the job wait for the board again, in front of those that never had it."""

    def errand(
        self,
        work: Callable[[], Awaitable[T]],
        *,
        first: bool,
        barred: Callable[[], bool] = lambda: False,
    ) -> asyncio.Future[T]:
        """Do ``work`` when the board is free: ``first`` before others, or in turn (QueueFull).

        ``barred`` says whether it may not begin now.
        """

    def is_barred(self, ticket: int) -> bool:
        """Whether that errand may not begin now."""

    def require_awake(self) -> None:
        """Raise ``BoardAsleep`` where the model is unloaded, or about to be."""

    @property
    def asleep(self) -> bool:
        """Whether the model is unloaded."""

    def turn_away(self) -> None:
        """There is no engine any more: end the errands that wait for it."""

    def pump(self) -> None:
        """Look again at who may start or has waited too long."""
