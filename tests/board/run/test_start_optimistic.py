"""Answers with a grammar that the library generates itself as far as it keeps to the grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from rkserve.core.messages import FinishReason
from rkserve.core.run_params import Guide, Guided, GuideKind, Sampling, Stepwise
from tests.board.run.test_start_steps import TOKENS, asked, end, heard, ids, text, until_paused
from tests.support.sim.sim_board import GREEDY, Sim, both_releases, chat

LIVELY = Sampling(temperature=1.2, top_p=1.0, top_k=50, repeat_penalty=1.0)
RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["sea", "lake"]},
        "depth": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["name", "kind", "depth"],
    "additionalProperties": False,
}
# What it is asked to say, which it does as long as nobody puts other words into its answer.
GOOD = '{"name": "Oslo", "kind": "sea", "depth": 12}'
STRAYS = '{"name": "Oslo", "kind": "river", "depth": 12}'
PROSE = "Rain on the hills and on the sea"


def schema(value: Any) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(value))


def saying(said: str, guide: Guide, **changes: Any) -> Any:
    changes = {"max_tokens": 200, **changes}
    wanted = asked(stepwise=Stepwise(3, guide=guide, free=True), **changes)
    return replace(wanted, prompt_ids=chat(f"Repeat after me: {said}"))


def sims(place: Path, release: str, quirks: Mapping[str, bool] | None = None) -> Sim:
    return Sim(place, release, quirks=quirks or {}, sampling=GREEDY)


@both_releases
@pytest.mark.parametrize("said", [GOOD, STRAYS, PROSE], ids=["keeps to it", "strays", "never"])
async def test_what_the_library_says_follows_the_grammar_all_the_same(
    tmp_path: Path, release: str, said: str
) -> None:
    sim = sims(tmp_path, release)
    async with sim.board(tokenizer_file=TOKENS) as board:
        events = await heard(board, saying(said, schema(RECORD)))
        steps = sim.tap.commands[-1].steps
        assert steps is not None
        assert steps.optimistic
        assert end(events).reason is FinishReason.STOP
        jsonschema.validate(json.loads(text(events)), RECORD)
        if said == GOOD:
            assert text(events) == GOOD
        if said == STRAYS:
            assert text(events).startswith('{"name": "Oslo", "kind": "')
        # The board is as it was: the next answer is the library's own, and whole.
        plain = await heard(board, replace(saying(PROSE, schema({})), stepwise=None))
        assert text(plain) == PROSE
        assert board.report().engine_starts == 1


@pytest.mark.parametrize("seed", range(6))
async def test_draws_of_the_library_follow_the_grammar(tmp_path: Path, seed: int) -> None:
    guide = Guide(GuideKind.REGEX, r"([A-Z][a-z]{1,9} ){2,6}[0-9]{2}\.")
    async with sims(tmp_path, "1.3.0").board(tokenizer_file=TOKENS) as board:
        prompt = chat(f"Tell me about the sea, for the {seed}th time")
        wanted = replace(saying("", guide, sampling=LIVELY), prompt_ids=prompt)
        for _ in range(3):
            events = await heard(board, wanted)
            assert re.fullmatch(r"([A-Z][a-z]{1,9} ){2,6}[0-9]{2}\.", text(events))
            assert end(events).reason is FinishReason.STOP


@both_releases
async def test_a_limit_cuts_it_where_it_is(tmp_path: Path, release: str) -> None:
    async with sims(tmp_path, release).board(tokenizer_file=TOKENS) as board:
        whole = text(await heard(board, saying(STRAYS, schema(RECORD))))
        for most in (1, 2, 7, 11):
            events = await heard(board, saying(STRAYS, schema(RECORD), max_tokens=most))
            assert len(ids(events)) == most
            assert end(events).reason is FinishReason.LENGTH
            assert whole.startswith(text(events))


@both_releases
async def test_it_pauses_and_goes_on_within_its_grammar(tmp_path: Path, release: str) -> None:
    async with sims(tmp_path, release).board(tokenizer_file=TOKENS) as board:
        wanted = saying(STRAYS, schema(RECORD))
        whole = await heard(board, wanted)
        for at in (1, 4, 9):
            pausing = replace(wanted, pause_on_ids=(ids(whole)[at],))
            again, pauses = await until_paused(board, pausing)
            assert pauses
            jsonschema.validate(json.loads(text(again)), RECORD)
        assert board.report().engine_starts == 1


async def test_who_hangs_up_frees_the_board(tmp_path: Path) -> None:
    long = Guide(GuideKind.REGEX, "[a-zA-Z .,]{2000}")
    async with sims(tmp_path, "1.3.0").board(tokenizer_file=TOKENS) as board:
        stream = board.generate(
            replace(asked(), stepwise=Stepwise(1, guide=long, free=True), max_tokens=900)
        )
        got = 0
        async for _ in stream:
            got += 1
            if got > 3:
                break
        await stream.aclose()
        assert text(await heard(board, saying(GOOD, schema(RECORD)))) == GOOD
        assert board.report().engine_starts == 1


@pytest.mark.parametrize(
    ("guided", "quirks", "changes", "optimistic"),
    [
        pytest.param(Guided.AUTO, {}, {}, True, id="auto"),
        pytest.param(Guided.AUTO, {"logits_with_history": True}, {}, False, id="steps are cheap"),
        pytest.param(
            Guided.OPTIMISTIC, {"logits_with_history": True}, {}, True, id="it was asked for"
        ),
        pytest.param(Guided.STEPS, {}, {}, False, id="steps were asked for"),
        pytest.param(Guided.OPTIMISTIC, {}, {"free": False}, False, id="the request needs steps"),
        pytest.param(
            Guided.OPTIMISTIC,
            {"waiting_token_id_valid": False},
            {},
            False,
            id="not all tokens are told",
        ),
    ],
)
async def test_which_answers_are_left_to_the_library(
    tmp_path: Path, guided: Guided, quirks: dict[str, bool], changes: Any, optimistic: bool
) -> None:
    sim = sims(tmp_path, "1.3.0", quirks)
    async with sim.board(tokenizer_file=TOKENS, guided=guided) as board:
        wanted = saying(GOOD, schema(RECORD))
        assert wanted.stepwise is not None
        wanted = replace(wanted, stepwise=replace(wanted.stepwise, **changes))
        said = text(await heard(board, wanted))
        jsonschema.validate(json.loads(said), RECORD)
        steps = sim.tap.commands[-1].steps
        assert steps is not None
        assert steps.optimistic is optimistic
        # Steps spell by the longest pieces what has to come, and the model by its own.
        assert not optimistic or said == GOOD


async def test_a_library_that_draws_otherwise_than_was_asked_for_takes_steps(
    tmp_path: Path,
) -> None:
    sim = sims(tmp_path, "1.2.3")
    async with sim.board(tokenizer_file=TOKENS, guided=Guided.OPTIMISTIC) as board:
        await heard(board, saying(GOOD, schema(RECORD), sampling=LIVELY))
        steps = sim.tap.commands[-1].steps
        assert steps is not None
        assert not steps.optimistic
