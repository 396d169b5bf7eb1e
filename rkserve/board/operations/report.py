"""What a board says of itself."""

from __future__ import annotations

import os
from dataclasses import asdict

from rkserve.board.operations.base_weights import BaseWeights, ModelFileDigest
from rkserve.board.operations.sleep import BoardSleep
from rkserve.board.run import clock
from rkserve.board.run.board_protocol import Stage
from rkserve.board.run.settings import BoardSettings
from rkserve.board.run.supervisor import EngineSupervisor
from rkserve.core.board_report import BoardReport, BoardState, GenerationState


def report(
    settings: BoardSettings,
    keeper: EngineSupervisor,
    sleeping: BoardSleep,
    bases: BaseWeights,
    board: Stage,
    *,
    own: ModelFileDigest,
    holdings: bytes,
) -> BoardReport:
    """Return what the board is doing and what it has done."""
    live, charge = keeper.live, board.charge
    state, reason = keeper.state, keeper.reason
    if state in (BoardState.READY, BoardState.ASLEEP) and charge.joining:
        state, reason = BoardState.JOINING, charge.joining
    hold = charge.duty.hold if charge.duty is not None else None
    return BoardReport(
        board_id=settings.board_id,
        model=settings.model,
        state=state,
        reason=reason,
        release=live.facts.release if live is not None else "",
        platform=settings.platform,
        node=settings.node,
        pid=os.getpid(),
        engine_pid=live.engine.pid if live is not None else 0,
        context_len=settings.context_len,
        kv_positions=live.context.positions if live is not None else 0,
        running=len(board.admission.running),
        queued=board.admission.queued,
        queue_limit=settings.queue_limit,
        library=settings.library,
        paused=sum(job.state is GenerationState.PAUSED for job in board.jobs.values()),
        n_batch=settings.n_batch,
        adapters=live.adapters.keys if live is not None else (),
        adapter_bytes=live.adapters.used_bytes if live is not None else 0,
        engine_starts=keeper.starts,
        engine_renewals=keeper.renewals,
        epoch=charge.epoch,
        hold=hold.mode.value if hold is not None else "",
        missing=len(charge.missing) + (charge.missing_base is not None),
        staged=(*(version.ref.key for version in charge.staged), *bases.staged),
        versions=board.versions.figures,
        level=sleeping.level,
        base=bases.digest,
        own_digest=own.digest,
        own_bytes=own.size_bytes,
        serving=_serving(board),
        holdings=holdings,
        idle_s=_idle_s(keeper, board),
        **asdict(board.figures),
    )


def _serving(board: Stage) -> tuple[tuple[str, str], ...]:
    """Return name and sha256 of each adapter as a new session gets it."""
    duty = board.charge.duty
    refs = [] if duty is None else [line.serves(board.board_id, "") for line in duty.lines]
    return tuple((ref.name, ref.digest) for ref in refs if ref is not None)


def _idle_s(keeper: EngineSupervisor, board: Stage) -> float:
    """Since when nobody has used it; one that was just loaded was loaded for somebody."""
    if board.jobs or board.embedding.busy:
        return 0.0
    return clock.now_s() - max(board.asked_s, keeper.loaded_s)
