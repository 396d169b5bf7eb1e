"""All changes of the desired state: old value in, new value out. Pure.

Each returns a value of the next epoch, or its argument if the change is already in effect; an
invalid change raises. Times are in seconds since 1970, by the caller's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import replace

from rkserve.core.board_report import AdapterTrial
from rkserve.core.desired_state import (
    ActivePause,
    AdapterVersion,
    AdapterVersions,
    Desired,
    InFlight,
    PauseMode,
    Scope,
    Weights,
)
from rkserve.core.errors import (
    AdapterExists,
    AdapterNotFound,
    OperationConflict,
    RequestError,
    StaleEpoch,
    StaleWeights,
)

# Versions kept of those served earlier, beside the active and the previous one.
KEEP_VERSIONS = 2
# Each board has them on its disk; a caller that stages more has lost track of the earlier ones.
MAX_WAITING = 64
# Each is sent to every board with every change; a caller that needs more never resumes.
MAX_PAUSES = 64
# Likewise. The oldest are forgotten first, those of versions that are served last.
MAX_TRIALS = 64


def expect(desired: Desired, epoch: int | None) -> None:
    """Raise ``StaleEpoch`` unless ``epoch`` is None or the epoch now."""
    if epoch is not None and epoch != desired.epoch:
        raise StaleEpoch(f"Stale epoch: expected {epoch}, current is {desired.epoch}.", "epoch")


def pause(
    desired: Desired,
    operation: str,
    scope: Scope,
    mode: PauseMode,
    now_s: float,
    *,
    clear_cache: bool = False,
    lease_s: float | None = None,
    running: Collection[str] = (),
) -> Desired:
    """Pause a part of the cluster, for ``lease_s`` seconds at most (None: until it is resumed).

    Nothing changes if a pause of the same kind already holds for at least as long. Pauses of the
    same kind that end sooner than another are dropped, except those of operations in ``running``:
    they may yet be undone, and must not remove an older pause with them. Raises ``RequestError``
    for a lease that is not positive, and ``OperationConflict`` above the limit of pauses.
    """
    expires_s = lease_end(lease_s, now_s)
    return add(desired, ActivePause(operation, scope, mode, clear_cache, now_s, expires_s), running)


def lease_end(lease_s: float | None, now_s: float) -> float | None:
    """Return the end of a lease. Raises ``RequestError`` if it is not positive."""
    if lease_s is not None and not lease_s > 0:
        raise RequestError("'lease_s' must be more than 0.", "lease_s")
    return None if lease_s is None else now_s + lease_s


def add(desired: Desired, asked: ActivePause, running: Collection[str]) -> Desired:
    """Add a pause unless it is redundant, and drop those that others outlast; see ``pause``."""
    settled = [one for one in desired.pauses if one.operation not in running]
    if any(_outlasts(one, asked) for one in settled):
        return desired
    folded = {
        n
        for n, one in enumerate(settled)
        for m, other in enumerate(settled)
        if _outlasts(other, one) and (m > n or not _outlasts(one, other))
    }
    forgotten = [settled[n] for n in folded]
    kept = tuple(one for one in desired.pauses if one not in forgotten)
    return hold(replace(desired, pauses=kept), asked)


def hold(desired: Desired, asked: ActivePause) -> Desired:
    """Add a pause even if it is redundant, so that its operation can rely on its own.

    Raises ``OperationConflict`` above the limit of pauses.
    """
    if len(desired.pauses) >= MAX_PAUSES:
        raise OperationConflict(
            f"There are {MAX_PAUSES} pauses and sleeps already; resume or wake some."
        )
    return follow_up(desired, pauses=(*desired.pauses, asked))


def _outlasts(one: ActivePause, other: ActivePause) -> bool:
    """Return whether ``one`` has all effects of ``other``, for at least as long."""
    same = (one.scope, one.mode, one.clear_cache) == (other.scope, other.mode, other.clear_cache)
    same = same and _sleeps_like(one, other)
    if not same or one.expires_s is None:
        return same
    return other.expires_s is not None and one.expires_s >= other.expires_s


def _sleeps_like(one: ActivePause, other: ActivePause) -> bool:
    """Return whether ``one`` is at least as deep a sleep with no more ways to end it, or neither is
    a sleep: a resume ends pauses only.
    """
    if one.level is None or other.level is None:
        return one.level is other.level
    return one.level >= other.level and one.wakes <= other.wakes


def resume(
    desired: Desired, scope: Scope | None = None, running: Collection[str] = ()
) -> tuple[Desired, tuple[ActivePause, ...]]:
    """Remove every pause within ``scope`` (None: all); return these too. Sleeps stay.

    Pauses of operations in ``running`` stay: these operations remove them. Raises
    ``OperationConflict`` if nothing was removed because a pause of a wider scope covers this one:
    it cannot be resumed in part.
    """
    within = Scope() if scope is None else scope
    settled = [one for one in desired.pauses if one.level is None and one.operation not in running]
    gone = tuple(one for one in settled if one.scope.within(within))
    if not gone:
        wider = [one for one in settled if overlap(one.scope, within)]
        if wider:
            raise OperationConflict(
                f"It is held by operation '{wider[0].operation}', which paused "
                f"{describe(wider[0].scope)}: resume that."
            )
    return without(desired, gone), gone


def expire(desired: Desired, now_s: float) -> tuple[Desired, tuple[ActivePause, ...]]:
    """Remove every pause whose lease has ended by ``now_s``; return these too."""
    gone = tuple(p for p in desired.pauses if p.expires_s is not None and p.expires_s <= now_s)
    return without(desired, gone), gone


def move_leases(desired: Desired, by_s: float) -> Desired:
    """Move the beginnings and ends of pauses and sleeps: the clock that they go by was set."""
    if not any(one.expires_s is not None for one in desired.pauses):
        return desired
    moved = (
        replace(
            one,
            since_s=one.since_s + by_s,
            expires_s=None if one.expires_s is None else one.expires_s + by_s,
        )
        for one in desired.pauses
    )
    return follow_up(desired, pauses=tuple(moved))


def withdraw(desired: Desired, operation: str) -> Desired:
    """Remove the pauses of one operation."""
    return without(desired, [one for one in desired.pauses if one.operation == operation])


def without(desired: Desired, gone: Collection[ActivePause]) -> Desired:
    """Return the state without these pauses."""
    if not gone:
        return desired
    return follow_up(desired, pauses=tuple(one for one in desired.pauses if one not in gone))


def overlap(one: Scope, other: Scope) -> bool:
    """Return whether a board may be in both; the models of boards are not known here."""
    models = not one.models or not other.models or bool({*one.models} & {*other.models})
    boards = not one.boards or not other.boards or bool({*one.boards} & {*other.boards})
    adapters = one.adapter is None or other.adapter is None or one.adapter == other.adapter
    return models and boards and adapters


def describe(scope: Scope) -> str:
    """Return a scope in words, for messages."""
    parts = [
        f"{what} {', '.join(names)}"
        for what, names in (
            ("adapter", () if scope.adapter is None else (scope.adapter,)),
            ("model", scope.models),
            ("board", scope.boards),
        )
        if names
    ]
    return " on ".join(parts) or "the whole cluster"


def check_version(desired: Desired, model: str, version: AdapterVersion) -> None:
    """Raise ``AdapterExists`` if the version's name stands for another content or scale."""
    line = desired.line(model, version.ref.name)
    known = None if line is None else line.version(version.ref.version)
    if known is not None and known != version:
        raise AdapterExists(
            f"Version '{version.ref.version}' of adapter '{version.ref.name}' is another content "
            f"(sha256 {known.ref.digest[:12]}..., scale {known.ref.scale:g}, {known.size_bytes} "
            "bytes): give the new one another version.",
            "version",
        )


def add_version(desired: Desired, model: str, version: AdapterVersion) -> Desired:
    """Make a version addressable as ``name@version``; the bare name is not affected.

    Every board then needs it on its disk before it serves, so staging comes first. Raises
    ``AdapterExists`` if the version's name is taken by another content, and ``OperationConflict``
    above the limit of versions that were staged and never served.
    """
    check_version(desired, model, version)
    line = desired.line(model, version.ref.name) or AdapterVersions(model, version.ref.name)
    if version in line.versions:
        return desired
    if len(line.kept) - len(line.left) >= MAX_WAITING:
        raise OperationConflict(
            f"{MAX_WAITING} versions of adapter '{line.name}' were staged and never served: retire "
            "some of them."
        )
    return _put(desired, replace(line, kept=(version, *line.kept)))


def note_trial(desired: Desired, found: AdapterTrial) -> Desired:
    """Record the result of a trial in place of an earlier one of the same subject."""
    others = [one for one in desired.trials if one.subject != found.subject]
    served = {(line.model, version.digest) for line in desired.lines for version in line.versions}
    excess = len(others) + 1 - MAX_TRIALS
    # A failure is worth more than a success, which costs only another trial.
    ranked = sorted(others, key=lambda one: (not one.passed, (one.model, one.digest) in served))
    dropped = ranked[: max(0, excess)]
    kept = tuple(one for one in others if one not in dropped)
    return replace(desired, epoch=desired.epoch + 1, trials=(*kept, found))


def begin(
    desired: Desired,
    model: str,
    candidate: AdapterVersion,
    *,
    weight: float = 0.0,
    in_flight: InFlight = InFlight.PIN,
) -> Desired:
    """Add a candidate that sessions get with the probability ``weight`` (0 to 1).

    Nothing changes if that version is the active one. Raises ``AdapterExists`` if the version's
    name is taken by another content, ``RequestError`` for another weight, and ``OperationConflict``
    if there is a candidate already.
    """
    if not 0 <= weight <= 1:
        raise RequestError("'weight' must be from 0 to 1.", "weight")
    check_version(desired, model, candidate)
    line = desired.line(model, candidate.ref.name) or AdapterVersions(model, candidate.ref.name)
    if line.candidate is not None:
        raise OperationConflict(
            f"Version '{line.candidate.ref.version}' of adapter '{line.name}' is being rolled out."
        )
    if line.active == candidate:
        return desired
    return _put(
        desired,
        replace(line, candidate=candidate, weight=float(weight), switched=(), in_flight=in_flight),
    )


def switch(desired: Desired, model: str, name: str, board_ids: Iterable[str]) -> Desired:
    """Make these boards too serve the candidate to all requests. Raises as ``commit`` does."""
    line = _rolled_out(desired, model, name)
    switched = tuple(sorted({*line.switched, *board_ids}))
    return desired if switched == line.switched else _put(desired, replace(line, switched=switched))


def commit(desired: Desired, model: str, name: str, keep: int = KEEP_VERSIONS) -> Desired:
    """Make the candidate the active version and keep ``keep`` others beside the previous one.

    Versions that were staged and never served are all kept. The active version becomes the target
    of a rollback. Raises ``OperationConflict`` if there is no candidate, and ``AdapterNotFound`` if
    there is no such adapter.
    """
    line = _rolled_out(desired, model, name)
    previous = line.active or line.previous
    line = _kept(line, line.previous, keep, but=(line.candidate, previous))
    return _put(
        desired,
        replace(
            _settled(line),
            active=line.candidate,
            previous=None if previous == line.candidate else previous,
        ),
    )


def promote(desired: Desired, model: str, name: str, keep: int = KEEP_VERSIONS) -> Desired:
    """Make the candidate the active version at once, by hand. Raises as ``commit`` does."""
    return commit(desired, model, name, keep)


def drop(desired: Desired, model: str, name: str) -> Desired:
    """Remove the candidate, as if ``begin`` had not been called. Raises as ``commit``."""
    line = _rolled_out(desired, model, name)
    tried = line.candidate
    line = _settled(line)
    if tried is not None and tried in line.kept:  # it had its turn, and may be pushed out
        line = replace(line, left=tuple(dict.fromkeys((*line.left, tried.ref.version))))
    if line.versions:
        return _put(desired, line)
    return follow_up(
        desired, lines=tuple(one for one in desired.lines if not _is(one, model, name))
    )


def rollback(
    desired: Desired,
    model: str,
    name: str,
    *,
    in_flight: InFlight = InFlight.PIN,
    keep: int = KEEP_VERSIONS,
) -> Desired:
    """Return to the previously active version; the current one stays addressable.

    Only one step back is possible, so that a repeated call does not restore the bad version. Raises
    ``OperationConflict`` if there is no previous version, or a candidate (which must be dropped
    instead), and ``AdapterNotFound`` if there is no such adapter.
    """
    line = _line(desired, model, name)
    if line.candidate is not None:
        raise OperationConflict(
            f"Version '{line.candidate.ref.version}' of adapter '{name}' is being rolled out."
        )
    if line.previous is None:
        raise OperationConflict(f"Adapter '{name}' has no version to roll back to.")
    line = _kept(line, line.active, max(keep, 1), but=(line.previous,))
    return _put(desired, replace(line, active=line.previous, previous=None, in_flight=in_flight))


def _kept(
    line: AdapterVersions,
    left: AdapterVersion | None,
    keep: int,
    but: tuple[AdapterVersion | None, ...],
) -> AdapterVersions:
    """Return the versions with the replaced one kept too, limited to ``keep``."""
    others = [
        one for one in dict.fromkeys((left, *line.kept)) if one is not None and one not in but
    ]
    served = [one for one in others if one == left or one.ref.version in line.left]
    pushed_out = served[keep:]
    return replace(
        line,
        kept=tuple(one for one in others if one not in pushed_out),
        left=tuple(one.ref.version for one in served[:keep]),
    )


def retire(desired: Desired, model: str, name: str, version: str | None = None) -> Desired:
    """Remove a version, or the whole adapter; running requests keep it to their end.

    Raises ``AdapterNotFound`` if there is none of that name, and ``OperationConflict`` if it is
    being rolled out, or is the active one of several.
    """
    line = _line(desired, model, name)
    if line.candidate is not None and version in (None, line.candidate.ref.version):
        raise OperationConflict(
            f"Version '{line.candidate.ref.version}' of adapter '{name}' is being rolled out."
        )
    if version is None:
        return _forget(desired, line)
    found = line.version(version)
    if found is None:
        raise AdapterNotFound(f"{name}@{version}")
    if line.versions == (found,):
        return _forget(desired, line)
    if found == line.active:
        raise OperationConflict(
            f"Version '{version}' is what adapter '{name}' serves; roll out another one first, or "
            "retire the whole adapter."
        )
    return _put(
        desired,
        replace(
            line,
            previous=None if found == line.previous else line.previous,
            kept=tuple(one for one in line.kept if one != found),
        ),
    )


def set_label(desired: Desired, model: str, label: str) -> Desired:
    """Name the weights of a base model. Raises ``RequestError`` for an empty label."""
    if not label:
        raise RequestError("The label of a version of the weights must not be empty.", "label")
    return weigh(desired, replace(desired.weights_of(model), label=label))


def forget_step(desired: Desired, model: str) -> Desired:
    """Reset the training step, so that a trainer can start again at any step."""
    return weigh(desired, replace(desired.weights_of(model), step=None))


def set_step(desired: Desired, model: str, step: int) -> Desired:
    """Record the last step that a trainer applied. Raises ``StaleWeights`` unless it is a later
    one.
    """
    last = desired.weights_of(model).step
    if last is not None and step <= last:
        raise StaleWeights(
            f"Step {last} of model '{model}' is the last one applied; {step} comes too late.",
            "version",
        )
    return weigh(desired, replace(desired.weights_of(model), step=step))


def as_one(before: Desired, *changes: Callable[[Desired], Desired]) -> Desired:
    """Make several changes in one epoch."""
    after = before
    for change in changes:
        after = change(after)
    if after.epoch == before.epoch:
        return before
    epoch = before.epoch + 1
    lines = tuple(
        replace(line, epoch=epoch) if line.epoch > before.epoch else line for line in after.lines
    )
    return replace(after, epoch=epoch, lines=lines)


def follow_up(
    desired: Desired,
    *,
    pauses: tuple[ActivePause, ...] | None = None,
    lines: tuple[AdapterVersions, ...] | None = None,
    weights: tuple[Weights, ...] | None = None,
) -> Desired:
    """Return the state of the next epoch; fields that are not given are unchanged."""
    return replace(
        desired,
        epoch=desired.epoch + 1,
        pauses=desired.pauses if pauses is None else pauses,
        lines=desired.lines if lines is None else lines,
        weights=desired.weights if weights is None else weights,
    )


def _put(desired: Desired, line: AdapterVersions) -> Desired:
    """Return the state with an adapter's versions, whose epoch rises if the bare name is
    affected.
    """
    before = desired.line(line.model, line.name)
    names = {one.ref.version for one in line.kept}
    line = replace(line, left=tuple(name for name in line.left if name in names))
    if before is None or _served(before) != _served(line):
        line = replace(line, epoch=desired.epoch + 1)
    others = [one for one in desired.lines if not _is(one, line.model, line.name)]
    lines = sorted((*others, line), key=lambda one: (one.model, one.name))
    return follow_up(desired, lines=tuple(lines))


def _served(line: AdapterVersions) -> tuple[object, ...]:
    """Return everything that determines the version of a request for the bare name."""
    offered = line.candidate if line.weight or line.switched else None
    return (line.active, offered, line.switched, line.weight if offered else 0.0)


def _settled(line: AdapterVersions) -> AdapterVersions:
    return replace(line, candidate=None, switched=(), weight=0.0)


def _forget(desired: Desired, line: AdapterVersions) -> Desired:
    return follow_up(
        desired, lines=tuple(o for o in desired.lines if not _is(o, line.model, line.name))
    )


def weigh(desired: Desired, weights: Weights) -> Desired:
    """Return the state with other weights of a model."""
    if weights == desired.weights_of(weights.model):
        return desired
    others = [one for one in desired.weights if one.model != weights.model]
    return follow_up(desired, weights=tuple(sorted((*others, weights), key=lambda one: one.model)))


def _is(line: AdapterVersions, model: str, name: str) -> bool:
    return (line.model, line.name) == (model, name)


def _line(desired: Desired, model: str, name: str) -> AdapterVersions:
    line = desired.line(model, name)
    if line is None:
        raise AdapterNotFound(name)
    return line


def _rolled_out(desired: Desired, model: str, name: str) -> AdapterVersions:
    line = _line(desired, model, name)
    if line.candidate is None:
        raise OperationConflict(f"No version of adapter '{name}' is being rolled out.")
    return line
