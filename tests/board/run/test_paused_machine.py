"""Random use of the controls of a real board: nothing is lost, mixed up, stuck or left behind.

A state machine starts answers and pauses, edits, resumes, aborts and leaves them, in any state and
at any moment, against a real engine process over the simulated runtime in strict mode, where any
misuse of the library ends the engine. ``--cycles`` says how many pauses, ``--machine-seed`` repeats
what was random; both are printed.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import random
import signal
import time
import traceback
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import wraps
from pathlib import Path
from threading import Barrier
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from rkserve.board.answer.generation import Generation
from rkserve.board.board import Board
from rkserve.board.rules.generations import judge
from rkserve.core.board_report import GenerationInfo, GenerationState
from rkserve.core.errors import GenerationNotFound, StateConflict
from rkserve.core.messages import (
    ControlAction,
    Delta,
    Edit,
    FinishReason,
    GenerateRequest,
    Kv,
    Splice,
)
from tests.support.boards.board_bench import Listener, text_of, until
from tests.support.boards.fakes import run_loop
from tests.support.boards.interrupt_bench import Asking, Talk, at_once
from tests.support.sim.sim_board import (
    CALM,
    FOLDER,
    GREEDY,
    TOKENIZER,
    Belongings,
    Sim,
    ask,
    chat,
    released,
    words,
)

T = TypeVar("T")
log = logging.getLogger(__name__)

PAUSE, EDIT, RESUME, ABORT = ControlAction
OPERATION_S = 60.0
# Answers of a dozen words are to be there in some ten milliseconds, and still be interrupted.
PACE = 0.01
CROWD = 10  # answers in one example
STEPS = 60  # of one example
EXAMPLES = 5  # of one call of hypothesis
WARM = 0.1  # of the cycles
GROWTH_KB = 5 * 1024
S = GenerationState
GOES_ON = (S.QUEUED, S.PREFILLING, S.RESUMING)


class World:
    """One board in a loop that runs only while a rule waits for something."""

    def __init__(self, place: Path, release: str, n_batch: int) -> None:
        self.sim = Sim(place, release, sampling=GREEDY, noted=0)
        self.adapter = self.sim.adapter("Pirate")
        self.counts: Counter[str] = Counter()
        self.numbers = itertools.count(1)
        self.slowest_s, self.slowest = 0.0, ""
        self.log: deque[str] = deque(maxlen=2 * STEPS)
        self.failures: list[str] = []
        self.talks: list[Talk] = []
        self._loop = asyncio.new_event_loop()
        self._unheard: list[Any] = []
        self._loop.set_exception_handler(lambda _, context: self._unheard.append(context))
        self._stack = AsyncExitStack()
        board = self.sim.board(
            patience=CALM,
            n_batch=n_batch,
            batch_window_s=0.002,
            queue_limit=4 * CROWD,
            pause_hold_s=0.02,
            vocab_size=TOKENIZER.get_vocab_size(),
        )
        self.sim.pace(PACE)
        self._loop.set_default_executor(_full())
        self.board: Board = self._loop.run_until_complete(self._stack.enter_async_context(board))

    @property
    def story(self) -> list[str]:
        """The last steps before the first that failed, and how that did."""
        return [*self.log, *self.failures[:1]]

    def do(self, what: str, work: Awaitable[T]) -> T:
        """Do one operation. It answers in time, with a result or an error."""
        if not self.failures:
            self.log.append(what)
        started_s = time.monotonic()
        try:
            return self._loop.run_until_complete(asyncio.wait_for(work, OPERATION_S))
        finally:
            took_s = time.monotonic() - started_s
            if took_s > self.slowest_s:
                self.slowest_s, self.slowest = took_s, what

    def close(self) -> None:
        self._loop.run_until_complete(self._stack.aclose())
        gc.collect()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()
        assert not self._unheard, self._unheard

    # -- what is done -------------------------------------------------------------------------

    def start(self, asking: Asking, rolls: random.Random) -> None:
        async def start() -> Talk:
            talk = asking.talk(self.board, next(self.numbers), rolls)
            await asyncio.sleep(0)
            return talk

        self.talks.append(self.do(f"start {asking}", start()))
        self.counts["requests"] += 1

    def state(self, talk: Talk) -> GenerationState:
        info = self.look(talk)
        return info.state if info is not None else S.ENDED

    def look(self, talk: Talk) -> GenerationInfo | None:
        """What the board says of it now."""

        async def look() -> GenerationInfo | None:
            return talk.info()

        return self._loop.run_until_complete(look())

    def control(
        self, talk: Talk, action: ControlAction, edit: Edit | None = None
    ) -> GenerationInfo | None:
        """Ask for it; it is granted exactly where the table says so. None where it was not."""
        return self.do(f"{action.value} {talk.id} {edit or ''}", self._control(talk, action, edit))

    async def _control(
        self, talk: Talk, action: ControlAction, edit: Edit | None
    ) -> GenerationInfo | None:
        before = talk.state
        allowed = _allows(before, action)
        refused: StateConflict | None = None
        try:
            [after] = await self.board.control(talk.id, action, edit)
        except StateConflict as exc:
            refused = exc
        if refused is not None:
            self.counts[f"{action.value} refused"] += 1
            ended_first = allowed and action is PAUSE and refused.state == "ended"
            assert ended_first or (not allowed and refused.state == before.value), (before, refused)
            return None
        assert allowed, (before, action)
        if edit is not None:
            talk.edited(edit)  # before it reads on
        self.counts[action.value] += 1
        return after

    def pause(self, talk: Talk) -> None:
        info = self.control(talk, PAUSE)
        assert info is None or info.state is S.PAUSED
        if info is not None:
            self.counts[f"kv {info.kv and info.kv.value}"] += 1

    def edit(self, talk: Talk, rolls: random.Random, *, bad: bool) -> None:
        outcome = self.do(f"edit {talk.id} {'badly' * bad}", talk.edit(rolls, bad=bad))
        if outcome is None:
            self.control(talk, EDIT, Edit())  # it may have paused by itself since
            return
        self.counts[outcome] += 1
        info = self.look(talk)
        if info is not None:
            self.do("catch up", talk.caught_up(info.tokens))

    def abort(self, talk: Talk) -> None:
        talk.aborted |= self.control(talk, ABORT) is not None

    # -- the end of an example ----------------------------------------------------------------

    def settle(self) -> None:
        """Everybody goes on, and gets what is due to them; then nothing is left."""
        for talk in self.talks:
            while not talk.over:
                if self.state(talk) is S.PAUSED:
                    self.control(talk, RESUME)
                self.do(f"wait for {talk.id} to change", _until_other(talk))
            self.do(f"check {talk.id}", talk.check())
            self.counts["edited to the end"] += talk.ledger is not None and not talk.aborted
        self.talks.clear()
        self.do("come to rest", self._rest())

    async def _rest(self) -> None:
        def busy() -> int:
            report = self.board.report()
            return report.running + report.queued + report.paused

        await until(lambda: not busy())
        assert self.board.generations() == []
        assert self.board.report().engine_starts == 1, "a violation has ended the engine"


def _full() -> ThreadPoolExecutor:
    """A pool that has all of its threads already, so that none comes later."""
    pool, size = ThreadPoolExecutor(2), 2
    gate = Barrier(size + 1)
    for _ in range(size):
        pool.submit(gate.wait)
    gate.wait()
    return pool


async def _until_other(talk: Talk) -> None:
    """Wait until it can be seen that the talk goes on."""
    before = (talk.state, len(talk.ids))
    await until(
        lambda: talk.over or talk.state is S.PAUSED or before != (talk.state, len(talk.ids))
    )


def _allows(state: GenerationState, action: ControlAction) -> bool:
    try:
        judge(state, action)
    except StateConflict:
        return False
    return True


PAUSED = {True: (S.PAUSED,), False: ()}
ALIVE = (*GOES_ON, S.GENERATING)
# What a rule chooses one of the crowd by.
WHO = st.integers(0, CROWD - 1)
ROLLS = st.integers(0, 2**32 - 1).map(random.Random)
ASKING = st.fixed_dictionaries(
    {
        "native": st.booleans(),
        "limit": st.sampled_from([None, None, None, 1, 9, 30]),
        "kind": st.sampled_from(["plain", "plain", "plain", "stop", "multi_byte", "pause_on"]),
    }
)


def noted(step: Callable[..., None]) -> Callable[..., None]:
    """Keep how the step failed: when hypothesis repeats it the board is another one."""

    @wraps(step)
    def noting(self: Machine, **drawn: Any) -> None:
        try:
            step(self, **drawn)
        except BaseException:
            self.world.failures.append(traceback.format_exc())
            raise

    return noting


class Machine(RuleBasedStateMachine):
    """The rules. The board outlives the examples, so that what one leaves behind is seen."""

    world: World

    @property
    def talks(self) -> list[Talk]:
        return self.world.talks

    def who(self, at: int, *states: GenerationState) -> Talk:
        """One of the crowd; one that is in such a state, if there is any."""
        fitting = [talk for talk in self.talks if states and self.world.state(talk) in states]
        crowd = fitting or self.talks
        return crowd[at % len(crowd)]

    @precondition(lambda self: len(self.talks) < CROWD)
    @rule(asked=ASKING, adapted=st.booleans(), rolls=ROLLS)
    @noted
    def start(self, asked: dict[str, Any], adapted: bool, rolls: random.Random) -> None:
        kind = asked["kind"]
        asking = Asking(
            native=asked["native"],
            limit=None if kind == "multi_byte" else asked["limit"],
            adapter=self.world.adapter if adapted else None,
            stop=kind == "stop",
            multi_byte=kind == "multi_byte",
            pause_on=kind == "pause_on",
        )
        self.world.start(asking, rolls)

    @rule(wait_s=st.sampled_from([0.0, 0.0005, 0.002, 0.01]))
    @noted
    def let_time_pass(self, wait_s: float) -> None:
        self.world.do("wait", asyncio.sleep(wait_s))

    @precondition(lambda self: self.talks)
    @rule(at=WHO)
    @noted
    def pause(self, at: int) -> None:
        self.world.pause(self.who(at))

    @precondition(lambda self: self.talks)
    @rule(at=WHO, more_s=st.sampled_from([0.0, 0.001, 0.004]), edits=st.lists(ROLLS, max_size=2))
    @noted
    def pause_in_the_middle(self, at: int, more_s: float, edits: list[random.Random]) -> None:
        talk = self.who(at, *ALIVE)

        async def begun() -> None:
            await until(lambda: talk.state not in GOES_ON)
            await asyncio.sleep(more_s)

        self.world.do(f"wait for {talk.id}", begun())
        self.world.pause(talk)
        for rolls in edits:
            if talk.editable:
                self.world.edit(talk, rolls, bad=False)

    @precondition(lambda self: self.talks)
    @rule(at=WHO, rolls=ROLLS)
    @noted
    def edit(self, at: int, rolls: random.Random) -> None:
        talk = self.who(at, S.PAUSED)
        if talk.editable:
            self.world.edit(talk, rolls, bad=False)

    @precondition(lambda self: self.talks)
    @rule(at=WHO, rolls=ROLLS)
    @noted
    def edit_badly(self, at: int, rolls: random.Random) -> None:
        self.world.edit(self.who(at, *PAUSED[at % 4 > 0]), rolls, bad=True)

    @precondition(lambda self: self.talks)
    @rule(at=WHO)
    @noted
    def resume(self, at: int) -> None:
        self.world.control(self.who(at, *PAUSED[at % 4 > 0]), RESUME)

    @precondition(lambda self: self.talks)
    @rule(at=WHO)
    @noted
    def resume_twice_at_once(self, at: int) -> None:
        talk, board = self.who(at, *PAUSED[at % 4 > 0]), self.world.board

        async def both() -> bool:
            paused = talk.state is S.PAUSED
            if paused:
                at_once(board.control(talk.id, RESUME))
            with pytest.raises(StateConflict):
                at_once(board.control(talk.id, RESUME))
            return paused

        paused = self.world.do(f"resume {talk.id} twice", both())
        self.world.counts[RESUME.value] += paused

    @precondition(lambda self: self.talks)
    @rule(at=WHO, kind=st.sampled_from(["any", "paused", "none"]))
    @noted
    def abort(self, at: int, kind: str) -> None:
        if kind != "none":  # others would hardly come to anything
            self.world.abort(self.who(at, *PAUSED[kind == "paused"]))

    @precondition(lambda self: self.talks)
    @rule(at=WHO, kind=st.sampled_from(["any", "paused", "none", "none"]))
    @noted
    def hang_up(self, at: int, kind: str) -> None:
        if kind == "none":
            return
        talk = self.who(at, *PAUSED[kind == "paused"])
        self.world.do(f"hang up {talk.id}", talk.hang_up())
        self.world.counts["hang-ups"] += talk.hung_up

    @precondition(lambda self: self.talks)
    @rule(what=st.sampled_from(["size", "clear", "spare", "stranger", "none", "none"]))
    @noted
    def the_cache_and_a_stranger(self, what: str) -> None:
        board = self.world.board
        if what == "size":
            report = board.kv()
            assert 0 <= sum(report.entries) <= report.capacity
        elif what in ("clear", "spare"):
            report = self.world.do("clear", board.clear_kv(keep_system_prompt=what == "spare"))
            assert report.status in ("cleared", "pending")
            self.world.counts["clears"] += 1
        elif what == "stranger":
            with pytest.raises(GenerationNotFound):
                self.world.do("stranger", board.control("nobody", PAUSE))

    @noted
    def teardown(self) -> None:
        """The example is over: so is everything that it began."""
        self.world.settle()


@pytest.mark.parametrize(
    ("n_batch", "release"),
    [
        pytest.param(1, "1.3.0", marks=pytest.mark.long),
        (1, "1.2.3"),
        pytest.param(2, "1.2.3", marks=pytest.mark.long),
        (4, "1.3.0"),
        pytest.param(8, "1.3.0", marks=pytest.mark.long),
    ],
)
def test_whatever_is_done_at_random_everyone_gets_what_is_theirs_and_nothing_is_left(
    tmp_path: Path,
    n_batch: int,
    release: str,
    pytestconfig: pytest.Config,
    figures: Callable[[str], None],
) -> None:
    cycles = pytestconfig.getoption("--cycles")
    base = pytestconfig.getoption("--machine-seed")
    world = World(tmp_path, release, n_batch)
    machine = type("Machine", (Machine,), {"world": world})
    rounds = itertools.count(base)
    started_s = time.monotonic()
    engine = world.board.slot.live.engine.pid

    def play(examples: int) -> None:
        how = settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            phases=(Phase.generate,),  # a board that went wrong is no place to try again
            suppress_health_check=tuple(HealthCheck),
        )
        number = next(rounds)
        try:
            run_state_machine_as_test(seed(number)(machine), settings=how)
        except BaseException:
            log.exception(
                "n_batch %d on %s, seed %d: %s", n_batch, release, number, "\n".join(world.story)
            )
            raise

    try:
        while world.counts["pause"] < cycles * WARM:  # until what is made once was made
            play(EXAMPLES)
        before = [released(), Belongings.of(engine)]
        while world.counts["pause"] < cycles:
            play(EXAMPLES)
        after = [released(), Belongings.of(engine)]
    finally:
        world.close()
    assert {world.counts["pause"] >= cycles, world.counts["edit"] > 0} == {True}
    grown_kb = [now.resident_kb - then.resident_kb for now, then in zip(after, before, strict=True)]
    figures(
        f"n_batch {n_batch} on {release}: {world.counts['pause']} pauses from seed {base} in "
        f"{time.monotonic() - started_s:.0f} s; grown by {grown_kb} kB (tests, engine), "
        f"threads {[b.threads for b in after]}, files {[b.files for b in after]}; slowest "
        f"operation {world.slowest_s:.2f} s ({world.slowest}); {dict(world.counts)}"
    )
    for now, then in zip(after, before, strict=True):
        assert (now.threads, now.files) == (then.threads, then.files)
        assert now.resident_kb - then.resident_kb < GROWTH_KB


# -- what it has found, each as the shortest way to it ---------------------------------------------


async def test_an_adapter_may_follow_a_clear_that_spares_the_system_prompt(tmp_path: Path) -> None:
    sim = Sim(tmp_path, sampling=GREEDY)
    adapter = sim.adapter("Pirate")
    async with sim.board(patience=CALM) as board:
        await ask(board, chat("Repeat after me: one"))
        await board.clear_kv(keep_system_prompt=True)
        said = await ask(board, chat("Repeat after me: two"), adapter=adapter)
        assert text_of(said) == "two"


def test_what_follows_an_answer_that_was_taken_back_as_a_whole_is_given_out() -> None:
    asked = GenerateRequest("r/0", "m", (1, 2), 8)
    generation = Generation(asked, frozenset({0}), runtime_counts=True)
    generation.accept(5, b"five")
    assert generation.take() == Delta("five", (5,))
    generation.interrupted()
    generation.apply(Edit(replace_last=1), kv_positions=0, context_len=64)
    assert generation.take() == Delta("", (), retract=4, splice=Splice(keep=0, slots=()))
    generation.accept(6, b"six")
    assert generation.take() == Delta("six", (6,))


@pytest.mark.parametrize("n_batch", [1, 2])
async def test_a_character_that_is_not_whole_is_made_again_also_in_a_batch(
    tmp_path: Path, n_batch: int
) -> None:
    said = "Grüße, 你好 🍵!"
    sim = Sim(tmp_path, sampling=GREEDY)
    async with sim.board(patience=CALM, n_batch=n_batch, batch_window_s=0.0) as board:
        for count in range(1, len(words(said))):
            held = sim.tap.hold(count)
            request = GenerateRequest("r/0", FOLDER.id, chat(f"Repeat after me: {said}"), 100)
            listener = Listener(board, request)
            await held
            await board.control("r", PAUSE)
            await board.control("r", RESUME)
            assert await listener.end() == (said, FinishReason.STOP)


def test_an_abort_that_overtakes_a_resumption_leaves_no_paused_handle(tmp_path: Path) -> None:
    """The run is aborted before it begins: the board must still drain what is paused."""

    async def main() -> None:
        sim = Sim(tmp_path, sampling=GREEDY)
        adapter = sim.adapter("Pirate")
        async with sim.board(patience=CALM) as board:
            await overtaken(sim, board)
            # Nothing but a resumption may be asked of a paused handle.
            said = await ask(board, chat("Repeat after me: two"), adapter=adapter)
            assert text_of(said) == "two"
            assert board.report().engine_starts == 1

    async def overtaken(sim: Sim, board: Board) -> None:
        tap = sim.tap
        request = GenerateRequest(
            "r/0", FOLDER.id, chat("Write 64 tokens"), 64, sampling=GREEDY, native_pause=True
        )
        held = sim.hold(3)
        listener = Listener(board, request)
        await held
        [info] = await board.control("r", PAUSE)
        assert info.kv is Kv.KEPT
        # The engine finds all of it at once: the run waits behind the calls, the abort does not.
        engine = board.report().engine_pid
        os.kill(engine, signal.SIGSTOP)
        busy = [tap.engine.call("kv_sizes") for _ in range(1000)]
        await board.control("r", RESUME)
        await until(lambda: len(tap.commands) == 2)
        await board.control("r", ABORT)
        os.kill(engine, signal.SIGCONT)
        await asyncio.gather(*busy)
        assert (await listener.end())[1] is FinishReason.ABORT
        assert tap.ends[1].end is None

    run_loop(main())
