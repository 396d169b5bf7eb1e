"""Vectors from one board: a simulated engine, its KV cache, and what happens to it meanwhile."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from array import array
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.board import Board
from rkserve.board.engine.protocol import EngineSpec
from rkserve.board.storage.prompt_cache import CacheFingerprint, CacheStore
from rkserve.core.board_report import BoardState
from rkserve.core.desired_state import PauseMode
from rkserve.core.errors import (
    BoardAsleep,
    CallAborted,
    EmbeddingUnsupported,
    EngineDied,
    EnginePaused,
    InputTooLong,
    QueueFull,
    RkserveError,
    RunFailed,
)
from rkserve.core.messages import (
    Accepted,
    Embedded,
    EmbedRequest,
    Event,
    Finished,
    GenerateRequest,
    QueueChange,
)
from rkserve.core.run_params import Pooling
from tests.support.boards.board_bench import collect, text_of, until
from tests.support.boards.fakes import run_loop
from tests.support.boards.holding import Governed, governed
from tests.support.boards.sleeping import nap
from tests.support.sim.sim_board import FOLDER, GREEDY, Sim, both_releases, chat, words

CATS, MORE_CATS, TRAINS = (
    words("The cat sat on the warm mat"),
    words("A warm cat on the mat"),
    words("Trains leave every hour for Berlin"),
)

# With the other one a text becomes a vector for each of its tokens.
ONE_VECTOR = [one for one in Pooling if one is not Pooling.ALL]


def request(*inputs: tuple[int, ...], **extra: Any) -> EmbedRequest:
    return EmbedRequest("e/0", FOLDER.id, (), 0, inputs=inputs, **extra)


def floats(vector: bytes) -> array[float]:
    return array("f", vector)


def near(one: bytes, other: bytes) -> float:
    a, b = floats(one), floats(other)
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(x * x for x in a) * sum(y * y for y in b))


async def vectors(board: Board, *inputs: tuple[int, ...], **extra: Any) -> tuple[bytes, ...]:
    events = await collect(board.embed(request(*inputs, **extra)))
    accepted, *changes, embedded, finished = events
    assert isinstance(accepted, Accepted)
    # A wait in the queue has an end.
    assert changes == ([QueueChange(waits=False)] if accepted.waits else [])
    assert isinstance(embedded, Embedded)
    assert isinstance(finished, Finished)
    return embedded.vectors


class Reader:
    """A client that waits for vectors in the background."""

    def __init__(self, board: Board, asked: EmbedRequest) -> None:
        self.events: list[Event] = []
        self.error: RkserveError | None = None
        self.task = asyncio.create_task(self._read(board, asked))

    async def _read(self, board: Board, asked: EmbedRequest) -> None:
        try:
            async with aclosing(board.embed(asked)) as events:
                async for event in events:
                    self.events.append(event)
        except RkserveError as exc:
            self.error = exc

    @property
    def accepted(self) -> bool:
        return len(self.events) > 0

    @property
    def done(self) -> bool:
        return bool(self.events) and isinstance(self.events[-1], Finished)


class TextSim(Sim):
    """A board that is given texts."""

    def spec(self, n_batch: int = 1) -> EngineSpec:
        return replace(super().spec(n_batch), text_mode=True)


def board_test(
    place: Path, body: Callable[[Board, Sim], Coroutine[Any, Any, None]], **changes: Any
) -> None:
    environ = {"RKSIM_STRICT": str(int(changes.pop("strict", True)))}
    sim = Sim(place, changes.pop("release", "1.3.0"), environ, sampling=GREEDY)

    async def main() -> None:
        async with sim.board(**changes) as board:
            await body(board, sim)

    run_loop(main())


def governed_test(place: Path, body: Callable[[Governed], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        async with governed(place, governed=True) as told:
            await told.tell()
            await body(told)

    run_loop(main())


# -- vectors --------------------------------------------------------------------------------------


@both_releases
@pytest.mark.parametrize("pooling", ONE_VECTOR)
def test_texts_become_vectors_that_are_near_each_other_where_the_texts_are(
    tmp_path: Path, release: str, pooling: Pooling
) -> None:
    async def body(board: Board, sim: Sim) -> None:
        cats, more, trains, again = await vectors(
            board, CATS, MORE_CATS, TRAINS, CATS, pooling=pooling
        )
        assert again == cats
        assert await vectors(board, CATS, pooling=pooling) == (cats,)
        if pooling is not Pooling.CLS:  # the first token has not seen the others
            assert near(cats, more) > near(cats, trains) + 0.2

    board_test(tmp_path, body, release=release)


def test_the_last_row_the_first_and_the_mean_are_three_vectors(tmp_path: Path) -> None:
    async def body(board: Board, sim: Sim) -> None:
        found = {p: (await vectors(board, CATS, pooling=p))[0] for p in ONE_VECTOR}
        assert len(set(found.values())) == 3
        # The first token of a text knows of nothing behind it.
        first = (await vectors(board, CATS[:1], pooling=Pooling.LAST))[0]
        assert near(found[Pooling.CLS], first) == pytest.approx(1.0, abs=1e-6)
        rows = [(await vectors(board, CATS[: n + 1]))[0] for n in range(len(CATS))]
        mean = [sum(column) / len(rows) for column in zip(*map(floats, rows), strict=True)]
        assert list(floats(found[Pooling.MEAN])) == pytest.approx(mean, abs=1e-6)

    board_test(tmp_path, body)


def test_usage_and_figures_count_the_tokens_of_all_texts(tmp_path: Path) -> None:
    async def body(board: Board, sim: Sim) -> None:
        events = await collect(board.embed(request(CATS, TRAINS)))
        finished = events[-1]
        assert isinstance(finished, Finished)
        count = len(CATS) + len(TRAINS)
        assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (count, 0)
        assert [span.version for span in finished.versions] == ["default"]
        report = board.report()
        assert (report.requests, report.prefill_tokens, report.decode_tokens) == (1, count, 0)
        assert report.prefill_ms > 0
        assert (report.running, report.kv_positions) == (0, 0)

    board_test(tmp_path, body)


async def test_in_text_mode_the_runtime_tokenizes_and_counts(tmp_path: Path) -> None:
    async def body(board: Board, sim: Sim) -> None:
        asked = EmbedRequest("e/0", FOLDER.id, (), 0, texts=("The cat sat", "The dog ran"))
        _, embedded, finished = await collect(board.embed(asked))
        assert isinstance(embedded, Embedded)
        assert isinstance(finished, Finished)
        assert len(set(embedded.vectors)) == 2
        assert finished.usage.prompt_tokens == len(words("The cat sat")) + len(words("The dog ran"))
        assert embedded.vectors[:1] == await vectors(board, words("The cat sat"))

    sim = TextSim(tmp_path)
    async with sim.board(text_mode=True) as board:
        await body(board, sim)


def test_vectors_of_an_adapter_are_its_own(tmp_path: Path) -> None:
    async def body(board: Board, sim: Sim) -> None:
        ref = sim.adapter("pirate")
        plain, own = await vectors(board, CATS), await vectors(board, CATS, adapter=ref)
        assert plain != own
        assert await vectors(board, CATS, adapter=ref) == own
        assert await vectors(board, CATS) == plain

    board_test(tmp_path, body)


@pytest.mark.parametrize(
    ("changes", "inputs", "error"),
    [
        pytest.param({"n_batch": 2}, [CATS], EmbeddingUnsupported, id="a board of batches"),
        pytest.param({}, [CATS, (100,) * 4097], InputTooLong, id="a text that is too long"),
    ],
)
def test_what_no_run_could_do_is_refused_before_it_waits(
    tmp_path: Path, changes: dict[str, Any], inputs: list[Any], error: type[RkserveError]
) -> None:
    async def body(board: Board, sim: Sim) -> None:
        with pytest.raises(error):
            await vectors(board, *inputs)
        assert board.report().requests == 0

    board_test(tmp_path, body, **changes)


def test_a_text_may_be_as_long_as_the_context(tmp_path: Path) -> None:
    async def body(board: Board, sim: Sim) -> None:
        (vector,) = await vectors(board, (100,) * 4096)
        assert len(vector) == 64 * 4

    board_test(tmp_path, body)


# -- beside generations ---------------------------------------------------------------------------


async def say(board: Board, ids: tuple[int, ...]) -> Finished:
    asked = GenerateRequest("g/0", FOLDER.id, ids, 12, sampling=GREEDY)
    finished = (await collect(board.generate(asked)))[-1]
    assert isinstance(finished, Finished)
    return finished


def test_a_conversation_is_not_continued_over_the_vectors_of_another_text(tmp_path: Path) -> None:
    first, second = chat("Tell me of the sea"), chat("Tell me of the sea", "Yes.", "And the moon?")

    async def body(board: Board, sim: Sim) -> None:
        alone = await collect(board.generate(GenerateRequest("g/0", FOLDER.id, second, 12, GREEDY)))
        await say(board, first)
        assert board.report().kv_positions > 0
        await vectors(board, CATS)
        assert board.report().kv_positions == 0
        after = await collect(board.generate(GenerateRequest("g/1", FOLDER.id, second, 12, GREEDY)))
        assert text_of(after) == text_of(alone)
        finished = after[-1]
        assert isinstance(finished, Finished)
        assert finished.usage.cached_tokens == 0

    board_test(tmp_path, body)


async def test_a_conversation_is_parked_for_vectors_and_comes_back_from_its_file(
    tmp_path: Path,
) -> None:
    long = chat("word " * 80)

    async def body(board: Board, sim: Sim) -> None:
        asked = GenerateRequest("g/0", FOLDER.id, long, 8, sampling=GREEDY)
        ids = [i for e in await collect(board.generate(asked)) for i in getattr(e, "token_ids", ())]
        await vectors(board, CATS)
        await board.caching.settled()
        assert [entry.name for entry in board.caches()] == [None]
        back = await say(board, (*long, *ids, *words(" and then")))
        assert back.usage.cached_tokens >= len(long)

    sim = Sim(tmp_path, sampling=GREEDY, quirks={"prompt_cache_save_with_history": True})
    store = CacheStore(tmp_path / "store", CacheFingerprint("m", "1.3.0"), 1 << 24)
    async with sim.board(caches=store, park_min_tokens=10) as board:
        await body(board, sim)


def test_requests_for_vectors_wait_their_turn_and_are_refused_by_a_full_board(
    tmp_path: Path,
) -> None:
    async def body(board: Board, sim: Sim) -> None:
        sim.gate("prefill")
        first = Reader(board, request(CATS))
        await sim.at_gate()
        second, third = Reader(board, request(TRAINS)), Reader(board, request(CATS, TRAINS))
        await until(lambda: second.accepted and third.accepted)
        assert [reader.events[0].queued_ahead for reader in (first, second, third)] == [0, 1, 2]  # type: ignore[union-attr] # each has been accepted
        fourth = Reader(board, request(CATS))
        await fourth.task
        assert isinstance(fourth.error, QueueFull)
        assert board.report().queued == 2
        sim.pace(0)
        await asyncio.gather(first.task, second.task, third.task)
        assert all(reader.done for reader in (first, second, third))
        assert await vectors(board, CATS)

    board_test(tmp_path, body, queue_limit=2)


# -- who leaves -----------------------------------------------------------------------------------


def test_who_hangs_up_frees_the_board_and_what_waits_behind_is_served(tmp_path: Path) -> None:
    async def body(board: Board, sim: Sim) -> None:
        sim.gate("prefill")
        leaves = Reader(board, request(CATS, TRAINS, MORE_CATS))
        await sim.at_gate()
        waits, withdrawn = Reader(board, request(TRAINS)), Reader(board, request(CATS))
        await until(lambda: waits.accepted and withdrawn.accepted)
        for reader in (leaves, withdrawn):
            reader.task.cancel()
            await asyncio.gather(reader.task, return_exceptions=True)
        assert board.report().queued == 1
        sim.pace(0)
        await waits.task
        assert waits.done
        assert len(sim.tap.commands) == 2  # of the first one's three texts, and the second's one
        assert board.report().aborted == 2
        assert board.report().running == 0

    board_test(tmp_path, body)


# -- what fails -----------------------------------------------------------------------------------


def test_an_engine_that_dies_costs_those_vectors_and_the_next_are_made_by_a_fresh_one(
    tmp_path: Path,
) -> None:
    async def body(board: Board, sim: Sim) -> None:
        before = await vectors(board, CATS)
        sim.gate("prefill")
        lost = Reader(board, request(CATS))
        await sim.at_gate()
        os.kill(board.report().engine_pid, signal.SIGKILL)
        await lost.task
        assert isinstance(lost.error, EngineDied)
        sim.pace(0)
        await until(lambda: board.report().state is BoardState.READY)
        assert await vectors(board, CATS) == before
        assert (board.report().failed, board.report().engine_starts) == (1, 2)

    board_test(tmp_path, body)


def test_a_text_that_the_library_refuses_fails_alone(tmp_path: Path) -> None:
    async def body(board: Board, sim: Sim) -> None:
        with pytest.raises(RunFailed, match="rkllm_run returned -1"):
            await vectors(board, CATS, (1 << 30,), TRAINS)  # no token of the vocabulary
        assert len(await vectors(board, CATS, TRAINS)) == 2
        assert board.report().engine_starts == 1

    board_test(tmp_path, body, strict=False)


# -- what the cluster shall be --------------------------------------------------------------------


def test_a_pause_that_keeps_holds_vectors_back_until_it_is_over(tmp_path: Path) -> None:
    async def body(told: Governed) -> None:
        board, sim = told.board, told.sim
        sim.gate("prefill")
        runs = Reader(board, request(CATS))
        await sim.at_gate()
        adoption = await told.hold()  # it does not wait for the library
        assert adoption.held
        later = Reader(board, request(TRAINS))
        await until(lambda: later.accepted)
        sim.pace(0)
        await until(lambda: board.report().running == 0)
        assert (len(runs.events), len(later.events), board.report().queued) == (1, 1, 1)
        await told.release()
        await asyncio.gather(runs.task, later.task)
        assert runs.done
        assert later.done

    governed_test(tmp_path, body)


def test_a_pause_that_aborts_ends_them_and_takes_no_others(tmp_path: Path) -> None:
    async def body(told: Governed) -> None:
        board, sim = told.board, told.sim
        sim.gate("prefill")
        runs, waits = Reader(board, request(CATS, TRAINS)), Reader(board, request(CATS))
        await sim.at_gate()
        await told.hold(PauseMode.ABORT)
        await asyncio.gather(runs.task, waits.task)
        assert isinstance(runs.error, CallAborted)
        assert isinstance(waits.error, CallAborted)
        with pytest.raises(EnginePaused):
            await vectors(board, CATS)
        sim.pace(0)
        await told.release()
        assert await vectors(board, CATS)

    governed_test(tmp_path, body)


def test_a_pause_that_waits_returns_when_the_last_vectors_are_given_out(tmp_path: Path) -> None:
    async def body(told: Governed) -> None:
        board, sim = told.board, told.sim
        sim.gate("prefill")
        runs, waits = Reader(board, request(CATS)), Reader(board, request(TRAINS))
        await sim.at_gate()
        pausing = asyncio.create_task(told.hold(PauseMode.WAIT))
        await until(lambda: board.report().hold == "wait")
        with pytest.raises(EnginePaused):
            await vectors(board, CATS)
        assert not pausing.done()
        sim.pace(0)
        await pausing
        await asyncio.gather(runs.task, waits.task)
        assert runs.done
        assert waits.done

    governed_test(tmp_path, body)


def test_a_sleep_ends_behind_the_run_and_turns_away_what_waits(tmp_path: Path) -> None:
    async def body(told: Governed) -> None:
        board, sim = told.board, told.sim
        sim.gate("prefill")
        runs, waits = Reader(board, request(CATS)), Reader(board, request(TRAINS))
        await sim.at_gate()
        asleep = asyncio.create_task(nap(told))
        await until(lambda: board.report().hold == "keep")
        sim.pace(0)
        await asleep
        assert board.report().state is BoardState.ASLEEP
        await waits.task
        assert isinstance(waits.error, BoardAsleep)  # another board may be awake
        assert not runs.done
        await told.release()
        await runs.task
        assert runs.done  # they were computed before
        assert await vectors(board, CATS)

    governed_test(tmp_path, body)
