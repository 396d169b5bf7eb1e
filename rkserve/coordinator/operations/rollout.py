"""The execution of one rollout: runs the steps that ``control.rollout`` decides, and reports their
results to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable
from dataclasses import replace
from typing import Any

from rkserve.control import rollout
from rkserve.control.operations import BoardOutcome, ControlError, Phase, ResultStatus
from rkserve.control.rollout import (
    EVERYWHERE,
    BoardAnswered,
    BoardJoined,
    BoardLeft,
    CanaryAssessed,
    CanaryDecided,
    ChangeRefused,
    Event,
    FinishRollout,
    ObserveCanary,
    RolloutCancelled,
    Step,
)
from rkserve.control.rollout_plan import (
    AdapterRolloutPlan,
    CanaryLimits,
    CanaryWatch,
    Move,
    MoveRequest,
    RolloutPlan,
    RolloutStage,
)
from rkserve.coordinator.boards.roster import Replies, result_of
from rkserve.coordinator.operations.operation_run import UNDO_S, OperationRun
from rkserve.core.desired_state import AdapterVersion, Adoption, Scope, SleepLevel
from rkserve.core.errors import (
    BoardAsleep,
    BoardFailed,
    OperationTimeout,
    RebaseFailed,
    RkserveError,
)

log = logging.getLogger(__name__)

# A trial generation: IDs that every vocabulary has, and enough tokens to time a few steps.
PROBE_IDS = tuple(range(1, 9))
PROBE_TOKENS = 8
# A board loads between two runs, so that it first finishes a long answer.
LOAD_S = 300.0
# A sleeping board has no engine to load it into: it loads it for the first request.
_LATER = {"loaded": "asleep"}
ASLEEP = BoardOutcome(ResultStatus.OK, details=_LATER)
AGAIN_S = 1.0  # between tries to store an undo
MARGIN = 0.95
# Effects of moves on a board's requests, which the record sums up for the whole rollout.
ADDED = ("stopped", "kept", "aborted", "switched")


def _untried(replies: Replies) -> dict[str, BoardOutcome]:
    """Return the results of sleeping boards: they load and try the weights when they wake."""
    return {
        board: replace(replies.results[board], details={**replies.results[board].details, **_LATER})
        for board, answer in replies.answers.items()
        if answer.level is not None and answer.level >= SleepLevel.UNLOADED
    }


def _no(board: str, answer: Adoption) -> BoardOutcome | None:
    """Return the result of a board that refuses these base weights after a failed trial."""
    return result_of(RebaseFailed(board, answer.refused), 0.0) if answer.refused else None


class RolloutRunner:
    """One running rollout or rollback. Use it from one event loop."""

    def __init__(self, run: OperationRun, plan: RolloutPlan) -> None:
        self._context = run.context
        self._run = run
        self._plan = plan
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._finish: FinishRollout | None = None
        self._rollout, self._steps = rollout.start(plan, time.monotonic())
        self._entered_s = time.monotonic()
        self._undone_by_s: float | None = None

    def decide(self, promote: bool, who: str) -> None:
        """Promote the canary or roll it back by hand."""
        self._events.put_nowait(CanaryDecided(promote, who))

    async def run(self) -> FinishRollout:
        """Execute it to its end.

        Raises:
            LedgerFailed: a phase without a change could not be stored; the caller ends the
                operation with its result. Changes are undone here.
        """
        try:
            await self._carry_out_all(self._steps)
            while self._finish is None:
                await self._carry_out_all(self._advance(await self._next_event()))
            self._note_lagging(self._finish)
            return self._finish
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _note_lagging(self, finish: FinishRollout) -> None:
        """Record the boards that have not followed, for which the operation is partial."""
        results = self._run.operation.results
        for board in finish.lagging:
            if board not in results or results[board].good:
                limit_s = self._run.limit_s
                late = BoardFailed(board, f"it did not follow within {limit_s:g} s")
                self._run.record({board: result_of(late, limit_s * 1e3)})

    def _advance(self, event: Event) -> tuple[Step, ...]:
        phase = self._rollout.phase
        self._rollout, steps = rollout.advance(self._rollout, event, time.monotonic())
        if self._rollout.phase is not phase:
            self._measure(phase)
        return steps

    def _measure(self, phase: Phase) -> None:
        now_s = time.monotonic()
        if phase is Phase.OBSERVING:
            self._run.rest(now_s - self._entered_s)
        self._run.spent(phase.value, now_s - self._entered_s)
        self._entered_s = now_s

    async def _next_event(self) -> Event:
        """Wait for the next event; the time limit does not run while a canary is observed."""
        if self._rollout.at is RolloutStage.OBSERVE:
            return await self._events.get()
        left_s = self._run.left_s
        if self._rollout.at is Move.UNDO:
            if self._undone_by_s is None:
                self._undone_by_s = time.monotonic() + self._undo_s
            left_s = max(0.001, self._undone_by_s - time.monotonic())
        try:
            return await asyncio.wait_for(self._events.get(), left_s)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            late = OperationTimeout(f"It was not done within {self._run.limit_s:g} s.")
            return RolloutCancelled(ControlError.of(late))

    # -- steps ---------------------------------------------------------------------------------

    async def _carry_out_all(self, steps: tuple[Step, ...]) -> None:
        """Execute steps in order; after a refused one, the steps that follow from the refusal."""
        pending = list(steps)
        while pending:
            refused = await self._carry_out(pending.pop(0))
            if refused is not None:
                # Before any other event that has arrived meanwhile.
                pending = list(self._advance(refused))

    async def _carry_out(self, step: Step) -> ChangeRefused | None:
        if isinstance(step, FinishRollout):
            self._finish = step
        elif isinstance(step, ObserveCanary):
            self._run.note(Phase.OBSERVING)
            self._begin(self._observe())
        elif step.move is Move.STAGE:
            self._note_move()
            self._begin(self._stage(step))
        elif step.move is Move.LOAD:
            self._note_move()
            for board in step.boards:
                self._begin(self._load(board))
        else:
            return await self._change(step)
        return None

    def _note_move(self) -> None:
        if self._run.operation.phase is not self._rollout.phase:
            self._run.note(self._rollout.phase)

    async def _change(self, step: MoveRequest) -> ChangeRefused | None:
        """Store a change and send it to the boards; a change that cannot be stored is refused."""
        while True:
            try:
                desired = self._plan.apply(step, self._context.state.desired, self._context.now_s())
                self._run.note(self._rollout.phase, desired)
            except RkserveError as exc:
                if step.move is not Move.UNDO:
                    return ChangeRefused(step.move, ControlError.of(exc))
                await asyncio.sleep(AGAIN_S)  # boards stay as they are until it can be undone
            else:
                break
        self._begin(self._move(step))
        return None

    async def _move(self, step: MoveRequest) -> None:
        """Tell the boards of a step, and for a hold or a commit all present boards.

        Boards that joined meanwhile may serve an older state, and may not have answered.
        """
        scope = Scope(models=(self._plan.model,), boards=step.boards)
        if step.move in EVERYWHERE:
            scope = Scope(models=(self._plan.model,))
        deadline_s = time.monotonic() + self._tell_s(step.move)
        notified: set[str] = set()
        results: dict[str, BoardOutcome] = {}
        while fresh := [
            s for s in self._context.roster.addresses(scope) if s.replica not in notified
        ]:
            left_s = deadline_s - time.monotonic()
            if notified and left_s <= 0:
                break
            notified |= {address.replica for address in fresh}
            boards = {address.board_id for address in fresh}
            replies = await self._context.reconciler.send(scope, max(0.001, left_s), boards)
            refused = {board: _no(board, answer) for board, answer in replies.answers.items()}
            replies.results |= {board: one for board, one in refused.items() if one is not None}
            if self._plan.heavy and step.move is Move.SWITCH:
                replies.results |= _untried(replies)
            # Reconciliation delivers anything else that a board lacks.
            lacking = [
                board
                for board, answer in replies.answers.items()
                if self._plan.heavy and answer.missing_base == self._plan.version is not None
            ]
            if lacking:
                replies.results |= await self._equip(scope, lacking, deadline_s)
            results |= replies.results
        joined = sorted(results.keys() - set(step.boards))
        if step.move is Move.SWITCH and self._plan.heavy:
            joined += self._newcomers()
        for board in joined:
            self._events.put_nowait(BoardJoined(board))
        answered = [board for board in (*step.boards, *joined) if board in results]
        gone = [board for board in step.boards if board not in results]
        self._answer(step.move, [*answered, *gone], results)

    async def _equip(
        self, scope: Scope, boards: list[str], deadline_s: float
    ) -> dict[str, BoardOutcome]:
        """Deliver base weights to boards that joined after staging, and send the state again."""
        version = self._plan.version
        assert version is not None  # the file in the model folder is on every board
        left_s = max(0.001, deadline_s - time.monotonic())
        staged = await self._context.stager.spread(version, boards, left_s)
        ready = [board for board, one in staged.items() if one.good]
        left_s = max(0.001, deadline_s - time.monotonic())
        replies = await self._context.reconciler.send(scope, left_s, ready)
        return {**staged, **replies.results}

    def _newcomers(self) -> list[str]:
        """Return the boards that have joined and wait for no turn yet."""
        addresses = self._context.roster.addresses(Scope(models=(self._plan.model,)))
        return [
            address.board_id
            for address in addresses
            if address.board_id not in self._rollout.boards
        ]

    @property
    def _undo_s(self) -> float:
        """Return the time limit of an undo: some boards load the whole model again."""
        return self._context.config.operation_timeout_s if self._plan.heavy else UNDO_S

    def _tell_s(self, move: Move) -> float:
        """Return the time limit of the boards' answers: a little less than the time left.

        Boards that have answered by then are known; at the operation's own limit none would be.
        """
        left_s = self._undo_s if move is Move.UNDO else self._run.left_s
        config = self._context.config
        loads = self._plan.heavy and move is Move.SWITCH
        limit_s = config.load_timeout_s if loads else config.operation_timeout_s
        return min(limit_s, MARGIN * left_s)

    async def _stage(self, step: MoveRequest) -> None:
        version = self._plan.version
        assert version is not None  # a rollback stages nothing
        limit_s = min(self._run.left_s, self._context.config.stage_timeout_s)
        results = await self._context.stager.spread(version, step.boards, limit_s)
        self._answer(Move.STAGE, step.boards, results)

    async def _load(self, board: str) -> None:
        version = self._plan.version
        assert isinstance(version, AdapterVersion)  # a rollback loads nothing
        address = self._context.roster.address(board)
        if self._sleeps(board):
            self._answer(Move.LOAD, [board], {board: ASLEEP})
            return
        async with self._context.stager.at(board):
            replies = await self._context.roster.ask(
                [] if address is None else [address],
                "load_adapter",
                version.ref,
                PROBE_IDS,
                PROBE_TOKENS,
                timeout_s=min(self._run.left_s, LOAD_S),
            )
        results = replies.results
        if any(one.error == BoardAsleep.code for one in results.values()):
            results = {board: ASLEEP}  # it went to sleep a moment ago
        self._answer(Move.LOAD, [board], results)

    def _sleeps(self, board: str) -> bool:
        level = self._context.state.desired.target(board, self._plan.model).level
        return level is not None and level > SleepLevel.PAUSED

    def _answer(self, move: Move, boards: Iterable[str], results: dict[str, BoardOutcome]) -> None:
        self._run.record({board: self._summed(board, one) for board, one in results.items()})
        for board in boards:
            result = results.get(board, BoardOutcome(ResultStatus.GONE))
            if result.status is ResultStatus.GONE:
                self._events.put_nowait(BoardLeft(board))
            elif result.good:
                self._events.put_nowait(BoardAnswered(move, board))
            else:
                error = ControlError(503, result.error, f"Board {board}: {result.message}")
                self._events.put_nowait(BoardAnswered(move, board, error))

    def _summed(self, board: str, result: BoardOutcome) -> BoardOutcome:
        """Return a board's answer with the effects of earlier moves on its requests added."""
        before = self._run.operation.results.get(board)
        if before is None or result.details.get("switched") is None:
            return result
        both = {}
        for name in ADDED:
            counts = [one.details.get(name) for one in (before, result)]
            both[name] = sum(count for count in counts if isinstance(count, int))
        return replace(result, details={**result.details, **both})

    async def _observe(self) -> None:
        """Assess the candidate at every round of reports until this task is cancelled."""
        plan = self._plan
        assert isinstance(plan, AdapterRolloutPlan)  # base weights are not observed
        version, line = plan.version, self._context.state.desired.line(plan.model, plan.name)
        assert version is not None  # a rollback is not observed
        assert line is not None  # it has just been offered
        active = None if line.active is None else line.active.ref.label
        watch, limits = CanaryWatch(), CanaryLimits(**self._context.config.canary.model_dump())
        while True:
            watch = watch.saw(self._context.roster.reports(self._plan.model))
            judgement = watch.judge(version.ref.label, active, limits)
            self._events.put_nowait(CanaryAssessed(judgement))
            await asyncio.sleep(self._context.config.report_s)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("rollout %s broke down", self._plan.operation, exc_info=exc)
            error = ControlError(500, "internal_error", f"{type(exc).__name__}: {exc}")
            self._events.put_nowait(RolloutCancelled(error))
