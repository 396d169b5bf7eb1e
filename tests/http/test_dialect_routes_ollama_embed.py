"""Ollama's /api/embed and /api/embeddings on scripted boards that make vectors."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rkserve.core.errors import BoardFailed
from tests.support.boards.embedding_boards import MODEL, VectorBoards, embed_house, model
from tests.support.http.router_house import House, house, send

EMBED, ONE = "/api/embed", "/api/embeddings"
CONTEXT_LEN = model().folder.settings.context_length


def post(path: str, of: House | None = None, **body: Any) -> Any:
    of = of or embed_house(VectorBoards.of("a"))
    return send(of, "POST", path, json={"model": MODEL, **body})


def openai(*texts: str, **body: Any) -> list[list[float]]:
    of = embed_house(VectorBoards.of("a"))
    answer = send(
        of, "POST", "/v1/embeddings", json={"model": MODEL, "input": list(texts), **body}
    ).json()
    return [one["embedding"] for one in answer["data"]]


def test_texts_become_the_vectors_that_openai_s_route_makes() -> None:
    answer = post(EMBED, input=["a cat", "two dogs"], options={}, keep_alive="5m")
    assert answer.headers["x-rkserve-board"] == "a"
    told = answer.json()
    assert told["embeddings"] == openai("a cat", "two dogs")
    assert (told["model"], told["load_duration"]) == (MODEL, 0)
    assert told["total_duration"] > 0
    ids = [model().renderer.counted(text, special=True) for text in ("a cat", "two dogs")]
    assert told["prompt_eval_count"] == sum(map(len, ids))
    assert post(EMBED, input="a cat").json()["embeddings"] == openai("a cat")
    assert post(EMBED, input="a cat", dimensions=2).json()["embeddings"] == openai(
        "a cat", dimensions=2
    )


def test_the_older_call_makes_one_vector() -> None:
    assert post(ONE, prompt="a cat").json() == {"embedding": openai("a cat")[0]}
    assert post(ONE, model=f"{MODEL}:latest", prompt="a cat").status_code == 200


def test_a_text_that_is_too_long_is_cut_unless_the_client_says_no() -> None:
    text = "word " * (CONTEXT_LEN * 2)
    boards = VectorBoards.of("a")
    assert post(EMBED, embed_house(boards), input=[text, "a cat"]).status_code == 200
    assert post(ONE, embed_house(boards), prompt=text).status_code == 200
    whole = model().renderer.counted(text, special=True)
    given = sorted((ids for _, request in boards.served for ids in request.inputs), key=len)
    assert [len(ids) for ids in given] == [2, CONTEXT_LEN, CONTEXT_LEN]
    assert given[-1] == whole[:CONTEXT_LEN]
    refused = post(EMBED, input=text, truncate=False)
    assert (refused.status_code, refused.json()["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("size", [50, 3_000_000], ids=["short", "hopeless"])
def test_text_without_a_blank_is_cut_too(size: int) -> None:
    assert post(EMBED, input="x" * size).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        pytest.param(EMBED, {}, {"model": MODEL, "embeddings": []}, id="no input"),
        pytest.param(EMBED, {"input": []}, {"model": MODEL, "embeddings": []}, id="no texts"),
        pytest.param(ONE, {"prompt": ""}, {"embedding": []}, id="no prompt"),
    ],
)
def test_a_call_without_a_text_only_loads(
    path: str, body: dict[str, Any], told: dict[str, Any]
) -> None:
    boards = VectorBoards.of("a")
    answer = post(path, embed_house(boards), **body)
    assert answer.status_code == 200
    assert told.items() <= answer.json().items()
    assert boards.served == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        pytest.param(EMBED, {"input": 5}, "input", id="a number"),
        pytest.param(EMBED, {"input": [5]}, "input[0]", id="ids"),
        pytest.param(EMBED, {"input": [[5]]}, "input[0]", id="lists of ids"),
        pytest.param(EMBED, {"input": ["a", ""]}, "input[1]", id="an empty text"),
        pytest.param(EMBED, {"input": ["a"] * 2049}, "input", id="too many"),
        pytest.param(EMBED, {"input": "a", "truncate": 1}, "truncate", id="a number for a flag"),
        pytest.param(EMBED, {"input": "a", "dimensions": 0}, "dimensions", id="no dimensions"),
        pytest.param(EMBED, {"input": "a", "model": None}, "model", id="no model"),
        pytest.param(ONE, {"prompt": ["a"]}, "prompt", id="a list"),
    ],
)
def test_what_is_wrong_is_named_in_ollama_s_shape(
    path: str, body: dict[str, Any], param: str
) -> None:
    answer = post(path, **body)
    assert (answer.status_code, answer.json()["param"]) == (400, param)
    assert isinstance(answer.json()["error"], str)


@pytest.mark.parametrize("path", [EMBED, ONE])
@pytest.mark.parametrize("content", [b"", b"[1]", b'{"model": "\\ud800"}', b'{"a":' * 3000])
def test_hostile_bodies_are_refused(path: str, content: bytes) -> None:
    answer = send(embed_house(VectorBoards.of("a")), "POST", path, content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]


def test_a_model_that_makes_no_vectors_and_a_board_that_is_lost_are_told() -> None:
    answer = send(house(), "POST", EMBED, json={"model": "sim-chat", "input": "x"})
    assert (answer.status_code, answer.json()["code"]) == (400, "embedding_unsupported")
    answer = send(house(), "POST", EMBED, json={"model": "other", "input": "x"})
    assert answer.status_code == 404
    boards = VectorBoards.of("a")
    boards.losses = {"replica of a": [BoardFailed("a", "gone")] * 50}
    answer = post(EMBED, embed_house(boards), input="x")
    assert answer.status_code == 503
    assert json.loads(answer.text)["error"]


def test_clients_see_which_models_make_vectors() -> None:
    of = embed_house(VectorBoards.of("a"))
    told = send(of, "POST", "/api/show", json={"model": MODEL}).json()
    assert "embedding" in told["capabilities"]
    told = send(house(), "POST", "/api/show", json={"model": "sim-chat"}).json()
    assert "embedding" not in told["capabilities"]
