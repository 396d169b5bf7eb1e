"""A generation of a local board: its pauses, and control from the program that started it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rkserve.core.errors import (
    HookFailed,
    StateConflict,
)
from rkserve.local import (
    Decoded,
    Generation,
    LocalBoard,
    open_board,
)
from tests.support.paths import PROJECT

MODEL = PROJECT / "models" / "sim-chat"
SIMULATED = {"strict": True, "time_scale": 0.02}
COUNTED = "1, 2, 3, 4, 5, 6, 7, 8."


@pytest.fixture(scope="module")
def board() -> Iterator[LocalBoard]:
    with open_board(MODEL, simulated=SIMULATED) as opened:
        yield opened


# -- pausing ----------------------------------------------------------------------------------


def at_five(piece: Decoded) -> str | None:
    return "five is there" if piece.answer.endswith("5") else None


def test_a_condition_pauses_and_its_handler_edits(board: LocalBoard) -> None:
    seen: list[tuple[str, str | None, str]] = []
    threads = []

    def handler(generation: Generation) -> None:
        assert generation.paused is not None
        seen.append((generation.text, generation.paused.by, generation.paused.kv.value))
        threads.append(threading.current_thread())
        info = generation.edit(" five", replace_last=1)
        assert info.state.value == "paused"

    answer = board.generate("Count to 8", temperature=0, pause_when=at_five, on_pause=handler)
    assert seen == [("1, 2, 3, 4, 5", "five is there", "kept")]
    assert threads == [threading.current_thread()], "a handler may wait: it holds nobody up"
    assert answer.text.startswith("1, 2, 3, 4, five")
    assert len(answer.token_ids) == answer.usage.completion_tokens


def test_an_unedited_pause_changes_nothing(board: LocalBoard) -> None:
    pauses: list[str] = []
    answer = board.generate(
        "Count to 8",
        temperature=0,
        pause_when=lambda piece: piece.text.strip() == ",",
        on_pause=lambda generation: pauses.append(generation.text),
    )
    assert answer.text == COUNTED
    assert len(pauses) == 7


def test_a_handler_may_abort(board: LocalBoard) -> None:
    def stop(generation: Generation) -> None:
        generation.abort()

    answer = board.generate("Count to 60", temperature=0, pause_on=["9"], on_pause=stop)
    assert (answer.text, answer.finish_reason) == (f"{COUNTED[:-1]}, 9", "abort")


def test_a_handler_that_raises_frees_the_board(board: LocalBoard) -> None:
    def fail(_: Generation) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        board.generate("Count to 60", temperature=0, pause_when=at_five, on_pause=fail)
    assert board.generate("Count to 8", temperature=0).text == COUNTED


def test_a_condition_that_raises_ends_its_generation_alone(board: LocalBoard) -> None:
    def broken(_: Decoded) -> bool:
        raise KeyError("mine")

    with pytest.raises(HookFailed, match="KeyError"):
        board.generate("x", pause_when=broken, on_pause=lambda _: None)
    assert board.generate("Count to 8", temperature=0).text == COUNTED


def test_a_generation_is_controlled_from_another_thread(board: LocalBoard) -> None:
    with board.start("Count to 60", temperature=0, pause_when=at_five) as generation:
        for piece in generation:
            if piece.paused is not None:
                break
        with pytest.raises(StateConflict):
            generation.pause()
        done = threading.Thread(target=lambda: (generation.edit("!"), generation.resume()))
        done.start()
        answer = generation.answer()
        done.join()
    assert "5!" in answer.text
    assert generation.info() is None


def test_a_call_from_the_boards_own_thread_is_refused_and_does_not_hang(
    board: LocalBoard,
) -> None:
    def meddle(_: Decoded) -> bool:
        board.kv()
        return False

    with pytest.raises(HookFailed, match="RuntimeError"):
        board.generate("x", pause_when=meddle, on_pause=lambda _: None)
