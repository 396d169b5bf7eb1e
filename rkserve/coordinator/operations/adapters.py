"""Operations on adapter versions: staging, rollout, rollback, promotion and retirement.

Each takes its ``OperationRun`` and awaits nothing before ``begin``; see ``pause``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rkserve.control import state_changes
from rkserve.control.calls import (
    AdapterPromoteAction,
    AdapterRetireAction,
    AdapterRollbackAction,
    AdapterRolloutAction,
    AdapterStageAction,
    OperationKind,
)
from rkserve.control.operations import (
    BoardOutcome,
    ControlError,
    ControlOperation,
    OperationState,
    Phase,
    deciding,
)
from rkserve.control.rollout_plan import AdapterRolloutPlan, plan
from rkserve.coordinator.operations.garbage_collection import RENEW_S, GarbageCollector
from rkserve.coordinator.operations.operation_run import (
    FileStore,
    Handler,
    OperationContext,
    OperationRun,
    shortfall,
)
from rkserve.coordinator.operations.rollout import RolloutRunner
from rkserve.core.desired_state import AdapterVersion, Desired, Scope
from rkserve.core.errors import AdapterNotFound, OperationConflict

HOLD_LEASES = 2.0
RequireFit = Callable[[Desired, str, AdapterVersion | None], None]


class AdapterOperations:
    """The handlers, and the running rollouts. Use it from one event loop."""

    def __init__(
        self,
        context: OperationContext,
        store: FileStore,
        garbage_collector: GarbageCollector,
        require_fit: RequireFit,
    ) -> None:
        """``require_fit`` raises for a version that was trained on other base weights."""
        self._require_fit = require_fit
        self._context = context
        self._store = store
        self._garbage_collector = garbage_collector
        self._rolling: dict[str, tuple[RolloutRunner, asyncio.Future[None]]] = {}

    # -- staging -------------------------------------------------------------------------------

    async def stage(
        self, context: OperationContext, run: OperationRun, asked: AdapterStageAction
    ) -> None:
        """Deliver a version to every board of its model; it is then served as ``name@version``."""
        model, version = asked.model, asked.artifact
        scope = Scope(models=(model,))
        context.check(scope)
        known = context.state.desired
        state_changes.add_version(known, model, version)  # says why not
        line = known.line(model, version.ref.name)
        run.applied = line is None or version not in line.versions
        run.allow(context.config.stage_timeout_s)
        run.begin(Phase.STAGING)
        results = await self._spread(run, scope, version)
        bad = {board: result for board, result in results.items() if not result.good}
        if bad:
            error = shortfall(bad, "nothing was changed anywhere", run.limit_s)
            if run.applied:
                await self._garbage_collector.take_back(scope, version, run.operation.id)
            run.end(OperationState.FAILED, error)
            return
        run.note(Phase.RELEASING, state_changes.add_version(context.state.desired, model, version))
        with run.timed(Phase.RELEASING.value):
            replies = await context.reconciler.tell(scope, run.left_s)
        # A board's staging result is more informative than its adoption.
        run.heard(replies.behind)
        run.end(OperationState.PARTIAL if replies.behind else OperationState.SUCCEEDED)

    async def _spread(
        self, run: OperationRun, scope: Scope, version: AdapterVersion
    ) -> dict[str, BoardOutcome]:
        with run.timed(Phase.STAGING.value):
            await asyncio.to_thread(self._store.check, version)
            boards = [address.board_id for address in self._context.roster.addresses(scope)]
            results = await self._context.stager.spread(version, boards, run.left_s)
        run.heard(results)
        return results

    # -- rollouts ------------------------------------------------------------------------------

    async def roll(
        self,
        context: OperationContext,
        run: OperationRun,
        asked: AdapterRolloutAction | AdapterRollbackAction,
    ) -> None:
        """Roll a version out, or back to the previous one."""
        operation = run.operation
        observed = deciding(context.state.running, asked)
        if observed is not None:
            await self._decide(context, run, observed, promote=False)
            return
        scope = Scope(models=(asked.model,))
        context.check(scope)
        before = context.state.desired
        made = plan(
            operation.id,
            asked,
            _wanted(before, asked),
            [address.board_id for address in context.roster.addresses(scope)],
            hold_s=HOLD_LEASES * context.config.operation_timeout_s,
            keep=context.config.keep_versions,
        )
        if made.holds(before):
            run.applied = False
            run.begin(Phase.RELEASING)
            run.end(OperationState.SUCCEEDED)
            return
        made.check(before)
        self._require_fit(before, made.model, _served_then(before, made))
        run.allow(context.config.stage_timeout_s + len(made.boards) * RENEW_S)
        run.begin(Phase.ACCEPTED)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        rolling = RolloutRunner(context, run, made)
        self._rolling[operation.id] = (rolling, over)
        try:
            finish = await rolling.run()
            run.end(finish.state, finish.error)
        finally:
            del self._rolling[operation.id]
            over.set_result(None)

    async def promote(
        self, context: OperationContext, run: OperationRun, asked: AdapterPromoteAction
    ) -> None:
        """Make the observed canary the active version now."""
        observed = deciding(context.state.running, asked)
        if observed is not None:
            await self._decide(context, run, observed, promote=True)
            return
        model, name = asked.model, asked.name
        context.check(Scope(models=(model,)))
        state_changes.promote(context.state.desired, model, name)  # says why not
        raise OperationConflict(f"No canary of adapter '{name}' is being observed now.")

    async def _decide(
        self,
        context: OperationContext,
        run: OperationRun,
        observed: ControlOperation,
        *,
        promote: bool,
    ) -> None:
        """Pass the decision to the rollout that observes the canary; it ends with that rollout."""
        if observed.id not in self._rolling:
            raise OperationConflict("That rollout is just ending; look at what became of it.")
        rolling, over = self._rolling[observed.id]
        run.begin(Phase.SWITCHING)
        rolling.decide(promote, run.operation.who)
        with run.timed(Phase.SWITCHING.value):
            await asyncio.shield(over)
        ended = context.state.operation(observed.id)
        assert ended is not None  # the latest one in the ledger
        run.heard(ended.results)
        came_in = ended.state in (OperationState.SUCCEEDED, OperationState.PARTIAL)
        if came_in is promote:
            run.end(ended.state if promote else OperationState.SUCCEEDED)
            return
        why = "it was rolled back" if promote else "it was promoted before"
        run.end(
            OperationState.FAILED,
            ControlError(409, "operation_conflict", f"Rollout '{observed.id}': {why}."),
        )

    # -- retirement ----------------------------------------------------------------------------

    async def retire(
        self, context: OperationContext, run: OperationRun, asked: AdapterRetireAction
    ) -> None:
        """Remove a version, or an adapter, and free its memory and files."""
        scope = Scope(models=(asked.model,))
        context.check(scope)
        before = context.state.desired
        after = state_changes.retire(before, asked.model, asked.name, asked.version)
        run.allow(len(context.roster.addresses(scope)) * RENEW_S)
        run.begin(Phase.RELEASING, after)
        with run.timed(Phase.RELEASING.value):
            replies = await context.reconciler.tell(scope, context.config.operation_timeout_s)
        run.heard(replies.results)
        with run.timed("reclaiming"):
            results = await self._garbage_collector.retired(scope, before, after)
        run.heard(results)
        behind = [one for one in run.operation.results.values() if not one.good]
        run.end(OperationState.PARTIAL if behind else OperationState.SUCCEEDED)


def handlers(versions: AdapterOperations) -> dict[OperationKind, Handler]:
    """Return the handler of each kind."""
    return {
        OperationKind.ADAPTER_STAGE: versions.stage,
        OperationKind.ADAPTER_ROLLOUT: versions.roll,
        OperationKind.ADAPTER_ROLLBACK: versions.roll,
        OperationKind.ADAPTER_PROMOTE: versions.promote,
        OperationKind.ADAPTER_RETIRE: versions.retire,
    }


def _served_then(desired: Desired, made: AdapterRolloutPlan) -> AdapterVersion | None:
    """Return the version that is served after a rollout; after a rollback the previous one."""
    line = desired.line(made.model, made.name)
    return made.version or (None if line is None else line.previous)


def _wanted(
    desired: Desired, asked: AdapterRolloutAction | AdapterRollbackAction
) -> AdapterVersion | None:
    if isinstance(asked, AdapterRollbackAction):
        return None
    line = desired.line(asked.model, asked.name)
    version = None if line is None else line.version(asked.version)
    if version is None:
        raise AdapterNotFound(f"{asked.name}@{asked.version}")
    return version
