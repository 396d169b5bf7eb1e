"""Generations on boards and Routers: found, listed, controlled and edited."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from rkserve.core.board_report import GenerationInfo
from rkserve.core.errors import (
    BoardFailed,
    ContextOverflow,
    GenerationNotFound,
    RequestError,
    StateConflict,
)
from rkserve.core.messages import ControlAction, Edit
from tests.support.boards.fake_boards import (
    FakeBoards,
    accepted,
    eventually,
    finished,
    report,
)
from tests.support.http.generation_house import (
    GENERATIONS,
    ID,
    S,
    controls,
    edit_sent,
    edited,
    house_of,
    info,
)
from tests.support.http.router_house import CHAT, House, chat, model

pytestmark = pytest.mark.virtual_time


async def test_a_generation_that_another_router_started_is_found_and_controlled() -> None:
    house = house_of("a", "b", b_generations=[info(board="b")], b_control=[info(board="b")])
    response = await house("POST", f"{GENERATIONS}/{ID}/pause")
    assert response.status_code == 200
    assert response.json() == {
        "id": ID,
        "choice": 0,
        "status": "paused",
        "state": "paused",
        "board": "b",
        "partial_output": "Hello",
        "tokens": 3,
        "context_tokens": 8,
        "kv": "kept",
        "kv_positions": 7,
        "can_resume": True,
    }
    assert controls(house) == [("b", (ID, ControlAction.PAUSE, None, None))]


async def test_a_router_that_has_not_heard_of_the_board_yet_looks_for_it_before_it_says_404() -> (
    None
):
    house = house_of("a", a_generations=[info()], a_control=[info()])
    transport = httpx.ASGITransport(house.app)  # without the house's own round of reports
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.post(f"{GENERATIONS}/{ID}/pause")
    assert response.status_code == 200, response.text
    assert response.json()["board"] == "a"


async def test_a_generation_of_its_own_costs_no_question_to_others() -> None:
    gate = asyncio.Event()
    boards = FakeBoards([report("a"), report("b")])
    boards.scripts = {f"replica of {b}": [[accepted(b), gate, finished(1)]] for b in "ab"}
    boards.says["", "control"] = lambda *_: [info()]
    house = House(boards)
    talking = asyncio.create_task(house("POST", CHAT, json=chat()))
    await eventually(lambda: boards.running)
    ((replica, request),) = boards.opened
    completion = request.request_id.removesuffix("/0")
    response = await house("POST", f"{GENERATIONS}/{completion}/resume")
    assert response.json()["status"] == "resumed"
    assert "partial_output" not in response.json()
    assert [(asked, method) for asked, method, _ in boards.asked] == [(replica, "control")]
    gate.set()
    assert (await talking).json()["id"] == completion


@pytest.mark.parametrize("action", ["pause", "edit", "resume", "abort"])
@pytest.mark.parametrize(
    ("said", "status", "code", "words"),
    [
        pytest.param(
            GenerationNotFound(ID), 404, "generation_not_found", "has ended", id="unknown"
        ),
        pytest.param(
            StateConflict("resume", "ended"), 409, "state_conflict", "ended", id="it has ended"
        ),
    ],
)
async def test_what_nobody_holds_is_a_404_or_if_somebody_remembers_its_end_a_409(
    action: str, said: Exception, status: int, code: str, words: str
) -> None:
    house = house_of("a", "b", b_control=said)
    response = await house("POST", f"{GENERATIONS}/{ID}/{action}", json=_body_for(action))
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert words in error["message"]


def _body_for(action: str) -> dict[str, Any]:
    return {"replace_last": 1} if action == "edit" else {}


@pytest.mark.parametrize(
    ("action", "state"),
    [
        ("edit", S.GENERATING),
        ("resume", S.GENERATING),
        ("pause", S.PREFILLING),
        ("pause", S.QUEUED),
    ],
)
async def test_what_the_state_does_not_allow_is_a_409_that_names_it(action: str, state: S) -> None:
    house = house_of(
        "a",
        a_generations=[info(state=state)],
        a_control=StateConflict(action, state.value, "Wait."),
    )
    response = await house("POST", f"{GENERATIONS}/{ID}/{action}", json=_body_for(action))
    assert response.status_code == 409
    assert state.value in response.json()["error"]["message"]


async def test_a_board_that_does_not_answer_hides_nobody_s_answer() -> None:
    house = house_of(
        "a",
        "b",
        a_generations=BoardFailed("a", "no answer"),
        b_generations=[info(board="b")],
        b_control=[info()],
    )
    response = await house("POST", f"{GENERATIONS}/{ID}/abort")
    assert (response.status_code, response.json()["status"]) == (200, "aborted")
    listed = (await house("GET", GENERATIONS)).json()
    assert [one["board"] for one in listed["data"]] == ["b"]
    assert [(one["board"], one["error"]) for one in listed["failed"]] == [("a", "board_failed")]


@pytest.mark.parametrize("call", [("POST", "/pause"), ("GET", "")], ids=["pause", "look"])
async def test_what_a_silent_board_may_hold_is_not_said_to_be_unknown(
    call: tuple[str, str],
) -> None:
    house = house_of("a", "b", a_generations=BoardFailed("a", "no answer"))
    response = await house(call[0], f"{GENERATIONS}/{ID}{call[1]}")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "board_failed"


@pytest.mark.parametrize("name", ["x" * 81, "a b", "a%00b", "é", "a;b"])
async def test_a_name_that_no_generation_has_asks_nobody(name: str) -> None:
    house = house_of("a")
    response = await house("POST", f"{GENERATIONS}/{name}/pause")
    assert response.status_code == 404
    assert house.boards.asked == []


async def test_one_generation_is_described_with_its_words_and_the_list_tells_nobody_s() -> None:
    held = [info(), info(1, state=S.GENERATING, kv=None)]
    other = GenerationInfo("chatcmpl-2/0", "b", "sim-chat", S.QUEUED, 1, 0, 1)
    house = house_of("a", "b", a_generations=held, b_generations=[other])
    one = (await house("GET", f"{GENERATIONS}/{ID}")).json()
    assert (one["status"], one["partial_output"]) == ("paused", "Hello")
    assert [c["status"] for c in one["choices"]] == ["paused", "generating"]
    listed = await house("GET", GENERATIONS)
    assert [g["id"] for g in listed.json()["data"]] == [ID, ID, "chatcmpl-2"]
    assert "Hello" not in listed.text


async def test_choices_on_several_boards_are_all_paused_and_told() -> None:
    a, b = info(0, "a"), info(1, "b", tokens=9)
    house = house_of("a", "b", a_generations=[a], b_generations=[b], a_control=[a], b_control=[b])
    response = await house("POST", f"{GENERATIONS}/{ID}/pause")
    found = response.json()
    assert (response.status_code, found["choice"], found["tokens"]) == (200, 0, 3)
    assert [(c["board"], c["tokens"]) for c in found["choices"]] == [("a", 3), ("b", 9)]


@pytest.mark.parametrize(
    ("said", "status"),
    [
        pytest.param(StateConflict("pause", "ended"), 200, id="it has ended already"),
        pytest.param(StateConflict("pause", "queued"), 207, id="it still waits"),
        pytest.param(BoardFailed("b", "no answer"), 207, id="its board does not answer"),
    ],
)
async def test_a_choice_that_could_not_be_paused_is_told_unless_it_has_ended(
    said: Exception, status: int
) -> None:
    house = house_of(
        "a",
        "b",
        a_generations=[info()],
        b_generations=[info(1, "b")],
        a_control=[info()],
        b_control=said,
    )
    response = await house("POST", f"{GENERATIONS}/{ID}/pause")
    assert response.status_code == status
    assert response.json()["tokens"] == 3
    assert [f["board"] for f in response.json().get("failed", [])] == ["b"] * (status == 207)


async def test_one_choice_is_picked_by_its_number() -> None:
    house = house_of(
        "a", "b", a_generations=[info()], b_generations=[info(1, "b")], b_control=[info(1, "b")]
    )
    response = await house("POST", f"{GENERATIONS}/{ID}/pause", json={"choice": 1})
    assert (response.status_code, response.json()["choice"]) == (200, 1)
    assert controls(house) == [("b", (ID, ControlAction.PAUSE, None, 1))]


async def test_an_edit_of_several_choices_at_once_is_refused() -> None:
    a, b = info(0, "a"), info(1, "b")
    house = house_of("a", "b", a_generations=[a], b_generations=[b], b_control=[b])
    response = await house("POST", f"{GENERATIONS}/{ID}/edit", json={"text": "x"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "choice")
    assert controls(house) == []
    response = await house("POST", f"{GENERATIONS}/{ID}/edit", json={"text": "x", "choice": 1})
    assert (response.status_code, response.json()["choice"]) == (200, 1)


async def test_an_edit_reaches_the_board_in_the_model_s_ids() -> None:
    text = " (the rest is left out) <|im_end|>"
    house, response = await edited({"replace_last": 3, "text": text, "clear": [[1, 2]]})
    assert (response.status_code, response.json()["status"]) == (200, "paused")
    edit = edit_sent(house)
    assert (edit.replace_last, edit.text, edit.clear) == (3, text, ((1, 2),))
    assert not edit.injected
    tokenizer = model().renderer.tokenizer
    assert tokenizer is not None
    assert tokenizer.text(edit.ids) == text  # the marker is words, and no control token


async def test_a_tool_s_result_reaches_the_board_as_a_turn_of_its_own() -> None:
    house, response = await edited({"role": "tool", "text": '{"sky": "clear"}'})
    assert response.status_code == 200
    edit = edit_sent(house)
    tokenizer = model().renderer.tokenizer
    assert tokenizer is not None
    turn = (
        "<|im_end|>\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    result = tokenizer.encode(turn.format('{"sky": "clear"}'), add_special_tokens=False)
    assert edit == Edit(ids=result, injected=True)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({}, None, id="nothing to do"),
        pytest.param(b"", None, id="no body"),
        pytest.param(b"{", None, id="no JSON"),
        pytest.param(b"\xff", None, id="no UTF-8"),
        pytest.param({"token_ids": [1, 10**9]}, "token_ids[1]", id="no token"),
        pytest.param({"token_ids": [-1]}, "token_ids[0]", id="a negative id"),
        pytest.param({"clear": [[5, 3]]}, "clear[0]", id="an end before its start"),
        pytest.param({"txet": "x"}, "txet", id="a typing error"),
    ],
)
async def test_a_bad_edit_is_refused_before_the_board_hears_of_it(
    body: Any, param: str | None
) -> None:
    house, response = await edited(body)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.json()["error"]["param"] == param
    assert controls(house) == []


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        pytest.param(
            RequestError("clear: outside of the cache, which holds 7 positions.", "clear"),
            400,
            None,
            id="a range outside of the cache",
        ),
        pytest.param(
            ContextOverflow(5000, 4096, "text"), 400, "context_length_exceeded", id="too long"
        ),
    ],
)
async def test_what_the_board_refuses_is_said_in_its_words(
    said: Exception, status: int, code: str | None
) -> None:
    _, response = await edited({"clear": [[0, 99]]}, said)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["message"]) == (status, code, str(said))
