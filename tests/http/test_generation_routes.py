"""The routes that control generations: who is asked, what is answered, and what clients see."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from rkserve.config.router import RouterConfig
from rkserve.core.errors import (
    StateConflict,
)
from rkserve.core.messages import Delta, FinishReason, Kv, Paused
from tests.support.boards.fake_boards import (
    FakeBoards,
    Step,
    accepted,
    eventually,
    finished,
    report,
)
from tests.support.http.generation_house import (
    GENERATIONS,
    ID,
    S,
    edit_sent,
    edited,
    house_of,
    info,
)
from tests.support.http.router_house import CHAT, House, chat, events

pytestmark = pytest.mark.virtual_time


async def test_a_long_edit_is_read_like_a_short_one_and_a_huge_one_is_refused() -> None:
    house, response = await edited({"text": "word " * 3000})
    assert response.status_code == 200
    assert len(edit_sent(house).ids) > 3000
    _, response = await edited({"text": "word " * 300_000})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    house = House(FakeBoards([]), RouterConfig(max_body_bytes=1024))
    response = await house("POST", f"{GENERATIONS}/{ID}/edit", content=b"x" * 2000)
    assert response.status_code == 413


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


@pytest.mark.promise("Pause", "`keep`: streams stay open, new requests wait")
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
