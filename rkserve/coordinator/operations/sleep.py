"""Operations that put boards to sleep and wake them: a pause and a resume that also end the engine
or load the model.

Each takes its ``OperationRun`` and awaits nothing before ``begin``; see ``pause``. The caller (an
operator, a request, the idle timer) makes no difference.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from rkserve.control import sleep as sleep_changes
from rkserve.control.calls import (
    KV_CACHE,
    WEIGHTS,
    AnyAction,
    OperationKind,
    ServingAction,
    SleepAction,
    WakeAction,
)
from rkserve.control.operations import (
    BoardOutcome,
    ControlOperation,
    OperationState,
    Phase,
    ResultStatus,
)
from rkserve.control.sleep import SleepPolicy
from rkserve.coordinator.boards.roster import Replies
from rkserve.coordinator.operations.operation_run import Handler, OperationContext, OperationRun
from rkserve.coordinator.operations.pause import end_hold, going_on, halt
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import ActivePause, Adoption, Desired, Scope, SleepLevel
from rkserve.core.errors import RequestError

# The fraction of the tokens in KV caches that must be restorable, or they count as lost.
KEPT_SHARE = 0.99


class SleepOperations:
    """The handlers. ``policies`` are the configured sleep by model."""

    def __init__(self, policies: Mapping[str, SleepPolicy]) -> None:
        self._policies = policies
        self._renewing: set[str] = set()  # operations that only renew an existing sleep

    def policy(self, model: str) -> SleepPolicy:
        """Return the configured sleep of a model's boards."""
        return self._policies.get(model, SleepPolicy())

    async def sleep(self, context: OperationContext, run: OperationRun, asked: SleepAction) -> None:
        """Put boards to sleep; it succeeds when all of them sleep, and is undone otherwise."""
        scope = asked.scope
        context.check(scope)
        before = context.state.desired
        models = scope.models or tuple(context.roster.models)
        wakes = asked.wakes
        if wakes is None:
            wakes = all(self.policy(model).wakes for model in models)
        desired = sleep_changes.sleep(
            before,
            run.operation.id,
            scope,
            asked.mode,
            asked.level,
            now_s=context.now_s(),
            lease_s=asked.lease_s,
            wakes=wakes,
            models=models,
            running=going_on(context),
        )
        run.applied = desired is not before
        run.allow(self._load_s(context, scope))
        renewal = self.renews(context, asked)
        run.begin(Phase.SLEEPING, desired)
        if renewal:
            self._renewing.add(run.operation.id)
        try:
            replies = await self._move(context, run, scope, Phase.SLEEPING)
        finally:
            self._renewing.discard(run.operation.id)
        done = "no board is left asleep by it" if run.applied else "an earlier sleep goes on"
        await end_hold(context, run, scope, replies, done)

    async def wake(self, context: OperationContext, run: OperationRun, asked: WakeAction) -> None:
        """Remove sleeps, and answer once the models are loaded; late boards follow."""
        scope = asked.scope
        context.check(Scope(models=scope.models))  # the only sleeping board may be one that is gone
        desired, woken = _woken(context, asked)
        run.applied = bool(woken)
        run.allow(self._load_s(context, scope))
        run.begin(Phase.WAKING, desired)
        replies = await self._move(context, run, scope, Phase.WAKING)
        # A board that died in it is not awake; its replacement will be.
        died = any(one.status is ResultStatus.GONE for one in replies.results.values())
        late = replies.behind or died
        run.end(OperationState.PARTIAL if late else OperationState.SUCCEEDED)
        if woken and asked.requested:
            state = run.operation.state.value
            context.metrics.requested_wakes.labels(scope.models[0], state).inc()

    def renews(self, context: OperationContext, asked: AnyAction) -> bool:
        """Return whether it renews an existing sleep: only its end may change."""
        return isinstance(asked, SleepAction) and sleep_changes.renews(
            context.state.desired, asked.scope, asked.mode, asked.level, context.roster.models
        )

    def in_the_way(
        self, context: OperationContext, asked: AnyAction
    ) -> tuple[ControlOperation, ...]:
        """Return the running operations that may have to end before the requested one begins.

        During the renewal of a lease the sleeping part may be changed: neither waits for the other.
        """
        running = context.state.running
        if not isinstance(asked, ServingAction):
            return running
        return tuple(one for one in running if one.id not in self._renewing)

    def _load_s(self, context: OperationContext, scope: Scope) -> float:
        models = scope.models or tuple(context.roster.models)
        return max((self.policy(model).load_s for model in models), default=0.0)

    async def _move(
        self, context: OperationContext, run: OperationRun, scope: Scope, phase: Phase
    ) -> Replies:
        """Have boards unload or load, with their progress shown in the record."""
        watch = asyncio.get_running_loop().create_task(_watch(context, run, scope))
        try:
            replies = await halt(context, run, scope, phase)
        finally:
            watch.cancel()
            run.forget_waiting()
        self._note(run, replies)
        return replies

    def _note(self, run: OperationRun, replies: Replies) -> None:
        """Record each board's depth of sleep and the fate of its KV cache."""
        for board, said in replies.said.items():
            result: BoardOutcome = replies.results[board]
            if isinstance(said, Adoption) and said.level is not None:
                run.heard({board: replace(result, details=asleep(said, said.level))})

    @property
    def handlers(self) -> dict[OperationKind, Handler]:
        """The handlers by the kind of operation."""
        return {OperationKind.SLEEP: self.sleep, OperationKind.WAKE: self.wake}


async def _watch(context: OperationContext, run: OperationRun, scope: Scope) -> None:
    """Show in the operation's record which boards have arrived, by their reports."""
    while True:
        reports = {report.board_id: report for report in context.roster.reports()}
        run.show(
            {
                seat.board_id: _ARRIVED
                if _is_there(context.state.desired, reports.get(seat.board_id))
                else _ON_ITS_WAY
                for seat in context.roster.seats(scope)
            }
        )
        await asyncio.sleep(context.config.report_s)


_ARRIVED, _ON_ITS_WAY = BoardOutcome(ResultStatus.OK), BoardOutcome(ResultStatus.WAITING)


def _is_there(desired: Desired, report: BoardReport | None) -> bool:
    if report is None or report.epoch != desired.epoch:
        return False
    level = desired.target(report.board_id, report.model).level
    unloaded = level is not None and level > SleepLevel.PAUSED
    return report.state is (BoardState.ASLEEP if unloaded else BoardState.READY)


def _woken(context: OperationContext, asked: WakeAction) -> tuple[Desired, tuple[ActivePause, ...]]:
    desired, scope = context.state.desired, asked.scope
    if asked.requested:
        if len(scope.models) != 1:
            raise RequestError("A request is for one model.", "models")
        return sleep_changes.wake_for_request(desired, scope.models[0])
    tags = frozenset(asked.tags)
    return sleep_changes.wake(
        desired,
        scope,
        going_on(context),
        only_weights=tags == {WEIGHTS},
        only_kv=tags == {KV_CACHE},
    )


def asleep(said: Adoption, level: SleepLevel) -> dict[str, int | str]:
    """Return the record's details of a sleeping board."""
    contexts = said.kept_tokens + said.dropped_tokens
    if level is SleepLevel.PAUSED:
        kv = "kept"
    elif level is SleepLevel.DROPPED or said.kept_tokens < KEPT_SHARE * contexts:
        kv = "discarded"
    else:
        kv = "parked"
    return {
        "level": int(level),
        "kv": kv,
        "kept_tokens": said.kept_tokens,
        "dropped_tokens": said.dropped_tokens,
    }
