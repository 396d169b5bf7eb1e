"""The simulated model fills in what a schema asks for: in calls, and where it is held to JSON."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.support.boards.fakes import run_loop
from tests.support.http.tool_talk import Talk, message, user
from tests.support.sim.sim_board import FOLDER, Sim

TOKENS = FOLDER.path / "tokenizer.json"
PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "sky": {"enum": ["sun", "rain"]}},
    "required": ["city", "sky"],
    "additionalProperties": False,
}
SCHEMA = {
    "$defs": {"Place": PLACE},
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "home": {"$ref": "#/$defs/Place"},
        "scores": {"type": "array", "items": {"type": "number"}, "minItems": 2},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "fits": {"type": "boolean"},
    },
    "required": ["name", "age", "home", "scores", "note", "fits"],
    "additionalProperties": False,
}
TREE = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["next"],
    "additionalProperties": False,
}
TEXT = "Please extract. name: Jason, age is 25, then 3 and 4.5 for Oslo"


def talked(body: Callable[[Talk], Awaitable[None]], sim: Sim) -> None:
    async def go() -> None:
        async with sim.board(tokenizer_file=TOKENS) as board:
            await body(Talk(board))

    run_loop(go())


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_json_that_it_is_held_to_is_filled_from_the_prompt(
    tmp_path: Path, temperature: float
) -> None:
    async def filled(talk: Talk) -> None:
        answer, _ = await talk.say(
            messages=[user(TEXT)], response_format=form(SCHEMA), temperature=temperature, seed=3
        )
        found = json.loads(message(answer)["content"])
        jsonschema.validate(found, SCHEMA)
        assert (found["name"], found["age"], found["home"]["city"]) == ("Jason", 25, "Oslo")
        assert found["note"] == "Oslo"
        assert answer["usage"]["completion_tokens"] < 200

    talked(filled, Sim(tmp_path))


def test_a_schema_of_itself_comes_to_an_end(tmp_path: Path) -> None:
    async def ended(talk: Talk) -> None:
        answer, _ = await talk.say(messages=[user("Hello")], response_format=form(TREE))
        jsonschema.validate(json.loads(message(answer)["content"]), TREE)
        assert answer["choices"][0]["finish_reason"] == "stop"

    talked(ended, Sim(tmp_path))


def test_any_object_is_one(tmp_path: Path) -> None:
    async def free(talk: Talk) -> None:
        kind = {"type": "json_object"}
        answer, _ = await talk.say(messages=[user("Hello there")], response_format=kind)
        assert isinstance(json.loads(message(answer)["content"]), dict)
        asked = "A joke, as a JSON with 'setup' and 'punchline' keys"
        answer, _ = await talk.say(messages=[user(asked)], response_format=kind)
        assert set(json.loads(message(answer)["content"])) == {"setup", "punchline"}

    talked(free, Sim(tmp_path))


def test_arguments_of_a_call_fit_a_nested_schema(tmp_path: Path) -> None:
    async def called(talk: Talk) -> None:
        tool = {"type": "function", "function": {"name": "extract", "parameters": SCHEMA}}
        answer, _ = await talk.say(messages=[user(TEXT)], tools=[tool])
        (call,) = message(answer)["tool_calls"]
        found = json.loads(call["function"]["arguments"])
        assert found == {
            "name": "Jason",
            "age": 25,
            "home": {"city": "Oslo", "sky": "sun"},
            "scores": [3],
            "note": "Oslo",
            "fits": True,
        }

    talked(called, Sim(tmp_path))


def test_a_schema_in_the_system_turn_is_filled_in(tmp_path: Path) -> None:
    async def filled(talk: Talk) -> None:
        system = {"role": "system", "content": f"Answer in JSON as in {json.dumps(SCHEMA)}, only."}
        answer, _ = await talk.say(messages=[system, user("A customer named 'Ann Lee', of 40")])
        found = json.loads(message(answer)["content"])
        assert (found["name"], found["age"]) == ("Ann Lee", 40)

    talked(filled, Sim(tmp_path))
