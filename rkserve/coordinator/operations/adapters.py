"""Operations on versions of adapters: staging, rollout, rollback, promotion and retirement.

Each takes its ``Course``, as those of ``halting`` do: up to ``begin`` it checks and awaits nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rkserve.control import params as read
from rkserve.control import state_changes
from rkserve.control.operations import (
    BoardResult,
    Operation,
    OperationError,
    OperationKind,
    OperationState,
    Phase,
    deciding,
)
from rkserve.control.rollout_plan import Plan, plan
from rkserve.coordinator.boards.delivery import Store
from rkserve.coordinator.operations.garbage_collection import RENEW_S, Reclaim, version_of
from rkserve.coordinator.operations.operation_run import Course, Desk, Handler, shortfall
from rkserve.coordinator.operations.rollout import Rolling
from rkserve.core.desired_state import AdapterVersion, Desired, Scope
from rkserve.core.errors import AdapterNotFound, OperationConflict

HOLD_LEASES = 2.0
RequireFit = Callable[[Desired, str, AdapterVersion | None], None]


class Versions:
    """The handlers, and the rollouts that go on. Use it from one event loop."""

    def __init__(self, desk: Desk, store: Store, reclaim: Reclaim, require_fit: RequireFit) -> None:
        """``require_fit`` raises for a version that was trained on other base weights."""
        self._require_fit = require_fit
        self._desk = desk
        self._store = store
        self._reclaim = reclaim
        self._rolling: dict[str, tuple[Rolling, asyncio.Future[None]]] = {}

    # -- staging -------------------------------------------------------------------------------

    async def stage(self, desk: Desk, course: Course) -> None:
        """Bring a version to every board of its model; then it is served as ``name@version``."""
        model, version = read.text(course.operation.params, "model"), version_of(course.operation)
        scope = Scope(models=(model,))
        desk.check(scope)
        known = desk.book.desired
        state_changes.add_version(known, model, version)  # says why not
        line = known.line(model, version.ref.name)
        course.applied = line is None or version not in line.versions
        course.allow(desk.config.stage_timeout_s)
        course.begin(Phase.STAGING)
        results = await self._spread(course, scope, version)
        bad = {board: result for board, result in results.items() if not result.good}
        if bad:
            error = shortfall(bad, "nothing was changed anywhere", course.limit_s)
            if course.applied:
                await self._reclaim.take_back(scope, version, course.operation.id)
            course.end(OperationState.FAILED, error)
            return
        course.note(Phase.RELEASING, state_changes.add_version(desk.book.desired, model, version))
        with course.timed(Phase.RELEASING.value):
            replies = await desk.reconciler.tell(scope, course.left_s)
        # What staging said of a board is worth more than that it was told.
        course.heard(replies.behind)
        course.end(OperationState.PARTIAL if replies.behind else OperationState.SUCCEEDED)

    async def _spread(
        self, course: Course, scope: Scope, version: AdapterVersion
    ) -> dict[str, BoardResult]:
        with course.timed(Phase.STAGING.value):
            await asyncio.to_thread(self._store.check, version)
            boards = [seat.board_id for seat in self._desk.roster.seats(scope)]
            results = await self._desk.stager.spread(version, boards, course.left_s)
        course.heard(results)
        return results

    # -- rollouts ------------------------------------------------------------------------------

    async def roll(self, desk: Desk, course: Course) -> None:
        """Roll a version out, or back to the one before."""
        asked, operation = course.operation.params, course.operation
        observed = deciding(desk.book.running, operation.kind, asked)
        if observed is not None:
            await self._decide(desk, course, observed, promote=False)
            return
        scope = Scope(models=(read.text(asked, "model"),))
        desk.check(scope)
        before = desk.book.desired
        made = plan(
            operation.kind,
            operation.id,
            asked,
            _wanted(before, course),
            [seat.board_id for seat in desk.roster.seats(scope)],
            hold_s=HOLD_LEASES * desk.config.operation_timeout_s,
            keep=desk.config.keep_versions,
        )
        if made.holds(before):
            course.applied = False
            course.begin(Phase.RELEASING)
            course.end(OperationState.SUCCEEDED)
            return
        made.check(before)
        self._require_fit(before, made.model, _served_then(before, made))
        course.allow(desk.config.stage_timeout_s + len(made.boards) * RENEW_S)
        course.begin(Phase.ACCEPTED)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        rolling = Rolling(desk, course, made)
        self._rolling[operation.id] = (rolling, over)
        try:
            finish = await rolling.run()
            course.end(finish.state, finish.error)
        finally:
            del self._rolling[operation.id]
            over.set_result(None)

    async def promote(self, desk: Desk, course: Course) -> None:
        """Make the canary that is being observed the active version now."""
        asked = course.operation.params
        observed = deciding(desk.book.running, course.operation.kind, asked)
        if observed is not None:
            await self._decide(desk, course, observed, promote=True)
            return
        model, name = read.text(asked, "model"), read.text(asked, "name")
        desk.check(Scope(models=(model,)))
        state_changes.promote(desk.book.desired, model, name)  # says why not
        raise OperationConflict(f"No canary of adapter '{name}' is being observed now.")

    async def _decide(
        self, desk: Desk, course: Course, observed: Operation, *, promote: bool
    ) -> None:
        """Tell the rollout that observes the canary; it is done when that one is."""
        if observed.id not in self._rolling:
            raise OperationConflict("That rollout is just ending; look at what became of it.")
        rolling, over = self._rolling[observed.id]
        course.begin(Phase.SWITCHING)
        rolling.decide(promote, course.operation.who)
        with course.timed(Phase.SWITCHING.value):
            await asyncio.shield(over)
        ended = desk.book.operation(observed.id)
        assert ended is not None  # it is the latest that the ledger has
        course.heard(ended.results)
        came_in = ended.state in (OperationState.SUCCEEDED, OperationState.PARTIAL)
        if came_in is promote:
            course.end(ended.state if promote else OperationState.SUCCEEDED)
            return
        why = "it was rolled back" if promote else "it was promoted before"
        course.end(
            OperationState.FAILED,
            OperationError(409, "operation_conflict", f"Rollout '{observed.id}': {why}."),
        )

    # -- retirement ----------------------------------------------------------------------------

    async def retire(self, desk: Desk, course: Course) -> None:
        """Forget a version, or an adapter, and give its memory and its place on disks back."""
        asked = course.operation.params
        model, name = read.text(asked, "model"), read.text(asked, "name")
        scope = Scope(models=(model,))
        desk.check(scope)
        before = desk.book.desired
        after = state_changes.retire(before, model, name, read.optional_text(asked, "version"))
        course.allow(len(desk.roster.seats(scope)) * RENEW_S)
        course.begin(Phase.RELEASING, after)
        with course.timed(Phase.RELEASING.value):
            replies = await desk.reconciler.tell(scope, desk.config.operation_timeout_s)
        course.heard(replies.results)
        with course.timed("reclaiming"):
            results = await self._reclaim.retired(scope, before, after)
        course.heard(results)
        behind = [one for one in course.operation.results.values() if not one.good]
        course.end(OperationState.PARTIAL if behind else OperationState.SUCCEEDED)


def handlers(versions: Versions) -> dict[OperationKind, Handler]:
    """Return who carries out which kind."""
    return {
        OperationKind.ADAPTER_STAGE: versions.stage,
        OperationKind.ADAPTER_ROLLOUT: versions.roll,
        OperationKind.ADAPTER_ROLLBACK: versions.roll,
        OperationKind.ADAPTER_PROMOTE: versions.promote,
        OperationKind.ADAPTER_RETIRE: versions.retire,
    }


def _served_then(desired: Desired, made: Plan) -> AdapterVersion | None:
    """Return the version that is served after a rollout; after a rollback the one before."""
    line = desired.line(made.model, made.name)
    return made.version or (None if line is None else line.previous)


def _wanted(desired: Desired, course: Course) -> AdapterVersion | None:
    asked = course.operation.params
    if course.operation.kind is OperationKind.ADAPTER_ROLLBACK:
        return None
    name, wanted = read.text(asked, "name"), read.text(asked, "version")
    line = desired.line(read.text(asked, "model"), name)
    version = None if line is None else line.version(wanted)
    if version is None:
        raise AdapterNotFound(f"{name}@{wanted}")
    return version
