"""A loaded engine: its adapters; and stop strings, with one text and KV cache in three ways.

By an abort, which is the default; by a pause that is drained by a limit of one token; by a pause
that is drained by an abort. Quirks choose. A real engine process over the simulated runtime in
strict mode, where a misuse of the library ends the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from rkserve.board.board import Board
from rkserve.board.run.loaded_engine import AdapterNeed, AdapterTable
from rkserve.core.errors import AdapterBroken
from rkserve.core.messages import AdapterRef, Delta, Finished, FinishReason, GenerateRequest
from tests.support.boards.board_bench import text_of, until
from tests.support.boards.fakes import run_loop
from tests.support.sim.sim_board import CALM, FOLDER, GREEDY, Sim, chat, words

WHOLE = f"north boat lamp river stone green apple cloud{', and then some more words' * 40}"
ASKED = chat(f"Repeat after me: {WHOLE}")
LENGTH = len(words(WHOLE))
DRAINED = 2  # tokens that a drain adds at most: what resumes, and one that an abort lets through
# The library stands still after so many tokens, until the board asks it to stop. All of the stop
# strings come before.
STANDS = 20
# A token of 3 ms: an answer that nobody stopped would take half a second.
PACE = 0.05


@dataclass(frozen=True)
class Way:
    """How a run is stopped; ``pauses`` where it is paused for that, and ``limit`` drains it."""

    pauses: bool = False
    limit: bool = False

    def sim(self, place: Path, release: str, *, history: bool) -> Sim:
        quirks = {"stop_by_pause": self.pauses, "drain_by_limit": self.limit}
        environ = {"RKSIM_TIME_SCALE": str(PACE)}
        if history:
            quirks |= {"pause_with_history": True, "prefix_reuse_in_ram": False}
            environ["RKSIM_PAUSE_WITH_HISTORY"] = "1"
        return Sim(place, release, environ, quirks, GREEDY)


ABORT = Way()
PAUSE_AND_LIMIT = Way(pauses=True, limit=True)
PAUSE_AND_ABORT = Way(pauses=True)
WAYS = [
    pytest.param("1.2.3", ABORT, id="1.2.3, by an abort"),
    pytest.param("1.2.3", PAUSE_AND_ABORT, id="1.2.3, by a pause that is drained by an abort"),
    pytest.param("1.3.0", ABORT, id="1.3.0, by an abort"),
    pytest.param("1.3.0", PAUSE_AND_ABORT, id="1.3.0, by a pause that is drained by an abort"),
    pytest.param("1.3.0", PAUSE_AND_LIMIT, id="1.3.0, by a pause that is drained by a limit"),
]


def asked(*stop: str, native: bool = False) -> GenerateRequest:
    return GenerateRequest(
        "r/0", FOLDER.id, ASKED, 1000, sampling=GREEDY, stop=stop, native_pause=native
    )


def stand(sim: Sim) -> None:
    """Let the next run stand still where it has to be stopped, and what drains it be slow."""
    sim.gate(f"token:{STANDS}", lambda: sim.pace(PACE))


async def told(board: Board, request: GenerateRequest) -> tuple[str, Finished]:
    """Return the text and the end, once the board is free again."""
    events = [event async for event in board.generate(request)]
    finished = events[-1]
    assert isinstance(finished, Finished)
    ids = [i for event in events if isinstance(event, Delta) for i in event.token_ids]
    assert finished.usage.completion_tokens == len(ids)
    await until(lambda: board.report().running == 0)
    return text_of(events), finished


@pytest.mark.parametrize("history", [False, True], ids=["single turn", "conversation"])
@pytest.mark.parametrize(("release", "way"), WAYS)
def test_a_stop_string_gives_the_same_text_and_kv_cache_in_each_way(
    tmp_path: Path, release: str, way: Way, history: bool
) -> None:
    async def main() -> None:
        async with sim.board(patience=CALM) as board:
            for stops, stop in enumerate((" lamp", "stone gr", "apple cloud"), 1):
                await stopped(board, stop)
                assert sim.tap.called.count("drain") == stops * way.pauses
            sim.pace(0)
            # What follows is not harmed by how the one before was stopped.
            text, finished = await told(board, asked(native=not history))
            assert (text, finished.reason) == (WHOLE, FinishReason.STOP)
            assert board.report().engine_starts == 1

    async def stopped(board: Board, stop: str) -> None:
        tap, before = sim.tap, sim.tap.tokens
        stand(sim)
        text, finished = await told(board, asked(stop, native=not history))
        assert (text, finished.reason) == (WHOLE.partition(stop)[0], FinishReason.STOP)
        # The NPU was stopped: hardly a token was made beyond the answer, of which there are many.
        made = tap.tokens - before
        assert finished.usage.completion_tokens <= made < LENGTH / 2
        # What can be used of the KV cache is nothing in each way, and what it holds is told truly.
        report = board.kv()
        assert board.report().kv_positions == 0
        assert report.entries == await tap.call("kv_sizes")
        if history:
            tokens = len(ASKED) + finished.usage.completion_tokens
            assert tokens - 1 <= report.entries[0] <= len(ASKED) + made + DRAINED
        else:
            assert report.entries == (0,)

    sim = way.sim(tmp_path, release, history=history)
    run_loop(main(), 120.0)


@pytest.mark.parametrize(("release", "way"), WAYS)
def test_what_was_stopped_in_a_conversation_is_not_taken_for_its_history(
    tmp_path: Path, release: str, way: Way
) -> None:
    """A drained token, or one that an abort let through, is in the KV cache and nowhere else."""

    async def main() -> None:
        async with sim.board(patience=CALM) as board:
            stand(sim)
            first, _ = await told(board, asked(" stone"))
            sim.pace(0)
            turns = chat(f"Repeat after me: {WHOLE}", first, "What did I say first?")
            again = GenerateRequest("r/1", FOLDER.id, turns, 1000, sampling=GREEDY)
            text, finished = await told(board, again)
            assert text.startswith("You said first: ")
            assert "north boat lamp river stone green apple cloud, and then some more words" in text
            assert finished.usage.cached_tokens == 0
            assert (await told(board, again))[0] == text

    sim = way.sim(tmp_path, release, history=True)
    run_loop(main(), 120.0)


# -- which adapters a handle has loaded; there is no unloading, only a fresh handle --

MB = 1 << 20


def adapter(name: str, version: str = "1", digest: str = "ab" * 32) -> AdapterRef:
    return AdapterRef(name, version, digest)


A, B, C, D = (adapter(name) for name in "abcd")


def table(*loaded: AdapterRef, limit: int = 3, budget_bytes: int | None = None) -> AdapterTable:
    made = AdapterTable(limit, budget_bytes)
    for ref in loaded:
        assert made.need(ref, MB) is AdapterNeed.LOAD
        made.loaded(ref, MB)
    return made


def test_an_adapter_is_loaded_once() -> None:
    made = table(A)
    assert made.need(A, MB) is AdapterNeed.NOTHING
    assert (made.keys, made.used_bytes) == ((A.key,), MB)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(adapter("a", version="2"), id="another version"),
        pytest.param(adapter("a", digest="cd" * 32), id="another content"),
        pytest.param(AdapterRef("a", "1", "ab" * 32, scale=0.5), id="another scale"),
    ],
)
def test_what_differs_is_another_adapter(other: AdapterRef) -> None:
    assert table(A).need(other, MB) is AdapterNeed.LOAD


def test_one_that_was_asked_for_and_not_loaded_is_asked_for_again() -> None:
    made = AdapterTable(3)
    assert made.need(A, MB) is made.need(A, MB) is AdapterNeed.LOAD
    assert made.keys == ()


def test_one_too_many_needs_a_fresh_handle() -> None:
    made = table(A, B, C)
    assert made.need(D, MB) is AdapterNeed.ENGINE
    assert made.keys == (A.key, B.key, C.key), "that handle serves those it has until it is gone"


def test_the_most_recently_used_is_last() -> None:
    made = table(A, B, C)
    assert made.need(A, MB) is AdapterNeed.NOTHING
    assert made.keys == (B.key, C.key, A.key)


def test_bytes_count_too() -> None:
    made = table(A, B, limit=10, budget_bytes=3 * MB)
    assert made.need(C, MB) is AdapterNeed.LOAD
    assert made.used_bytes == 2 * MB
    assert made.need(C, MB + 1) is made.need(C, 3 * MB) is AdapterNeed.ENGINE


def test_one_that_no_handle_could_hold_is_refused_with_the_numbers() -> None:
    with pytest.raises(AdapterBroken, match=r"'a@1'.* 3000 bytes.* 2000 bytes") as refused:
        AdapterTable(3, budget_bytes=2000).need(A, 3000)
    assert refused.value.http_status == 400


def test_one_that_the_runtime_refused_is_not_tried_again_on_that_handle() -> None:
    made = table(A)
    made.refused(B, "E rkllm: invalid lora")
    with pytest.raises(AdapterBroken, match=r"'b@1' .*: E rkllm: invalid lora"):
        made.need(B, MB)
    assert made.need(A, MB) is AdapterNeed.NOTHING, "the others are unharmed"
