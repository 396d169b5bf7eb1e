"""What a board says of itself."""

from __future__ import annotations

import os
from dataclasses import asdict

from rkserve.board.keeper import Keeper
from rkserve.board.settings import BoardSettings
from rkserve.board.stage import Stage
from rkserve.messages import BoardReport, BoardState, GenerationState


def report(settings: BoardSettings, keeper: Keeper, board: Stage) -> BoardReport:
    """Return what the board is doing and what it has done."""
    live, charge = keeper.live, board.charge
    state, reason = keeper.state, keeper.reason
    if state is BoardState.READY and charge.joining:
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
        missing=len(charge.missing),
        staged=tuple(version.ref.key for version in charge.staged),
        versions=board.versions.figures,
        **asdict(board.figures),
    )
