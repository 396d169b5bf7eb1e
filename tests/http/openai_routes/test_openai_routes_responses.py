"""At ASGI level: stored responses, their owners and continuations; tokenizing and detokenizing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.config.router import ResponsesConfig, RouterConfig
from rkserve.core.messages import Delta
from tests.support.boards.fake_boards import (
    FakeBoards,
    accepted,
    finished,
)
from tests.support.http.router_house import CHAT, House, house, send
from tests.support.http.storing_house import (
    ABSENT,
    ROUTE,
    ask,
    error,
    storing,
    streamed,
)
from tests.support.http.tokenize_calls import folder_house, post

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "kept"


@pytest.fixture
def of(folder: Path) -> Iterator[House]:
    made = storing(folder)
    yield made
    made.responses.close()


def prompt(of: House) -> tuple[int, ...]:
    return of.boards.opened[-1][1].prompt_ids


def test_a_response_is_read_again_as_it_was_told(of: House) -> None:
    told = ask(of, metadata={"a": "b"})
    assert told["store"] is True
    again = send(of, "GET", f"{ROUTE}/{told['id']}")
    assert (again.status_code, again.json()) == (200, told)


def test_a_follow_up_has_the_prompt_of_the_whole_conversation(of: House) -> None:
    first = ask(of, "Who are you?", instructions="Be brief.")
    second = ask(of, "Go on.", previous_response_id=first["id"], instructions="Sing.")
    assert second["previous_response_id"] == first["id"]
    followed = prompt(of)
    turns = [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Go on."},
    ]
    ask(of, turns, instructions="Sing.", store=False)
    assert followed == prompt(of), "the instructions before are not carried over"
    ask(of, "And on.", previous_response_id=second["id"])
    followed = prompt(of)
    turns += [{"role": "assistant", "content": "Hello"}, {"role": "user", "content": "And on."}]
    ask(of, turns, store=False)
    assert followed == prompt(of)


def test_calls_and_their_results_go_on_from_each_other(folder: Path) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at":  1}}\n</tool_call>'
    of = storing(folder, accepted("a"), Delta(call, (7,)), finished(1))
    first = ask(of, "Look!", tools=[LOOK])
    (item,) = first["output"]
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "dark"}
    ask(of, [result], previous_response_id=first["id"], tools=[LOOK])
    followed = prompt(of)
    ask(of, [{"role": "user", "content": "Look!"}, item, result], tools=[LOOK], store=False)
    assert followed == prompt(of)
    of.responses.close()


def test_items_of_earlier_responses_may_be_referred_to(of: House) -> None:
    first = ask(of, [{"role": "user", "content": "Who?"}, {"role": "user", "content": "You!"}])
    listed = send(of, "GET", f"{ROUTE}/{first['id']}/input_items?order=asc").json()["data"]
    ids = [one["id"] for one in [*listed, *first["output"]]]
    references = [{"type": "item_reference", "id": one} for one in ids]
    second = ask(of, [*references, {"role": "user", "content": "Go on."}])
    by_reference = prompt(of)
    ask(of, "Go on.", previous_response_id=first["id"])
    assert by_reference == prompt(of)
    # What was referred to is part of the response that did.
    assert send(of, "DELETE", f"{ROUTE}/{first['id']}").status_code == 200
    ask(of, "And on.", previous_response_id=second["id"])
    gone = {"model": "sim-chat", "input": references}
    assert error(send(of, "POST", ROUTE, json=gone)) == (404, "item_not_found", "input")


@pytest.mark.parametrize("name", ["msg_1", "resp_", f"msg_{'0' * 32}_0", "", "\x00", "x" * 10_000])
def test_a_reference_to_nothing_is_a_404_or_400(of: House, name: str) -> None:
    body = {"model": "sim-chat", "input": [{"type": "item_reference", "id": name}]}
    response = send(of, "POST", ROUTE, json=body)
    assert response.status_code == (404 if name else 400)
    assert len(response.text) < 500


@pytest.mark.parametrize("name", [ABSENT, "resp_1", "\x00", "x" * 10_000, "'; DROP TABLE"])
def test_going_on_from_nothing_is_openai_s_error(of: House, name: str) -> None:
    body = {"model": "sim-chat", "input": "Hello", "previous_response_id": name}
    response = send(of, "POST", ROUTE, json=body)
    expected = (404, "previous_response_not_found", "previous_response_id")
    assert error(response) == expected
    assert len(response.text) < 500
    assert of.boards.opened == []
    of.expect_nothing_left()


def test_a_conversation_whose_beginning_was_deleted_cannot_go_on(of: House) -> None:
    first = ask(of)
    second = ask(of, "Go on.", previous_response_id=first["id"])
    assert send(of, "DELETE", f"{ROUTE}/{first['id']}").json() == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    body = {"model": "sim-chat", "input": "x", "previous_response_id": second["id"]}
    response = send(of, "POST", ROUTE, json=body)
    assert error(response)[:2] == (404, "previous_response_not_found")
    assert first["id"] in response.json()["error"]["message"]
    assert send(of, "GET", f"{ROUTE}/{second['id']}").status_code == 200
    (item,) = send(of, "GET", f"{ROUTE}/{second['id']}/input_items").json()["data"]
    assert item["content"] == [{"type": "input_text", "text": "Go on."}]


@pytest.mark.parametrize("path", [ABSENT, f"{ABSENT}/input_items", "resp_x", "%00", "x" * 5000])
def test_what_is_not_kept_is_a_404(of: House, path: str) -> None:
    assert error(send(of, "GET", f"{ROUTE}/{path}"))[:2] == (404, "response_not_found")
    if not path.endswith("items"):
        assert send(of, "DELETE", f"{ROUTE}/{path}").status_code == 404


def test_input_items_are_listed_with_those_before(of: House) -> None:
    first = ask(of, "One")
    second = ask(of, "Two", previous_response_id=first["id"])
    route = f"{ROUTE}/{second['id']}/input_items"
    told = send(of, "GET", route).json()
    texts = [item["content"][0]["text"] for item in told["data"]]
    assert (texts, told["has_more"]) == (["Two", "Hello", "One"], False)
    page = send(of, "GET", f"{route}?limit=1&order=asc").json()
    assert (page["data"][0]["content"][0]["text"], page["has_more"]) == ("One", True)
    rest = send(of, "GET", f"{route}?order=asc&after={page['last_id']}").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["Hello", "Two"]
    assert (rest["first_id"], rest["last_id"]) == (rest["data"][0]["id"], rest["data"][1]["id"])
    empty = send(of, "GET", f"{route}?order=asc&after={rest['last_id']}").json()
    assert (empty["data"], empty["first_id"]) == ([], None)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        pytest.param("limit=0", "limit", id="none"),
        pytest.param("limit=101", "limit", id="too many"),
        pytest.param("limit=1e1", "limit", id="no whole number"),
        pytest.param(f"limit={'9' * 5000}", "limit", id="a long number"),
        pytest.param("order=up", "order", id="an order that there is not"),
        pytest.param("after=msg_1", "after", id="after nothing"),
    ],
)
def test_a_list_that_cannot_be_given_is_a_400(of: House, query: str, param: str) -> None:
    told = ask(of)
    response = send(of, "GET", f"{ROUTE}/{told['id']}/input_items?{query}")
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_a_response_that_is_over_is_not_streamed_again(of: House) -> None:
    path = f"{ROUTE}/{ask(of)['id']}"
    assert send(of, "GET", f"{path}?stream=false").status_code == 200
    assert error(send(of, "GET", f"{path}?stream=true")) == (400, None, "stream")


def test_a_response_is_its_key_s_alone(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\ntwo\n", encoding="utf-8")
    of = storing(folder, api_keys_file=file, admin_key="root")
    one, two, admin = ({"authorization": f"Bearer {key}"} for key in ("one", "two", "root"))
    told = ask(of, keys=one)
    path = f"{ROUTE}/{told['id']}"
    item = {"type": "item_reference", "id": told["output"][0]["id"]}
    for other in (two, admin):
        assert send(of, "GET", path, headers=other).status_code == 404
        assert send(of, "GET", f"{path}/input_items", headers=other).status_code == 404
        assert send(of, "DELETE", path, headers=other).status_code == 404
        body = {"model": "sim-chat", "input": "x", "previous_response_id": told["id"]}
        assert send(of, "POST", ROUTE, json=body, headers=other).status_code == 404
        body = {"model": "sim-chat", "input": [item]}
        assert send(of, "POST", ROUTE, json=body, headers=other).status_code == 404
    for method in ("GET", "DELETE"):
        assert send(of, method, path).status_code == 401
    assert send(of, "GET", path, headers=one).json() == told
    assert ask(of, keys=admin)["store"] is True
    of.responses.close()


@pytest.mark.parametrize(
    ("setting", "said", "stored"),
    [
        pytest.param("default", {}, True, id="as OpenAI"),
        pytest.param("default", {"store": True}, True, id="asked for"),
        pytest.param("default", {"store": False}, False, id="refused"),
        pytest.param("asked", {}, False, id="only where asked"),
        pytest.param("asked", {"store": True}, True, id="and asked"),
        pytest.param("never", {"store": True}, False, id="never"),
    ],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_what_is_kept_is_told(
    folder: Path, setting: Any, said: dict[str, Any], stored: bool, stream: bool
) -> None:
    of = storing(folder, responses=ResponsesConfig(store=setting))
    body = {"model": "sim-chat", "input": "Hello", "stream": stream, **said}
    response = send(of, "POST", ROUTE, json=body)
    told = streamed(response.text)[-1]["response"] if stream else response.json()
    assert told["store"] is stored
    found = send(of, "GET", f"{ROUTE}/{told['id']}")
    assert (found.status_code == 200) is stored
    if setting == "never":
        body["previous_response_id"] = told["id"]
        assert error(send(of, "POST", ROUTE, json=body))[:2] == (400, "unsupported_parameter")
        assert not folder.exists()
    of.responses.close()


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
