"""A Router without Ray that stores responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rkserve.config.router import RouterConfig
from tests.support.boards.fake_boards import (
    FakeBoards,
    Step,
    answer,
    report,
)
from tests.support.http.router_house import House, send

ROUTE = "/v1/responses"

ABSENT = f"resp_{'0' * 32}"

Keys = dict[str, str]


def storing(folder: Path, *steps: Step, **config: Any) -> House:
    """A Router that stores, on a board that says what the steps say, or "Hello"."""
    boards = FakeBoards([report("a")], {"replica of a": [steps or answer("a", "Hel", "lo")]})
    return House(boards, RouterConfig(**config), kept=folder)


def ask(of: House, text: Any = "Hello", keys: Keys | None = None, **body: Any) -> Any:
    body = {"model": "sim-chat", "input": text, **body}
    response = send(of, "POST", ROUTE, json=body, headers=keys)
    assert response.status_code == 200, response.text
    return response.json()


def error(response: Any) -> tuple[int, str | None, str | None]:
    told = response.json()["error"]
    return response.status_code, told["code"], told["param"]


def streamed(text: str) -> list[dict[str, Any]]:
    assert text.endswith("\n\ndata: [DONE]\n\n")
    text = text.removesuffix("data: [DONE]\n\n")
    return [json.loads(one.partition("data: ")[2]) for one in text.split("\n\n") if "data: " in one]
