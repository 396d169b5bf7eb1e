"""Lists of tensors as trainers give them: shards are put together, or refused."""

from __future__ import annotations

from typing import Any

import pytest

from rkserve.core.errors import RequestError
from rkserve.models.weights import Parameter, read_parameters


def shard(name: str, shape: list[int], of: object, dtype: str = "bfloat16") -> dict[str, Any]:
    return {"name": name, "shape": shape, "dtype": dtype, "shard": of}


@pytest.mark.parametrize(
    ("entries", "whole"),
    [
        pytest.param([([2, 8], 0), ([3, 8], 1)], (5, 8), id="by index"),
        pytest.param([([3, 8], 1), ([2, 8], 0)], (5, 8), id="in any order"),
        pytest.param(
            [([4, 2], {"index": n, "count": 3, "dim": 1}) for n in range(3)], (4, 6), id="along 1"
        ),
        pytest.param([([2], "1/2"), ([5], "2/2")], (7,), id="numbered"),
        pytest.param([([2], "00001-of-00002"), ([5], "00002-of-00002")], (7,), id="as files"),
        pytest.param([([2, 8], None)], (2, 8), id="none"),
        pytest.param([([2, 8], {"index": 0, "count": 1})], (2, 8), id="one of one"),
    ],
)
def test_shards_of_a_tensor_are_put_together(
    entries: list[tuple[list[int], object]], whole: tuple[int, ...]
) -> None:
    given = [shard("lm_head", shape, of) for shape, of in entries]
    assert read_parameters(given, "p") == (Parameter("lm_head", whole, "bfloat16"),)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        pytest.param([shard("w", [2], {"index": 0, "count": 3})], "1 of 3 shards", id="missing"),
        pytest.param([shard("w", [2], 1)], "shard 0 .* is missing", id="the first is missing"),
        pytest.param([shard("w", [2], 0), shard("w", [2], 0)], "in it twice", id="twice"),
        pytest.param([shard("w", [2], 0), shard("w", [2], None)], "in it twice", id="a whole one"),
        pytest.param([shard("w", [2, 3], 0), shard("w", [2, 4], 1)], "fit", id="other sizes"),
        pytest.param([shard("w", [2], 0), shard("w", [2], 1, "float32")], "fit", id="other dtype"),
        pytest.param([shard("w", [2], {"index": 0, "dim": 1})], "fit", id="no such dimension"),
        pytest.param([shard("w", [2], {"index": 3, "count": 3})], "shard", id="beyond"),
        pytest.param([shard("w", [2], {"index": 0, "rank": 1})], "shard", id="an unknown key"),
        pytest.param([shard("w", [2], "3/2")], "shard", id="a number too many"),
        pytest.param([shard("w", [2], -1)], "shard", id="below 0"),
        pytest.param([shard("w", [2], True)], "shard", id="a flag"),
        pytest.param([shard("w", [2], 10**400)], "shard", id="huge"),
        pytest.param([shard("w", [2], "x" * 10_000)], "shard", id="junk"),
        pytest.param([shard("w", [2], [0])], "shard", id="a list"),
    ],
)
def test_shards_that_make_no_whole_tensor_are_refused(given: list[Any], why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        read_parameters(given, "parameters_info")
    assert caught.value.param == "parameters_info"


def test_the_shards_of_a_whole_file_are_compared_with_its_length() -> None:
    parts = [shard("tone@v2", [size], of, "uint8") for size, of in ((4, "1/2"), (3, "2/2"))]
    found = read_parameters(parts, "parameters_info")
    assert found == (Parameter("tone@v2", (7,), "uint8"),)
