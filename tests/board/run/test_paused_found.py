"""What random interruption of a board has found, each as the shortest way to it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from rkserve.board.answer.generation import Generation
from rkserve.board.board import Board
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
from tests.support.sim.sim_board import CALM, FOLDER, GREEDY, Sim, ask, chat, words

PAUSE, EDIT, RESUME, ABORT = ControlAction


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
