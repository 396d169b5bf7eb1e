"""A board that computes on its CPU, with real inference on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.errors import ConfigError, RequestError
from rkserve.local import Generation, LocalBoard, open_board
from tests.support.values.tiny_gguf import tiny_folder

pytestmark = pytest.mark.engine
QUESTION = "What do boards compute?"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def board(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBoard]:
    state = tmp_path_factory.mktemp("state")
    with open_board(model, cpu={"threads": 1}, state_dir=state, pause_hold_s=0.2) as opened:
        yield opened


def test_it_answers_and_reports_its_runtime(board: LocalBoard) -> None:
    answer = board.generate(QUESTION, temperature=0, max_tokens=12)
    assert answer.usage.completion_tokens == 12
    again = board.generate(QUESTION, temperature=0, max_tokens=12)
    assert (again.text, again.usage.cached_tokens > 0) == (answer.text, True)
    report = board.report()
    assert report.release.startswith("llama.cpp ")
    assert report.library.startswith("xllamacpp")


def test_single_steps_choose_the_tokens_of_a_run(board: LocalBoard) -> None:
    plain = board.generate(QUESTION, temperature=0, max_tokens=12, repeat_penalty=1.0)
    scored = board.generate(
        QUESTION, temperature=0, max_tokens=12, repeat_penalty=1.0, logprobs=True, top_logprobs=2
    )
    assert scored.token_ids == plain.token_ids


def test_a_seed_gives_the_same_answer_again(board: LocalBoard) -> None:
    options = {"temperature": 1.5, "max_tokens": 16}
    one, same, other = [board.generate(QUESTION, seed=seed, **options) for seed in (1, 1, 2)]
    assert one.token_ids == same.token_ids != other.token_ids


def test_a_schema_is_followed(board: LocalBoard) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    answer = board.generate(QUESTION, temperature=1.0, seed=3, max_tokens=100, response_format=form)
    assert answer.finish_reason == "stop"
    assert 0 <= json.loads(answer.text)["n"] <= 99


def test_an_interrupted_conversation_goes_on_as_if_it_had_not_been(
    board: LocalBoard,
) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40}
    whole = board.generate(QUESTION, **options)
    between = []

    def ask_another(paused: Generation) -> None:
        between.append(len(paused.token_ids))
        other = board.generate("Another conversation, in between.", **options)
        assert other.usage.completion_tokens == 40

    answer = board.generate(
        QUESTION, **options, pause_when=lambda piece: piece.index == 5, on_pause=ask_another
    )
    assert between == [6]
    assert answer.token_ids == whole.token_ids


def test_settings_of_npus_are_refused_by_name(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'quirks' is a setting of NPUs"):
        open_board(model, cpu={}, quirks={}, state_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"holds no \*.gguf file"):
        open_board("models/sim-chat", cpu={}, state_dir=tmp_path)


@pytest.mark.parametrize(
    "kind", [{"library": "/nowhere/librkllmrt.so"}, {"simulated": {"boards": 1}}], ids=str
)
def test_only_cpus_compute_a_file_alone(kind: dict[str, Any], model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"which CPUs compute: set `cpu: \{\}`"):
        open_board(model / "model.gguf", state_dir=tmp_path, **kind)


def test_a_file_alone_answers_as_a_folder_with_it(
    board: LocalBoard, model: Path, tmp_path: Path
) -> None:
    """Its tokenizer and its end are those of the metadata; its template is what is missing."""
    options: dict[str, Any] = {"prompt": QUESTION, "temperature": 0, "max_tokens": 12}
    expected = board.generate(**options)
    with open_board(model / "model.gguf", cpu={"threads": 1}, state_dir=tmp_path) as alone:
        assert alone.model == "model"
        assert (tmp_path / "gguf").is_dir(), "the folder made of it is in the board's own state"
        found = alone.generate(**options)
        assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
        with pytest.raises(RequestError, match="has no chat template"):
            alone.generate(QUESTION)


def test_what_it_cannot_do_is_the_requests_fault(board: LocalBoard) -> None:
    with pytest.raises(RequestError, match="makes no embeddings"):
        board.embed([QUESTION])
