"""Pausing, editing, resuming and aborting on one board, over a scripted engine that thinks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from rkserve.board.answer.hooks import Action, Continue, Decoded, Hook, Pause, Replace
from rkserve.core.board_report import BoardState, GenerationInfo, GenerationState
from rkserve.core.errors import (
    CallFailed,
    EngineHung,
    GenerationNotFound,
    HookFailed,
    PauseExpired,
    RequestError,
    RkserveError,
    StateConflict,
)
from rkserve.core.messages import ControlAction, Edit, FinishReason, GenerateRequest, Kv
from tests.support.boards.board_bench import (
    SETTINGS,
    Bench,
    Listener,
    answer,
    board_test,
    request,
    spoken,
    talker,
    until,
)
from tests.support.boards.fakes import EOS, Script, tokens_of
from tests.support.boards.own_time import run_loop

pytestmark = pytest.mark.virtual_time

PROMPT = (5, 6, 7)
LENGTH = 10
PAUSE, EDIT, RESUME, ABORT = ControlAction
TALK = Script([], model=talker(LENGTH), pace_s=0.002)
WHOLE = spoken(PROMPT, LENGTH)


def asked(number: int = 1, **extra: Any) -> GenerateRequest:
    return replace(request(*PROMPT, max_tokens=20, **extra), request_id=f"c{number}/0")


async def control(bench: Bench, action: ControlAction, **extra: Any) -> GenerationInfo:
    return (await bench.board.control("c1", action, **extra))[0]


def talking(*scripts: Script, **extra: Any) -> Callable[[], Bench]:
    return lambda: Bench(*(scripts or [TALK] * 6), **extra)


NATIVE = pytest.param(True, id="inside the runtime")
STOPPED = pytest.param(False, id="by stopping")


# -- the same answer --------------------------------------------------------------------------


@pytest.mark.parametrize("native", [NATIVE, STOPPED])
@pytest.mark.parametrize("per_run", [True, False], ids=["1.3.0", "1.2.3"])
@pytest.mark.parametrize("late", [0, 2], ids=["at once", "tokens after the abort"])
def test_a_paused_answer_is_the_uninterrupted_one_wherever_it_is_paused(
    native: bool, per_run: bool, late: int
) -> None:
    async def at(position: int) -> None:
        script = replace(TALK, late=late)
        async with Bench(*[script] * 9, per_run=per_run).running() as bench:
            client = Listener(bench.board, asked(native_pause=native))
            await until(lambda: len(client.ids) >= position)
            paused = await control(bench, PAUSE)
            assert paused.state is GenerationState.PAUSED
            assert paused.kv is (Kv.KEPT if native else Kv.RECOMPUTED)
            assert (paused.paused_by, paused.tokens) == ("request", len(paused.partial_output) // 5)
            await asyncio.sleep(0.01)
            assert client.text == paused.partial_output  # nothing after the pause was granted
            resumed = await control(bench, RESUME)
            assert resumed.state is (GenerationState.RESUMING if native else GenerationState.QUEUED)
            assert await client.end() == (WHOLE, FinishReason.STOP)
            assert client.finished is not None
            assert client.finished.timings.paused_ms > 5
            assert client.finished.usage.completion_tokens == LENGTH + 1
            second = bench.engine.commands[1]
            assert second.resume is native
            if native:
                assert len(second.entries[0].ids) == 1
            # The bench's farewell asks for one more answer.
            bench.scripts.clear()

    for position in range(1, LENGTH - 1):
        run_loop(at(position))


@pytest.mark.parametrize("native", [NATIVE, STOPPED])
@board_test(talking())
async def test_it_pauses_by_itself_after_the_words_that_were_named(
    bench: Bench, native: bool
) -> None:
    word = WHOLE.split()[3]
    client = Listener(bench.board, asked(native_pause=native, pause_on_text=(word,)))
    await until(lambda: bench.board.report().paused == 1)
    info = bench.board.generations()[0]
    assert info.partial_output == client.text == WHOLE[:20].rstrip() + " "
    assert word in (info.paused_by or "")
    assert info.kv is (Kv.KEPT if native else Kv.RECOMPUTED)
    await control(bench, RESUME)
    assert await client.end() == (WHOLE, FinishReason.STOP)
    bench.scripts.clear()


@board_test(talking(quirks={"pause_with_history": True}))
async def test_where_the_runtime_pauses_runs_with_history_the_context_is_reused(b: Bench) -> None:
    client = Listener(b.board, asked(native_pause=True))
    await until(lambda: len(client.ids) >= 2)
    await control(b, PAUSE)
    await control(b, RESUME)
    assert await client.end() == (WHOLE, FinishReason.STOP)
    assert [c.keep_history for c in b.engine.commands] == [True, True]
    assert b.board.report().kv_positions == len(PROMPT) + LENGTH
    b.scripts.clear()


@board_test(talking(quirks={"kv_valid_after_abort": True}))
async def test_a_stopped_run_whose_kv_cache_is_trusted_is_extended(bench: Bench) -> None:
    # The board believes a KV that lacks the last token, as a run that was cut short leaves it.
    bench.scripts = [replace(TALK, kv_off=-1), TALK]
    client = Listener(bench.board, asked())
    await until(lambda: len(client.ids) >= 3)
    paused = await control(bench, PAUSE)
    assert paused.kv is Kv.KEPT
    bench.engine.kv.pop()
    await control(bench, RESUME)
    assert await client.end() == (WHOLE, FinishReason.STOP)
    assert not bench.engine.commands[1].clear
    bench.scripts.clear()


# -- edits ------------------------------------------------------------------------------------


def continued(context: tuple[int, ...], length: int = LENGTH) -> str:
    return spoken(context, length)


@pytest.mark.parametrize("native", [NATIVE, STOPPED])
@pytest.mark.parametrize(
    ("edit", "shown"),
    [
        pytest.param(Edit(replace_last=2), (1000, -2, ""), id="take back"),
        pytest.param(Edit(ids=(50, 51), text="well, "), (1000, 0, "well, "), id="append"),
        pytest.param(
            Edit(replace_last=1, ids=(50,), text="no: "), (1000, -1, "no: "), id="replace"
        ),
        pytest.param(Edit(ids=(60, 61), text="", injected=True), (1000, 0, ""), id="inject"),
    ],
)
async def test_an_edit_changes_what_the_model_goes_on_from(
    native: bool, edit: Edit, shown: tuple[int, int, str]
) -> None:
    async with Bench(*[TALK] * 6).running() as bench:
        client = Listener(bench.board, asked(native_pause=native))
        await until(lambda: len(client.ids) >= 4)
        before = await control(bench, PAUSE)
        edited = await control(bench, EDIT, edit=edit)
        words = before.partial_output.split()
        kept = words[: len(words) + shown[1]]
        text = "".join(f"{word} " for word in kept) + shown[2]
        assert edited.partial_output == text
        assert edited.kv is (Kv.KEPT if native else Kv.RECOMPUTED)
        await control(bench, RESUME)
        context = (*PROMPT, *map(int, kept), *edit.ids)
        rest = spoken(context, LENGTH)
        assert await client.end() == (text + rest, FinishReason.STOP)
        bench.scripts.clear()


@board_test(talking())
async def test_a_range_of_the_paused_cache_is_cut_out_and_nowhere_else(bench: Bench) -> None:
    client = Listener(bench.board, asked(native_pause=True))
    await until(lambda: len(client.ids) >= 4)
    before = await control(bench, PAUSE)
    assert before.kv_positions == before.context_tokens - 1
    assert (bench.board.kv()).at_resume is None
    for wrong in [((2, 1),), ((0, before.kv_positions + 1),), ((0, 2), (1, 3))]:
        with pytest.raises(RequestError):
            await control(bench, EDIT, edit=Edit(clear=wrong))
    first = await control(bench, EDIT, edit=Edit(clear=((1, 2), (3, 4))))
    assert first.kv_positions == before.kv_positions - 2
    size = bench.board.kv()  # of the library, which is told at the resumption
    assert (size.entries, size.at_resume) == ((before.kv_positions,), first.kv_positions)
    assert tuple(await bench.engine.call("kv_sizes")) == size.entries
    second = await control(bench, EDIT, edit=Edit(clear=((1, 2),)))  # of what is left by now
    assert second.context_tokens == before.context_tokens - 3
    await control(bench, RESUME)
    words = [int(word) for word in before.partial_output.split()]
    context = (PROMPT[0], *words[1:])
    text = before.partial_output + spoken(context, LENGTH)
    assert await client.end() == (text, FinishReason.STOP)
    assert bench.engine.commands[1].cut == ((3, 4), (1, 2), (1, 2))
    bench.scripts.clear()


@board_test(talking())
async def test_a_range_of_a_stopped_generation_is_left_out_when_it_is_recomputed(
    bench: Bench,
) -> None:
    client = Listener(bench.board, asked())
    await until(lambda: len(client.ids) >= 2)
    before = await control(bench, PAUSE)
    assert before.kv_positions == before.context_tokens
    with pytest.raises(RequestError, match=f"holds {before.context_tokens} positions"):
        await control(bench, EDIT, edit=Edit(clear=((0, before.context_tokens + 1),)))
    after = await control(bench, EDIT, edit=Edit(clear=((1, 2),)))
    assert (after.context_tokens, after.kv) == (before.context_tokens - 1, Kv.RECOMPUTED)
    await control(bench, RESUME)
    words = [int(word) for word in before.partial_output.split()]
    context = (PROMPT[0], *PROMPT[2:], *words)
    text = before.partial_output + spoken(context, LENGTH)
    assert await client.end() == (text, FinishReason.STOP)
    assert bench.engine.commands[1].entries[0].ids == context
    bench.scripts.clear()


@pytest.mark.parametrize("native", [NATIVE, STOPPED])
@board_test(talking())
async def test_an_edit_that_completes_the_answer_needs_no_further_run(
    bench: Bench, native: bool
) -> None:
    client = Listener(bench.board, asked(native_pause=native, stop=("halt",)))
    await until(lambda: len(client.ids) >= 2)
    paused = await control(bench, PAUSE)
    await control(bench, EDIT, edit=Edit(ids=(50, 51), text="halt!"))
    await control(bench, RESUME)
    assert await client.end() == (paused.partial_output, FinishReason.STOP)
    await until(lambda: bench.board.report().running == 0)
    assert len(bench.engine.commands) == 1
    assert [method for method, _ in bench.engine.calls] == ["drain"] * native
    bench.scripts.clear()


# -- hooks ------------------------------------------------------------------------------------


class Guide:
    """Replaces one word of the answer, once."""

    def __init__(self, at: int, action: Action) -> None:
        self.at, self.action = at, action

    def on_piece(self, piece: Decoded) -> Action:
        if piece.index == self.at and not piece.replayed:
            self.at = -1
            return self.action
        return Continue()

    def on_end(self) -> str:
        return ""


@pytest.mark.parametrize("native", [NATIVE, STOPPED])
@board_test(talking())
async def test_a_hook_rewinds_the_run_to_its_own_words(bench: Bench, native: bool) -> None:
    done: list[Hook] = []

    def factory(_: GenerateRequest) -> Hook:
        done.append(Guide(3 if not done else -1, Replace((77,), "seventy-seven ")))
        return done[-1]

    client = Listener(bench.board, asked(native_pause=native), factory)
    words = WHOLE.split()[:3]
    said = "".join(f"{word} " for word in words) + "seventy-seven "
    rest = spoken((*PROMPT, *map(int, words), 77), LENGTH)
    assert await client.end() == (said + rest, FinishReason.STOP)
    assert bench.engine.commands[1].resume is native
    assert bench.board.report().pauses == 0
    bench.scripts.clear()


@board_test(talking())
async def test_a_hook_pauses_in_its_own_name(bench: Bench) -> None:
    client = Listener(bench.board, asked(), lambda _: Guide(2, Pause(reason="a tool")))
    await until(lambda: bench.board.report().paused == 1)
    assert bench.board.generations()[0].paused_by == "a tool"
    await control(bench, RESUME)
    assert await client.end() == (WHOLE, FinishReason.STOP)
    bench.scripts.clear()


class Bomb(Guide):
    """A hook with a bug."""

    def on_piece(self, piece: Decoded) -> Action:
        if piece.index == self.at:
            raise ZeroDivisionError("boom")
        return Continue()


@board_test(talking())
async def test_a_hook_that_raises_ends_its_own_generation_only(bench: Bench) -> None:
    bad = Listener(bench.board, asked(1), lambda _: Bomb(2, Continue()))
    good = Listener(bench.board, asked(2))
    with pytest.raises(HookFailed, match="it raised ZeroDivisionError") as failed:
        await bad.end()
    assert failed.value.detail == "ZeroDivisionError('boom')"
    assert bad.text == "".join(f"{word} " for word in WHOLE.split()[:2])
    assert await good.end() == (WHOLE, FinishReason.STOP)
    assert (bench.board.report().failed, len(bench.engines)) == (1, 1)
    bench.scripts.clear()


# -- three ways to stop -----------------------------------------------------------------------


def test_a_stop_string_gives_the_same_text_and_kv_length_in_every_way() -> None:
    stop = WHOLE.split()[4]
    seen = []

    async def way(quirks: dict[str, bool], max_tokens: int, native: bool) -> None:
        async with Bench(*[TALK] * 3, quirks=quirks).running() as bench:
            given = () if max_tokens < 20 else (stop,)
            one = replace(asked(native_pause=native, stop=given), max_tokens=max_tokens)
            text, _ = await Listener(bench.board, one).end()
            await until(lambda: bench.board.report().running == 0)
            drained = [method for method, _ in bench.engine.calls]
            assert drained == (["drain"] if quirks else [])
            seen.append((text, bench.board.report().kv_positions))
            bench.scripts.clear()

    run_loop(way({}, 20, native=True))
    run_loop(way({"stop_by_pause": True}, 20, native=True))
    run_loop(way({}, 4, native=True))  # on 1.3.0 the runtime keeps the limit by itself
    assert seen == [("".join(f"{word} " for word in WHOLE.split()[:4]), 0)] * 3


# -- aborts and hang-ups ----------------------------------------------------------------------


async def _while_it_generates(bench: Bench, client: Listener) -> None:
    await until(lambda: len(client.ids) >= 2)


async def _while_it_is_paused(bench: Bench, client: Listener) -> None:
    await until(lambda: len(client.ids) >= 2)
    await control(bench, PAUSE)


async def _while_it_pauses(bench: Bench, client: Listener) -> None:
    await until(lambda: len(client.ids) >= 2)
    task = asyncio.create_task(control(bench, PAUSE))
    await asyncio.sleep(0)
    task.add_done_callback(lambda done: done.exception())


WHEN = [
    pytest.param(_while_it_generates, id="generating"),
    pytest.param(_while_it_pauses, id="pausing"),
    pytest.param(_while_it_is_paused, id="paused"),
]


@pytest.mark.parametrize("native", [NATIVE, STOPPED])
@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("hang_up", [False, True], ids=["abort", "hang-up"])
async def test_a_generation_ends_in_whatever_state_it_is(
    native: bool, when: Callable[[Bench, Listener], Awaitable[None]], hang_up: bool
) -> None:
    async with Bench(TALK).running() as bench:
        client = Listener(bench.board, asked(native_pause=native))
        await when(bench, client)
        if hang_up:
            await client.hang_up()
        else:
            await control(bench, ABORT)
            text, reason = await client.end()
            assert reason is FinishReason.ABORT
            assert text
            assert WHOLE.startswith(text)
        await until(lambda: bench.board.report().running == 0)
        assert not bench.engine.paused
        assert bench.board.generations() == []
        with pytest.raises(StateConflict, match="ended"):
            await control(bench, RESUME)


@board_test(Bench)
async def test_an_abort_in_the_queue_ends_with_nothing_said(bench: Bench) -> None:
    gate = asyncio.Event()
    bench.scripts = [replace(TALK, prefill=gate)]
    first = Listener(bench.board, asked(1))
    second = Listener(bench.board, asked(2))
    await until(lambda: bench.board.report().queued == 1)
    assert (await bench.board.control("c2", ABORT))[0].state is GenerationState.ENDED
    assert await second.end() == ("", FinishReason.ABORT)
    assert bench.board.report().queued == 0
    (prefilling,) = await bench.board.control("c1", ABORT)
    assert prefilling.state is GenerationState.ABORTING
    await bench.board.control("c1", ABORT)  # twice is fine
    gate.set()
    assert await first.end() == ("", FinishReason.ABORT)


# -- states -----------------------------------------------------------------------------------


async def _prefilling(bench: Bench) -> None:
    bench.scripts = [replace(TALK, prefill=asyncio.Event())]
    Listener(bench.board, asked())
    await until(lambda: len(bench.engine.commands) == 1)


async def _generating(bench: Bench) -> None:
    bench.scripts = [replace(TALK, pace_s=0.02)]
    client = Listener(bench.board, asked())
    await until(lambda: len(client.ids) == 1)


async def _paused(bench: Bench) -> None:
    await _generating(bench)
    await control(bench, PAUSE)


async def _ended(bench: Bench) -> None:
    bench.scripts = [TALK]
    await Listener(bench.board, asked()).end()


CONFLICTS = [
    pytest.param(_prefilling, PAUSE, "prefilling", id="pause while prefilling"),
    pytest.param(_prefilling, RESUME, "prefilling", id="resume while prefilling"),
    pytest.param(_generating, EDIT, "generating", id="edit a running one"),
    pytest.param(_generating, RESUME, "generating", id="resume a running one"),
    pytest.param(_paused, PAUSE, "paused", id="pause twice"),
    pytest.param(_ended, PAUSE, "ended", id="pause an ended one"),
    pytest.param(_ended, RESUME, "ended", id="resume an ended one"),
    pytest.param(_ended, ABORT, "ended", id="abort an ended one"),
]


@pytest.mark.parametrize(("reach", "action", "state"), CONFLICTS)
async def test_what_the_state_does_not_allow_is_refused_with_its_name(
    reach: Callable[[Bench], Awaitable[None]], action: ControlAction, state: str
) -> None:
    bench = Bench()
    await bench.board.start()
    await reach(bench)
    before = [info.state for info in bench.board.generations()]
    with pytest.raises(StateConflict, match=state):
        await control(bench, action)
    assert [info.state for info in bench.board.generations()] == before
    await bench.board.stop()


@board_test(talking())
async def test_of_two_resumes_at_once_the_second_is_refused(bench: Bench) -> None:
    client = Listener(bench.board, asked(native_pause=True))
    await until(lambda: len(client.ids) >= 2)
    await control(bench, PAUSE)
    await control(bench, RESUME)
    with pytest.raises(StateConflict, match="resuming"):
        await control(bench, RESUME)
    assert await client.end() == (WHOLE, FinishReason.STOP)
    bench.scripts.clear()


@board_test(Bench)
async def test_an_unknown_generation_is_not_found(bench: Bench) -> None:
    with pytest.raises(GenerationNotFound):
        await control(bench, PAUSE)


@board_test(lambda: Bench(Script(tokens_of("a"), pace_s=0.05)))
async def test_a_pause_that_the_end_overtakes_says_so(bench: Bench) -> None:
    client = Listener(bench.board, replace(asked(), max_tokens=1))
    await until(lambda: bench.engine.kv[-1:] == [100])
    with pytest.raises(StateConflict, match="ended"):
        await control(bench, PAUSE)
    assert await client.end() == ("a", FinishReason.LENGTH)


# -- who has the board meanwhile --------------------------------------------------------------


@board_test(lambda: Bench(TALK, Script([*tokens_of("x"), (EOS, b"")]), TALK))
async def test_a_stopped_pause_lets_others_go_on_and_is_first_in_the_queue_then(b: Bench) -> None:
    client = Listener(b.board, asked())
    await until(lambda: len(client.ids) >= 2)
    await control(b, PAUSE)
    assert await answer(b.board) == ("x", FinishReason.STOP)
    gate = asyncio.Event()
    b.scripts = [Script([(EOS, b"")], prefill=gate), TALK, Script([*tokens_of("y"), (EOS, b"")])]
    blocking = asyncio.create_task(answer(b.board))
    behind = asyncio.create_task(answer(b.board))
    await until(lambda: b.board.report().queued == 1)
    await control(b, RESUME)
    gate.set()
    await blocking
    assert await client.end() == (WHOLE, FinishReason.STOP)
    assert await behind == ("y", FinishReason.STOP)


async def test_a_pause_inside_the_runtime_keeps_the_board_until_others_have_waited() -> None:
    settings = replace(SETTINGS, pause_hold_s=0.05)
    async with Bench(TALK, settings=settings).running() as bench:
        client = Listener(bench.board, asked(native_pause=True))
        await until(lambda: len(client.ids) >= 2)
        paused = await control(bench, PAUSE)
        await asyncio.sleep(0.1)
        assert bench.engine.paused  # nobody waits
        assert await answer(bench.board) == ("Hello", FinishReason.STOP)
        assert [method for method, _ in bench.engine.calls] == ["drain"]
        info = bench.board.generations()[0]
        assert (info.state, info.kv) == (GenerationState.PAUSED, Kv.RECOMPUTED)
        assert info.partial_output == paused.partial_output
        bench.scripts = [TALK]
        await control(bench, RESUME)
        assert await client.end() == (WHOLE, FinishReason.STOP)


@pytest.mark.parametrize("native", [NATIVE, STOPPED])
async def test_a_pause_that_nobody_ends_expires(native: bool) -> None:
    async with Bench(TALK, settings=replace(SETTINGS, pause_timeout_s=0.03)).running() as bench:
        client = Listener(bench.board, asked(native_pause=native))
        await until(lambda: len(client.ids) >= 2)
        await control(bench, PAUSE)
        with pytest.raises(PauseExpired):
            await client.end()
        await until(lambda: bench.board.report().running == 0)
        assert not bench.engine.paused


# -- when the engine fails --------------------------------------------------------------------


@pytest.mark.parametrize("native", [NATIVE, STOPPED])
async def test_a_pause_survives_the_death_of_the_engine(native: bool) -> None:
    async with Bench(TALK, TALK).running() as bench:
        client = Listener(bench.board, asked(native_pause=native))
        await until(lambda: len(client.ids) >= 3)
        await control(bench, PAUSE)
        bench.engine.die("SIGSEGV")
        await until(lambda: bench.state is BoardState.READY and len(bench.engines) == 2)
        info = bench.board.generations()[0]
        assert (info.state, info.kv) == (GenerationState.PAUSED, Kv.RECOMPUTED)
        await control(bench, RESUME)
        assert await client.end() == (WHOLE, FinishReason.STOP)


@board_test(lambda: Bench(TALK, TALK))
async def test_a_resume_in_the_moment_of_the_engines_death_is_not_lost(bench: Bench) -> None:
    client = Listener(bench.board, asked(native_pause=True))
    await until(lambda: len(client.ids) >= 3)
    await control(bench, PAUSE)
    bench.engine.die("SIGSEGV")
    await control(bench, RESUME)
    assert await client.end() == (WHOLE, FinishReason.STOP)
    assert len(bench.engines) == 2


@board_test(lambda: Bench(replace(TALK, deaf=True, hang_at=5)))
async def test_a_pause_that_is_not_granted_is_a_hang(bench: Bench) -> None:
    client = Listener(bench.board, asked(native_pause=True))
    await until(lambda: len(client.ids) >= 2)
    with pytest.raises(StateConflict, match="ended"):
        await control(bench, PAUSE)
    with pytest.raises(EngineHung, match="the pause"):
        await client.end()
    await until(lambda: len(bench.engines) == 2 and bench.state is BoardState.READY)


@board_test(lambda: Bench(TALK, TALK, settings=replace(SETTINGS, pause_hold_s=0.02)))
async def test_a_drain_that_hangs_costs_the_engine_and_not_the_pause(bench: Bench) -> None:
    client = Listener(bench.board, asked(1, native_pause=True))
    await until(lambda: len(client.ids) >= 2)
    await control(bench, PAUSE)
    bench.engine.call_gate = asyncio.Event()
    other = Listener(bench.board, asked(2))
    await until(lambda: len(bench.engines) == 2)
    assert await other.end() == (WHOLE, FinishReason.STOP)
    bench.scripts = [TALK]
    await control(bench, RESUME)
    assert await client.end() == (WHOLE, FinishReason.STOP)


@board_test(lambda: Bench(TALK, TALK, settings=replace(SETTINGS, pause_hold_s=0.02)))
async def test_a_drain_that_is_refused_costs_the_engine_and_no_request(bench: Bench) -> None:
    client = Listener(bench.board, asked(1, native_pause=True))
    await until(lambda: len(client.ids) >= 2)
    await control(bench, PAUSE)
    bench.engine.call_errors["drain"] = CallFailed("rkllm_run (to end a paused run)", -1)
    other = Listener(bench.board, asked(2))
    assert await other.end() == (WHOLE, FinishReason.STOP)
    report = bench.board.report()
    assert (len(bench.engines), report.engine_renewals, report.failed) == (2, 1, 0)
    bench.scripts = [TALK]
    await control(bench, RESUME)
    assert await client.end() == (WHOLE, FinishReason.STOP)
    assert bench.state is BoardState.READY


@board_test(lambda: Bench(TALK, TALK))
async def test_a_paused_run_that_cannot_be_resumed_is_recomputed(bench: Bench) -> None:
    client = Listener(bench.board, asked(native_pause=True))
    await until(lambda: len(client.ids) >= 2)
    await control(bench, PAUSE)
    await control(bench, EDIT, edit=Edit(replace_last=2))
    bench.engine.kv.clear()  # so that the range to cut is not there
    await control(bench, RESUME)
    assert await client.end() == (WHOLE, FinishReason.STOP)
    assert [method for method, _ in bench.engine.calls] == ["drain"]


@board_test(lambda: Bench(TALK))
async def test_stopping_the_board_ends_a_paused_generation(bench: Bench) -> None:
    client = Listener(bench.board, asked(native_pause=True))
    await until(lambda: len(client.ids) >= 2)
    await control(bench, PAUSE)
    await bench.board.stop()
    with pytest.raises(RkserveError, match="stopped"):
        await client.end()
    assert bench.engine.stopped
