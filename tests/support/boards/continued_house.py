"""Boards with fake engines behind a ``Dispatch``, and every way to lose one at a chosen moment.

The engines' model depends on all that its context holds, and says characters of several tokens: a
token that is missing, doubled or of another board's making shows in every one that follows.
"""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

from prometheus_client import CollectorRegistry

from rkserve.api.common.logprobs import ChoiceTokens
from rkserve.board.answer.hooks import HookFactory
from rkserve.board.board import Board
from rkserve.board.engine.protocol import OnToken, RunCommand
from rkserve.board.rules.hang_limits import RunTimeouts
from rkserve.board.run.settings import BoardSettings
from rkserve.core.board_report import BoardReport, GenerationInfo, GenerationState
from rkserve.core.errors import BoardFailed, BoardGone, NoBoard, RkserveError, StateConflict
from rkserve.core.messages import (
    ControlAction,
    Delta,
    Edit,
    Event,
    Finished,
    GenerateRequest,
    Paused,
)
from rkserve.core.metrics import RouterMetrics
from rkserve.fleet.fleet import Fleet
from rkserve.fleet.measurements import CircuitBreaker
from rkserve.router.dispatch.dispatch import Dispatch, FailoverLimits
from rkserve.router.queue.admission import QueueTerms
from tests.support.boards.board_bench import SETTINGS, Bench, until
from tests.support.boards.fakes import EOS, QUIRKS, FakeEngine, Play, Script

MODEL = "m"
LETTERS = "abcdefghijklmn"
WORDS = {1000 + at: letter.encode() for at, letter in enumerate(LETTERS)}
WORDS |= {1100: b"EN", 1101: b"D", 1102: b"x ", 1200: b""}
# Characters of two and three tokens; none of these is a character by itself.
WORDS |= {3001: b"\xc3", 3002: b"\xa9", 3011: b"\xe2", 3012: b"\x82", 3013: b"\xac"}
GOES_ON = {3001: 3002, 3011: 3012, 3012: 3013}
LIKELY = [*range(1000, 1014), 1100, 1100, 1101, 1101, 1102, 1200, 3001, 3001, 3011, EOS]

BOARDS = 3  # of a site


def next_token(_: int, context: tuple[int, ...]) -> tuple[int, bytes]:
    """The model: any change of the context changes what comes."""
    if context[-1] in GOES_ON:
        token_id = GOES_ON[context[-1]]
    else:
        token_id = LIKELY[zlib.crc32(repr(context).encode()) % len(LIKELY)]
    return token_id, WORDS.get(token_id, b"")


class Engine(FakeEngine):
    """It holds text back until a character is whole, and knows nothing of runs before."""

    _held = b""

    async def _play(self, command: RunCommand, play: Play, on_token: OnToken) -> bool:
        self._held = b""
        return await super()._play(command, play, on_token)

    def _emit(self, play: Play, live: list[tuple[int, int, bytes]], on_token: OnToken) -> bool:
        if self.facts.n_batch > 1:
            return super()._emit(play, live, on_token)
        [(entry, token_id, data)] = live
        self._held += data
        waiting = _is_begun(self._held)
        text, self._held = (b"", self._held) if waiting else (self._held, b"")

        def tell(at: int, number: int, _: bytes, __: bool) -> None:
            on_token(at, number, text, waiting)

        return super()._emit(play, [(entry, token_id, data)], tell) and not waiting


def _is_begun(data: bytes) -> bool:
    """Whether it is the beginning of a character; what is none is passed on as it is."""
    return data in (b"\xc3", b"\xe2", b"\xe2\x82")


class Talking(Bench):
    """A board whose engines say what the model says."""

    async def _start(self, weights: Path | None) -> FakeEngine:
        if self.starts:
            await self.starts.pop(0)()
        engine = Engine(
            lambda _: Script([], model=next_token),
            per_run=self._per_run,
            n_batch=self._n_batch,
            quirks=self._quirks,
        )
        self.engines.append(engine)
        return engine

    def die(self) -> None:
        """Let the library end its process."""
        self.engine.die("SIGSEGV")


class Bearer(Protocol):
    """A board, and how its engine is killed."""

    board: Board

    def die(self) -> None: ...


class How(Enum):
    """How a board is lost."""

    CRASH = "the library ends its process"
    CUT = "the connection is lost, and the board lives"
    GONE = "the replica has ended"
    ENDLESS = "the stream ends, and the answer has none"
    SWALLOWED = "the connection is lost with an event on its way"


@dataclass
class Loss:
    """After so many tokens of one stay, and so many more events."""

    tokens: int
    how: How
    events: int = 0


@dataclass
class House:
    """Boards by their replicas, and what happens to those that work on a request."""

    benches: Mapping[str, Bearer]
    hooks: tuple[HookFactory, ...] = ()
    losses: list[Loss] = field(default_factory=list)  # one for each stay, in order
    opened: list[tuple[str, GenerateRequest]] = field(default_factory=list)
    forgiven: list[str] = field(default_factory=list)
    resumed: int = 0  # so many times it is lost at the word that a paused one goes on
    severed: dict[str, asyncio.Future[None]] = field(default_factory=dict)  # by replica: the next
    complete: bool = True

    def sever(self, replica: str) -> Callable[[], None]:
        """Return what cuts the next stream to that replica."""
        cut = self.severed[replica] = asyncio.get_running_loop().create_future()
        return lambda: cut.set_result(None)

    async def _until(
        self, said: AsyncGenerator[Event, None], cut: asyncio.Future[None], replica: str
    ) -> AsyncGenerator[Event, None]:
        """Pass on what comes before the cut."""
        while True:
            coming = asyncio.ensure_future(anext(said, None))
            try:
                waits_for: tuple[asyncio.Future[Any], ...] = (coming, cut)
                await asyncio.wait(waits_for, return_when="FIRST_COMPLETED")
            finally:
                if not coming.done():
                    coming.cancel()
                    await asyncio.wait({coming})
            if coming.cancelled():
                raise BoardFailed(replica, "the connection ended")
            if (event := coming.result()) is None:
                return
            yield event

    async def open(
        self, request: GenerateRequest, replica: str, take: object = None
    ) -> AsyncGenerator[Event, None]:
        self.opened.append((replica, request))
        loss = self.losses.pop(0) if self.losses else None
        tokens = events = 0
        async with aclosing(self.benches[replica].board.generate(request, self.hooks)) as said:
            cut = self.severed.pop(replica, None)
            async for event in said if cut is None else self._until(said, cut, replica):
                if event == Delta("", ()) and self.resumed:
                    self.resumed -= 1
                    yield event
                    raise BoardFailed(replica, "the connection ended")
                if loss is not None and tokens >= loss.tokens:
                    events += 1
                    if events > loss.events:
                        # What a call has done is sent before the call is answered.
                        if loss.how is How.SWALLOWED and not _is_by_call(event):
                            raise BoardFailed(replica, "the connection ended")
                        yield event
                        if self._lose(replica, loss.how):
                            return
                        loss = None
                        continue
                tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                yield event

    def _lose(self, replica: str, how: How) -> bool:
        """Lose it; True where the stream just ends."""
        if how is How.CRASH:
            self.benches[replica].die()
        elif how in (How.CUT, How.SWALLOWED):
            raise BoardFailed(replica, "the connection ended")
        elif how is How.GONE:
            raise BoardGone(replica, "its replica died")
        return how is How.ENDLESS

    async def ask(self, replica: str, method: str, *args: Any, timeout_s: float) -> Any:
        assert timeout_s > 0
        if method == "forgive":
            self.forgiven.append(replica)
            return self.benches[replica].board.forgive()
        return await getattr(self.benches[replica].board, method)(*args)

    def cache_source(self, replica: str, tokens: int) -> None:
        return None

    async def ask_all(self, *_: Any, **__: Any) -> None:
        raise AssertionError("nobody asks all")

    async def reports(self) -> list[BoardReport]:
        return [replace(b.board.report(), replica=name) for name, b in self.benches.items()]

    def has_new(self) -> bool:
        return False

    async def has_running(self) -> bool:
        return bool(self.benches)

    async def start_failure(self) -> None:
        return None

    def board(self, replica: str) -> Board:
        return self.benches[replica].board


@dataclass
class Seat:
    """A place at one of the boards."""

    replica: str
    request: GenerateRequest
    group: str = "g"
    waited_ms: float = 0.0
    expected_tokens: int = 0
    source: Any = None
    prefill_ms: float = 2.5
    ends: list[bool] = field(default_factory=list)
    movable: bool = False
    queue_ms: float = 0.0

    def leave_if_recalled(self) -> None:
        pass

    async def unless_recalled(self, work: Awaitable[Any]) -> Any:
        return await work

    def observe(self, event: Event) -> None:
        assert not self.ends

    def lost(self) -> None:
        pass  # its reports say why

    def ended(self, *, left: bool) -> None:
        self.ends.append(left)


class InTurn:
    """An usher that sends to one board after the other, whatever they have to do."""

    def __init__(self, replicas: Sequence[str]) -> None:
        self.replicas = list(replicas)
        self.seats: list[Seat] = []
        self.away: Callable[[], bool] = lambda: False  # whether nobody takes anything
        self.refusal: RkserveError = NoBoard(MODEL, "none is left")

    async def take(
        self, request: GenerateRequest, tried: dict[str, RkserveError], claim: QueueTerms
    ) -> Seat:
        assert isinstance(claim, QueueTerms)
        left = [one for one in self.replicas if one not in tried]
        if not left or self.away():
            raise self.refusal
        self.replicas.remove(left[0])
        self.replicas.append(left[0])
        self.seats.append(Seat(left[0], request))
        return self.seats[-1]

    def depths(self) -> dict[str, dict[int, int]]:
        return {}

    def waits(self, _: str) -> bool:
        return False


@dataclass
class Heard:
    """What one client got, with what was taken back applied."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    retracted: int = 0
    accepted: int = 0
    pauses: list[Paused] = field(default_factory=list)
    finished: Finished | None = None
    choice: ChoiceTokens = field(default_factory=ChoiceTokens)
    streamed: list[int] = field(default_factory=list)  # ids as a stream tells and retracts them

    def take_ids(self, delta: Delta) -> None:
        """Do as an answer that tells of ids."""
        self.choice.add(delta)
        found, void = self.choice.news()
        self.streamed = self.streamed[: len(self.streamed) - void]
        self.streamed += [token_id for token_id, _ in found]

    @property
    def token_ids(self) -> list[int]:
        """The ids of the whole answer."""
        return [token_id for token_id, _ in self.choice.chosen]

    @property
    def told(self) -> tuple[Any, ...]:
        """What must not depend on how often a board was lost."""
        assert self.finished is not None
        end = self.finished
        counts = (end.usage.prompt_tokens, end.usage.completion_tokens)
        return self.text, end.reason, counts, end.versions, [(p.by, p.tokens) for p in self.pauses]


@dataclass
class Site:
    """A Router's dispatch, and the boards that it sends to."""

    house: House
    dispatch: Dispatch
    usher: InTurn
    over: bool = False  # the answer that is listened to

    async def listen(
        self,
        request: GenerateRequest,
        paused: Callable[[int], AsyncGenerator[None, None]] | None = None,
        slow: Sequence[int] = (),
    ) -> Heard:
        """Be a client; let ``paused`` do what the n-th pause is for. A slow one reads in turns."""
        heard, turns, acts = Heard(), list(slow), list[asyncio.Task[None]]()
        self.over = False
        async with aclosing(self.dispatch.generate(request)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    heard.text = heard.text[: len(heard.text) - event.retract] + event.text
                    heard.retracted += event.retract
                    heard.ids += event.token_ids
                    heard.take_ids(event)
                elif isinstance(event, Paused):
                    heard.pauses.append(event)
                    if paused is not None:
                        acts.append(asyncio.create_task(_done(paused(len(heard.pauses)))))
                elif isinstance(event, Finished):
                    heard.finished = event
                else:
                    heard.accepted += 1
                for _ in range(turns.pop() if turns else 0):
                    await asyncio.sleep(0)
        self.over = True
        await asyncio.gather(*acts)
        assert heard.accepted == 1
        return heard

    async def holder(self, request_id: str) -> str:
        """Wait until the generation is paused on the board that this Router knows; return that.

        Raises:
            Over: it has ended. One that an edit has filled up to its limit does so without being
                resumed where its board is lost meanwhile: there is nothing left to generate.
        """
        return (await self._paused(request_id))[0]

    async def _paused(self, request_id: str) -> tuple[str, GenerationInfo]:
        while not self.over:
            _, replica = self.dispatch.fleet.running.get(request_id, ("", ""))
            if replica:
                for info in self.house.board(replica).generations():
                    if info.request_id == request_id and info.state is GenerationState.PAUSED:
                        return replica, info
            await asyncio.sleep(0.001)
        raise Over

    async def control(
        self, request_id: str, action: ControlAction, edit: Edit | None = None
    ) -> None:
        """Do it; once more where the board was lost before anybody could know.

        A generation that has other tokens by then was resumed, and is paused for another reason.
        """
        before: int | None = None
        while True:
            replica, paused = await self._paused(request_id)
            if action is ControlAction.RESUME and before not in (None, paused.tokens):
                return
            board, before = self.house.board(replica), paused.tokens
            try:
                done = await board.control(request_id.rpartition("/")[0], action, edit)
                await board.given_out(done, action)
            except StateConflict as exc:
                if exc.state != GenerationState.QUEUED.value:
                    raise
            else:
                return


def _is_by_call(event: Event) -> bool:
    """Whether somebody has edited a generation, or let it go on."""
    return isinstance(event, Delta) and (event.paused or event == Delta("", ()))


class Over(Exception):
    """The answer has ended."""


async def _done(steps: AsyncGenerator[None, None]) -> None:
    with suppress(Over):
        async for _ in steps:
            pass


@asynccontextmanager
async def site(
    count: int = BOARDS,
    *,
    hooks: tuple[HookFactory, ...] = (),
    per_run: bool = True,
    persistence: FailoverLimits | None = None,
    **settings: Any,
) -> AsyncIterator[Site]:
    """Boards that must all be well, and idle, afterwards."""
    patience = RunTimeouts(first_token_s=3.0, prefill_per_token_s=0.0, token_s=3.0, abort_s=0.5)
    usual: dict[str, Any] = {
        "context_len": 512,
        "patience": patience,
        "crash_limit": 1000,
        "vocab_size": 10_000,
    }
    rules: BoardSettings = replace(SETTINGS, **{**usual, **settings})
    made = {
        f"r{at}": Talking(
            settings=replace(rules, board_id=f"b{at}"), per_run=per_run, quirks=QUIRKS
        )
        for at in range(count)
    }
    for bench in made.values():
        await bench.board.start()
    try:
        async with sent_to(made, hooks=hooks, persistence=persistence) as here:
            yield here
    finally:
        for bench in made.values():
            await bench.board.stop()


@asynccontextmanager
async def sent_to(
    benches: Mapping[str, Bearer],
    *,
    model: str = MODEL,
    hooks: tuple[HookFactory, ...] = (),
    persistence: FailoverLimits | None = None,
) -> AsyncIterator[Site]:
    """A dispatch to boards that are there, in turn; they must be well and idle afterwards."""
    house = House(benches, hooks)
    fleet = Fleet({"g": house}, {"g": model})
    usher = InTurn(list(benches))
    rules = persistence or FailoverLimits(continuations=100)
    breaker, metrics = CircuitBreaker(), RouterMetrics(CollectorRegistry())
    dispatch = Dispatch(fleet, usher, random.Random(7), rules, breaker=breaker, metrics=metrics)
    yield Site(house, dispatch, usher)
    for bench in benches.values():
        await until(lambda bench=bench: _is_idle(bench.board))  # type: ignore[misc] # its own
    assert all(seat.ends for seat in usher.seats)


def _is_idle(board: Board) -> bool:
    report = board.report()
    return (report.running, report.queued, report.paused, report.state.value) == (0, 0, 0, "ready")
