"""Control of running generations: list, pause, edit, resume, abort.

It checks each action against the table of ``rules.generations``; the runner carries it out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from rkserve.board.rules.generations import GenerationEvent, judge
from rkserve.board.run.job import Job, emitted
from rkserve.board.run.parts import BoardBooks, EngineSlot
from rkserve.board.run.runner import RequestRunner
from rkserve.board.run.start import kept_ids, kv_outlook
from rkserve.core.block_hashes import common_prefix
from rkserve.core.board_report import Emitted, GenerationInfo, GenerationState
from rkserve.core.errors import GenerationNotFound, RequestError, StateConflict
from rkserve.core.messages import ControlAction, Edit, Kv

HEARD_S = 0.5
_LOST = "Its connection to this board was lost meanwhile; if another one has it, ask again."

_S = GenerationState


class RequestControl:
    """The generations of one board, by the ids known to clients."""

    def __init__(self, books: BoardBooks, slot: EngineSlot, runner: RequestRunner) -> None:
        self._settings, self._books, self._slot = books.settings, books, slot
        self._runner = runner

    def generations(self) -> list[GenerationInfo]:
        """Return the generations that have not ended."""
        jobs = self._books.jobs.values()
        return [self._info(job) for job in jobs if job.state is not _S.ENDED]

    def emitted(self) -> Emitted:
        """Return the token counts of the generations that have not ended."""
        return Emitted(self._settings.board_id, emitted(self._books.jobs.values()))

    async def control(
        self,
        generation: str,
        action: ControlAction,
        edit: Edit | None = None,
        choice: int | None = None,
    ) -> list[GenerationInfo]:
        """Apply ``action`` to the choices of a generation that allow it.

        Raises:
            GenerationNotFound: no choice of it is, or recently was, on this board.
            StateConflict: no choice allows the action; nothing was changed.
            TooManyPaused: the limit of paused generations is reached; nothing was changed.
            RequestError: the edit refers to something that is not there, or names no choice.
        """
        jobs = self._fitting(self._find(generation, action, choice), action)
        if action is ControlAction.PAUSE and any(job.request.in_one_go for job in jobs):
            raise RequestError(
                "A generation with 'prompt_embeds' or 'cross_attention' cannot be paused: its KV "
                "cache cannot be computed again from token ids."
            )
        if action is ControlAction.EDIT:
            if len(jobs) > 1:
                raise RequestError("Several choices are paused; name the one to edit.", "choice")
            self._edit(jobs[0], edit or Edit())
        elif action is ControlAction.RESUME:
            for job in jobs:
                self._runner.resume(job)
        elif action is ControlAction.ABORT:
            for job in jobs:
                self._runner.abort(job)
        else:
            jobs = await self._pause(jobs)
        return [self._info(job) for job in jobs]

    async def given_out(self, done: Sequence[GenerationInfo], action: ControlAction) -> None:
        """Wait until the consumers got the effect of ``action``, or do not read.

        Then another board that continues the generation gets it too. Raises ``StateConflict`` where
        the stream was lost before that.
        """
        ids = {info.request_id for info in done}
        jobs = [job for job in self._books.jobs.values() if job.request.request_id in ids]
        consumed_all = [await job.consumed_all(HEARD_S) for job in jobs]
        if jobs and not any(consumed_all):
            raise StateConflict(action.value, _S.QUEUED.value, _LOST)

    def abort_all(self, request_ids: Sequence[str] | None) -> int:
        """Abort the generations of these ids (of a completion or a choice); None means all."""
        asked = None if request_ids is None else [_parts(one) for one in request_ids]
        jobs = [job for job in self._books.jobs.values() if not job.over]
        meant = [j for j in jobs if asked is None or any(_is_of(j, *one) for one in asked)]
        for job in meant:
            self._runner.abort(job)
        return len(meant)

    def _find(self, generation: str, action: ControlAction, choice: int | None) -> list[Job]:
        """Return the choices that have not ended."""
        held = [job for job in self._books.jobs.values() if _is_of(job, generation, choice)]
        alive = [job for job in held if job.state is not _S.ENDED]
        if alive:
            return alive
        ended = (_parts(request_id) for request_id in self._books.ended)
        if held or any(_fits(parts, generation, choice) for parts in ended):
            raise StateConflict(action.value, _S.ENDED.value)
        raise GenerationNotFound(generation if choice is None else f"{generation}/{choice}")

    def _fitting(self, jobs: Sequence[Job], action: ControlAction) -> list[Job]:
        fitting: list[Job] = []
        refused: StateConflict | None = None
        for job in jobs:
            try:
                if not _is_allowed_anyway(job, action):
                    judge(job.state, action)
            except StateConflict as exc:
                refused = refused or exc
            else:
                fitting.append(job)
        if refused is not None and not fitting:
            raise refused
        return fitting

    async def _pause(self, jobs: Sequence[Job]) -> list[Job]:
        """Pause these jobs, and wait until they emit no more tokens."""
        self._runner.pauses.check(sum(not job.pause_asked for job in jobs))
        for job in jobs:
            self._runner.pause(job)
        for job in jobs:
            while job.state is _S.PAUSING and not job.abandoned:
                await asyncio.wait({job.changed()})
        paused = [job for job in jobs if not job.over]
        if not paused:
            raise StateConflict(ControlAction.PAUSE.value, _S.ENDED.value, "It ended first.")
        return paused

    def _edit(self, job: Job, edit: Edit) -> None:
        context = job.generation.context
        held = kept_ids(self._slot.of(job), job, holds=self._runner.pauses.holds(job))
        # A context that is recomputed can leave out any range.
        positions = common_prefix(held, context) if held is not None else len(context)
        job.generation.apply(edit, kv_positions=positions, context_len=self._settings.context_len)
        job.advance(GenerationEvent.EDITED)
        job.notify()

    # -- reports ----------------------------------------------------------------------------------

    def _info(self, job: Job) -> GenerationInfo:
        generation, request = job.generation, job.request
        kv, positions = self._kv(job)
        now_s = asyncio.get_running_loop().time()
        paused_s = 0.0 if job.paused_s is None else now_s - job.paused_s
        return GenerationInfo(
            request_id=request.request_id,
            board_id=self._settings.board_id,
            model=request.model,
            state=job.state,
            prompt_tokens=job.tally.prompt_tokens,
            tokens=generation.tokens,
            context_tokens=len(generation.context),
            kv_positions=positions,
            partial_output=generation.partial_output,
            kv=kv,
            adapter=job.adapter,
            native_pause=request.native_pause,
            paused_by=job.paused_by,
            age_s=now_s - job.arrived_s,
            paused_s=job.tally.paused_s + paused_s,
        )

    def _kv(self, job: Job) -> tuple[Kv | None, int]:
        """Return the fate of the job's KV cache, and how many of its positions are in there."""
        live = self._slot.of(job)
        run = live.running
        if run is not None and job in run.entry_jobs:
            return None, live.entries[run.entry_jobs.index(job)]
        if job.state not in (_S.PAUSED, _S.RESUMING):
            return None, 0
        return kv_outlook(live, job, holds=self._runner.pauses.holds(job))


def _parts(request_id: str) -> tuple[str, int | None]:
    """Return completion id and choice of a request id; the choice may be missing."""
    completion, slash, choice = request_id.rpartition("/")
    if slash and choice.isascii() and choice.isdigit():
        return completion, int(choice)
    return request_id, None


def _fits(parts: tuple[str, int | None], generation: str, choice: int | None) -> bool:
    return parts[0] == generation and choice in (None, parts[1])


def _is_of(job: Job, generation: str, choice: int | None) -> bool:
    return _fits(_parts(job.request.request_id), generation, choice)


def _is_allowed_anyway(job: Job, action: ControlAction) -> bool:
    """Return whether a client may act although the board has stopped the generation.

    A pause by the client then outlives the cluster's, and a resumption takes effect after it. A job
    that is leaving its run for an engine task is paused instead of continuing.
    """
    if action is ControlAction.PAUSE:
        return job.goes_on or (job.state is _S.PAUSING and (job.frozen or job.yields))
    return action is ControlAction.RESUME and job.goes_on
