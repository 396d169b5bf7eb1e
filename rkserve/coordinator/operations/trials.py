"""Trials of new adapters: one board loads a content in an engine that serves nothing, before any
other board may load it.

The result is part of the desired state, by content. So a file that crashes the library ends one
process in all: boards that serve never load it, and it is not tried again unless that is forced.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from rkserve.control import state_changes
from rkserve.control.operations import BoardOutcome, ControlError, Phase, ResultStatus
from rkserve.coordinator.boards.roster import Replies
from rkserve.coordinator.operations.operation_run import OperationRun
from rkserve.coordinator.operations.rollout import LOAD_S, PROBE_IDS, PROBE_TOKENS
from rkserve.core.board_report import AdapterTrial, BoardReport, BoardState, TrialVerdict
from rkserve.core.desired_state import AdapterVersion, Desired, Scope
from rkserve.core.errors import AdapterTrialFailed

TRIAL_S = LOAD_S  # a run that goes on ends first, and the model is loaded once or twice
CALLS = 3  # of one board, where the connection to it is lost
MOST_BOARDS = 3  # that are asked one after the other, where they cannot try it


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """The outcome of a trial: the board that has the file, if it was tried now, and the error of a
    version that may not be loaded.
    """

    board_id: str | None = None
    error: ControlError | None = None


class AdapterTrials:
    """The trials of all models, one at a time for each. Use it from one event loop."""

    def __init__(self, *, enabled: bool = True) -> None:
        """Without ``enabled`` every version passes."""
        self._enabled = enabled
        self._locks: dict[str, asyncio.Lock] = {}

    def check(self, desired: Desired, model: str, version: AdapterVersion, *, force: bool) -> None:
        """Raise ``AdapterTrialFailed`` for a content that failed its trial before."""
        known = desired.trial(model, version.digest)
        if self._enabled and known is not None and not known.passed and not force:
            raise failed(version, known)

    async def hold(
        self, run: OperationRun, model: str, version: AdapterVersion, *, force: bool
    ) -> TrialOutcome:
        """Deliver a version to one board and have it tried there, unless it passed before."""
        if not self._enabled:
            return TrialOutcome()
        async with self._locks.setdefault(model, asyncio.Lock()):
            known = run.context.state.desired.trial(model, version.digest)
            if known is not None and (known.passed or not force):
                error = None if known.passed else ControlError.of(failed(version, known))
                return TrialOutcome(error=error)
            return await self._try(run, model, version)

    async def _try(self, run: OperationRun, model: str, version: AdapterVersion) -> TrialOutcome:
        scope = Scope(models=(model,))
        present = {address.board_id for address in run.context.roster.addresses(scope)}
        reports = [one for one in run.context.roster.reports(model) if one.board_id in present]
        boards = candidates(reports, run.context.state.desired)
        if not boards:
            return TrialOutcome()  # all sleep: they load it for a request after they have woken
        run.note(Phase.TRYING)
        outcome = TrialOutcome()
        for board in boards[:MOST_BOARDS]:
            with run.timed(Phase.TRYING.value):
                outcome = await self._on(run, board, model, version)
            if outcome.board_id is not None:
                break
        return outcome

    async def _on(
        self, run: OperationRun, board: str, model: str, version: AdapterVersion
    ) -> TrialOutcome:
        """Try it on one board; without a ``board_id`` that board could not, and another one may."""
        staged = (await run.context.stager.spread(version, [board], run.left_s))[board]
        if not staged.good or staged.status is ResultStatus.GONE:
            return TrialOutcome(error=_cannot(board, staged))
        address = run.context.roster.address(board)
        began_s, limit_s = time.monotonic(), min(run.left_s, TRIAL_S)
        async with run.context.stager.at(board):
            replies: Replies = await run.context.roster.ask(
                [] if address is None else [address],
                "try_adapter",
                version.ref,
                PROBE_IDS,
                PROBE_TOKENS,
                timeout_s=limit_s,
                tries=CALLS,
            )
        answer = replies.answers.get(board)
        result = replies.results.get(board, BoardOutcome(ResultStatus.GONE))
        if isinstance(answer, AdapterTrial):
            found = replace(answer, model=model, at_s=run.context.now_s())
            run.record({board: replace(staged, details={**staged.details, "trial": "passed"})})
        elif result.status is ResultStatus.FAILED or (
            # The connection was lost, which says nothing about the file.
            result.status is ResultStatus.SILENT and time.monotonic() - began_s < limit_s / 2
        ):
            return TrialOutcome(error=_cannot(board, result))
        else:
            found = _lost(model, version, board, result, run.context.now_s())
        # At once, before the next trial of the same content can begin.
        state = run.context.state
        state.write(state_changes.note_trial(state.desired, found))
        if found.passed:
            return TrialOutcome(board)
        error = ControlError.of(failed(version, found))
        run.record({board: BoardOutcome(ResultStatus.FAILED, 0.0, error.code, error.message)})
        return TrialOutcome(board, error)


def candidates(reports: list[BoardReport], desired: Desired) -> list[str]:
    """Return the boards that can try an adapter: ready ones first, and of these the ones that serve
    the least. A report may be older than the state that it names.
    """
    able = [one for one in reports if one.state is not BoardState.ASLEEP]
    able.sort(
        key=lambda one: (
            one.state is not BoardState.READY,
            one.board_id not in desired.drained,
            one.running + one.queued + one.paused,
            one.board_id,
        )
    )
    return [one.board_id for one in able]


def failed(version: AdapterVersion, found: AdapterTrial) -> AdapterTrialFailed:
    """Return the error of a version whose content did not pass."""
    label = f"{version.ref.name}@{version.ref.version}"
    return AdapterTrialFailed(label, found.board_id, found.verdict.value, found.reason)


def _cannot(board: str, result: BoardOutcome) -> ControlError:
    why = result.message or "it is gone."
    message = f"Board {board} could not try the adapter: {why} Nothing was changed anywhere."
    return ControlError(503, result.error or "board_gone", message)


def _lost(
    model: str, version: AdapterVersion, board: str, result: BoardOutcome, now_s: float
) -> AdapterTrial:
    """Return the result of a board that was lost in the trial: perhaps the file was the reason."""
    gone = result.status is ResultStatus.GONE
    verdict = TrialVerdict.CRASHED if gone else TrialVerdict.HUNG
    reason = "its replica ended meanwhile" if gone else "it did not answer in time"
    title = f"{version.ref.name}@{version.ref.version}"
    return AdapterTrial(model, version.digest, verdict, title, board, reason, now_s)
