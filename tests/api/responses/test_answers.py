"""Responses and their events, as OpenAI's client reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from rkserve.api.common import output
from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.common.logprobs import TokenTexts
from rkserve.api.parsing.answer_parser import PLAIN, ParserOptions
from rkserve.api.parsing.tools.formats import FORMATS
from rkserve.api.responses.answers import RESPONSES, ResponseAnswer
from rkserve.api.responses.requests import ResponseCall, parse_response
from rkserve.core.errors import EngineDied
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
from rkserve.core.run_params import Sampling, Scored
from rkserve.models.files import Vocabulary

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


WAIT = {**LOOK, "name": "wait"}


ALLOWED: dict[str, Any] = {"type": "allowed_tools", "tools": [{"type": "function", "name": "wait"}]}


WAIT_ALLOWED: dict[str, Any] = {**ALLOWED, "mode": "auto"}


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
    assert raw.endswith(output.DONE) is over
    for event in raw.removesuffix(output.DONE).decode().removesuffix("\n\n").split("\n\n"):
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
    assert made().paused(0, Paused("x", 3, Kv.KEPT)) == output.PAUSED
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
