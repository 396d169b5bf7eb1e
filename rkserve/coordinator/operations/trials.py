"""Trials of new adapters: one board loads a content in an engine that serves nothing, before any
other board may load it.

The result is part of the desired state, by content, scale, base weights and release of the runtime.
So a file that crashes the library ends one process in all: boards that serve never load it, and it
is not tried again unless that is forced. A board that could not try it, or was lost before its
trial had an engine, gives no result.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace

from rkserve.control import state_changes
from rkserve.control.operations import BoardOutcome, ControlError, Phase, ResultStatus
from rkserve.coordinator.boards.roster import Replies
from rkserve.coordinator.operations.operation_run import OperationRun
from rkserve.coordinator.operations.rollout import LOAD_S, PROBE_IDS, PROBE_TOKENS
from rkserve.core.board_report import AdapterTrial, BoardReport, BoardState, TrialVerdict
from rkserve.core.desired_state import AdapterVersion, Desired, Scope
from rkserve.core.errors import AdapterTrialFailed, OperationTimeout, RkserveError

TRIAL_S = LOAD_S  # a run that goes on ends first, and the model is loaded once or twice
CALLS = 3  # of one board, where the connection to it is lost
MOST_BOARDS = 3  # that are asked one after the other, where they cannot try it
# Between looks at a board's trial. The model is loaded before the adapter, which takes longer.
LOOK_S = 0.2
LOOK_LIMIT_S = 2.0


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

    def check(self, run: OperationRun, model: str, version: AdapterVersion, *, force: bool) -> None:
        """Raise ``AdapterTrialFailed`` for a content that failed its trial before."""
        known = _known(run, model, version)
        if self._enabled and known is not None and not known.passed and not force:
            raise failed(version, known)

    async def hold(
        self, run: OperationRun, model: str, version: AdapterVersion, *, force: bool
    ) -> TrialOutcome:
        """Deliver a version to one board and have it tried there, unless it passed before.

        Calls for the same content share one trial, also forced ones that came before its result.
        """
        if not self._enabled:
            return TrialOutcome()
        came_s = time.monotonic()
        async with self._locks.setdefault(model, asyncio.Lock()):
            if run.call.timeout_s is None:
                run.rest(time.monotonic() - came_s)
            known = _known(run, model, version)
            if known is not None and force and not known.passed:
                known = known if known.at_s > run.operation.created_s else None
            if known is not None:
                error = None if known.passed else ControlError.of(failed(version, known))
                return TrialOutcome(error=error)
            if run.late:
                message = (
                    f"Other adapters were on trial for {run.limit_s:g} s; nothing was changed."
                )
                return TrialOutcome(error=ControlError.of(OperationTimeout(message)))
            return await self._try(run, model, version)

    async def _try(self, run: OperationRun, model: str, version: AdapterVersion) -> TrialOutcome:
        reports = _present(run, model)
        boards = candidates(reports, run.context.state.desired)
        if not boards and reports:
            return TrialOutcome()  # all sleep: they load it for a request after they have woken
        run.note(Phase.TRYING)
        outcome = TrialOutcome(error=_no_board(model))
        for board in boards[:MOST_BOARDS]:
            with run.timed(Phase.TRYING.value):
                outcome = await self._on(run, board, model, version)
            if outcome.board_id is not None or run.late:
                break
        return outcome

    async def _on(
        self, run: OperationRun, board: str, model: str, version: AdapterVersion
    ) -> TrialOutcome:
        """Try it on one board; without a ``board_id`` that board could not, and another one may."""
        staged = (await run.context.stager.spread(version, [board], run.left_s))[board]
        if not staged.good or staged.status is ResultStatus.GONE:
            return TrialOutcome(error=_cannot(board, staged))
        base = run.context.state.desired.base_of(model)
        async with run.context.stager.at(board):
            answer, result = await _asked(run, board, version)
        if isinstance(answer, AdapterTrial):
            found = replace(answer, model=model, at_s=run.context.now_s(), base=base)
            run.record({board: replace(staged, details={**staged.details, "trial": "passed"})})
        elif answer is None:
            return TrialOutcome(error=_cannot(board, result))
        else:
            title = f"{version.ref.name}@{version.ref.version}"
            found = AdapterTrial(
                model,
                version.digest,
                answer,
                title,
                board,
                _LOST[answer],
                run.context.now_s(),
                version.ref.scale,
                base,
                _releases(run, model).get(board, ""),
            )
        # At once, before the next trial of the same content can begin.
        state = run.context.state
        state.write(state_changes.note_trial(state.desired, found))
        if found.passed:
            return TrialOutcome(board)
        error = ControlError.of(failed(version, found))
        run.record({board: BoardOutcome(ResultStatus.FAILED, 0.0, error.code, error.message)})
        return TrialOutcome(board, error)


async def _asked(
    run: OperationRun, board: str, version: AdapterVersion
) -> tuple[AdapterTrial | TrialVerdict | None, BoardOutcome]:
    """Have a board try a version, while the caller has its lock.

    Return the board's result; or the verdict on a file with which the board was lost, None if the
    file cannot be the reason; and the outcome of the call.
    """
    address = run.context.roster.address(board)
    if address is None:
        return None, BoardOutcome(ResultStatus.GONE)
    began_s, limit_s = time.monotonic(), min(run.left_s, TRIAL_S)
    begun = asyncio.Event()
    looking = asyncio.get_running_loop().create_task(_look(run, board, version.key, begun))
    try:
        replies: Replies = await run.context.roster.ask(
            [address],
            "try_adapter",
            version.ref,
            PROBE_IDS,
            PROBE_TOKENS,
            timeout_s=limit_s,
            tries=CALLS,
        )
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)
    result = replies.results[board]
    if board in replies.answers:
        return replies.answers[board], result
    if not begun.is_set() or result.status is ResultStatus.FAILED:
        return None, result
    if result.status is ResultStatus.GONE:
        return TrialVerdict.CRASHED, result
    # A lost connection, or a limit that is too short for a load, is no fault of the file.
    hung = limit_s >= TRIAL_S and time.monotonic() - began_s >= limit_s / 2
    return (TrialVerdict.HUNG if hung else None), result


async def _look(run: OperationRun, board: str, key: str, begun: asyncio.Event) -> None:
    """Set ``begun`` once the board reports that the trial has its engine."""
    while not begun.is_set():
        address = run.context.roster.address(board)
        if address is not None:
            # A board that cannot be asked has not been seen to begin.
            with suppress(RkserveError):
                report: BoardReport = await run.context.roster.ask_one(
                    address, "report", timeout_s=LOOK_LIMIT_S
                )
                if report.trying == key:
                    begun.set()
        await asyncio.sleep(LOOK_S)


def _present(run: OperationRun, model: str) -> list[BoardReport]:
    scope = Scope(models=(model,))
    present = {address.board_id for address in run.context.roster.addresses(scope)}
    return [one for one in run.context.roster.reports(model) if one.board_id in present]


def _releases(run: OperationRun, model: str) -> dict[str, str]:
    """Return the release of the runtime on each board of a model that has reported one."""
    return {one.board_id: one.release for one in _present(run, model) if one.release}


def _known(run: OperationRun, model: str, version: AdapterVersion) -> AdapterTrial | None:
    releases = set(_releases(run, model).values())
    return run.context.state.desired.trial(model, version, releases)


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


def _no_board(model: str) -> ControlError:
    message = f"No board of model '{model}' is there to try the adapter; nothing was changed."
    return ControlError(503, "board_gone", message)


_LOST = {
    TrialVerdict.CRASHED: "its replica ended meanwhile",
    TrialVerdict.HUNG: "it did not answer in time",
}
