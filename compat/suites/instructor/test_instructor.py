"""instructor, in each of its modes that servers as OpenAI's have."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
import pytest
from pydantic import BaseModel
from scene import CHAT, KEY, V1, user

TEXT = "Extract it. name: Jason, age: 25"
JASON = {"name": "Jason", "age": 25}


class User(BaseModel):
    """Somebody."""

    name: str
    age: int


class Label(BaseModel):
    """What it is."""

    kind: Literal["spam", "mail"]
    words: list[str]


MODES = [
    instructor.Mode.TOOLS,
    instructor.Mode.TOOLS_STRICT,
    instructor.Mode.JSON,
    instructor.Mode.JSON_SCHEMA,
    instructor.Mode.MD_JSON,
    instructor.Mode.RESPONSES_TOOLS,
]


def connection(kind: Any = openai.OpenAI) -> Any:
    """OpenAI's client."""
    return kind(base_url=V1, api_key=KEY, max_retries=0, timeout=60)


@pytest.fixture(params=MODES, ids=lambda mode: mode.name)
def client(request: pytest.FixtureRequest) -> instructor.Instructor:
    """instructor around it."""
    return instructor.from_openai(connection(), mode=request.param)


def test_a_model_is_filled(client: instructor.Instructor) -> None:
    found = client.create(model=CHAT, messages=user(TEXT), response_model=User, max_retries=0)
    assert found.model_dump() == JASON


def test_a_choice_and_a_list_are_filled(client: instructor.Instructor) -> None:
    found = client.create(
        model=CHAT, messages=user("Classify this mail"), response_model=Label, max_retries=0
    )
    assert isinstance(found, Label)


def test_the_raw_answer_comes_along(client: instructor.Instructor) -> None:
    found, raw = client.create_with_completion(
        model=CHAT, messages=user(TEXT), response_model=User, max_retries=0
    )
    assert found.name == "Jason"
    assert raw.id


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_a_model_is_streamed_in_parts(mode: instructor.Mode) -> None:
    client = instructor.from_openai(connection(), mode=mode)
    parts = list(client.create_partial(model=CHAT, messages=user(TEXT), response_model=User))
    assert parts[-1].model_dump() == JASON
    assert len(parts) > 1


def test_several_models_are_streamed() -> None:
    client = instructor.from_openai(connection(), mode=instructor.Mode.TOOLS)
    found: Iterable[User] = client.create_iterable(
        model=CHAT, messages=user(TEXT), response_model=User
    )
    assert [one.model_dump() for one in found] == [JASON]


def test_the_async_client_fills_a_model() -> None:
    async def filled() -> User:
        client = instructor.from_openai(connection(openai.AsyncOpenAI), mode=instructor.Mode.TOOLS)
        return await client.create(model=CHAT, messages=user(TEXT), response_model=User)

    assert asyncio.run(filled()).model_dump() == JASON
