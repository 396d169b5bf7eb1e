"""OpenAI's responses: bodies to calls, events to what its client reads."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from rkserve.api.common import sse
from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.common.logprobs import TokenTexts
from rkserve.api.parsing.answer_parser import PLAIN, ParserOptions
from rkserve.api.parsing.sampling import SamplingOptions
from rkserve.api.parsing.tools import FORMATS
from rkserve.api.responses.answers import RESPONSES, ResponseAnswer
from rkserve.api.responses.requests import ResponseCall, parse_response
from rkserve.core.errors import EngineDied, RequestError
from rkserve.core.messages import (
    Delta,
    Finished,
    FinishReason,
    Kv,
    Paused,
    Thinking,
    Timings,
    Usage,
)
from rkserve.core.run_params import Guide, GuideKind, Sampling, Scored
from rkserve.models.vocabulary import Vocabulary
from tests.support.http.wire_json import JSON

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TIMINGS = Timings(1.0, 20.0, 4, 100.0, 2, 812.0)
READING = ParserOptions(
    thinking=Thinking("<think>", "</think>"), form=FORMATS["hermes"], names=frozenset({"look"})
)
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
LAST = ("response.completed", "response.incomplete", "response.failed", "error")
SPOKEN = (
    '<think>Hm.</think>Let me look.<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
)


def parsed(**keys: Any) -> ResponseCall:
    return parse_response(json.dumps({"model": "m", "input": "Hello", **keys}).encode())


# --- bodies ---


@pytest.mark.parametrize(
    ("keys", "read"),
    [
        pytest.param({}, [{"role": "user", "content": "Hello"}], id="a text"),
        pytest.param(
            {"instructions": "Be brief."},
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
            id="instructions",
        ),
        pytest.param(
            {
                "input": [
                    {"role": "developer", "content": "Be brief."},
                    {
                        "type": "message",
                        "role": "user",
                        "content": [
                            {"type": "input_text", "text": "Hel"},
                            {"type": "input_text", "text": "lo"},
                        ],
                    },
                ]
            },
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
            id="messages in parts",
        ),
        pytest.param(
            {
                "input": [
                    {"role": "user", "content": "Where?"},
                    {
                        "type": "reasoning",
                        "id": "rs_1",
                        "summary": [],
                        "content": [{"type": "reasoning_text", "text": "Hm."}],
                    },
                    {
                        "type": "message",
                        "role": "assistant",
                        "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
                    },
                    {
                        "type": "function_call",
                        "call_id": "c1",
                        "name": "look",
                        "arguments": '{"at": 1}',
                    },
                    {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "x"},
                    {"type": "function_call_output", "call_id": "c1", "output": "dark"},
                    {
                        "type": "function_call_output",
                        "call_id": "c2",
                        "output": [{"type": "input_text", "text": "light"}],
                    },
                ]
            },
            [
                {"role": "user", "content": "Where?"},
                {
                    "role": "assistant",
                    "content": "Wait.",
                    "reasoning_content": "Hm.",
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "look", "arguments": {"at": 1}},
                        },
                        {
                            "id": "c2",
                            "type": "function",
                            "function": {"name": "look", "arguments": {"raw_arguments": "x"}},
                        },
                    ],
                },
                {"role": "tool", "content": "dark", "tool_call_id": "c1"},
                {"role": "tool", "content": "light", "tool_call_id": "c2"},
            ],
            id="thoughts, calls and results",
        ),
    ],
)
def test_items_become_what_templates_read(keys: dict[str, Any], read: list[Any]) -> None:
    assert list(parsed(**keys).messages) == read


def test_the_other_keys_are_those_of_a_chat() -> None:
    call = parsed(
        max_output_tokens=9,
        temperature=0.5,
        stream=True,
        tools=[LOOK],
        tool_choice={"type": "function", "name": "look"},
        parallel_tool_calls=False,
        reasoning={"effort": "low", "summary": "auto"},
        metadata={"a": "b"},
        prompt_cache_key="k",
        store=True,
        include=["reasoning.encrypted_content"],
        text={"format": {"type": "text"}, "verbosity": "low"},
        priority=3,
    )
    assert (call.max_tokens, call.sampling, call.stream) == (9, {"temperature": 0.5}, True)
    assert (call.tools.named, call.tools.forced, call.tools.parallel) == ("look", True, False)
    assert (call.wish.enabled, call.wish.effort) == (True, "low")
    assert (call.session, call.priority) == ("k", 3)
    assert parsed(reasoning={"effort": "none"}).wish.enabled is False
    assert parsed(tools=[LOOK], tool_choice="none").tools.given == ()
    assert parsed(tools=[LOOK], tool_choice="required").tools.forced
    assert parsed(tools=[LOOK], max_tool_calls=2).tools.most_calls == 2


OTHERS = [
    {"type": "namespace", "name": "agents", "description": "d", "tools": [LOOK]},
    {"type": "custom", "name": "patch", "format": {"type": "grammar"}},
    {"type": "local_shell"},
    {"type": "web_search", "external_web_access": False},
    {"type": "web_search"},
]


def test_offered_tools_of_other_types_are_left_out() -> None:
    call = parsed(tools=[OTHERS[0], LOOK, *OTHERS[1:]])
    assert [tool["function"]["name"] for tool in call.tools.given] == ["look"]
    assert call.left_out == ("namespace", "custom", "local_shell", "web_search")
    assert [tool["name"] for tool in call.echo["tools"]] == ["look"]
    alone = parsed(tools=OTHERS)
    assert (alone.tools.given, alone.left_out) == ((), call.left_out)
    both = [{"type": "function", "name": "look"}, {"type": "web_search"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": both}
    must = parsed(tools=[LOOK, *OTHERS], tool_choice=choice).tools
    assert ([one["function"]["name"] for one in must.given], must.forced) == (["look"], True)


WAIT = {**LOOK, "name": "wait"}
SEARCH = {"type": "web_search"}
ALLOWED: dict[str, Any] = {"type": "allowed_tools", "tools": [{"type": "function", "name": "wait"}]}
WAIT_ALLOWED: dict[str, Any] = {**ALLOWED, "mode": "auto"}
NONE_ALLOWED: dict[str, Any] = {**WAIT_ALLOWED, "tools": []}
OBJECT = Guide(GuideKind.JSON_SCHEMA, '{"type":"object"}')
INTEGER = Guide(GuideKind.JSON_SCHEMA, '{"type":"integer"}')
FORM = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
LOGPROBS = "message.output_text.logprobs"


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        pytest.param({"text": {"format": {"type": "text"}}}, SamplingOptions(), id="text"),
        pytest.param(
            {"text": {"format": {"type": "json_object"}}},
            SamplingOptions(guide=("text.format.type", OBJECT)),
            id="an object",
        ),
        pytest.param(
            {"text": {"format": FORM}},
            SamplingOptions(guide=("text.format.schema", INTEGER)),
            id="a schema",
        ),
        pytest.param({"include": [LOGPROBS]}, SamplingOptions(top_logprobs=0), id="logprobs"),
        pytest.param(
            {"include": ["x", LOGPROBS], "top_logprobs": 3},
            SamplingOptions(top_logprobs=3),
            id="and others",
        ),
        pytest.param({"top_logprobs": 2}, SamplingOptions(top_logprobs=2), id="others"),
        pytest.param({"top_logprobs": 0, "include": []}, SamplingOptions(), id="no logprobs"),
        pytest.param(
            {"seed": 7, "min_p": 0.1}, SamplingOptions(seed=7, min_p=0.1), id="rkserve's own"
        ),
    ],
)
def test_formats_and_logprobs_are_asked_for_in_openai_s_words(
    keys: dict[str, Any], steps: SamplingOptions
) -> None:
    assert parsed(**keys).steps == steps


def test_the_format_is_repeated() -> None:
    told = made(text={"format": FORM}).failed(EngineDied("b", "x"))
    assert told["text"] == {"format": {**FORM, "strict": True, "description": None}}
    assert made().failed(EngineDied("b", "x"))["text"] == {"format": {"type": "text"}}


@pytest.mark.parametrize(("mode", "forced"), [("auto", False), ("required", True)])
def test_only_tools_that_are_allowed_are_offered(mode: str, forced: bool) -> None:
    tools = parsed(tools=[LOOK, WAIT], tool_choice={**ALLOWED, "mode": mode}).tools
    assert [tool["function"]["name"] for tool in tools.given] == ["wait"]
    assert (tools.forced, tools.named) == (forced, None)


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        pytest.param({"model": None}, "model", id="no model"),
        pytest.param({"input": None}, "input", id="no input"),
        pytest.param({"input": []}, "input", id="an empty input"),
        pytest.param({"input": [5]}, "input[0]", id="a number for an item"),
        pytest.param({"input": [{"content": "x"}]}, "input[0].role", id="nobody speaks"),
        pytest.param({"input": [{"role": "tool", "content": "x"}]}, "input[0].role", id="who?"),
        pytest.param({"input": [{"role": "user"}]}, "input[0].content", id="says nothing"),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].image_url",
            id="an image that is not there",
        ),
        pytest.param(
            {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
            "input[0].content[0].file_id",
            id="an image that is kept",
        ),
        pytest.param(
            {"input": [{"role": "assistant", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            id="an image of the model",
        ),
        pytest.param({"input": [{"type": "item_reference"}]}, "input[0].id", id="to nothing"),
        pytest.param(
            {"input": [{"type": "item_reference", "id": "msg_1"}] * 1025}, "input", id="to much"
        ),
        pytest.param({"store": "yes"}, "store", id="a word for a switch"),
        pytest.param(
            {"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id", id="no id"
        ),
        pytest.param({"max_output_tokens": 0}, "max_output_tokens", id="a limit of nothing"),
        pytest.param({"previous_response_id": 5}, "previous_response_id", id="a number"),
        pytest.param({"conversation": "c"}, "conversation", id="a conversation"),
        pytest.param({"background": True}, "background", id="in the background"),
        pytest.param({"text": {"format": {"type": "xml"}}}, "text.format.type", id="XML"),
        pytest.param({"text": {"format": {}}}, "text.format.type", id="a format of nothing"),
        pytest.param(
            {"text": {"format": {"type": "json_schema"}}}, "text.format.schema", id="no schema"
        ),
        pytest.param(
            {"text": {"format": {"type": "json_object"}}, "guided_regex": "a"},
            "guided_regex",
            id="two formats",
        ),
        pytest.param({"top_logprobs": 21}, "top_logprobs", id="too many logprobs"),
        pytest.param({"include": "x"}, "include", id="a word for a list"),
        pytest.param({"tools": [LOOK], "tool_choice": ALLOWED}, "tool_choice.mode", id="no mode"),
        pytest.param(
            {"tools": [LOOK], "tool_choice": NONE_ALLOWED}, "tool_choice.tools", id="none allowed"
        ),
        pytest.param(
            {"tools": [LOOK], "tool_choice": WAIT_ALLOWED},
            "tool_choice.tools[0].name",
            id="an unknown one is allowed",
        ),
        pytest.param({"truncation": "auto"}, "truncation", id="cut to fit"),
        pytest.param({"tools": [{"name": "x"}]}, "tools[0].type", id="a tool of no type"),
        pytest.param({"tools": [{"type": "a\nb"}]}, "tools[0].type", id="no type's name"),
        pytest.param(
            {"tools": [SEARCH], "tool_choice": "required"},
            "tool_choice",
            id="only a server's tool, and it must be called",
        ),
        pytest.param(
            {"tools": [LOOK, SEARCH], "tool_choice": {"type": "web_search"}},
            "tool_choice.type",
            id="a server's tool must be called",
        ),
        pytest.param(
            {
                "tools": [LOOK, SEARCH],
                "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [SEARCH]},
            },
            "tool_choice",
            id="only a server's tool is allowed, and must be called",
        ),
        pytest.param({"max_tool_calls": 0}, "max_tool_calls", id="no calls at all"),
        pytest.param({"safety_identifier": 5}, "safety_identifier", id="a number for a name"),
        pytest.param({"tools": [{"type": "function"}]}, "tools[0].name", id="without a name"),
        pytest.param({"tool_choice": "required"}, "tool_choice", id="none to be called"),
        pytest.param(
            {"tools": [LOOK], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice.name",
            id="a tool that there is not",
        ),
        pytest.param({"reasoning": {"effort": "much"}}, "reasoning.effort", id="a strange effort"),
        pytest.param({"metadata": {"a": 1}}, "metadata", id="metadata in numbers"),
    ],
)
def test_what_is_wrong_or_cannot_be_done_is_named(keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parsed(**keys)
    assert (caught.value.http_status, caught.value.param) == (400, param)


_ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"])},
    optional={
        "role": st.sampled_from(["user", "assistant", "x"]),
        "content": JSON,
        "call_id": JSON,
        "name": JSON,
        "arguments": JSON,
        "output": JSON,
    },
)


@given(items=st.lists(_ITEM, max_size=3) | JSON, tools=JSON, choice=JSON, text=JSON)
def test_whatever_comes_is_read_or_refused(items: Any, tools: Any, choice: Any, text: Any) -> None:
    try:
        call = parsed(input=items, tools=tools, tool_choice=choice, text=text)
    except RequestError as exc:
        found = exc.param is not None or "not valid JSON" in exc.message  # infinity
    else:
        found = all(isinstance(one["content"], str) for one in call.messages)
    assert found


# --- answers ---


def made(reading: ParserOptions = PLAIN, **keys: Any) -> ResponseAnswer:
    call = parsed(**{"instructions": "Be brief.", "tools": [LOOK], "metadata": {"a": "b"}, **keys})
    return ResponseAnswer(
        call, "resp_1", 1700000000, AnswerOrigin("tiny", "1.3.0", reading=reading)
    )


def ended(reason: FinishReason = FinishReason.STOP) -> Finished:
    return Finished(reason, Usage(6, 5, 2, 3), TIMINGS)


def events(raw: bytes) -> list[dict[str, Any]]:
    """The events, each as OpenAI's client reads it, numbered without a gap, and [DONE]."""
    found = []
    over = any(f"event: {name}\n".encode() in raw for name in LAST)
    assert raw.endswith(sse.DONE) is over
    for event in raw.removesuffix(sse.DONE).decode().removesuffix("\n\n").split("\n\n"):
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        told = json.loads(data.removeprefix("data: "))
        assert told["type"] == name.removeprefix("event: ")
        EVENTS.validate_python(told)
        found.append(told)
    assert [one["sequence_number"] for one in found] == list(range(len(found)))
    return found


def stream(answer: ResponseAnswer, text: str, size: int = 4) -> list[dict[str, Any]]:
    raw = answer.opening(0)
    for at in range(0, len(text), size):
        raw += answer.delta(0, Delta(text[at : at + size], (at,)))
    return events(raw + answer.finish(0, ended()) + answer.closing())


def test_a_stream_is_a_message_that_grows() -> None:
    told = stream(made(), "Grüß dich")
    assert [one["type"].removeprefix("response.") for one in told] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * 3,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert "".join(one["delta"] for one in told if "delta" in one) == "Grüß dich"
    last = told[-1]["response"]
    assert last["output"][0]["content"][0]["text"] == "Grüß dich"
    assert last["output"][0]["id"] == told[2]["item"]["id"]
    assert (last["status"], last["instructions"], last["metadata"]) == (
        "completed",
        "Be brief.",
        {"a": "b"},
    )
    assert last["store"] is False
    assert last["usage"] == {
        "input_tokens": 6,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 11,
    }


def test_a_response_has_all_that_open_responses_demands() -> None:
    call = parsed(
        tools=[LOOK],
        max_tool_calls=3,
        temperature=0.25,
        frequency_penalty=0.5,
        safety_identifier="someone",
        prompt_cache_key="k",
    )
    in_force = Sampling(temperature=0.25, top_p=0.75, frequency_penalty=0.5)
    stamp = AnswerOrigin("tiny", "1.3.0", sampling=in_force)
    answer = ResponseAnswer(call, "resp_1", 1700000000, stamp, now=lambda: 1700000009.7)
    told = stream(answer, "Yes.")
    demanded = {
        "temperature": 0.25,
        "top_p": 0.75,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.5,
        "max_tool_calls": 3,
        "service_tier": "default",
        "safety_identifier": "someone",
        "prompt_cache_key": "k",
        "tool_choice": "auto",
    }
    begun, last = told[0]["response"], told[-1]["response"]
    assert {name: begun[name] for name in demanded} == demanded
    assert {name: last[name] for name in demanded} == demanded
    assert (begun["completed_at"], last["completed_at"]) == (None, 1700000009)


@pytest.mark.parametrize(
    ("keys", "choice", "names"),
    [
        pytest.param({}, "auto", ["look", "wait"], id="nothing said"),
        pytest.param({"tools": None}, "auto", [], id="no tools"),
        pytest.param({"tool_choice": "none"}, "none", ["look", "wait"], id="none"),
        pytest.param({"tool_choice": "required"}, "required", ["look", "wait"], id="required"),
        pytest.param(
            {"tool_choice": {"type": "function", "name": "wait"}},
            {"type": "function", "name": "wait"},
            ["look", "wait"],
            id="named",
        ),
        pytest.param({"tool_choice": WAIT_ALLOWED}, WAIT_ALLOWED, ["look", "wait"], id="only some"),
    ],
)
def test_tools_and_their_choice_are_repeated(
    keys: dict[str, Any], choice: Any, names: list[str]
) -> None:
    echo = parsed(**{"tools": [LOOK, WAIT], **keys}).echo
    assert (echo["tool_choice"], [tool["name"] for tool in echo["tools"]]) == (choice, names)


def test_a_response_that_was_cut_has_not_been_completed() -> None:
    answer = made()
    raw = answer.opening(0) + answer.finish(0, ended(FinishReason.LENGTH)) + answer.closing()
    assert events(raw)[-1]["response"]["completed_at"] is None


def test_thoughts_and_calls_are_items_of_their_own() -> None:
    told = stream(made(READING), SPOKEN)
    added = [one["item"]["type"] for one in told if one["type"].endswith("item.added")]
    assert added == ["reasoning", "message", "function_call"]
    output = told[-1]["response"]["output"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert output[1]["content"][0]["text"] == "Let me look."
    assert (output[2]["name"], json.loads(output[2]["arguments"])) == ("look", {"at": 1})
    grown = "".join(one["delta"] for one in told if "arguments.delta" in one["type"])
    assert grown == output[2]["arguments"]
    (ended_call,) = [one for one in told if "arguments.done" in one["type"]]
    assert (ended_call["name"], ended_call["arguments"]) == ("look", grown)
    assert [one["item"] for one in told if one["type"].endswith("item.done")] == output


@pytest.mark.parametrize("reading", [PLAIN, READING], ids=["words", "anything"])
def test_a_whole_response_is_the_last_event_of_its_stream(reading: ParserOptions) -> None:
    answer = made(reading)
    for at in range(0, len(SPOKEN), 7):
        answer.add(0, Delta(SPOKEN[at : at + 7], (at,)))
    answer.end(0, ended())
    streamed = stream(made(reading), SPOKEN)[-1]["response"]
    ids = {"call_id"}  # made anew
    told, other = (
        [{key: value for key, value in item.items() if key not in ids} for item in one["output"]]
        for one in (answer.whole(), streamed)
    )
    assert told == other
    Response.model_validate(answer.whole(), strict=False)


@pytest.mark.parametrize(
    ("reason", "status", "details"),
    [
        pytest.param(FinishReason.STOP, "completed", None, id="the model ended"),
        pytest.param(
            FinishReason.LENGTH, "incomplete", {"reason": "max_output_tokens"}, id="the limit"
        ),
        pytest.param(FinishReason.ABORT, "cancelled", None, id="somebody aborted it"),
    ],
)
def test_the_status_tells_the_truth(reason: FinishReason, status: str, details: Any) -> None:
    answer = made()
    raw = answer.opening(0) + answer.finish(0, ended(reason)) + answer.closing()
    last = events(raw)[-1]
    assert last["type"] == f"response.{'completed' if status == 'completed' else 'incomplete'}"
    assert (last["response"]["status"], last["response"]["incomplete_details"]) == (status, details)
    (item,) = last["response"]["output"]  # of an answer without words
    assert item["content"][0]["text"] == ""


def test_words_that_an_edit_takes_back_are_told_and_gone_in_the_end() -> None:
    answer = made()
    raw = answer.opening(0) + answer.delta(0, Delta("abc", (1,)))
    raw += answer.delta(0, Delta("X", (), retract=2)) + answer.finish(0, ended())
    told = events(raw + answer.closing())
    assert [one["rkserve"] for one in told if "rkserve" in one] == [{"retract": 2}]
    assert told[-1]["response"]["output"][0]["content"][0]["text"] == "aX"


def test_a_pause_is_a_comment_and_an_event_where_it_was_asked_for() -> None:
    assert made().paused(0, Paused("x", 3, Kv.KEPT)) == sse.PAUSED
    (told,) = events(made(pause_on=["x"]).paused(0, Paused("x", 3, Kv.KEPT)))
    assert (told["type"], told["rkserve"]["status"]) == ("response.in_progress", "paused")


def test_what_breaks_is_a_failed_response_with_what_there_was() -> None:
    answer = made()
    raw = answer.opening(0) + answer.delta(0, Delta("half", (1,)))
    last = events(raw + answer.broken(EngineDied("a", "SIGSEGV")))[-1]
    assert last["type"] == "response.failed"
    assert "SIGSEGV" in last["response"]["error"]["message"]
    assert last["response"]["error"]["type"] == "board_failed"
    assert last["response"]["output"][0]["content"][0]["text"] == "half"
    (early,) = events(RESPONSES.broken(ZeroDivisionError("secret")))
    assert (early["code"], "secret" in early["message"]) == ("internal_error", False)


def test_logprobs_stand_at_the_message_in_every_form_that_has_it() -> None:
    call = parsed(top_logprobs=1)
    lexicon = TokenTexts(Vocabulary((b"Hel", b"lo"), frozenset()), ((0,),), (None,))
    stamp = AnswerOrigin("tiny", "1.3.0", lexicon=lexicon)
    scores = [Scored(-0.5, ((0, -0.5),)), Scored(-0.25, ((1, -0.25),))]
    deltas = [Delta("Hel", (0,), logprobs=(scores[0],)), Delta("lo", (1,), logprobs=(scores[1],))]
    answer = ResponseAnswer(call, "resp_1", 1700000000, stamp)
    raw = answer.opening(0) + b"".join(answer.delta(0, one) for one in deltas)
    told = events(raw + answer.finish(0, ended()) + answer.closing())
    (part,) = told[-1]["response"]["output"][0]["content"]
    assert [(one["token"], one["logprob"]) for one in part["logprobs"]] == [
        ("Hel", -0.5),
        ("lo", -0.25),
    ]
    assert part["logprobs"][0]["top_logprobs"][0]["token"] == "Hel"
    done = {one["type"]: one for one in told}
    assert done["response.output_text.done"]["logprobs"] == part["logprobs"]
    assert done["response.content_part.done"]["part"] == part
    whole = ResponseAnswer(call, "resp_1", 1700000000, stamp)
    for one in deltas:
        whole.add(0, one)
    whole.end(0, ended())
    assert whole.whole()["output"] == told[-1]["response"]["output"]
    Response.model_validate(whole.whole(), strict=False)
