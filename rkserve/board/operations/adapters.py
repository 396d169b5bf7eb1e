"""Trials on one board: of an adapter without serving it, and of whatever an engine has loaded."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rkserve.board.answer.transcript import Ids
from rkserve.board.engine.protocol import EntryCommand
from rkserve.board.run.job import EngineRun, RunSpec, loop_time_s
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.parts import EngineSlot, RunQueue
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.board.run.runner import RequestRunner
from rkserve.board.run.settings import BoardSettings
from rkserve.core.desired_state import Probe
from rkserve.core.errors import AdapterBroken, RunFailed
from rkserve.core.messages import AdapterRef
from rkserve.core.run_params import EncoderStates, Sampling
from rkserve.native.runtime import RunEnd

GREEDY = Sampling(temperature=0.0, top_k=1, repeat_penalty=1.0)
PROBE_TEXT = "Hello"  # in text mode


class AdapterProbes:
    """Loads and tries adapters on one board, whatever else it is doing."""

    def __init__(
        self,
        settings: BoardSettings,
        slot: EngineSlot,
        queue: RunQueue,
        caching: PromptCaching,
        runner: RequestRunner,
    ) -> None:
        self._settings, self._slot, self._queue = settings, slot, queue
        self._caching = caching
        self._runner = runner

    async def load(self, ref: AdapterRef, prompt_ids: Ids, tokens: int) -> Probe:
        """Load ``ref`` ahead of other work, and generate up to ``tokens`` tokens with it.

        An adapter that this engine has loaded and tried before is answered at once, with
        ``load_ms`` of 0. A paused run releases the board; a running one has ``load_patience_s`` to
        end, then it is interrupted at a token and continues by itself later. Cancelling withdraws
        the trial.

        Raises:
            AdapterBroken: the file is not valid, or the runtime refuses it or its run.
            BoardFailed: the board is out of order, or the engine failed.
            BoardAsleep: its model is unloaded.
        """
        self._queue.require_awake()
        known = _known(self._slot.live, ref)
        if known is not None:
            return known
        done = self._queue.schedule(
            lambda: self._load_and_probe(ref, prompt_ids, tokens), first=True
        )
        self._runner.pauses.release_board()
        try:
            # Work queued before it may begin meanwhile, and has to release the board as well.
            while not (await asyncio.wait({done}, timeout=self._settings.load_patience_s))[0]:
                self._runner.vacate()
            return done.result()
        finally:
            done.cancel()

    async def _load_and_probe(self, ref: AdapterRef, prompt_ids: Ids, tokens: int) -> Probe:
        """Load ``ref`` and generate up to ``tokens`` tokens, while the caller has the board.

        Raises:
            AdapterBroken: the file is not valid, or the runtime refuses it or its run.
            BoardFailed: the engine failed.
        """
        known = _known(self._slot.live, ref)
        if known is not None:  # another call did the same meanwhile
            return known
        await self._caching.park(self._slot.live)
        started_s = loop_time_s()
        live = await self._slot.with_adapter(ref)
        load_ms = (loop_time_s() - started_s) * 1e3
        try:
            run, ended_ms, given = await try_out(self._settings, live, ref.key, prompt_ids, tokens)
        except RunFailed as exc:
            raise AdapterBroken(ref.label, exc.reason) from None
        decode_ms = ended_ms or run.clocked(0, loop_time_s()).decode_ms
        speed = given * 1e3 / decode_ms if decode_ms > 0 else 0.0
        found = live.tried[ref.key] = Probe(self._settings.board_id, ref.key, load_ms, given, speed)
        return found


def _known(live: LoadedEngine, ref: AdapterRef) -> Probe | None:
    """Return the result of an earlier trial in this engine, if it still has the adapter."""
    if not live.alive or ref.key not in live.adapters.keys or ref.key not in live.tried:
        return None
    return replace(live.tried[ref.key], load_ms=0.0)


async def try_out(
    settings: BoardSettings, live: LoadedEngine, adapter: str | None, prompt_ids: Ids, tokens: int
) -> tuple[EngineRun, float, int]:
    """Make a trial run of up to ``tokens`` tokens, without ids in text mode, while the board is
    free.

    Return the run, the runtime's decoding time in ms, and the number of generated tokens.

    Raises:
        RunFailed: the runtime refused it, or generated nothing.
        EngineHung, EngineDied: as any run.
    """
    entry = EntryCommand(prompt_ids) if prompt_ids else EntryCommand(prompt_text=PROBE_TEXT)
    if settings.encoder is not None:
        entry = replace(entry, encoder=EncoderStates.zeros(settings.encoder))
    begin = RunSpec(
        entries=(entry,) * settings.n_batch,
        base=prompt_ids,
        clear=live.context.ids != (),
        origin=adapter,
        limit=tokens,
    )

    def end_in_time(run: EngineRun, *_: object) -> None:
        if not live.facts.per_run_sampling and len(run.given[0]) >= tokens:
            live.abort(run)  # this runtime takes no limit

    run, ended = await live.run([None] * settings.n_batch, begin, end_in_time, GREEDY)
    if ended.end is RunEnd.FAILED:
        raise RunFailed(settings.board_id, f"a trial run failed: {ended.reason}")
    given = min(tokens, len(run.given[0]))
    if given == 0:
        raise RunFailed(settings.board_id, "a trial run gave no token")
    return run, ended.perf.decode_ms, given
