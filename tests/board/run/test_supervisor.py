"""When the engine of a board dies, hangs or does not come back: nothing leaves the board wedged."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import pytest

from rkserve.board.rules.hang_limits import RecentTimes, RunTimeouts
from rkserve.board.run.loaded_engine import SECOND_LOOK_S
from rkserve.board.run.supervisor import OPEN, SICK, TRANSITIONS, BoardEvent, CrashLog, advance
from rkserve.core.board_report import BoardState
from rkserve.core.errors import (
    BoardFailed,
    EngineDied,
    EngineHung,
    LoadFailed,
    Misuse,
    RkserveError,
    RunFailed,
)
from rkserve.core.messages import Delta, FinishReason
from rkserve.native.runtime import RunEnd
from tests.support.boards import own_time
from tests.support.boards.board_bench import (
    PATIENCE,
    PLAIN,
    SETTINGS,
    Bench,
    Listener,
    answer,
    board_test,
    collect,
    request,
    text_of,
    until,
)
from tests.support.boards.fakes import Script, tokens_of

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize(
    ("misread", "eos_ids", "warns"),
    [(True, frozenset(), True), (True, frozenset({2}), False), (False, frozenset(), False)],
)
async def test_a_folder_without_end_tokens_is_warned_about_where_the_runtime_misreads_them(
    misread: bool, eos_ids: frozenset[int], warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    quirks = {"eos_uint32_misread": misread}
    async with Bench(settings=replace(SETTINGS, eos_ids=eos_ids), quirks=quirks).running():
        assert ("set eos_token_ids" in caplog.text) is warns


# -- failures ---------------------------------------------------------------------------------


@board_test(lambda: Bench(replace(PLAIN, end=RunEnd.FAILED)))
async def test_a_run_that_fails_fails_alone(bench: Bench) -> None:
    with pytest.raises(RunFailed):
        await answer(bench.board)
    assert (bench.state, len(bench.engines)) == (BoardState.READY, 1)


@board_test(lambda: Bench(Script(tokens_of(*"abcd"), die_at=2)))
async def test_a_crash_is_told_after_the_text_before_it_and_the_queue_survives(b: Bench) -> None:
    texts: list[str] = []

    async def consume() -> None:
        async for event in b.board.generate(request()):
            if isinstance(event, Delta):
                texts.append(event.text)

    crashed = asyncio.create_task(consume())
    await asyncio.sleep(0)
    queued = asyncio.create_task(answer(b.board))
    with pytest.raises(EngineDied, match="SIGSEGV"):
        await crashed
    assert "".join(texts) == "ab"
    assert await queued == ("Hello", FinishReason.STOP)
    report = b.board.report()
    assert (report.state, report.reason, report.engine_starts) == (BoardState.READY, "", 2)
    assert report.last_recovery == "SIGSEGV"


@board_test(Bench)
async def test_an_idle_engine_that_dies_is_replaced(bench: Bench) -> None:
    bench.engine.die("the engine process ended (killed by SIGKILL)")
    events = await collect(bench.board.generate(request()))  # in the same turn of the loop
    assert text_of(events) == "Hello"
    assert len(bench.engines) == 2
    assert bench.board.report().crashes == (("SIGKILL", 1),)


HANGS = [
    pytest.param(Script([], prefill=None, hang_at=0), "the first token", id="no callback ever"),
    pytest.param(Script(tokens_of("a", "b"), hang_at=1), "the next token", id="a hang in decode"),
    pytest.param(
        Script(tokens_of("a!", *"bcdefgh"), deaf=True, hang_at=5),
        "the end of the run after the abort",
        id="an abort that is ignored",
    ),
]


@pytest.mark.parametrize(("script", "missing"), HANGS)
async def test_a_hang_fails_health_with_the_reason_then_the_board_serves_again(
    script: Script, missing: str
) -> None:
    # A long patience for the first token must not be the patience for the second.
    first_s = 60.0 if script.tokens else 0.2
    patience = replace(PATIENCE, first_token_s=first_s)
    if not script.tokens:
        script = replace(script, tokens=tokens_of("a"))
    settings = replace(SETTINGS, patience=patience)
    async with Bench(script, settings=settings).running() as bench:
        task = asyncio.create_task(answer(bench.board, stop=("!",)))
        await until(lambda: bench.state is BoardState.HUNG)
        with pytest.raises(BoardFailed, match=f"hung: {missing} did not come"):
            bench.board.check()
        with pytest.raises(EngineHung, match=missing):
            await task
        await until(lambda: bench.state is BoardState.READY)
        bench.board.check()
        assert len(bench.engines) == 2
        assert bench.board.report().crashes == (("hung", 1),)


@board_test(lambda: Bench(Script(tokens_of(*"ab"), hang_at=1)))
async def test_an_engine_that_survives_sigkill_leaves_the_board_hung(bench: Bench) -> None:
    bench.engine.immortal = True
    running = asyncio.create_task(answer(bench.board))
    await asyncio.sleep(0)
    queued = asyncio.create_task(answer(bench.board))
    with pytest.raises(EngineHung):
        await running
    with pytest.raises(BoardFailed, match="hung"):
        await queued  # not kept waiting for a board that will not come back
    assert bench.state is BoardState.HUNG
    with pytest.raises(BoardFailed, match="hung"):
        await answer(bench.board)
    bench.engine.immortal = False


@pytest.mark.parametrize("scripts", [[], [Script(tokens_of("a"), hang_at=0)]], ids=["idle", "busy"])
async def test_an_engine_without_a_sign_of_life_is_ended(scripts: list[Script]) -> None:
    patience = replace(PATIENCE, first_token_s=60)
    settings = replace(SETTINGS, silence_timeout_s=0.05, patience=patience)
    async with Bench(*scripts, settings=settings).running() as bench:
        running = [asyncio.create_task(answer(bench.board)) for _ in scripts]
        await asyncio.sleep(0.02)
        bench.engine.silence_s = 1.0
        for task in running:
            with pytest.raises(EngineHung, match="no sign of life"):
                await task
        await until(lambda: len(bench.engines) == 2)
        assert bench.board.report().crashes == (("silent", 1),)


@pytest.mark.parametrize(
    ("looks", "engines"),
    [
        pytest.param([1.0, 0.0, 1.0, 0.0], 1, id="heard of at the second look, twice"),
        pytest.param([1.0, 1.0], 2, id="silent at both looks"),
    ],
)
async def test_only_a_silence_at_both_looks_ends_an_engine(
    looks: list[float], engines: int
) -> None:
    """The event loop was what slept: the beats were there, only not read yet."""
    async with Bench(settings=replace(SETTINGS, silence_timeout_s=0.2)).running() as bench:
        bench.engine.silences = scripted = [*looks, 0.0]
        # The look after the last of them finds the board past whatever they led to.
        await until(lambda: not scripted or len(bench.engines) > 1)
        await until(lambda: bench.state is BoardState.READY)
        assert len(bench.engines) == engines


async def test_a_token_that_is_only_not_read_yet_is_no_hang() -> None:
    first = Script(tokens_of("x", "y"), prefill=asyncio.Event(), pace_s=1.5 * SECOND_LOOK_S)
    async with Bench(first).running() as bench:
        running = asyncio.create_task(answer(bench.board))
        await until(lambda: bench.board.report().running == 1)
        await asyncio.sleep(0)
        own_time.sleep(1.1 * PATIENCE.first_token_s)  # it is the loop that sleeps
        assert first.prefill is not None
        asyncio.get_running_loop().call_later(0.02, first.prefill.set)
        assert await running == ("xy", FinishReason.STOP)
        assert len(bench.engines) == 1


# -- limits from the measured speed -------------------------------------------------------------

USUAL = replace(SETTINGS, patience=RunTimeouts())
STEADY = Script(tokens_of(*"abcdefghijklmnop"), pace_s=0.1)


def heard(listener: Listener, text: str) -> bool:
    return listener.text.endswith(text)


async def tried(bench: Bench, runs: int = RecentTimes.FEW + 1) -> None:
    """Let the board learn its speed; the first prompt after a load does not count."""
    bench.scripts = [STEADY] * runs + bench.scripts
    for _ in range(runs):
        assert (await answer(bench.board, max_tokens=20))[0] == "abcdefghijklmnop"


@pytest.mark.parametrize(
    ("hang_at", "limit_s"), [(0, 4.5), (1, 3.5), (9, 3.5)], ids=["prefill", "first", "later"]
)
async def test_a_board_that_knows_its_speed_gives_up_a_hang_in_seconds(
    hang_at: int, limit_s: float
) -> None:
    async with Bench(replace(STEADY, hang_at=hang_at), settings=USUAL).running() as bench:
        await tried(bench)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(EngineHung, match="the limit is"):
            await answer(bench.board, max_tokens=20)
        assert loop.time() - began_s - 0.1 * hang_at <= limit_s
        await until(lambda: bench.state is BoardState.READY)


async def test_a_fresh_engine_is_known_by_the_last_but_for_its_first_prompt() -> None:
    hang = replace(STEADY, hang_at=9)
    first = replace(STEADY, stalls={0: 25.0})
    async with Bench(hang, first, hang, settings=USUAL).running() as bench:
        await tried(bench)
        with pytest.raises(EngineHung):
            await answer(bench.board, max_tokens=20)
        await until(lambda: bench.state is BoardState.READY)
        assert (await answer(bench.board, max_tokens=20))[0] == "abcdefghijklmnop"
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(EngineHung):
            await answer(bench.board, max_tokens=20)
        assert asyncio.get_running_loop().time() - began_s <= 4.5
        await until(lambda: bench.state is BoardState.READY)
        assert len(bench.engines) == 3


async def test_an_engine_that_stands_still_for_two_seconds_while_throttled_is_kept() -> None:
    slow = replace(STEADY, pace_s=0.3, stalls={0: 2.0, 1: 2.0, 7: 2.0, 15: 2.0})
    stopped = replace(STEADY, pace_s=0.3, stalls={4: 2.0})
    async with Bench(slow, *[stopped] * 20, settings=USUAL).running() as bench:
        await tried(bench)
        assert (await answer(bench.board, max_tokens=20))[0] == "abcdefghijklmnop"
        for _ in range(20):  # a client leaves while the engine stands still
            listener = Listener(bench.board, request(max_tokens=20))
            await until(partial(heard, listener, "d"))
            await listener.hang_up()
        await until(lambda: bench.board.report().running == 0)
        assert (len(bench.engines), bench.board.report().crashes) == (1, ())


@pytest.mark.parametrize("kept_s", [2.0, 60.0])
@pytest.mark.parametrize("pace_s", [0.1, 1.5], ids=["fast", "slow"])
async def test_a_board_that_stood_still_itself_blames_no_engine(
    kept_s: float, pace_s: float
) -> None:
    """With a machine that stands still the engine does, too: it needs its time afterwards."""
    script = replace(STEADY, pace_s=pace_s)
    async with Bench(script, settings=USUAL).running() as bench:
        await tried(bench)
        running = asyncio.create_task(answer(bench.board, max_tokens=20))
        for _ in range(4):
            await asyncio.sleep(1.2)
            bench.engine.silences = [kept_s]
            own_time.sleep(kept_s)
        assert (await running)[0] == "abcdefghijklmnop"
        assert len(bench.engines) == 1


async def test_a_call_that_does_not_return_is_given_up_in_seconds_too() -> None:
    async with Bench(settings=USUAL).running() as bench:
        await tried(bench)
        bench.engine.call_gate = asyncio.Event()
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(EngineHung, match="clear_kv did not return within"):
            await bench.board.clear_kv(keep_system_prompt=False)
        assert asyncio.get_running_loop().time() - began_s <= 6.5
        await until(lambda: bench.state is BoardState.READY)


async def test_a_handle_that_fails_run_after_run_gets_a_fresh_engine() -> None:
    failing = Script([], end=RunEnd.FAILED)
    async with Bench(failing, failing, failing, Script(tokens_of("x"))).running() as bench:
        for _ in range(3):
            with pytest.raises(RunFailed):
                await answer(bench.board)
        await until(lambda: bench.state is BoardState.READY)
        assert (await answer(bench.board))[0] == "x"
        assert len(bench.engines) == 2
        assert "3 runs in a row failed" in bench.board.report().last_recovery
        assert bench.board.report().crashes == (("runs_failed", 1),)


async def test_three_crashes_quarantine_the_board_until_it_has_cooled() -> None:
    crash = Script(tokens_of("a"), die_at=0)
    async with Bench(crash, crash, crash).running() as bench:
        for _ in range(2):
            with pytest.raises(EngineDied):
                await answer(bench.board)
        with pytest.raises(RkserveError):
            await answer(bench.board)
        await until(lambda: bench.state is BoardState.QUARANTINED)
        bench.board.check()  # well enough for Ray: a fresh replica would forget the quarantine
        with pytest.raises(BoardFailed, match="quarantined"):
            await bench.board.generate(request()).__anext__()
        await until(lambda: bench.state is BoardState.READY)


async def _load_fails() -> None:
    raise LoadFailed("out of NPU memory")


async def _cannot_spawn() -> None:
    raise BlockingIOError(11, "Resource temporarily unavailable")


async def _bug() -> None:
    raise KeyError("a bug")


RELOADS = [
    pytest.param(_load_fails, "out of NPU memory", id="the load fails"),
    pytest.param(_cannot_spawn, "temporarily unavailable", id="no process to be had"),
    pytest.param(_bug, "internal error: KeyError", id="a bug"),
]


@pytest.mark.parametrize(("reload", "words"), RELOADS)
async def test_a_board_that_cannot_recover_fails_its_health_and_all_who_wait(
    reload: Callable[[], Awaitable[None]], words: str
) -> None:
    async with Bench().running() as bench:
        bench.starts = [reload]
        bench.engine.die("SIGSEGV")
        with pytest.raises(BoardFailed, match=words):
            await answer(bench.board)
        with pytest.raises(BoardFailed, match=f"failed: .*{words}"):
            bench.board.check()


@pytest.mark.parametrize(
    ("load", "error"),
    [(_load_fails, LoadFailed), (_cannot_spawn, BlockingIOError), (_bug, KeyError)],
)
async def test_a_board_that_cannot_start_says_why(
    load: Callable[[], Awaitable[None]], error: type[Exception]
) -> None:
    bench = Bench()
    bench.starts = [load]
    with pytest.raises(error):
        await bench.board.start()
    assert bench.state is BoardState.FAILED
    with pytest.raises(BoardFailed, match="failed: "):
        bench.board.check()
    await bench.board.stop()


@board_test(lambda: Bench(replace(PLAIN, raises=TypeError("a bug"))))
async def test_a_bug_in_a_run_is_told_and_does_not_wedge_the_board(bench: Bench) -> None:
    with pytest.raises(BoardFailed, match="internal error: TypeError"):
        await answer(bench.board)
    await until(lambda: bench.state is BoardState.READY)
    assert len(bench.engines) == 2  # the run might still have been going on


# -- stop() in every state --------------------------------------------------------------------


async def test_a_board_that_is_not_loaded_or_has_stopped_takes_no_request() -> None:
    bench = Bench()
    with pytest.raises(BoardFailed, match="loading"):
        await answer(bench.board)
    await bench.board.start()
    await bench.board.stop()
    await bench.board.stop()
    with pytest.raises(BoardFailed, match="stopped"):
        await answer(bench.board)


async def test_stopping_while_the_model_is_loaded_leaves_no_engine_behind() -> None:
    bench, gate = Bench(), asyncio.Event()
    bench.starts = [gate.wait]  # type: ignore[list-item] # its result is not looked at
    starting = asyncio.create_task(bench.board.start())
    await asyncio.sleep(0)
    await bench.board.stop()
    gate.set()
    with pytest.raises(BoardFailed, match="stopped"):
        await starting
    assert bench.engine.stopped


STATES = [
    pytest.param([], lambda _: None, BoardState.READY, id="idle"),
    pytest.param([Script(tokens_of("a"), hang_at=0)], lambda _: None, BoardState.READY, id="busy"),
    pytest.param(
        [], lambda bench: bench.engine.die("SIGSEGV"), BoardState.RECOVERING, id="recover"
    ),
    pytest.param(
        [Script(tokens_of("a"), hang_at=0)],
        lambda bench: setattr(bench.engine, "silence_s", 99.0),
        BoardState.HUNG,
        id="hung",
    ),
]


@pytest.mark.parametrize(("scripts", "hurt", "state"), STATES)
async def test_stop_ends_the_engine_and_everyone_who_waits(
    scripts: list[Script], hurt: Callable[[Bench], None], state: BoardState
) -> None:
    settings = replace(SETTINGS, silence_timeout_s=0.05, patience=RunTimeouts(abort_s=60))
    bench = Bench(*scripts, settings=settings)
    await bench.board.start()
    waiting = [asyncio.create_task(answer(bench.board)) for _ in range(2)] if scripts else []
    await asyncio.sleep(0.02)
    bench.starts = [asyncio.Event().wait]  # type: ignore[list-item] # the reload never ends
    hurt(bench)
    await until(lambda: bench.state is state)
    await bench.board.stop()
    assert bench.engine.died.done()
    assert set(bench.engine.aborts) == ({1} if scripts else set())  # a run cannot end in order
    assert bench.state is BoardState.STOPPED
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, BoardFailed)


# -- what was not its fault -------------------------------------------------------------------


CRASHES = Script(tokens_of("a"), die_at=0)
RESTS = replace(SETTINGS, crash_limit=2, quarantine_s=3600.0)


@board_test(lambda: Bench(CRASHES, CRASHES, settings=RESTS))
async def test_a_quarantine_for_what_is_forgiven_ends_at_once(bench: Bench) -> None:
    for _ in range(2):
        with pytest.raises(EngineDied):
            await answer(bench.board)
        await until(lambda: bench.state is not BoardState.RECOVERING)
    assert bench.state is BoardState.QUARANTINED
    bench.board.forgive()
    await until(lambda: bench.state is BoardState.READY)


@board_test(lambda: Bench(CRASHES, CRASHES, settings=RESTS))
async def test_a_crash_that_is_forgiven_does_not_count_with_the_next(bench: Bench) -> None:
    for _ in range(2):
        with pytest.raises(EngineDied):
            await answer(bench.board)
        await until(lambda: bench.state is BoardState.READY)
        bench.board.forgive()
    bench.board.forgive()  # once more does no harm


@board_test(
    lambda: Bench(
        replace(CRASHES, die_at=None, hang_at=0),
        settings=replace(RESTS, crash_limit=1),
    )
)
async def test_a_hang_is_forgiven_before_it_is_over(bench: Bench) -> None:
    with pytest.raises(EngineHung):
        await answer(bench.board)
    assert bench.state is BoardState.HUNG
    bench.board.forgive()
    await until(lambda: bench.state is BoardState.READY)


# -- the table of states ---------------------------------------------------------------------

S, E = BoardState, BoardEvent


@pytest.mark.parametrize(
    ("events", "state"),
    [
        pytest.param([E.LOADED], S.READY, id="it loads"),
        pytest.param([E.LOAD_FAILED], S.FAILED, id="it cannot load"),
        pytest.param([E.LOADED, E.ENGINE_DIED], S.RECOVERING, id="a crash"),
        pytest.param([E.LOADED, E.ENGINE_DIED, E.LOADED], S.READY, id="a crash, and back"),
        pytest.param([E.LOADED, E.WATCHDOG], S.HUNG, id="a hang"),
        pytest.param([E.LOADED, E.WATCHDOG, E.ENGINE_ENDED, E.LOADED], S.READY, id="hung, ended"),
        pytest.param(
            [E.LOADED, E.ENGINE_DIED, E.TOO_MANY_CRASHES, E.COOLED, E.LOADED], S.READY, id="cooled"
        ),
        pytest.param([E.LOADED, E.BROKE], S.FAILED, id="a bug of ours"),
        pytest.param([E.STOP], S.STOPPED, id="stopped while it loads"),
        pytest.param([E.LOADED, E.SLEEP], S.ASLEEP, id="asleep"),
        pytest.param([E.LOADED, E.SLEEP, E.WAKE, E.LOADED], S.READY, id="awake again"),
        pytest.param([E.LOADED, E.SLEEP, E.WAKE, E.LOAD_FAILED], S.FAILED, id="not to be woken"),
        pytest.param([E.SLEEP, E.WAKE, E.LOADED], S.READY, id="asleep from the start"),
        pytest.param([E.LOADED, E.ENGINE_DIED, E.SLEEP], S.ASLEEP, id="asleep after a crash"),
    ],
)
def test_a_board_lives(events: list[BoardEvent], state: BoardState) -> None:
    now = S.LOADING
    for event in events:
        now = advance(now, event)
    assert now is state


@pytest.mark.parametrize(
    ("state", "event"),
    [pair for pair in itertools.product(S, E) if pair not in TRANSITIONS],
    ids=lambda value: value.name,
)
def test_what_the_table_does_not_list_is_refused(state: BoardState, event: BoardEvent) -> None:
    with pytest.raises(Misuse, match=event.value):
        advance(state, event)


# "lost" is the Router's word; "joining" is what a board that is well reports until it is told, and
# "fetching" what a replica reports that has no engine to supervise yet.
OF_A_BOARD = [state for state in S if state not in (S.LOST, S.JOINING, S.FETCHING)]


@pytest.mark.parametrize("state", OF_A_BOARD)
def test_every_state_can_be_stopped(state: BoardState) -> None:
    assert advance(state, E.STOP) is S.STOPPED


def test_a_board_takes_requests_only_where_it_can_still_answer_them() -> None:
    assert not OPEN & SICK
    resting = {state for state in OF_A_BOARD if state not in OPEN | SICK}
    assert resting == {S.QUARANTINED, S.STOPPED}


def test_crashes_are_too_many_only_within_the_window() -> None:
    crashes = CrashLog(limit=3, window_s=60)
    assert [crashes.crashed(now_s) for now_s in (0, 30, 60, 61, 62)] == [False] * 3 + [True] * 2
