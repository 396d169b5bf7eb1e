"""The blocking calls of a local board: answers, streams, caches and adapters."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from rkserve.core.errors import (
    EmbeddingUnsupported,
    ModelNotFound,
    RequestError,
    RkserveError,
)
from rkserve.local import (
    LocalBoard,
    open_board,
)
from tests.support.paths import PROJECT

MODEL = PROJECT / "models" / "sim-chat"
SIMULATED = {"strict": True, "time_scale": 0.02}
COUNTED = "1, 2, 3, 4, 5, 6, 7, 8."


@pytest.fixture(scope="module")
def board() -> Iterator[LocalBoard]:
    with open_board(MODEL, simulated=SIMULATED) as opened:
        yield opened


def test_a_stream_says_what_the_whole_answer_does(board: LocalBoard) -> None:
    pieces = list(board.stream([{"role": "user", "content": "Count to 8"}], temperature=0))
    assert "".join(map(str, pieces)) == COUNTED
    assert len(pieces) > 1


def test_a_raw_prompt_is_taken_as_text_or_ids(board: LocalBoard) -> None:
    as_text = board.generate(prompt="Once upon a time", temperature=0, max_tokens=5)
    assert as_text.usage.completion_tokens == 5
    assert as_text.finish_reason == "length"
    assert board.generate(prompt=[5, 6, 7], temperature=0, max_tokens=3).usage.prompt_tokens == 3


def test_a_stream_that_is_left_frees_the_board(board: LocalBoard) -> None:
    stream = board.stream("Count to 500", temperature=0)
    next(stream)
    stream.close()
    assert board.generate("Count to 8", temperature=0).text == COUNTED
    assert board.generations() == []


def test_answers_follow_a_schema(board: LocalBoard) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 7}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = board.generate("Give me JSON", temperature=0, response_format=form)
    assert json.loads(answer.text) == {"a": 7}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temprature": 0}, "temprature"),
        ({"n": 2}, "n"),
        ({"temperature": 7}, "temperature"),
        ({"pause_on": ["x"]}, "on_pause"),
        ({"prompt": "and a prompt"}, "messages"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    board: LocalBoard, options: dict[str, object], param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        board.generate("x", **options)
    assert refused.value.param == param


def test_a_grammar_that_cannot_be_followed_is_an_error_and_the_board_goes_on(
    board: LocalBoard,
) -> None:
    with pytest.raises(RkserveError):
        board.generate("x", guided_regex="(unclosed")
    assert board.generate("Count to 8", temperature=0).text == COUNTED


def test_a_model_without_vectors_says_so(board: LocalBoard) -> None:
    with pytest.raises(EmbeddingUnsupported, match="'embedding' section"):
        board.embed(["x"])


# -- KV cache, caches, adapters, life -----------------------------------------------------------


def test_the_kv_cache_is_shown_and_cleared(board: LocalBoard) -> None:
    answer = board.generate("Count to 8", temperature=0)
    held = sum(board.kv().entries)
    assert held >= answer.usage.prompt_tokens
    assert board.clear_kv(keep_system_prompt=False).status == "cleared"
    assert sum(board.kv().entries) == 0


def test_a_prompt_cache_is_built_used_and_deleted() -> None:
    system = {"role": "system", "content": "You are a very patient board. " * 20}
    messages = [system, {"role": "user", "content": "Count to 8"}]
    # A board of its own: after an aborted run no cache file is loaded into a handle.
    with open_board(MODEL, simulated=SIMULATED) as fresh:
        built = fresh.build_cache("patient", [system])
        fresh.clear_kv(keep_system_prompt=False)
        answer = fresh.generate(messages, temperature=0, use_cache="patient")
        assert answer.usage.cached_tokens == built.tokens
        assert [one.name for one in fresh.caches() if one.name] == ["patient"]
        assert fresh.delete_cache("patient")
        assert not fresh.delete_cache("patient")


def test_an_unknown_adapter_is_an_error(board: LocalBoard) -> None:
    assert board.adapters() == ["pirate@v2"]  # the one that the examples of the pages use
    with pytest.raises(ModelNotFound):
        board.generate("x", adapter="nobody")
