"""Token counts and tokenizer facts, as the Router answers them without a board."""

from __future__ import annotations

from pathlib import Path

import jinja2
import pytest

from tests.support.boards.own_time import run_loop
from tests.support.http.reference_house import ReferenceHouse
from tests.support.http.router_house import CHAT, chat, house, model, send
from tests.support.http.tokenize_calls import folder_house, post

TEXT = "A cat sat on a mat. äöü 日本語 🙂"


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_a_text_becomes_ids_and_the_ids_that_text(prefix: str) -> None:
    answer = post(f"{prefix}/tokenize", model="sim-chat", prompt=TEXT).json()
    assert answer["count"] == len(answer["tokens"]) > 0
    assert answer["max_model_len"] == 4096
    assert answer["token_strs"] is None
    back = post(f"{prefix}/detokenize", model="sim-chat", tokens=answer["tokens"])
    assert back.json() == {"prompt": TEXT}


def test_the_ids_of_a_conversation_are_those_that_its_board_gets() -> None:
    of, messages = house(), chat()["messages"]
    counted = post("/tokenize", of, model="sim-chat", messages=messages).json()
    usage = send(of, "POST", CHAT, json=chat()).json()["usage"]
    ((_, request),) = of.boards.opened
    assert tuple(counted["tokens"]) == request.prompt_ids
    assert counted["count"] == len(request.prompt_ids)
    assert usage is not None
    without = post(
        "/tokenize", of, model="sim-chat", messages=messages, add_generation_prompt=False
    )
    assert tuple(without.json()["tokens"]) == request.prompt_ids[: without.json()["count"]]
    assert without.json()["count"] < counted["count"]


def test_tools_are_part_of_the_ids_as_they_are_of_the_board_s() -> None:
    of, messages = house(), [{"role": "user", "content": "Hello"}]
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    counted = post("/tokenize", of, model="sim-chat", messages=messages, tools=tools).json()
    body = {"model": "sim-chat", "messages": messages, "tools": tools}
    send(of, "POST", "/v1/chat/completions", json=body)
    (_, request) = of.boards.opened[0]
    assert tuple(counted["tokens"]) == request.prompt_ids
    refused = post("/tokenize", of, messages=messages, tools=[{"type": "function"}])
    assert refused.json()["error"]["param"] == "tools[0].function"


def test_tokens_are_spelled_where_that_is_asked_for() -> None:
    answer = post("/tokenize", model="sim-chat", prompt="<|im_start|>cat", return_token_strs=True)
    strings = answer.json()["token_strs"]
    assert strings[0] == "<|im_start|>"
    assert "".join(strings[1:]) == "cat"
    assert len(strings) == answer.json()["count"]


def test_control_tokens_are_written_out_in_the_text_of_ids() -> None:
    ids = post("/tokenize", model="sim-chat", prompt="<|im_start|>cat").json()["tokens"]
    assert post("/detokenize", model="sim-chat", tokens=ids).json() == {"prompt": "<|im_start|>cat"}


def test_what_a_tokenizer_adds_to_a_text_can_be_left_out(tmp_path: Path) -> None:
    of = folder_house(tmp_path, bos=True)
    whole = post("/tokenize", of, prompt="cat").json()["tokens"]
    bare = post("/tokenize", of, prompt="cat", add_special_tokens=False).json()["tokens"]
    assert whole == [0, *bare]


def test_the_only_model_need_not_be_named_and_an_empty_text_has_no_tokens() -> None:
    assert post("/tokenize", prompt="").json()["count"] == 0
    assert post("/detokenize", tokens=[]).json() == {"prompt": ""}


def test_a_long_text_is_counted_beyond_the_context() -> None:
    answer = post("/tokenize", prompt="word " * 20000).json()
    assert answer["count"] >= 20000 > answer["max_model_len"]


def test_what_is_far_longer_than_the_context_is_refused() -> None:
    refused = post("/tokenize", prompt="word " * 30_000)
    assert refused.status_code == 400
    assert "131072" in refused.json()["error"]["message"]
    assert post("/detokenize", tokens=[5] * 131_073).status_code == 400


# --- the tokenizer itself ---
@pytest.mark.parametrize("path", ["/tokenizer_info", "/v1/tokenizer_info"])
def test_the_tokenizer_is_described_as_remote_tokenizers_read_it(path: str) -> None:
    """As lm-evaluation-harness does: it names no model, and makes prompts by the template."""
    of = house()
    info = send(of, "GET", path).json()
    assert info == send(of, "GET", f"{path}?model=sim-chat").json()
    assert (info["eos_token"], info["pad_token"], info["bos_token"]) == (
        "<|im_end|>",
        "<|pad|>",
        None,
    )
    assert (info["model_max_length"], info["tokenizer_class"]) == (4096, "PreTrainedTokenizerFast")
    (eos,) = post("/tokenize", of, prompt=info["eos_token"], add_special_tokens=False).json()[
        "tokens"
    ]
    assert eos in model().folder.settings.eos_token_ids
    template = jinja2.Environment(autoescape=False).from_string(info["chat_template"])
    messages = chat()["messages"]
    prompt = template.render(messages=messages, add_generation_prompt=True)
    ours = post("/tokenize", of, messages=messages).json()["tokens"]
    assert post("/tokenize", of, prompt=prompt, add_special_tokens=False).json()["tokens"] == ours


def test_a_template_of_rkserve_s_own_is_described_too(tmp_path: Path) -> None:
    of = folder_house(tmp_path, settings="context_length: 64\nchat_template: plain\n")
    assert send(of, "GET", "/tokenizer_info").json()["chat_template"]


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        pytest.param("model=nobody", 404, "model", id="an unknown model"),
        pytest.param("modell=sim-chat", 400, "modell", id="a mistyped key"),
    ],
)
def test_a_tokenizer_that_there_is_not_is_told(query: str, status: int, param: str) -> None:
    response = send(house(), "GET", f"/tokenizer_info?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_text_mode_has_no_tokenizer_to_describe(tmp_path: Path) -> None:
    response = send(folder_house(tmp_path, tokenizer=False), "GET", "/tokenizer_info")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "unsupported_parameter"


def test_a_model_for_vectors_beside_it_needs_no_naming(tmp_path: Path) -> None:
    """A call that names no model means the one that generates text."""
    of = ReferenceHouse(tmp_path)
    info = run_loop(of("GET", "/tokenizer_info")).json()
    assert info["chat_template"]
    told = run_loop(of("POST", "/tokenize", json={"prompt": "Hello"}))
    assert (told.status_code, told.json()["max_model_len"]) == (200, info["model_max_length"])
