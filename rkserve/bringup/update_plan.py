"""The order of an update of the fleet: one board first, then a few at a time, and the head last.

Nothing is kept here: the plan is made anew of the order and the boards' latest news, so that an
update goes on where it was when its command is started again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from rkserve.core.skew import skew_problem
from rkserve.router.fleet_update import FleetUpdate, MemberNews


class BoardPhase(str, Enum):
    """The phase of one board in an update."""

    WAITING = "waiting"
    INSTALLING = "installing"
    INSTALLED = "installed"
    SWITCHING = "switching"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True)
class PlanStep:
    """The next step: boards that may switch now, or the end.

    ``boards_done``: it is the head's turn. ``problem`` stops the update: no further board switches,
    and with ``over`` none is switching.
    """

    go: tuple[str, ...] = ()
    boards_done: bool = False
    over: bool = False
    problem: str = ""


def phase_of(update: FleetUpdate, news: MemberNews) -> BoardPhase:
    """Return a board's phase."""
    ours = news.update == update.id
    if ours and news.problem:
        return BoardPhase.FAILED
    if news.version == update.version and news.stage == "serving":
        return BoardPhase.DONE
    if news.key in update.go:
        return BoardPhase.SWITCHING
    if ours and news.stage in ("installing", "installed"):
        return BoardPhase(news.stage)
    return BoardPhase.WAITING


def next_step(
    update: FleetUpdate,
    boards: Sequence[MemberNews],
    canary: str | None = None,
    max_unavailable: int = 1,
    overdue: Collection[str] = (),
) -> PlanStep:
    """Return the next step for the boards of an update.

    ``canary`` is the host of the first board; ``overdue`` are keys of switching boards that did not
    come back in time.
    """
    phases = {one.key: phase_of(update, one) for one in boards}
    switching = [one for one in boards if phases[one.key] is BoardPhase.SWITCHING]
    failed = [one for one in boards if phases[one.key] is BoardPhase.FAILED]
    lost = [one for one in switching if one.key in overdue]
    if failed or lost:
        reasons = [f"{one.host}: {one.problem}" for one in failed]
        reasons += [f"{one.host} has not come back in time" for one in lost]
        return PlanStep(over=len(switching) == len(lost), problem="; ".join(reasons))
    done = [one for one in boards if phases[one.key] is BoardPhase.DONE]
    if len(done) == len(boards):
        return PlanStep(boards_done=True, over=True)
    ready = [one for one in boards if phases[one.key] is BoardPhase.INSTALLED]
    if not any(one.key in update.go for one in done):
        # None has come through this update yet: one board alone tries it.
        left = [one for one in boards if one not in done]
        first = next((one for one in left if one.host == canary), left[0])
        tries = not switching and first in ready
        return PlanStep(go=(first.key,) if tries else ())
    room = max(0, max_unavailable - len(switching))
    return PlanStep(go=tuple(one.key for one in ready[:room]))


def canary_problem(boards: Sequence[MemberNews], canary: str | None) -> str:
    """Return why a host cannot be the first one, empty if it can."""
    if canary is None or canary in {one.host for one in boards}:
        return ""
    known = ", ".join(one.host for one in boards) or "none"
    return f"No board has the host name {canary}; there are: {known}."


def version_problem(update: FleetUpdate, boards: Sequence[MemberNews], head: str) -> str:
    """Return why the nodes cannot go to a version at once, empty if they can."""
    for where, version in (("the head", head), *((one.host, one.version) for one in boards)):
        if problem := skew_problem(update.version, version):
            return f"{where} cannot go from {version} to {update.version} at once: {problem}"
    return ""


def ray_problem(now: str, after: str | None, *, restart: bool) -> str:
    """Return why a cluster cannot go to another version of Ray, empty if it can."""
    if after is not None and after != now and not restart:
        return (
            f"This update takes Ray from {now} to {after}, and nodes with different versions of "
            "Ray make no cluster: all of it has to be restarted at once, and requests fail for "
            "minutes. Repeat the command with --restart-cluster when that may be."
        )
    return ""


def described(
    update: FleetUpdate, boards: Iterable[MemberNews], canary: str | None, max_unavailable: int
) -> list[str]:
    """Return the plan as lines of text."""
    left = [one for one in boards if phase_of(update, one) is not BoardPhase.DONE]
    left.sort(key=lambda one: (one.host != canary, one.host))
    lines = []
    if left:
        lines.append(f"first  {left[0].host}: {left[0].version} to {update.version}, on trial")
    for at in range(1, len(left), max_unavailable):
        hosts = ", ".join(one.host for one in left[at : at + max_unavailable])
        lines.append(f"then   {hosts}")
    lines.append(f"last   the head, to {update.version}")
    if len(left) == 1:
        lines.append(
            "There is one board: its requests wait or get a 503 with Retry-After while it restarts."
        )
    return lines
