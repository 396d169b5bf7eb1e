"""The routes that bring other weights in: the peers' words, and what the Coordinator is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from rkserve.config.router import RouterConfig
from rkserve.core.desired_state import Desired, Weights
from tests.support.boards.fake_boards import FakeBoards, report
from tests.support.cluster.fake_head import FakeHead
from tests.support.http.router_house import House
from tests.support.http.weights_house import (
    BASE,
    DISK,
    MODEL,
    UPDATE,
    WEIGHTS,
    house,
    request,
    send,
)


@pytest.mark.parametrize("path", [UPDATE, DISK, WEIGHTS])
def test_changes_are_for_the_operator(path: str) -> None:
    of = House(
        FakeBoards.answering("a"),
        head=FakeHead(),
        config=RouterConfig(admin_key=SecretStr("right")),
    )
    assert send(of, "POST", path, json=request()).status_code == 403
    assert of.head.asked == []


def test_weight_info_tells_base_and_boards() -> None:
    weights = Weights(MODEL, "step-7", 7, BASE)
    told = send(house(desired=Desired(weights=(weights,))), "GET", "/weight_info").json()
    assert told["weight_version"] == "step-7"
    entry = told["models"][MODEL]
    assert entry["base"]["digest"] == BASE.digest
    assert entry["boards"]["a"]["weight_version"] == "default"


@pytest.mark.parametrize(
    ("path", "figure"),
    [
        ("/weight_info", lambda told: told["models"][MODEL]["boards"]["a"]["base"]),
        ("/v1/cluster", lambda told: told["boards"][0]["base"]),
    ],
)
async def test_after_an_update_no_figure_is_older_than_it_on_any_router(
    path: str, figure: Callable[[Any], str]
) -> None:
    of = house()
    await of("GET", path)  # this Router has heard everybody
    # Another Router has updated the weights, and has answered.
    of.head.desired = Desired(1, weights=(Weights(MODEL, "step-7", 7, BASE),))
    of.boards.reported = [report("a", base=BASE.digest)]
    transport = httpx.ASGITransport(of.app, client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        told = (await client.get(path)).json()
    assert figure(told) == BASE.digest
    entry = told["models"][MODEL]
    assert (told["epoch"], entry["weight_version"], entry["step"]) == (1, "step-7", 7)


async def test_without_the_coordinator_the_boards_are_still_asked() -> None:
    of = house()
    await of("GET", "/weight_info")
    of.head.away = True
    of.boards.reported = [report("a", base=BASE.digest)]
    told = (await of("GET", "/weight_info")).json()
    assert told["models"][MODEL]["boards"]["a"]["base"] == BASE.digest
