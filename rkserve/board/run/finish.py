"""What a run leaves once it has returned: its prompt cache's file, and what it took.

What its end means for the requests in it is the conductor's business.
"""

from __future__ import annotations

from rkserve.board.answer.kv_plan import held
from rkserve.board.engine.protocol import RunEnded
from rkserve.board.run.board_protocol import Stage
from rkserve.board.run.run import EngineRun, RunSpec, loop_time_s
from rkserve.native.runtime import Perf


async def keep(stage: Stage, begin: RunSpec, run: EngineRun, ended: RunEnded) -> None:
    """Do what is due to the prompt caches after a run that has one."""
    caching = stage.caching
    if begin.hit is not None:
        prefilled = ended.perf.prefill_tokens if ended.in_order else None
        caching.used(begin.hit, prefilled, len(begin.base), ended.cache_refused)
    if begin.save is None:
        return
    trusted = not run.stopping or stage.live.quirk("kv_valid_after_abort")
    # The last token never was computed, so that it is not in the file. Mostly the KV cache is
    # empty when its size is asked for: a run without history is forgotten with its end.
    left = ended.kv_positions[0] if ended.kv_positions else 0
    ids = run.transcript[:-1] if left == 0 else held(run.transcript, left)
    if ended.in_order and trusted and ids:
        caching.keep(begin.save, ids, begin.origin)
    else:
        await caching.abandon(begin.save)


async def abandon(stage: Stage, begin: RunSpec) -> None:
    """Give up the file that the run was to write."""
    if begin.save is not None:
        await stage.caching.abandon(begin.save)


def perf(begin: RunSpec, run: EngineRun, ended: RunEnded) -> Perf:
    """What a run took: by the runtime's word, and by the clock where it says nothing."""
    if ended.in_order:
        return ended.perf
    restored = begin.reused if begin.hit is not None and ended.cache_refused is None else 0
    return run.clocked(0, loop_time_s(), restored)
