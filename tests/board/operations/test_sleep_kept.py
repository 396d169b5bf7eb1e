"""What a sleep keeps of the KV caches and what it drops, and engines that are lost on the way."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing
from pathlib import Path

import pytest

from rkserve.core.board_report import BoardState, GenerationState
from rkserve.core.desired_state import SleepLevel
from rkserve.core.errors import BoardOutOfOrder
from rkserve.core.messages import (
    ControlAction,
    Delta,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Kv,
    Paused,
)
from tests.support.boards.board_bench import Listener, until
from tests.support.boards.holding import LINE, PACE, SAYING, Governed, in_turn
from tests.support.boards.sleeping import (
    DROPPED,
    LEVELS,
    LONG,
    SLOW,
    SLOWLY,
    UNLOADED,
    control,
    held_at,
    in_state,
    is_over,
    listen,
    nap,
    play,
    sleeps,
    still,
    wake,
    whole,
)
from tests.support.sim.sim_board import FOLDER, GREEDY, both_releases, chat, words

S = GenerationState
MORE = words(" And what else?")


def parked_files(place: Path) -> list[Path]:
    return list((place / "cache").rglob("*.kv"))


def turn_after(client: Listener) -> tuple[int, ...]:
    return (*client.asked.prompt_ids, *client.ids, *MORE)


async def finished(client: Listener) -> Finished:
    await client.end()
    assert client.finished is not None
    return client.finished


@pytest.mark.promise("Sleep", "Level 1 parks the KV cache, or reports that it is dropped")
@both_releases
def test_a_conversation_is_restored_after_level_1_or_the_answer_says_that_it_is_dropped(
    tmp_path: Path, release: str
) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        # It ends by itself: one that 1.2.3 has to abort at a limit leaves nothing that is known.
        client = listen(told, chat(f"Repeat after me: {' '.join([SAYING] * 12)}"), 400)
        assert (await client.end())[1] is FinishReason.STOP
        await until(lambda: told.board.report().running == 0)
        held = told.board.report().kv_positions
        assert held >= len(client.asked.prompt_ids)
        adoption = await nap(told)
        kept = release == "1.3.0"
        assert (adoption.kept_tokens, adoption.dropped_tokens) == ((held, 0) if kept else (0, held))
        assert len(parked_files(tmp_path)) == kept
        await wake(told)
        assert told.board.report().kv_positions == 0
        prompt = turn_after(client)
        again = listen(told, prompt, 10)
        usage, timings = (await finished(again)).usage, again.finished.timings  # type: ignore[union-attr] # it has ended
        if kept:
            assert usage.cached_tokens >= 0.99 * held
            assert timings.prefill_tokens == len(prompt) - usage.cached_tokens
        else:
            assert (usage.cached_tokens, timings.prefill_tokens) == (0, len(prompt))
        await whole(calm, again)

    play(tmp_path, body, release)


@pytest.mark.promise("Sleep", "Level 2 drops everything but the requests")
@both_releases
def test_nothing_of_a_kv_cache_survives_level_2(tmp_path: Path, release: str) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        clients = [told.ask(f"{n} {LONG}", 20) for n in range(2)]
        for client in clients:
            await client.end()
        await until(lambda: told.board.report().running == 0)
        await told.board.caching.settled()
        parked = release == "1.3.0"  # the first one made way for the second
        assert len(parked_files(tmp_path)) == parked
        held = told.board.report().kv_positions
        adoption = await nap(told, DROPPED)
        assert (adoption.kept_tokens, adoption.dropped_tokens) == (0, held)
        assert (parked_files(tmp_path), told.board.caches()) == ([], [])
        await wake(told)
        for client in clients:
            prompt = turn_after(client)
            again = listen(told, prompt, 10)
            answer = await finished(again)
            assert (answer.usage.cached_tokens, answer.timings.prefill_tokens) == (0, len(prompt))
            await whole(calm, again)

    play(tmp_path, body, release)


@pytest.mark.promise("Sleep", "Level 2 drops everything but the requests")
def test_what_was_parked_at_level_1_goes_at_level_2_and_what_a_user_named_stays(
    tmp_path: Path,
) -> None:
    async def body(told: Governed, _: Governed) -> None:
        await told.board.build_cache("rules", words(SAYING))
        client = told.ask(LONG, 20)
        await client.end()
        await until(lambda: told.board.report().running == 0)
        adoption = await nap(told)
        held = adoption.kept_tokens
        assert len(parked_files(tmp_path)) == 2
        deeper = await nap(told, DROPPED)
        assert (deeper.kept_tokens, deeper.dropped_tokens) == (0, held)
        assert [entry.name for entry in told.board.caches()] == ["rules"]
        assert len(parked_files(tmp_path)) == 1
        again = await nap(told)
        assert (again.level, again.kept_tokens, again.dropped_tokens) == (UNLOADED, 0, held)
        await wake(told)

    play(tmp_path, body)


@both_releases
@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
def test_a_run_that_is_cut_short_by_a_sleep_counts_as_dropped(
    tmp_path: Path, release: str, native: bool
) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        told.sim.pace(SLOWLY)
        client = told.ask(LONG, 200, native_pause=native)
        await told.said(client, 5)
        light = await nap(told, SleepLevel.PAUSED)
        told.sim.pace(PACE)
        [info] = told.board.generations()
        total = light.kept_tokens + light.dropped_tokens
        # What the runtime has paused itself lacks its last token, which it is yet to be given.
        assert info.context_tokens - 1 <= total <= info.context_tokens
        assert (light.dropped_tokens == 0) is native
        deep = await nap(told)
        assert deep.kept_tokens == 0
        assert deep.dropped_tokens == (total if native else 0)  # the hold had cost it already
        await wake(told)
        answer = await finished(client)
        assert answer.timings.prefill_tokens >= 2 * len(client.asked.prompt_ids)  # computed twice
        await whole(calm, client)

    play(tmp_path, body, release)


@both_releases
def test_a_stream_is_told_the_truth_about_its_kv_cache(tmp_path: Path, release: str) -> None:
    async def body(told: Governed, _: Governed) -> None:
        for level in LEVELS:
            events: list[Event] = []
            told.sim.pace(SLOWLY)
            request = GenerateRequest(
                f"{level:d}/0", FOLDER.id, words(SAYING), 200, sampling=GREEDY, native_pause=True
            )

            async def read(asked: GenerateRequest, into: list[Event]) -> None:
                async with aclosing(told.board.generate(asked)) as stream:
                    async for event in stream:
                        into.append(event)

            reading = asyncio.create_task(read(request, events))
            await until(lambda: sum(isinstance(e, Delta) for e in events) >= 3)  # noqa: B023
            await nap(told, level)
            told.sim.pace(PACE)
            await until(lambda: any(isinstance(e, Paused) for e in events))  # noqa: B023
            [paused] = [event for event in events if isinstance(event, Paused)]
            kept = Kv.KEPT if level is SleepLevel.PAUSED else Kv.RECOMPUTED
            assert (paused.by, paused.kv) == ("cluster", kept)
            [info] = told.board.generations()
            assert (info.state, info.kv) == (S.PAUSED, kept)
            await wake(told)
            await reading
            assert isinstance(events[-1], Finished)

    play(tmp_path, body, release)


@pytest.mark.promise(
    "Sleep", "Half a character, half a stop string, hooks, tools, adapters, batches too"
)
@pytest.mark.promise("KV cache", "Adapters do not share KV caches")
@in_turn
def test_adapters_and_places_of_a_batch_begin_anew(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        for level in (UNLOADED, DROPPED):
            clients = [told.ask(f"{SAYING} {n}", 30, line=LINE) for n in range(n_batch + 1)]
            for client in clients[:-1]:
                await told.said(client, 3)
            loads = len([name for name in told.sim.tap.called if name == "load_adapter"])
            assert loads == 1
            pid = told.board.report().engine_pid
            await sleeps(told, pid, await nap(told, level), level)
            assert set(told.board.slot.live.entries) == {0}
            await still(clients)
            await wake(told)
            assert told.board.report().adapters in ((), (told.versions["v1"].ref.key,))
            for client in clients:
                await whole(calm, client)
            await is_over(told)
            assert list(told.sim.tap.called).count("load_adapter") == 1  # by the new engine
            answer = await finished(told.ask(f"{level} {SAYING}", 5))
            assert answer.usage.cached_tokens == 0
            await until(lambda: told.board.report().running == 0)

    play(tmp_path, body, release, n_batch, park=False)


# -- engines that are lost --------------------------------------------------------------------


def children() -> set[int]:
    """Return the processes that this one has started and that are there."""
    found = set()
    for place in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (place / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:  # it has just ended
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(place.name))
    return found


@pytest.mark.executes_engine  # finds it among the children of this process
@in_turn
@pytest.mark.parametrize("how", ["refused", "crashed", "killed"])
def test_a_load_that_fails_at_the_wake_is_an_error_for_everyone(
    tmp_path: Path, release: str, n_batch: int, how: str
) -> None:
    async def body(told: Governed, _: Governed) -> None:
        held = await held_at(told, 3)
        clients = [told.ask(f"{SAYING} {n}", 200) for n in range(n_batch + 1)]
        await held
        await nap(told)
        before = children()
        told.sim.fault({"refused": "init_fail", "crashed": "init_segv", "killed": "init_hang"}[how])
        waking = asyncio.create_task(wake(told))
        await told_in_state(told, BoardState.LOADING)
        if how == "killed":
            await until(lambda: len(children() - before) == 1)
            for pid in children() - before:
                os.kill(pid, signal.SIGKILL)
        with pytest.raises(BoardOutOfOrder, match="failed"):
            await waking
        for client in clients:
            with pytest.raises(BoardOutOfOrder):
                await client.end()
        with pytest.raises(BoardOutOfOrder):
            told.board.check()
        assert told.board.report().state is BoardState.FAILED

    play(tmp_path, body, release, n_batch)


async def told_in_state(told: Governed, state: BoardState) -> None:
    later = (BoardState.FAILED, BoardState.READY)
    await until(lambda: told.board.report().state in (state, *later))


@in_turn
def test_an_engine_that_is_killed_while_it_is_put_to_sleep_costs_nobody_an_answer(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        told.sim.pace(SLOW)
        await told.hold()
        clients = [told.ask(f"{LONG} {n}", 20) for n in range(n_batch + 1)]
        await until(lambda: told.board.report().queued == n_batch + 1)
        await told.release()
        for client in clients[:n_batch]:
            await in_state(told, client, S.PREFILLING)
        pid = told.board.report().engine_pid
        sleeping = asyncio.create_task(nap(told))
        for client in clients[:n_batch]:
            await in_state(told, client, S.PAUSED)
        if told.board.report().engine_pid == pid:  # else the prefill was over first
            told.kill()
        told.sim.pace(PACE)
        assert (await sleeping).level is UNLOADED
        assert told.board.report().state is BoardState.ASLEEP
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)  # now there is none to be killed
        await still(clients)
        await wake(told)
        for client in clients:
            await whole(calm, client)
        await is_over(told)

    play(tmp_path, body, release, n_batch)


def test_a_client_that_is_paused_inside_the_runtime_makes_way_for_the_sleep(tmp_path: Path) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        told.sim.pace(SLOWLY)
        mine = told.ask(max_tokens=300, native_pause=True)
        await told.said(mine, 5)
        await control(told, mine, ControlAction.PAUSE)
        told.sim.pace(PACE)
        queued = told.ask(f"{SAYING} queued", 20)
        pid = told.board.report().engine_pid
        await sleeps(told, pid, await nap(told), UNLOADED)
        await still([mine, queued])
        await wake(told)
        await whole(calm, queued)
        assert told.state(mine) is S.PAUSED
        await control(told, mine, ControlAction.RESUME)
        await whole(calm, mine)

    play(tmp_path, body, pause_hold_s=3600.0)
