"""Frames survive any chunking, and nothing that is no frame gets through."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.errors import FrameCorrupt
from rkserve.native import frames
from rkserve.native.frames import FrameReader, Kind

INT32 = st.integers(-(2**31), 2**31 - 1)
JSON_KINDS = st.sampled_from([Kind.LOAD, Kind.ABORT, Kind.STOP, Kind.LOADED, Kind.ENDED, Kind.BEAT])
JSON = st.dictionaries(st.text(max_size=5), st.one_of(st.text(max_size=20), INT32, st.none()))


def read(data: bytes) -> list[tuple[Kind, bytes]]:
    return list(FrameReader().feed(data))


@given(kind=JSON_KINDS, value=JSON)
def test_a_json_frame_comes_back(kind: Kind, value: dict[str, object]) -> None:
    [(found, payload)] = read(frames.pack(kind, value))
    assert (found, frames.unpack(payload)) == (kind, value)


@given(run_id=st.integers(0, 2**32 - 1), token_id=INT32, text=st.binary(max_size=50))
def test_a_token_comes_back(run_id: int, token_id: int, text: bytes) -> None:
    [(kind, payload)] = read(frames.pack_token(run_id, token_id, text))
    assert (kind, frames.unpack_token(payload)) == (Kind.TOKEN, (run_id, token_id, text))


@given(run_id=st.integers(0, 2**32 - 1), params=JSON, ids=st.lists(INT32).map(tuple))
def test_a_run_comes_back(run_id: int, params: dict[str, object], ids: tuple[int, ...]) -> None:
    [(kind, payload)] = read(frames.pack_run(run_id, params, ids))
    assert (kind, frames.unpack_run(payload)) == (Kind.RUN, (run_id, params, ids))


@given(
    tokens=st.lists(st.tuples(INT32, st.binary(max_size=30)), max_size=8),
    borders=st.lists(st.integers(0, 400), max_size=12),
)
def test_any_chunking_gives_the_same_frames(
    tokens: list[tuple[int, bytes]], borders: list[int]
) -> None:
    data = b"".join(frames.pack_token(1, token_id, text) for token_id, text in tokens)
    edges = [0, *sorted(min(border, len(data)) for border in borders), len(data)]
    reader = FrameReader()
    found = [
        frames.unpack_token(payload)
        for a, b in itertools.pairwise(edges)
        for _, payload in reader.feed(data[a:b])
    ]
    assert found == [(1, token_id, text) for token_id, text in tokens]


def head(size: int, kind: int) -> bytes:
    return struct.pack("<IB", size, kind)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(head(0, Kind.BEAT), "claims 0 bytes", id="no kind"),
        pytest.param(head(frames.MAX_FRAME + 1, Kind.BEAT), "claims", id="an absurd length"),
        pytest.param(head(1, 99), "unknown kind 99", id="an unknown kind"),
        pytest.param(b"I rkllm: hello from the library\n", "claims", id="text in the stream"),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(FrameCorrupt, match=words):
        read(data)


@pytest.mark.parametrize(
    ("unpack", "payload", "words"),
    [
        pytest.param(frames.unpack, b"{", "not JSON", id="cut JSON"),
        pytest.param(frames.unpack, b"\xff", "not JSON", id="no UTF-8"),
        pytest.param(frames.unpack, b"[]", "not a JSON object", id="JSON, but a list"),
        pytest.param(frames.unpack_token, b"\0" * 7, "only 7 bytes", id="a cut token"),
        pytest.param(frames.unpack_run, b"\0" * 7, "is cut", id="a cut run"),
        pytest.param(
            frames.unpack_run, struct.pack("<II", 1, 2) + b"{}\0", "is cut", id="a cut token id"
        ),
    ],
)
def test_a_payload_that_is_not_what_it_says_is_refused(
    unpack: object, payload: bytes, words: str
) -> None:
    assert callable(unpack)
    with pytest.raises(FrameCorrupt, match=words):
        unpack(payload)


@pytest.mark.parametrize(
    ("params", "ids", "words"),
    [
        pytest.param({}, (1, 2**31), "32 bits", id="an id beyond 32 bits"),
        pytest.param({"prompt_text": "x" * frames.MAX_FRAME}, (), "above the limit", id="a book"),
    ],
)
def test_what_the_other_end_would_choke_on_is_refused_before_it_is_sent(
    params: dict[str, str], ids: tuple[int, ...], words: str
) -> None:
    with pytest.raises(FrameCorrupt, match=words):
        frames.pack_run(1, params, ids)


def test_the_byte_layout_is_what_the_module_says() -> None:
    assert frames.pack_token(7, -2, b"hi") == b"\x0b\0\0\0\x12\x07\0\0\0\xfe\xff\xff\xffhi"
    assert frames.pack(Kind.STOP, {}) == b"\x03\0\0\0\x04{}"
