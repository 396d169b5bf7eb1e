"""The start of a job's next run: resumed, extended, from a prompt cache, or from nothing.

It prepares the engine (drains a paused run, loads an adapter, parks a conversation) and makes no
run of a job itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from rkserve.board.answer.transcript import Ids
from rkserve.board.engine.protocol import EntryCommand
from rkserve.board.run.job import Job, RunSpec, loop_time_s
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.board.run.parts import EngineSlot
from rkserve.board.run.prompt_caching import PromptCaching
from rkserve.board.run.settings import BoardSettings
from rkserve.core.block_hashes import common_prefix, seed_of
from rkserve.core.errors import Misuse, NativeError
from rkserve.core.messages import Kv
from rkserve.core.run_params import NEVER_ENDS, Guided, Stepwise
from rkserve.native.engine_frames import StepParams


class RunPlanner:
    """Plans runs while the caller has the board.

    A plan is valid for one engine, which it names: while the planner waits for a disk, the engine
    may die and be replaced.
    """

    def __init__(self, settings: BoardSettings, slot: EngineSlot, caching: PromptCaching) -> None:
        self._settings, self._slot, self._caching = settings, slot, caching

    async def of_one(self, job: Job) -> tuple[LoadedEngine, RunSpec]:
        """Return engine and start of the job's next run, with its adapter loaded.

        Raises ``RkserveError``: the adapter, the named cache or the engine failed.
        """
        live = self._slot.of(job)
        steps = job.request.stepwise
        if live.paused is not None and (steps is not None or job.request.prompt_text is not None):
            await self.drain()  # a paused context of ids is no use for steps or text
        elif live.paused is not None:
            wanted = job.generation.context
            resume = live.resumption(wanted, job.generation.cuts, job.origin)
            if resume is not None:
                begin = _extending(job, wanted, len(wanted) - len(resume.send))
                return live, replace(
                    begin, history=live.paused.history, resume=True, cut=resume.cut
                )
            await self.drain()
        live = await self._engine(job)
        if steps is not None:
            return await self._step_by_step(live, job, steps)
        text = job.request.prompt_text
        if text is None:
            return await self._afresh(live, job)
        await self._park(live, job)
        prompt, limit = text + job.generation.generated_text, job.generation.budget
        entry = EntryCommand(
            ids=job.request.decoder_ids,
            prompt_text=prompt,
            images=job.request.images,
            images_of=seed_of(job.request.salt),
            embeds=job.request.embeds,
            encoder=job.request.encoder,
        )
        return live, RunSpec((entry,), clear=True, origin=job.origin, limit=limit)

    async def of_many(self, jobs: Sequence[Job]) -> tuple[LoadedEngine, RunSpec]:
        """Return engine and start of a batch, whose jobs share a key. Raises as ``of_one``."""
        live = await self._engine(jobs[0])
        entries = [EntryCommand(job.generation.context) for job in jobs]
        padding = EntryCommand(entries[0].ids[:1])
        return live, RunSpec(
            entries=(*entries, *[padding] * (self._settings.n_batch - len(jobs))),
            clear=live.context.ids != (),
            origin=jobs[0].origin,
            limit=max(job.generation.budget for job in jobs),
        )

    async def drain(self) -> None:
        """End a run that is paused inside the runtime; where it refuses, load a fresh engine.

        Raises:
            EngineHung, EngineDied: the engine failed meanwhile.
            RkserveError: the fresh engine did not load.
        """
        live = self._slot.live
        if live.paused is None:
            return
        try:
            await live.drain()
        except Misuse:  # it was not paused after all
            live.paused = None
        except NativeError as exc:
            await self._slot.renew(f"a paused run cannot be ended: {exc}")

    async def _afresh(self, live: LoadedEngine, job: Job) -> tuple[LoadedEngine, RunSpec]:
        """Extend the live context, or begin from a prompt cache, or from nothing."""
        caching = self._caching
        origin = job.origin  # the loaded one; the job may be bound to another version meanwhile
        wanted = job.generation.context
        history = _keeps_history(live, job)
        reused = live.context.reusable(wanted, origin, history=history)
        caching.asked(live, wanted, origin)
        name, hit, save = job.request.use_cache, None, None
        # A shorter prompt is not worth a file, but has to release the last one.
        if name is not None or live.cache_loaded or len(wanted) > self._settings.park_min_tokens:
            with _timed(job):
                hit = await caching.choose(live, wanted, origin, name, reused)
        if hit is None and reused:
            if history:
                return live, replace(_extending(job, wanted, reused), history=True)
            return live, await self._like_before(live, job, wanted, reused)
        if hit is not None and not caching.usable(live):
            await self._slot.renew("a prompt cache needs a handle without an aborted run")
            live = await self._engine(job)
        else:
            await self._park(live, job)
        if hit is not None:
            history = history and live.quirk("prompt_cache_load_with_history")
            if not (job.request.once or live.context.prefix):  # a live context is parked later
                save = await caching.reserve_again(hit, history=history)
        return live, replace(
            _extending(job, wanted, 0),
            origin=origin,
            reused=hit.tokens if hit is not None else 0,
            clear=live.context.ids != (),
            history=history,
            hit=hit,
            save=save,
        )

    async def _like_before(self, live: LoadedEngine, job: Job, wanted: Ids, reused: int) -> RunSpec:
        """Send the whole prompt, of which the runtime holds ``reused`` ids; park what it displaces.

        Without history nothing is appended, so an inexact count costs time and nothing else.
        """
        if live.context.positions - reused >= self._settings.park_min_tokens:
            with _timed(job):
                await self._caching.park(live)
            reused = live.context.reusable(wanted, job.origin, history=False)
        return replace(
            _extending(job, wanted, 0), reused=reused, clear=not reused and live.context.ids != ()
        )

    async def _step_by_step(
        self, live: LoadedEngine, job: Job, asked: Stepwise
    ) -> tuple[LoadedEngine, RunSpec]:
        """Extend the live context where single steps can, or begin from nothing.

        Logprobs of the prompt need all of its positions computed.
        """
        generation, origin = job.generation, job.origin
        wanted, prompt = generation.context, generation.begin_scores()
        optimistic = self._is_optimistic(live, job, asked)
        history = _keeps_history(live, job) and not optimistic
        reused = live.context.reusable(wanted, origin) if history and not prompt else 0
        if not reused:
            await self._park(live, job)
        file = self._settings.tokenizer_file
        assert file is not None  # else the request was rejected
        return live, replace(
            _extending(job, wanted, reused),
            origin=origin,
            clear=not reused and live.context.ids != (),
            history=history,
            steps=StepParams(
                tokenizer=file,
                sampling=job.request.sampling,
                wanted=asked,
                eos=_ends(job, asked, self._settings.eos_ids),
                limit=generation.budget,
                held=wanted[:reused],
                generated=tuple(generation.token_ids),
                prompt=prompt,
                optimistic=optimistic,
            ),
        )

    async def _park(self, live: LoadedEngine, job: Job) -> None:
        """Keep the previous conversation, if it is worth a file."""
        if live.context.positions >= self._settings.park_min_tokens:
            with _timed(job):
                await self._caching.park(live)

    def _is_optimistic(self, live: LoadedEngine, job: Job, asked: Stepwise) -> bool:
        """Return whether the library generates freely and its tokens are checked against the
        grammar.

        It does not where its sampling differs from the requested one, or it omits token ids.
        """
        sampled = live.facts.per_run_sampling or job.request.sampling == self._settings.sampling
        able = asked.free and sampled and live.quirk("waiting_token_id_valid")
        wished = self._settings.guided
        if wished is Guided.AUTO:
            # Steps that keep the context cost one token each and never have to be repeated.
            return able and not live.quirk("logits_with_history")
        return able and wished is Guided.OPTIMISTIC

    async def _engine(self, job: Job) -> LoadedEngine:
        """Return an engine that has the job's adapter."""
        while True:
            ref = job.ref
            live = await self._slot.with_adapter(ref)
            # Else it was bound to another version meanwhile. Where other entries may run, that one
            # waits for its turn.
            if job.ref == ref or live.facts.entries > 1:
                return self._slot.of(job)


@contextmanager
def _timed(job: Job) -> Iterator[None]:
    """Count the time as the job's for prompt cache files."""
    begun_s = loop_time_s()
    try:
        yield
    finally:
        job.tally.cache_s += loop_time_s() - begun_s


def _extending(job: Job, wanted: Ids, reused: int) -> RunSpec:
    """Return a run of the job that sends the ids of its context behind ``reused`` positions."""
    return RunSpec(
        entries=(EntryCommand(wanted[reused:]),),
        base=wanted,
        reused=reused,
        origin=job.origin,
        limit=job.generation.budget,
        once=job.request.once,
    )


def kv_outlook(live: LoadedEngine, job: Job, *, holds: bool) -> tuple[Kv, int]:
    """Return the fate of an interrupted job's KV cache, and the size of the context that counts.

    ``holds``: the job keeps the board with its run paused inside the runtime.
    """
    context = job.generation.context
    if live.doomed or job.request.prompt_text is not None:
        return Kv.RECOMPUTED, len(context)
    kept = kept_ids(live, job, holds=holds)
    if kept is not None:
        if live.resumption(context, job.generation.cuts, job.origin) is not None:
            return Kv.KEPT, common_prefix(kept, context)
    else:
        reused = live.context.reusable(context, job.origin, history=_keeps_history(live, job))
        if 0 < reused == min(live.context.positions, len(context)):
            return Kv.KEPT, len(context)
    return Kv.RECOMPUTED, len(context)


def kept_ids(live: LoadedEngine, job: Job, *, holds: bool) -> Ids | None:
    """Return the content of the paused engine once the requested ranges are cleared."""
    if not holds or live.paused is None or live.paused.ids is None:
        return None
    ids = live.paused.ids
    for start, end in job.generation.cuts:
        ids = ids[:start] + ids[end:]
    return ids


def _keeps_history(live: LoadedEngine, job: Job) -> bool:
    """Return whether the run extends the context; the runtime cannot pause every such run."""
    if job.request.stepwise is not None:
        return live.context.append and live.quirk("logits_with_history")
    if live.context.prefix:
        return False
    return live.context.append and (not job.request.native_pause or live.may_pause(history=True))


def _ends(job: Job, asked: Stepwise, eos_ids: frozenset[int]) -> frozenset[int]:
    """Return the token ids that end an answer, as far as the engine has to know them.

    ``least`` forbids all of them until then; with ``ignore_eos`` only the model's own. A grammar
    defines its own end.
    """
    stop_ids = frozenset(job.request.stop_ids)
    if asked.guide is not None:
        return eos_ids
    if asked.least == NEVER_ENDS:
        return eos_ids - stop_ids
    return eos_ids | stop_ids
