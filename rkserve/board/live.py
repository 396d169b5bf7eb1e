"""A loaded engine with the context that it holds: how a run on it begins, is watched and settles.

It ends no engine and starts none; what follows when a run fails is the board's business.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict

from rkserve.board.engine import Engine, RunCommand, RunEnded
from rkserve.board.job import Job
from rkserve.board.kv import LiveContext, Plan
from rkserve.board.watchdog import Patience, Watchdog
from rkserve.errors import EngineHung
from rkserve.messages import GenerateRequest

log = logging.getLogger(__name__)

# Before a silence counts, the event loop gets this long to read what has arrived: it may have been
# the loop that slept, and not the engine.
SECOND_LOOK_S = 0.1


class LiveEngine:
    """One engine from its load to its end. It makes one run at a time."""

    def __init__(self, board_id: str, engine: Engine, patience: Patience) -> None:
        self.engine = engine
        self.facts = engine.facts
        self._board_id = board_id
        self._patience = patience
        self._context = LiveContext(
            append=engine.facts.quirks.get("append_tokens_with_history", False)
        )

    @property
    def kv_positions(self) -> int:
        """Positions of the live context that are known."""
        return self._context.positions

    @property
    def alive(self) -> bool:
        """False from the moment that the process has ended."""
        return not self.engine.died.done()

    async def run(self, job: Job) -> RunEnded:
        """Make the job's run.

        Raises:
            EngineHung: the watchdog's deadline has passed; the run may still be going on.
            EngineDied: the process ended before the run did.
        """
        request = job.generation.request
        plan = self._plan(request)
        job.reused = plan.reused
        job.watchdog = Watchdog(self._patience, len(plan.send), _now_s())
        per_run = self.facts.per_run_sampling
        command = RunCommand(
            run_id=job.ticket,
            ids=plan.send,
            clear=plan.clear,
            keep_history=self._context.append and request.prompt_text is None,
            sampling=asdict(request.sampling) if per_run else None,
            max_new_tokens=request.max_tokens if per_run else None,
            prompt_text=request.prompt_text,
        )
        self._context.forget()  # known again once this run has ended in order
        ended = await self._supervise(job, job.watchdog, command)
        self._settle(job, ended)
        return ended

    def abort(self, job: Job) -> None:
        """Ask the runtime to end the job's run; once, and only if it was asked for one."""
        if job.stopping or job.watchdog is None:
            return
        job.stopping = True
        if job.watchdog.aborted(_now_s()):
            job.hurry()
        self.engine.abort(job.ticket)

    def _plan(self, request: GenerateRequest) -> Plan:
        if request.prompt_text is not None:
            return Plan(clear=True, send=(), reused=0)
        return self._context.plan(request.prompt_ids)

    async def _supervise(self, job: Job, watchdog: Watchdog, command: RunCommand) -> RunEnded:
        """Wait for the run's end, within what the watchdog grants."""

        now_s = asyncio.get_running_loop().time  # looked up once: this is the path of every token

        def on_token(token_id: int, data: bytes) -> None:
            if watchdog.token(now_s()):
                job.hurry()
            job.token(token_id, data)
            if job.generation.must_stop:
                self.abort(job)

        ended = self.engine.run(command, on_token)
        try:
            while not ended.done():
                patience_s = watchdog.deadline_s - now_s()
                if patience_s > 0:
                    waits_for = (ended, job.nearer_deadline())
                    await asyncio.wait(waits_for, timeout=patience_s, return_when="FIRST_COMPLETED")
                    continue
                await asyncio.wait({ended}, timeout=SECOND_LOOK_S)
                if not ended.done() and watchdog.deadline_s <= now_s():
                    raise EngineHung(self._board_id, watchdog.verdict(now_s()))
            return ended.result()
        finally:
            ended.cancel()  # the engine may settle it later, when nobody asks any more

    def _settle(self, job: Job, ended: RunEnded) -> None:
        """Note what the run left in the KV cache."""
        if not ended.in_order or job.generation.request.prompt_text is not None:
            return  # it stays unknown, and the next run clears first
        if job.stopping and not self.facts.quirks.get("kv_valid_after_abort", False):
            return
        transcript = job.generation.transcript
        if not self._context.append:
            self._context.reset()  # without history the runtime drops the context by itself
        elif not self._context.settle(transcript, ended.kv_positions):
            log.error(
                "board %s: the runtime holds %d positions after a transcript of %d tokens; KV "
                "reuse is off until its engine restarts",
                self._board_id,
                ended.kv_positions,
                len(transcript),
            )
            self._context = LiveContext(append=False)
            self._context.forget()


def _now_s() -> float:
    return asyncio.get_running_loop().time()
