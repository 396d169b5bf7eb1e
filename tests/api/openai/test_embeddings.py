"""Texts to requests, and vectors to what is given out; what HTTP shows of it is tested there."""

from __future__ import annotations

import json
import math
from array import array

import pytest

from rkserve.api.common.renderer import Prompt
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.api.openai.embeddings import (
    CHUNK_INPUTS,
    EmbeddingCall,
    VectorOptions,
    check_dimensions,
    chunks_of,
    embeddings_answer,
    finished_vector,
)
from rkserve.core.errors import RequestError, UnsupportedParameter
from rkserve.core.messages import AdapterRef
from rkserve.core.run_params import Pooling
from rkserve.models.settings import EmbeddingSettings

PLAIN = EmbeddingSettings()


def prompts(*sizes: int) -> list[Prompt]:
    return [Prompt((7,) * size) for size in sizes]


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


@pytest.mark.parametrize(
    ("sizes", "boards", "expected"),
    [
        pytest.param([5], 3, [[0]], id="one text"),
        pytest.param([5] * 4, 2, [[0, 1], [2, 3]], id="as many as boards"),
        pytest.param([5] * 3, 0, [[0, 1, 2]], id="no board is known"),
        pytest.param([9, 1, 8, 2], 2, [[1, 3], [2, 0]], id="of similar lengths"),
        pytest.param([2000, 40, 2000], 1, [[1, 0], [2]], id="long ones alone"),
        pytest.param([4096, 4096], 1, [[0], [1]], id="longer than a request is meant to be"),
    ],
)
def test_texts_are_cut_into_requests(
    sizes: list[int], boards: int, expected: list[list[int]]
) -> None:
    chunks = chunks_of(prompts(*sizes), ResolvedModel("m"), PLAIN, "embd-1", boards=boards)
    assert [list(chunk.at) for chunk in chunks] == expected
    for chunk in chunks:
        assert [len(ids) for ids in chunk.request.inputs] == [sizes[at] for at in chunk.at]
    assert [chunk.request.request_id for chunk in chunks] == [
        f"embd-1/{number}" for number in range(len(expected))
    ]


def test_a_request_holds_no_more_texts_than_a_board_shall_have_at_once() -> None:
    chunks = chunks_of(prompts(*[1] * 100), ResolvedModel("m"), PLAIN, "embd-1")
    assert max(len(chunk.at) for chunk in chunks) == CHUNK_INPUTS
    assert sorted(at for chunk in chunks for at in chunk.at) == list(range(100))


def test_requests_carry_what_the_model_of_the_call_means() -> None:
    ref = AdapterRef("style", "v2", "ab" * 32)
    meant = ResolvedModel("m", ref, named=True, min_epoch=4)
    settings = EmbeddingSettings(pooling="mean")
    (chunk,) = chunks_of([Prompt((), "a text")], meant, settings, "embd-1", session="s")
    request = chunk.request
    assert (request.model, request.adapter, request.min_epoch) == ("m", ref, 4)
    assert (request.texts, request.inputs, request.max_tokens) == (("a text",), (), 0)
    assert (request.pooling, request.keep_version, request.session) == (Pooling.MEAN, True, "s")


@pytest.mark.parametrize(
    ("settings", "wanted", "expected"),
    [
        pytest.param(PLAIN, None, [0.6, 0.8, 0.0], id="of length one"),
        pytest.param(PLAIN, 1, [1.0], id="cut, then of length one"),
        pytest.param(EmbeddingSettings(normalize=False), None, [3.0, 4.0, 0.0], id="as it is"),
        pytest.param(EmbeddingSettings(normalize=False), 2, [3.0, 4.0], id="cut only"),
    ],
)
def test_a_vector_is_cut_and_normalized(
    settings: EmbeddingSettings, wanted: int | None, expected: list[float]
) -> None:
    found = finished_vector(floats(3.0, 4.0, 0.0), settings, wanted)
    assert list(found) == pytest.approx(expected)


def test_a_vector_of_zeros_has_no_direction_and_stays_what_it_is() -> None:
    assert list(finished_vector(floats(0.0, 0.0), PLAIN, None)) == [0.0, 0.0]


def test_a_vector_is_not_made_longer() -> None:
    with pytest.raises(RequestError) as caught:
        finished_vector(floats(1.0, 2.0), PLAIN, 3)
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize(
    ("settings", "wanted", "allowed"),
    [
        pytest.param(PLAIN, None, True, id="nothing is asked for"),
        pytest.param(PLAIN, 64, False, id="its size is not known"),
        pytest.param(EmbeddingSettings(dimensions=64), 64, True, id="its own size"),
        pytest.param(EmbeddingSettings(dimensions=64), 32, False, id="fewer"),
        pytest.param(EmbeddingSettings(matryoshka=True), 32, True, id="fewer of such a model"),
    ],
)
def test_dimensions_are_cut_off_only_where_the_model_was_trained_for_that(
    settings: EmbeddingSettings, wanted: int | None, allowed: bool
) -> None:
    if allowed:
        check_dimensions(wanted, settings)
        return
    with pytest.raises(UnsupportedParameter):
        check_dimensions(wanted, settings)


def test_the_written_numbers_are_the_float32_values() -> None:
    values = [1 / 3, -1e-30, math.pi, 0.0, 1e20, 16777217.0]
    call = EmbeddingCall(VectorOptions('a "model"'), ("x",), ("input",))
    body = json.loads(embeddings_answer(call, [array("f", values)], 3, 0.5))
    assert array("f", body["data"][0]["embedding"]) == array("f", values)
    assert body["model"] == 'a "model"'
