"""/tokenize and /detokenize over HTTP: vLLM's shapes, by the same tokenizer as prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.config.router import RouterConfig
from tests.support.boards.fake_boards import FakeBoards
from tests.support.http.router_house import CHAT, House, house, send
from tests.support.http.tokenize_calls import folder_house, post


def test_a_key_s_limits_hold_for_counting_too(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("secret requests_per_minute=1\n", encoding="utf-8")
    of = House(FakeBoards.answering("a"), RouterConfig(api_keys_file=tmp_path / "keys"))
    asks = {"json": {"prompt": "x"}, "headers": {"authorization": "Bearer secret"}}
    statuses = [send(of, "POST", "/tokenize", **asks).status_code for _ in range(2)]
    assert statuses == [200, 429]


def many(item: Any) -> list[Any]:
    return [item] * 4097


USER = {"role": "user", "content": "x"}

PART = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        pytest.param(CHAT, {"messages": many(USER)}, "messages", id="chat"),
        pytest.param(
            CHAT,
            {"messages": [{"role": "user", "content": many(PART)}]},
            "messages[0].content",
            id="parts",
        ),
        pytest.param("/tokenize", {"messages": many(USER)}, "messages", id="counting"),
        pytest.param(
            "/v1/messages", {"messages": many(USER), "max_tokens": 1}, "messages", id="Anthropic"
        ),
        pytest.param("/api/chat", {"messages": many(USER)}, "messages", id="Ollama"),
        pytest.param("/v1/responses", {"input": many(USER)}, "input", id="responses"),
    ],
)
def test_the_number_of_messages_is_bounded(path: str, body: dict[str, Any], param: str) -> None:
    refused = send(house(), "POST", path, json={"model": "sim-chat", **body})
    assert refused.status_code == 400
    error = refused.json()
    assert param in str(error)
    assert "4096" in str(error)


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        pytest.param("/tokenize", {"model": "m?", "prompt": "x"}, 404, "model", id="unknown model"),
        pytest.param("/tokenize", {"model": 3, "prompt": "x"}, 400, "model", id="no name"),
        pytest.param("/tokenize", {}, 400, "prompt", id="nothing to tokenize"),
        pytest.param("/tokenize", {"prompt": ["x"]}, 400, "prompt", id="a list"),
        pytest.param("/tokenize", {"prompt": "x", "messages": []}, 400, "messages", id="both"),
        pytest.param("/tokenize", {"messages": []}, 400, "messages", id="no message"),
        pytest.param(
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "add_special_tokens": True},
            400,
            "add_special_tokens",
            id="special tokens around a template's own",
        ),
        pytest.param(
            "/tokenize",
            {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"},
            400,
            "chat_template",
            id="a template",
        ),
        pytest.param(
            "/tokenize", {"prompt": "x", "return_token_strs": 1}, 400, "return_token_strs"
        ),
        pytest.param("/detokenize", {}, 400, "tokens", id="no ids"),
        pytest.param("/detokenize", {"tokens": "x"}, 400, "tokens", id="a text"),
        pytest.param("/detokenize", {"tokens": [1, True]}, 400, "tokens[1]", id="a boolean"),
        pytest.param("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]", id="negative"),
        pytest.param("/detokenize", {"tokens": [10**30]}, 400, "tokens[0]", id="a huge id"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(
    path: str, body: dict[str, Any], status: int, param: str
) -> None:
    answer = post(path, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/tokenize", {"prompt": "x"}, id="a text"),
        pytest.param("/tokenize", {"messages": [{"role": "user", "content": "x"}]}, id="a chat"),
        pytest.param("/detokenize", {"tokens": [1]}, id="ids"),
    ],
)
def test_a_model_without_a_tokenizer_has_none_to_offer(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    answer = post(path, folder_house(tmp_path, tokenizer=False), **body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "unsupported_parameter"


def test_only_clients_with_a_key_may_ask_where_there_are_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret-key-of-a-client\n", encoding="utf-8")
    of = house()
    of = replace(of, config=RouterConfig(api_keys_file=keys))
    assert post("/tokenize", of, prompt="x").status_code == 401
    assert post("/detokenize", of, tokens=[1]).status_code == 401
