"""Generations that are paused, edited, resumed and aborted over HTTP while their client waits."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import httpx
import openai
import pytest

from tests.support.boards.pausing import (
    BRIEF,
    COUNT,
    COUNTED,
    FAST,
    HOLD_S,
    KEPT_FIRST,
    KEPT_OR_NOT,
    OPERATOR,
    SLOW,
    WITH_USAGE,
    engines,
    generated,
    is_free,
    listed,
    pace,
    paused,
    refused,
    run,
    settle,
    state_of,
    the_only,
)
from tests.support.cluster.local_cluster import App
from tests.support.http.talk import CHAT, ENDLESS, MODEL, Reply, act, ask, chat_body, streaming

pytestmark = pytest.mark.ray
pytest_plugins = ["tests.support.cluster.pausing_fixtures"]


@pytest.fixture
def boards(slow_boards: App) -> App:
    """Slow boards, which the test leaves free, with the same engines."""
    return slow_boards


# -- pause and resume -----------------------------------------------------------------------------


@pytest.mark.parametrize("native", KEPT_OR_NOT)
def test_a_paused_stream_is_kept_open_and_goes_on_as_if_nothing_had_been(
    boards: App, plain: Reply, native: bool
) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        async with paused(http, native_pause=native, **WITH_USAGE) as (reply, told):
            assert told["status"] == "paused"
            assert told["can_resume"] is True
            assert told["kv"] == ("kept" if native else "recomputed")
            assert told["kv_positions"] == told["context_tokens"] - native
            partial = told["partial_output"]
            assert COUNTED.startswith(partial)
            await reply.read_until(lambda r: r.comments.count(": ping") >= 3)
            assert reply.text == partial, "all of it, and nothing more, has come"
            pace(boards, FAST)
            assert (await act(http, reply.id, "resume"))["status"] == "resumed"
            await reply.read()
        assert (reply.text, reply.finish_reason, reply.done) == (COUNTED, "stop", True)
        assert reply.usage is not None
        assert plain.usage is not None
        assert reply.usage["completion_tokens"] == plain.usage["completion_tokens"]
        assert reply.usage["prompt_tokens"] == plain.usage["prompt_tokens"]
        assert reply.timings["paused_ms"] > 400

    run(boards, talk)


@pytest.mark.parametrize("native", KEPT_FIRST)
def test_the_openai_client_notices_nothing_but_a_silence(
    boards: App, plain: Reply, native: bool
) -> None:
    with (
        openai.OpenAI(
            base_url=f"{boards.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=60,
            _strict_response_validation=True,
        ) as client,
        boards.http_sync() as http,
    ):
        chunks: list[Any] = []
        for chunk in client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": COUNT}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"native_pause": native},
        ):
            chunks.append(chunk)
            if len(chunks) == 6:
                control = f"/v1/generations/{chunk.id}"
                assert http.post(f"{control}/pause").status_code == 200
                time.sleep(0.5)  # for pings
                pace(boards, FAST)
                assert http.post(f"{control}/resume").status_code == 200
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == COUNTED
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage["completion_tokens"]


@pytest.mark.parametrize("native", KEPT_FIRST)
def test_a_client_that_does_not_stream_just_waits(boards: App, native: bool) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        body = chat_body(COUNT, temperature=0, native_pause=native)
        waiting = asyncio.create_task(http.post(CHAT, json=body))
        generation = await the_only(http, lambda g: g["tokens"] >= 3)
        await act(http, generation, "pause")
        await asyncio.sleep(0.5)
        assert not waiting.done()
        pace(boards, FAST)
        await act(http, generation, "resume")
        answer = (await waiting).json()
        assert answer["id"] == generation
        assert answer["choices"][0]["message"]["content"] == COUNTED
        assert answer["timings"]["paused_ms"] >= 500

    run(boards, talk)


def test_a_legacy_completion_is_paused_by_its_id_too(boards: App) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        body = {"model": MODEL, "prompt": "Count to 50", "max_tokens": 400, "temperature": 0}
        pace(boards, FAST)
        whole = (await http.post("/v1/completions", json=body)).json()["choices"][0]["text"]
        pace(boards, SLOW)
        async with http.stream(
            "POST", "/v1/completions", json={**body, "stream": True, "native_pause": True}
        ) as response:
            reply = await Reply(response.headers, response.aiter_lines()).read(deltas=4)
            assert reply.id.startswith("cmpl-")
            assert (await act(http, reply.id, "pause"))["kv"] == "kept"
            pace(boards, FAST)
            await act(http, reply.id, "resume")
            await reply.read()
        assert (reply.text, reply.finish_reason) == (whole, "stop")

    run(boards, talk)


def test_it_can_be_paused_again_and_again(boards: App) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        async with paused(http, native_pause=True) as (reply, told):
            tokens = told["tokens"]
            for _ in range(4):
                await act(http, reply.id, "resume")
                await generated(http, reply, tokens + 2)
                again = await act(http, reply.id, "pause")
                assert again["tokens"] > tokens
                assert again["kv"] == "kept"
                tokens = again["tokens"]
            pace(boards, FAST)
            await act(http, reply.id, "resume")
            await reply.read()
        assert reply.text == COUNTED

    run(boards, talk)


def test_the_choices_of_an_answer_are_controlled_together_or_one_by_one(boards: App) -> None:
    settle(boards)

    async def talk(http: httpx.AsyncClient) -> None:
        async with streaming(http, COUNT, n=2, temperature=0) as reply:
            assert len(reply.board.split(",")) == 2
            await reply.read_until(lambda r: len(r.texts) == 2 and all(r.texts.values()))
            told = await act(http, reply.id, "pause")
            assert [c["choice"] for c in told["choices"]] == [0, 1]
            assert {c["status"] for c in told["choices"]} == {"paused"}
            unclear = await refused(http, reply, "edit", text=" or so")
            assert (unclear["status"], unclear["param"]) == (400, "choice")
            edited = await act(http, reply.id, "edit", choice=1, text=" or so")
            assert (edited["choice"], edited["partial_output"][-6:]) == (1, " or so")
            await act(http, reply.id, "abort", choice=1)
            pace(boards, FAST)
            await act(http, reply.id, "resume", choice=0)
            await reply.read()
        assert reply.reasons == {0: "stop", 1: "abort"}
        assert reply.texts[0] == COUNTED
        assert reply.texts[1].endswith(" or so")

    run(boards, talk)


# -- edits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", KEPT_OR_NOT)
def test_an_edit_takes_words_back_from_the_client_and_puts_others_there(
    boards: App, native: bool
) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        async with paused(http, native_pause=native) as (reply, told):
            before = told["partial_output"]
            edit = {"replace_last": 2, "text": " and so on"}
            edited = await act(http, reply.id, "edit", **edit)
            kept, _, rest = edited["partial_output"].partition(" and so on")
            assert (rest, before.startswith(kept), kept != before) == ("", True, True)
            assert edited["kv"] == ("kept" if native else "recomputed")
            await reply.read_until(lambda r: r.text == edited["partial_output"])
            common = len(before) - reply.retracted
            assert 0 < common < len(before)
            assert edited["partial_output"][:common] == before[:common]
            assert edited["partial_output"][common] != before[common], "no more than it has to"
            pace(boards, FAST)
            await act(http, reply.id, "resume")
            await reply.read()
        assert reply.text.startswith(edited["partial_output"])
        assert len(reply.text) > len(edited["partial_output"]), "the model goes on from there"
        assert (reply.finish_reason, reply.error) == ("stop", None)

    run(boards, talk)


def test_an_edit_gives_the_same_answer_whatever_becomes_of_the_kv_cache(boards: App) -> None:
    """A tool's result and words of its own, at the same token: 8 of 11 are left."""

    async def edited(http: httpx.AsyncClient, native: bool) -> str:
        body = {"pause_on": ["4"], "native_pause": native, "temperature": 0}
        async with streaming(http, COUNT, **body) as reply:
            await reply.read_until(lambda r: bool(r.pauses))
            assert reply.pauses[0]["by"] == "4"
            assert reply.text == "1, 2, 3, 4"
            await act(http, reply.id, "edit", replace_last=1, text=" four")
            await act(http, reply.id, "edit", text="the tool says 5", role="tool")
            await act(http, reply.id, "resume")
            await reply.read()
        assert reply.text.startswith("1, 2, 3, four")
        assert "the tool says 5" in reply.text[len("1, 2, 3, four") :], "the model has heard it"
        assert "<|im_start|>" not in reply.text
        return reply.text

    async def talk(http: httpx.AsyncClient) -> None:
        pace(boards, FAST)
        assert await edited(http, native=True) == await edited(http, native=False)

    run(boards, talk)


def test_the_model_forgets_what_is_cleared_and_the_answer_keeps_it(boards: App) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        async with paused(http, native_pause=True) as (reply, told):
            held = told["kv_positions"]
            body = {"generation": reply.id, "ranges": [[held - 3, held - 1]]}
            # An edit of the own generation: for who knows its id, though clearing is not.
            response = await http.post("/v1/cache/kv/clear", json=body, headers=OPERATOR)
            assert response.status_code == 200, response.text
            cleared = response.json()
            assert cleared["kv_positions"] == held - 2
            assert cleared["context_tokens"] == told["context_tokens"] - 2
            assert cleared["partial_output"] == told["partial_output"]
            assert (cleared["kv"], cleared["applied"]) == ("kept", "at_resume")
            (size,) = (await http.get("/v1/cache/kv/size?board=" + told["board"])).json()["data"]
            assert (size["positions"], size["positions_at_resume"]) == (held, held - 2)
            assert size["applied"] == "at_resume"
            pace(boards, FAST)
            await act(http, reply.id, "resume")
            await reply.read()
        assert reply.text.startswith(told["partial_output"])
        assert (reply.finish_reason, reply.retracted) == ("stop", 0)

    run(boards, talk)


# -- pausing by itself ----------------------------------------------------------------------------


def test_a_generation_pauses_by_itself_after_a_text(boards: App) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        async with streaming(http, COUNT, temperature=0, pause_on=["7, 8", "never"]) as reply:
            await reply.read_until(lambda r: bool(r.pauses))
            assert reply.text == "1, 2, 3, 4, 5, 6, 7, 8"
            (told,) = reply.pauses
            assert (told["by"], told["kv"], told["choice"]) == ("7, 8", "kept", 0)
            pace(boards, FAST)
            await act(http, reply.id, "resume")
            await reply.read()
        assert reply.text == COUNTED

    run(boards, talk)


def test_a_generation_pauses_by_itself_for_a_client_that_does_not_stream(boards: App) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        body = chat_body(COUNT, temperature=0, pause_on=["3"])
        waiting = asyncio.create_task(http.post(CHAT, json=body))
        generation = await the_only(http, lambda g: g["state"] == "paused")
        state = (await http.get(f"/v1/generations/{generation}")).json()
        assert (state["partial_output"], state["paused_by"]) == ("1, 2, 3", "3")
        pace(boards, FAST)
        await act(http, generation, "edit", replace_last=1, text=" three")
        await act(http, generation, "resume")
        text = (await waiting).json()["choices"][0]["message"]["content"]
        assert text.startswith("1, 2, three")

    run(boards, talk)


# -- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", KEPT_FIRST)
@pytest.mark.parametrize("first", ["pause", None], ids=["paused", "running"])
def test_an_abort_ends_the_answer_and_what_was_said_stands(
    boards: App, native: bool, first: str | None
) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        extra = {"native_pause": native, **WITH_USAGE}
        async with streaming(http, ENDLESS, **extra) as reply:
            await reply.read(deltas=5)
            if first is not None:
                await act(http, reply.id, first)
            told = await act(http, reply.id, "abort")
            assert told["status"] == "aborted"
            await reply.read()
        assert (reply.finish_reason, reply.done, reply.error) == ("abort", True, None)
        assert reply.usage is not None
        assert 5 <= reply.usage["completion_tokens"] < 100
        again = await refused(http, reply, "abort")
        assert again["status"] == 409
        assert "ended" in again["message"]

    run(boards, talk)


@pytest.mark.parametrize("native", KEPT_FIRST)
def test_a_client_that_hangs_up_while_paused_frees_the_board(boards: App, native: bool) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        async with paused(http, ENDLESS, native_pause=native) as (reply, _):
            reports = await asyncio.to_thread(boards.reports)
            assert [r.paused for r in reports if r.board_id == reply.board] == [1]
        left_s = time.monotonic()
        while not await asyncio.to_thread(is_free, boards):
            assert time.monotonic() - left_s < 60
            await asyncio.sleep(0.05)
        gone = await refused(http, reply, "resume")
        assert gone["status"] == 409
        assert "ended" in gone["message"]

    run(boards, talk)


def test_others_wait_for_a_held_board_no_longer_than_its_hold(boards: App) -> None:
    settle(boards)

    async def talk(http: httpx.AsyncClient) -> None:
        async with streaming(http, COUNT, n=2, temperature=0, native_pause=True) as reply:
            await reply.read_until(lambda r: len(r.texts) == 2 and all(r.texts.values()))
            told = await act(http, reply.id, "pause")
            assert {c["board"] for c in told["choices"]} == {"pause-0", "pause-1"}
            assert {c["kv"] for c in told["choices"]} == {"kept"}
            pace(boards, FAST)
            other = await ask(http, "Repeat after me: it is my turn")
            assert (other.text, other.error) == ("it is my turn", None)
            assert other.timings["queue_ms"] >= 1e3 * (HOLD_S - 1)
            states = {g["board"]: g["kv"] for g in await listed(http)}
            assert states[other.board] == "recomputed"
            await act(http, reply.id, "resume")
            await reply.read()
        assert reply.texts == {0: COUNTED, 1: COUNTED}
        assert reply.reasons == {0: "stop", 1: "stop"}

    run(boards, talk)


@pytest.mark.parametrize("native", KEPT_FIRST)
def test_a_pause_that_nobody_ends_expires_and_the_client_is_told(boards: App, native: bool) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        body = {"model": BRIEF, "temperature": 0, "pause_on": ["3"], "native_pause": native}
        async with streaming(http, COUNT, **body) as reply:
            await reply.read()
        assert (reply.text, reply.finish_reason, reply.done) == ("1, 2, 3", None, True)
        assert reply.error is not None
        assert reply.error["code"] == "pause_expired"
        other = await ask(http, "Repeat after me: and on it goes", model=BRIEF)
        assert other.text == "and on it goes"

    run(boards, talk)


def test_a_hook_that_raises_ends_its_own_generation_and_nothing_else(boards: App) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        async with streaming(http, COUNT, temperature=0) as other:
            await other.read(deltas=2)
            pace(boards, FAST)
            failed = await ask(http, "Repeat after me: boom, said the hook")
            assert failed.error is not None
            assert failed.error["code"] == "hook_failed"
            assert "ValueError" in failed.error["message"]
            assert "blown up" not in failed.error["message"], "that is for the log"
            assert "Trouble" in failed.error["message"]
            body = chat_body("Repeat after me: boom")
            whole = await http.post(CHAT, json=body)
            assert whole.status_code >= 500
            assert whole.json()["error"]["code"] == "hook_failed"
            await other.read()
        assert (other.text, other.error) == (COUNTED, None)

    run(boards, talk)


@pytest.mark.parametrize("native", KEPT_FIRST)
def test_a_paused_generation_survives_the_crash_of_its_engine(
    two_routers: App, plain: Reply, native: bool
) -> None:
    async def talk(http: httpx.AsyncClient) -> None:
        async with paused(http, native_pause=native, **WITH_USAGE) as (reply, _):
            before = (await asyncio.to_thread(engines, two_routers))[reply.board]
            os.kill(before, signal.SIGKILL)
            pace(two_routers, FAST)
            while (state := await state_of(http, reply))["kv"] != "recomputed":
                assert state["state"] == "paused"
                await asyncio.sleep(0.05)
            await act(http, reply.id, "resume")
            await reply.read()
        assert (reply.text, reply.finish_reason, reply.error) == (COUNTED, "stop", None)
        assert reply.usage is not None
        assert plain.usage is not None
        assert reply.usage["completion_tokens"] == plain.usage["completion_tokens"]
        assert (await asyncio.to_thread(engines, two_routers))[reply.board] != before

    pace(two_routers, SLOW)
    run(two_routers, talk)
    two_routers.settled()
