"""Answers made of single steps on a board: the same ones as the library's, and what it lacks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rkserve.board.board import Board
from rkserve.board.rules.hang_limits import RunTimeouts, limits_of
from rkserve.board.run.job import RunSpec
from rkserve.core.errors import RequestError
from rkserve.core.messages import (
    Accepted,
    ControlAction,
    Delta,
    Edit,
    Event,
    Finished,
    FinishReason,
    GenerateRequest,
    Paused,
)
from rkserve.core.run_params import Guide, GuideKind, Sampling, Scored, Stepwise
from rkserve.native.engine_frames import StepParams
from rkserve.router.dispatch.failover import GenerationProgress
from tests.support.boards.board_bench import SETTINGS, Bench, answer, request
from tests.support.boards.fakes import Script, run_loop, tokens_of
from tests.support.sim.sim_board import FOLDER, GREEDY, TOKENIZER, Sim, chat

TOKENS = FOLDER.path / "tokenizer.json"
PROMPT = chat("Tell me about the sea in many words please")
LIVELY = Sampling(temperature=1.5, top_p=1.0, top_k=0, repeat_penalty=1.0)
# The two ways to make a step: with the context kept, or sent again.
WAYS = [
    pytest.param("1.3.0", {"logits_with_history": True}, id="kept on 1.3.0"),
    pytest.param("1.3.0", {}, id="sent again on 1.3.0"),
    pytest.param("1.2.3", {}, id="sent again on 1.2.3", marks=pytest.mark.long),
]
both_ways = pytest.mark.parametrize(("release", "quirks"), WAYS)


def asked(**changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"sampling": GREEDY, "max_tokens": 40, "stepwise": Stepwise(7)}
    return GenerateRequest("cmpl-1/0", FOLDER.id, PROMPT, **(fields | changes))


async def heard(board: Board, wanted: GenerateRequest) -> list[Event]:
    return [event async for event in board.generate(wanted)]


def deltas(events: list[Event]) -> list[Delta]:
    return [event for event in events if isinstance(event, Delta)]


def text(events: list[Event]) -> str:
    return "".join(delta.text for delta in deltas(events))


def ids(events: list[Event]) -> list[int]:
    return [token_id for delta in deltas(events) for token_id in delta.token_ids]


def logprobs(events: list[Event]) -> list[Scored | None]:
    return [one for delta in deltas(events) for one in delta.logprobs]


def end(events: list[Event]) -> Finished:
    assert isinstance(events[-1], Finished)
    return events[-1]


@both_ways
async def test_greedy_steps_say_what_the_library_says_greedily(
    release: str, quirks: Mapping[str, bool], tmp_path: Path
) -> None:
    sim = Sim(tmp_path, release, quirks=quirks, sampling=GREEDY)
    async with sim.board(tokenizer_file=TOKENS) as board:
        native = await heard(board, asked(stepwise=None))
        steps = await heard(board, asked())
        assert (text(steps), ids(steps)) == (text(native), ids(native))
        assert end(steps).reason is end(native).reason is FinishReason.LENGTH
        assert end(steps).usage == end(native).usage
        assert end(steps).timings.decode_tokens == 40


@both_ways
async def test_an_end_of_sequence_ends_steps_too(
    release: str, quirks: Mapping[str, bool], tmp_path: Path
) -> None:
    sim = Sim(tmp_path, release, quirks=quirks)
    async with sim.board(tokenizer_file=TOKENS) as board:
        wanted = replace(asked(), prompt_ids=chat("Repeat after me: grün 日本 \N{OCTOPUS}"))
        events = await heard(board, wanted)
        assert text(events) == "grün 日本 \N{OCTOPUS}"
        assert end(events).reason is FinishReason.STOP
        assert TOKENIZER.decode([ids(events)[-1]], skip_special_tokens=False) == "<|im_end|>"


@both_ways
async def test_a_stop_id_ends_native_answers_and_steps_alike_and_waits_for_the_least(
    release: str, quirks: Mapping[str, bool], tmp_path: Path
) -> None:
    sim = Sim(tmp_path, release, quirks=quirks, sampling=GREEDY)
    async with sim.board(tokenizer_file=TOKENS) as board:
        whole = await heard(board, asked(stepwise=None))
        stop_id = ids(whole)[4]
        at = ids(whole).index(stop_id)
        for stepwise in (None, asked().stepwise):
            events = await heard(board, asked(stepwise=stepwise, stop_ids=(stop_id,)))
            assert ids(events) == ids(whole)[: at + 1]
            assert end(events).reason is FinishReason.STOP
        later = replace(asked().stepwise or Stepwise(0), least=at + 1)
        events = await heard(board, asked(stepwise=later, stop_ids=(stop_id,)))
        assert ids(events)[:at] == ids(whole)[:at]
        assert ids(events)[at] != stop_id


@both_ways
def test_a_seed_decides_the_answer_and_boards_that_fix_sampling_heed_the_request(
    release: str, quirks: Mapping[str, bool], tmp_path: Path
) -> None:
    async def body() -> None:
        async with Sim(tmp_path, release, quirks=quirks).board(tokenizer_file=TOKENS) as board:

            async def said(seed: int, choice: int = 0) -> str:
                events = await heard(
                    board,
                    asked(
                        sampling=LIVELY,
                        sampling_asked=("temperature",),
                        strict_sampling=True,
                        stepwise=Stepwise(seed, choice),
                    ),
                )
                assert isinstance(events[0], Accepted)
                assert events[0].sampling_ignored == ()
                return text(events)

            assert await said(1) == await said(1)
            assert len({await said(1), await said(2), await said(1, choice=1)}) == 3

    run_loop(body())


async def until_paused(board: Board, wanted: GenerateRequest) -> tuple[list[Event], list[Paused]]:
    """Hear an answer that is resumed whenever it pauses."""
    events: list[Event] = []
    stream: AsyncGenerator[Event, None] = board.generate(wanted)
    async for event in stream:
        events.append(event)
        if isinstance(event, Paused):
            await board.control("cmpl-1", ControlAction.RESUME)
    return events, [event for event in events if isinstance(event, Paused)]


@both_ways
async def test_a_seeded_answer_that_pauses_goes_on_as_if_it_had_not(
    release: str, quirks: Mapping[str, bool], tmp_path: Path
) -> None:
    async with Sim(tmp_path, release, quirks=quirks).board(tokenizer_file=TOKENS) as board:
        seeded = asked(sampling=LIVELY, stepwise=Stepwise(5, top_logprobs=2))
        whole = await heard(board, seeded)
        middle = ids(whole)[17]
        events, pauses = await until_paused(board, replace(seeded, pause_on_ids=(middle,)))
        assert pauses
        assert (text(events), ids(events)) == (text(whole), ids(whole))
        assert logprobs(events) == logprobs(whole)


@both_ways
async def test_a_seeded_answer_goes_on_elsewhere_as_if_it_had_not(
    release: str, quirks: Mapping[str, bool], tmp_path: Path
) -> None:
    first, other = tmp_path / "first", tmp_path / "other"
    first.mkdir()
    other.mkdir()
    seeded = asked(
        sampling=replace(LIVELY, frequency_penalty=0.5, repeat_penalty=1.1),
        stepwise=Stepwise(5, top_logprobs=1, prompt_logprobs=True),
    )
    async with (
        Sim(first, release, quirks=quirks).board(tokenizer_file=TOKENS) as one,
        Sim(other, "1.3.0", quirks={"logits_with_history": True}).board(
            tokenizer_file=TOKENS
        ) as two,
    ):
        whole = await heard(one, seeded)
        course = GenerationProgress(seeded, limit=3)
        begun = await heard(one, replace(seeded, max_tokens=13))
        for event in begun[:-1]:
            course.observe(event)
        assert course.lost("one", RequestError("lost"), 0.0) is None
        rest = await heard(two, course.request)
        assert ids(begun) + ids(rest) == ids(whole)
        assert text(begun) + text(rest) == text(whole)
        assert [len(found) for found in (logprobs(begun), logprobs(rest))] == [13, 27]
        # The client has those of the prompt.
        assert [len(delta.prompt) for delta in deltas(begun)].count(len(PROMPT) - 1) == 1
        assert all(delta.prompt == () for delta in deltas(rest))


@both_ways
async def test_logprobs_come_with_each_token_and_once_with_the_prompt(
    release: str, quirks: Mapping[str, bool], tmp_path: Path
) -> None:
    async with Sim(tmp_path, release, quirks=quirks).board(tokenizer_file=TOKENS) as board:
        scored = Stepwise(1, top_logprobs=3, prompt_logprobs=True)
        events = await heard(board, asked(stepwise=scored))
        prompt = [delta.prompt for delta in deltas(events) if delta.prompt]
        assert [len(found) for found in prompt] == [len(PROMPT) - 1]
        found = logprobs(events)
        assert len(found) == len(ids(events)) == 40
        for token_id, one in zip(ids(events), found, strict=True):
            assert one is not None
            assert one.top[0] == (token_id, one.logprob)  # greedy
            assert len(one.top) == 3
        # What the model is told of itself: "you" after "<|im_end|>\n<|im_start|>" is no news.
        assert all(one.logprob <= 0 for one in prompt[0])
        only = replace(asked(stepwise=scored), max_tokens=0)
        events = await heard(board, only)
        assert [len(delta.prompt) for delta in deltas(events)] == [len(PROMPT) - 1]
        assert (end(events).reason, end(events).usage.completion_tokens) == (
            FinishReason.LENGTH,
            0,
        )


async def test_a_bias_is_heeded_and_bans_a_token(tmp_path: Path) -> None:
    async with Sim(tmp_path).board(tokenizer_file=TOKENS) as board:
        first = ids(await heard(board, asked(max_tokens=1)))[0]
        banned = Stepwise(1, logit_bias=((first, -100.0),))
        assert ids(await heard(board, asked(max_tokens=1, stepwise=banned))) != [first]
        wished = Stepwise(1, logit_bias=((500, 100.0),))
        found = ids(await heard(board, asked(max_tokens=3, stepwise=wished)))
        assert found == [500, 500, 500]


async def test_steps_with_history_use_the_conversation_again_and_others_do_not(
    tmp_path: Path,
) -> None:
    for name, quirks, cached in (
        ("kept", {"logits_with_history": True}, True),
        ("sent", {}, False),
    ):
        place = tmp_path / name
        place.mkdir()
        async with Sim(place, quirks=quirks).board(tokenizer_file=TOKENS) as board:
            begun = await heard(board, asked())
            longer = replace(asked(), prompt_ids=(*PROMPT, *ids(begun), 500, 501))
            usage = end(await heard(board, longer)).usage
            assert (usage.cached_tokens > len(PROMPT)) is cached
            # The library's own run goes on from it as well.
            native = end(await heard(board, replace(longer, stepwise=None))).usage
            assert native.prompt_tokens == len(PROMPT) + 42


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        pytest.param({"n_batch": 2}, "serve batches", id="batches"),
        pytest.param({"tokenizer_file": None}, "without a tokenizer", id="no tokenizer"),
        pytest.param({"eos_ids": frozenset()}, "eos_token_ids", id="no known end"),
    ],
)
def test_a_board_that_cannot_make_steps_says_why(changes: dict[str, Any], why: str) -> None:
    settings = replace(replace(SETTINGS, tokenizer_file=TOKENS), **changes)
    settings.check_steps(request())
    with pytest.raises(RequestError, match=why):
        settings.check_steps(request(stepwise=Stepwise(1)))


async def test_a_request_for_steps_is_checked_before_it_is_queued() -> None:
    async with Bench().running() as bench:
        with pytest.raises(RequestError, match="without a tokenizer"):
            await answer(bench.board, stepwise=Stepwise(1))
        assert bench.engine.commands == []


@pytest.mark.parametrize(("stepwise", "kept"), [(Stepwise(1), True), (None, False)])
async def test_steps_that_were_left_leave_a_context_that_is_known(
    stepwise: Stepwise | None, kept: bool
) -> None:
    settings = replace(SETTINGS, tokenizer_file=TOKENS)
    endless = Script(tokens_of(*"abcdefgh"))
    bench = Bench(endless, settings=settings, quirks={"logits_with_history": True})
    async with bench.running():
        wanted: dict[str, Any] = {"max_tokens": 30, "stepwise": stepwise}
        assert await answer(bench.board, stop=("c",), **wanted) == ("ab", FinishReason.STOP)
        held = tuple(bench.engine.kv)
        assert len(held) > 3
        await answer(bench.board, *held, 9, **wanted)
        assert bench.engine.commands[-1].clear is not kept


def test_what_an_engine_refuses_is_the_requests_fault_and_the_board_goes_on(
    tmp_path: Path,
) -> None:
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")

    async def body() -> None:
        async with Sim(tmp_path).board(tokenizer_file=broken) as board:
            with pytest.raises(RequestError, match="tokenizer"):
                await asyncio.wait_for(heard(board, asked()), 60)
            assert text(await heard(board, asked(stepwise=None)))
            assert board.report().engine_starts == 1

    run_loop(body())


@both_ways
async def test_an_answer_follows_its_grammar_to_the_end(
    release: str, quirks: Mapping[str, bool], tmp_path: Path
) -> None:
    schema = {
        "type": "object",
        "properties": {
            "kind": {"enum": ["sea", "lake"]},
            "depth": {"type": "integer", "minimum": 0, "maximum": 999},
        },
        "required": ["kind", "depth"],
        "additionalProperties": False,
    }
    guide = Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))
    async with Sim(tmp_path, release, quirks=quirks).board(tokenizer_file=TOKENS) as board:
        wanted = asked(sampling=LIVELY, max_tokens=300, stepwise=Stepwise(3, guide=guide))
        events = await heard(board, wanted)
        whole = json.loads(text(events))
        assert set(whole) == {"kind", "depth"}
        assert whole["kind"] in {"sea", "lake"}
        assert end(events).reason is FinishReason.STOP
        cut = await heard(board, replace(wanted, max_tokens=3))
        assert end(cut).reason is FinishReason.LENGTH
        assert text(events).startswith(text(cut))
        # It goes on within its grammar, and as it would have.
        middle = ids(events)[4]
        again, pauses = await until_paused(board, replace(wanted, pause_on_ids=(middle,)))
        assert pauses
        assert text(again) == text(events)


async def test_an_edit_that_leaves_the_grammar_ends_the_answer_and_not_the_board(
    tmp_path: Path,
) -> None:
    guide = Guide(GuideKind.REGEX, "[0-9]{30}")
    async with Sim(tmp_path).board(tokenizer_file=TOKENS) as board:
        wanted = asked(stepwise=Stepwise(3, guide=guide), max_tokens=60)
        first = ids(await heard(board, wanted))[0]
        stream = board.generate(replace(wanted, pause_on_ids=(first,)))
        async for event in stream:
            if isinstance(event, Paused):
                break
        await board.control("cmpl-1", ControlAction.EDIT, Edit(ids=(500,), text="x"))
        await board.control("cmpl-1", ControlAction.RESUME)
        with pytest.raises(RequestError, match="grammar"):
            _ = [event async for event in stream]
        assert len(text(await heard(board, wanted))) == 30


async def test_who_hangs_up_frees_the_board_between_two_steps(tmp_path: Path) -> None:
    async with Sim(tmp_path).board(tokenizer_file=TOKENS) as board:
        stream = board.generate(asked(max_tokens=3000, sampling=LIVELY))
        async for event in stream:
            if isinstance(event, Delta):
                break
        await stream.aclose()
        assert len(ids(await heard(board, asked()))) == 40
        assert board.report().engine_starts == 1


STEPS = StepParams(TOKENS, GREEDY, Stepwise(1), frozenset(), limit=50)


@pytest.mark.parametrize(
    ("beginning", "token_s", "abort_s"),
    [
        pytest.param(RunSpec((), base=(1,) * 50), 10, 2, id="the library's own"),
        pytest.param(RunSpec((), base=(1,) * 50, history=True, steps=STEPS), 10, 12, id="kept"),
        pytest.param(RunSpec((), base=(1,) * 50, limit=50, steps=STEPS), 20, 22, id="sent again"),
        pytest.param(RunSpec((), save=Path("x")), 40, 32, id="a file"),
    ],
)
def test_a_run_may_be_silent_for_as_long_as_its_longest_step(
    beginning: RunSpec, token_s: float, abort_s: float
) -> None:
    given = RunTimeouts(30.0, 0.1, 10.0, 2.0)
    found = limits_of(beginning.shape(), given, given)
    assert (found.token_s, found.abort_s) == (token_s, abort_s)


@both_ways
async def test_ids_that_are_asked_for_are_told_of_however_unlikely(
    release: str, quirks: Mapping[str, bool], tmp_path: Path
) -> None:
    """What a bias would make of them tells the same: it is the model's own."""
    wanted = (7, 1124, 56)
    sim = Sim(tmp_path, release, quirks=quirks, sampling=GREEDY)
    async with sim.board(tokenizer_file=TOKENS) as board:
        step = Stepwise(7, top_logprobs=2, also=wanted)
        (scored,) = logprobs(await heard(board, asked(max_tokens=1, stepwise=step)))
        assert scored is not None
        assert len(scored.top) <= 2 + len(wanted)
        found = dict(scored.top)
        assert set(wanted) <= set(found)
        for token_id in wanted:
            forced = Stepwise(7, top_logprobs=0, logit_bias=((token_id, 100.0),))
            events = await heard(board, asked(max_tokens=1, stepwise=forced))
            assert ids(events) == [token_id]
            (chosen,) = logprobs(events)
            assert chosen is not None
            assert chosen.logprob == pytest.approx(found[token_id], abs=1e-5)
