"""The boards of one model as a Router sees them: availability, load and speed. Pure.

Free boards are kept sorted by load and speed, so that finding one does not take a scan. A Router
knows its own requests at once; those of other Routers it learns from the boards' reports, which are
up to a second old. Neither costs a call per request.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import math
import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from rkserve.core.block_hashes import unpack
from rkserve.core.board_report import BoardReport, BoardState
from rkserve.fleet.measurements import ModelSpeeds, Speed
from rkserve.fleet.prefix_index import PrefixIndex

SESSIONS = 16_384  # sessions whose last board is remembered
SAMPLE = 8  # free boards of one speed to compare: a larger random sample gains nothing
TYPICAL_TOKENS = 128  # of an answer, before any has ended
LATEST_ANSWERS = 0.02  # the weight of one answer in the typical length
MIN_REST = 0.25  # of a typical answer: the assumed rest of one that is longer than typical


class PauseEffect(IntEnum):
    """The treatment of new requests by a paused or drained board; lower values are preferred.

    An upstream that is not paused has the OVERFLOW of boards that are not: see ``spare``. A drained
    board is not even asked for the reason of its refusal.
    """

    NOT = 0
    OVERFLOW = 1
    QUEUES = 2
    REFUSES = 3
    DRAINED = 4


class BoardWork(Protocol):
    """A request that is running on a board."""

    def rest_ms(self, now_s: float) -> float:
        """Return the estimated time until the request leaves the board."""


@dataclass(eq=False, repr=False, slots=True)
class Candidate:
    """One board of ``ModelBoards``. Only ``ModelBoards`` and its own methods change it.

    ``key`` addresses its replica in ``group``. ``n_batch`` requests may run there, ``capacity`` run
    and wait. ``in_flight`` counts this Router's own requests at the board without paused ones,
    which are ``resting`` and do not occupy it. ``foreign`` counts those of other Routers at the
    last report. A ``ready`` board accepts requests, and starts them at once if its model is
    ``loaded``. Its requests end together, or one by one where it ``joins``. ``booked_ms`` is the
    work of requests that wait for this board.
    """

    _boards: ModelBoards
    key: str
    group: str
    board_id: str
    slot: int
    speed: Speed
    upstream: bool = False
    n_batch: int = 0
    joins: bool = False
    capacity: int = 0
    in_flight: int = 0
    resting: int = 0
    foreign: int = 0
    ready: bool = False
    loaded: bool = True
    held: PauseEffect = PauseEffect.NOT
    booked_ms: float = 0.0
    used_s: float = -math.inf  # when this Router last sent something there
    asked_s: float = -math.inf  # the time of the last request for a report
    forgot_s: float = -math.inf  # cache contents reported before this time are void
    holdings: bytes = b""
    works: list[BoardWork] = field(default_factory=list)
    place: tuple[int, int, int] | None = None  # its key in ``ModelBoards._open``
    _most_since_asked: int = 0
    _left_since_asked: int = 0

    def __repr__(self) -> str:
        return f"<{self.key}: {self.load} of {self.n_batch}, {self.held.name}, ready={self.ready}>"

    @property
    def load(self) -> int:
        """The requests at the board, as far as this Router knows."""
        return self.foreign + self.in_flight

    @property
    def has_place(self) -> bool:
        """Return whether a request that is sent now would run at once."""
        return self.ready and self.load < self.n_batch

    @property
    def unused(self) -> bool:
        """Return whether this Router has no request there, running or paused."""
        return self.in_flight == self.resting == 0

    def wait_ms(self, now_s: float) -> float:
        """Return the estimated time until the board is free, bookings included."""
        if self.load < self.n_batch:
            return self.booked_ms
        rests = [work.rest_ms(now_s) for work in self.works]
        # A batch ends with its longest generation; single generations run one after the other.
        if self.n_batch == 1:
            own_ms = sum(rests)
        else:
            own_ms = (min if self.joins else max)(rests, default=0.0)
        return own_ms + self.foreign * self._boards.typical_ms(self) + self.booked_ms

    # -- what this Router does there ---------------------------------------------------------------

    def began(self, work: BoardWork, now_s: float) -> None:
        """Count a request that this Router sends to the board."""
        self.works.append(work)
        self.in_flight += 1
        self.used_s = now_s
        self._most_since_asked = max(self._most_since_asked, self.in_flight)
        self._boards.moved(self)

    def rested(self, *, held: bool) -> None:
        """Count one of this Router's requests as paused.

        With ``held`` it still occupies the board. The board alone knows for how long, so that it is
        counted as foreign until the next report.
        """
        self.in_flight -= 1
        self.resting += 1
        self.foreign += held
        self._boards.moved(self)

    def went_on(self) -> None:
        """Count a paused request as in flight again."""
        self.resting -= 1
        self.in_flight += 1
        self._most_since_asked = max(self._most_since_asked, self.in_flight)
        self._boards.moved(self)

    def ended(self, work: BoardWork, *, left: bool) -> None:
        """Remove a request; ``left``: its client disconnected before the board was done."""
        self.works.remove(work)
        self.in_flight -= 1
        self._left_since_asked += left
        self._boards.moved(self)

    def withdrawn(self, work: BoardWork) -> None:
        """Remove a request that only waited in the board's own queue.

        It is none of those that the next report counts as running: these are others' requests.
        """
        self.ended(work, left=False)
        self._most_since_asked = min(self._most_since_asked, self.in_flight)

    def lost(self) -> None:
        """Stop sending requests to a failed board until its next report."""
        self.ready = False
        self._boards.moved(self)

    def met(self, ahead: int) -> None:
        """Take over the number of requests that the board had when one of this Router's came."""
        self.foreign = max(0, ahead - (self.in_flight - 1))
        self._boards.moved(self)

    # -- what it reports ---------------------------------------------------------------------------

    def asked(self, now_s: float) -> None:
        """Note that the board is asked for a report now; see ``ModelBoards.update``."""
        # The board may still be aborting requests of clients that left; if it hangs, the report
        # after this one shows it.
        self._most_since_asked = self.in_flight + self._left_since_asked
        self._left_since_asked = 0
        self.asked_s = now_s

    def counted(self, reported: int) -> None:
        """Take over the running and queued requests of a report.

        The number of this Router's requests at the moment of the report is unknown, so the maximum
        since the board was asked is assumed. Counting one of them as foreign would make the next
        request wait for a busy board while this one is idle.
        """
        self.foreign = max(0, reported - self._most_since_asked)


class RandomSet:
    """A set of boards with random sampling, which is reproducible for one seed."""

    __slots__ = ("_boards", "_where")

    def __init__(self) -> None:
        self._boards: list[Candidate] = []
        self._where: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._boards)

    def add(self, board: Candidate) -> None:
        """Add a board that is not in the set."""
        self._where[board.key] = len(self._boards)
        self._boards.append(board)

    def remove(self, board: Candidate) -> None:
        """Remove a board of the set."""
        at = self._where.pop(board.key)
        last = self._boards.pop()
        if last.key != board.key:
            self._boards[at] = last
            self._where[last.key] = at

    def sample(self, rng: random.Random, most: int, but: Collection[str] = ()) -> list[Candidate]:
        """Return up to ``most`` random boards whose keys are not in ``but``."""
        if len(self._boards) <= most + len(but):
            found = [board for board in self._boards if board.key not in but]
            return rng.sample(found, min(most, len(found)))
        some = rng.sample(self._boards, most + len(but))
        return [board for board in some if board.key not in but][:most]


@dataclass(slots=True)
class _Booking:
    board: Candidate
    ms: float


POINTS = 64  # per board: with 8 boards the largest share is about a third above the mean


class HashRing:
    """A consistent hash ring of board names, which stay the same when replicas are replaced."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._points: list[tuple[int, str]] = []

    def add(self, name: str) -> None:
        """Add a board, unless it is there."""
        if name not in self._names:
            self._names.add(name)
            for number in range(POINTS):
                bisect.insort(self._points, (_point(f"{name}\0{number}"), name))

    def remove(self, name: str) -> None:
        """Remove a board; only its own sessions move."""
        self._names.discard(name)
        self._points = [point for point in self._points if point[1] != name]

    def of(self, session: str) -> Iterator[str]:
        """Yield the session's board, then its successors in order."""
        points = self._points
        begin = bisect.bisect_left(points, (_point(session), ""))
        seen: set[str] = set()
        for step in range(len(points)):
            name = points[(begin + step) % len(points)][1]
            if name not in seen:
                seen.add(name)
                yield name


def _point(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")


class ModelBoards:
    """All boards of one model. Iteration yields every board, in no order."""

    def __init__(self, rng: random.Random, index: PrefixIndex | None = None) -> None:
        """``index`` tracks cached prefixes; None if no policy needs them."""
        self.index = index
        self._rng = rng
        self._by_key: dict[str, Candidate] = {}
        self._by_slot: dict[int, Candidate] = {}
        self._by_name: dict[str, Candidate] = {}
        self._kinds: dict[str, list[Candidate]] = {}
        self._slots = itertools.count()
        self.speeds = ModelSpeeds()
        # Ready boards with a free place, by pause effect, speed level and load.
        self._open: dict[tuple[int, int, int], RandomSet] = {}
        self._ready = [0] * len(PauseEffect)
        self._counted: dict[str, tuple[int, int]] = {}  # each board's share of _ready and places
        self.places = 0  # the requests that all available boards can run at once
        self._bookings: dict[str, _Booking] = {}
        self.typical_tokens: float = TYPICAL_TOKENS
        self._answers = 0
        self._sessions: dict[str, str] = {}  # keys of last boards, least recent first
        self.ring: HashRing = HashRing()

    # -- who is there ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: str) -> Candidate | None:
        """Return the board of a replica."""
        return self._by_key.get(key)

    def named(self, board_id: str) -> Candidate | None:
        """Return a board by its name, which stays the same when its replica is replaced."""
        return self._by_name.get(board_id)

    def at(self, slot: int) -> Candidate | None:
        """Return the board with that slot number in the prefix index."""
        return self._by_slot.get(slot)

    @property
    def mixed(self) -> bool:
        """Return whether there are boards of several kinds, each with speeds of its own."""
        return len(self._kinds) > 1

    def soonest_of_others(
        self, free: Collection[Candidate], tried: Collection[str], now_s: float
    ) -> list[Candidate]:
        """Return the board that is free first, of each kind that ``free`` has none of.

        Kinds are left out whose speed is not known yet, and so are all as long as that of a free
        board is not: it is measured by its next request.
        """
        if not self.mixed or not all(board.speed.known for board in free):
            return []
        there = {board.speed.kind for board in free}
        held, found = self.tier(tried), []
        for kind, alike in self._kinds.items():
            others = [
                (board.wait_ms(now_s), board.slot, board)
                for board in alike
                if kind not in there
                and (board.ready and board.held == held and board.key not in tried)
                and board.speed.known
            ]
            if others:
                found.append(min(others)[-1])
        return found

    @property
    def held(self) -> PauseEffect | None:
        """The best pause effect among ready boards; None if no board is ready."""
        return next((held for held in PauseEffect if self._ready[held]), None)

    @property
    def any_open(self) -> bool:
        """Return whether a board with the best pause effect is free, or an upstream for it."""
        held = self.held
        usable = (held, PauseEffect.OVERFLOW) if held is PauseEffect.NOT else (held,)
        return any(place[0] in usable for place in self._open)

    def typical_ms(self, board: Candidate | None = None) -> float:
        """Return the expected time on the board of a request with unknown length."""
        if board is None:
            board = next(iter(self._by_key.values()), None)
        return self.typical_tokens * board.speed.decode_ms if board is not None else 0.0

    # -- reports -----------------------------------------------------------------------------------

    def update(
        self, group: str, report: BoardReport, *, ready: bool, held: PauseEffect
    ) -> Candidate:
        """Take over the report of a board of a group; ``held`` is the effect of its pause."""
        key, board_id = report.replica, report.board_id
        board = self._by_key.get(key)
        if board is None:
            # An NPU and the CPU beside it have one platform, and are two kinds of board.
            speed = Speed(self.speeds, f"{group} {report.platform}")
            board = Candidate(
                self, key, group, board_id, next(self._slots), speed, report.is_upstream
            )
            self._by_key[key] = self._by_slot[board.slot] = board
            if not board.upstream:
                self._kinds.setdefault(speed.kind, []).append(board)
        if ready or board_id not in self._by_name:
            self._by_name[board_id] = board
            self.ring.add(board_id)
        board.n_batch, board.joins = report.n_batch, report.joins
        board.capacity = report.queue_limit + report.n_batch
        board.ready, board.held = ready, held
        board.loaded = report.state is BoardState.READY
        board.counted(report.running + report.queued)
        board.speed.update(report, board.asked_s)
        if self.index is not None:
            self._hear_holdings(self.index, board, report.holdings)
        self.moved(board)
        return board

    def _hear_holdings(self, index: PrefixIndex, board: Candidate, packed: bytes) -> None:
        if board.asked_s < board.forgot_s:
            return
        # Usually nothing has changed since the last report, and decoding can be skipped.
        if packed == board.holdings and not index.guessed(board.slot):
            return
        holdings = unpack(packed)
        if holdings is not None:
            board.holdings = packed
            index.update(board.slot, holdings, board.asked_s)

    def silent(self, board: Candidate, now_s: float) -> None:
        """Mark a board that did not report, and remove it once this Router does not use it."""
        board.lost()
        self.forget(board, now_s)
        if board.unused:
            self._count(board, gone=True)
            del self._by_key[board.key], self._by_slot[board.slot]
            self._forget_kind(board)
            if self._by_name.get(board.board_id) is board:
                del self._by_name[board.board_id]
                self.ring.remove(board.board_id)

    def _forget_kind(self, board: Candidate) -> None:
        if not board.upstream:
            alike = self._kinds[board.speed.kind]
            alike.remove(board)
            if not alike:
                del self._kinds[board.speed.kind]

    def hold(self, board: Candidate, held: PauseEffect) -> None:
        """Set the effect of a pause on new requests at the board."""
        board.held = held
        self.moved(board)

    def forget(self, board: Candidate, now_s: float, *, files: bool = True) -> None:
        """Forget the cached prefixes of a board; without ``files``, keep those in files."""
        board.holdings = b""
        board.forgot_s = now_s
        if self.index is not None:
            self.index.forget(board.slot, files=files)

    def answered(self, tokens: int) -> None:
        """Add the length of a finished answer to the estimate."""
        self._answers += 1
        self.typical_tokens += max(LATEST_ANSWERS, 1 / (1 + self._answers)) * (
            tokens - self.typical_tokens
        )

    def visited(self, session: str, board: Candidate) -> None:
        """Remember the board as the last one of the session."""
        if not session:
            return
        self._sessions.pop(session, None)
        while len(self._sessions) >= SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[session] = board.key

    def last(self, session: str) -> Candidate | None:
        """Return the last board of the session, if it is ready."""
        board = self._by_key.get(self._sessions.get(session, ""))
        return board if board is not None and board.ready else None

    # -- bookings ----------------------------------------------------------------------------------

    def book(self, request_id: str, board: Candidate, ms: float) -> None:
        """Book the time of a request that waits for a board."""
        self.unbook(request_id)
        self._bookings[request_id] = _Booking(board, ms)
        board.booked_ms += ms

    def unbook(self, request_id: str) -> None:
        """Cancel the booking of a request, if there is one."""
        booking = self._bookings.pop(request_id, None)
        if booking is not None:
            # Float sums do not cancel exactly; a board without bookings must have zero.
            left_ms = booking.board.booked_ms - booking.ms
            booking.board.booked_ms = left_ms if left_ms > 1e-6 else 0.0  # noqa: PLR2004 - rounding

    def booked_ms(self, board: Candidate, request_id: str) -> float:
        """Return the time that other requests have booked at the board."""
        own = self._bookings.get(request_id)
        return board.booked_ms - (own.ms if own is not None and own.board is board else 0.0)

    # -- the order ---------------------------------------------------------------------------------

    def moved(self, board: Candidate) -> None:
        """Sort the board in again after a change of its load, speed or state."""
        place = (board.held, board.speed.level, board.load) if board.has_place else None
        if place != board.place:
            if board.place is not None:
                bag = self._open[board.place]
                bag.remove(board)
                if not bag:
                    del self._open[board.place]
            if place is not None:
                self._open.setdefault(place, RandomSet()).add(board)
            board.place = place
        self._count(board)

    def _count(self, board: Candidate, *, gone: bool = False) -> None:
        before = self._counted.pop(board.key, None)
        if before is not None:
            self._ready[before[0]] -= 1
            self.places -= before[1]
        if board.ready and not gone:
            now = (board.held, board.n_batch if board.held <= PauseEffect.OVERFLOW else 0)
            self._counted[board.key] = now
            self._ready[now[0]] += 1
            self.places += now[1]

    def free(
        self, tried: Collection[str] = (), most: PauseEffect = PauseEffect.REFUSES
    ) -> list[Candidate]:
        """Return free boards: for each speed, a random sample of those with the least load.

        Only boards with the best pause effect of all ready boards are returned, and none worse than
        ``most``. A request is rather rejected with a retry time than queued behind a pause, and the
        board gives the reason for a rejection itself.
        """
        held = self.tier(tried)
        return [] if held is None or held > most else self._free(held, tried)

    def spare(self, tried: Collection[str] = ()) -> list[Candidate]:
        """Return free upstreams for a request that boards have no place for.

        While a board of the model is ready, ``free`` returns none of them.
        """
        return self._free(PauseEffect.OVERFLOW, tried)

    def _free(self, held: PauseEffect, tried: Collection[str]) -> list[Candidate]:
        found: list[Candidate] = []
        loads: dict[int, int] = {}
        for (at, level, load), bag in sorted(self._open.items()):
            if at != held or loads.get(level, load) < load:
                continue
            some = bag.sample(self._rng, SAMPLE, tried)
            if some:
                loads[level] = load
                found += some
        return found

    def tier(self, tried: Collection[str]) -> PauseEffect | None:
        """Return the best pause effect among ready boards that have not been tried."""
        ready = list(self._ready)
        for key in tried:
            counted = self._counted.get(key)
            if counted is not None:
                ready[counted[0]] -= 1
        return next((held for held in PauseEffect if ready[held] > 0), None)
