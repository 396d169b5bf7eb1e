"""Pooling: hidden states of all positions to one vector of a text. Pure, without numpy.

The API normalizes the vector and cuts its dimensions.
"""

from __future__ import annotations

import math
from array import array
from operator import add

from rkserve.core.errors import NothingComputed
from rkserve.core.run_params import Pooling
from rkserve.native.runtime import EvaluateMode, Matrix

_FLOAT = 4
MAX_BYTES = 12 * 1024 * 1024  # of all positions of a text, which are sent to the board in one frame


def pooled(matrix: Matrix, pooling: Pooling, expected: int | None = None) -> bytes:
    """Return one vector, or with ``Pooling.ALL`` one per position, as float32 raw bytes.

    ``expected`` is the number of positions, if known: all poolings but LAST need every row.

    Raises:
        NothingComputed: rows are missing, or have values that are not finite.
    """
    if pooling is not Pooling.LAST and expected is not None and matrix.rows != expected:
        found = f"it gave {matrix.rows} rows for {expected} tokens"
        raise NothingComputed(EvaluateMode.HIDDEN.value, found)
    if pooling is Pooling.ALL:
        return _all(matrix)
    vector = _mean(matrix) if pooling is Pooling.MEAN else _row(matrix, pooling)
    if not all(map(math.isfinite, vector)):
        raise NothingComputed(EvaluateMode.HIDDEN.value, "it gave values that are not finite")
    return vector.tobytes()


def _all(matrix: Matrix) -> bytes:
    size = matrix.rows * matrix.columns * _FLOAT
    if size > MAX_BYTES:
        raise NothingComputed(
            EvaluateMode.HIDDEN.value,
            f"it gave {size} bytes; the limit is {MAX_BYTES}",
        )
    values = array("f")
    values.frombytes(memoryview(matrix.data)[:size])
    if not all(map(math.isfinite, values)):
        raise NothingComputed(EvaluateMode.HIDDEN.value, "it gave values that are not finite")
    return values.tobytes()


def _row(matrix: Matrix, pooling: Pooling) -> array[float]:
    row = matrix.rows - 1 if pooling is Pooling.LAST else 0
    return _floats(matrix, row)


def _mean(matrix: Matrix) -> array[float]:
    total = [0.0] * matrix.columns
    for row in range(matrix.rows):
        total = list(map(add, total, _floats(matrix, row)))
    return array("f", [value / matrix.rows for value in total])


def _floats(matrix: Matrix, row: int) -> array[float]:
    size = matrix.columns * _FLOAT
    floats = array("f")
    floats.frombytes(memoryview(matrix.data)[row * size : (row + 1) * size])
    return floats
