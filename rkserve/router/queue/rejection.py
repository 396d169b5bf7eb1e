"""Whether some board could take a request, now or later, and what is said where none can.

It reads what a Router knows of its boards and changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rkserve.core.desired_state import Desired, PauseMode
from rkserve.core.errors import (
    AdapterBroken,
    BoardAsleep,
    BoardBehind,
    CacheNotFound,
    EnginePaused,
    NoBoard,
    QueueFull,
    RkserveError,
)
from rkserve.core.messages import GenerateRequest
from rkserve.fleet.fleet import Fleet
from rkserve.fleet.load import Boards, Candidate, Held

# What one board may lack and another have.
LACKING = (CacheNotFound, AdapterBroken)


class Tried(dict[str, RkserveError]):
    """Boards that did not take a request, by replica, and why not. Use one for all of its tries.

    ``behind_until_s`` is how long it waits for boards that have yet to hear what they shall be.
    """

    behind_until_s: float | None = None


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a request can hope for. Boards in ``barred`` are not for it, nor those held more than
    ``most``.

    ``nobody``: no board could take it. ``asks`` is one that will say itself why it does not, and is
    busy perhaps. ``waits``: all boards keep such requests until a pause is over.
    """

    barred: Collection[str] = ()
    most: Held = Held.REFUSES
    nobody: bool = False
    asks: Candidate | None = None
    waits: bool = False


def prospect(
    request: GenerateRequest,
    boards: Boards,
    desired: Desired,
    tried: Mapping[str, RkserveError],
    blocked: Collection[str],
) -> Prospect:
    """Return what a request can hope for that ``tried`` some boards; others are ``blocked``."""
    # A request should rather be told to come back than queue behind a pause: where a board is full
    # that was chosen for being less held, those that are held more are not asked.
    full = [boards.get(key) for key, exc in tried.items() if isinstance(exc, QueueFull)]
    most = min((board.held for board in full if board is not None), default=Held.REFUSES)
    barred = {*tried, *blocked}
    name = request.line if request.adapter is None else request.adapter.name
    if name is not None and any(pause.scope.adapter == name for pause in desired.pauses):
        modes = {
            board: _mode(desired, board, request.model, name)
            for board in boards
            if board.ready and board.key not in barred
        }
        free = [board for board, mode in modes.items() if mode is None]
        if not free and PauseMode.KEEP in modes.values():
            return Prospect(barred, most, waits=True)
        if not free and modes:
            return Prospect(barred, most, asks=next(iter(modes)))
        barred |= {board.key for board, mode in modes.items() if mode is not None}
    tier = boards.tier(barred) if barred else boards.held
    if tier is None or tier > most:
        return Prospect(barred, most, nobody=True)
    if tier is not Held.REFUSES:
        return Prospect(barred, most)
    refusing = [board for board in boards if board.ready and board.key not in barred]
    return Prospect(barred, most, asks=refusing[0])


def _mode(desired: Desired, board: Candidate, model: str, name: str) -> PauseMode | None:
    hold = desired.duty(board.board_id, model).held(name)
    return None if hold is None else hold.mode


def refusal(
    fleet: Fleet, model: str, tried: Mapping[str, RkserveError], avoided: Collection[str] = ()
) -> RkserveError:
    """Say why nobody took the request: behind, full, without what it needs, or not there.

    ``avoided`` says why boards that are there are sent nothing.
    """
    met = list(tried.values())
    behind = [exc for exc in met if isinstance(exc, BoardBehind)]
    if behind:
        return behind[-1]
    full = [exc for exc in met if isinstance(exc, QueueFull)]
    if full:
        soonest_s = min(exc.retry_after_s or 1 for exc in full)
        return QueueFull(sum(exc.queued for exc in full), soonest_s)
    lacking = [exc for exc in met if isinstance(exc, LACKING)]
    paused = [exc for exc in met if isinstance(exc, EnginePaused)]
    paused.sort(key=lambda exc: exc.retry_after_s or 1)
    asleep = [exc for exc in met if isinstance(exc, BoardAsleep)]
    if told := [*lacking[-1:], *paused[:1], *asleep[-1:]]:
        return told[0]
    if avoided:
        return NoBoard(model, "; ".join(sorted(avoided)))
    return NoBoard(model, fleet.why_not_ready(model, met))
