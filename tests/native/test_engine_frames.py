"""Frames survive any chunking, and nothing that is no frame gets through."""

from __future__ import annotations

import itertools
import os
import struct
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.core.errors import FrameCorrupt, LoadFailed
from rkserve.core.run_params import Scored
from rkserve.native import engine_frames
from rkserve.native.engine_frames import FrameKind, FrameReader, FrameWriter, NpuLock

INT32 = st.integers(-(2**31), 2**31 - 1)
RUN_ID = st.integers(0, 2**32 - 1)
ENTRY = st.integers(0, engine_frames.MAX_ENTRIES - 1)
PACKED_KINDS = {FrameKind.RUN, FrameKind.TOKEN, FrameKind.SCORES}
JSON_KINDS = st.sampled_from(sorted(set(FrameKind) - PACKED_KINDS))
JSON = st.dictionaries(st.text(max_size=5), st.one_of(st.text(max_size=20), INT32, st.none()))
Token = tuple[int, int, int, bytes, bool]


def read(data: bytes) -> list[tuple[FrameKind, bytes]]:
    return list(FrameReader().feed(data))


@given(kind=JSON_KINDS, value=JSON)
def test_a_json_frame_comes_back(kind: FrameKind, value: dict[str, object]) -> None:
    [(found, payload)] = read(engine_frames.pack(kind, value))
    assert (found, engine_frames.unpack(payload)) == (kind, value)


TOKEN = st.tuples(RUN_ID, ENTRY, INT32, st.binary(max_size=50), st.booleans())


@given(token=TOKEN)
def test_a_token_comes_back(token: Token) -> None:
    [(kind, payload)] = read(engine_frames.pack_token(*token))
    assert (kind, engine_frames.unpack_token(payload)) == (FrameKind.TOKEN, token)


LOGPROB = st.floats(-9999, 0)
SCORED = st.builds(Scored, LOGPROB, st.lists(st.tuples(INT32, LOGPROB), max_size=4).map(tuple))


@given(run_id=RUN_ID, found=st.lists(SCORED, max_size=5).map(tuple), prompt=st.booleans())
def test_logprobs_come_back(run_id: int, found: tuple[Scored, ...], prompt: bool) -> None:
    [(kind, payload)] = read(engine_frames.pack_scores(run_id, found, prompt=prompt))
    assert (kind, engine_frames.unpack_scores(payload)) == (
        FrameKind.SCORES,
        (run_id, prompt, found),
    )


@pytest.mark.parametrize("size", [0, 6, 12, 25, 30])
def test_logprobs_that_are_cut_or_too_long_are_corrupt(size: int) -> None:
    [(_, payload)] = read(engine_frames.pack_scores(1, [Scored(-1.0, ((5, -2.0),))], prompt=False))
    assert len(payload) == 29
    with pytest.raises(FrameCorrupt):
        engine_frames.unpack_scores((payload + b"x")[:size])


ENTRIES = st.lists(st.lists(INT32, max_size=20).map(tuple), max_size=9).map(tuple)


@given(run_id=RUN_ID, params=JSON, entries=ENTRIES)
def test_a_run_comes_back(
    run_id: int, params: dict[str, object], entries: tuple[tuple[int, ...], ...]
) -> None:
    [(kind, payload)] = read(engine_frames.pack_run(run_id, params, entries))
    assert (kind, engine_frames.unpack_run(payload)) == (FrameKind.RUN, (run_id, params, entries))


@given(
    tokens=st.lists(TOKEN, max_size=8),
    borders=st.lists(st.integers(0, 400), max_size=12),
)
def test_any_chunking_gives_the_same_frames(tokens: list[Token], borders: list[int]) -> None:
    data = b"".join(engine_frames.pack_token(*token) for token in tokens)
    edges = [0, *sorted(min(border, len(data)) for border in borders), len(data)]
    reader = FrameReader()
    found = [
        engine_frames.unpack_token(payload)
        for a, b in itertools.pairwise(edges)
        for _, payload in reader.feed(data[a:b])
    ]
    assert found == tokens


def head(size: int, kind: int) -> bytes:
    return struct.pack("<IB", size, kind)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        pytest.param(head(0, FrameKind.BEAT), "claims 0 bytes", id="no kind"),
        pytest.param(
            head(engine_frames.MAX_FRAME + 1, FrameKind.BEAT), "claims", id="an absurd length"
        ),
        pytest.param(head(1, 99), "unknown frame kind 99", id="an unknown kind"),
        pytest.param(b"I rkllm: hello from the library\n", "claims", id="text in the stream"),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(FrameCorrupt, match=words):
        read(data)


def run_payload(n_entries: int, *counts: int, rest: bytes = b"{}") -> bytes:
    return struct.pack(f"<III{len(counts)}I", 1, 2, n_entries, *counts) + rest


@pytest.mark.parametrize(
    ("unpack", "payload", "words"),
    [
        pytest.param(engine_frames.unpack, b"{", "not JSON", id="cut JSON"),
        pytest.param(engine_frames.unpack, b"\xff", "not JSON", id="no UTF-8"),
        pytest.param(engine_frames.unpack, b"[]", "not a JSON object", id="JSON, but a list"),
        pytest.param(engine_frames.unpack_token, b"\0" * 9, "only 9 bytes", id="a cut token"),
        pytest.param(engine_frames.unpack_run, b"\0" * 11, "is truncated", id="a cut run"),
        pytest.param(
            engine_frames.unpack_run, run_payload(2, 0, rest=b""), "is truncated", id="cut lengths"
        ),
        pytest.param(
            engine_frames.unpack_run, run_payload(1, 0, rest=b"{}\0"), "is truncated", id="a cut id"
        ),
        pytest.param(
            engine_frames.unpack_run, run_payload(2**32 - 1), "claims 4294967295", id="a crowd"
        ),
        pytest.param(
            engine_frames.unpack_run,
            run_payload(2, 1, 2, rest=b"{}" + b"\0" * 8),
            "claims 3 token ids and has 2",
            id="too few ids",
        ),
        pytest.param(
            engine_frames.unpack_run,
            run_payload(1, 0, rest=b"{}" + b"\0" * 4),
            "claims 0 token ids and has 1",
            id="an id of nobody's",
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
    ("params", "entries", "words"),
    [
        pytest.param({}, ((1,), (1, 2**31)), "32 bits", id="an id beyond 32 bits"),
        pytest.param(
            {"texts": "x" * engine_frames.MAX_FRAME}, ((),), "above the limit", id="a book"
        ),
        pytest.param({}, ((),) * 257, "257 entries is above the limit", id="a crowd"),
    ],
)
def test_what_the_other_end_would_choke_on_is_refused_before_it_is_sent(
    params: dict[str, str], entries: tuple[tuple[int, ...], ...], words: str
) -> None:
    with pytest.raises(FrameCorrupt, match=words):
        engine_frames.pack_run(1, params, entries)


def test_the_byte_layout_is_what_the_module_says() -> None:
    token = engine_frames.pack_token(7, 3, -2, b"hi", True)
    assert token == b"\x0d\0\0\0\x12\x07\0\0\0\x03\x01\xfe\xff\xff\xffhi"
    run = engine_frames.pack_run(7, {}, ((5,), (), (6,)))
    counts = b"\x01\0\0\0\0\0\0\0\x01\0\0\0"
    assert run == (
        b"\x23\0\0\0\x02\x07\0\0\0\x02\0\0\0\x03\0\0\0" + counts + b"{}\x05\0\0\0\x06\0\0\0"
    )
    assert engine_frames.pack(FrameKind.STOP, {}) == b"\x03\0\0\0\x04{}"


FRAMES = [bytes([number % 256]) * 100 for number in range(2000)]


def test_a_full_pipe_blocks_no_sender_and_frames_keep_their_order() -> None:
    read_fd, write_fd = os.pipe()
    writer = FrameWriter(write_fd)
    for frame in FRAMES:  # more than the pipe takes: nobody has read yet
        writer.put(frame)
    closing = threading.Thread(target=writer.close)
    closing.start()
    found = b""
    while len(found) < sum(map(len, FRAMES)):
        found += os.read(read_fd, 1 << 16)
    closing.join()
    assert found == b"".join(FRAMES)
    os.close(read_fd)
    os.close(write_fd)


def test_closing_writes_all_that_was_queued_before() -> None:
    read_fd, write_fd = os.pipe()
    writer = FrameWriter(write_fd)
    writer.put(b"one")
    writer.put(b"two")
    writer.close()
    os.close(write_fd)
    assert os.read(read_fd, 100) == b"onetwo"
    os.close(read_fd)


def test_the_second_process_is_told_who_has_the_npu(tmp_path: Path) -> None:
    first, second = NpuLock(tmp_path / "npu" / "lock"), NpuLock(tmp_path / "npu" / "lock")
    first.take(0.0)
    with pytest.raises(LoadFailed, match=f"pid {os.getpid()}, lock .* within 0 s"):
        second.take(0.0)
    os.close(first.fd)
    os.close(second.fd)


def test_the_lock_is_waited_for(tmp_path: Path) -> None:
    first, second = NpuLock(tmp_path / "lock"), NpuLock(tmp_path / "lock")
    first.take(0.0)
    release = threading.Timer(0.1, os.close, (first.fd,))
    release.start()
    began_s = time.monotonic()
    second.take(30.0)
    assert time.monotonic() - began_s >= 0.05
    assert second.path.read_text() == str(os.getpid())
    os.close(second.fd)


def test_a_folder_that_cannot_be_used_is_an_error_of_the_load(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadFailed, match=r"NPU lock .* cannot be used"):
        NpuLock(tmp_path / "file" / "lock").take(0.0)
