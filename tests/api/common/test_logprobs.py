"""Log-probabilities and token ids in answers, read by OpenAI's own client."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Completion

from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.common.calls import ChatCall, CompletionCall, parse_chat, parse_completion
from rkserve.api.common.logprobs import CompletionLog, SpecialTokens, TokenTexts
from rkserve.api.common.plan import prompt_texts
from rkserve.api.openai.answers import ChatAnswer, CompletionAnswer
from rkserve.core.messages import (
    Delta,
    Finished,
    FinishReason,
    Splice,
    Timings,
    TokenOrigin,
    TranscriptToken,
    Usage,
)
from rkserve.core.run_params import Scored
from rkserve.models.files import Vocabulary

USER = [{"role": "user", "content": "Hi"}]


def chat(**keys: Any) -> ChatCall:
    return parse_chat(json.dumps({"model": "m", "messages": USER, **keys}).encode())


def completion(**keys: Any) -> CompletionCall:
    return parse_completion(json.dumps({"model": "m", "prompt": "Hi", **keys}).encode())


EURO = "€".encode()


PIECES = (b"<end>", b"The", b" sea", b" is", *(bytes([one]) for one in EURO), b" wide")


VOCABULARY = Vocabulary(PIECES, frozenset({0}))


TIMINGS = Timings(1.0, 20.0, 4, 100.0, 2, 812.0)


PROMPT = (1, 2)


EOS = frozenset({0})


def scored(token_id: int, logprob: float = -0.25) -> Scored:
    return Scored(logprob, ((token_id, logprob), (3, -2.5)))


def finished(tokens: int) -> Finished:
    return Finished(FinishReason.STOP, Usage(2, tokens), TIMINGS)


def stamp(call: ChatCall | CompletionCall, hidden: frozenset[int] = frozenset()) -> AnswerOrigin:
    lexicon = TokenTexts(
        VOCABULARY,
        (PROMPT,) * call.choices,
        prompt_texts(call),
        hidden=hidden,
        as_ids=call.tokens_as_ids,
    )
    return AnswerOrigin("m", "1.3.0", lexicon=lexicon, ends=EOS)


def client_of(body: Any = None, raw: bytes | None = None, *, strict: bool = True) -> openai.OpenAI:
    headers = {"content-type": "text/event-stream"}

    def answer(_: httpx2.Request) -> httpx2.Response:
        if raw is not None:
            return httpx2.Response(200, content=raw, headers=headers)
        return httpx2.Response(200, json=body)

    return openai.OpenAI(
        api_key="none",
        base_url="http://rkserve.test/v1",
        max_retries=0,
        http_client=httpx2.Client(transport=httpx2.MockTransport(answer)),
        _strict_response_validation=strict,
    )


def chat_answer(hidden: frozenset[int] = frozenset(), **keys: Any) -> ChatAnswer:
    call = chat(**{"logprobs": True, "top_logprobs": 2, **keys})
    return ChatAnswer(call, "chatcmpl-1", 1700000000, stamp(call, hidden))


def pieces(raw: bytes) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n")]
    return [json.loads(line) for line in lines if line.startswith(b"{")]


HALF = Delta(" is", (3,), logprobs=(scored(3),))


REST = Delta("€", (4, 5, 6, 0), lengths=(0, 0, 1, 0), logprobs=tuple(map(scored, (4, 5, 6, 0))))


def test_the_client_reads_the_logprobs_of_a_whole_chat() -> None:
    answer = chat_answer()
    answer.add(0, HALF)
    answer.add(0, REST)
    answer.end(0, finished(5))
    with client_of(answer.whole()) as client:
        (choice,) = client.chat.completions.create(model="m", messages=[]).choices
    assert choice.message.content == " is€"
    assert choice.logprobs is not None
    found = choice.logprobs.content or []
    assert [one.token for one in found] == [" is", "\\xe2", "\\x82", "\\xac", "<end>"]
    assert b"".join(bytes(one.bytes or ()) for one in found) == " is€<end>".encode()
    assert found[0].logprob == -0.25
    assert [one.token for one in found[1].top_logprobs] == ["\\xe2", " is"]


def test_the_client_reads_the_logprobs_of_a_streamed_chat() -> None:
    answer = chat_answer()
    raw = answer.opening(0) + answer.delta(0, HALF) + answer.delta(0, REST)
    raw += answer.finish(0, finished(5)) + answer.closing()
    with client_of(raw=raw) as client:
        got = list(client.chat.completions.create(model="m", messages=[], stream=True))
    choices = [choice for chunk in got for choice in chunk.choices]
    assert "".join(choice.delta.content or "" for choice in choices) == " is€"
    found = [one for c in choices if c.logprobs for one in c.logprobs.content or []]
    assert [one.token for one in found] == [" is", "\\xe2", "\\x82", "\\xac", "<end>"]


def streamed(answer: ChatAnswer | CompletionAnswer, *deltas: Delta) -> list[dict[str, Any]]:
    raw = answer.opening(0) + b"".join(answer.delta(0, delta) for delta in deltas)
    return pieces(raw + answer.finish(0, finished(5)) + answer.closing())


def test_streamed_logprobs_travel_in_the_chunk_of_their_text() -> None:
    got = streamed(chat_answer(EOS), HALF, REST)
    told = [
        (choice["delta"].get("content"), [one["token"] for one in choice["logprobs"]["content"]])
        for chunk in got
        for choice in chunk["choices"]
        if choice["logprobs"]
    ]
    assert told == [(" is", [" is"]), ("€", ["\\xe2", "\\x82", "\\xac"])]
    assert got[-1]["choices"][0]["logprobs"] is None  # of the EOS token nothing is seen


def test_logprobs_of_text_that_is_held_back_wait_for_it() -> None:
    held = Delta(
        "",
        (3,),
        logprobs=(scored(3),),
        splice=Splice(0, (TranscriptToken(3, b" is", scored=scored(3)),)),
    )
    got = streamed(chat_answer(EOS), held, replace(REST, text=" is€", lengths=(3, 0, 1, 0)))
    texts = [c["choices"][0]["delta"].get("content") for c in got]
    assert texts == ["", " is€", None]
    assert len(got[1]["choices"][0]["logprobs"]["content"]) == 4


def test_no_logprobs_are_listed_for_a_hidden_eos_token() -> None:
    answer = chat_answer(EOS)
    answer.add(0, REST)
    answer.end(0, finished(4))
    (choice,) = answer.whole()["choices"]
    assert [one["token"] for one in choice["logprobs"]["content"]] == ["\\xe2", "\\x82", "\\xac"]


def test_ids_come_with_the_answer_and_its_prompt() -> None:
    answer = chat_answer(logprobs=None, top_logprobs=None, return_token_ids=True)
    answer.add(0, HALF)
    answer.add(0, REST)
    answer.end(0, finished(5))
    whole = answer.whole()
    assert whole["prompt_token_ids"] == list(PROMPT)
    assert whole["choices"][0]["token_ids"] == [3, 4, 5, 6, 0]
    done = completion_answer(return_token_ids=True)
    done.add(0, HALF)
    done.end(0, finished(1))
    (choice,) = done.whole()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (list(PROMPT), [3])


def test_streamed_ids_come_with_their_text_and_the_last_with_the_end() -> None:
    answer = chat_answer(logprobs=None, top_logprobs=None, return_token_ids=True)
    end = Delta("", (0,))
    got = streamed(answer, HALF, replace(REST, token_ids=(4, 5, 6), logprobs=()), end)
    assert [chunk.get("prompt_token_ids") for chunk in got] == [list(PROMPT), None, None, None]
    ids = [chunk["choices"][0].get("token_ids") for chunk in got]
    assert ids == [None, [3], [4, 5, 6], [0]]
    done = streamed(completion_answer(return_token_ids=True), HALF)
    told = [
        (c["choices"][0].get("prompt_token_ids"), c["choices"][0].get("token_ids")) for c in done
    ]
    assert told == [(list(PROMPT), [3]), (None, None)]


def test_a_stream_tells_how_many_ids_an_edit_takes_back() -> None:
    answer = chat_answer(logprobs=None, top_logprobs=None, return_token_ids=True)
    put_in = (
        TranscriptToken(3, b" is"),
        TranscriptToken(9, b"", TokenOrigin.INJECTED),
        TranscriptToken(2, b" sea", TokenOrigin.APPENDED),
    )
    edit = Delta(" sea", (2,), retract=5, splice=Splice(0, put_in))
    got = streamed(answer, HALF, Delta(" wide", (7,)), edit, Delta("The", (1,)))
    ids: list[int] = []
    for chunk in got:
        ids = ids[: len(ids) - chunk.get("rkserve", {}).get("retract_tokens", 0)]
        ids += chunk["choices"][0].get("token_ids", [])
    assert ids == [3, 2, 1]


def test_tokens_are_called_by_their_ids_where_that_was_asked() -> None:
    keys: dict[str, Any] = {"return_tokens_as_token_ids": True}
    answer = chat_answer(**keys)
    answer.add(0, HALF)
    answer.end(0, finished(1))
    (one,) = answer.whole()["choices"][0]["logprobs"]["content"]
    assert (one["token"], bytes(one["bytes"])) == ("token_id:3", b" is")
    done = completion_answer(logprobs=1, **keys)
    done.add(0, HALF)
    done.end(0, finished(1))
    log = done.whole()["choices"][0]["logprobs"]
    assert log["tokens"] == ["token_id:3"]
    assert log["top_logprobs"] == [{"token_id:3": -0.25}]
    assert log["text_offset"] == [0]


SHOWN = {"skip_special_tokens": False, "include_stop_str_in_output": True}


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (SHOWN, " is€<end>"),
        ({"skip_special_tokens": False}, " is€"),
        ({"include_stop_str_in_output": True}, " is€"),
    ],
    ids=str,
)
def test_special_tokens_are_shown_where_that_was_asked(keys: dict[str, Any], text: str) -> None:
    answer = chat_answer(**keys)
    answer.add(0, HALF)
    answer.add(0, REST)
    answer.end(0, finished(5))
    assert answer.whole()["choices"][0]["message"]["content"] == text
    got = streamed(chat_answer(**keys), HALF, REST)
    assert "".join(c["choices"][0]["delta"].get("content") or "" for c in got) == text


def test_special_tokens_stand_at_their_place_and_go_with_the_text_around_them() -> None:
    marks = Vocabulary((*PIECES, b"<tool>"), frozenset({0, 8}))
    shown = SpecialTokens(marks, EOS)
    assert shown.named(Delta(" is wide", (3, 8, 7), lengths=(3, 0, 5))).text == " is<tool> wide"
    back = shown.named(Delta("!", (2,), retract=7, splice=Splice(1, (TranscriptToken(2, b"!"),))))
    assert (back.text, back.retract) == ("!", 7 + len("<tool>"))
    assert shown.tail(0) == "<end>"
    assert shown.tail(8) == ""


def test_what_an_edit_takes_back_has_no_logprobs_and_what_it_puts_in_neither() -> None:
    answer = chat_answer()
    answer.add(0, HALF)
    put_in = (
        TranscriptToken(1, b"The", TokenOrigin.APPENDED),
        TranscriptToken(9, b"", TokenOrigin.INJECTED),
        TranscriptToken(2, b" sea"),
    )
    answer.add(0, Delta("The sea", (1, 2), retract=3, splice=Splice(0, put_in)))
    answer.add(0, Delta(" wide", (7,), logprobs=(scored(7),)))
    answer.end(0, finished(3))
    (choice,) = answer.whole()["choices"]
    assert choice["message"]["content"] == "The sea wide"
    assert [one["token"] for one in choice["logprobs"]["content"]] == [" wide"]


def completion_answer(**keys: Any) -> CompletionAnswer:
    call = completion(**keys)
    return CompletionAnswer(call, "cmpl-1", 1700000000, stamp(call))


def read_whole(answer: CompletionAnswer, *, strict: bool = True) -> Completion:
    with client_of(answer.whole(), strict=strict) as client:
        return client.completions.create(model="m", prompt="x")


def test_the_client_reads_an_echo_with_the_logprobs_of_the_prompt() -> None:
    answer = completion_answer(echo=True, logprobs=2, prompt=list(PROMPT))
    answer.add(0, Delta("", (), prompt=(scored(2, -1.0),)))
    answer.add(0, HALF)
    answer.add(0, REST)
    answer.end(0, finished(5))
    # The first token of a prompt has none: OpenAI says null, which its client's types do not know.
    (choice,) = read_whole(answer, strict=False).choices
    assert choice.text == "The sea is€"
    log = choice.logprobs
    assert log is not None
    expected = ["The", " sea", " is", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "<end>"]
    assert log.tokens == expected
    assert log.token_logprobs == [None, -1.0, *[-0.25] * 5]
    assert log.text_offset == [0, 3, 7, 10, 10, 10, 11]
    assert log.top_logprobs is not None
    assert log.top_logprobs[0] is None
    assert log.top_logprobs[1] == {" sea": -1.0, " is": -2.5}


def likelihood(answer: CompletionAnswer, context: int) -> tuple[float, bool]:
    """What lm-evaluation-harness makes of an answer, as its parse_logprobs does."""
    log = answer.whole()["choices"][0]["logprobs"]
    logprobs = log["token_logprobs"][context:-1]
    tops = log["top_logprobs"][context:-1]
    greedy = all(one == max(top.values()) for one, top in zip(logprobs, tops, strict=True))
    return sum(logprobs), greedy


@pytest.mark.parametrize(("given", "greedy"), [(-0.5, True), (-3.0, False)])
def test_a_harness_reads_likelihoods(given: float, greedy: bool) -> None:
    answer = completion_answer(echo=True, logprobs=1, max_tokens=1, prompt=list(PROMPT))
    answer.add(0, Delta("", (), prompt=(Scored(given, ((3, -0.5),)),)))
    answer.add(0, Delta("", (0,), logprobs=(scored(0),)))
    answer.end(0, finished(1))
    assert likelihood(answer, context=1) == (given, greedy)


def test_a_streamed_echo_comes_before_its_answer() -> None:
    answer = completion_answer(echo=True, logprobs=1, prompt="The sea", stream=True)
    assert answer.opening(0) == b""
    raw = answer.delta(0, Delta("", (), prompt=(scored(2),))) + answer.delta(0, HALF)
    raw += answer.finish(0, finished(1)) + answer.closing()
    with client_of(raw=raw, strict=False) as client:
        got = list(client.completions.create(model="m", prompt="x", stream=True))
    choices = [choice for chunk in got for choice in chunk.choices]
    assert "".join(choice.text for choice in choices) == "The sea is"
    tokens = [one for c in choices if c.logprobs for one in c.logprobs.tokens or []]
    offsets = [one for c in choices if c.logprobs for one in c.logprobs.text_offset or []]
    assert (tokens, offsets) == (["The", " sea", " is"], [0, 3, 7])


def test_an_echo_without_logprobs_is_the_prompt_and_nothing_else() -> None:
    answer = completion_answer(echo=True, prompt="The sea")
    answer.add(0, Delta(" is", (3,)))
    answer.end(0, finished(1))
    (choice,) = read_whole(answer).choices
    assert (choice.text, choice.logprobs) == ("The sea is", None)
    streamed = completion_answer(echo=True, prompt="The sea", stream=True)
    assert b'"text":"The sea"' in streamed.opening(0)


def test_the_best_answers_are_given_in_order_and_all_are_counted() -> None:
    answer = completion_answer(n=2, best_of=3, prompt=["a", "b"])
    for index, logprob in enumerate((-3.0, -1.0, -2.0, -5.0, -5.0, -0.5)):
        answer.add(index, Delta(f"<{index}>", (3,), logprobs=(scored(3, logprob),)))
        answer.end(index, finished(1))
    got = read_whole(answer)
    assert [(choice.index, choice.text) for choice in got.choices] == [
        (0, "<1>"),
        (1, "<2>"),
        (2, "<5>"),
        (3, "<3>"),
    ]
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (4, 6)


def test_bytes_that_never_become_a_character_do_not_hold_the_offset_up() -> None:
    log = CompletionLog(TokenTexts(VOCABULARY, ()))
    found = log.of([(4, None), (1, None), (2, None)], top=0)
    assert found["text_offset"] == [0, 0, 4]
