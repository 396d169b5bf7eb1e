"""Embedding calls of a Router: spread over boards, lost boards, full queues and hang-ups."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from rkserve.core.board_report import BoardState
from rkserve.core.errors import BoardAsleep, BoardFailed, EngineDied, QueueFull, RunFailed
from rkserve.core.messages import EmbedRequest
from tests.support.boards.embedding_boards import MODEL, VectorBoards, embed_house, vector_of
from tests.support.boards.fake_boards import eventually
from tests.support.http.embedding_calls import PATH, floats, ids_of, post, unit

pytestmark = pytest.mark.virtual_time


async def test_a_batch_is_spread_over_all_boards_and_waits_at_no_more_than_there_are() -> None:
    boards = VectorBoards.of("a", "b", "c")
    of = embed_house(boards)
    texts = [f"text number {n} " + "cat " * (n % 7) for n in range(100)]
    answer = await of("POST", PATH, json={"model": MODEL, "input": texts})
    for vector, text in zip(floats(answer), texts, strict=True):
        assert vector == pytest.approx(unit(vector_of(ids_of(text))), rel=1e-6)
    assert {replica for replica, _ in boards.served} == {f"replica of {b}" for b in "abc"}
    assert boards.most <= 3
    assert sum(len(request.inputs) for _, request in boards.served) == 100
    assert set(answer.headers["x-rkserve-board"].split(", ")) == {"a", "b", "c"}
    assert of.metric("rkserve_embedded_texts_total", model=MODEL) == 100
    of.expect_nothing_left()


def test_boards_that_are_about_to_be_loaded_get_their_share_and_broken_ones_none() -> None:
    boards = VectorBoards.of("a", "b", "c")
    states = (BoardState.READY, BoardState.LOADING, BoardState.FAILED)
    boards.reported = [
        replace(one, state=state) for one, state in zip(boards.reported, states, strict=True)
    ]
    post(embed_house(boards), input=["one", "two", "three", "four"])
    assert sorted(len(request.inputs) for _, request in boards.served) == [2, 2]


def test_few_texts_go_to_as_many_boards() -> None:
    boards = VectorBoards.of("a", "b", "c")
    post(embed_house(boards), input=["one", "two", "three"])
    assert [len(request.inputs) for _, request in boards.served] == [1, 1, 1]


def test_two_long_texts_share_no_request() -> None:
    boards = VectorBoards.of("a")
    post(embed_house(boards), input=[[5] * 2000, [6], [7] * 2000, [8]])
    sizes = sorted(sum(map(len, request.inputs)) for _, request in boards.served)
    assert sizes == [2000, 2002]


@pytest.mark.parametrize("late", [False, True], ids=["before it accepts", "after it accepted"])
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(BoardFailed("a", "gone"), id="gone"),
        pytest.param(EngineDied("a", "SIGSEGV"), id="died"),
        pytest.param(RunFailed("a", "-1"), id="run failed"),
    ],
)
def test_a_request_that_loses_its_board_is_made_by_another_one(loss: Exception, late: bool) -> None:
    boards = VectorBoards.of("a", "b", late=late)
    boards.losses = {"replica of a": [loss]}
    of = embed_house(boards)
    answer = post(of, input=[f"text {n}" for n in range(8)])
    assert answer.status_code == 200
    for n, vector in enumerate(floats(answer)):
        assert vector == pytest.approx(unit(vector_of(ids_of(f"text {n}"))), rel=1e-6)
    assert any(isinstance(one, EmbedRequest) for _, one in boards.opened)
    assert answer.json()["usage"]["prompt_tokens"] == sum(
        len(ids_of(f"text {n}")) for n in range(8)
    )
    of.expect_nothing_left()


def test_a_text_that_two_boards_die_of_is_not_tried_on_a_third() -> None:
    boards = VectorBoards.of("a", "b", "c")
    boards.losses = {f"replica of {b}": [EngineDied(b, "SIGSEGV")] for b in "abc"}
    boards.says = {("", "forgive"): lambda: None}
    answer = post(embed_house(boards), input="poison")
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "poison_request")
    assert len(boards.opened) == 2


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        pytest.param(QueueFull(3, 7), 429, "queue_full", id="full"),
        pytest.param(BoardAsleep("a", "it sleeps"), 503, "board_asleep", id="asleep"),
    ],
)
def test_who_gets_no_place_is_told_so(error: Exception, status: int, code: str) -> None:
    boards = VectorBoards.of("a", late=False)
    boards.losses = {"replica of a": [error] * 100}
    of = embed_house(boards)
    answer = post(of, input=["a", "b"])
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    of.expect_nothing_left()
    assert of.metric("rkserve_generation_errors_total", code=code) == 1


async def test_a_queue_that_gets_full_meanwhile_does_not_cost_what_was_made() -> None:
    boards = VectorBoards.of("a", late=False)
    of = embed_house(boards)
    boards.gate = asyncio.Event()
    asked = asyncio.create_task(
        of("POST", PATH, json={"model": MODEL, "input": [[n] * 1500 for n in (5, 6, 7)]})
    )
    await eventually(lambda: boards.running)
    boards.losses = {"replica of a": [QueueFull(3, 7)]}
    boards.gate.set()
    assert (await asked).status_code == 200
    assert len(boards.served) == 3


async def test_a_hang_up_frees_all_boards_and_what_waits_is_withdrawn() -> None:
    boards = VectorBoards.of("a", "b", gate=asyncio.Event())
    of = embed_house(boards)
    texts = [[n] * 1500 for n in range(5, 15)]
    asked = asyncio.create_task(of("POST", PATH, json={"model": MODEL, "input": texts}))
    await eventually(lambda: boards.running == 2)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await eventually(lambda: boards.running == 0)
    of.expect_nothing_left()
    assert len(boards.opened) == 2
    assert of.metric("rkserve_hang_ups_total") == 1
    assert of.service.unassigned.infos() == []


async def test_an_answer_that_is_not_ready_in_time_is_stopped() -> None:
    boards = VectorBoards.of("a", gate=asyncio.Event())
    of = embed_house(boards)
    answer = await of("POST", PATH, json={"model": MODEL, "input": "a", "timeout": 0.5})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    of.expect_nothing_left()


async def test_what_waits_for_vectors_is_no_generation() -> None:
    boards = VectorBoards.of("a", gate=asyncio.Event())
    of = embed_house(boards)
    asked = asyncio.create_task(
        of("POST", PATH, json={"model": MODEL, "input": [[5] * 1500, [6] * 1500]})
    )
    await eventually(lambda: boards.running)
    assert of.service.unassigned.infos() == []
    assert boards.gate is not None
    boards.gate.set()
    body = json.loads((await asked).content)
    assert len(body["data"]) == 2
