"""Routing requests that wait for a board."""

from __future__ import annotations

from typing import Any

import pytest

from rkserve.core.messages import (
    GenerateRequest,
)
from rkserve.fleet.load import PauseEffect
from rkserve.router.policies import RoutingRequest
from tests.support.routing import (
    ask,
    boards,
    join,
)

# -- asks -----------------------------------------------------------------------------------------


def test_a_prompt_without_ids_is_only_guessed_at() -> None:
    request = GenerateRequest("r", "m", (), 64, prompt_text="word " * 100)
    asked = RoutingRequest.of(request)
    assert (asked.chain, asked.prompt_tokens) == (None, 125)


def test_how_long_one_waits_counts_from_its_first_question() -> None:
    one = ask()
    assert one.waited_ms(5.0) == 0
    assert one.waited_ms(7.5) == 2500


@pytest.mark.parametrize(
    ("now_s", "change", "waits"),
    [
        pytest.param(0.9, {}, True, id="it is still taken"),
        pytest.param(1.1, {}, False, id="a second later it is asked anew whether that pays"),
        pytest.param(0.5, {"running": 0}, False, id="it has a place"),
        pytest.param(0.5, {"ready": False}, False, id="it is not ready any more"),
        pytest.param(0.5, {"held": PauseEffect.QUEUES}, False, id="it is held"),
    ],
)
def test_one_that_waits_for_a_board_asks_again_when_that_has_changed(
    now_s: float, change: dict[str, Any], waits: bool
) -> None:
    known, one = boards(), ask()
    assert not one.waits(0.0)
    one.wait_for(join(known, "a", running=1), 5000.0, 0.0)
    join(known, "a", **{"running": 1, **change})
    assert one.waits(now_s) is waits
    one.tried = {"a"}
    assert not one.waits(now_s)
