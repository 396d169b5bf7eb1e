"""Boards, reports and requests for tests of routing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rkserve.core.block_hashes import (
    BlockHashes,
    CachedPrefixes,
    FilePrefix,
    LivePrefix,
    pack,
    seed_of,
)
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.messages import (
    Finished,
    FinishReason,
    Timings,
    Usage,
)
from rkserve.fleet.load import Candidate, ModelBoards, PauseEffect
from rkserve.fleet.prefix_index import PrefixIndex
from rkserve.router.policies import Decision, PolicySettings, RoutingRequest, SendTo
from rkserve.router.queue.reservation import InFlightRequest

TALK = tuple(range(5000, 6500))
NOTHING_ELSE = PolicySettings(restore_ms=0.0, park_ms=0.0)


def boards(seed: int = 1) -> ModelBoards:
    """Return an empty set of boards with a prefix index."""
    return ModelBoards(random.Random(seed), PrefixIndex())


def join(
    of: ModelBoards,
    key: str,
    running: int = 0,
    *,
    ready: bool = True,
    held: PauseEffect = PauseEffect.NOT,
    group: str = "group",
    **said: Any,
) -> Candidate:
    """Add a board by its report; by default it runs one request, and two may wait."""
    known: dict[str, Any] = {"queue_limit": 2, "running": running, "replica": key, **said}
    report = BoardReport(f"board {key}", "m", BoardState.READY, **known)
    return of.update(group, report, ready=ready, held=held)


def speed(prefill_ms: float, decode_ms: float) -> dict[str, Any]:
    """Return the counters of a board with these times per token."""
    return {
        "prefill_tokens": 10_000,
        "prefill_ms": 10_000 * prefill_ms,
        "decode_tokens": 10_000,
        "decode_ms": 10_000 * decode_ms,
    }


def holds(live: tuple[int, ...] | None = None, *files: tuple[int, ...], **rest: Any) -> bytes:
    """Return the packed KV holdings of a board."""
    held = None if live is None else LivePrefix.of(BlockHashes(live, seed_of(None)))
    filed = (FilePrefix(len(ids), BlockHashes(ids, seed_of(None)).marks) for ids in files)
    return pack(CachedPrefixes(appends=True, park_min=256, live=held, files=tuple(filed), **rest))


def ask(
    ids: Sequence[int] = TALK,
    name: str = "r",
    session: str = "",
    *,
    max_tokens: int = 64,
    **rest: Any,
) -> RoutingRequest:
    """Return a request with that prompt."""
    chain = BlockHashes(tuple(ids), seed_of(None))
    return RoutingRequest(name, "m", len(chain), max_tokens, chain, session, **rest)


def chosen(verdict: Decision) -> str | None:
    """Return the board that the request is sent to."""
    return verdict.board.key if isinstance(verdict, SendTo) else None


def finished(cached: int = 0) -> Finished:
    timings = Timings(0, 1, 1, 1, 1, 1)
    return Finished(FinishReason.STOP, Usage(10, 3, cached), timings)


def sent(board: Candidate, known: ModelBoards) -> InFlightRequest:
    return InFlightRequest(known, board, RoutingRequest("r", "m", 1, 64), 0.0)
