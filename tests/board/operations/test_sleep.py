"""A board that is put to sleep with requests in flight: all of them go on as if nothing was."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from rkserve.board.answer.hooks import Action, Continue, Decoded, Hook
from rkserve.core.board_report import BoardState, GenerationState
from rkserve.core.desired_state import ActivePause, PauseMode, Scope, SleepLevel
from rkserve.core.errors import EngineAsleep, EnginePaused
from rkserve.core.messages import ControlAction, Edit, FinishReason, GenerateRequest, Kv
from tests.support.boards.board_bench import until
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
    said,
    sleeps,
    still,
    wake,
    whole,
)
from tests.support.sim.sim_board import chat, words

S = GenerationState


@pytest.mark.promise("Sleep", "In-flight requests survive every level, at any progress")
@in_turn
def test_whatever_progress_requests_have_they_go_on_after_any_sleep(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    """Several at once: some mid-decode, some queued, one its client's, some with an adapter."""

    async def body(told: Governed, calm: Governed) -> None:
        for level in LEVELS:
            starts = told.board.report().engine_starts
            held = await held_at(told, 3)
            first = told.ask(max_tokens=300)
            await held
            await control(told, first, ControlAction.PAUSE)
            clients = [told.ask(f"{SAYING} {n}", 200) for n in range(n_batch)]
            adapted = [told.ask(f"{SAYING} {n}", 60, line=LINE) for n in range(2)]
            native = told.ask(f"{SAYING} native", 60, native_pause=True)
            told.sim.pace(SLOWLY)
            await until(lambda: len(clients[0].ids) >= 5)  # noqa: B023 # it is awaited here
            pid = told.board.report().engine_pid
            adoption = await nap(told, level)
            told.sim.pace(PACE)
            there = [first, *clients, *adapted, native]
            await sleeps(told, pid, adoption, level)
            late = told.ask(f"{SAYING} late", 20)
            await still([*there, late])
            assert {info.kv for info in told.board.generations()} <= {Kv.RECOMPUTED, Kv.KEPT, None}
            if level is not SleepLevel.PAUSED:
                assert Kv.KEPT not in {info.kv for info in told.board.generations()}
            awake = await wake(told)
            assert (awake.level, awake.held) == (None, False)
            assert told.board.report().state is BoardState.READY
            assert told.state(first) is S.PAUSED
            await control(told, first, ControlAction.RESUME)
            for client in (*there, late):
                await whole(calm, client)
            await is_over(told)
            loads = told.board.report().engine_starts - starts
            assert loads == (level is not SleepLevel.PAUSED)

    play(tmp_path, body, release, n_batch)


@in_turn
@pytest.mark.parametrize("native", [False, True], ids=["plain", "native"])
def test_what_is_in_its_prefill_is_computed_again_after_the_wake(
    tmp_path: Path, release: str, n_batch: int, native: bool
) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        for level in LEVELS:
            told.sim.pace(SLOW)
            await told.hold()
            clients = [told.ask(f"{LONG} {n}", 30, native_pause=native) for n in range(n_batch)]
            await until(lambda: told.board.report().queued == n_batch)
            await told.release()
            for client in clients:
                await in_state(told, client, S.PREFILLING)
            pid = told.board.report().engine_pid
            sleeping = asyncio.create_task(nap(told, level))
            for client in clients:
                await in_state(told, client, S.PAUSED)
            told.sim.pace(PACE)
            await sleeps(told, pid, await sleeping, level)
            await still(clients)
            await wake(told)
            for client in clients:
                await whole(calm, client)
            await is_over(told)

    play(tmp_path, body, release, n_batch)


class Shouts:
    """Shows every tenth piece in capitals, and counts them: it has to go on where it was."""

    def __init__(self) -> None:
        self._seen = 0

    def on_piece(self, piece: Decoded) -> Action:
        self._seen += 1
        return Continue(show=piece.text.upper() if self._seen % 10 == 1 else None)

    def on_end(self) -> str:
        return f" ({self._seen} pieces)"


def shouts(_: GenerateRequest) -> Hook:
    return Shouts()


@pytest.mark.promise(
    "Sleep", "Half a character, half a stop string, hooks, tools, adapters, batches too"
)
@in_turn
def test_half_a_character_is_held_back_over_a_sleep(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        prompt = chat("Greet me in many languages")
        ids = await ids_of(calm, prompt, 48)
        halves = [n for n in range(1, len(ids)) if said(ids[:n]).endswith("\ufffd")]
        assert len(halves) >= len(LEVELS)
        for level, half in zip(LEVELS, halves, strict=False):
            held = await held_at(told, half)
            client = listen(told, prompt, 48)
            await held
            await nap(told, level)
            assert client.ids == ids[: len(client.ids)]
            assert "\ufffd" not in client.text
            assert len(client.text) < len(said(ids[:half]))
            await wake(told)
            await whole(calm, client)

    play(tmp_path, body, release, n_batch)


@pytest.mark.promise(
    "Sleep", "Half a character, half a stop string, hooks, tools, adapters, batches too"
)
@in_turn
def test_half_a_stop_string_is_matched_over_a_sleep(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        ids = await ids_of(calm, words(SAYING), 40)
        text = said(ids)
        for level, at in zip(LEVELS, (8, 15, 22), strict=True):
            before, after = len(said(ids[:at])), len(said(ids[: at + 2]))
            begins = next(b for b in range(before - 1, 0, -1) if text.find(text[b:after]) == b)
            held = await held_at(told, at)
            client = told.ask(SAYING, 40, stop=(text[begins:after],))
            await held
            await nap(told, level)
            assert text[:begins].startswith(client.text)  # what may be its beginning is held back
            await wake(told)
            assert await client.end() == (text[:begins], FinishReason.STOP)
            await whole(calm, client)

    play(tmp_path, body, release, n_batch)


async def ids_of(calm: Governed, prompt: tuple[int, ...], count: int) -> list[int]:
    client = listen(calm, prompt, count)
    await client.end()
    return client.ids


@pytest.mark.promise(
    "Sleep", "Half a character, half a stop string, hooks, tools, adapters, batches too"
)
@in_turn
def test_a_hook_counts_on_over_a_sleep(tmp_path: Path, release: str, n_batch: int) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        for level in LEVELS:
            held = await held_at(told, 9)
            client = listen(told, words(SAYING), 40, shouts)
            await held
            await nap(told, level)
            await still([client])
            await wake(told)
            await whole(calm, client, shouts)

    play(tmp_path, body, release, n_batch)


@pytest.mark.promise(
    "Sleep", "Half a character, half a stop string, hooks, tools, adapters, batches too"
)
@in_turn
def test_a_request_pauses_for_its_tool_after_a_sleep_and_sleeps_on_in_that_pause(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    """What asks for a tool pauses by itself; the tool's result comes while the board sleeps."""

    async def body(told: Governed, calm: Governed) -> None:
        ids = await ids_of(calm, words(SAYING), 40)
        tool = ids[20]
        first, result = ids.index(tool) + 1, words(" The answer of the tool is 42.")
        assert first > 6
        rest_of_it = await ids_of(calm, (*words(SAYING), *ids[:first], *result), 40 - first)
        for level in LEVELS:
            held = await held_at(told, 6)
            client = told.ask(SAYING, 40, pause_on_ids=(tool,))
            await held
            await nap(told, level)
            await wake(told)
            await in_state(told, client, S.PAUSED)
            await until(lambda: len(client.ids) >= first)  # noqa: B023 # it is awaited here
            assert client.ids == ids[:first]
            await nap(told, level)
            await control(told, client, ControlAction.EDIT, Edit(ids=result, injected=True))
            await wake(told)
            assert told.state(client) is S.PAUSED
            while not client.task.done():  # it may ask for the tool again
                if told.state(client) is S.PAUSED:
                    await control(told, client, ControlAction.RESUME)
                await asyncio.sleep(0.001)
            assert client.ids == [*ids[:first], *rest_of_it]

    play(tmp_path, body, release, n_batch)


@in_turn
def test_what_is_edited_on_a_sleeping_board_goes_on_from_that(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        for level in LEVELS:
            told.sim.pace(SLOWLY)
            client = told.ask(max_tokens=200, native_pause=True)
            await told.said(client, 6)
            await nap(told, level)
            told.sim.pace(PACE)
            await control(told, client, ControlAction.PAUSE)
            there = list(client.ids)
            edit = Edit(replace_last=2, ids=words(" and the tea"), text=" and the tea")
            await control(told, client, ControlAction.EDIT, edit)
            await control(told, client, ControlAction.RESUME)  # it goes on when the board wakes
            await until(lambda: client.text.endswith(edit.text))  # noqa: B023 - awaited in here
            await still([client])
            await wake(told)
            await client.end()
            context = (*client.asked.prompt_ids, *there[:-2], *edit.ids)
            answer = [*there[:-2], *edit.ids]
            answer += await ids_of(calm, context, 200 - len(answer))
            assert client.text == said(answer)

    play(tmp_path, body, release, n_batch)


@in_turn
def test_a_pause_becomes_a_sleep_and_a_sleep_becomes_deeper_and_lighter(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        told.sim.pace(SLOWLY)
        clients = [told.ask(f"{SAYING} {n}", 200, native_pause=True) for n in range(n_batch + 1)]
        await told.said(clients[0], 5)
        kept = (await told.hold()).kept
        told.sim.pace(PACE)
        assert kept == (n_batch == 1)
        pid = told.board.report().engine_pid
        for level, loads in ((0, 1), (1, 1), (2, 1), (1, 1), (0, 2), (2, 2), (0, 3)):
            adoption = await nap(told, SleepLevel(level))
            report = told.board.report()
            await sleeps(told, report.engine_pid or pid, adoption, SleepLevel(level))
            assert report.engine_starts == loads
            await still(clients)
            kinds = {info.kv for info in told.board.generations() if info.state is S.PAUSED}
            if loads > 1 or level:
                assert kinds <= {Kv.RECOMPUTED}
            else:
                assert (Kv.KEPT in kinds) == (kept == 1)
        await told.hold()  # the plain pause goes on where the sleep is over
        await still(clients)
        await told.release()
        for client in clients:
            await whole(calm, client)
        await is_over(told)

    play(tmp_path, body, release, n_batch)


@in_turn
def test_asleep_under_abort_ends_all_and_takes_nothing_new(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        for level in LEVELS:
            held = await held_at(told, 4)
            clients = [told.ask(f"{SAYING} {n}", 200) for n in range(n_batch + 2)]
            await held
            await until(
                lambda: told.board.report().running + told.board.report().queued == n_batch + 2
            )
            pid = told.board.report().engine_pid
            adoption = await nap(told, level, PauseMode.ABORT)
            assert adoption.aborted == n_batch + 2
            await sleeps(told, pid, adoption, level)
            assert [(await c.end())[1] for c in clients] == [FinishReason.ABORT] * (n_batch + 2)
            with pytest.raises(EngineAsleep, match="Asleep") as refused:
                await told.ask().end()
            assert isinstance(refused.value, EnginePaused)
            assert refused.value.code == "engine_paused"
            await wake(told)
            await whole(calm, told.ask(max_tokens=20))
            await is_over(told)

    play(tmp_path, body, release, n_batch)


@in_turn
def test_asleep_under_wait_all_that_was_taken_ends_first(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        for level in LEVELS:
            held = await held_at(told, 4)
            mine = told.ask(f"{SAYING} mine", 300)
            await held
            await control(told, mine, ControlAction.PAUSE)
            told.sim.pace(SLOWLY)
            clients = [told.ask(f"{SAYING} {n}", 40) for n in range(n_batch + 1)]
            await told.said(clients[0], 4)
            pid = told.board.report().engine_pid
            sleeping = asyncio.create_task(nap(told, level, PauseMode.WAIT))
            await until(lambda: told.board.report().hold == "wait")
            with pytest.raises(EngineAsleep):
                await told.ask().end()
            told.sim.pace(PACE)
            adoption = await sleeping
            assert (adoption.stopped, adoption.aborted) == (0, 0)
            for client in clients:
                assert client.task.done()
                await whole(calm, client)
            await sleeps(told, pid, adoption, level)
            assert told.state(mine) is S.PAUSED
            await control(told, mine, ControlAction.RESUME)
            await still([mine])
            await wake(told)
            await whole(calm, mine)
            await is_over(told)

    play(tmp_path, body, release, n_batch)


@in_turn
def test_a_wait_over_a_sleep_is_answered_and_leaves_what_is_held_to_the_wake(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    """Requests held by a sleep with ``keep`` end after the wake: a ``wait`` does not wait for it.

    Neither a pause nor a second sleep, for those that were cut short, queued or came meanwhile.
    """

    async def body(told: Governed, calm: Governed) -> None:
        for mode_of_second in (None, UNLOADED):
            told.sim.pace(SLOWLY)
            clients = [told.ask(f"{SAYING} {n}", 40) for n in range(n_batch + 1)]
            await told.said(clients[0], 4)
            await nap(told, UNLOADED)
            late = told.ask(f"{SAYING} late", 20, patient=True)
            await in_state(told, late, S.QUEUED)
            asleep = told.desired.pauses
            second = ActivePause("op-wait", Scope(), PauseMode.WAIT, level=mode_of_second)
            adoption = await told.tell(pauses=(*asleep, second))
            assert (adoption.held, adoption.level) == (True, UNLOADED)
            assert told.board.report().state is BoardState.ASLEEP
            await still([*clients, late])
            told.sim.pace(PACE)
            await wake(told)
            for client in (*clients, late):
                await whole(calm, client)
            await is_over(told)

    play(tmp_path, body, release, n_batch)


@in_turn
def test_an_adapter_is_loaded_again_after_the_wake_and_a_switch_while_asleep_counts(
    tmp_path: Path, release: str, n_batch: int
) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        pinned = told.ask(max_tokens=40, line=LINE)
        await told.said(pinned, 5)
        assert told.board.report().adapters == (told.versions["v1"].ref.key,)
        await nap(told, UNLOADED)
        assert told.board.report().adapters == ()
        late = told.ask(f"{SAYING} late", 20, line=LINE)
        await told.serve("v2")  # asleep: nothing is loaded for it
        assert told.board.report().engine_starts == 1
        await wake(told)
        await whole(calm, pinned)
        await calm.serve("v2")
        await whole(calm, late)
        assert set(told.board.report().adapters) == {v.ref.key for v in told.versions.values()}
        assert [span.version for span in late.finished.versions] == [f"{LINE}@v2"]  # type: ignore[union-attr] # it has ended

    play(tmp_path, body, release, n_batch)


def test_clients_leave_abort_and_expire_while_the_board_sleeps(tmp_path: Path) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        told.sim.pace(SLOWLY)
        clients = [told.ask(f"{SAYING} {n}", 200, native_pause=True) for n in range(4)]
        await told.said(clients[0], 5)
        await nap(told, DROPPED)
        told.sim.pace(PACE)
        await clients[0].hang_up()
        await control(told, clients[1], ControlAction.ABORT)
        assert await clients[1].end() == ("", FinishReason.ABORT)
        assert told.board.abort_all((clients[2].asked.request_id,)) == 1
        assert (await clients[2].end())[1] is FinishReason.ABORT
        await wake(told)
        await whole(calm, clients[3])
        await is_over(told)

    play(tmp_path, body)


@pytest.mark.promise("Sleep", "Nothing stale is left in admission, index, adapters or reservations")
def test_nothing_of_a_sleep_counts_as_waiting(tmp_path: Path) -> None:
    async def body(told: Governed, calm: Governed) -> None:
        await nap(told)
        client = told.ask(max_tokens=5)
        await asyncio.sleep(0.6)
        assert told.state(client) is S.QUEUED
        began_s = time.monotonic()
        await wake(told)
        await client.task
        if time.monotonic() - began_s < 0.4:  # else the load took longer than a request may wait
            await whole(calm, client)

    play(tmp_path, body, queue_timeout_s=0.5)
