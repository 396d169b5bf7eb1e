"""Operations that stop, release or clear boards: pause, resume, reset of caches, abort; and the
label of the weights, which goes the same way.

Each is a coroutine that takes its ``Course``: up to ``begin`` it checks and awaits nothing, so that
nothing can come between the check and what it changes.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace

from rkserve.control import params as read
from rkserve.control import state_changes
from rkserve.control.operations import (
    BoardResult,
    OperationError,
    OperationKind,
    OperationState,
    Phase,
    ResultStatus,
)
from rkserve.coordinator.boards.roster import Replies, result_of
from rkserve.coordinator.operations.operation_run import UNDO_S, Course, Desk, shortfall
from rkserve.core.desired_state import PauseMode, Scope
from rkserve.core.errors import RkserveError

RESET_LEASE_S = 120.0
ROUTERS_S = 10.0
# They stand where a board's name would, for requests that no board has.
QUEUE, ROUTERS = "queue", "Routers"
SAFE_TRIES = 100  # of calls that may be repeated: the time limit ends them


async def pause(desk: Desk, course: Course) -> None:
    """Stop boards; it is done when every one of them has stopped, and undone otherwise."""
    asked = course.operation.params
    scope = read.scope(asked)
    desk.check(scope)
    before = desk.book.desired
    lease_s = None if asked.get("lease_s") is None else read.number(asked, "lease_s")
    desired = state_changes.pause(
        before,
        course.operation.id,
        scope,
        read.choice(asked, "mode", PauseMode, PauseMode.KEEP),
        desk.now_s(),
        clear_cache=read.flag(asked, "clear_cache", default=False),
        lease_s=lease_s,
        running=going_on(desk),
    )
    course.applied = desired is not before
    course.begin(Phase.STOPPING, desired)
    replies = await halt(desk, course, scope)
    done = "nobody is left paused by it" if course.applied else "an earlier pause holds still"
    await end_hold(desk, course, scope, replies, done)


LEASE_OVER = OperationError(
    409, "operation_conflict", "Its lease ended before all boards had stopped; nobody is paused."
)


def going_on(desk: Desk) -> tuple[str, ...]:
    """Return the operations that are not over: what they hold is theirs to take back."""
    return tuple(one.id for one in desk.book.running)


def holds(desk: Desk, course: Course) -> bool:
    """Whether the pause is still there: its lease may have ended while boards stopped."""
    pauses = (one.operation for one in desk.book.desired.pauses)
    return not course.applied or course.operation.id in pauses


async def halt(desk: Desk, course: Course, scope: Scope, phase: Phase = Phase.STOPPING) -> Replies:
    """Have boards do what is written down, and return what they answered."""
    with course.timed(phase.value):
        replies = await desk.reconciler.tell(scope, course.left_s)
    course.heard(replies.results)
    course.emitted = dict(pair for said in replies.said.values() for pair in said.emitted)
    return replies


async def end_hold(desk: Desk, course: Course, scope: Scope, replies: Replies, done: str) -> None:
    """It holds where every board did what it was asked, and is undone otherwise."""
    behind = replies.behind
    if not behind and holds(desk, course):
        course.end(OperationState.SUCCEEDED)
        return
    error = shortfall(behind, done, course.limit_s) if behind else LEASE_OVER
    await undo(desk, course, scope, error)


async def undo(desk: Desk, course: Course, scope: Scope, error: OperationError) -> None:
    """Take the pause back, and answer once the boards that had stopped have been released."""
    course.note(Phase.UNDOING, state_changes.withdraw(desk.book.desired, course.operation.id))
    stopped = {board for board, one in course.operation.results.items() if one.good}
    with course.timed(Phase.UNDOING.value):
        await desk.reconciler.tell(scope, UNDO_S, stopped)
    course.end(OperationState.UNDONE if course.applied else OperationState.FAILED, error)


async def resume(desk: Desk, course: Course) -> None:
    """Take pauses back; boards that do not answer are released as soon as they do."""
    scope = read.scope(course.operation.params)
    desired, removed = state_changes.resume(desk.book.desired, scope, going_on(desk))
    course.applied = bool(removed)
    course.begin(Phase.RELEASING, desired)
    await spread(desk, course, scope)


async def label(desk: Desk, course: Course) -> None:
    """Name the weights of a base model."""
    asked = course.operation.params
    scope = Scope(models=(read.text(asked, "model"),))
    desk.check(scope)
    before = desk.book.desired
    model, name = scope.models[0], read.text(asked, "label")
    desired = state_changes.set_label(before, model, name)
    if read.flag(asked, "reset_step", default=False):
        desired = state_changes.as_one(
            before,
            lambda after: state_changes.set_label(after, model, name),
            lambda after: state_changes.forget_step(after, model),
        )
    course.applied = desired is not before
    course.begin(Phase.RELEASING, desired)
    await spread(desk, course, scope)


async def spread(desk: Desk, course: Course, scope: Scope) -> None:
    """Have boards do what stands already; those that did not yet will."""
    replies = await halt(desk, course, scope, Phase.RELEASING)
    course.end(OperationState.PARTIAL if replies.behind else OperationState.SUCCEEDED)


async def reset_caches(desk: Desk, course: Course) -> None:
    """Clear KV caches; requests that run keep theirs unless they are stopped for it as well."""
    asked = course.operation.params
    scope = read.scope(asked)
    desk.check(scope)
    if read.flag(asked, "reset_running_requests", default=False):
        await _reset_running(desk, course, scope)
        return
    course.begin(Phase.STOPPING)
    _end(course, await _ask(desk, course, scope, "clear_kv", False))


async def _reset_running(desk: Desk, course: Course, scope: Scope) -> None:
    """Stop everything, drop every cache, and go on: what runs is computed again."""
    desired = state_changes.pause(
        desk.book.desired,
        course.operation.id,
        scope,
        PauseMode.KEEP,
        desk.now_s(),
        clear_cache=True,
        lease_s=course.limit_s + RESET_LEASE_S,
        running=going_on(desk),
    )
    course.begin(Phase.STOPPING, desired)
    behind = (await halt(desk, course, scope)).behind
    if behind:
        done = "all boards go on, and those that answered have cleared their caches"
        await undo(desk, course, scope, shortfall(behind, done, course.limit_s))
        return
    course.note(Phase.RELEASING, state_changes.withdraw(desk.book.desired, course.operation.id))
    await spread(desk, course, scope)


async def abort(desk: Desk, course: Course) -> None:
    """End requests: those that are named, or all."""
    asked = course.operation.params
    scope = read.scope(asked)
    desk.check(scope)
    ids = read.texts(asked, "request_ids") or None
    course.begin(Phase.STOPPING)
    # Routers come first: a board that is freed would take the next request of their queues, and a
    # request that leaves its board from here on finds that it has been aborted.
    with course.timed(Phase.STOPPING.value):
        waiting = await _abort_waiting(desk, course, scope, ids)
    # Whoever asks again for all may meet requests that came after an answer that was lost.
    tries = 1 if ids is None else SAFE_TRIES
    replies = await _ask(desk, course, scope, "abort_all", ids, tries=tries)
    for board, ended in replies.said.items():
        result = replies.results[board]
        course.heard({board: replace(result, details={"aborted": ended})})
    course.heard(waiting)
    replies.results |= waiting
    replies.said |= {name: 0 for name, one in waiting.items() if one.good}
    _end(course, replies)


async def _abort_waiting(
    desk: Desk, course: Course, scope: Scope, ids: Collection[str] | None
) -> dict[str, BoardResult]:
    """End the requests that no board has, and return the Routers' result, where there is one."""
    if desk.routers is None:
        return {}
    began_s = time.monotonic()
    try:
        named = None if ids is None else list(ids)
        ended = await desk.routers.abort(scope, named, min(course.left_s, ROUTERS_S))
    except RkserveError as exc:
        return {ROUTERS: result_of(exc, (time.monotonic() - began_s) * 1e3)}
    took_ms = (time.monotonic() - began_s) * 1e3
    done = BoardResult(ResultStatus.OK, took_ms, details={"aborted": ended})
    return {QUEUE: done} if ended else {}


async def _ask(
    desk: Desk,
    course: Course,
    scope: Scope,
    method: str,
    *args: object,
    tries: int = SAFE_TRIES,
) -> Replies:
    """Ask every board for what changes nothing that the cluster shall be."""
    seats = desk.roster.seats(scope)
    with course.timed(Phase.STOPPING.value):
        replies = await desk.roster.ask(seats, method, *args, timeout_s=course.left_s, tries=tries)
    course.heard(replies.results)
    return replies


def _end(course: Course, replies: Replies) -> None:
    if not replies.behind:
        course.end(OperationState.SUCCEEDED)
    elif replies.said:
        course.end(OperationState.PARTIAL)
    else:
        error = shortfall(replies.behind, "no board has done it", course.limit_s)
        course.end(OperationState.FAILED, error)


HANDLERS = {
    OperationKind.PAUSE: pause,
    OperationKind.RESUME: resume,
    OperationKind.LABEL: label,
    OperationKind.CACHE_RESET: reset_caches,
    OperationKind.ABORT: abort,
}
