"""What goes wrong, or is overtaken, while a board goes to sleep, sleeps or wakes; fake engines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.operations.sleep import read_facts
from rkserve.board.run.job import loop_time_s
from rkserve.board.run.supervisor import EngineSupervisor
from rkserve.board.storage.prompt_cache import CacheFingerprint, CacheStore
from rkserve.core.board_report import BoardState, GenerationState, KvReport
from rkserve.core.desired_state import ActivePause, Adoption, Desired, PauseMode, Scope, SleepLevel
from rkserve.core.errors import (
    BoardAsleep,
    BoardBehind,
    BoardFailed,
    BoardOutOfOrder,
    EngineDied,
    EngineHung,
    LoadFailed,
    RkserveError,
)
from rkserve.core.files import JsonRecord
from rkserve.core.messages import AdapterRef, ControlAction, FinishReason, Kv
from tests.support.boards.board_bench import (
    SETTINGS,
    Bench,
    Listener,
    request,
    spoken,
    talker,
    until,
)
from tests.support.boards.fakes import FakeEngine, Script, run_loop, tokens_of

LENGTH = 6
TALK = Script([], model=talker(LENGTH))
A, B = tuple(range(100, 120)), tuple(range(200, 220))
S = GenerationState
STOP = FinishReason.STOP
CACHES = {"prompt_cache_save_with_history": True}


@dataclass
class Told:
    """A board of fakes, and what it was told last."""

    bench: Bench
    epoch: int = 0

    @property
    def board(self) -> Any:
        return self.bench.board

    async def tell(self, *pauses: ActivePause) -> Adoption:
        self.epoch += 1
        adoption: Adoption = await self.board.adopt(Desired(self.epoch, pauses))
        return adoption

    async def nap(self, level: int = 1, mode: PauseMode = PauseMode.KEEP) -> Adoption:
        return await self.tell(ActivePause("nap", Scope(), mode, level=SleepLevel(level)))

    async def wake(self) -> Adoption:
        return await self.tell()

    def listen(self, *ids: int, **extra: Any) -> Listener:
        return Listener(self.board, request(*ids, max_tokens=20, **extra))

    async def in_state(self, state: BoardState) -> None:
        await until(lambda: self.bench.state is state)

    def states(self) -> list[GenerationState]:
        return [info.state for info in self.board.generations()]


async def whole(client: Listener) -> None:
    assert await client.end() == (spoken(client.asked.prompt_ids, LENGTH), STOP)


def play(
    body: Callable[[Told], Coroutine[Any, Any, None]], *scripts: Script, **limits: Any
) -> None:
    """Run ``body`` with a board whose engines talk, but for the first ``scripts``."""

    class Talkers(Bench):
        def _next(self, _: Any) -> Script:
            return self.scripts.pop(0) if self.scripts else TALK

    async def main() -> None:
        settings = replace(SETTINGS, crash_limit=100, **limits)
        bench = Talkers(*scripts, settings=settings, quirks=CACHES)
        await bench.board.start()
        try:
            await body(Told(bench))
        finally:
            await bench.board.stop()

    run_loop(main())


def store(folder: Path) -> dict[str, Any]:
    caches = CacheStore(folder / "cache", CacheFingerprint("m", "r"), 1 << 20)
    return {"caches": caches, "park_min_tokens": 10}


def gated() -> tuple[asyncio.Event, Callable[[], Awaitable[None]]]:
    gate = asyncio.Event()

    async def wait() -> None:
        await gate.wait()

    return gate, wait


# -- overtaken --------------------------------------------------------------------------------


def test_put_to_sleep_again_while_it_wakes() -> None:
    async def body(told: Told) -> None:
        client = told.listen(*A)
        await told.nap()
        gate, load = gated()
        told.bench.starts = [load]
        waking = asyncio.create_task(told.wake())
        await told.in_state(BoardState.LOADING)
        late = told.listen(*B)  # it is taken, and waits
        await until(lambda: late.accepted)
        with pytest.raises(BoardAsleep):
            await told.listen(*B, patient=False).end()
        sleeping = asyncio.create_task(told.nap(2))
        await until(lambda: told.board.report().hold == "keep")
        gate.set()
        first, second = await waking, await sleeping
        assert (first.epoch, first.level) == (second.epoch, second.level) == (3, 2)
        assert (told.bench.state, len(told.bench.engines)) == (BoardState.ASLEEP, 2)
        assert all(engine.stopped for engine in told.bench.engines)
        assert (client.text, late.text) == ("", "")
        await told.wake()
        for one in (client, late):
            await whole(one)

    play(body)


def test_a_sleep_that_waits_for_the_woken_ones_lets_them_end_first() -> None:
    async def body(told: Told) -> None:
        await told.nap()
        clients = [told.listen(*A, n) for n in range(3)]
        await until(lambda: told.board.report().queued == 3)
        gate, load = gated()
        told.bench.starts = [load]
        waking = asyncio.create_task(told.wake())
        await told.in_state(BoardState.LOADING)
        sleeping = asyncio.create_task(told.nap(mode=PauseMode.WAIT))
        await until(lambda: told.board.report().hold == "wait")
        gate.set()
        assert (await sleeping).level is SleepLevel.UNLOADED
        assert (await waking).epoch >= 2
        assert told.bench.state is BoardState.ASLEEP
        for client in clients:
            await whole(client)

    play(body)


def test_an_adapters_hold_clears_nothing_on_a_board_that_sleeps() -> None:
    async def body(told: Told) -> None:
        asleep = ActivePause("nap", Scope(), PauseMode.KEEP, level=SleepLevel.UNLOADED)
        held = ActivePause("op", Scope(adapter="x"), PauseMode.KEEP, clear_cache=True)
        await told.tell(asleep)
        await told.tell(asleep, held)
        assert told.board.report().queued == 0  # it would wait until somebody wakes the board
        await told.wake()
        await whole(told.listen(*A))

    play(body)


def test_woken_while_it_waits_for_the_end_of_a_prefill_it_does_not_unload() -> None:
    async def body(told: Told) -> None:
        gate = asyncio.Event()
        told.bench.scripts = [replace(TALK, prefill=gate)]
        client = told.listen(*A)
        await until(lambda: told.states() == [S.PREFILLING])
        sleeping = asyncio.create_task(told.nap())
        await until(lambda: told.states() == [S.PAUSED] and told.board.report().queued == 1)
        adoption = await told.wake()
        assert await sleeping == replace(
            adoption, stopped=1, latency_ms=(await sleeping).latency_ms
        )
        assert (adoption.epoch, adoption.level, adoption.held) == (2, None, False)
        assert not gate.is_set()
        gate.set()
        await whole(client)
        assert (len(told.bench.engines), told.bench.engine.stopped) == (1, False)

    play(body)


def test_woken_while_its_conversation_is_parked_it_does_not_unload(tmp_path: Path) -> None:
    async def body(told: Told) -> None:
        await whole(told.listen(*A))
        gate = asyncio.Event()
        told.bench.scripts = [replace(TALK, prefill=gate)]
        sleeping = asyncio.create_task(told.nap())
        await until(lambda: len(told.bench.engine.commands) == 2)
        waking = asyncio.create_task(told.wake())
        await until(lambda: told.board.report().hold == "")
        gate.set()
        assert (await waking).level is (await sleeping).level is None
        assert (len(told.bench.engines), told.bench.engine.stopped) == (1, False)
        await whole(told.listen(*A))

    play(body, **store(tmp_path))


def test_a_lighter_and_a_deeper_sleep_meet(tmp_path: Path) -> None:
    async def body(told: Told) -> None:
        await whole(told.listen(*A))
        one, two, three = (asyncio.create_task(told.nap(level)) for level in (1, 2, 0))
        found = [await task for task in (one, two, three)]
        assert {(adoption.epoch, adoption.level) for adoption in found} == {(3, 0)}
        assert told.bench.state is BoardState.READY
        await told.nap(2)
        await told.nap(1)
        assert (told.board.report().level, told.board.caches()) == (1, [])

    play(body, **store(tmp_path))


def test_the_same_sleep_told_twice_says_the_same(tmp_path: Path) -> None:
    async def body(told: Told) -> None:
        await whole(told.listen(*A))
        first = await told.nap()
        again = await told.nap()
        assert (first.kept_tokens, first.dropped_tokens) == (len(A) + LENGTH, 0)
        assert (again.kept_tokens, again.dropped_tokens) == (len(A) + LENGTH, 0)
        deeper = await told.nap(2)
        assert (deeper.kept_tokens, deeper.dropped_tokens) == (0, len(A) + LENGTH)
        awake = await told.wake()
        assert (awake.kept_tokens, awake.dropped_tokens) == (0, 0)

    play(body, **store(tmp_path))


# -- engines that die -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parking",
    [
        pytest.param(Script([], model=talker(1), die_at=0), id="dies"),
        pytest.param(Script(tokens_of("x"), hang_at=0, deaf=True), id="hangs"),
    ],
)
def test_an_engine_that_is_lost_while_it_parks_costs_the_cache_only(
    tmp_path: Path, parking: Script
) -> None:
    async def body(told: Told) -> None:
        await whole(told.listen(*A))
        told.bench.scripts = [parking]
        waits = told.listen(*B)
        await told.nap(0)
        adoption = await told.nap()
        assert (adoption.level, adoption.kept_tokens) == (1, 0)
        assert told.bench.state is BoardState.ASLEEP
        assert all(engine.died.done() for engine in told.bench.engines)
        await told.wake()
        for client in (waits, told.listen(*A)):
            await whole(client)

    play(body, **store(tmp_path))


def test_an_engine_that_dies_while_it_is_put_to_sleep_is_asleep() -> None:
    async def body(told: Told) -> None:
        gate = asyncio.Event()
        told.bench.scripts = [replace(TALK, prefill=gate)]
        client = told.listen(*A)
        await until(lambda: told.states() == [S.PREFILLING])
        sleeping = asyncio.create_task(told.nap())
        await until(lambda: told.board.report().queued == 1)
        told.bench.engine.die("SIGKILL")
        assert (await sleeping).level is SleepLevel.UNLOADED
        assert told.bench.state is BoardState.ASLEEP
        await told.wake()
        await whole(client)

    play(body)


def test_a_board_that_recovers_from_a_crash_sleeps_without_that_load() -> None:
    async def body(told: Told) -> None:
        gate, load = gated()
        told.bench.starts = [load]
        told.bench.engine.die("SIGSEGV")
        await told.in_state(BoardState.RECOVERING)
        client = told.listen(*A)
        await told.nap()
        assert (told.bench.state, len(told.bench.engines)) == (BoardState.ASLEEP, 1)
        assert not gate.is_set()
        await told.wake()
        await whole(client)
        assert len(told.bench.engines) == 2

    play(body)


async def test_a_quarantined_board_sleeps_at_once_and_wakes_out_of_it() -> None:
    bench = Bench(settings=replace(SETTINGS, crash_limit=1, quarantine_s=3600.0))
    told = Told(bench)
    await bench.board.start()
    bench.engine.die("SIGSEGV")
    await told.in_state(BoardState.QUARANTINED)
    assert (await told.nap()).level is SleepLevel.UNLOADED
    assert bench.state is BoardState.ASLEEP
    await told.wake()
    assert (bench.state, len(bench.engines)) == (BoardState.READY, 2)
    await bench.board.stop()


async def test_a_sleep_that_meets_a_quarantine_is_one_all_the_same() -> None:
    bench = Bench(TALK, settings=replace(SETTINGS, crash_limit=1, quarantine_s=3600.0))
    told = Told(bench)
    gate = asyncio.Event()
    bench.scripts = [replace(TALK, prefill=gate), TALK]
    await bench.board.start()
    client = told.listen(*A)
    await until(lambda: told.states() == [S.PREFILLING])
    sleeping = asyncio.create_task(told.nap())
    await until(lambda: told.board.report().queued == 1)
    bench.engine.die("SIGSEGV")
    assert (await sleeping).level is SleepLevel.UNLOADED
    assert (bench.state, len(bench.engines)) == (BoardState.ASLEEP, 1)
    await told.wake()
    assert (bench.state, len(bench.engines)) == (BoardState.READY, 2)
    await whole(client)
    await bench.board.stop()


def test_a_board_that_hangs_sleeps_once_its_engine_has_ended() -> None:
    async def body(told: Told) -> None:
        told.bench.scripts = [Script(tokens_of("x"), hang_at=0, deaf=True)]
        client = told.listen(*A)
        await until(lambda: told.bench.engine.died.done() or told.bench.state is BoardState.HUNG)
        assert (await told.nap()).level is SleepLevel.UNLOADED
        assert told.bench.state is BoardState.ASLEEP
        assert all(engine.died.done() for engine in told.bench.engines)
        with pytest.raises(EngineHung):
            await client.end()
        await told.wake()
        await whole(told.listen(*A))

    play(body)


@pytest.mark.parametrize("turns", range(8))
def test_a_recovery_that_ends_while_its_board_is_put_to_sleep_leaves_no_engine(
    tmp_path: Path, turns: int
) -> None:
    async def body(told: Told) -> None:
        gate, load = gated()
        told.bench.starts = [load]
        told.bench.engine.die("SIGSEGV")
        await told.in_state(BoardState.RECOVERING)
        client = told.listen(*A)
        sleeping = asyncio.create_task(told.nap())
        for _ in range(turns):
            await asyncio.sleep(0)
        gate.set()
        assert (await sleeping).level is SleepLevel.UNLOADED
        assert told.bench.state is BoardState.ASLEEP
        assert all(engine.died.done() for engine in told.bench.engines)
        await told.wake()
        await whole(client)

    play(body, asleep_file=tmp_path / "b.asleep")


class Nobody:
    """Depends on no engine."""

    def lose(self, error: RkserveError) -> None:
        """Nothing is lost."""

    def fail_all(self, *, spare_paused: bool = False) -> None:
        """Nobody waits."""

    def pump(self) -> None:
        """Nobody waits."""


async def test_an_engine_that_comes_when_its_board_has_failed_is_ended() -> None:
    gate, loaded = gated()
    engine = FakeEngine(lambda _: TALK)

    async def start() -> FakeEngine:
        await loaded()
        return engine

    async def broken() -> None:
        raise ZeroDivisionError("a bug")

    keeper = EngineSupervisor(SETTINGS, start, Nobody())
    starting = asyncio.create_task(keeper.start())
    await asyncio.sleep(0)
    await asyncio.wait({keeper.spawn(broken())})
    await until(lambda: keeper.state is BoardState.FAILED)
    gate.set()
    with pytest.raises(BoardOutOfOrder, match="a bug"):
        await starting
    assert (engine.stopped, keeper.state) == (True, BoardState.FAILED)
    await keeper.stop()


async def cannot_load() -> None:
    raise LoadFailed("rkllm_init returned -1")


def test_a_load_that_fails_at_the_wake_tells_everyone(tmp_path: Path) -> None:
    async def body(told: Told) -> None:
        prefill, gate = asyncio.Event(), asyncio.Event()
        told.bench.scripts = [replace(TALK, prefill=prefill)]
        stopped = told.listen(*A)
        await until(lambda: told.states() == [S.PREFILLING])
        waits = told.listen(*B)
        sleeping = asyncio.create_task(told.nap())
        await until(lambda: told.states() == [S.PAUSED, S.QUEUED])
        prefill.set()
        await sleeping
        late = told.listen(*B)
        await until(lambda: late.accepted)

        async def load() -> None:
            await gate.wait()
            await cannot_load()

        told.bench.starts = [load]
        waking = asyncio.create_task(told.wake())
        await told.in_state(BoardState.LOADING)
        probing = asyncio.create_task(
            told.board.load_adapter(AdapterRef("x", "1", "0" * 64), (1,), 2)
        )
        await until(lambda: told.board.report().queued == 4)
        gate.set()
        for lost in (waking, probing):
            with pytest.raises(BoardOutOfOrder, match="rkllm_init returned -1"):
                await lost
        for client in (stopped, waits, late):
            with pytest.raises(BoardOutOfOrder, match="rkllm_init returned -1"):
                await client.end()
        assert told.bench.state is BoardState.FAILED
        with pytest.raises(BoardOutOfOrder):
            told.board.check()  # Ray replaces the replica
        with pytest.raises(BoardOutOfOrder, match="rkllm_init returned -1"):
            await told.board.adopt(Desired(told.epoch))  # whoever asks again is told again
        with pytest.raises(BoardOutOfOrder, match="rkllm_init returned -1"):
            await told.tell()  # it is not awake
        held = await told.tell(ActivePause("op", Scope(), PauseMode.KEEP))
        assert held.held  # and rests, surely: it keeps nobody from a pause
        with pytest.raises(BoardOutOfOrder, match="rkllm_init returned -1"):
            await told.tell()
        with pytest.raises(BoardOutOfOrder):
            await told.nap()

    play(body, asleep_file=tmp_path / "b.asleep")


# -- restarted --------------------------------------------------------------------------------


def test_a_board_that_starts_again_asleep_loads_nothing_until_it_is_told(tmp_path: Path) -> None:
    mark = tmp_path / "state" / "b.asleep"

    async def goes(told: Told) -> None:
        await told.wake()
        await told.nap()

    async def comes_back(told: Told) -> None:
        board = told.board
        assert told.bench.engines == []
        report = board.report()
        assert (report.state, report.release, report.level) == (BoardState.JOINING, "1.3.0", 1)
        board.check()
        with pytest.raises(BoardBehind):
            await told.listen(*A).end()
        with pytest.raises(BoardAsleep):
            await board.load_adapter(AdapterRef("x", "1", "0" * 64), (1,), 2)
        assert (await told.nap(2)).level is SleepLevel.DROPPED
        assert told.bench.state is BoardState.ASLEEP
        client = told.listen(*A)
        await until(lambda: client.accepted)
        assert told.bench.engines == []
        await told.wake()
        assert len(told.bench.engines) == 1
        assert not mark.exists()
        await whole(client)

    async def is_awake(told: Told) -> None:
        assert len(told.bench.engines) == 1

    for body in (goes, comes_back, is_awake):
        play(body, asleep_file=mark, governed=True)


def test_a_mark_of_nobody_or_damaged_keeps_no_board_from_loading(tmp_path: Path) -> None:
    mark = tmp_path / "b.asleep"

    async def loads(told: Told) -> None:
        assert (len(told.bench.engines), told.bench.state) == (1, BoardState.READY)

    async def sleeps(told: Told) -> None:
        await told.nap()

    play(sleeps, asleep_file=mark)
    play(loads, asleep_file=mark)  # nobody would ever wake it
    for damaged in ("", "{}", "[]", '{"release": 1}', "\0", mark.read_text().replace("true", "3")):
        mark.write_text(damaged)
        assert JsonRecord(mark).read(read_facts) is None
        assert not mark.exists()
    mark.mkdir()
    assert JsonRecord(mark).read(read_facts) is None
    JsonRecord(mark).remove()


def test_a_board_sleeps_where_that_cannot_be_noted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    async def body(told: Told) -> None:
        client = told.listen(*A)
        assert (await told.nap()).level is SleepLevel.UNLOADED
        await told.wake()
        await whole(client)

    play(body, asleep_file=tmp_path / "file" / "b.asleep")


# -- asked while asleep -----------------------------------------------------------------------


def test_what_needs_the_engine_is_refused_and_what_needs_none_is_done(tmp_path: Path) -> None:
    async def body(told: Told) -> None:
        board = told.board
        await board.build_cache("rules", B)
        await whole(told.listen(*A))
        await told.nap(2)
        empty = KvReport("b", "m", (0,), capacity=64)
        assert board.kv() == empty
        assert await board.clear_kv(keep_system_prompt=False) == replace(empty, status="cleared")
        await board.refresh("it is reclaimed")
        for asked in (
            board.load_adapter(AdapterRef("x", "1", "0" * 64), (1,), 2),
            board.build_cache("more", A),
        ):
            with pytest.raises(BoardAsleep):
                await asked
        assert [entry.name for entry in board.caches()] == ["rules"]  # files that users made stay
        board.check()
        assert len(told.bench.engines) == 1
        client = told.listen(*B, 7, use_cache="rules")
        await told.wake()
        await whole(client)
        assert client.finished is not None
        assert client.finished.usage.cached_tokens == len(B)
        assert await board.delete_cache("rules")

    play(body, **store(tmp_path))


def test_errands_that_wait_are_told_that_the_board_sleeps(tmp_path: Path) -> None:
    async def body(told: Told) -> None:
        board, gate = told.board, asyncio.Event()
        told.bench.scripts = [replace(TALK, prefill=gate)]
        client = told.listen(*A)
        await until(lambda: told.states() == [S.PREFILLING])
        building = asyncio.create_task(board.build_cache("more", B))
        await until(lambda: board.report().queued == 1)
        sleeping = asyncio.create_task(told.nap())
        await until(lambda: board.report().queued == 2)
        clearing = asyncio.create_task(board.clear_kv(keep_system_prompt=False))
        refreshing = asyncio.create_task(board.refresh("it is reclaimed"))
        await until(lambda: board.report().queued == 4)
        gate.set()
        await sleeping
        with pytest.raises(BoardAsleep):
            await building
        assert (await clearing).status == "pending"
        await refreshing
        assert (board.report().queued, len(told.bench.engines)) == (0, 1)
        await told.wake()
        await whole(client)

    play(body, **store(tmp_path))


def test_who_would_not_wait_is_sent_on_at_every_level() -> None:
    async def body(told: Told) -> None:
        for level in (0, 1, 2):
            await told.nap(level)
            with pytest.raises(BoardAsleep):
                await told.listen(*A, patient=False).end()
        await told.wake()
        await whole(told.listen(*A, patient=False))

    play(body)


def test_a_report_says_how_long_nobody_has_used_the_board() -> None:
    async def body(told: Told) -> None:
        board = told.board
        await until(lambda: board.report().idle_s > 0.02)
        await told.nap()
        client = told.listen(*A)
        await until(lambda: client.accepted)
        assert board.report().idle_s == 0.0  # somebody waits
        await client.hang_up()
        await until(lambda: board.report().idle_s > 0.02)
        began_s = loop_time_s()
        await told.wake()
        # Else who is woken would be put to sleep again at once.
        assert board.report().idle_s <= loop_time_s() - began_s

    play(body)


# -- the end ----------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["asleep", "falling asleep", "waking"])
async def test_a_replica_that_shuts_down_says_so_to_all(when: str) -> None:
    bench = Bench(settings=SETTINGS)
    told = Told(bench)
    await bench.board.start()
    gate = asyncio.Event()
    bench.scripts = [replace(TALK, prefill=gate)]
    client = told.listen(*A)
    await until(lambda: told.states() == [S.PREFILLING])
    moving = asyncio.create_task(told.nap())
    await until(lambda: told.states() == [S.PAUSED])
    if when != "falling asleep":
        gate.set()
        await moving
    if when == "waking":
        _, load = gated()
        bench.starts = [load]
        moving = asyncio.create_task(told.wake())
        await told.in_state(BoardState.LOADING)
    else:
        await until(lambda: bench.board.report().queued == (when == "falling asleep"))
    await bench.board.stop()
    if when == "asleep":
        assert (await moving).level is SleepLevel.UNLOADED
    else:
        with pytest.raises(BoardFailed):
            await moving
    with pytest.raises(BoardOutOfOrder, match="shuts down"):
        await client.end()
    assert all(engine.died.done() for engine in bench.engines)


def test_the_stand_in_of_an_engine_does_nothing() -> None:
    async def body(told: Told) -> None:
        client = told.listen(*A)
        await told.nap()
        live = told.board.slot.live
        assert (live.alive, live.context.ids, live.adapters.keys) == (False, (), ())
        for refused in (live.engine.call("clear_kv"), live.call("kv_sizes")):
            with pytest.raises(EngineDied, match="unloaded"):
                await refused
        await live.engine.stop()
        assert await live.engine.kill()
        [info] = told.board.generations()
        assert (info.state, info.kv) in ((S.QUEUED, None), (S.PAUSED, Kv.RECOMPUTED))
        [info] = await told.board.control("same for all", ControlAction.ABORT)
        assert (await client.end())[1] is FinishReason.ABORT

    play(body)
