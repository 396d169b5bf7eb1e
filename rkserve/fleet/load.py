"""The boards of one model as a Router sees them: what may be chosen, how busy, how fast. Pure.

They are kept in order as they change, so that nobody has to look at all of them to find a free one.
A Router knows at once what it sent itself; what other Routers sent it learns from the boards'
reports, which are up to a second old. Both together cost no call per request.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

from rkserve.core.block_hashes import unpack
from rkserve.fleet.board_sets import HashRing, RandomSet
from rkserve.fleet.prefix_index import PrefixIndex, Reuse
from rkserve.fleet.speeds import ModelSpeeds, Speed, WorkCounters

SESSIONS = 16_384  # whose last boards are remembered
SAMPLE = 8  # free boards of one speed that are looked at: chance among more gains nothing
TYPICAL_TOKENS = 128  # of an answer, before any has ended
LATEST_ANSWERS = 0.02  # how much one answer counts for the typical length
MIN_REST = 0.25  # of a typical answer: one that is longer than others still has so much before it


class PauseEffect(IntEnum):
    """What a board that is paused does with new requests, the better the less."""

    NOT = 0
    QUEUES = 1
    REFUSES = 2


class BoardWork(Protocol):
    """A request that is on a board now."""

    def rest_ms(self, now_s: float) -> float:
        """How long it will keep the board yet, as well as can be said."""


@dataclass(frozen=True, slots=True)
class BoardStatus:
    """What a report says of one board: whether it may be chosen and how much it takes at once.

    ``running`` and ``queued`` are of all Routers; ``queue_limit`` may wait there. One that is
    ``ready`` takes requests, and starts them at once where its model is ``loaded``. ``kind`` names
    boards that are equally fast. ``holdings`` are packed.
    """

    ready: bool = True
    loaded: bool = True
    held: PauseEffect = PauseEffect.NOT
    n_batch: int = 1
    queue_limit: int = 0
    running: int = 0
    queued: int = 0
    kind: str = ""
    counters: WorkCounters = field(default_factory=lambda: WorkCounters(""))
    holdings: bytes = b""


class Candidate:
    """One board of ``ModelBoards``. Only ``ModelBoards`` and its own methods change it.

    ``key`` addresses its replica in ``group``. ``n_batch`` may run there, ``capacity`` run and
    wait. ``in_flight`` is this Router's own requests that do now, and ``resting`` those that are
    paused: they keep nobody from the board, which counts them apart. ``foreign`` are those of other
    Routers when the board last reported. ``booked_ms`` is the work of requests that wait for it.
    """

    __slots__ = (
        "_boards",
        "_left_since_asked",
        "_most_since_asked",
        "asked_s",
        "board_id",
        "booked_ms",
        "capacity",
        "foreign",
        "forgot_s",
        "group",
        "held",
        "holdings",
        "in_flight",
        "key",
        "loaded",
        "n_batch",
        "place",
        "ready",
        "resting",
        "slot",
        "speed",
        "used_s",
        "works",
    )

    def __init__(self, boards: ModelBoards, key: str, group: str, board_id: str, slot: int) -> None:
        self._boards = boards
        self.key = key
        self.group = group
        self.board_id = board_id
        self.slot = slot
        self.capacity = self.n_batch = 0
        self.in_flight = self.resting = self.foreign = 0
        self.ready = False
        self.loaded = True
        self.held = PauseEffect.NOT
        self.booked_ms = 0.0
        self.used_s = float("-inf")  # when this Router last sent something there
        self.asked_s = float("-inf")  # when it was last asked for a report
        self.forgot_s = float("-inf")  # and what it said before this is not true any more
        self.speed = boards.speeds_of("")
        self.holdings = b""
        self.works: list[BoardWork] = []
        self.place: tuple[int, int, int] | None = None  # where in the order; see ``ModelBoards``
        self._most_since_asked = 0
        self._left_since_asked = 0

    def __repr__(self) -> str:
        return f"<{self.key}: {self.load} of {self.n_batch}, {self.held.name}, ready={self.ready}>"

    @property
    def load(self) -> int:
        """Requests on the board now, as well as this Router can know."""
        return self.foreign + self.in_flight

    @property
    def has_place(self) -> bool:
        """Whether a request that is sent there now runs at once."""
        return self.ready and self.load < self.n_batch

    @property
    def unused(self) -> bool:
        """Whether this Router has nothing there, neither at work nor paused."""
        return self.in_flight == self.resting == 0

    def wait_ms(self, now_s: float) -> float:
        """How long until it has a place, with those that wait for it already in front."""
        if self.load < self.n_batch:
            return self.booked_ms
        rests = [work.rest_ms(now_s) for work in self.works]
        # Generations of a batch end together; of single ones each waits for those before it.
        own_ms = sum(rests) if self.n_batch == 1 else max(rests, default=0.0)
        return own_ms + self.foreign * self._boards.typical_ms(self) + self.booked_ms

    # -- what this Router does there ---------------------------------------------------------------

    def began(self, work: BoardWork, now_s: float) -> None:
        """This Router sends the board a request."""
        self.works.append(work)
        self.in_flight += 1
        self.used_s = now_s
        self._most_since_asked = max(self._most_since_asked, self.in_flight)
        self._boards.moved(self)

    def rested(self, *, held: bool) -> None:
        """One of this Router's requests is paused there; where it is ``held`` it keeps the board.

        For how long only the board knows, so that counts until the next report.
        """
        self.in_flight -= 1
        self.resting += 1
        self.foreign += held
        self._boards.moved(self)

    def went_on(self) -> None:
        """One that was paused goes on, or ends."""
        self.resting -= 1
        self.in_flight += 1
        self._most_since_asked = max(self._most_since_asked, self.in_flight)
        self._boards.moved(self)

    def ended(self, work: BoardWork, *, left: bool) -> None:
        """That request is over; ``left`` says that its client went before the board was done."""
        self.works.remove(work)
        self.in_flight -= 1
        self._left_since_asked += left
        self._boards.moved(self)

    def lost(self) -> None:
        """It failed: nobody is sent there until its next report says otherwise."""
        self.ready = False
        self._boards.moved(self)

    # -- what it reports ---------------------------------------------------------------------------

    def asked(self, now_s: float) -> None:
        """The board is asked for a report, which ``ModelBoards.heard`` takes over."""
        # The board may still be ending what was left; the report after this one shows if it hangs.
        self._most_since_asked = self.in_flight + self._left_since_asked
        self._left_since_asked = 0
        self.asked_s = now_s

    def counted(self, reported: int) -> None:
        """Take over the running and queued requests of a report.

        Nobody knows how many of them were this Router's in the moment that the board counted; as
        many as there were at most since it was asked. Counting one of its own as foreign would
        send the next request to wait behind a busy board while this one is idle.
        """
        self.foreign = max(0, reported - self._most_since_asked)


@dataclass(slots=True)
class _Booking:
    board: Candidate
    ms: float


class ModelBoards:
    """All boards that serve one model. Iterating gives every one of them, in no order."""

    def __init__(self, rng: random.Random, index: PrefixIndex | None = None) -> None:
        """``index`` says what boards hold; None: nobody wants to know."""
        self.index = index
        self._rng = rng
        self._by_key: dict[str, Candidate] = {}
        self._by_slot: dict[int, Candidate] = {}
        self._by_name: dict[str, Candidate] = {}
        self._slots = itertools.count()
        self._speeds = ModelSpeeds()
        # Ready boards with a place, by what a pause does there, by speed and by load.
        self._open: dict[tuple[int, int, int], RandomSet[Candidate]] = {}
        self._ready = [0] * len(PauseEffect)
        self._counted: dict[str, tuple[int, int]] = {}  # how each board counts in _ready, _places
        self._places = 0
        self._bookings: dict[str, _Booking] = {}
        self.typical_tokens: float = TYPICAL_TOKENS
        self._answers = 0
        self._sessions: dict[str, str] = {}  # where each was last, the longest ago first
        self.listeners: list[Callable[[Reuse, int], None]] = []  # who counts what was ``found``
        self.ring: HashRing = HashRing()

    # -- who is there ------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Candidate]:
        return iter(self._by_key.values())

    def __len__(self) -> int:
        return len(self._by_key)

    def get(self, key: str) -> Candidate | None:
        """Return the board of that replica."""
        return self._by_key.get(key)

    def named(self, board_id: str) -> Candidate | None:
        """Return that board by its name, which outlives its replicas."""
        return self._by_name.get(board_id)

    def at(self, slot: int) -> Candidate | None:
        """Return the board that the index calls ``slot``."""
        return self._by_slot.get(slot)

    @property
    def places(self) -> int:
        """Generations that run at once on all boards which take any now."""
        return self._places

    @property
    def held(self) -> PauseEffect | None:
        """The least that a pause does on a ready board; None where no board is ready."""
        return next((held for held in PauseEffect if self._ready[held]), None)

    @property
    def any_open(self) -> bool:
        """Whether some board has a place for a request now, of those that are held least."""
        held = self.held
        return any(place[0] == held for place in self._open)

    def typical_ms(self, board: Candidate | None = None) -> float:
        """How long a request keeps a board, of which nothing is known."""
        if board is None:
            board = next(iter(self._by_key.values()), None)
        return self.typical_tokens * board.speed.decode_ms if board is not None else 0.0

    # -- reports -----------------------------------------------------------------------------------

    def heard(self, key: str, group: str, board_id: str, said: BoardStatus) -> Candidate:
        """Take over what a board says of itself."""
        board = self._by_key.get(key)
        if board is None:
            board = Candidate(self, key, group, board_id, next(self._slots))
            board.speed = self.speeds_of(said.kind)
            self._by_key[key] = self._by_slot[board.slot] = board
        if said.ready or board_id not in self._by_name:
            self._by_name[board_id] = board
            self.ring.add(board_id)
        board.n_batch = said.n_batch
        board.capacity = said.queue_limit + said.n_batch
        board.ready, board.loaded, board.held = said.ready, said.loaded, said.held
        board.counted(said.running + said.queued)
        board.speed.heard(said.counters)
        if self.index is not None:
            self._hear_holdings(self.index, board, said.holdings)
        self.moved(board)
        return board

    def _hear_holdings(self, index: PrefixIndex, board: Candidate, packed: bytes) -> None:
        if board.asked_s < board.forgot_s:
            return
        # Mostly a board holds what it held a second ago, and this Router has done nothing there.
        if packed == board.holdings and not index.guessed(board.slot):
            return
        holdings = unpack(packed)
        if holdings is not None:
            board.holdings = packed
            index.heard(board.slot, holdings, board.asked_s)

    def speeds_of(self, kind: str) -> Speed:
        """Return the speed of one more board of that kind."""
        return Speed(self._speeds, kind)

    def silent(self, board: Candidate, now_s: float) -> None:
        """It did not report; it goes where this Router has nothing there any more."""
        board.lost()
        self.forget(board, now_s)
        if board.unused:
            self._count(board, gone=True)
            del self._by_key[board.key], self._by_slot[board.slot]
            if self._by_name.get(board.board_id) is board:
                del self._by_name[board.board_id]
                self.ring.remove(board.board_id)

    def hold(self, board: Candidate, held: PauseEffect) -> None:
        """What a pause does with new requests there, from now on."""
        board.held = held
        self.moved(board)

    def forget(self, board: Candidate, now_s: float, *, files: bool = True) -> None:
        """It holds nothing that could be used again, or but for its ``files`` nothing."""
        board.holdings = b""
        board.forgot_s = now_s
        if self.index is not None:
            self.index.forget(board.slot, files=files)

    def answered(self, tokens: int) -> None:
        """An answer ended with so many tokens."""
        self._answers += 1
        self.typical_tokens += max(LATEST_ANSWERS, 1 / (1 + self._answers)) * (
            tokens - self.typical_tokens
        )

    def found(self, expected: Reuse, cached: int) -> None:
        """A board did not compute ``cached`` tokens of a prompt, and ``expected`` was expected."""
        for tell in self.listeners:
            tell(expected, cached)

    def visited(self, session: str, board: Candidate) -> None:
        """A request of that session goes there."""
        if not session:
            return
        self._sessions.pop(session, None)
        while len(self._sessions) >= SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        self._sessions[session] = board.key

    def last(self, session: str) -> Candidate | None:
        """Return the board that a session's last request went to, should it be ready."""
        board = self._by_key.get(self._sessions.get(session, ""))
        return board if board is not None and board.ready else None

    # -- bookings ----------------------------------------------------------------------------------

    def book(self, request_id: str, board: Candidate, ms: float) -> None:
        """A request waits for that board, which it will keep for so long; others shall know."""
        self.unbook(request_id)
        self._bookings[request_id] = _Booking(board, ms)
        board.booked_ms += ms

    def unbook(self, request_id: str) -> None:
        """It waits no more, for whatever reason."""
        booking = self._bookings.pop(request_id, None)
        if booking is not None:
            # Sums of floats do not cancel out; a board that nobody waits for is free.
            left_ms = booking.board.booked_ms - booking.ms
            booking.board.booked_ms = left_ms if left_ms > 1e-6 else 0.0  # noqa: PLR2004

    def booked_ms(self, board: Candidate, request_id: str) -> float:
        """What others have booked there."""
        own = self._bookings.get(request_id)
        return board.booked_ms - (own.ms if own is not None and own.board is board else 0.0)

    # -- the order ---------------------------------------------------------------------------------

    def moved(self, board: Candidate) -> None:
        """Its load, speed or state may have changed."""
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
            self._places -= before[1]
        if board.ready and not gone:
            now = (board.held, board.n_batch if board.held is PauseEffect.NOT else 0)
            self._counted[board.key] = now
            self._ready[now[0]] += 1
            self._places += now[1]

    def free(
        self, tried: Collection[str] = (), most: PauseEffect = PauseEffect.REFUSES
    ) -> list[Candidate]:
        """Return free boards of every speed, each of the least load there is at that speed.

        Of many that are alike a few by chance. One that is held comes only where no other is
        ready: a request should rather be told to come back than queue behind a pause, and why a
        board refuses is its own to say; none that is held more than ``most``.
        """
        held = self.tier(tried)
        if held is None or held > most:
            return []
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
        """How much the least held of the ready boards is held, without those that were tried."""
        ready = list(self._ready)
        for key in tried:
            counted = self._counted.get(key)
            if counted is not None:
                ready[counted[0]] -= 1
        return next((held for held in PauseEffect if ready[held] > 0), None)
