"""The owner of the desired state: accepts calls, executes them, and keeps boards in that state.

It reaches boards through a ``Fleet`` and the disk through a ``Ledger`` and a file store; Ray is
elsewhere. Generations continue without it; its successor finds unfinished operations in the ledger,
and completes or undoes them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from rkserve.config.serve_config import CoordinatorConfig
from rkserve.control import state_changes, weight_changes
from rkserve.control.calls import (
    AcceptedManifest,
    AdapterRolloutAction,
    DeclaredArtifact,
    OperationKind,
    OperationRequest,
    RebaseAction,
    StoredArtifact,
    WakeAction,
    WeightUpdateAction,
)
from rkserve.control.operations import (
    HOLDS,
    ControlError,
    ControlOperation,
    OperationOutcome,
    OperationState,
    conflict,
)
from rkserve.control.sleep import SleepPolicy
from rkserve.coordinator.boards.head_files import ArtifactRetriever, LedgerCopier
from rkserve.coordinator.boards.reconcile import LateResults, Reconciler
from rkserve.coordinator.boards.roster import Roster
from rkserve.coordinator.boards.transfer import Put, Stager, TransferLimits
from rkserve.coordinator.operations import boards
from rkserve.coordinator.operations.adapters import AdapterOperations, GarbageCollector, handlers
from rkserve.coordinator.operations.operation_run import (
    FileStore,
    Handler,
    OperationContext,
    OperationRun,
    Routers,
)
from rkserve.coordinator.operations.pause import HANDLERS
from rkserve.coordinator.operations.prompt_caches import CacheTimes, PromptCacheKeeper
from rkserve.coordinator.operations.sleep import IdleModels, SleepOperations
from rkserve.coordinator.operations.trials import AdapterTrials
from rkserve.coordinator.operations.trust import ArtifactTrust, TrustRules
from rkserve.coordinator.operations.weights import WeightOperations
from rkserve.coordinator.state.api_keys import KeyKeeper
from rkserve.coordinator.state.ledger import AuditEntry, Ledger
from rkserve.coordinator.state.ledger_files import LOOK_S, LedgerBackup
from rkserve.coordinator.state.signed_versions import SignedVersions
from rkserve.coordinator.state.state_store import StateStore, recover, stands
from rkserve.core.board_report import next_round
from rkserve.core.coordinator_metrics import CoordinatorMetrics
from rkserve.core.desired_state import Desired, DesiredCache, Scope
from rkserve.core.errors import (
    LedgerFailed,
    OperationConflict,
    OperationNotFound,
    OperationTimeout,
    RequestError,
    RkserveError,
)
from rkserve.core.request_record import log_for
from rkserve.fleet.fleet import Fleet

log = logging.getLogger(__name__)

LEASE_TICK_S = 0.2
RECLAIM_S = 5.0
AGAIN_S = 1.0
TURN_S = 0.05
LEAST_STEP_S = 1.0  # NTP slews smaller errors, by at most 0.5 ms in a second


def since_boot_s() -> float:
    """Return the time since boot in seconds, that in which the machine was suspended included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True)
class CoordinatorPorts:
    """The Coordinator's interfaces to the outside. ``now_s`` reads seconds since 1970, and
    ``elapsed_s`` a clock that nothing sets.

    ``policies`` are the configured sleep by model, and ``system_prompts`` by group the prompt that
    its boards cache from their start. Models of ``mixed`` have boards of several runtimes.
    """

    fleet: Fleet
    ledger: Ledger
    store: FileStore
    put: Put
    now_s: Callable[[], float] = time.time
    pace: TransferLimits = field(default_factory=TransferLimits)
    policies: Mapping[str, SleepPolicy] = field(default_factory=dict)
    system_prompts: Mapping[str, DesiredCache] = field(default_factory=dict)
    cache_times: CacheTimes = field(default_factory=CacheTimes)
    routers: Routers | None = None
    trust: TrustRules = field(default_factory=TrustRules)
    mixed: frozenset[str] = frozenset()
    elapsed_s: Callable[[], float] = since_boot_s


class WallClock:
    """The time of day, which a person or NTP may set: boards without a battery start in the past.

    Its steps are found by comparing it with a clock that nothing sets.
    """

    def __init__(self, now_s: Callable[[], float], elapsed_s: Callable[[], float]) -> None:
        self._now_s, self._elapsed_s = now_s, elapsed_s
        self._ahead_s = now_s() - elapsed_s()

    def step(self) -> float:
        """Return the seconds by which it was set since the last call; 0.0 for a correction below
        ``LEAST_STEP_S``.
        """
        ahead_s = self._now_s() - self._elapsed_s()
        step_s = ahead_s - self._ahead_s
        self._ahead_s = ahead_s
        return step_s if abs(step_s) >= LEAST_STEP_S else 0.0


class Coordinator:
    """Use it from one event loop, after ``start``."""

    def __init__(self, config: CoordinatorConfig, outside: CoordinatorPorts) -> None:
        self._config = config
        self._registry = CollectorRegistry()
        self._metrics = CoordinatorMetrics(
            self._registry,
            [kind.value for kind in OperationKind],
            [state.value for state in OperationState if state is not OperationState.RUNNING],
        )
        self._now_s = outside.now_s
        self._wall_clock = WallClock(outside.now_s, outside.elapsed_s)
        self._state = StateStore(outside.ledger)
        self._roster = Roster(outside.fleet, self._board_failed)
        stager = Stager(
            self._roster,
            outside.store.read,
            outside.put,
            self._metrics,
            timeout_s=config.stage_timeout_s,
            pace=outside.pace,
        )
        self._reconciler = Reconciler(
            self._state, self._roster, stager, self._metrics, config.operation_timeout_s
        )
        self._context = OperationContext(
            config,
            self._state,
            self._roster,
            stager,
            self._reconciler,
            self._metrics,
            outside.now_s,
            outside.routers,
        )
        self._garbage_collector = GarbageCollector(self._context, outside.store)
        self._late_results = LateResults(self._state, self._roster, outside.now_s)
        self.trust = ArtifactTrust(
            outside.trust,
            SignedVersions(outside.ledger),
            outside.now_s,
            self._roster.reports,
            lambda: self._state.desired.epoch,
        )
        self._store = outside.store
        self._weights = WeightOperations(outside.store, self._roster, self.trust, outside.mixed)
        versions = AdapterOperations(
            outside.store,
            self._garbage_collector,
            self._weights,
            AdapterTrials(enabled=config.try_adapters),
            self.trust,
        )
        self._sleeping = SleepOperations(outside.policies)
        self._handlers: dict[Any, Handler] = {
            **HANDLERS,
            **boards.HANDLERS,
            **self._sleeping.handlers,
            **handlers(versions),
            **self._weights.handlers,
        }
        self.caches = PromptCacheKeeper(
            self._context, outside.ledger, outside.system_prompts, outside.cache_times
        )
        self._copier = LedgerCopier(
            self._roster,
            self._metrics,
            outside.ledger.cluster,
            config.ledger_copies,
            now_s=outside.now_s,
        )
        self._retriever = ArtifactRetriever(
            self._roster, outside.store, lambda: self._state.desired, self._metrics
        )
        self.keys = KeyKeeper(outside.ledger, outside.now_s)
        self._idling = IdleModels(self._context, outside.policies, self.perform)
        self._keyed_runs: dict[
            str, tuple[OperationRun, asyncio.Task[None]]
        ] = {}  # by idempotency key
        self._going_on: set[asyncio.Task[None]] = set()
        self._loops: list[asyncio.Task[None]] = []

    def _board_failed(self, method: str, exc: RkserveError) -> None:
        self._metrics.board_failures.labels(method, exc.code or "internal_error").inc()

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Complete or undo a predecessor's operations, find the boards, and start the periodic
        work.

        A full disk does not prevent it: the recovered state is in effect, and is stored once it can
        be.
        """
        desired, ended = recover(self._state.desired, self._state.unsettled(), self._now_s())
        lines = [
            replace(AuditEntry.of(one, self._now_s(), "recovery"), outcome=one.state.value)
            for one in ended
        ]
        if ended or desired != self._state.desired:
            # A full disk does not matter: a successor would come to the same result.
            self._state.derive(desired, *ended, audit=lines)
        for one in ended:
            log.warning("operation %s (%s) is %s now", one.id, one.kind.value, one.state.value)
        for one in self._state.partial():
            self._late_results.add(one)
        self._garbage_collector.remember(await asyncio.to_thread(self._state.stagings))
        await self._round()
        self._reconciler.announce()
        self._loops = [
            self._forever(self._round, self._config.report_s),
            self._forever(self._expire, LEASE_TICK_S),
            self._forever(self._garbage_collector.look, RECLAIM_S),
            self._forever(self._copier.look, LOOK_S),
            self._forever(self._retriever.look, LOOK_S),
        ]

    async def stop(self) -> None:
        """Stop; running operations stay in the ledger for the successor."""
        tasks = [*self._loops, *self._going_on, *self._idling.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.caches.stop()
        await self._reconciler.stop()
        await self._roster.stop()

    def _forever(
        self, work: Callable[[], Coroutine[Any, Any, None]], every_s: float
    ) -> asyncio.Task[None]:
        async def loop() -> None:
            message = ""
            while True:
                try:
                    await work()
                    message = ""
                except RkserveError as exc:
                    # A persistent error such as a full disk is logged once.
                    if exc.message != message:
                        message = exc.message
                        log.warning("%s failed, and is tried again: %s", work.__name__, message)
                    await asyncio.sleep(AGAIN_S)
                except Exception:
                    # If this loop ended, boards and leases would be unattended.
                    log.exception("a round of the Coordinator failed; it goes on")
                    await asyncio.sleep(AGAIN_S)
                now_s = asyncio.get_running_loop().time()
                await asyncio.sleep(next_round(now_s, every_s) - now_s)

        return asyncio.get_running_loop().create_task(loop(), name=work.__qualname__)

    async def _round(self) -> None:
        """Collect reports, bring back boards that do not follow, and record those that have."""
        await self._roster.refresh()
        self._reconciler.look()
        self._late_results.look()
        self._idling.look()
        self.caches.look()
        self._metrics.epoch.set(self._state.desired.epoch)
        asleep = sum(pause.level is not None for pause in self._state.desired.pauses)
        self._metrics.pauses_in_force.set(len(self._state.desired.pauses) - asleep)
        self._metrics.sleeps_in_force.set(asleep)
        self._metrics.boards_drained.set(len(self._state.desired.drained))
        self._metrics.running.set(len(self._state.running))
        self.keys.save_used()

    async def _expire(self) -> None:
        """End pauses and sleeps whose lease has ended.

        Also if that cannot be stored: any reader of the ledger comes to the same result.
        """
        self._follow_clock()
        desired, ended = state_changes.expire(self._state.desired, self._now_s())
        if not ended:
            self._state.catch_up()
            return
        audit = [
            AuditEntry(
                at_s=self._now_s(),
                who="lease",
                kind="resume" if pause.level is None else "wake",
                outcome="succeeded",
                operation=pause.operation,
                epoch=desired.epoch,
            )
            for pause in ended
        ]
        self._state.derive(desired, audit=audit)
        self._metrics.leases_expired.inc(len(ended))
        for pause in ended:
            what = "pause" if pause.level is None else "sleep"
            log.warning("the lease of %s %s has ended; it is taken back", what, pause.operation)
        self._reconciler.announce()

    def _follow_clock(self) -> None:
        """Move leases with the clock that they go by, so that each keeps its rest."""
        if step_s := self._wall_clock.step():
            log.warning("this machine's clock was set by %.0f s; leases keep their rest", step_s)
            self._state.derive(state_changes.move_leases(self._state.desired, step_s))
            self._reconciler.announce()

    # -- calls ---------------------------------------------------------------------------------

    async def perform(self, call: OperationRequest) -> OperationOutcome:
        """Execute a call; return when it is over, or at once if it runs in the background.

        Raises:
            RkserveError: it was refused before it began, and nothing was changed.
        """
        log_for(call.request_id)
        self._follow_clock()
        try:
            repeated = await self._repeated(call)
            if repeated is not None:
                return repeated
            run, task = self._begin(call)
            await self._until(run, task, call)
        except RkserveError as exc:
            self._refused(call, exc)
            raise
        return run.outcome

    async def _repeated(self, call: OperationRequest) -> OperationOutcome | None:
        """Return the answer to an earlier call with the same key."""
        if call.key is None:
            return None
        known = self._keyed_runs.get(call.key)
        if known is not None:
            run, task = known
            _check_repeat(call, run.operation)
            await self._until(run, task, call)
            return replace(run.outcome, applied=False)
        operation = self._state.by_key(call.key)
        if operation is None:
            return None
        _check_repeat(call, operation)
        return OperationOutcome(operation.status, operation, applied=False)

    async def _until(
        self, run: OperationRun, task: asyncio.Task[None], call: OperationRequest
    ) -> None:
        """Wait for the end, or for the beginning only; a cancelled caller ends nothing."""
        begun = asyncio.get_running_loop().create_task(run.has_begun.wait())
        try:
            waiting = [task, begun] if call.background else [task]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            begun.cancel()
        if task.done():
            task.result()

    def _begin(self, call: OperationRequest) -> tuple[OperationRun, asyncio.Task[None]]:
        operation = ControlOperation(
            id=f"op-{secrets.token_hex(8)}",
            action=call.action,
            who=call.who,
            created_s=self._now_s(),
            key=call.key,
            fingerprint=call.fingerprint,
        )
        run = OperationRun(self._context, operation, call)
        task = asyncio.get_running_loop().create_task(self._carry_out(run))
        self._going_on.add(task)
        if call.key is not None:
            self._keyed_runs[call.key] = (run, task)
        task.add_done_callback(lambda done: self._ended(call, done))
        return run, task

    def _ended(self, call: OperationRequest, task: asyncio.Task[None]) -> None:
        self._going_on.discard(task)
        if call.key is not None:
            self._keyed_runs.pop(call.key, None)
        if not task.cancelled():
            task.exception()  # the caller has the error; asyncio must not log it as never retrieved

    async def _carry_out(self, run: OperationRun) -> None:
        """Check and execute a call; its record is ended in every case.

        Raises:
            RkserveError: it was refused before it began.
        """
        operation = run.operation
        if operation.kind in HOLDS and run.late:
            raise OperationTimeout(
                f"The call reached the Coordinator after its limit of {run.limit_s:g} s; nothing "
                "was changed."
            )
        state_changes.expect(self._state.desired, run.call.expected_epoch)
        await self._weights.prepare(self._state.desired, operation.action)
        await self._exclude(run)
        if not operation.action.frees:  # boards must be released in every case
            self._roster.require_known()
        try:
            await self._handlers[operation.kind](run, operation.action)
        except RkserveError as exc:
            if not run.begun:
                raise
            await self._undo_failed(run, ControlError.of(exc))
        except Exception as exc:
            log.exception("operation %s (%s) failed", operation.id, operation.kind.value)
            if not run.begun:
                raise
            message = f"{type(exc).__name__}: {exc}"
            await self._undo_failed(run, ControlError(500, "internal_error", message))
        ended = run.operation
        log.info(
            "%s %s by %s is %s at epoch %d: %d of %d boards",
            ended.kind.value,
            ended.id,
            ended.who or "no owner",
            ended.state.value,
            ended.epoch,
            ended.succeeded,
            len(ended.results),
        )
        self._late_results.add(ended)
        self._garbage_collector.remember([ended])

    async def _exclude(self, run: OperationRun) -> None:
        """Refuse a call that a running operation excludes; a wake-up by a request waits instead.

        Raises:
            OperationConflict: a running operation excludes it.
        """
        asked = run.call.action
        if self._sleeping.renews(self._context, asked):
            return
        waits = isinstance(asked, WakeAction) and asked.requested
        while why := conflict(self._sleeping.in_the_way(self._context, asked), asked):
            if not waits or run.left_s <= AGAIN_S:
                raise OperationConflict(why)
            await asyncio.sleep(TURN_S)

    async def _undo_failed(self, run: OperationRun, error: ControlError) -> None:
        """End a failed operation: no pause and no candidate of it remains.

        If only its end could not be stored, or its change is in effect already, it ends with that
        result: its record must not contradict what is served.
        """
        came_to = run.unwritten
        while not run.operation.over:
            operation, desired = run.operation, self._state.desired
            try:
                if came_to is not None and not _is_pause(operation, came_to[0]):
                    run.end(*came_to)
                elif stands(desired, operation):
                    run.end(OperationState.PARTIAL)
                else:
                    self._undo(run, error)
            except LedgerFailed as exc:
                log.warning("operation %s cannot be ended yet: %s", operation.id, exc)
                await asyncio.sleep(AGAIN_S)
            else:
                self._reconciler.announce()

    def _undo(self, run: OperationRun, error: ControlError) -> None:
        desired = _without(self._state.desired, run.operation)
        changed = desired is not self._state.desired
        state = OperationState.UNDONE if changed else OperationState.FAILED
        run.end(state, error, desired)

    def _refused(self, call: OperationRequest, exc: RkserveError) -> None:
        code = exc.code or "invalid_request"
        self._metrics.refused.labels(call.kind.value, code).inc()
        line = AuditEntry(
            at_s=self._now_s(),
            who=call.who,
            kind=call.kind.value,
            params=call.params,
            outcome=code,
            status=exc.http_status,
            epoch=self._state.desired.epoch,
        )
        try:
            self._state.write(audit=[line])
        except LedgerFailed as failed:
            log.warning("a refused call by %s could not be audited: %s", call.who, failed)

    # -- questions -----------------------------------------------------------------------------

    async def desired(self, after_epoch: int, wait_s: float) -> Desired:
        """Return the desired state as soon as its epoch is not ``after_epoch``."""
        return await self._state.after(after_epoch, wait_s)

    def operations(self, limit: int) -> list[ControlOperation]:
        """Return the latest operations, the last one first. It is slow for many: any thread may
        call it.
        """
        return self._state.operations(limit)

    def operation(self, name: str) -> ControlOperation:
        """Return an operation. Raises ``OperationNotFound``."""
        found = self._state.operation(name)
        if found is None:
            raise OperationNotFound(name)
        return found

    def operation_by_key(self, key: str) -> ControlOperation | None:
        """Return the operation of the call with that idempotency key."""
        return self._state.by_key(key)

    def audit(self, limit: int) -> list[AuditEntry]:
        """Return the latest entries of the audit log, the last one first. Any thread may call
        it.
        """
        return self._state.audit(limit)

    async def find_weights(self, model: str, artifact: str) -> StoredArtifact:
        """Return the artifact of a name; see ``WeightOperations.find``."""
        self._context.check(Scope(models=(model,)))
        desired = self._state.desired
        return await asyncio.to_thread(self._weights.find, desired, model, artifact)

    def learn(self, models: Iterable[str]) -> None:
        """Compute the digests of the models' own files, which it reads; call it in a thread."""
        for model in models:
            self._weights.learn(model)

    async def require_base(self, declared: DeclaredArtifact) -> None:
        """Raise ``ArtifactRefused`` for an artifact that was trained on other base weights."""
        if declared.base_digest is not None:
            await asyncio.to_thread(self._weights.learn, declared.model)
            self._weights.require_base(self._state.desired, declared.model, declared.base_digest)

    def manifests(self, digests: Iterable[str]) -> dict[str, tuple[AcceptedManifest, ...]]:
        """Return the manifests with which contents were accepted, by their sha256."""
        found = {digest: self._store.facts(digest).manifests for digest in digests}
        return {digest: manifests for digest, manifests in found.items() if manifests}

    def backed_up(self, backup: LedgerBackup) -> None:
        """Have the metrics show the time of the newest backup of the ledger, and boards get it."""
        self._metrics.backed_up.set(backup.made_s)
        self._copier.take(backup)

    def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self._registry)


def _check_repeat(call: OperationRequest, operation: ControlOperation) -> None:
    if operation.fingerprint != call.fingerprint:
        raise RequestError(
            f"The Idempotency-Key was used for another call, operation '{operation.id}': give "
            "every call a key of its own.",
            "Idempotency-Key",
        )


def _is_pause(operation: ControlOperation, state: OperationState) -> bool:
    """Return whether it is a pause that was not acknowledged: its removal does not wait for the
    disk.
    """
    return operation.kind in HOLDS and state is OperationState.SUCCEEDED


def _without(desired: Desired, operation: ControlOperation) -> Desired:
    """Return the desired state without the pauses and candidates of an operation."""
    undo = [lambda now: state_changes.withdraw(now, operation.id)]
    asked = operation.action
    # A promotion or a rollback may only decide the candidate of another operation.
    if isinstance(asked, AdapterRolloutAction):
        model, name = asked.model, asked.name
        line = desired.line(model, name)
        offered = None if line is None else line.candidate
        if offered is not None and offered.ref.version == asked.version:
            undo.append(lambda now: state_changes.drop(now, model, name))
    if isinstance(asked, RebaseAction | WeightUpdateAction):
        of = asked.model
        undo.append(lambda now: weight_changes.undo(now, of))
    return state_changes.as_one(desired, *undo)
