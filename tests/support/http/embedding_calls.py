"""Calls for embeddings of a Router without Ray."""

from __future__ import annotations

import math
from array import array
from typing import Any

from tests.support.boards.embedding_boards import MODEL, VectorBoards, embed_house, model
from tests.support.http.router_house import House, send

PATH = "/v1/embeddings"


def ids_of(text: str) -> tuple[int, ...]:
    return model().renderer.counted(text, special=True)


def unit(values: array[float]) -> list[float]:
    length = math.sqrt(sum(value * value for value in values))
    return [value / length for value in values]


def post(of: House | None = None, **body: Any) -> Any:
    return send(
        of or embed_house(VectorBoards.of("a")), "POST", PATH, json={"model": MODEL, **body}
    )


def floats(answer: Any) -> list[list[float]]:
    return [one["embedding"] for one in answer.json()["data"]]
