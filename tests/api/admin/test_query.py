"""Parameters of the control API: a query and a body as one object, and what is refused."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

import pytest
from pydantic import Field

from rkserve.api.admin.query import ControlRequest, ListQuery, ParameterKind, kinds_of, read_key
from rkserve.api.json.schemas import RequestModel
from rkserve.core.errors import RequestError


class Colour(Enum):
    """A description that no key has."""

    RED = "red"
    BLUE = "blue"


class Body(RequestModel):
    """One key of each type."""

    text: Annotated[str, Field(min_length=1, max_length=5)]
    flag: bool = Field(False, alias="async", description="A flag.")
    whole: Annotated[int, Field(ge=1, le=9)] | None = None
    part: Annotated[float, Field(gt=0, le=1)] = 0.5
    free: float | None = None
    mode: Literal["a", "b", "c"] = "a"
    colour: Annotated[Colour, Field(strict=False)] = Colour.RED
    many: list[int] = Field([])
    only: Literal["x"] | None = None


def test_types_decide_how_texts_in_a_query_are_read() -> None:
    kinds = kinds_of(Body)
    assert {kinds[name] for name in ("text", "mode", "colour")} == {ParameterKind.TEXT}
    assert {kinds[name] for name in ("whole", "part", "free")} == {ParameterKind.NUMBER}
    assert (kinds["async"], kinds["many"]) == (ParameterKind.FLAG, ParameterKind.JSON)
    query = (("text", "7"), ("async", "1"), ("whole", "7"), ("colour", "blue"), ("many", "[1, 2]"))
    found = ControlRequest(query, b'{"mode": "b"}').read(Body)
    assert (found.text, found.flag, found.whole) == ("7", True, 7)
    assert (found.colour, found.many, found.mode) == (Colour.BLUE, [1, 2], "b")


@pytest.mark.parametrize(
    ("query", "body", "param", "says"),
    [
        ((("limit", "1"),), b'{"limit": 2}', "limit", "in the query and in the body"),
        ((("limit", "1"), ("limit", "2")), b"", "limit", "2 times"),
        ((("limit", "few"),), b"", "limit", "expected a number"),
        ((("limits", "1"),), b"", "limits", "Unknown parameter"),
        ((), b'{"limits": 1}', "limits", "Unknown parameter"),
        ((("limit", "0"),), b"", "limit", "Expected a value >= 1"),
    ],
)
def test_what_no_call_can_mean_is_refused(
    query: tuple[tuple[str, str], ...], body: bytes, param: str, says: str
) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        ControlRequest(query, body).read(ListQuery)
    assert caught.value.param == param


def test_an_idempotency_key_is_printable() -> None:
    assert (read_key(None), read_key("a-key_1")) == (None, "a-key_1")
    for key in ("", "two words", "é", "x" * 201):
        with pytest.raises(RequestError, match="Idempotency-Key"):
            read_key(key)
