"""Operations that put boards to sleep and wake them: a pause and a resume that also end the engine
or load the model; and those that the Coordinator performs by itself, for unused models and for
waiting requests.

Each takes its ``OperationRun`` and awaits nothing before ``begin``; see ``pause``. The caller (an
operator, a request, the idle timer) makes no difference.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace

from rkserve.control import sleep as sleep_changes
from rkserve.control.calls import (
    KV_CACHE,
    WEIGHTS,
    AnyAction,
    OperationKind,
    OperationRequest,
    ServingAction,
    SleepAction,
    WakeAction,
)
from rkserve.control.operations import (
    BoardOutcome,
    ControlOperation,
    OperationOutcome,
    OperationState,
    Phase,
    ResultStatus,
    conflict,
)
from rkserve.control.sleep import IDLE, REQUEST, SleepPolicy, requested, sleeps, unused
from rkserve.coordinator.boards.roster import Replies
from rkserve.coordinator.operations.operation_run import Handler, OperationContext, OperationRun
from rkserve.coordinator.operations.pause import end_hold, going_on, halt
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.core.desired_state import ActivePause, Adoption, Desired, PauseMode, Scope, SleepLevel
from rkserve.core.errors import RequestError, RkserveError

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

    async def sleep(self, run: OperationRun, asked: SleepAction) -> None:
        """Put boards to sleep; it succeeds when all of them sleep, and is undone otherwise."""
        scope = asked.scope
        run.context.check(scope)
        before = run.context.state.desired
        models = scope.models or tuple(run.context.roster.models)
        wakes = asked.wakes
        if wakes is None:
            wakes = all(self.policy(model).wakes for model in models)
        desired = sleep_changes.sleep(
            before,
            run.operation.id,
            scope,
            asked.mode,
            asked.level,
            now_s=run.context.now_s(),
            lease_s=asked.lease_s,
            wakes=wakes,
            models=models,
            running=going_on(run.context),
        )
        run.applied = desired is not before
        run.allow(self._load_s(run.context, scope))
        renewal = self.renews(run.context, asked)
        run.begin(Phase.SLEEPING, desired)
        if renewal:
            self._renewing.add(run.operation.id)
        try:
            replies = await self._move(run, scope, Phase.SLEEPING)
        finally:
            self._renewing.discard(run.operation.id)
        done = "no board is left asleep by it" if run.applied else "an earlier sleep goes on"
        await end_hold(run, scope, replies, done)

    async def wake(self, run: OperationRun, asked: WakeAction) -> None:
        """Remove sleeps, and answer once the models are loaded; late boards follow."""
        scope = asked.scope
        # The only sleeping board may be one that is gone.
        run.context.check(Scope(models=scope.models))
        desired, woken = _woken(run.context, asked)
        run.applied = bool(woken)
        run.allow(self._load_s(run.context, scope))
        run.begin(Phase.WAKING, desired)
        replies = await self._move(run, scope, Phase.WAKING)
        # A board that died in it is not awake; its replacement will be.
        died = any(one.status is ResultStatus.GONE for one in replies.results.values())
        late = replies.behind or died
        run.end(OperationState.PARTIAL if late else OperationState.SUCCEEDED)
        if woken and asked.requested:
            state = run.operation.state.value
            run.context.metrics.requested_wakes.labels(scope.models[0], state).inc()

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

    async def _move(self, run: OperationRun, scope: Scope, phase: Phase) -> Replies:
        """Have boards unload or load, with their progress shown in the record."""
        watch = asyncio.get_running_loop().create_task(_watch(run, scope))
        try:
            replies = await halt(run, scope, phase)
        finally:
            watch.cancel()
            run.forget_waiting()
        self._note(run, replies)
        return replies

    def _note(self, run: OperationRun, replies: Replies) -> None:
        """Record each board's depth of sleep and the fate of its KV cache."""
        for board, answer in replies.answers.items():
            result: BoardOutcome = replies.results[board]
            if isinstance(answer, Adoption) and answer.level is not None:
                run.record({board: replace(result, details=asleep(answer, answer.level))})

    @property
    def handlers(self) -> dict[OperationKind, Handler]:
        """The handlers by the kind of operation."""
        return {OperationKind.SLEEP: self.sleep, OperationKind.WAKE: self.wake}


async def _watch(run: OperationRun, scope: Scope) -> None:
    """Show in the operation's record which boards have arrived, by their reports."""
    while True:
        reports = {report.board_id: report for report in run.context.roster.reports()}
        run.show(
            {
                address.board_id: _ARRIVED
                if _is_there(run.context.state.desired, reports.get(address.board_id))
                else _ON_ITS_WAY
                for address in run.context.roster.addresses(scope)
            }
        )
        await asyncio.sleep(run.context.config.report_s)


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


def asleep(adoption: Adoption, level: SleepLevel) -> dict[str, int | str]:
    """Return the record's details of a sleeping board."""
    contexts = adoption.kept_tokens + adoption.dropped_tokens
    if level is SleepLevel.PAUSED:
        kv = "kept"
    elif level is SleepLevel.DROPPED or adoption.kept_tokens < KEPT_SHARE * contexts:
        kv = "discarded"
    else:
        kv = "parked"
    return {
        "level": int(level),
        "kv": kv,
        "kept_tokens": adoption.kept_tokens,
        "dropped_tokens": adoption.dropped_tokens,
    }


log = logging.getLogger(__name__)

AGAIN_S = 30.0  # after a failed sleep or wake-up of a model


@dataclass
class _Sleeper:
    """A sleeping replica. ``jobs`` is its number of jobs when it fell asleep; more came since."""

    operations: frozenset[str]
    jobs: int


class IdleModels:
    """Checks all models in turn. Use it from one event loop."""

    def __init__(
        self,
        context: OperationContext,
        policies: Mapping[str, SleepPolicy],
        perform: Callable[[OperationRequest], Awaitable[OperationOutcome]],
    ) -> None:
        self._context = context
        self._policies = policies
        self._perform = perform
        self._going_on: dict[str, asyncio.Task[None]] = {}
        self._not_before_s: dict[str, float] = {}
        self._sleepers: dict[str, _Sleeper] = {}  # by replica

    @property
    def tasks(self) -> tuple[asyncio.Task[None], ...]:
        """The running tasks."""
        return tuple(self._going_on.values())

    def look(self) -> None:
        """Begin due operations, by the boards' latest reports."""
        for model in self._context.roster.models:
            reports = self._context.roster.reports(model)
            waited_for = self._is_waited_for(model, reports)
            if model in self._going_on or time.monotonic() < self._not_before_s.get(model, 0.0):
                continue
            if waited_for:
                self._begin(model, requested(model), REQUEST)
            elif self._is_unused(model, reports):
                self._begin(model, self._unload(model), IDLE)

    # -- sleep ----------------------------------------------------------------------------------

    def _is_unused(self, model: str, reports: list[BoardReport]) -> bool:
        policy = self._policies.get(model)
        if policy is None or policy.idle_s is None:
            return False
        desired, state = self._context.state.desired, self._context.state
        if not unused(desired, model, reports, policy.idle_s):
            return False
        # A board without a report may be at work.
        reported = {report.board_id for report in reports}
        addresses = [
            address for address in self._context.roster.addresses() if address.model == model
        ]
        if any(address.silent or address.board_id not in reported for address in addresses):
            return False
        return conflict(state.running, self._unload(model)) is None

    def _unload(self, model: str) -> SleepAction:
        """Return an idle model's sleep.

        If requests do not end it, none may wait for it either: they are refused at once.
        """
        wakes = self._policies[model].wakes
        mode = PauseMode.KEEP if wakes else PauseMode.WAIT
        return SleepAction(models=(model,), mode=mode, level=SleepLevel.UNLOADED, wakes=wakes)

    # -- wake-up --------------------------------------------------------------------------------

    def _is_waited_for(self, model: str, reports: list[BoardReport]) -> bool:
        """Return whether a request reached a board that sleeps until one does.

        A Router wakes a model that its boards report as asleep; a request sent a moment before
        waits on a board without any Router's attention.
        """
        desired, found = self._context.state.desired, False
        for report in reports:
            asleep = sleeps(desired, report.board_id, model)
            if report.level is None or not asleep or not all(one.wakes for one in asleep):
                self._sleepers.pop(report.replica, None)
                continue
            operations = frozenset(one.operation for one in asleep)
            jobs = report.running + report.queued + report.paused
            known = self._sleepers.get(report.replica)
            if known is None or known.operations != operations:
                kept = 0 if self._had_none(operations) else jobs
                known = self._sleepers[report.replica] = _Sleeper(operations, kept)
            known.jobs = min(known.jobs, jobs)  # clients leave
            found = found or jobs > known.jobs
        there = {report.replica for report in self._context.roster.reports()}
        self._sleepers = {name: one for name, one in self._sleepers.items() if name in there}
        return found

    def _had_none(self, operations: frozenset[str]) -> bool:
        """Return whether boards had no work when they fell asleep, because the model was unused."""
        found = [self._context.state.operation(name) for name in operations]
        return any(one is not None and one.who == IDLE for one in found)

    # -- both -----------------------------------------------------------------------------------

    def _begin(self, model: str, action: SleepAction | WakeAction, who: str) -> None:
        task = asyncio.get_running_loop().create_task(self._carry_out(model, action, who))
        self._going_on[model] = task
        task.add_done_callback(lambda done: self._ended(model, done))

    async def _carry_out(self, model: str, action: SleepAction | WakeAction, who: str) -> None:
        state = "refused"
        try:
            outcome = await self._perform(OperationRequest(action, who=who))
            state = outcome.operation.state.value
            if outcome.operation.error is None:
                return
            log.warning("model %s: %s", model, outcome.operation.error.message)
        except RkserveError as exc:
            log.warning("model %s: the %s could not begin: %s", model, action.kind.value, exc)
        finally:
            if isinstance(action, SleepAction):
                self._context.metrics.idle_unloads.labels(model, state).inc()
        self._not_before_s[model] = time.monotonic() + AGAIN_S

    def _ended(self, model: str, task: asyncio.Task[None]) -> None:
        del self._going_on[model]
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._not_before_s[model] = time.monotonic() + AGAIN_S
            log.error("model %s could not be put to sleep or woken", model, exc_info=exc)
