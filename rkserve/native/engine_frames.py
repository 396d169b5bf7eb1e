"""Frames between a board and its engine process: codec, writer, and the lock of the process.

A frame is ``<u32 length><u8 kind><payload>``, little-endian, the length counting kind and payload.
Tokens, the only frequent frame, vectors and images are packed; everything else is JSON.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import struct
import threading
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from rkserve.core.errors import FrameCorrupt, LoadFailed
from rkserve.core.files import open_private, private_folder
from rkserve.core.run_params import (
    Embeds,
    EncoderShape,
    EncoderStates,
    Guide,
    GuideKind,
    Picture,
    Sampling,
    Scored,
    Stepwise,
)

MAX_FRAME = 16 * 1024 * 1024  # far above the largest prompt; a larger one is a corrupt stream

_FLOAT = 4
_HEAD = struct.Struct("<IB")
_TOKEN = struct.Struct("<IBIBBi")  # the head of a token frame, then what its body holds
_TOKEN_BODY = struct.Struct("<IBBi")  # run id, entry of the batch, text is delayed, token id
_TOKEN_SIZE = 1 + _TOKEN_BODY.size
_SCORES = struct.Struct("<IBH")  # run id, 1 if they are of the prompt, rows
_SCORE = struct.Struct("<dH")  # a log-probability, and the number of likeliest tokens that follow
_LIKELY = struct.Struct("<id")  # an id and its log-probability
_RUN = struct.Struct("<III")  # run id, bytes of JSON, entries; then the entries' lengths, u32 each

_EMBEDS = struct.Struct("<III")  # run id, rows, columns; then float32 values
_ENCODER = struct.Struct("<5I")  # run id, tokens, layers, KV heads, head size; then K, V and so on
_PICTURE = struct.Struct("<IIIQ")  # run id, width, height, owner; then pixels
_VECTOR = struct.Struct("<II")  # run id, tokens of the text; then float32 values

MAX_ENTRIES = 256  # an entry is one byte of a token frame


class FrameKind(IntEnum):
    """The kind of a frame. LOAD to ENCODER are commands to the engine, the rest its events."""

    LOAD = 1
    RUN = 2
    ABORT = 3
    STOP = 4
    PAUSE = 5
    CALL = 6
    IMAGE = 7
    EMBEDS = 8
    ENCODER = 9
    LOADED = 16
    LOAD_FAILED = 17
    TOKEN = 18
    ENDED = 19
    BEAT = 20
    RESULT = 21
    VECTOR = 22
    SCORES = 23


def pack(kind: FrameKind, value: dict[str, Any]) -> bytes:
    """Return a JSON frame."""
    payload = json.dumps(value, separators=(",", ":")).encode()
    return _head(len(payload) + 1, kind) + payload


def unpack(payload: bytes) -> dict[str, Any]:
    """Return the value of a JSON frame. Raises ``FrameCorrupt``."""
    try:
        value = json.loads(payload)
    except ValueError as exc:
        raise FrameCorrupt(f"a frame is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise FrameCorrupt("a frame is not a JSON object")
    return value


def pack_token(run_id: int, entry: int, token_id: int, text: bytes, waiting: bool) -> bytes:
    """Return the frame of one generated token."""
    size = len(text) + _TOKEN_SIZE
    return _TOKEN.pack(size, FrameKind.TOKEN, run_id, entry, waiting, token_id) + text


def unpack_token(payload: bytes) -> tuple[int, int, int, bytes, bool]:
    """Return run id, entry, token id, text, and the flag of delayed text.

    Raises ``FrameCorrupt``.
    """
    if len(payload) < _TOKEN_BODY.size:
        raise FrameCorrupt(f"a token frame has only {len(payload)} bytes")
    run_id, entry, waiting, token_id = _TOKEN_BODY.unpack_from(payload)
    return run_id, entry, token_id, payload[_TOKEN_BODY.size :], waiting != 0


def pack_vector(run_id: int, tokens: int, vector: bytes) -> bytes:
    """Return the frame of a text's vector. Raises ``FrameCorrupt`` if it is too long."""
    body = _VECTOR.pack(run_id, tokens) + vector
    return _head(1 + len(body), FrameKind.VECTOR) + body


def unpack_vector(payload: bytes) -> tuple[int, int, bytes]:
    """Return run id, tokens and float32 values of a vector's frame. Raises ``FrameCorrupt``."""
    if len(payload) < _VECTOR.size or (len(payload) - _VECTOR.size) % _FLOAT:
        raise FrameCorrupt(f"a vector frame has {len(payload)} bytes")
    run_id, tokens = _VECTOR.unpack_from(payload)
    return run_id, tokens, payload[_VECTOR.size :]


def pack_picture(run_id: int, picture: Picture, owner: int) -> bytes:
    """Return the frame of an image of the next run. Raises ``FrameCorrupt`` if it is too large."""
    head = _PICTURE.pack(run_id, picture.width, picture.height, owner)
    return _head(1 + len(head) + len(picture.pixels), FrameKind.IMAGE) + head + picture.pixels


def pack_embeds(run_id: int, embeds: Embeds) -> bytes:
    """Return the frame of the next run's embeddings. Raises ``FrameCorrupt`` if too large."""
    head = _EMBEDS.pack(run_id, embeds.rows, embeds.columns)
    return _head(1 + len(head) + len(embeds.data), FrameKind.EMBEDS) + head + embeds.data


def unpack_embeds(payload: bytes) -> tuple[int, Embeds]:
    """Return the run's id and the embeddings. Raises ``FrameCorrupt``."""
    if len(payload) < _EMBEDS.size:
        raise FrameCorrupt(f"an embeddings frame has only {len(payload)} bytes")
    run_id, rows, columns = _EMBEDS.unpack_from(payload)
    data = payload[_EMBEDS.size :]
    if len(data) != rows * columns * _FLOAT:
        raise FrameCorrupt(f"{len(data)} bytes are not {rows} rows of {columns} float32")
    return run_id, Embeds(rows, columns, data)


def pack_encoder(run_id: int, states: EncoderStates) -> bytes:
    """Return the frame of the next run's encoder output. Raises ``FrameCorrupt`` if too large."""
    shape = states.shape
    head = _ENCODER.pack(run_id, states.tokens, shape.layers, shape.kv_heads, shape.head_dim)
    body = b"".join((head, states.k_cache, states.v_cache, states.mask, states.positions))
    return _head(1 + len(body), FrameKind.ENCODER) + body


def unpack_encoder(payload: bytes) -> tuple[int, EncoderStates]:
    """Return the run's id and the encoder's output. Raises ``FrameCorrupt``."""
    if len(payload) < _ENCODER.size:
        raise FrameCorrupt(f"an encoder frame has only {len(payload)} bytes")
    run_id, tokens, *sizes = _ENCODER.unpack_from(payload)
    shape = EncoderShape(*sizes)
    cache, flat = tokens * shape.row * _FLOAT, tokens * _FLOAT
    edges = list(itertools.accumulate((cache, cache, flat, flat), initial=_ENCODER.size))
    if len(payload) != edges[-1]:
        raise FrameCorrupt(f"an encoder frame claims {edges[-1]} bytes and has {len(payload)}")
    k, v, mask, positions = (payload[a:b] for a, b in itertools.pairwise(edges))
    return run_id, EncoderStates(shape, tokens, k, v, mask, positions)


def unpack_picture(payload: bytes) -> tuple[int, Picture, int]:
    """Return the run's id, the image and its owner. Raises ``FrameCorrupt``."""
    if len(payload) < _PICTURE.size:
        raise FrameCorrupt(f"an image frame has only {len(payload)} bytes")
    run_id, width, height, owner = _PICTURE.unpack_from(payload)
    return run_id, Picture(width, height, payload[_PICTURE.size :]), owner


def pack_scores(run_id: int, found: Sequence[Scored], *, prompt: bool) -> bytes:
    """Return the frame of log-probabilities of prompt positions, or of the token that follows.

    Raises ``FrameCorrupt`` if they exceed a frame.
    """
    parts = [_SCORES.pack(run_id, prompt, len(found))]
    for one in found:
        parts.append(_SCORE.pack(one.logprob, len(one.top)))
        parts += [_LIKELY.pack(*likely) for likely in one.top]
    body = b"".join(parts)
    return _head(len(body) + 1, FrameKind.SCORES) + body


def unpack_scores(payload: bytes) -> tuple[int, bool, tuple[Scored, ...]]:
    """Return run id, the flag of the prompt, and log-probabilities. Raises ``FrameCorrupt``."""
    try:
        run_id, prompt, rows = _SCORES.unpack_from(payload)
        at, found = _SCORES.size, []
        for _ in range(rows):
            logprob, likely = _SCORE.unpack_from(payload, at)
            at += _SCORE.size
            places = range(at, at + likely * _LIKELY.size, _LIKELY.size)
            found.append(
                Scored(logprob, tuple(_LIKELY.unpack_from(payload, place) for place in places))
            )
            at += likely * _LIKELY.size
    except struct.error as exc:
        raise FrameCorrupt(f"a frame of log-probabilities is truncated: {exc}") from exc
    if at != len(payload):
        raise FrameCorrupt(f"a frame of log-probabilities has {len(payload) - at} extra bytes")
    return run_id, prompt != 0, tuple(found)


def pack_run(run_id: int, params: dict[str, Any], entries: Sequence[tuple[int, ...]]) -> bytes:
    """Return the frame that starts a run: parameters as JSON, the entries' token ids packed.

    Raises ``FrameCorrupt`` for an id beyond 32 bits and for a prompt above the limit.
    """
    if len(entries) > MAX_ENTRIES:
        raise FrameCorrupt(f"a run of {len(entries)} entries is above the limit of {MAX_ENTRIES}")
    head = json.dumps(params, separators=(",", ":")).encode()
    counts = struct.pack(f"<{len(entries)}I", *map(len, entries))
    try:
        tokens = [array("i", ids).tobytes() for ids in entries]
    except OverflowError as exc:
        raise FrameCorrupt("a token id does not fit in 32 bits") from exc
    body = b"".join((_RUN.pack(run_id, len(head), len(entries)), counts, head, *tokens))
    return _head(1 + len(body), FrameKind.RUN) + body


def unpack_run(payload: bytes) -> tuple[int, dict[str, Any], tuple[tuple[int, ...], ...]]:
    """Return run id, parameters and token ids of each entry from a frame that starts a run.

    Raises ``FrameCorrupt``.
    """
    ids = array("i")
    try:
        run_id, head_len, n_entries = _RUN.unpack_from(payload)
        if n_entries > MAX_ENTRIES:
            raise FrameCorrupt(f"a run claims {n_entries} entries")
        counts = struct.unpack_from(f"<{n_entries}I", payload, _RUN.size)
        start = _RUN.size + 4 * n_entries
        ids.frombytes(payload[start + head_len :])
    except (struct.error, ValueError) as exc:
        raise FrameCorrupt(f"a run frame is truncated: {exc}") from exc
    if sum(counts) != len(ids):
        raise FrameCorrupt(f"a run frame claims {sum(counts)} token ids and has {len(ids)}")
    edges = itertools.accumulate(counts, initial=0)
    entries = tuple(tuple(ids[a:b]) for a, b in itertools.pairwise(edges))
    return run_id, unpack(payload[start : start + head_len]), entries


class FrameReader:
    """Splits a byte stream into frames, independent of its chunks."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, chunk: bytes) -> Iterator[tuple[FrameKind, bytes]]:
        """Yield each complete frame as (kind, payload). Raises ``FrameCorrupt``."""
        self._pending += chunk
        start = 0
        while len(self._pending) - start >= _HEAD.size:
            size, kind = _HEAD.unpack_from(self._pending, start)
            if not 1 <= size <= MAX_FRAME:
                raise FrameCorrupt(f"a frame claims {size} bytes")
            end = start + 4 + size
            if len(self._pending) < end:
                break
            payload = bytes(self._pending[start + _HEAD.size : end])
            start = end
            yield _kind(kind), payload
        del self._pending[:start]


def _head(size: int, kind: FrameKind) -> bytes:
    # Refused here, so that one request fails; the reader would have to drop the whole stream.
    if size > MAX_FRAME:
        raise FrameCorrupt(f"a frame of {size} bytes is above the limit of {MAX_FRAME}")
    return _HEAD.pack(size, kind)


def _kind(number: int) -> FrameKind:
    try:
        return FrameKind(number)
    except ValueError:
        raise FrameCorrupt(f"unknown frame kind {number}") from None


Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepParams:
    """One run. The KV cache already has the prefix ``held``; ``generated`` is the answer so far.

    At most ``limit`` tokens are generated, none after one of ``eos``. ``prompt`` requests the
    log-probabilities of the sent tokens. ``optimistic`` lets the library generate as long as its
    tokens follow the guide.
    """

    tokenizer: Path
    sampling: Sampling
    wanted: Stepwise
    eos: frozenset[int]
    limit: int
    held: Ids = ()
    generated: Ids = ()
    prompt: bool = False
    optimistic: bool = False

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> StepParams:
        """Build the parameters from the value of ``as_json``."""
        wanted = dict(given["wanted"])
        bias = tuple((token_id, value) for token_id, value in wanted.pop("logit_bias"))
        written, also = wanted.pop("guide"), tuple(wanted.pop("also"))
        guide = None if written is None else Guide(GuideKind(written["kind"]), written["text"])
        return cls(
            tokenizer=Path(given["tokenizer"]),
            sampling=Sampling(**given["sampling"]),
            wanted=Stepwise(**wanted, logit_bias=bias, guide=guide, also=also),
            eos=frozenset(given["eos"]),
            limit=given["limit"],
            held=tuple(given["held"]),
            generated=tuple(given["generated"]),
            prompt=given["prompt"],
            optimistic=given["optimistic"],
        )

    def as_json(self) -> dict[str, Any]:
        """Return the parameters as a JSON value."""
        return {
            "tokenizer": str(self.tokenizer),
            "sampling": asdict(self.sampling),
            "wanted": asdict(self.wanted),
            "eos": sorted(self.eos),
            "limit": self.limit,
            "held": self.held,
            "generated": self.generated,
            "prompt": self.prompt,
            "optimistic": self.optimistic,
        }


class FrameWriter:
    """A queue of frames and the thread that writes them.

    ``put`` never blocks, so that the library's callback never waits for a pipe.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="writer", daemon=True)
        self._thread.start()

    def put(self, frame: bytes) -> None:
        """Queue a frame, or several as one string of bytes."""
        self._queue.put(frame)

    def close(self) -> None:
        """Write all queued frames, then end."""
        self._queue.put(None)
        self._thread.join()

    def _write(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            while not self._queue.empty():
                frame = self._queue.get()
                if frame is None:
                    self._queue.put(None)
                    break
                batch.append(frame)
            try:
                self._write_all(b"".join(batch))
            except (BrokenPipeError, ConnectionResetError):
                os._exit(0)  # the board has ended; the main thread sees EOF as well

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


POLL_S = 0.05


@dataclass
class NpuLock:
    """An exclusive file lock that keeps two processes off one NPU."""

    path: Path
    fd: int = -1

    def take(self, timeout_s: float) -> None:
        """Wait for the lock.

        Raises:
            LoadFailed: another process still holds the lock after ``timeout_s``, or the file or
                its folder belongs to another account.
        """
        try:
            private_folder(self.path.parent)
            self.fd = open_private(self.path, os.O_RDWR | os.O_CREAT)
        except OSError as exc:
            raise LoadFailed(f"NPU lock {self.path} cannot be used: {exc}") from exc
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(self.fd, 32, 0).decode(errors="replace").strip() or "unknown"
                    raise LoadFailed(
                        f"the NPU is held by another engine (pid {holder}, lock {self.path}); it "
                        f"did not let go within {timeout_s:.0f} s"
                    ) from None
                time.sleep(POLL_S)
        with contextlib.suppress(OSError):  # on a full disk the lock works without the pid in it
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, str(os.getpid()).encode(), 0)
