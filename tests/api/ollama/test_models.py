"""Ollama's listings of models and its embedding calls."""

from __future__ import annotations

from rkserve.api.ollama.models import FolderFacts, running, show, tags
from rkserve.core.board_report import BoardState
from rkserve.core.run_params import Sampling
from tests.support.boards.fake_boards import report

AT = 1700000000


BASE = {"id": "m", "created": AT, "rkserve": {"context_length": 4096}}


TONE = {
    "id": "m:tone",
    "created": AT,
    "parent": "m",
    "rkserve": {"context_length": 4096, "bytes": 7, "digest": None},
}


FACTS = {"m": FolderFacts(5, "abc", Sampling(), "{{ messages }}")}


def test_tags_are_models_and_adapters_with_their_sizes() -> None:
    base, tone = tags([BASE, TONE], FACTS)["models"]
    assert (base["name"], base["size"], base["digest"]) == ("m", 5, "abc")
    assert (tone["model"], tone["size"], tone["digest"]) == ("m:tone", 7, "")
    assert tone["details"]["parent_model"] == "m"
    assert tags([BASE], {})["models"][0]["size"] == 0


def test_show_says_what_clients_size_their_prompts_by() -> None:
    told = show(BASE, FACTS["m"])
    architecture = told["model_info"]["general.architecture"]
    assert told["model_info"][f"{architecture}.context_length"] == 4096
    assert "temperature 0.8" in told["parameters"]
    assert told["template"] == "{{ messages }}"
    assert told["capabilities"] == ["completion"]
    able = show(BASE, FolderFacts(tools=True, thinking=True, vision=True))["capabilities"]
    assert able == ["completion", "tools", "thinking", "vision"]


def test_only_models_that_a_board_has_ready_are_running() -> None:
    boards = [report("a", model="m", memory_mb=2.0), report("b", model="m", memory_mb=3.0)]
    (one,) = running([BASE, TONE], FACTS, boards)["models"]
    assert (one["name"], one["size_vram"], one["context_length"]) == ("m", 3 * 2**20, 4096)
    asleep = [report("a", model="m", state=BoardState.ASLEEP)]
    assert running([BASE], FACTS, asleep) == {"models": []}
