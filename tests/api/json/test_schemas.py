"""Models of request bodies: their errors in OpenAI's words, and their JSON Schemas."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BeforeValidator, Field

from rkserve.api.json.schemas import RequestModel, read_model
from rkserve.core.errors import RequestError


class Colour(Enum):
    """A description that no key has."""

    RED = "red"
    BLUE = "blue"


def refuse(value: object) -> object:
    if value == "never":
        raise RequestError("Not that.", "text")
    return value


class Body(RequestModel):
    """One key of each type."""

    text: Annotated[str, Field(min_length=1, max_length=5), BeforeValidator(refuse)]
    flag: bool = Field(False, alias="async", description="A flag.")
    whole: Annotated[int, Field(ge=1, le=9)] | None = None
    part: Annotated[float, Field(gt=0, le=1)] = 0.5
    free: float | None = None
    mode: Literal["a", "b", "c"] = "a"
    colour: Annotated[Colour, Field(strict=False)] = Colour.RED
    many: list[int] = Field([])
    only: Literal["x"] | None = None


@pytest.mark.parametrize(
    ("given", "message", "param"),
    [
        ({"text": None}, "Missing required parameter: 'text'.", "text"),
        ({"text": ""}, "Invalid 'text': empty string.", "text"),
        (
            {"text": "abcdef"},
            "Invalid 'text': string too long. Expected at most 5 characters, but got 6.",
            "text",
        ),
        ({"text": "never"}, "Not that.", "text"),
        (
            {"text": 1},
            "Invalid type for 'text': expected a string, but got an integer instead.",
            "text",
        ),
        (
            {"async": 1},
            "Invalid type for 'async': expected a boolean, but got an integer instead.",
            "async",
        ),
        (
            {"whole": True},
            "Invalid type for 'whole': expected an integer, but got a boolean instead.",
            "whole",
        ),
        (
            {"whole": 1.0},
            "Invalid type for 'whole': expected an integer, but got a decimal instead.",
            "whole",
        ),
        (
            {"whole": 0},
            "Invalid 'whole': below minimum value. Expected a value >= 1, but got 0.",
            "whole",
        ),
        (
            {"whole": 10},
            "Invalid 'whole': above maximum value. Expected a value <= 9, but got 10.",
            "whole",
        ),
        (
            {"part": 0},
            "Invalid 'part': below minimum value. Expected a value > 0, but got 0.",
            "part",
        ),
        (
            {"part": "x"},
            "Invalid type for 'part': expected a number, but got a string instead.",
            "part",
        ),
        ({"free": 10**400}, "Invalid 'free': too large for a number.", "free"),
        (
            {"mode": "d"},
            "Invalid 'mode': 'd'. Supported values are: 'a', 'b', 'c'.",
            "mode",
        ),
        (
            {"mode": 4},
            "Invalid type for 'mode': expected a string, but got an integer instead.",
            "mode",
        ),
        (
            {"colour": "green"},
            "Invalid 'colour': 'green'. Supported values are: 'red', 'blue'.",
            "colour",
        ),
        (
            {"many": [1, "x"]},
            "Invalid type for 'many[1]': expected an integer, but got a string instead.",
            "many[1]",
        ),
        (
            {"flag": None},
            "Unknown parameter: 'flag'. Known are: async, colour, free, many, mode, only, part, "
            "text, whole.",
            "flag",
        ),
    ],
)
def test_an_error_names_the_parameter_and_its_limit(
    given: dict[str, Any], message: str, param: str
) -> None:
    with pytest.raises(RequestError) as refused:
        read_model(Body, {"text": "x", **given})
    assert (str(refused.value), refused.value.param) == (message, param)


def test_null_is_absent() -> None:
    found = read_model(Body, {"text": "x", "async": None, "mode": None, "many": None})
    assert (found.flag, found.mode, found.many, found.part) == (False, "a", [], 0.5)


def test_the_schema_of_each_key_has_its_bounds_and_its_description() -> None:
    assert Body.needed() == ("text",)
    assert Body.properties() == {
        "text": {"type": "string", "minLength": 1, "maxLength": 5},
        "async": {"type": "boolean", "description": "A flag."},
        "whole": {"type": "integer", "minimum": 1, "maximum": 9},
        "part": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
        "free": {"type": "number"},
        "mode": {"type": "string", "enum": ["a", "b", "c"]},
        "colour": {"type": "string", "enum": ["red", "blue"]},
        "many": {"type": "array", "items": {"type": "integer"}},
        "only": {"type": "string", "enum": ["x"]},
    }
