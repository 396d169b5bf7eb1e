"""The execution of one operation: its services, its record at each step, and its end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rkserve.config.serve_config import CoordinatorConfig
from rkserve.control.calls import ArtifactMetadata, DeclaredArtifact, OperationRequest
from rkserve.control.operations import (
    BoardOutcome,
    ControlError,
    ControlOperation,
    OperationOutcome,
    OperationState,
    Phase,
    ResultStatus,
)
from rkserve.coordinator.boards.reconcile import Reconciler
from rkserve.coordinator.boards.roster import Roster
from rkserve.coordinator.boards.transfer import Stager
from rkserve.coordinator.state.ledger import AuditEntry
from rkserve.coordinator.state.state_store import StateStore
from rkserve.core.coordinator_metrics import CoordinatorMetrics
from rkserve.core.desired_state import Artifact, BaseVersion, Desired, Scope
from rkserve.core.errors import (
    BoardNotFound,
    LedgerFailed,
    ModelNotFound,
    OperationTimeout,
)
from rkserve.core.files import boot_id

log = logging.getLogger(__name__)

# Boards that answer are released in milliseconds; the others are reconciled later.
UNDO_S = 5.0


class FileStore(Protocol):
    """The required part of the head's file store; its calls block."""

    def check(self, version: Artifact) -> None:
        """Raise ``ArtifactNotFound`` or ``ArtifactRefused`` unless the file is complete."""

    def facts(self, digest: str) -> ArtifactMetadata:
        """Return the metadata of a content."""

    def model(self, model: str, version: str) -> BaseVersion:
        """Return the base weights of that name. Raises ``ArtifactNotFound``."""

    def own_digest(self, model: str) -> str | None:
        """Return the sha256 of the file in a model's own folder, None if it is not on this
        machine.
        """

    def known_own_digest(self, model: str) -> str | None:
        """Return the same if it was computed before; it reads nothing."""

    def digests(self) -> tuple[str, ...]:
        """Return the digests of all stored files."""

    def remove(self, digest: str, idle_s: float = 0.0) -> bool:
        """Remove an unneeded file, unless it arrived within ``idle_s``. It does not block for long,
        so the caller need not yield between its check and the removal.
        """

    def read(self, digest: str, offset: int, size: int) -> bytes:
        """Return a part of a file."""

    def upload_begin(self, declared: DeclaredArtifact) -> str:
        """Return the ID of a new upload; see ``ArtifactStore``."""

    def upload_part(self, upload: str, offset: int, data: bytes) -> int:
        """Write the next bytes of an upload."""

    def upload_end(self, upload: str) -> Artifact:
        """Keep the file if it matches its declaration."""

    def upload_abort(self, upload: str) -> bool:
        """Remove an upload; False if there is none."""


class Routers(Protocol):
    """All Routers of the application."""

    async def abort(self, scope: Scope, request_ids: list[str] | None, timeout_s: float) -> int:
        """Have them abort their requests without a board, and return the number of these.

        Raises:
            RkserveError: not all of them answered.
        """


@dataclass(frozen=True)
class OperationContext:
    """The shared services of all operations. ``now_s`` reads seconds since 1970."""

    config: CoordinatorConfig
    state: StateStore
    roster: Roster
    stager: Stager
    reconciler: Reconciler
    metrics: CoordinatorMetrics
    now_s: Callable[[], float]
    routers: Routers | None = None

    def check(self, scope: Scope) -> None:
        """Raise ``ModelNotFound`` or ``BoardNotFound`` for unknown ones."""
        for model in scope.models:
            if model not in self.roster.models:
                raise ModelNotFound(model)
        known = {address.board_id for address in self.roster.addresses()}
        known |= {report.board_id for report in self.roster.reports()}
        for board in scope.boards:
            if board not in known:
                raise BoardNotFound(board[:80], "boards")


class OperationRun:
    """The record of one operation, and its services. Nothing is stored before ``begin``."""

    def __init__(
        self, context: OperationContext, operation: ControlOperation, call: OperationRequest
    ) -> None:
        self.context = context
        self.operation = operation
        self.call = call
        self.has_begun = asyncio.Event()
        self.applied = True
        self.emitted: dict[str, int] = {}  # tokens of stopped generations, by request ID
        # Its end, if that could not be stored.
        self.unwritten: tuple[OperationState, ControlError | None] | None = None
        limit_s = context.config.operation_timeout_s if call.timeout_s is None else call.timeout_s
        self._limit_s = limit_s
        self._began_s = now_s = time.monotonic()
        if call.boot and call.boot == boot_id():
            # The caller's limit began when it was sent: this process may have been frozen since.
            self._began_s = min(now_s, call.sent_s)
        self._deadline_s = self._began_s + limit_s

    @property
    def begun(self) -> bool:
        """True if it is stored, so that its end must be stored too."""
        return self.has_begun.is_set()

    @property
    def limit_s(self) -> float:
        """The time limit of the whole operation."""
        return self._limit_s

    @property
    def left_s(self) -> float:
        """Seconds until the time limit; never quite zero, so that due steps are tried."""
        return max(0.001, self._deadline_s - time.monotonic())

    @property
    def late(self) -> bool:
        """True after the time limit, when the caller has been answered already."""
        return time.monotonic() > self._deadline_s

    def allow(self, limit_s: float) -> None:
        """Extend the time limit, unless the caller set it."""
        if self.call.timeout_s is None:
            self._limit_s += limit_s
            self._deadline_s += limit_s

    def rest(self, rested_s: float) -> None:
        """Exclude a time without work from the time limit."""
        self._deadline_s += rested_s

    def begin(self, phase: Phase, desired: Desired | None = None) -> None:
        """Store the beginning, with its change of the desired state. Raises ``LedgerFailed``."""
        self.note(phase, desired)
        self.has_begun.set()

    def note(self, phase: Phase, desired: Desired | None = None) -> None:
        """Store a phase, with its change of the desired state. Raises ``LedgerFailed``."""
        changed = desired is not None and desired != self.context.state.desired
        epoch = desired.epoch if changed and desired is not None else None
        operation = self.operation.at(phase, epoch=epoch)
        self.context.state.write(desired, operation)
        self.operation = operation

    def record(self, results: Mapping[str, BoardOutcome]) -> None:
        """Add the boards' latest answers, with all figures; they are stored with the next step."""
        for board, result in results.items():
            before = self.operation.results.get(board)
            details = {**({} if before is None else before.details), **result.details}
            self.operation = self.operation.with_result(board, replace(result, details=details))

    def show(self, results: Mapping[str, BoardOutcome]) -> None:
        """Show the boards' progress to readers; the boards' answers replace it."""
        self.operation = replace(self.operation, results=results)
        self.context.state.show(self.operation)

    def forget_waiting(self) -> None:
        """Remove the boards that are still waited for."""
        answered = {
            board: result
            for board, result in self.operation.results.items()
            if result.status is not ResultStatus.WAITING
        }
        self.operation = replace(self.operation, results=answered)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure a phase."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self.spent(name, time.monotonic() - began_s)

    def spent(self, name: str, took_s: float) -> None:
        """Record the duration of a phase."""
        self.operation = self.operation.spent(name, round(took_s * 1e3, 3))
        self.context.metrics.phase.labels(self.operation.kind.value, name).observe(took_s)

    def end(
        self,
        state: OperationState,
        error: ControlError | None = None,
        desired: Desired | None = None,
    ) -> None:
        """Store the end. Raises ``LedgerFailed``."""
        ended = self.operation.end(state, self.context.now_s(), error)
        if desired is not None and desired != self.context.state.desired:
            ended = replace(ended, epoch=desired.epoch)
        try:
            self.context.state.write(
                desired, ended, audit=[AuditEntry.of(ended, self.context.now_s(), ended.who)]
            )
        except LedgerFailed:
            self.unwritten = (state, error)
            raise
        self.operation = ended
        self.context.metrics.operations.labels(ended.kind.value, ended.state.value).inc()
        took_s = time.monotonic() - self._began_s
        self.context.metrics.duration.labels(ended.kind.value).observe(took_s)
        log.info(
            "operation %s: %s %s in %.1f ms, %d of %d boards, epoch %d%s%s",
            ended.id,
            ended.kind.value,
            ended.state.value,
            took_s * 1e3,
            ended.succeeded,
            len(ended.results),
            ended.epoch,
            "".join(f", {name} {ms:.1f} ms" for name, ms in ended.phases),
            "" if ended.error is None else f": {ended.error.message}",
        )

    @property
    def outcome(self) -> OperationOutcome:
        """The answer now."""
        return OperationOutcome(self.operation.status, self.operation, self.applied, self.emitted)


# Its last argument is the operation's action, of the class of its kind.
Handler = Callable[[OperationRun, Any], Awaitable[None]]


def shortfall(results: Mapping[str, BoardOutcome], done: str, limit_s: float) -> ControlError:
    """Return the error for boards that failed: 504 if the time ran out, 503 if one refused."""
    bad = {board: result for board, result in sorted(results.items()) if not result.good}
    silent = [board for board, one in bad.items() if one.status is ResultStatus.SILENT]
    if silent:
        message = f"{', '.join(silent)} did not answer within {limit_s:g} s; {done}."
        message = f"Board {message}" if len(silent) == 1 else f"Boards {message}"
        return ControlError.of(OperationTimeout(message))
    board, worst = next(iter(bad.items()))
    return ControlError(503, worst.error, f"Board {board}: {worst.message} So {done}.")
