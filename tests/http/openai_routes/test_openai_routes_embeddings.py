"""POST /v1/embeddings on scripted boards: answers, refusals, batches over boards, losses."""

from __future__ import annotations

import base64
from array import array
from typing import Any

import pytest

from rkserve.config.router import RouterConfig
from tests.support.boards.embedding_boards import MODEL, VectorBoards, embed_house, model, vector_of
from tests.support.http.embedding_calls import PATH, floats, ids_of, post, unit
from tests.support.http.router_house import House, house, send

pytestmark = pytest.mark.virtual_time


def test_a_text_becomes_a_vector_of_length_one() -> None:
    answer = post(input="A cat sat on a mat")
    body = answer.json()
    ids = ids_of("A cat sat on a mat")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-rkserve-board"] == "a"
    assert answer.headers["x-weight-version"] == "default"
    assert (body["object"], body["model"]) == ("list", MODEL)
    assert body["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
    ((kind, index),) = ((one["object"], one["index"]) for one in body["data"])
    assert (kind, index) == ("embedding", 0)
    assert floats(answer)[0] == pytest.approx(unit(vector_of(ids)), rel=1e-6)


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        pytest.param("one cat", [ids_of("one cat")], id="a string"),
        pytest.param(["one", "two cats"], [ids_of("one"), ids_of("two cats")], id="strings"),
        pytest.param([5, 6, 7], [(5, 6, 7)], id="ids"),
        pytest.param([[5, 6], [7]], [(5, 6), (7,)], id="lists of ids"),
        pytest.param(["one", [5, 6]], [ids_of("one"), (5, 6)], id="both"),
    ],
)
def test_texts_come_as_strings_or_ids_and_their_vectors_in_their_order(
    given: Any, texts: list[tuple[int, ...]]
) -> None:
    answer = post(input=given)
    assert [one["index"] for one in answer.json()["data"]] == list(range(len(texts)))
    for vector, ids in zip(floats(answer), texts, strict=True):
        assert vector == pytest.approx(unit(vector_of(ids)), rel=1e-6)
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, texts))


def test_base64_holds_the_same_float32_values() -> None:
    plain = floats(post(input=["a cat", "a dog"], encoding_format="float"))
    coded = post(input=["a cat", "a dog"], encoding_format="base64").json()["data"]
    for one, values in zip(coded, plain, strict=True):
        found = array("f", base64.b64decode(one["embedding"]))
        assert found == array("f", values)  # nine digits tell float32 values apart


def test_fewer_dimensions_are_the_first_ones_at_length_one_again() -> None:
    (vector,) = floats(post(input="a cat", dimensions=2))
    assert vector == pytest.approx(unit(vector_of(ids_of("a cat"))[:2]), rel=1e-6)


def test_the_list_of_models_tells_who_makes_embeddings() -> None:
    entry = send(embed_house(VectorBoards.of("a")), "GET", f"/v1/models/{MODEL}").json()
    assert entry["rkserve"]["embedding"]["pooling"] == "last"
    assert send(house(), "GET", "/v1/models/sim-chat").json()["rkserve"]["embedding"] is None


def test_what_clients_send_along_changes_nothing() -> None:
    plain = post(input="a cat").json()
    assert post(input="a cat", user="me", encoding_format=None, dimensions=None).json() == plain


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({}, "input", id="no input"),
        pytest.param({"input": ""}, "input", id="an empty text"),
        pytest.param({"input": []}, "input", id="no texts"),
        pytest.param({"input": ["a", ""]}, "input[1]", id="an empty text among others"),
        pytest.param({"input": ["a", 5]}, "input[1]", id="an id among texts"),
        pytest.param({"input": [5, "a"]}, "input[1]", id="a text among ids"),
        pytest.param({"input": [[5], []]}, "input[1]", id="no ids"),
        pytest.param({"input": [[5, 1.5]]}, "input[0][1]", id="no integer"),
        pytest.param({"input": {"text": "a"}}, "input", id="an object"),
        pytest.param({"input": [5, 10**9]}, "input[1]", id="no token"),
        pytest.param({"input": ["a"] * 2049}, "input", id="too many texts"),
        pytest.param({"input": "a", "encoding_format": "int8"}, "encoding_format", id="format"),
        pytest.param({"input": "a", "dimensions": 0}, "dimensions", id="no dimension"),
        pytest.param({"input": "a", "dimensions": 9}, "dimensions", id="more than there are"),
        pytest.param({"input": "a", "dimensions": "2"}, "dimensions", id="dimensions as text"),
        pytest.param(
            {"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", id="cut"
        ),
        pytest.param({"input": "a", "priority": 10**6}, "priority", id="priority"),
    ],
)
def test_what_cannot_be_served_is_a_400_that_names_it(body: dict[str, Any], param: str) -> None:
    of = embed_house(VectorBoards.of("a"))
    answer = post(of, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    of.expect_nothing_left()


@pytest.mark.parametrize(
    ("given", "param"),
    [
        pytest.param("word " * 4097, "input", id="a text"),
        pytest.param(["a", [5] * 4097], "input[1]", id="ids"),
        pytest.param(["a", "x" * 2_000_000], "input[1]", id="a text that is hopelessly long"),
    ],
)
def test_a_text_beyond_the_context_is_a_400_before_a_board_hears_of_any(
    given: Any, param: str
) -> None:
    boards = VectorBoards.of("a")
    answer = post(embed_house(boards), input=given)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        param,
    )
    assert "4096" in error["message"]
    assert boards.opened == []


def test_a_text_may_fill_the_context() -> None:
    assert post(input=[[5] * 4096]).json()["usage"]["prompt_tokens"] == 4096


def test_a_model_whose_folder_says_nothing_of_embeddings_makes_none() -> None:
    answer = send(house(), "POST", PATH, json={"model": "sim-chat", "input": "a"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "embedding_unsupported")
    assert "'embedding' section" in error["message"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(b"", 400, id="nothing"),
        pytest.param(b"[1]", 400, id="no object"),
        pytest.param(b'{"model": "sim-embed", "input": "\\ud800"}', 400, id="a lone surrogate"),
        pytest.param(b'{"model": "sim-embed", "input": ' + b"[" * 5000, 400, id="deep"),
        pytest.param(b'{"model": "sim-embed", "input": ["a", NaN]}', 400, id="NaN"),
        pytest.param(b'{"model": "nobody", "input": "a"}', 404, id="unknown model"),
        pytest.param(b'{"input": "a"}', 400, id="no model"),
        pytest.param(
            b'{"model": "sim-embed", "input": "a\\u0000b"}', 200, id="a NUL is a character"
        ),
    ],
)
def test_hostile_bodies_get_a_clear_answer(body: bytes, status: int) -> None:
    of = embed_house(VectorBoards.of("a"))
    answer = send(of, "POST", PATH, content=body)
    assert answer.status_code == status, answer.text
    of.expect_nothing_left()


def test_a_client_beyond_its_limits_is_told_to_come_back(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-of-somebody requests_per_minute=1\n", encoding="utf-8")
    of = House(VectorBoards.of("a"), RouterConfig(api_keys_file=keys), model())
    sent = {
        "json": {"model": MODEL, "input": "a"},
        "headers": {"authorization": "Bearer key-of-somebody"},
    }
    answers = [send(of, "POST", PATH, **sent) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert send(of, "POST", PATH, json={"model": MODEL, "input": "a"}).status_code == 401


def pool(of: House | None = None, **body: Any) -> Any:
    made = of or embed_house(VectorBoards.of("a"))
    return send(made, "POST", "/pooling", json={"model": MODEL, **body})


def test_pooling_returns_a_row_for_each_token_as_it_was_computed() -> None:
    boards = VectorBoards.of("a")
    answer = pool(embed_house(boards), input=["A cat sat", "on"])
    body = answer.json()
    texts = [ids_of("A cat sat"), ids_of("on")]
    assert [(one["index"], one["object"]) for one in body["data"]] == [
        (0, "pooling"),
        (1, "pooling"),
    ]
    for one, ids in zip(body["data"], texts, strict=True):
        assert one["data"] == [list(vector_of((token_id,))) for token_id in ids], "not normalized"
    tokens = sum(map(len, texts))
    assert body["usage"] == {
        "prompt_tokens": tokens,
        "total_tokens": tokens,
        "completion_tokens": 0,
    }
    assert (body["object"], body["model"], body["id"][:5]) == ("list", MODEL, "pool-")
    assert [len(request.inputs) for _, request in boards.served] == [1, 1]
    raw = pool(input="A cat sat", encoding_format="base64").json()["data"][0]["data"]
    assert base64.b64decode(raw) == b"".join(vector_of((one,)).tobytes() for one in texts[0])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "task": "classify"}, "task"),
        ({"input": "x", "dimensions": 2}, "dimensions"),
        ({"input": "x", "normalize": True}, "normalize"),
        ({"input": "x", "messages": []}, "messages"),
        ({}, "input"),
        ({"input": ["x " * 1500] * 2}, "input"),
    ],
)
def test_pooling_refuses_by_name_what_it_does_not_do(body: dict[str, Any], param: str) -> None:
    answer = pool(**body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
