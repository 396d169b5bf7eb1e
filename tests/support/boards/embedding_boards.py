"""Scripted boards that make vectors, and a Router in front of them that has the model for it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from rkserve.config.router import RouterConfig
from rkserve.core.messages import (
    Embedded,
    EmbedRequest,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Timings,
    Usage,
    VersionSpan,
)
from rkserve.core.run_params import Pooling
from rkserve.models.folder import open_model_folder
from rkserve.router.served_models import ServedModel
from tests.support.boards.fake_boards import FakeBoards, accepted, report
from tests.support.http.router_house import House
from tests.support.paths import PROJECT

FOLDER = PROJECT / "models" / "sim-embed"
MODEL = "sim-embed"
SIZE = 4


@cache
def model() -> ServedModel:
    """The simulated model for embeddings; its tokenizer is read once."""
    return ServedModel.open(open_model_folder(FOLDER))


def vector_of(ids: tuple[int, ...]) -> array[float]:
    """Return what the boards make of a text: it tells which ids there were."""
    return array("f", [float(len(ids)), float(ids[0] % 97), float(ids[-1] % 89), 1.0])


@dataclass
class VectorBoards(FakeBoards):
    """Boards that make vectors, one request after the other each.

    ``gate`` is waited for by every request. ``losses`` are errors that boards raise instead, one
    for each request, as long as there are any; where ``late`` after they have accepted it.
    """

    gate: asyncio.Event | None = None
    losses: dict[str, list[Exception]] = field(default_factory=dict)
    late: bool = True
    most: int = 0  # requests at once
    served: list[tuple[str, EmbedRequest]] = field(default_factory=list)

    @classmethod
    def of(cls, *boards: str, **changes: Any) -> VectorBoards:
        """Boards that are ready."""
        made = cls([report(board, model=MODEL, queue_limit=4) for board in boards])
        for name, value in changes.items():
            setattr(made, name, value)
        return made

    async def open(
        self, request: GenerateRequest, replica: str, take: object = None
    ) -> AsyncGenerator[Event, None]:
        assert isinstance(request, EmbedRequest)
        self.opened.append((replica, request))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            loss = next(iter(self.losses.get(replica, ())), None)
            if loss is not None and not self.late:
                raise self.losses[replica].pop(0)
            yield accepted(replica.removeprefix("replica of "))
            await asyncio.sleep(0)
            if loss is not None:
                raise self.losses[replica].pop(0)
            if self.gate is not None:
                await self.gate.wait()
            rows = request.pooling is Pooling.ALL
            yield Embedded(
                tuple(
                    b"".join(vector_of((one,)).tobytes() for one in ids)
                    if rows
                    else vector_of(ids).tobytes()
                    for ids in request.inputs
                )
            )
            tokens = sum(map(len, request.inputs))
            self.served.append((replica, request))
            timings = Timings(0.0, float(tokens), tokens, 0.0, 0, 0.0)
            span = VersionSpan("default", 0, tokens)
            yield Finished(FinishReason.STOP, Usage(tokens, 0), timings, (span,))
        finally:
            self.running -= 1
            self.closed.append(replica)


def embed_house(boards: VectorBoards, **config: Any) -> House:
    """A Router in front of these boards."""
    return House(boards, RouterConfig(**config), model())
