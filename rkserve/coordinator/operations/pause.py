"""Operations that stop, release or clear boards: pause, resume, reset of caches, abort; and the
label of the weights, which is set in the same way.

Each is a coroutine that takes its ``OperationRun`` and awaits nothing before ``begin``, so that
nothing comes between its check and its change.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from rkserve.control import state_changes
from rkserve.control.calls import (
    AbortAction,
    CacheResetAction,
    LabelAction,
    OperationKind,
    PauseAction,
    ResumeAction,
)
from rkserve.control.operations import (
    BoardOutcome,
    ControlError,
    OperationState,
    Phase,
    ResultStatus,
)
from rkserve.coordinator.boards.roster import Replies, result_of
from rkserve.coordinator.operations.operation_run import (
    UNDO_S,
    Handler,
    OperationContext,
    OperationRun,
    shortfall,
)
from rkserve.core.desired_state import PauseMode, Scope
from rkserve.core.errors import OperationTimeout, RkserveError

RESET_LEASE_S = 120.0
ROUTERS_S = 10.0
# Used in place of a board's name, for requests without a board.
QUEUE, ROUTERS = "queue", "Routers"
SAFE_TRIES = 100  # of repeatable calls: the time limit ends them


async def pause(run: OperationRun, asked: PauseAction) -> None:
    """Stop boards; it succeeds when all of them have stopped, and is undone otherwise."""
    scope = asked.scope
    run.context.check(scope)
    before = run.context.state.desired
    desired = state_changes.pause(
        before,
        run.operation.id,
        scope,
        asked.mode,
        run.context.now_s(),
        clear_cache=asked.clear_cache,
        lease_s=asked.lease_s,
        running=going_on(run.context),
    )
    run.applied = desired is not before
    run.begin(Phase.STOPPING, desired)
    replies = await halt(run, scope)
    done = "no request stays paused by it" if run.applied else "an earlier pause is still in effect"
    await end_hold(run, scope, replies, done)


LEASE_OVER = ControlError(
    409, "operation_conflict", "Its lease ended before all boards had stopped; nothing is paused."
)


def going_on(context: OperationContext) -> tuple[str, ...]:
    """Return the running operations, which remove their own pauses."""
    return tuple(one.id for one in context.state.running)


def holds(run: OperationRun) -> bool:
    """Return whether the pause is still in effect: its lease may have ended while boards
    stopped.
    """
    pauses = (one.operation for one in run.context.state.desired.pauses)
    return not run.applied or run.operation.id in pauses


async def halt(run: OperationRun, scope: Scope, phase: Phase = Phase.STOPPING) -> Replies:
    """Have boards adopt the desired state, and return their answers."""
    with run.timed(phase.value):
        replies = await run.context.reconciler.send(scope, run.left_s)
    run.record(replies.results)
    run.emitted = dict(pair for answer in replies.answers.values() for pair in answer.emitted)
    return replies


async def end_hold(run: OperationRun, scope: Scope, replies: Replies, done: str) -> None:
    """End the operation successfully if every board followed in time, and undo it otherwise."""
    behind = replies.behind
    if behind:
        error = shortfall(behind, done, run.limit_s)
    elif run.late:
        # This process was frozen, and its caller has the error of a timeout already.
        message = f"The Coordinator was late: not done within {run.limit_s:g} s; {done}."
        error = ControlError.of(OperationTimeout(message))
    elif holds(run):
        run.end(OperationState.SUCCEEDED)
        return
    else:
        error = LEASE_OVER
    await undo(run, scope, error)


async def undo(run: OperationRun, scope: Scope, error: ControlError) -> None:
    """Remove the pause, and answer once the stopped boards have been released."""
    run.note(Phase.UNDOING, state_changes.withdraw(run.context.state.desired, run.operation.id))
    stopped = {board for board, one in run.operation.results.items() if one.good}
    with run.timed(Phase.UNDOING.value):
        await run.context.reconciler.send(scope, UNDO_S, stopped)
    run.end(OperationState.UNDONE if run.applied else OperationState.FAILED, error)


async def resume(run: OperationRun, asked: ResumeAction) -> None:
    """Remove pauses; boards that do not answer are released later."""
    scope = asked.scope
    desired, removed = state_changes.resume(run.context.state.desired, scope, going_on(run.context))
    run.applied = bool(removed)
    run.begin(Phase.RELEASING, desired)
    await spread(run, scope)


async def label(run: OperationRun, asked: LabelAction) -> None:
    """Name the weights of a base model."""
    model, name = asked.model, asked.label
    scope = Scope(models=(model,))
    run.context.check(scope)
    before = run.context.state.desired
    desired = state_changes.set_label(before, model, name)
    if asked.reset_step:
        desired = state_changes.as_one(
            before,
            lambda after: state_changes.set_label(after, model, name),
            lambda after: state_changes.forget_step(after, model),
        )
    run.applied = desired is not before
    run.begin(Phase.RELEASING, desired)
    await spread(run, scope)


async def spread(run: OperationRun, scope: Scope) -> None:
    """Have boards adopt a change that stands; those that do not answer follow later."""
    replies = await halt(run, scope, Phase.RELEASING)
    run.end(OperationState.PARTIAL if replies.behind else OperationState.SUCCEEDED)


async def reset_caches(run: OperationRun, asked: CacheResetAction) -> None:
    """Clear KV caches; running requests keep theirs unless they are stopped for it as well."""
    scope = asked.scope
    run.context.check(scope)
    if asked.reset_running_requests:
        await _reset_running(run, scope)
        return
    run.begin(Phase.STOPPING)
    _end(run, await _ask(run, scope, "clear_kv", False))


async def _reset_running(run: OperationRun, scope: Scope) -> None:
    """Stop all requests, drop every cache, and continue: running requests are recomputed."""
    desired = state_changes.pause(
        run.context.state.desired,
        run.operation.id,
        scope,
        PauseMode.KEEP,
        run.context.now_s(),
        clear_cache=True,
        lease_s=run.limit_s + RESET_LEASE_S,
        running=going_on(run.context),
    )
    run.begin(Phase.STOPPING, desired)
    behind = (await halt(run, scope)).behind
    if behind:
        done = "all boards go on, and those that answered have cleared their caches"
        await undo(run, scope, shortfall(behind, done, run.limit_s))
        return
    run.note(Phase.RELEASING, state_changes.withdraw(run.context.state.desired, run.operation.id))
    await spread(run, scope)


async def abort(run: OperationRun, asked: AbortAction) -> None:
    """Abort requests: the named ones, or all."""
    scope = asked.scope
    run.context.check(scope)
    ids = asked.request_ids or None
    run.begin(Phase.STOPPING)
    # Routers come first: a board that is freed would take the next request of their queues, and a
    # request that leaves its board from here on finds that it has been aborted.
    with run.timed(Phase.STOPPING.value):
        waiting = await _abort_waiting(run, scope, ids)
    # A repeated call for all may meet requests that arrived after a lost answer.
    tries = 1 if ids is None else SAFE_TRIES
    replies = await _ask(run, scope, "abort_all", ids, tries=tries)
    for board, ended in replies.answers.items():
        result = replies.results[board]
        run.record({board: replace(result, details={"aborted": ended})})
    run.record(waiting)
    replies.results |= waiting
    replies.answers |= {name: 0 for name, one in waiting.items() if one.good}
    _end(run, replies)


async def _abort_waiting(
    run: OperationRun, scope: Scope, ids: Collection[str] | None
) -> dict[str, BoardOutcome]:
    """Abort the requests without a board, and return the Routers' result, if any."""
    if run.context.routers is None:
        return {}
    began_s = time.monotonic()
    try:
        named = None if ids is None else list(ids)
        ended = await run.context.routers.abort(scope, named, min(run.left_s, ROUTERS_S))
    except RkserveError as exc:
        return {ROUTERS: result_of(exc, (time.monotonic() - began_s) * 1e3)}
    took_ms = (time.monotonic() - began_s) * 1e3
    done = BoardOutcome(ResultStatus.OK, took_ms, details={"aborted": ended})
    return {QUEUE: done} if ended else {}


async def _ask(
    run: OperationRun,
    scope: Scope,
    method: str,
    *args: object,
    tries: int = SAFE_TRIES,
) -> Replies:
    """Ask every board for something that does not change the desired state."""
    addresses = run.context.roster.addresses(scope)
    with run.timed(Phase.STOPPING.value):
        replies = await run.context.roster.ask(
            addresses, method, *args, timeout_s=run.left_s, tries=tries
        )
    run.record(replies.results)
    return replies


def _end(run: OperationRun, replies: Replies) -> None:
    if not replies.behind:
        run.end(OperationState.SUCCEEDED)
    elif replies.answers:
        run.end(OperationState.PARTIAL)
    else:
        error = shortfall(replies.behind, "no board has done it", run.limit_s)
        run.end(OperationState.FAILED, error)


HANDLERS: dict[OperationKind, Handler] = {
    OperationKind.PAUSE: pause,
    OperationKind.RESUME: resume,
    OperationKind.LABEL: label,
    OperationKind.CACHE_RESET: reset_caches,
    OperationKind.ABORT: abort,
}
