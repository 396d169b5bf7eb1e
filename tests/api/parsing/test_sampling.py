"""Seeds, biases and logprobs: read, needed or not, planned, and read by OpenAI's own client."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from openai.types import Completion

from rkserve.api.common.answer import AnswerOrigin
from rkserve.api.common.calls import ChatCall, CompletionCall, parse_chat, parse_completion
from rkserve.api.common.logprobs import CompletionLog, SpecialTokens, TokenTexts
from rkserve.api.common.plan import held, plan, prompt_texts
from rkserve.api.common.renderer import Renderer
from rkserve.api.common.version_policy import ResolvedModel
from rkserve.api.json.limits import MAX_LOGIT_BIAS
from rkserve.api.openai.answers import ChatAnswer, CompletionAnswer
from rkserve.api.parsing.sampling import SamplingOptions
from rkserve.core.errors import RequestError, UnsupportedParameter
from rkserve.core.messages import (
    Delta,
    Finished,
    FinishReason,
    GenerateRequest,
    Splice,
    Timings,
    TokenOrigin,
    TranscriptToken,
    Usage,
)
from rkserve.core.run_params import Sampling, Scored, Stepwise
from rkserve.models.vocabulary import Vocabulary
from tests.support.http.wire_folders import CHATML, make_folder

THINKS = CHATML + "{% if add_generation_prompt %}<think>\n{% else %}</think>{% endif %}"
CHANCE = Sampling(temperature=0.8, top_k=40)
USER = [{"role": "user", "content": "Hi"}]


def chat(**keys: Any) -> ChatCall:
    return parse_chat(json.dumps({"model": "m", "messages": USER, **keys}).encode())


def completion(**keys: Any) -> CompletionCall:
    return parse_completion(json.dumps({"model": "m", "prompt": "Hi", **keys}).encode())


# -- reading ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        pytest.param({"seed": -3}, SamplingOptions(seed=-3), id="seed"),
        pytest.param({"seed": 2**64 - 1}, SamplingOptions(seed=2**64 - 1), id="a large one"),
        pytest.param({"min_p": 1}, SamplingOptions(min_p=1.0), id="min_p"),
        pytest.param({"min_p": 0}, SamplingOptions(), id="min_p off"),
        pytest.param(
            {"logit_bias": {"7": -100, "05": 1.5}},
            SamplingOptions(logit_bias=((5, 1.5), (7, -100.0))),
            id="logit_bias",
        ),
        pytest.param({"logit_bias": []}, SamplingOptions(), id="an empty bias"),
        pytest.param({"logprobs": False}, SamplingOptions(), id="logprobs off"),
        pytest.param({"ignore_eos": True}, SamplingOptions(ignore_eos=True), id="no end"),
        pytest.param({"min_tokens": 5}, SamplingOptions(min_tokens=5), id="no early end"),
        pytest.param(
            {"ignore_eos": False, "min_tokens": 0}, SamplingOptions(), id="an end whenever"
        ),
    ],
)
@pytest.mark.parametrize("read", [chat, completion])
def test_what_needs_steps_is_read(read: Any, keys: dict[str, Any], steps: SamplingOptions) -> None:
    assert read(**keys).steps == steps


def test_chats_and_completions_ask_for_logprobs_in_their_own_ways() -> None:
    assert chat(logprobs=True).steps.top_logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).steps.top_logprobs == 5
    assert chat(top_logprobs=0).steps.top_logprobs is None
    assert completion(logprobs=0).steps.top_logprobs == 0
    assert completion(logprobs=3).steps.top_logprobs == 3


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": -0.1}, "min_p"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"٣": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"logit_bias": {"1": True}}, "logit_bias.1"),
        ({"logit_bias": {"1": 10**400}}, "logit_bias.1"),
        ({"logit_bias": {str(at): 1 for at in range(MAX_LOGIT_BIAS + 1)}}, "logit_bias"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"ignore_eos": 1}, "ignore_eos"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 2**31}, "min_tokens"),
    ],
    ids=lambda value: str(value)[:40],
)
@pytest.mark.parametrize("read", [chat, completion])
def test_a_wrong_value_is_named(read: Any, keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**keys)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("read", "keys", "param"),
    [
        (chat, {"top_logprobs": 3}, "top_logprobs"),
        (chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (chat, {"logprobs": 2}, "logprobs"),
        (completion, {"logprobs": 21}, "logprobs"),
        (completion, {"logprobs": True}, "logprobs"),
        (completion, {"echo": 1}, "echo"),
        (completion, {"max_tokens": 0}, "max_tokens"),
        (completion, {"logprobs": 1, "max_tokens": 0}, "max_tokens"),
        (completion, {"n": 3, "best_of": 2}, "best_of"),
        (completion, {"best_of": 17}, "best_of"),
        (completion, {"best_of": 2, "stream": True}, "best_of"),
        (completion, {"best_of": 9, "prompt": ["a", "b"]}, "best_of"),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)[:40]),
)
def test_what_does_not_go_together_is_named(read: Any, keys: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**keys)
    assert caught.value.param == param


# -- whether they are needed ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "sampling", "name"),
    [
        pytest.param({}, CHANCE, None, id="nothing"),
        pytest.param({"seed": 7}, CHANCE, "seed", id="a seed"),
        pytest.param({"seed": 7}, Sampling(temperature=0), None, id="a seed without chance"),
        pytest.param({"seed": 7}, Sampling(top_k=1), None, id="one to choose among"),
        pytest.param({"min_p": 0.1}, CHANCE, "min_p", id="min_p"),
        pytest.param({"min_p": 0.1}, Sampling(temperature=0), None, id="min_p without chance"),
        pytest.param(
            {"logit_bias": {"1": 5}}, Sampling(temperature=0), "logit_bias", id="a bias decides"
        ),
        pytest.param({"logprobs": True}, Sampling(temperature=0), "logprobs", id="logprobs"),
        pytest.param({"ignore_eos": True}, Sampling(temperature=0), "ignore_eos", id="no end"),
        pytest.param({"min_tokens": 1}, Sampling(temperature=0), "min_tokens", id="no early end"),
    ],
)
def test_steps_are_made_where_they_are_needed_only(
    keys: dict[str, Any], sampling: Sampling, name: str | None
) -> None:
    assert chat(**keys).steps.asked(sampling) == name


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    return Renderer(make_folder(tmp_path_factory.mktemp("folders") / "tiny"))


def planned(
    renderer: Renderer, call: ChatCall | CompletionCall, defaults: Sampling = CHANCE
) -> list[GenerateRequest]:
    meant = ResolvedModel("m", None)
    return plan(
        call, meant, renderer, defaults=defaults, context_len=256, completion="c", dice=4711
    )


def test_each_choice_of_a_prompt_has_its_own_number(renderer: Renderer) -> None:
    call = completion(prompt=["a", "b"], n=2, seed=5, min_p=0.2)
    assert [one.stepwise for one in planned(renderer, call)] == [
        Stepwise(5, 0, min_p=0.2),
        Stepwise(5, 1, min_p=0.2),
    ] * 2


def test_what_has_no_seed_gets_one(renderer: Renderer) -> None:
    (one,) = planned(renderer, chat(logprobs=True, top_logprobs=2))
    assert one.stepwise == Stepwise(4711, top_logprobs=2)
    assert planned(renderer, chat())[0].stepwise is None


def test_the_best_of_several_need_logprobs_that_nobody_is_told(renderer: Renderer) -> None:
    requests = planned(renderer, completion(best_of=3, prompt=[[7], [8]]))
    assert [one.stepwise for one in requests] == [
        Stepwise(4711, choice, top_logprobs=0) for choice in (0, 1, 2)
    ] * 2


def test_an_echo_asks_for_the_prompts_logprobs_and_may_ask_for_nothing_else(
    renderer: Renderer,
) -> None:
    (one,) = planned(renderer, completion(echo=True, logprobs=1, max_tokens=0))
    assert one.stepwise == Stepwise(4711, top_logprobs=1, prompt_logprobs=True)
    assert one.max_tokens == 0
    assert planned(renderer, completion(echo=True))[0].stepwise is None
    (nothing,) = planned(renderer, completion(echo=True, max_tokens=0))
    assert (nothing.stepwise, nothing.max_tokens) == (None, 0)


def test_how_long_the_model_may_not_end_an_answer(renderer: Renderer) -> None:
    (later,) = planned(renderer, chat(min_tokens=3, max_tokens=3))
    assert later.stepwise == Stepwise(4711, least=3)
    (never,) = planned(renderer, chat(ignore_eos=True, stop="x"), Sampling(temperature=0))
    assert never.stepwise is not None
    assert never.stepwise.least > 10**6


FORCED = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "required",
    "guided_regex": "a",
}


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"seed": 1, "mirostat": 2}, "seed"),
        ({"seed": 1, "use_cache": "doc"}, "use_cache"),
        ({"logit_bias": {"99999": 1}}, "logit_bias.99999"),
        ({"ignore_eos": True, "guided_regex": "a"}, "ignore_eos"),
        ({"min_tokens": 2, "response_format": {"type": "json_object"}}, "min_tokens"),
        ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
        ({"min_tokens": 3, "stop": "x"}, "min_tokens"),
    ],
)
def test_what_steps_cannot_have_is_refused(
    renderer: Renderer, keys: dict[str, Any], param: str
) -> None:
    with pytest.raises(RequestError) as caught:
        planned(renderer, chat(**keys))
    assert caught.value.param == param


def test_without_a_tokenizer_there_are_no_steps(tmp_path: Path) -> None:
    textual = Renderer(make_folder(tmp_path / "textual", tokenizer=False))
    with pytest.raises(UnsupportedParameter, match="needs a tokenizer") as caught:
        planned(textual, chat(seed=1))
    assert caught.value.param == "seed"
    assert planned(textual, chat())[0].stepwise is None
    with pytest.raises(UnsupportedParameter):
        textual.vocabulary()


def test_a_tokenizer_of_another_kind_tells_no_logprobs(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "strange")
    assert folder.tokenizer_file is not None
    renderer = Renderer(folder)
    found = json.loads(folder.tokenizer_file.read_text())
    folder.tokenizer_file.write_text(json.dumps(found | {"decoder": {"type": "WordPiece"}}))
    with pytest.raises(UnsupportedParameter, match="bytes") as caught:
        renderer.vocabulary()
    assert caught.value.param == "logprobs"


# -- answers ----------------------------------------------------------------------------------

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


def test_an_answer_that_follows_a_grammar_has_no_thoughts(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "thinks", template=THINKS)
    (free,) = planned(Renderer(folder), chat())
    (guided,) = planned(Renderer(folder), chat(guided_regex="a+"))
    assert free.thinking is not None
    assert free.thinking.begun
    assert guided.thinking is None
    assert guided.prompt_ids != free.prompt_ids  # what the template has begun is ended


def test_an_answer_cannot_be_a_call_and_follow_a_grammar(tmp_path: Path) -> None:
    template = CHATML + "{% if tools %}{{ tools | tojson }}{% endif %}"
    folder = make_folder(tmp_path / "calls", template=template, settings="tool_format: hermes")
    with pytest.raises(RequestError, match="call a tool") as caught:
        held(chat(**FORCED), Renderer(folder))
    assert caught.value.param == "guided_regex"
    (free,) = planned(Renderer(folder), chat(**FORCED | {"tool_choice": "auto"}))
    assert free.stepwise is not None


def test_a_call_that_is_forced_goes_before_the_form_of_the_words(tmp_path: Path) -> None:
    template = CHATML + "{% if tools %}{{ tools | tojson }}{% endif %}"
    folder = make_folder(tmp_path / "calls", template=template, settings="tool_format: hermes")
    asked = {**FORCED, "guided_regex": None, "response_format": {"type": "json_object"}}
    renderer = Renderer(folder)
    (forced,) = planned(renderer, held(chat(**asked), renderer))
    assert forced.stepwise is None
    (free,) = planned(Renderer(folder), chat(**asked | {"tool_choice": "auto"}))
    assert free.stepwise is not None
