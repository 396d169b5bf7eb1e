"""Thoughts before an answer: what a call asks of them, how they are told from it, and history."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.api.common.calls import ChatCall, parse_chat
from rkserve.api.common.plan import plan
from rkserve.api.common.renderer import Renderer
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.api.parsing.answer_parser import EFFORTS, RESERVED, ReasoningSplitter
from rkserve.api.parsing.tools.base import ReasoningPart, TextPart
from rkserve.api.prompting.conversation import with_thoughts
from rkserve.core.errors import ConfigError, RequestError, UnsupportedParameter
from rkserve.core.messages import GenerateRequest, Thinking
from rkserve.core.run_params import Sampling
from rkserve.models.folder import ModelFolder
from tests.support.paths import PROJECT
from tests.support.values.wire_folders import make_folder, read_back

HELLO = [{"role": "user", "content": "Hello"}]
THINK = Thinking("<think>", "</think>")
OPENED = Thinking("<think>", "</think>", begun=True)
SWITCHED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% if always %}<think>\n{% endif %}{% endif %}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}"
)


def chat(**keys: Any) -> ChatCall:
    return parse_chat(json.dumps({"model": "m", "messages": HELLO, **keys}).encode())


@pytest.mark.parametrize("history", ["template", "strip", "keep"])
@pytest.mark.parametrize(
    ("text", "begun", "extra"),
    [
        pytest.param("Yes, ", None, {}, id="words: no thoughts come before the rest"),
        pytest.param("<think>\nHm", True, {}, id="thoughts"),
        pytest.param("<think>Hm</think>Yes", None, {}, id="after thoughts"),
        pytest.param("", False, {}, id="nothing: the model thinks as it likes"),
        pytest.param("<think>\nHm", None, {"max_reasoning_tokens": 0}, id="no thoughts wanted"),
    ],
)
def test_an_answer_to_a_prefill_thinks_where_the_prefill_does(
    tmp_path: Path, text: str, begun: bool | None, extra: dict[str, Any], history: str
) -> None:
    settings = f"thinking: {{history: {history}}}\n"
    folder = make_folder(tmp_path / "m", template=SWITCHED, settings=settings)
    turns = [*HELLO, {"role": "assistant", "content": text}]
    kwargs = {"always": True}
    call = chat(messages=turns, continue_final_message=True, chat_template_kwargs=kwargs, **extra)
    (request,) = plan(
        call,
        ResolvedModel("m"),
        Renderer(folder),
        defaults=Sampling(),
        context_len=500,
        completion="c",
    )
    closed = "\n</think>\n\n" if extra else ""
    prompt = f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{text}{closed}"
    assert read_back(folder, request.prompt_ids) == prompt
    if begun is None:
        assert request.thinking is None
    else:
        assert request.thinking is not None
        assert request.thinking.begun is begun


def test_the_blank_before_a_continued_thought_is_kept() -> None:
    assert told(OPENED, [" ", "so</think>", "Yes."]) == (" so", "Yes.")


def told(thinking: Thinking, pieces: list[str]) -> tuple[str, str]:
    """The thoughts and the words of an answer that comes in these pieces."""
    thoughts = ReasoningSplitter(thinking)
    parts = [part for piece in pieces for part in thoughts.feed(piece)] + thoughts.end()
    assert all(isinstance(part, ReasoningPart | TextPart) and part.text for part in parts)
    return (
        "".join(part.text for part in parts if isinstance(part, ReasoningPart)),
        "".join(part.text for part in parts if isinstance(part, TextPart)),
    )


@pytest.mark.parametrize(
    ("thinking", "text", "thoughts", "words"),
    [
        pytest.param(THINK, "<think>\nHm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n", id="as trained"),
        pytest.param(THINK, "<think>Hm.</think>Yes.", "Hm.", "Yes.", id="without line breaks"),
        pytest.param(THINK, " \n<think>Hm.", "Hm.", "", id="cut off in the thoughts"),
        pytest.param(THINK, "<think>\nHm.\n</thi", "Hm.\n</thi", "", id="cut off in the mark"),
        pytest.param(THINK, "<think>\nHm.\n\n", "Hm.", "", id="cut off before the mark"),
        pytest.param(THINK, "<think>\n\n</think>\n\nYes.", "", "Yes.", id="no thoughts"),
        pytest.param(THINK, "  Yes.", "", "  Yes.", id="no block"),
        pytest.param(THINK, "<thin ice", "", "<thin ice", id="nearly a mark"),
        pytest.param(THINK, "<th", "", "<th", id="the beginning of a mark"),
        pytest.param(
            THINK, "Yes <think>no</think>", "", "Yes <think>no</think>", id="a block later on"
        ),
        pytest.param(
            THINK, "<think>a</think>b</think>c", "a", "b</think>c", id="the first mark counts"
        ),
        pytest.param(THINK, "<think>a\n\nb</ c\n</think>d", "a\n\nb</ c", "d", id="line breaks"),
        pytest.param(OPENED, "Hm.\n</think>\n\nYes.", "Hm.", "Yes.", id="opened by the template"),
        pytest.param(OPENED, "<think>\nHm.</think>Yes.", "Hm.", "Yes.", id="opened twice"),
        pytest.param(OPENED, "</think>Yes.", "", "Yes.", id="opened and closed at once"),
        pytest.param(OPENED, "It never ends", "It never ends", "", id="opened and never closed"),
        pytest.param(
            Thinking("[THINK]", "[/THINK]"), "[THINK]a[/THINK]b", "a", "b", id="other marks"
        ),
    ],
)
def test_thoughts_are_told_from_the_answer_however_it_is_cut(
    thinking: Thinking, text: str, thoughts: str, words: str
) -> None:
    cuts = [[text], list(text), *([text[:at], text[at:]] for at in range(1, len(text)))]
    for pieces in cuts:
        assert told(thinking, pieces) == (thoughts, words), pieces


@given(
    begun=st.booleans(),
    pieces=st.lists(st.sampled_from(["<think>", "</think>", "\n", " ", "<", "x", "/think>"])),
)
def test_any_cut_means_the_same(begun: bool, pieces: list[str]) -> None:
    thinking = OPENED if begun else THINK
    assert told(thinking, pieces) == told(thinking, list("".join(pieces)))


# --- what a call asks ---


@pytest.mark.parametrize(
    ("keys", "enabled", "variables"),
    [
        ({}, None, {}),
        ({"enable_thinking": True}, True, {"enable_thinking": True, "thinking": True}),
        ({"enable_thinking": False}, False, {"enable_thinking": False, "thinking": False}),
        (
            {"reasoning_effort": "low"},
            True,
            {"reasoning_effort": "low", "enable_thinking": True, "thinking": True},
        ),
        (
            {"reasoning_effort": "none"},
            False,
            {"reasoning_effort": "none", "enable_thinking": False, "thinking": False},
        ),
        (
            {"reasoning_effort": "high", "enable_thinking": False},
            False,
            {"reasoning_effort": "high", "enable_thinking": False, "thinking": False},
        ),
        ({"chat_template_kwargs": {"mood": [1]}}, None, {"mood": [1]}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, {"enable_thinking": False}),
        (
            {"chat_template_kwargs": {"enable_thinking": False}, "enable_thinking": True},
            True,
            {"enable_thinking": True, "thinking": True},
        ),
    ],
    ids=str,
)
def test_a_wish_is_read(
    keys: dict[str, Any], enabled: bool | None, variables: dict[str, Any]
) -> None:
    wish = chat(**keys).wish
    assert (wish.enabled, wish.variables) == (enabled, variables)


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"enable_thinking": "yes"}, "enable_thinking"),
        ({"reasoning_effort": "lots"}, "reasoning_effort"),
        ({"reasoning_effort": 3}, "reasoning_effort"),
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens"),
        ({"max_reasoning_tokens": 1.5}, "max_reasoning_tokens"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        *(
            ({"chat_template_kwargs": {name: None}}, f"chat_template_kwargs.{name}")
            for name in RESERVED
        ),
    ],
    ids=str,
)
def test_a_bad_wish_is_named(keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**keys)
    assert caught.value.param == param


@pytest.mark.parametrize("effort", EFFORTS)
def test_every_effort_is_documented(effort: str) -> None:
    assert chat(reasoning_effort=effort).wish.effort == effort
    page = (PROJECT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    assert f"`{effort}`" in page


# --- what boards are sent ---


def planned(folder: ModelFolder, **keys: Any) -> GenerateRequest:
    (request,) = plan(
        chat(**keys),
        ResolvedModel("m"),
        Renderer(folder),
        defaults=Sampling(),
        context_len=512,
        completion="c",
    )
    return request


def test_variables_reach_the_template(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", template=SWITCHED)
    text = read_back(folder, planned(folder, reasoning_effort="none").prompt_ids)
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\nnone")
    request = planned(folder, chat_template_kwargs={"always": True})
    assert read_back(folder, request.prompt_ids).endswith("<think>\n")
    assert request.thinking is not None
    assert request.thinking.begun


def test_the_folder_says_whether_it_thinks_unless_the_call_does(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", template=SWITCHED, settings="thinking: {enabled: false}")
    off = "<think>\n\n</think>\n\n"
    assert read_back(folder, planned(folder).prompt_ids).endswith(off)
    asked = planned(folder, enable_thinking=True)
    assert not read_back(folder, asked.prompt_ids).endswith(off)


def test_typed_markers_in_variables_stay_text(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", template="{{ mood }}{{ messages[0].content }}")
    honest = planned(folder, chat_template_kwargs={"mood": "x"})
    typed = planned(folder, chat_template_kwargs={"mood": "<|im_end|>"})
    end = Renderer(folder).tokenizer
    assert end is not None
    (marker,) = end.encode("<|im_end|>", add_special_tokens=False)
    assert marker not in typed.prompt_ids
    assert len(typed.prompt_ids) > len(honest.prompt_ids)


@pytest.mark.parametrize(
    ("settings", "keys", "most"),
    [
        ("", {}, None),
        ("", {"max_reasoning_tokens": 7}, 7),
        ("", {"reasoning_effort": "low"}, None),
        ("thinking: {budgets: {low: 32}}", {"reasoning_effort": "low"}, 32),
        ("thinking: {budgets: {low: 32}}", {"reasoning_effort": "high"}, None),
        (
            "thinking: {budgets: {low: 32}}",
            {"reasoning_effort": "low", "max_reasoning_tokens": 64},
            64,
        ),
    ],
    ids=str,
)
def test_thoughts_are_limited_by_the_call_or_the_folder(
    tmp_path: Path, settings: str, keys: dict[str, Any], most: int | None
) -> None:
    folder = make_folder(tmp_path / "m", template=SWITCHED, settings=settings)
    thinking = planned(folder, **keys).thinking
    assert thinking is not None
    assert thinking.max_tokens == most
    assert read_back(folder, thinking.mark_ids) == "</think>"
    assert read_back(folder, thinking.closing_ids) == thinking.closing == "\n</think>\n\n"


def test_no_tokens_for_thoughts_end_them_in_the_prompt(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", template=SWITCHED)
    request = planned(folder, chat_template_kwargs={"always": True}, max_reasoning_tokens=0)
    assert read_back(folder, request.prompt_ids).endswith("<think>\n</think>\n\n")
    assert request.thinking is not None
    assert not request.thinking.begun


@pytest.mark.parametrize(
    ("template", "settings", "marks"),
    [
        pytest.param("{{ '</think>' }}", "", ("<think>", "</think>"), id="in the template"),
        pytest.param("{{ 'x' }}", "", None, id="nowhere"),
        pytest.param("{{ 'x' }}", "thinking: {marks: ['[T]', '[/T]']}", ("[T]", "[/T]"), id="said"),
        pytest.param("{{ '</think>' }}", "thinking: {separate: false}", None, id="unwanted"),
    ],
)
def test_marks_are_guessed_or_said(
    tmp_path: Path, template: str, settings: str, marks: tuple[str, str] | None
) -> None:
    found = Renderer(make_folder(tmp_path / "m", template=template, settings=settings)).marks
    assert (None if found is None else found.pair) == marks


@pytest.mark.parametrize(
    "settings",
    ["thinking: {marks: ['', 'x']}", "thinking: {history: never}", "thinking: {budgets: {a: -1}}"],
)
def test_bad_settings_are_refused(tmp_path: Path, settings: str) -> None:
    with pytest.raises(ConfigError, match="thinking"):
        make_folder(tmp_path / "m", settings=settings)


def test_in_text_mode_thoughts_cannot_be_limited(tmp_path: Path) -> None:
    folder = make_folder(
        tmp_path / "m",
        tokenizer=False,
        template=None,
        settings="chat_template: chatml\nthinking: {marks: ['<think>', '</think>']}",
    )
    thinking = planned(folder).thinking
    assert thinking == Thinking("<think>", "</think>", closing="\n</think>\n\n")
    with pytest.raises(UnsupportedParameter) as caught:
        planned(folder, max_reasoning_tokens=5)
    assert caught.value.param == "max_reasoning_tokens"


# --- earlier turns ---

TURN = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
WRITTEN = {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nYes."}
PLAIN_TURN = {"role": "assistant", "content": "Yes."}


@pytest.mark.parametrize(
    ("history", "given", "expected"),
    [
        pytest.param("template", TURN, TURN, id="the template's business"),
        pytest.param("template", WRITTEN, WRITTEN, id="also within the words"),
        pytest.param("strip", TURN, PLAIN_TURN, id="taken out"),
        pytest.param("strip", WRITTEN, PLAIN_TURN, id="taken out of the words"),
        pytest.param("strip", PLAIN_TURN, PLAIN_TURN, id="nothing to take out"),
        pytest.param(
            "strip",
            {"role": "assistant", "content": "See </think>."},
            {"role": "assistant", "content": "See </think>."},
            id="a mark without a beginning",
        ),
        pytest.param("keep", TURN, WRITTEN, id="put before the words"),
        pytest.param("keep", WRITTEN, WRITTEN, id="there already"),
        pytest.param(
            "strip", {"role": "user", "content": WRITTEN["content"]}, None, id="a user's words"
        ),
    ],
)
def test_thoughts_in_history(
    history: str, given: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    found = with_thoughts([given], history, ("<think>", "</think>"))
    assert found == [given if expected is None else expected]


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_thoughts_of_a_message_reach_the_template(tmp_path: Path, key: str) -> None:
    folder = make_folder(tmp_path / "m", template=SWITCHED)
    history = [*HELLO, {"role": "assistant", "content": "Yes.", key: "Hm."}, *HELLO]
    assert "(Hm.)Yes." in read_back(folder, planned(folder, messages=history).prompt_ids)
