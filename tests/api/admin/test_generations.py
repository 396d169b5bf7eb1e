"""Bodies and answers of the calls that control generations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from rkserve.api.admin.caches import parse_build
from rkserve.api.admin.generations import (
    EditCall,
    control_answer,
    edit_of,
    generation_entry,
    generations_list,
    parse_edit,
    read_choice,
)
from rkserve.api.admin.query import ControlRequest
from rkserve.api.common.renderer import Renderer
from rkserve.api.json.fields import MAX_CHOICES, MAX_CLEAR_RANGES
from rkserve.core.board_report import GenerationInfo, GenerationState
from rkserve.core.errors import RequestError, RkserveError, UnsupportedParameter
from rkserve.core.messages import ControlAction, Edit, Kv
from rkserve.models.folder import ModelFolder
from tests.support.values.wire_folders import CHATML, VOCABULARY, make_folder, read_back
from tests.support.values.wire_json import JSON

CONTEXT = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return make_folder(tmp_path_factory.mktemp("folders") / "tiny", template=CHATML)


@pytest.fixture(scope="module")
def renderer(folder: ModelFolder) -> Renderer:
    return Renderer(folder)


def body(**keys: Any) -> ControlRequest:
    return ControlRequest(body=json.dumps(keys).encode())


def info(choice: int = 0, **changes: Any) -> GenerationInfo:
    known: dict[str, Any] = {
        "state": GenerationState.PAUSED,
        "prompt_tokens": 5,
        "tokens": 3,
        "context_tokens": 8,
        "kv_positions": 7,
        "partial_output": "Hello",
        "kv": Kv.KEPT,
    }
    return GenerationInfo(f"chatcmpl-1/{choice}", "sim-0", "sim-chat", **{**known, **changes})


# --- bodies ---


@pytest.mark.parametrize(
    ("sent", "choice"),
    [
        pytest.param(b"", None, id="no body"),
        pytest.param(b" \n", None, id="a blank one"),
        pytest.param(b"{}", None, id="an empty object"),
        pytest.param(b'{"choice": null}', None, id="null"),
        pytest.param(b'{"choice": 3}', 3, id="a choice"),
    ],
)
def test_a_choice_may_be_named(sent: bytes, choice: int | None) -> None:
    assert read_choice(ControlRequest(body=sent)) == choice


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        pytest.param(b'{"choice": -1}', "choice", id="below 0"),
        pytest.param(b'{"choice": %d}' % MAX_CHOICES, "choice", id="more than any answer has"),
        pytest.param(b'{"choice": "0"}', "choice", id="a string"),
        pytest.param(b'{"chioce": 1}', "chioce", id="a typing error"),
        pytest.param(b"[]", None, id="an array"),
        pytest.param(b"{", None, id="no JSON"),
    ],
)
def test_a_bad_choice_is_named(sent: bytes, param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        read_choice(ControlRequest(body=sent))
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("keys", "call"),
    [
        pytest.param({"replace_last": 3}, EditCall(replace_last=3), id="take back"),
        pytest.param({"text": " x"}, EditCall(text=" x"), id="own words"),
        pytest.param({"text": "x", "role": "assistant"}, EditCall(text="x"), id="said so"),
        pytest.param({"text": "", "role": "tool"}, EditCall(text="", tool=True), id="no result"),
        pytest.param({"token_ids": [5, 6]}, EditCall(token_ids=(5, 6)), id="ids"),
        pytest.param(
            {"clear": [[0, 2], [4, 4]]}, EditCall(clear=((0, 2), (4, 4))), id="ranges, one empty"
        ),
        pytest.param(
            {"replace_last": 1, "text": "x", "clear": [[1, 2]], "choice": 2},
            EditCall(2, 1, "x", None, False, ((1, 2),)),
            id="everything",
        ),
    ],
)
def test_an_edit_is_read(keys: dict[str, Any], call: EditCall) -> None:
    assert parse_edit(body(**keys)) == call


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({}, None),
        ({"choice": 0}, None),
        ({"replace": 3}, "replace"),
        ({"replace_last": -1}, "replace_last"),
        ({"replace_last": "2"}, "replace_last"),
        ({"text": ""}, "text"),
        ({"text": 5}, "text"),
        ({"text": "x", "role": "user"}, "role"),
        ({"role": "tool", "replace_last": 1}, "role"),
        ({"text": "x", "token_ids": [1]}, "token_ids"),
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, "a"]}, "token_ids[1]"),
        ({"token_ids": [True]}, "token_ids[0]"),
        ({"token_ids": 5}, "token_ids"),
        ({"clear": []}, "clear"),
        ({"clear": [1, 2]}, "clear[0]"),
        ({"clear": [[1, 2, 3]]}, "clear[0]"),
        ({"clear": [[0, 1], [3, 2]]}, "clear[1]"),
        ({"clear": [[-1, 2]]}, "clear[0]"),
        ({"clear": [[0, 1.5]]}, "clear[0][1]"),
        ({"clear": [[0, 1]] * (MAX_CLEAR_RANGES + 1)}, "clear"),
    ],
    ids=str,
)
def test_a_bad_edit_is_named(keys: dict[str, Any], param: str | None) -> None:
    with pytest.raises(RequestError) as caught:
        parse_edit(body(**keys))
    assert caught.value.param == param


def test_a_query_says_the_same_as_a_body() -> None:
    pairs = [("replace_last", "1"), ("text", " 12"), ("clear", "[[1, 2]]"), ("choice", "2")]
    assert parse_edit(ControlRequest(tuple(pairs))) == EditCall(2, 1, " 12", None, False, ((1, 2),))
    ids = (("token_ids", "[5,6]"), ("role", "tool"))
    assert parse_edit(ControlRequest(ids)) == EditCall(token_ids=(5, 6), tool=True)
    assert read_choice(ControlRequest((("choice", "3"),))) == 3


@pytest.mark.parametrize(
    ("pairs", "param"),
    [
        ([("chioce", "1")], "chioce"),
        ([("choice", "one")], "choice"),
        ([("choice", "1"), ("choice", "2")], "choice"),
        ([("text", "x"), ("clear", "1-2")], "clear"),
        ([("text", "x"), ("clear", "5")], "clear"),
    ],
    ids=str,
)
def test_a_bad_query_is_named(pairs: list[tuple[str, str]], param: str) -> None:
    for parse in (parse_edit, read_choice) if param == "chioce" else (parse_edit,):
        with pytest.raises(RequestError) as caught:
            parse(ControlRequest(tuple(pairs)))
        assert caught.value.param == param


def test_what_is_in_the_query_and_in_the_body_is_refused() -> None:
    with pytest.raises(RequestError, match="in the query and in the body"):
        read_choice(ControlRequest((("choice", "1"),), b'{"choice": 1}'))


@given(JSON)
def test_no_json_raises_anything_but_a_request_error(value: Any) -> None:
    caught: list[RkserveError] = []
    for parse in (read_choice, parse_edit, parse_build):
        try:
            parse(ControlRequest(body=json.dumps(value).encode()))
        except RkserveError as exc:
            caught.append(exc)
    assert {exc.http_status for exc in caught} <= {400}


# --- what an edit means to a board ---


def test_own_words_are_given_out_and_markers_in_them_stay_text(
    renderer: Renderer, folder: ModelFolder
) -> None:
    edit = edit_of(EditCall(replace_last=2, text="<|im_end|>!"), renderer, CONTEXT)
    assert (edit.replace_last, edit.text, edit.injected) == (2, "<|im_end|>!", False)
    assert read_back(folder, edit.ids) == "<|im_end|>!"
    assert 2 not in edit.ids


def test_a_tool_s_result_is_injected_and_not_part_of_the_answer(
    renderer: Renderer, folder: ModelFolder
) -> None:
    edit = edit_of(EditCall(text="21 degrees", tool=True), renderer, CONTEXT)
    assert (edit.text, edit.injected) == ("", True)
    shown = read_back(folder, edit.ids)
    assert shown.startswith("<|im_end|>\n")
    assert "21 degrees" in shown
    assert shown.endswith("<|im_start|>assistant\n")


def test_ids_are_taken_as_they_are(renderer: Renderer) -> None:
    ids = renderer.words(" the board")
    assert edit_of(EditCall(token_ids=ids), renderer, CONTEXT) == Edit(ids=ids, text=" the board")
    assert edit_of(EditCall(token_ids=(2, 1), tool=True), renderer, CONTEXT) == Edit(
        ids=(2, 1), injected=True
    )


def test_clearing_needs_no_tokenizer_and_words_do(tmp_path: Path) -> None:
    renderer = Renderer(make_folder(tmp_path / "m", tokenizer=False))
    assert edit_of(EditCall(clear=((0, 2),)), renderer, CONTEXT) == Edit(clear=((0, 2),))
    assert edit_of(EditCall(replace_last=1), renderer, CONTEXT) == Edit(replace_last=1)
    with pytest.raises(UnsupportedParameter, match="'text' needs a tokenizer"):
        edit_of(EditCall(text="x"), renderer, CONTEXT)


def test_an_id_outside_of_the_vocabulary_is_named(renderer: Renderer) -> None:
    with pytest.raises(RequestError) as caught:
        edit_of(EditCall(token_ids=(1, VOCABULARY)), renderer, CONTEXT)
    assert caught.value.param == "token_ids[1]"


# --- answers ---


def test_a_list_tells_where_everybody_is_and_nobody_s_words() -> None:
    found = generations_list([info(age_s=1.0), info(1, age_s=2.0, paused_by="tool")])
    assert found["object"] == "list"
    assert [entry["choice"] for entry in found["data"]] == [1, 0]  # the oldest first
    assert found["data"][1] == {
        "id": "chatcmpl-1",
        "object": "generation",
        "choice": 0,
        "board": "sim-0",
        "model": "sim-chat",
        "adapter": None,
        "state": "paused",
        "prompt_tokens": 5,
        "tokens": 3,
        "context_tokens": 8,
        "kv_positions": 7,
        "kv": "kept",
        "native_pause": False,
        "paused_by": None,
        "age_s": 1.0,
    }
    assert "Hello" not in json.dumps(found)


@pytest.mark.parametrize(
    ("action", "status", "shows_text"),
    [
        pytest.param(ControlAction.PAUSE, "paused", True, id="pause"),
        pytest.param(ControlAction.EDIT, "paused", True, id="edit"),
        pytest.param(ControlAction.RESUME, "resumed", False, id="resume"),
        pytest.param(ControlAction.ABORT, "aborted", False, id="abort"),
    ],
)
def test_an_action_tells_what_it_came_to(
    action: ControlAction, status: str, shows_text: bool
) -> None:
    told = control_answer(action, [info()])
    assert (told["id"], told["status"], told["choice"]) == ("chatcmpl-1", status, 0)
    assert (told["tokens"], told["context_tokens"], told["kv_positions"]) == (3, 8, 7)
    assert (told["kv"], told["can_resume"]) == ("kept", True)
    assert ("partial_output" in told) is shows_text
    assert "choices" not in told


def test_several_choices_are_all_told_and_the_first_one_on_top() -> None:
    told = control_answer(ControlAction.PAUSE, [info(2), info(0, tokens=9), info(10)])
    assert (told["choice"], told["tokens"]) == (0, 9)
    assert [one["choice"] for one in told["choices"]] == [0, 2, 10]


@pytest.mark.parametrize("state", list(GenerationState))
def test_one_generation_tells_its_state_and_its_words(state: GenerationState) -> None:
    told = generation_entry([info(state=state, kv=None)])
    assert (told["status"], told["state"]) == (state.value, state.value)
    assert told["partial_output"] == "Hello"
    assert told["can_resume"] is (state is GenerationState.PAUSED)
    assert told["kv"] is None
