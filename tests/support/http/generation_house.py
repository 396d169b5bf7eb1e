"""Boards with generations behind a Router without Ray."""

from __future__ import annotations

from typing import Any

from rkserve.core.board_report import GenerationInfo, GenerationState
from rkserve.core.errors import (
    GenerationNotFound,
)
from rkserve.core.messages import ControlAction, Edit, Kv
from tests.support.boards.fake_boards import (
    FakeBoards,
    report,
)
from tests.support.http.router_house import House

ID = "chatcmpl-1"

GENERATIONS = "/v1/generations"

S = GenerationState


def info(choice: int = 0, board: str = "a", state: S = S.PAUSED, **rest: Any) -> GenerationInfo:
    """A generation of the answer ``ID``."""
    known: dict[str, Any] = {
        "prompt_tokens": 5,
        "tokens": 3,
        "context_tokens": 8,
        "kv_positions": 7,
        "partial_output": "Hello",
        "kv": Kv.KEPT,
    }
    return GenerationInfo(f"{ID}/{choice}", board, "sim-chat", state, **{**known, **rest})


def house_of(*boards: str, **says: Any) -> House:
    """Boards that have nothing to say but this, ``b_control=...`` for what b says to control."""
    found = FakeBoards([report(b) for b in boards])
    found.says = {("", "generations"): [], ("", "control"): GenerationNotFound(ID)}
    for key, said in says.items():
        board, _, method = key.partition("_")
        found.says[f"replica of {board}", method] = said
    return House(found)


def controls(house: House) -> list[tuple[str, tuple[Any, ...]]]:
    """Who was asked to do what."""
    return [
        (replica[-1], args) for replica, method, args in house.boards.asked if method == "control"
    ]


async def edited(body: Any, said: Any = None) -> tuple[House, Any]:
    """Edit a generation that is paused on board a."""
    house = house_of("a", a_generations=[info()], a_control=[info()] if said is None else said)
    sent = {"content": body} if isinstance(body, bytes) else {"json": body}
    return house, await house("POST", f"{GENERATIONS}/{ID}/edit", **sent)


def edit_sent(house: House) -> Edit:
    """What the board was asked to do."""
    ((_, (generation, action, edit, choice)),) = controls(house)
    assert (generation, action, choice) == (ID, ControlAction.EDIT, None)
    assert isinstance(edit, Edit)
    return edit
