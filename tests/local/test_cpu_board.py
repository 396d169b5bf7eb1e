"""A board that computes on its CPU, with real inference on the trained model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rkserve.core.errors import ConfigError, RequestError
from rkserve.local import Generation, LocalBoard, open_board
from tests.support.sim.cpu_board import ADAPTER, TINY
from tests.support.values.tiny_gguf import write_lora, write_tiny

pytestmark = pytest.mark.engine
QUESTION = "What is a Router?"
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained model's folder with an adapter."""
    folder = tmp_path_factory.mktemp("models") / TINY.id
    shutil.copytree(TINY.path, folder)
    place = folder / "adapters" / "tone" / "1"
    place.mkdir(parents=True)
    write_lora(place / "adapter.rkllm", **ADAPTER)
    return folder


@pytest.fixture(scope="module")
def board(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalBoard]:
    state = tmp_path_factory.mktemp("state")
    with open_board(model, cpu={"threads": 1}, state_dir=state, pause_hold_s=0.2) as opened:
        yield opened


def test_it_answers_and_reports_its_runtime(board: LocalBoard) -> None:
    answer = board.generate(QUESTION, temperature=0)
    assert answer.text.startswith("The HTTP ingress: a replica of a Ray Serve deployment")
    assert answer.finish_reason == "stop"
    again = board.generate(QUESTION, temperature=0)
    assert again.text == answer.text
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
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
        other = board.generate("Count to 40", **options)
        assert other.text.startswith("1, 2, 3, 4")

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
    """Its tokenizer, its template and its end are those of the metadata."""
    expected = board.generate(QUESTION, temperature=0)
    with open_board(model / "model.gguf", cpu={"threads": 1}, state_dir=tmp_path) as alone:
        assert alone.model == "model"
        assert (tmp_path / "gguf").is_dir(), "the folder made of it is in the board's own state"
        found = alone.generate(QUESTION, temperature=0)
        assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
        assert found.finish_reason == "stop"


def test_a_file_without_a_template_serves_prompts_alone(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny.gguf")
    with open_board(tmp_path / "tiny.gguf", cpu={"threads": 1}, state_dir=tmp_path) as alone:
        answer = alone.generate(prompt=QUESTION, temperature=0, max_tokens=12)
        assert answer.usage.completion_tokens == 12
        with pytest.raises(RequestError, match="has no chat template"):
            alone.generate(QUESTION)


def test_an_adapter_of_the_folder_changes_the_answer_and_leaves_no_trace(
    board: LocalBoard,
) -> None:
    assert board.adapters() == ["tone@1"]
    plain = board.generate("Count to 40", temperature=0)
    tuned = board.generate("Count to 40", temperature=0, adapter="tone", max_tokens=64)
    assert tuned.text != plain.text
    assert tuned.body["weight_version"] == "tone@1"
    again = board.generate("Count to 40", temperature=0)
    assert (again.text, again.usage.cached_tokens) == (plain.text, 0)


def test_a_prompt_cache_of_the_disk_saves_its_tokens(board: LocalBoard) -> None:
    turns = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": QUESTION},
    ]
    plain = board.generate(turns, temperature=0)
    entry = board.build_cache("doc", turns[:1])
    board.clear_kv(keep_system_prompt=False)
    cached = board.generate(turns, temperature=0, use_cache="doc")
    assert (cached.text, cached.usage.cached_tokens) == (plain.text, entry.tokens)
    assert [one.name for one in board.caches()] == ["doc"]
    assert board.delete_cache("doc")


def test_a_folder_of_links_is_served_as_that_with_the_files(model: Path, tmp_path: Path) -> None:
    linked = tmp_path / "links" / model.name
    linked.mkdir(parents=True)
    for file in model.iterdir():
        (linked / file.name).symlink_to(file)
    with open_board(linked, cpu={"threads": 1}, state_dir=tmp_path / "state") as board:
        scored = board.generate(QUESTION, max_tokens=4, logprobs=True, temperature=0)
        assert scored.usage.completion_tokens == 4


def test_what_it_cannot_do_is_the_requests_fault(board: LocalBoard) -> None:
    with pytest.raises(RequestError, match="makes no embeddings"):
        board.embed([QUESTION])
