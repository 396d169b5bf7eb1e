"""The routes that control generations: who is asked, what is answered, and what clients see."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from rkserve.config.router import RouterConfig
from rkserve.core.board_report import GenerationInfo, GenerationState
from rkserve.core.errors import (
    BoardFailed,
    ContextOverflow,
    GenerationNotFound,
    RequestError,
    StateConflict,
)
from rkserve.core.messages import ControlAction, Delta, Edit, FinishReason, Kv, Paused
from tests.support.boards.fake_boards import (
    FakeBoards,
    Step,
    accepted,
    eventually,
    finished,
    report,
)
from tests.support.http.router_house import CHAT, House, chat, events, model

pytestmark = pytest.mark.virtual_time

ID = "chatcmpl-1"
GENERATIONS = "/v1/generations"
S = GenerationState


def info(choice: int = 0, board: str = "a", state: S = S.PAUSED, **rest: Any) -> GenerationInfo:
    """A generation of the answer ``ID``."""
    known: dict[str, Any] = {
        "prompt_tokens": 5,
        "tokens": 3,
        "context_tokens": 8,
        "kv_positions": 7,
        "partial_output": "Hello",
        "kv": Kv.KEPT,
    }
    return GenerationInfo(f"{ID}/{choice}", board, "sim-chat", state, **{**known, **rest})


def house_of(*boards: str, **says: Any) -> House:
    """Boards that have nothing to say but this, ``b_control=...`` for what b says to control."""
    found = FakeBoards([report(b) for b in boards])
    found.says = {("", "generations"): [], ("", "control"): GenerationNotFound(ID)}
    for key, said in says.items():
        board, _, method = key.partition("_")
        found.says[f"replica of {board}", method] = said
    return House(found)


def controls(house: House) -> list[tuple[str, tuple[Any, ...]]]:
    """Who was asked to do what."""
    return [
        (replica[-1], args) for replica, method, args in house.boards.asked if method == "control"
    ]


# -- finding --------------------------------------------------------------------------------------


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


# -- several choices ------------------------------------------------------------------------------


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


# -- edits ----------------------------------------------------------------------------------------


async def edited(body: Any, said: Any = None) -> tuple[House, Any]:
    """Edit a generation that is paused on board a."""
    house = house_of("a", a_generations=[info()], a_control=[info()] if said is None else said)
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    return house, await house("POST", f"{GENERATIONS}/{ID}/edit", **sent)


def edit_sent(house: House) -> Edit:
    """What the board was asked to do."""
    ((_, (generation, action, edit, choice)),) = controls(house)
    assert (generation, action, choice) == (ID, ControlAction.EDIT, None)
    assert isinstance(edit, Edit)
    return edit


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


async def test_a_long_edit_is_read_like_a_short_one_and_a_huge_one_is_refused() -> None:
    house, response = await edited({"text": "word " * 3000})
    assert response.status_code == 200
    assert len(edit_sent(house).ids) > 3000
    _, response = await edited({"text": "word " * 300_000})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    house = House(FakeBoards([]), RouterConfig(max_body_bytes=1024))
    response = await house("POST", f"{GENERATIONS}/{ID}/edit", content=b"x" * 2000)
    assert response.status_code == 413


# -- what clients see -----------------------------------------------------------------------------


def pausing(gate: asyncio.Event, by: str | None = "</t>") -> list[Step]:
    """An answer that pauses, is edited and goes on."""
    return [
        accepted("a"),
        Delta("one two</t>", (1, 2, 3)),
        Paused(by, 3, Kv.KEPT),
        gate,
        Delta("2", (4,), retract=len("two</t>")),
        Delta(" three", (5,)),
        finished(4),
    ]


def paused_house(gate: asyncio.Event, by: str | None = "</t>") -> House:
    """One board with such an answer."""
    boards = FakeBoards([report("a")], {"replica of a": [pausing(gate, by)]})
    return House(boards, RouterConfig(ping_s=0.005))


@pytest.mark.parametrize("asked", [True, False], ids=["with pause_on", "without"])
async def test_the_stream_of_a_paused_generation_stays_open_and_goes_on(asked: bool) -> None:
    gate = asyncio.Event()
    house = paused_house(gate, "</t>" if asked else None)
    extra: dict[str, Any] = {"pause_on": ["</t>"]} if asked else {}
    request = asyncio.create_task(house("POST", CHAT, json=chat(stream=True, **extra)))
    await eventually(lambda: house.boards.running)
    await asyncio.sleep(0.05)
    assert not request.done()
    gate.set()
    found = events((await request).text)
    at = found.index(": paused")
    assert found[at + 1 :].count(": ping") >= 2
    told = [e["rkserve"] for e in found if isinstance(e, dict) and "rkserve" in e]
    pause = {"status": "paused", "choice": 0, "by": "</t>", "tokens": 3, "kv": "kept"}
    assert told == [*[pause][: int(asked)], {"retract": 7}]
    text = ""
    for chunk in (e for e in found if isinstance(e, dict)):
        retract = chunk.get("rkserve", {}).get("retract", 0)
        text = text[: len(text) - retract]
        text += "".join(c["delta"].get("content") or "" for c in chunk["choices"])
    assert text == "one 2 three"
    assert found[-1] == "data: [DONE]"
    house.expect_nothing_left()


async def test_a_whole_answer_waits_and_is_what_it_became() -> None:
    gate = asyncio.Event()
    house = paused_house(gate)
    request = asyncio.create_task(house("POST", CHAT, json=chat(pause_on=["</t>"])))
    await eventually(lambda: house.boards.running)
    await asyncio.sleep(0.05)
    assert not request.done()
    gate.set()
    answered = (await request).json()
    assert answered["choices"][0]["message"]["content"] == "one 2 three"
    house.expect_nothing_left()


async def test_an_aborted_answer_ends_in_order() -> None:
    script: list[Step] = [accepted("a"), Delta("one", (1,)), finished(1, FinishReason.ABORT)]
    house = House(FakeBoards([report("a")], {"replica of a": [script]}))
    *_, last, done = events((await house("POST", CHAT, json=chat(stream=True))).text)
    assert last["choices"][0]["finish_reason"] == "abort"
    assert "timings" in last
    assert done == "data: [DONE]"


async def test_what_a_request_says_of_pauses_reaches_the_board() -> None:
    house = House(FakeBoards.answering("a"))
    body = chat(pause_on=["</tool_call>", 5], use_cache="doc", mirostat=2, mirostat_tau=4)
    assert (await house("POST", CHAT, json=body)).status_code == 200
    ((_, request),) = house.boards.opened
    assert (request.pause_on_text, request.pause_on_ids) == (("</tool_call>",), (5,))
    assert (request.native_pause, request.use_cache) == (True, "doc")
    assert (request.sampling.mirostat, request.sampling.mirostat_tau) == (2, 4.0)
    assert request.sampling_asked == ("mirostat_tau", "mirostat")


async def test_what_was_done_to_a_generation_is_one_line_of_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = info(state=S.PREFILLING, age_s=7.25, paused_s=4.5)
    house = house_of("a", a_control=[told], a_generations=[told])
    with caplog.at_level(logging.INFO, "rkserve"):
        done = await house("POST", f"{GENERATIONS}/{ID}/resume")
        assert done.status_code == 200
        house.boards.says["replica of a", "control"] = StateConflict("resume", "generating")
        assert (await house("POST", f"{GENERATIONS}/{ID}/resume")).status_code == 409
    (line,) = [one.getMessage() for one in caplog.records if "resume of" in one.getMessage()]
    assert line.startswith(f"resume of {ID} done in ")
    assert line.endswith(
        "choice 0 on a is prefilling after 3 tokens and 7.250 s, of which 4.500 s paused"
    )
    assert "Hello" not in line
