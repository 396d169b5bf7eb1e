"""Hidden states of all positions to one vector of a text. Pure, and without any numerics library.

What is done with the vector (its length, its dimensions) is decided where it is given out.
"""

from __future__ import annotations

import math
from array import array
from operator import add

from rkserve.core.errors import NothingComputed
from rkserve.core.run_params import Pooling
from rkserve.native.runtime import EvaluateMode, Matrix

_FLOAT = 4
MAX_BYTES = 12 * 1024 * 1024  # of all positions of a text: they cross to the board in one frame


def pooled(matrix: Matrix, pooling: Pooling, expected: int | None = None) -> bytes:
    """Return one vector, or with ``Pooling.ALL`` one for each position: float32 raw bytes.

    ``expected`` are the positions that were computed, where that is known: of what is averaged, or
    begins with the first, none may be missing.

    Raises:
        NothingComputed: rows are missing, or hold no numbers.
    """
    if pooling is not Pooling.LAST and expected is not None and matrix.rows != expected:
        found = f"it gave {matrix.rows} rows for {expected} tokens"
        raise NothingComputed(EvaluateMode.HIDDEN.value, found)
    if pooling is Pooling.ALL:
        return _all(matrix)
    vector = _mean(matrix) if pooling is Pooling.MEAN else _row(matrix, pooling)
    if not all(map(math.isfinite, vector)):
        raise NothingComputed(
            EvaluateMode.HIDDEN.value, "it gave what is no number (NaN or infinite)"
        )
    return vector.tobytes()


def _all(matrix: Matrix) -> bytes:
    size = matrix.rows * matrix.columns * _FLOAT
    if size > MAX_BYTES:
        raise NothingComputed(
            EvaluateMode.HIDDEN.value,
            f"it gave {size} bytes, of which {MAX_BYTES} can be handed on",
        )
    values = array("f")
    values.frombytes(memoryview(matrix.data)[:size])
    if not all(map(math.isfinite, values)):
        raise NothingComputed(
            EvaluateMode.HIDDEN.value, "it gave what is no number (NaN or infinite)"
        )
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
