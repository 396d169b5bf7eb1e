"""Loads an adapter and tries it, between the runs of a board, without serving it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rkserve.board.answer.kv_plan import Ids
from rkserve.board.engine.protocol import EntryCommand
from rkserve.board.run.board_protocol import Stage
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.run import EngineRun, RunSpec, loop_time_s
from rkserve.board.run.runner import RequestRunner
from rkserve.core.desired_state import Probe
from rkserve.core.errors import AdapterBroken, RunFailed
from rkserve.core.messages import AdapterRef
from rkserve.core.run_params import EncoderStates, Sampling
from rkserve.native.runtime import RunEnd

GREEDY = Sampling(temperature=0.0, top_k=1, repeat_penalty=1.0)
PROBE_TEXT = "Hello"  # in text mode


class AdapterProbes:
    """Tries adapters on one board, whatever that is doing."""

    def __init__(self, stage: Stage, conductor: RequestRunner, patience_s: float) -> None:
        self._stage = stage
        self._conductor = conductor
        self._patience_s = patience_s

    async def load(self, ref: AdapterRef, prompt_ids: Ids, tokens: int) -> Probe:
        """Load ``ref`` before anything else starts, and let it say up to ``tokens`` tokens.

        What this engine has loaded and tried before is known at once, with ``load_ms`` of 0.
        Whoever is paused inside the runtime lets go of the board; a run has ``patience_s`` to end,
        then it is left at a token, and goes on by itself after this. Cancelled, it is withdrawn.

        Raises:
            AdapterBroken: the file is not what it should be, or the runtime refuses it or its run.
            BoardFailed: the board is out of order, or the engine failed.
            BoardAsleep: its model is unloaded.
        """
        stage = self._stage
        stage.require_open()
        stage.require_awake()
        known = _known(stage.live, ref)
        if known is not None:
            return known
        done = stage.errand(lambda: load_and_probe(stage, ref, prompt_ids, tokens), first=True)
        self._conductor.pauses.let_go()
        try:
            # What waited before it may begin meanwhile, and has to make way as well.
            while not (await asyncio.wait({done}, timeout=self._patience_s))[0]:
                self._conductor.make_way()
            return done.result()
        finally:
            done.cancel()


def _known(live: LoadedEngine, ref: AdapterRef) -> Probe | None:
    """Return what is known of an adapter that is loaded in this engine and was tried in it."""
    if not live.alive or ref.key not in live.adapters.keys or ref.key not in live.tried:
        return None
    return replace(live.tried[ref.key], load_ms=0.0)


async def load_and_probe(stage: Stage, ref: AdapterRef, prompt_ids: Ids, tokens: int) -> Probe:
    """Load ``ref`` and let it say up to ``tokens`` tokens. Use it while the board is one's own.

    Raises:
        AdapterBroken: the file is not what it should be, or the runtime refuses it or its run.
        BoardFailed: the engine failed.
    """
    known = _known(stage.live, ref)
    if known is not None:  # somebody else has asked for the same meanwhile
        return known
    await stage.caching.park(stage.live)
    started_s = loop_time_s()
    live = await stage.adapting.ready(stage, ref)
    load_ms = (loop_time_s() - started_s) * 1e3
    run, ended_ms, given = await _run(stage, live, ref, prompt_ids, tokens)
    decode_ms = ended_ms or run.clocked(0, loop_time_s()).decode_ms
    speed = given * 1e3 / decode_ms if decode_ms > 0 else 0.0
    found = live.tried[ref.key] = Probe(stage.board_id, ref.key, load_ms, given, speed)
    return found


async def _run(
    stage: Stage, live: LoadedEngine, ref: AdapterRef, prompt_ids: Ids, tokens: int
) -> tuple[EngineRun, float, int]:
    """Make the run of an adapter; see ``try_out``. Raises ``AdapterBroken``, ``BoardFailed``."""
    try:
        return await try_out(stage, live, ref.key, prompt_ids, tokens)
    except RunFailed as exc:
        raise AdapterBroken(f"{ref.name}@{ref.version}", exc.reason) from None


async def try_out(
    stage: Stage, live: LoadedEngine, adapter: str | None, prompt_ids: Ids, tokens: int
) -> tuple[EngineRun, float, int]:
    """Make a trial run, with no ids in text mode, of up to ``tokens`` tokens; the board is free.

    Return it, how long the runtime says that decoding took, and how many tokens it gave.

    Raises:
        RunFailed: the runtime refused it, or gave nothing.
        EngineHung, EngineDied: as any run.
    """
    entry = EntryCommand(prompt_ids) if prompt_ids else EntryCommand(prompt_text=PROBE_TEXT)
    if stage.encoder is not None:
        entry = replace(entry, encoder=EncoderStates.zeros(stage.encoder))
    begin = RunSpec(
        entries=(entry,) * stage.n_batch,
        base=prompt_ids,
        clear=live.context.ids != (),
        origin=adapter,
        limit=tokens,
    )

    def end_in_time(run: EngineRun, *_: object) -> None:
        if not live.facts.per_run_sampling and len(run.given[0]) >= tokens:
            live.abort(run)  # this runtime takes no limit

    run, ended = await live.run([None] * stage.n_batch, begin, end_in_time, GREEDY)
    if ended.end is RunEnd.FAILED:
        reason = ended.error or f"the runtime returned {ended.return_code}"
        raise RunFailed(stage.board_id, f"a trial run failed: {reason}")
    given = min(tokens, len(run.given[0]))
    if given == 0:
        raise RunFailed(stage.board_id, "a trial run gave no token")
    return run, ended.perf.decode_ms, given
