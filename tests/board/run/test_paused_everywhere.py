"""An answer that is interrupted at any token, in every way: byte for byte the one that is not.

A real engine process over the simulated runtime in strict mode, where a misuse of the library ends
the engine: so each test also holds that there was none. The same over llama.cpp with the trained
model, whose likeliest tokens are so far ahead that a prompt computed in other parts than before
chooses the same ones.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.answer.hooks import Action, Continue, Decoded, Hook, HookFactory, Pause
from rkserve.board.board import Board
from rkserve.core.board_report import BoardState, GenerationInfo, GenerationState
from rkserve.core.errors import StateConflict
from rkserve.core.messages import AdapterRef, ControlAction, FinishReason, GenerateRequest, Kv
from tests.support.boards.board_bench import Listener, until
from tests.support.boards.fakes import run_loop
from tests.support.sampler import Sampler
from tests.support.sim.cpu_board import every_kind
from tests.support.sim.releases import BOTH
from tests.support.sim.sim_board import CALM, FOLDER, GREEDY, Sim, both_releases, chat

LENGTH = 64
# The library stands still until the board has asked for the pause. How slowly it goes on then: a
# token of 0.6 ms is what a pause needs to reach an engine that has the machine for itself. Where it
# has not, the pause comes too late and is tried again more slowly.
PACES = (0.01, 0.04, 0.16, 0.64, 2.0)
LIMIT_S = 240.0

adapters = pytest.mark.parametrize("adapted", [False, True], ids=["base", "adapter"])
answers = pytest.mark.parametrize("question", Sim.QUESTIONS)


class PauseAt:
    """Pauses after the tokens with these indexes."""

    def __init__(self, indexes: Sequence[int]) -> None:
        self._indexes = frozenset(indexes)

    def on_piece(self, piece: Decoded) -> Action:
        return Pause(reason="here") if piece.index in self._indexes else Continue()

    def on_end(self) -> str:
        return ""


def pause_at(*indexes: int) -> HookFactory:
    def make(_: GenerateRequest) -> Hook:
        return PauseAt(indexes)

    return make


@dataclass(frozen=True)
class Answer:
    """What one client got."""

    text: str
    ids: tuple[int, ...]
    reason: FinishReason
    completion_tokens: int


@dataclass
class Bench:
    """One board, one question, and its uninterrupted answer."""

    sim: Sim
    board: Board
    request: GenerateRequest
    plain: Answer
    held_back: frozenset[int]  # counts of tokens after which a character is not whole

    def listen(self, *hooks: HookFactory) -> Listener:
        return Listener(self.board, self.request, *hooks)

    async def paused(self) -> GenerationInfo:
        """Wait for a pause that a hook asked for."""
        await until(lambda: self.state is not GenerationState.GENERATING)
        await until(lambda: self.state is GenerationState.PAUSED)
        return self.board.generations()[0]

    @property
    def state(self) -> GenerationState | None:
        found = self.board.generations()
        return found[0].state if found else None

    @property
    def state_of_board(self) -> BoardState:
        return self.board.report().state

    async def pause(self) -> GenerationInfo | None:
        """Ask for a pause; None where the answer's end came first."""
        try:
            [info] = await self.board.control("r", ControlAction.PAUSE)
        except StateConflict as exc:
            if exc.state == "ended":
                return None
            raise
        return info

    async def resume(self) -> None:
        [info] = await self.board.control("r", ControlAction.RESUME)
        assert info.state in (GenerationState.RESUMING, GenerationState.QUEUED)

    async def whole(self, listener: Listener) -> None:
        """Its answer is the one that nobody interrupted."""
        assert await result(listener) == self.plain


async def result(listener: Listener) -> Answer:
    text, reason = await listener.end()
    assert listener.finished is not None
    usage = listener.finished.usage
    return Answer(text, tuple(listener.ids), reason, usage.completion_tokens)


@asynccontextmanager
async def bench(
    sim: Sim, question: str, *, native: bool, adapted: bool = False, **settings: Any
) -> AsyncIterator[Bench]:
    adapter: AdapterRef | None = sim.adapter("Pirate") if adapted else None
    request = GenerateRequest(
        "r/0",
        FOLDER.id,
        sim.asked(question),
        LENGTH,
        sampling=GREEDY,
        adapter=adapter,
        native_pause=native,
    )
    async with sim.board(patience=CALM, crash_limit=1000, **settings) as board:
        listener = Listener(board, request)
        waits: list[bool] = []
        sim.tap.heard = waits.append
        plain = await result(listener)
        sim.tap.heard = lambda _: None
        assert plain.completion_tokens == LENGTH
        assert len(plain.text) > LENGTH / 2
        held_back = frozenset(at for at, is_so in enumerate(waits[:LENGTH], 1) if is_so)
        yield Bench(sim, board, request, plain, held_back)
        report = board.report()
        assert (report.running, report.queued, report.paused) == (0, 0, 0)
        # A violation ends the engine.
        assert report.engine_starts == 1 + sum(tap.died.done() for tap in sim.taps[:-1])


def on_sim(
    native: bool,
) -> Callable[[Callable[[Bench, Sampler], Coroutine[Any, Any, None]]], Callable[..., None]]:
    """Run an async test on a board of the release, with the answer and the adapter or without."""

    def decorate(
        body: Callable[[Bench, Sampler], Coroutine[Any, Any, None]],
    ) -> Callable[..., None]:
        async def main(sim: Sim, question: str, adapted: bool, sampled: Sampler) -> None:
            async with bench(sim, question, native=native, adapted=adapted) as made:
                await body(made, sampled)
                assert made.board.report().engine_starts == 1

        def test(
            tmp_path: Path,
            kind: type[Sim],
            release: str,
            question: str,
            adapted: bool,
            *,
            sampled: Sampler,
        ) -> None:
            sim = kind(tmp_path, release, sampling=GREEDY)
            run_loop(main(sim, question, adapted, sampled), LIMIT_S)

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


# -- stopped, and continued from the transcript -----------------------------------------------


@every_kind
@adapters
@answers
@on_sim(native=False)
async def test_stopped_by_a_call_after_any_token_it_goes_on_as_if_nothing_were(
    here: Bench, sampled: Sampler
) -> None:
    for count in (*sampled(range(1, LENGTH)), LENGTH):
        held = here.sim.tap.hold(count)
        listener = here.listen()
        await held
        info = await here.pause()
        if count == LENGTH:  # it is whole, whatever may still be on its way
            assert info is None
        else:
            assert info is not None
            _is_recomputed(here, info, count)
            await here.resume()
        await here.whole(listener)


def _is_recomputed(here: Bench, info: GenerationInfo, count: int) -> None:
    """A character that was not whole is not there: the run that continues makes it again.

    What the KV cache has of the rest is computed anew, but by runtimes that reuse it in RAM.
    """
    while count in here.held_back:
        count -= 1
    assert (info.state, info.kv) == (GenerationState.PAUSED, here.sim.STOPPED)
    assert (info.tokens, info.kv_positions) == (count, info.context_tokens)
    assert here.plain.text.startswith(info.partial_output)
    assert info.context_tokens == len(here.request.prompt_ids) + count


@every_kind
@adapters
@answers
@on_sim(native=False)
async def test_stopped_by_a_hook_after_any_token_it_goes_on_as_if_nothing_were(
    here: Bench, sampled: Sampler
) -> None:
    for count in sampled(range(1, LENGTH)):
        listener = here.listen(pause_at(count - 1))
        if count not in here.held_back:  # a hook sees whole characters
            info = await here.paused()
            _is_recomputed(here, info, count)
            assert info.paused_by == "here"
            await here.resume()
        await here.whole(listener)


@every_kind
@answers
def test_stopped_twice_it_goes_on_as_if_nothing_were(
    tmp_path: Path, kind: type[Sim], release: str, question: str, sampled: Sampler
) -> None:
    async def main() -> None:
        async with bench(sim, question, native=False) as here:
            for first in sampled(range(1, LENGTH - 1)):
                second = rolls.randint(1, LENGTH - 1)  # tokens of the second run
                await twice(here, first, second)

    async def twice(here: Bench, first: int, second: int) -> None:
        held = here.sim.tap.hold(first)
        listener = here.listen()
        await held
        info = await here.pause()
        assert info is not None
        held = here.sim.tap.hold(min(second, LENGTH - info.tokens - 1))
        await here.resume()
        await held
        assert await here.pause() is not None
        await here.resume()
        await here.whole(listener)

    rolls, sim = random.Random(1), kind(tmp_path, release, sampling=GREEDY)
    run_loop(main(), LIMIT_S)


# -- paused inside the runtime ----------------------------------------------------------------


@every_kind
@adapters
@answers
@on_sim(native=True)
async def test_paused_in_the_runtime_after_any_token_it_goes_on_from_its_kv_cache(
    here: Bench, sampled: Sampler
) -> None:
    for count in sampled(sorted(set(range(1, LENGTH)) - here.held_back)):
        await _until_kept(here, count, partial(_kept, here, count))


async def _until_kept(
    here: Bench, count: int, attempt: Callable[[float], Coroutine[Any, Any, bool]]
) -> None:
    """A pause that comes when the runtime has finished is tried again at a slower pace."""
    for pace in PACES:
        if await attempt(pace):
            return
        last = LENGTH if here.sim.PAUSES_AT_LIMIT else LENGTH - 1
        if here.held_back.issuperset(range(count + 1, last + 1)):
            return  # the runtime ends at its limit, and pauses only where a character is whole
    raise AssertionError("the runtime finished before a pause reached it, at any pace")


async def _kept(here: Bench, count: int, pace: float) -> bool:
    """Pause after ``count`` tokens, and resume; return whether the runtime itself had paused."""
    here.sim.gate(f"token:{count}", lambda: here.sim.pace(0), pace)
    runs = len(here.sim.tap.commands)
    listener = here.listen(pause_at(count - 1))
    info = await here.paused()
    here.sim.pace(0)
    assert (info.state, info.tokens) == (GenerationState.PAUSED, count)
    assert here.plain.text.startswith(info.partial_output)
    await here.resume()
    await here.whole(listener)
    [first, again] = list(here.sim.tap.commands)[runs:]
    assert not first.resume
    if not again.resume:
        # The run had ended. Where the runtime reuses prefixes its context is kept all the same.
        assert info.kv is not Kv.KEPT or not again.clear
        return False
    assert info.kv is Kv.KEPT
    # What the runtime had said beyond the hook's decision was cut out, and nothing sent twice.
    held = here.sim.tap.ends[runs].kv_positions[0]
    kept = len(here.request.prompt_ids) + count
    assert info.kv_positions == min(held, kept)
    assert again.cut == (((kept - 1, held),) if held >= kept else ())
    assert len(again.entries[0].ids) == 1
    return True


@both_releases
@adapters
def test_a_pause_of_the_runtime_that_is_asked_for_within_a_character_waits_for_its_end(
    tmp_path: Path, release: str, adapted: bool, sampled: Sampler
) -> None:
    async def main() -> None:
        async with bench(sim, "multi-byte", native=True, adapted=adapted) as here:
            assert len(here.held_back) > LENGTH / 4
            for count in sampled(sorted(here.held_back)):
                await _until_kept(here, count, partial(within, here, count))
            assert here.board.report().engine_starts == 1

    async def within(here: Bench, count: int, pace: float) -> bool:
        held = here.sim.hold(count, pace)
        listener = here.listen()
        await held
        info = await here.pause()
        here.sim.pace(0)
        if info is not None:
            assert info.tokens > count
            assert info.tokens not in here.held_back
            assert here.plain.text.startswith(info.partial_output)
            await here.resume()
        await here.whole(listener)
        return info is not None and info.kv is Kv.KEPT

    sim = Sim(tmp_path, release, sampling=GREEDY)
    run_loop(main(), LIMIT_S)


@every_kind
@answers
def test_paused_at_every_token_of_one_answer_it_is_the_same(
    tmp_path: Path, kind: type[Sim], release: str, question: str
) -> None:
    async def main() -> None:
        async with bench(sim, question, native=True) as here:
            sim.pace(0.05)
            listener = here.listen(pause_at(*range(LENGTH)))
            pauses = 0
            while here.state is not GenerationState.ENDED and not listener.task.done():
                if here.state is GenerationState.PAUSED:
                    pauses += 1
                    await here.resume()
                await asyncio.sleep(0.001)
            await here.whole(listener)
            assert pauses == LENGTH - 1 - len(here.held_back - {LENGTH})
            assert here.board.report().engine_starts == 1

    sim = kind(tmp_path, release, sampling=GREEDY)
    run_loop(main(), LIMIT_S)


# -- the engine dies meanwhile ----------------------------------------------------------------


@every_kind
@pytest.mark.parametrize("native", [False, True], ids=["stopped", "paused in the runtime"])
def test_an_engine_that_is_killed_during_the_pause_costs_the_kv_cache_and_nothing_else(
    tmp_path: Path, kind: type[Sim], release: str, native: bool
) -> None:
    async def main() -> None:
        async with bench(sim, "multi-byte", native=native) as here:
            for count in (1, 2, 31, LENGTH - 3):
                await killed(here, count)

    async def killed(here: Bench, count: int) -> None:
        held = sim.hold(count)
        listener = here.listen()
        await held
        info = await here.pause()
        assert info is not None
        assert info.kv is (Kv.KEPT if native else sim.STOPPED)
        sim.pace(0)
        engines = len(sim.taps)
        os.kill(sim.tap.pid, signal.SIGKILL)
        # The new engine takes the place of the old one, and of its KV cache, once it is ready.
        await until(lambda: len(sim.taps) > engines and here.state_of_board is BoardState.READY)
        [info] = here.board.generations()
        assert (info.state, info.kv) == (GenerationState.PAUSED, Kv.RECOMPUTED)
        await here.resume()
        await here.whole(listener)
        assert not any(command.resume for command in sim.tap.commands)

    sim = kind(tmp_path, release, sampling=GREEDY)
    run_loop(main(), LIMIT_S)


# -- within a conversation --------------------------------------------------------------------


@pytest.mark.parametrize("release", BOTH)
@pytest.mark.parametrize("hooked", [False, True], ids=["by a call", "by a hook"])
def test_where_the_runtime_is_trusted_to_pause_a_conversation_its_history_is_kept_too(
    tmp_path: Path, release: str, hooked: bool
) -> None:
    """Where a hook pauses, tokens beyond its decision may have to be cut, which is not trusted."""

    async def main() -> None:
        async with sim.board(patience=CALM) as board:
            first = GenerateRequest("r/0", FOLDER.id, chat("Write 20 tokens"), 40, sampling=GREEDY)
            before = await result(Listener(board, first))
            turns = chat("Write 20 tokens", before.text, "Write 64 tokens")
            request = replace(first, prompt_ids=turns, max_tokens=LENGTH, native_pause=True)
            plain = await result(Listener(board, request))
            here = Bench(sim, board, request, plain, frozenset())
            for count in range(1, LENGTH - 4, 3):
                await board.clear_kv(keep_system_prompt=False)
                await result(Listener(board, first))
                await again(here, count)
            assert board.report().engine_starts == 1

    async def again(here: Bench, count: int) -> None:
        sim.pace(0.02)
        held = None if hooked else sim.hold(count)
        listener = here.listen(*([pause_at(count - 1)] if hooked else []))
        if held is not None:
            await held
        info = await here.paused() if hooked else await here.pause()
        sim.pace(0)
        assert info is not None
        await here.resume()
        await here.whole(listener)
        assert listener.finished is not None
        assert listener.finished.usage.cached_tokens > 0
        last = sim.tap.commands[-1]
        if hooked and not last.resume:
            # The run had ended. Where the runtime reuses prefixes its context is kept all the same.
            assert info.kv is not Kv.KEPT or not last.clear
        else:
            assert last.resume is (info.kv is Kv.KEPT)
        kept.append(info.kv)

    kept: list[Kv | None] = []
    quirks = {"pause_with_history": True}
    sim = Sim(tmp_path, release, {"RKSIM_PAUSE_WITH_HISTORY": "1"}, quirks, GREEDY)
    run_loop(main(), LIMIT_S)
    assert hooked or Kv.KEPT in kept
