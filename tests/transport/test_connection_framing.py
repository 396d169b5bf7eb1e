"""The greeting and the frames of the channel, without a socket."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.transport.connection import (
    HEARTBEAT,
    MAX_FRAME,
    BoardHandshake,
    ChannelError,
    ChannelFrames,
    RouterHandshake,
    frame,
    new_key,
)
from rkserve.transport.encryption import new_identity

KEY = b"k" * 32


def greet(board: BoardHandshake, router: RouterHandshake) -> list[bytes]:
    """Let both sides greet each other; return what crossed the wire."""
    crossed = [board.opening()]
    while not (board.done and router.done):
        crossed.append(router.take(crossed[-1]))
        if not router.done:
            crossed.append(board.take(crossed[-1]))
    return crossed


def test_who_knows_the_key_is_let_in_and_learns_the_number() -> None:
    board, router = BoardHandshake(KEY, 7), RouterHandshake(KEY)
    assert router.opening() == b""
    assert len(board.opening()) == router.need
    greet(board, router)
    assert router.number == 7


def test_the_key_never_crosses_and_no_greeting_is_like_another() -> None:
    key = new_key()
    first, second = (
        b"".join(greet(BoardHandshake(key, 1), RouterHandshake(key))) for _ in range(2)
    )
    assert key not in first
    assert first != second


def test_a_router_with_another_key_is_refused() -> None:
    board = BoardHandshake(KEY, 1)
    answer = RouterHandshake(b"x" * 32).take(board.opening())
    with pytest.raises(ChannelError, match="Router does not know the key"):
        board.take(answer)
    assert not board.done


def test_an_answer_that_was_overheard_is_worth_nothing() -> None:
    _, overheard, *_ = greet(BoardHandshake(KEY, 1), RouterHandshake(KEY))
    with pytest.raises(ChannelError):
        BoardHandshake(KEY, 1).take(overheard)


def test_a_board_that_does_not_know_the_key_is_refused() -> None:
    router, impostor = RouterHandshake(KEY), BoardHandshake(b"x" * 32, 1)
    router.take(impostor.opening())
    with pytest.raises(ChannelError, match="board does not know the key"):
        router.take(b"\0" * router.need)
    assert not router.done


def test_a_proof_cannot_be_sent_back_to_who_made_it() -> None:
    board, router = BoardHandshake(KEY, 1), RouterHandshake(KEY)
    own = router.take(board.opening())
    with pytest.raises(ChannelError):
        router.take(own[-32:] + b"\0" * 8)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        pytest.param(0, "something else", id="another program"),
        pytest.param(9, "another version", id="another version of rkserve"),
    ],
)
def test_who_speaks_another_language_is_told_apart(changed: int, words: str) -> None:
    opening = bytearray(BoardHandshake(KEY, 1).opening())
    opening[changed] ^= 1
    with pytest.raises(ChannelError, match=words):
        RouterHandshake(KEY).take(bytes(opening))


def test_ends_of_which_one_encrypts_alone_do_not_connect() -> None:
    in_clear, encrypted = BoardHandshake(KEY, 1), BoardHandshake(KEY, 1, new_identity())
    for board, router in (
        (in_clear, RouterHandshake(KEY, b"f" * 32)),
        (encrypted, RouterHandshake(KEY)),
    ):
        with pytest.raises(ChannelError, match="one end encrypts and the other one does not"):
            router.take(board.opening())


def test_a_proof_is_of_one_certificate() -> None:
    """They cannot be passed on between connections with two certificates."""
    board, router = BoardHandshake(KEY, 1, new_identity()), RouterHandshake(KEY, b"f" * 32)
    answer = router.take(board.opening())
    with pytest.raises(ChannelError, match="Router does not know the key"):
        board.take(answer)


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(1, 9), max_size=60))
def test_frames_are_found_however_the_bytes_are_cut(payloads: list[bytes], cuts: list[int]) -> None:
    data = b"".join(HEARTBEAT if not one else frame(one) for one in payloads)
    frames, found = ChannelFrames(), []
    for cut in cuts:
        found += frames.feed(data[:cut])
        data = data[cut:]
    assert found + frames.feed(data) == payloads


def test_a_long_frame_in_small_pieces_is_put_together_once() -> None:
    # Joined with every piece it would be 250 GB that are copied.
    payload, piece = bytes(32 * 1024 * 1024), 2048
    data, frames = frame(payload), ChannelFrames()
    *early, last = [frames.feed(data[at : at + piece]) for at in range(0, len(data), piece)]
    assert not any(early)
    assert last == [payload]


def test_a_frame_too_long_to_be_one_is_refused_before_it_is_there() -> None:
    with pytest.raises(ChannelError, match="bytes"):
        ChannelFrames().feed((MAX_FRAME + 1).to_bytes(4, "big"))
