"""Stored responses, and the answers about them.

The ID of each item contains that of its response, so that an item reference is resolved without an
index.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from rkserve.api.common.parameters import OpenModel
from rkserve.api.json.fields import JsonObject, quoted
from rkserve.api.json.schemas import RequestModel
from rkserve.api.responses.answers import PREFIX
from rkserve.core.errors import ItemNotFound, RequestError

_ID = re.compile(rf"{PREFIX}[0-9a-f]{{32}}")
_ITEM = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})_i?[0-9]{1,6}")
_IDS = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_PARTS = {"assistant": {"type": "output_text", "annotations": []}}
_LIMIT, _MOST = 20, 100  # OpenAI's


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A stored response, which continues ``previous``.

    ``items`` are those of its own input. ``size`` in bytes is set when it was read.
    """

    id: str
    previous: str | None
    items: tuple[JsonObject, ...]
    response: JsonObject
    size: int = 0

    @property
    def conversation(self) -> list[JsonObject]:
        """The items that the response adds to a conversation."""
        return [*self.items, *self.response["output"]]


class ResponseItems(TypedDict):
    """The items of a stored response's input."""

    object: Literal["list"]
    data: list[JsonObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class ResponseDeleted(TypedDict):
    """A stored response that is gone."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class LookupQuery(RequestModel):
    """The query of GET /v1/responses/{response_id}."""

    stream: Literal["false", "0", ""] = Field(
        "false", description="Only `false`: what is over cannot be streamed again."
    )


def _whole(value: object) -> object:
    """Return the number of a text with as few digits as there may be; other values unchanged."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value) if len(value) <= len(str(_MOST)) else value
    return value


class ItemsQuery(OpenModel):
    """The query of a list of items."""

    after: str | None = Field(None, description="The id of an item: the list begins behind it.")
    limit: Annotated[int, Field(ge=1, le=_MOST), BeforeValidator(_whole)] = Field(
        _LIMIT, description="How many; the default is 20."
    )
    order: Literal["asc", "desc"] = Field("desc", description="The default is `desc`.")

    def page(self, items: Sequence[JsonObject]) -> ResponseItems:
        """Return the requested part. Raises ``RequestError``: there is no item ``after``."""
        listed = list(items) if self.order == "asc" else list(reversed(items))
        if self.after is not None:
            ids = [item["id"] for item in listed]
            if self.after not in ids:
                raise RequestError(
                    f"Invalid 'after': there is no item {quoted(self.after)}.", "after"
                )
            listed = listed[ids.index(self.after) + 1 :]
        shown = listed[: self.limit]
        return {
            "object": "list",
            "data": shown,
            "first_id": shown[0]["id"] if shown else None,
            "last_id": shown[-1]["id"] if shown else None,
            "has_more": len(listed) > len(shown),
        }


def is_response_id(text: str) -> bool:
    """Return whether a text is a valid response ID."""
    return _ID.fullmatch(text) is not None


def response_of(item_id: str) -> str:
    """Return the response ID of an item. Raises ``ItemNotFound``."""
    if (found := _ITEM.fullmatch(item_id)) is None:
        raise ItemNotFound(item_id)
    return f"{PREFIX}{found[1]}"


def find_item(kept: StoredResponse, item_id: str) -> JsonObject:
    """Return an item of a response. Raises ``ItemNotFound``."""
    for item in kept.conversation:
        if item["id"] == item_id:
            return item
    raise ItemNotFound(item_id)


def input_items(items: Iterable[JsonObject], response_id: str) -> tuple[JsonObject, ...]:
    """Return the items of an input in OpenAI's form, with IDs."""
    unique = response_id.removeprefix(PREFIX)
    return tuple(_listed(item, f"{unique}_i{at}") for at, item in enumerate(items))


def _listed(item: JsonObject, place: str) -> JsonObject:
    kind = item.get("type") or "message"
    result: JsonObject = {
        **item,
        "id": f"{_IDS[kind]}_{place}",
        "type": kind,
        "status": "completed",
    }
    if kind == "message" and isinstance(item.get("content"), str):
        part = _PARTS.get(item["role"], {"type": "input_text"})
        result["content"] = [{**part, "text": item["content"]}]
    return result


def deleted(response_id: str) -> ResponseDeleted:
    """Return the answer of a DELETE."""
    return {"id": response_id, "object": "response", "deleted": True}


def check_lookup(query: Sequence[tuple[str, str]]) -> None:
    """Refuse unsupported parameters of a GET of a response. Raises ``RequestError``."""
    for name, value in query:
        if name == "stream" and value.lower() not in {"false", "0", ""}:
            raise RequestError("A response that is over cannot be streamed again.", "stream")
