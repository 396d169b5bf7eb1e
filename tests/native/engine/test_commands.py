"""Hidden states to one vector, and its way out of the engine process."""

from __future__ import annotations

import math
from array import array

import pytest

from rkserve.core.errors import FrameCorrupt, NothingComputed
from rkserve.core.run_params import Pooling
from rkserve.native import engine_frames
from rkserve.native.engine.commands import MAX_BYTES, pooled
from rkserve.native.engine_frames import FrameKind, FrameReader
from rkserve.native.runtime import Matrix

ROWS = [[1.0, 2.0], [3.0, -4.0], [5.0, 8.0]]


def matrix(rows: list[list[float]]) -> Matrix:
    return Matrix(len(rows), len(rows[0]), array("f", [v for row in rows for v in row]).tobytes())


@pytest.mark.parametrize(
    ("pooling", "vector"),
    [
        (Pooling.LAST, [5.0, 8.0]),
        (Pooling.CLS, [1.0, 2.0]),
        (Pooling.MEAN, [3.0, 2.0]),
    ],
)
def test_rows_become_a_vector(pooling: Pooling, vector: list[float]) -> None:
    assert list(array("f", pooled(matrix(ROWS), pooling, expected=3))) == vector


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.CLS])
def test_rows_that_are_missing_are_no_mean_and_no_beginning(pooling: Pooling) -> None:
    with pytest.raises(NothingComputed, match="3 rows for 4 tokens"):
        pooled(matrix(ROWS), pooling, expected=4)


def test_the_last_row_is_the_last_however_many_there_are() -> None:
    only = pooled(matrix(ROWS[-1:]), Pooling.LAST, expected=3)
    assert only == pooled(matrix(ROWS), Pooling.LAST, expected=3)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("pooling", Pooling)
def test_what_is_no_number_is_no_vector(pooling: Pooling, value: float) -> None:
    with pytest.raises(NothingComputed, match="not finite"):
        pooled(matrix([[value, 1.0]] * 2), pooling)


def test_a_vector_travels_as_it_is() -> None:
    vector = array("f", [0.1, -3.0, 1e-30]).tobytes()
    ((kind, payload),) = FrameReader().feed(engine_frames.pack_vector(7, 4096, vector))
    assert kind is FrameKind.VECTOR
    assert engine_frames.unpack_vector(payload) == (7, 4096, vector)


@pytest.mark.parametrize("payload", [b"", b"1234567", b"12345678" + b"123"])
def test_a_damaged_vector_is_refused(payload: bytes) -> None:
    with pytest.raises(FrameCorrupt):
        engine_frames.unpack_vector(payload)


def test_a_vector_that_is_too_long_is_refused_where_it_is_sent() -> None:
    with pytest.raises(FrameCorrupt):
        engine_frames.pack_vector(1, 1, bytes(engine_frames.MAX_FRAME))


def test_all_rows_are_handed_on_as_they_are_and_within_limits() -> None:
    data = array("f", [1, 2, 3, 4, 5, 6]).tobytes()
    assert pooled(Matrix(3, 2, data), Pooling.ALL, 3) == data
    with pytest.raises(NothingComputed, match="3 rows for 4"):
        pooled(Matrix(3, 2, data), Pooling.ALL, 4)
    with pytest.raises(NothingComputed, match="not finite"):
        pooled(Matrix(1, 1, array("f", [float("nan")]).tobytes()), Pooling.ALL, 1)
    with pytest.raises(NothingComputed, match="the limit is"):
        pooled(Matrix(MAX_BYTES, 1, b""), Pooling.ALL, MAX_BYTES)
