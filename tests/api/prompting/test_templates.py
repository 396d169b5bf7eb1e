"""Chat templates: their variables, errors and limits, and the built-in ones."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from rkserve.api.common.renderer import Renderer
from rkserve.api.prompting.templates import NAMED, ChatTemplate
from rkserve.core.errors import ConfigError, ContextOverflow, RequestError
from rkserve.models.folder import ModelFolder
from tests.support.values.wire_folders import (
    CHATML,
    make_folder,
)

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Rain?"},
    {"role": "assistant", "content": "On the hills."},
    {"role": "user", "content": "Why?"},
]


TALK_IN_CHATML = (
    "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nRain?<|im_end|>\n"
    "<|im_start|>assistant\nOn the hills.<|im_end|>\n<|im_start|>user\nWhy?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


NOON = datetime(2026, 3, 4, 12, 0, tzinfo=timezone.utc)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return make_folder(tmp_path_factory.mktemp("folders") / "tiny")


@pytest.fixture(scope="module")
def renderer(folder: ModelFolder) -> Renderer:
    return Renderer(folder)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def render(tmp_path: Path, template: str, *messages: dict[str, Any]) -> str:
    folder = make_folder(tmp_path / "m", tokenizer=False, template=template)
    return ChatTemplate(folder, lambda: NOON).render(messages or (user("x"),), 4096)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        pytest.param(
            "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n"
            "{% endfor %}\n",
            "x\n",
            id="blocks leave no blanks and no line breaks",
        ),
        pytest.param(
            "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "01",
            id="loop controls",
        ),
        pytest.param("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}', id="tojson without HTML"),
        pytest.param("{{ [1] | tojson(indent=1) }}", "[\n 1\n]", id="tojson with an indent"),
        pytest.param("{{ bos_token }}{{ eos_token }}", "<|endoftext|><|im_end|>", id="tokens"),
        pytest.param("{{ pad_token }}.", ".", id="a token that the model has not"),
        pytest.param("{{ strftime_now('%d %b %Y') }}", "04 Mar 2026", id="strftime_now"),
        pytest.param(
            "{% generation %}{{ messages[0].content }}{% endgeneration %}", "x", id="generation"
        ),
        pytest.param("{{ tools is none }}{{ add_generation_prompt }}", "TrueTrue", id="globals"),
        pytest.param("{{ '<&>' }}", "<&>", id="nothing is escaped"),
    ],
)
def test_a_template_finds_what_hugging_face_gives_it(
    tmp_path: Path, template: str, text: str
) -> None:
    assert render(tmp_path, template) == text


@pytest.mark.parametrize(
    ("template", "says"),
    [
        pytest.param("{{ raise_exception('Roles must alternate') }}", "alternate", id="raises"),
        pytest.param("{{ messages[7].content.x }}", "no element 7", id="undefined"),
        pytest.param("{{ 1 + 'a' }}", "unsupported operand", id="a TypeError"),
        pytest.param("{{ 1 / 0 }}", "division", id="a ZeroDivisionError"),
        pytest.param("{{ ''.__class__.__mro__ }}", "unsafe", id="a way out of the sandbox"),
        pytest.param("{{ messages.append(1) }}", "unsafe", id="changing messages"),
        pytest.param("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion", id="endless"),
        pytest.param("{% for i in range(10**9) %}{% endfor %}", "Range too big", id="a huge range"),
    ],
)
def test_a_template_that_fails_is_a_400_with_its_message(
    tmp_path: Path, template: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        render(tmp_path, template)
    assert caught.value.param == "messages"


def test_a_template_that_runs_away_is_stopped(tmp_path: Path) -> None:
    template = (
        "{% for i in range(99999) %}{% for j in range(99999) %}"
        "0123456789abcdef{% endfor %}{% endfor %}"
    )
    with pytest.raises(ContextOverflow, match="at least 4096 tokens"):
        render(tmp_path, template)


def test_a_template_that_is_not_jinja_stops_the_start(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", tokenizer=False, template="{% for %}")
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate(folder)


def test_a_model_without_a_template_has_no_chat_but_completions(tmp_path: Path) -> None:
    renderer = Renderer(make_folder(tmp_path / "base", template=None))
    with pytest.raises(RequestError, match="/v1/completions") as caught:
        renderer.chat(TALK)
    assert caught.value.param == "messages"
    assert renderer.text("The board").ids


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("chatml", TALK_IN_CHATML),
        (
            "llama3",
            "<|endoftext|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nRain?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nOn the hills.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "mistral",
            "<|endoftext|>[INST] Be kind.\n\nRain? [/INST] On the hills.</s>[INST] Why? [/INST]",
        ),
        (
            "gemma",
            "<|endoftext|><start_of_turn>user\nBe kind.\n\nRain?<end_of_turn>\n"
            "<start_of_turn>model\nOn the hills.<end_of_turn>\n"
            "<start_of_turn>user\nWhy?<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "plain",
            "System: Be kind.\nUser: Rain?\nAssistant: On the hills.\nUser: Why?\nAssistant:",
        ),
    ],
)
def test_a_built_in_template_renders(tmp_path: Path, name: str, text: str) -> None:
    folder = make_folder(
        tmp_path / "m", tokenizer=False, template=CHATML, settings=f"chat_template: {name}"
    )
    assert Renderer(folder).chat(TALK).text == text


def test_every_built_in_template_is_tested() -> None:
    marks = test_a_built_in_template_renders.pytestmark  # type: ignore[attr-defined]
    assert {case[0] for case in marks[0].args[1]} == set(NAMED)


@pytest.mark.parametrize("name", ["mistral", "gemma"])
def test_a_role_that_a_template_does_not_know_is_a_400(tmp_path: Path, name: str) -> None:
    folder = make_folder(tmp_path / "m", tokenizer=False, settings=f"chat_template: {name}")
    with pytest.raises(RequestError, match="knows no role tool"):
        Renderer(folder).chat([{"role": "tool", "content": "x"}])


def test_an_unknown_template_name_stops_the_start(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", settings="chat_template: nonesuch")
    with pytest.raises(ConfigError, match="chatml, gemma, llama3"):
        Renderer(folder)
