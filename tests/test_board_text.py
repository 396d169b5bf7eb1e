"""Bytes to text: whole characters, stop strings held back, and no dependence on token borders."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.board.text import TextStream


def feed_all(stops: tuple[str, ...], chunks: list[bytes]) -> tuple[list[str], str]:
    stream = TextStream(stops)
    given_out = [stream.feed(chunk) for chunk in chunks]
    return given_out, "".join(given_out) + stream.flush()


@pytest.mark.parametrize(
    ("stops", "chunks", "pieces", "text"),
    [
        pytest.param((), [b"Hel", b"lo"], ["Hel", "lo"], "Hello", id="plain text flows at once"),
        pytest.param((), [b"caf\xc3", b"\xa9"], ["caf", "é"], "café", id="two bytes, two tokens"),
        pytest.param(
            (),
            [b"\xf0\x9f", b"\x8d", b"\xb5!"],
            ["", "", "🍵!"],
            "🍵!",
            id="four bytes in three tokens",
        ),
        pytest.param((), [b"ok\xe4\xbd"], ["ok"], "ok", id="a character cut by the end is dropped"),
        pytest.param((), [b"a\xffb"], ["a\ufffdb"], "a\ufffdb", id="a byte that is no UTF-8"),
        pytest.param(("END",), [b"a", b"E", b"N", b"D"], ["a", "", "", ""], "a", id="in 3 tokens"),
        pytest.param(("END",), [b"aE", b"Nx"], ["a", "ENx"], "aENx", id="a false beginning"),
        pytest.param(("END",), [b"aEN"], ["a"], "aEN", id="an end without the stop releases it"),
        pytest.param(("END",), [b"aENDb", b"c"], ["a", ""], "a", id="nothing after the stop"),
        pytest.param(("aab",), [b"aa", b"ab"], ["", "a"], "a", id="a stop that overlaps itself"),
        pytest.param(("bc", "abcd"), [b"abcd"], ["a"], "a", id="the first to be complete wins"),
        pytest.param(("bc", "abc"), [b"abc"], [""], "", id="of two at once the longer wins"),
        pytest.param(("é",), [b"a\xc3", b"\xa9b"], ["a", ""], "a", id="a stop cut by a token"),
        pytest.param(("\n\n",), [b"a\n", b"b\n", b"\n"], ["a", "\nb", ""], "a\nb", id="newlines"),
    ],
)
def test_text_is_given_out_when_it_is_certain(
    stops: tuple[str, ...], chunks: list[bytes], pieces: list[str], text: str
) -> None:
    assert feed_all(stops, chunks) == (pieces, text)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        TextStream(("x", ""))


def cut(data: bytes, borders: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(border, len(data)) for border in borders), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


@given(
    data=st.one_of(st.binary(max_size=40), st.text("aabcé🍵", max_size=20).map(str.encode)),
    stops=st.lists(st.text("abcé🍵\ufffd", min_size=1, max_size=4), max_size=3).map(tuple),
    borders=st.lists(st.integers(0, 40), max_size=8),
)
def test_any_chunking_gives_the_text_of_no_chunking(
    data: bytes, stops: tuple[str, ...], borders: list[int]
) -> None:
    assert feed_all(stops, cut(data, borders))[1] == feed_all(stops, [data])[1]


@given(
    text=st.text("abcé", max_size=20),
    stops=st.lists(st.text("abcé", min_size=1, max_size=3), min_size=1, max_size=3).map(tuple),
    borders=st.lists(st.integers(0, 40), max_size=8),
)
def test_the_answer_is_the_text_before_the_stop_that_is_complete_first(
    text: str, stops: tuple[str, ...], borders: list[int]
) -> None:
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    pieces, answer = feed_all(stops, cut(text.encode(), borders))
    assert answer == expected
    assert all(stop not in "".join(pieces) for stop in stops)
