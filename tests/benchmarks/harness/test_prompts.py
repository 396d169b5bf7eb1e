"""Prompts of an exact length."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.prompts import messages_of_length
from rkserve.api.common.renderer import Renderer
from rkserve.bench.processes import BenchFailed
from rkserve.config.serve_config import resolve_folder
from rkserve.models.folder import open_model_folder


def test_prompts_have_exactly_the_tokens_that_were_asked_for_and_differ() -> None:
    renderer = Renderer(open_model_folder(resolve_folder(Path("models/sim-chat"))))

    prompts = [renderer.chat(messages_of_length(renderer, 128, number)).ids for number in range(16)]

    assert {len(ids) for ids in prompts} == {128}
    assert len(set(prompts)) == 16


def test_a_long_prompt_has_exactly_its_tokens_too() -> None:
    renderer = Renderer(open_model_folder(resolve_folder(Path("models/sim-chat"))))

    assert len(renderer.chat(messages_of_length(renderer, 1000, 1_000_003)).ids) == 1000


def test_a_prompt_that_cannot_be_so_short_is_refused() -> None:
    renderer = Renderer(open_model_folder(resolve_folder(Path("models/sim-chat"))))

    with pytest.raises(BenchFailed, match="no prompt of exactly 5 tokens"):
        messages_of_length(renderer, 5, 0)
