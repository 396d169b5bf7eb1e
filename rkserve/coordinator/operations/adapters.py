"""Operations on adapter versions: staging, rollout, rollback, promotion and retirement; and the
removal of unused versions and base weights, from boards, the head and the memory of engines.

Each operation takes its ``OperationRun`` and awaits nothing before ``begin``; see ``pause``.

Garbage collection compares, repeatedly, the files of boards and head with the desired state. Boards
keep files by version; the head keeps them by content, which several versions may share. Engine
memory is freed at a retirement only: otherwise each board renews its engine itself when it holds
too many adapters.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable
from typing import Protocol

from rkserve.control import state_changes
from rkserve.control.calls import (
    AdapterPromoteAction,
    AdapterRetireAction,
    AdapterRollbackAction,
    AdapterRolloutAction,
    AdapterStageAction,
    OperationKind,
    RebaseAction,
    WeightUpdateAction,
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
from rkserve.coordinator.operations.operation_run import (
    FileStore,
    Handler,
    OperationContext,
    OperationRun,
    shortfall,
)
from rkserve.coordinator.operations.rollout import RolloutRunner
from rkserve.coordinator.operations.trials import TRIAL_S, AdapterTrials, TrialOutcome
from rkserve.coordinator.operations.trust import ArtifactTrust
from rkserve.core.board_report import BoardState
from rkserve.core.desired_state import AdapterVersion, Artifact, Desired, Scope
from rkserve.core.errors import AdapterNotFound, OperationConflict

HOLD_LEASES = 2.0


class WeightRules(Protocol):
    """The rules for which files a model's boards load; see ``WeightOperations``."""

    def require_fit(self, desired: Desired, model: str, version: AdapterVersion | None) -> None:
        """Raise ``ArtifactRefused`` for a version that was trained on other base weights."""

    def require_one_runtime(self, model: str) -> None:
        """Raise ``ArtifactRefused`` for a model with boards of several runtimes."""


class AdapterOperations:
    """The handlers, and the running rollouts. Use it from one event loop."""

    def __init__(
        self,
        store: FileStore,
        garbage_collector: GarbageCollector,
        rules: WeightRules,
        trials: AdapterTrials,
        trust: ArtifactTrust,
    ) -> None:
        self._trials = trials
        self._trust = trust
        self._rules = rules
        self._store = store
        self._garbage_collector = garbage_collector
        self._rolling: dict[str, tuple[RolloutRunner, asyncio.Future[None]]] = {}

    # -- staging -------------------------------------------------------------------------------

    async def stage(self, run: OperationRun, asked: AdapterStageAction) -> None:
        """Have one board try a version, then deliver it to every board of its model; it is then
        served as ``name@version``.
        """
        model, version = asked.model, asked.artifact
        scope = Scope(models=(model,))
        run.context.check(scope)
        self._rules.require_one_runtime(model)
        known = run.context.state.desired
        state_changes.add_version(known, model, version)  # says why not
        line = known.line(model, version.ref.name)
        run.applied = line is None or version not in line.versions
        trial = TrialOutcome()
        if run.applied:
            self._trust.require(self._store.facts(version.digest), model, version.ref.name)
            self._trials.check(run, model, version, force=asked.force)
        run.allow(run.context.config.stage_timeout_s + TRIAL_S)
        run.begin(Phase.STAGING)
        await asyncio.to_thread(self._store.check, version)
        if run.applied:
            trial = await self._trials.hold(run, model, version, force=asked.force)
        if trial.error is not None:
            await self._garbage_collector.take_back(scope, version, run.operation.id)
            run.end(OperationState.FAILED, trial.error)
            return
        results = await self._spread(run, scope, version, trial.board_id)
        bad = {board: result for board, result in results.items() if not result.good}
        if bad:
            error = shortfall(bad, "nothing was changed anywhere", run.limit_s)
            if run.applied:
                await self._garbage_collector.take_back(scope, version, run.operation.id)
            run.end(OperationState.FAILED, error)
            return
        run.note(
            Phase.RELEASING, state_changes.add_version(run.context.state.desired, model, version)
        )
        with run.timed(Phase.RELEASING.value):
            replies = await run.context.reconciler.send(scope, run.left_s)
        # A board's staging result is more informative than its adoption.
        run.record(replies.behind)
        run.end(OperationState.PARTIAL if replies.behind else OperationState.SUCCEEDED)

    async def _spread(
        self, run: OperationRun, scope: Scope, version: AdapterVersion, has_it: str | None
    ) -> dict[str, BoardOutcome]:
        with run.timed(Phase.STAGING.value):
            present = [address.board_id for address in run.context.roster.addresses(scope)]
            boards = [board for board in present if board != has_it]
            results = await run.context.stager.spread(version, boards, run.left_s)
        run.record(results)
        return results

    # -- rollouts ------------------------------------------------------------------------------

    async def roll(
        self,
        run: OperationRun,
        asked: AdapterRolloutAction | AdapterRollbackAction,
    ) -> None:
        """Roll a version out, or back to the previous one."""
        operation = run.operation
        observed = deciding(run.context.state.running, asked)
        if observed is not None:
            await self._decide(run, observed, promote=False)
            return
        scope = Scope(models=(asked.model,))
        run.context.check(scope)
        before = run.context.state.desired
        made = plan(
            operation.id,
            asked,
            _wanted(before, asked),
            [address.board_id for address in run.context.roster.addresses(scope)],
            hold_s=HOLD_LEASES * run.context.config.operation_timeout_s,
            keep=run.context.config.keep_versions,
        )
        if made.holds(before):
            run.applied = False
            run.begin(Phase.RELEASING)
            run.end(OperationState.SUCCEEDED)
            return
        made.check(before)
        self._rules.require_fit(before, made.model, _served_then(before, made))
        run.allow(run.context.config.stage_timeout_s + len(made.boards) * RENEW_S)
        run.begin(Phase.ACCEPTED)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        rolling = RolloutRunner(run, made)
        self._rolling[operation.id] = (rolling, over)
        try:
            finish = await rolling.run()
            run.end(finish.state, finish.error)
        finally:
            del self._rolling[operation.id]
            over.set_result(None)

    async def promote(self, run: OperationRun, asked: AdapterPromoteAction) -> None:
        """Make the observed canary the active version now."""
        observed = deciding(run.context.state.running, asked)
        if observed is not None:
            await self._decide(run, observed, promote=True)
            return
        model, name = asked.model, asked.name
        run.context.check(Scope(models=(model,)))
        state_changes.promote(run.context.state.desired, model, name)  # says why not
        raise OperationConflict(f"No canary of adapter '{name}' is being observed now.")

    async def _decide(
        self,
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
        ended = run.context.state.operation(observed.id)
        assert ended is not None  # the latest one in the ledger
        run.record(ended.results)
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

    async def retire(self, run: OperationRun, asked: AdapterRetireAction) -> None:
        """Remove a version, or an adapter, and free its memory and files."""
        scope = Scope(models=(asked.model,))
        run.context.check(scope)
        before = run.context.state.desired
        after = state_changes.retire(before, asked.model, asked.name, asked.version)
        run.allow(len(run.context.roster.addresses(scope)) * RENEW_S)
        run.begin(Phase.RELEASING, after)
        with run.timed(Phase.RELEASING.value):
            replies = await run.context.reconciler.send(
                scope, run.context.config.operation_timeout_s
            )
        run.record(replies.results)
        with run.timed("reclaiming"):
            results = await self._garbage_collector.retired(scope, before, after)
        run.record(results)
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


log = logging.getLogger(__name__)

# Running requests keep their version, and may load it again after a pause.
GRACE_S = 300.0
UNSTAGE_S = 10.0
# The number of stagings that a ledger keeps by default; each takes a few hundred bytes.
MAX_KNOWN = 10_000
RENEW_S = 120.0  # a board loads a model within this, between two requests


class GarbageCollector:
    """Use it from one event loop."""

    def __init__(
        self,
        context: OperationContext,
        store: FileStore,
        grace_s: float = GRACE_S,
        most: int = MAX_KNOWN,
    ) -> None:
        """At most ``most`` versions that are neither needed nor present are remembered."""
        self._context = context
        self._store = store
        self._grace_s = grace_s
        self._most = most
        self._known: dict[str, Artifact] = {}
        self._unnamed_s: dict[str, float] = {}  # the time since which it is not desired

    def remember(self, operations: Iterable[ControlOperation]) -> None:
        """Learn the staged versions: boards report them by key only."""
        for one in operations:
            version = brought_by(one)
            if version is not None:
                self._known[version.key] = version

    async def look(self) -> None:
        """Remove the files that have not been needed for a while."""
        await self._look_at_boards()
        await self._look_at_store()

    async def _look_at_boards(self) -> None:
        # Also versions without a record: the ledger keeps a limited number of operations.
        self._known |= {version.key: version for version in self._needed()}
        named = self._wanted()
        now_s = time.monotonic()
        for key in named:
            self._unnamed_s.pop(key, None)
        for key in self._known.keys() - named:
            since_s = self._unnamed_s.setdefault(key, now_s)
            if now_s - since_s >= self._grace_s:
                await self._remove(self._known[key])
        self._forget(named)

    async def _remove(self, version: Artifact) -> None:
        """Remove it from the boards that have it. It stays known: an absent board may return with
        it on its disk.
        """
        there = [
            report.board_id
            for report in self._context.roster.reports()
            if version.key in report.staged and report.state is not BoardState.LOST
        ]
        results = await self._unstage(version, there)
        if results and all(result.good for result in results.values()):
            log.info("%s is removed: nothing names it any more", version.title)

    def _forget(self, named: set[str]) -> None:
        """Forget the oldest of too many versions that no board has."""
        held = {key for report in self._context.roster.reports() for key in report.staged}
        for key in list(self._known)[: -self._most]:
            if key not in named and key not in held:
                del self._known[key]
                self._unnamed_s.pop(key, None)

    async def _look_at_store(self) -> None:
        """Remove the head's files that no current or pending version needs, including those that
        were sent and never staged.
        """
        for digest in await asyncio.to_thread(self._digests):
            # On the event loop, and each time anew: no staging can begin between check and removal.
            versions = [*self._needed(), *self._recent()]
            if digest in {version.digest for version in versions}:
                continue
            try:
                if self._store.remove(digest, self._grace_s):
                    log.info("the file %s is removed: no version needs it", digest[:12])
            except OSError as exc:
                log.warning("the file %s stays in the store: %s", digest[:12], exc)

    def _recent(self) -> list[Artifact]:
        """Return the versions that were needed until recently."""
        since_s = time.monotonic() - self._grace_s
        return [
            version
            for key, version in self._known.items()
            if self._unnamed_s.get(key, math.inf) > since_s
        ]

    def _digests(self) -> tuple[str, ...]:
        try:
            return self._store.digests()
        except OSError as exc:
            log.warning("the store of files cannot be read: %s", exc)
            return ()

    def _needed(self, but: str = "") -> list[Artifact]:
        """Return the versions that are desired, or being delivered by an operation other than
        ``but``.
        """
        running = [one for one in self._context.state.running if one.id != but]
        return [*_named(self._context.state.desired), *_coming(running)]

    def _wanted(self, but: str = "") -> set[str]:
        return {version.key for version in self._needed(but)}

    async def _unstage(
        self, version: Artifact, boards: Iterable[str], but: str = ""
    ) -> dict[str, BoardOutcome]:
        """Remove it from boards, unless it is needed again once the boards' locks are free."""
        results = await asyncio.gather(*(self._unstage_at(version, one, but) for one in boards))
        return {board: result for one in results for board, result in one.items()}

    async def _unstage_at(
        self, version: Artifact, board_id: str, but: str
    ) -> dict[str, BoardOutcome]:
        async with self._context.stager.at(board_id):
            address = self._context.roster.address(board_id)
            if address is None or version.key in self._wanted(but):
                return {}
            replies = await self._context.roster.ask(
                [address], "unstage", version, timeout_s=UNSTAGE_S, tries=1
            )
        return replies.results

    async def take_back(self, scope: Scope, version: Artifact, operation: str) -> None:
        """Remove what a staging that failed, that operation, has brought to boards."""
        self._known[version.key] = version
        boards = [address.board_id for address in self._context.roster.addresses(scope)]
        await self._unstage(version, boards, operation)

    async def retired(
        self, scope: Scope, before: Desired, after: Desired
    ) -> dict[str, BoardOutcome]:
        """Renew the engines that have retired versions in their memory, one after the other."""
        kept = {version.key for version in _named(after)}
        dropped = {version.key for version in _named(before)} - kept
        results: dict[str, BoardOutcome] = {}
        for report in self._context.roster.reports():
            address = self._context.roster.address(report.board_id)
            if address is None or not scope.covers(report.board_id, report.model):
                continue
            if not dropped & set(report.adapters):
                continue
            async with self._context.stager.at(report.board_id):
                replies = await self._context.roster.ask(
                    [address],
                    "renew",
                    "an adapter was retired",
                    timeout_s=RENEW_S,
                    tries=1,
                )
            results |= replies.results
        return results


def brought_by(operation: ControlOperation) -> Artifact | None:
    """Return the artifact that an operation delivers to boards, if any."""
    asked = operation.action
    if isinstance(asked, AdapterStageAction | WeightUpdateAction | RebaseAction):
        return asked.artifact
    return None


def _named(desired: Desired) -> list[Artifact]:
    bases = [weights.base for weights in desired.weights]
    coming = [one.rebase.to for one in desired.weights if one.rebase is not None]
    return [
        *(version for line in desired.lines for version in line.versions),
        *(base for base in (*bases, *coming) if base is not None),
    ]


def _coming(running: Iterable[ControlOperation]) -> list[Artifact]:
    return [version for one in running if (version := brought_by(one)) is not None]
