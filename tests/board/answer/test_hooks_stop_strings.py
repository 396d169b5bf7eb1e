"""Bytes to text: whole characters, stop strings held back, and no dependence on token borders."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.board.answer.hooks import StopStrings, TextFinder
from rkserve.board.answer.transcript import Utf8Decoder


def feed_all(stops: tuple[str, ...], chunks: list[bytes]) -> tuple[list[str], str]:
    characters, search = Utf8Decoder(), StopStrings(stops)
    given_out = [search.feed(characters.feed(chunk)) for chunk in chunks]
    return given_out, "".join(given_out) + search.on_end()


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
        StopStrings(("x", ""))


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


def test_a_character_that_was_cut_in_two_does_not_spoil_what_follows() -> None:
    characters = Utf8Decoder()
    assert characters.feed("é".encode()[:1]) == ""
    characters.drop()
    assert characters.feed(b"ab") == "ab"


@pytest.mark.parametrize(
    ("texts", "pieces", "found"),
    [
        pytest.param(("END",), ["E", "N", "D", "x"], [None, None, "END", None], id="in pieces"),
        pytest.param(("a",), ["bab", "b", "a"], ["a", None, "a"], id="each time"),
        pytest.param(("aa",), ["a", "a", "a", "b"], [None, "aa", "aa", None], id="overlapping"),
        pytest.param(("abc", "b"), ["ab", "c"], ["b", "abc"], id="the first to be complete"),
        pytest.param(("b", "ab"), ["ab"], ["ab"], id="of two at once the longer"),
        pytest.param(
            ("abcd", "abc"), ["abcd"], ["abc"], id="of two in a piece the one that ends first"
        ),
        pytest.param((), ["a"], [None], id="nothing to look for"),
    ],
)
def test_a_finder_says_when_a_text_is_complete(
    texts: tuple[str, ...], pieces: list[str], found: list[str | None]
) -> None:
    finder = TextFinder(texts)
    assert [finder.feed(piece) for piece in pieces] == found


@given(
    text=st.text("abc", max_size=30),
    texts=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple),
    borders=st.lists(st.integers(0, 30), max_size=8),
)
def test_a_finder_misses_nothing_wherever_the_pieces_are_cut(
    text: str, texts: tuple[str, ...], borders: list[int]
) -> None:
    finder, seen = TextFinder(texts), ""
    for piece in cut(text.encode(), borders):
        before, seen = seen, seen + piece.decode()
        ends = range(len(before) + 1, len(seen) + 1)
        complete = any(seen[:end].endswith(t) for end in ends for t in texts)
        assert (finder.feed(piece.decode()) is not None) is complete


def test_an_empty_text_to_look_for_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be empty"):
        TextFinder(("x", ""))
