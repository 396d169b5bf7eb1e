"""Automatic sleep of unused models, and their wake-up for waiting requests.

Sleep and wake-up are ordinary operations, as an operator would request them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from rkserve.control.calls import OperationRequest, SleepAction, WakeAction
from rkserve.control.operations import OperationOutcome, conflict
from rkserve.control.sleep import IDLE, REQUEST, SleepPolicy, requested, sleeps, unused
from rkserve.coordinator.operations.operation_run import OperationContext
from rkserve.core.board_report import BoardReport
from rkserve.core.desired_state import PauseMode, SleepLevel
from rkserve.core.errors import RkserveError

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
        heard = {report.board_id for report in reports}
        seats = [seat for seat in self._context.roster.seats() if seat.model == model]
        if any(seat.silent or seat.board_id not in heard for seat in seats):
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

        A Router wakes a model that it knows to be asleep; a request sent a moment before waits on a
        board without any Router's attention.
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
