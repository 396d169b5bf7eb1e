"""/v1/rerank and /score on scripted boards: shapes, orders, refusals."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace
from typing import Any

import pytest

from rkserve.api.openai.embeddings import finished_vector
from rkserve.api.openai.rerank import similarity
from rkserve.config.router import RouterConfig
from rkserve.core.errors import EngineDied
from tests.support.boards.embedding_boards import MODEL, VectorBoards, embed_house, model, vector_of
from tests.support.boards.fake_boards import eventually
from tests.support.http.router_house import House, house, send

pytestmark = pytest.mark.virtual_time

QUERY = "a cat"
DOCUMENTS = ["trains leave for Berlin", "a cat", "some cats sat on many mats"]


def near(one: str, other: str) -> float:
    served = model()
    settings = served.folder.settings.embedding
    assert settings is not None

    def unit(text: str) -> array[float]:
        ids = served.renderer.counted(text, special=True)
        return finished_vector(vector_of(ids).tobytes(), settings, None)

    return similarity(unit(one), unit(other))


def post(path: str, of: House | None = None, **body: Any) -> Any:
    return send(
        of or embed_house(VectorBoards.of("a")), "POST", path, json={"model": MODEL, **body}
    )


# -- rerank ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
def test_documents_come_in_the_order_of_how_near_they_are(path: str) -> None:
    answer = post(path, query=QUERY, documents=DOCUMENTS)
    body = answer.json()
    expected = sorted(range(3), key=lambda at: -near(QUERY, DOCUMENTS[at]))
    assert expected[0] == 1
    assert [one["index"] for one in body["results"]] == expected
    for one in body["results"]:
        assert one["relevance_score"] == pytest.approx(near(QUERY, DOCUMENTS[one["index"]]))
        assert one["document"] == {"text": DOCUMENTS[one["index"]]}
    assert body["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert body["model"] == MODEL
    assert body["id"].startswith("rerank-")
    assert answer.headers["x-rkserve-board"] == "a"


def test_only_the_first_few_are_returned_and_without_their_texts_where_that_is_asked() -> None:
    given: dict[str, Any] = {
        "query": {"text": QUERY},
        "documents": [{"text": text} for text in DOCUMENTS],
    }
    whole = post("/v1/rerank", **given).json()["results"]
    few = post("/v1/rerank", **given, top_n=2, return_documents=False).json()["results"]
    assert few == [{k: v for k, v in one.items() if k != "document"} for one in whole[:2]]
    assert len(post("/v1/rerank", **given, top_n=99).json()["results"]) == 3


def test_documents_that_are_equally_near_keep_their_order() -> None:
    answer = post("/v1/rerank", query=QUERY, documents=["same", "same", "same"])
    assert [one["index"] for one in answer.json()["results"]] == [0, 1, 2]


def test_the_same_text_is_computed_once() -> None:
    boards = VectorBoards.of("a")
    post("/v1/rerank", embed_house(boards), query=QUERY, documents=["same", "same", "other"])
    assert sum(len(request.inputs) for _, request in boards.served) == 3


def test_queries_and_documents_get_the_words_that_the_folder_puts_before_them() -> None:
    served = model()
    settings = served.folder.settings
    assert settings.embedding is not None
    worded = settings.embedding.model_copy(
        update={"query_prefix": "query: ", "document_prefix": "passage: "}
    )
    folder = served.folder.model_copy(
        update={"settings": settings.model_copy(update={"embedding": worded})}
    )
    boards = VectorBoards.of("a")
    of = House(boards, RouterConfig(), replace(served, folder=folder))
    post("/v1/rerank", of, query="cat", documents=["cat"])
    sent = {ids for _, request in boards.served for ids in request.inputs}
    assert sent == {
        served.renderer.counted("query: cat", special=True),
        served.renderer.counted("passage: cat", special=True),
    }


# -- score ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    ("body", "pairs"),
    [
        pytest.param({"text_1": "a", "text_2": "b"}, [("a", "b")], id="one with one"),
        pytest.param(
            {"text_1": "a", "text_2": ["b", "c c"]}, [("a", "b"), ("a", "c c")], id="one with many"
        ),
        pytest.param(
            {"text_1": ["a"], "text_2": ["b", "c c"]},
            [("a", "b"), ("a", "c c")],
            id="a list of one",
        ),
        pytest.param(
            {"text_1": ["a", "d d"], "text_2": ["b", "c c"]},
            [("a", "b"), ("d d", "c c")],
            id="pairs",
        ),
        pytest.param({"queries": "a", "documents": ["b"]}, [("a", "b")], id="by their other names"),
    ],
)
def test_texts_are_scored_in_pairs(
    path: str, body: dict[str, Any], pairs: list[tuple[str, str]]
) -> None:
    answer = post(path, **body).json()
    assert answer["object"] == "list"
    assert [one["index"] for one in answer["data"]] == list(range(len(pairs)))
    assert {one["object"] for one in answer["data"]} == {"score"}
    for one, (first, second) in zip(answer["data"], pairs, strict=True):
        assert one["score"] == pytest.approx(near(first, second))


# -- refusals and failures ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        pytest.param("/v1/rerank", {"documents": ["a"]}, "query", id="no query"),
        pytest.param("/v1/rerank", {"query": "a"}, "documents", id="no documents"),
        pytest.param("/v1/rerank", {"query": "", "documents": ["a"]}, "query", id="empty query"),
        pytest.param("/v1/rerank", {"query": ["a"], "documents": ["a"]}, "query", id="a list"),
        pytest.param("/v1/rerank", {"query": "a", "documents": []}, "documents", id="none of them"),
        pytest.param(
            "/v1/rerank", {"query": "a", "documents": ["a", 5]}, "documents[1]", id="a number"
        ),
        pytest.param(
            "/v1/rerank", {"query": "a", "documents": [{"t": 1}]}, "documents[0].text", id="no text"
        ),
        pytest.param(
            "/v1/rerank", {"query": "a", "documents": ["a"], "top_n": 0}, "top_n", id="top_n"
        ),
        pytest.param(
            "/v1/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents", id="too many"
        ),
        pytest.param(
            "/v1/rerank",
            {"query": "a", "documents": ["a", "word " * 5000]},
            "documents[1]",
            id="a document beyond the context",
        ),
        pytest.param("/score", {"text_2": "a"}, "text_1", id="no first text"),
        pytest.param("/score", {"text_1": "a"}, "text_2", id="no second text"),
        pytest.param("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_2", id="one for two"),
        pytest.param(
            "/score", {"text_1": ["a", "b"], "documents": ["c"] * 3}, "documents", id="no pairs"
        ),
        pytest.param("/score", {"text_1": "a", "text_2": [""]}, "text_2[0]", id="an empty text"),
        pytest.param(
            "/score",
            {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 5},
            "truncate_prompt_tokens",
            id="truncation",
        ),
    ],
)
def test_what_cannot_be_compared_is_a_400_that_names_it(
    path: str, body: dict[str, Any], param: str
) -> None:
    of = embed_house(VectorBoards.of("a"))
    answer = post(path, of, **body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    of.expect_nothing_left()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/score", {"text_1": "a", "text_2": "b"}),
    ],
)
def test_a_model_without_embeddings_compares_nothing(path: str, body: dict[str, Any]) -> None:
    answer = send(house(), "POST", path, json={"model": "sim-chat", **body})
    assert answer.json()["error"]["code"] == "embedding_unsupported"


def test_a_ranking_that_loses_its_board_is_made_by_another_one() -> None:
    boards = VectorBoards.of("a", "b")
    boards.losses = {"replica of a": [EngineDied("a", "SIGSEGV")]}
    of = embed_house(boards)
    answer = post("/v1/rerank", of, query=QUERY, documents=DOCUMENTS)
    assert answer.json()["results"][0]["index"] == 1
    of.expect_nothing_left()


async def test_a_hang_up_frees_the_boards() -> None:
    boards = VectorBoards.of("a", "b", gate=asyncio.Event())
    of = embed_house(boards)
    body = {"model": MODEL, "query": QUERY, "documents": DOCUMENTS}
    asked = asyncio.create_task(of("POST", "/v1/rerank", json=body))
    await eventually(lambda: boards.running == 2)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await eventually(lambda: boards.running == 0)
    of.expect_nothing_left()
