"""A measured board beside the figures for its SoC and model, and beside its peers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rkserve.control.operations import BoardOutcome, ResultStatus
from rkserve.core.board_report import BoardReport
from tests.support.boards.fake_boards import FakeBoards, report
from tests.support.boards.own_time import run_loop
from tests.support.cluster.fake_head import FakeHead
from tests.support.http.router_house import House
from tests.support.values.cluster_facts import HEALTHY

FIGURES = {"prefill_tokens_per_s": 80.0, "decode_tokens_per_s": 6.0, "tokens": 64}


def rock(name: str, tokens: int = 0, ms: float = 0.0) -> BoardReport:
    """A board whose SoC and model have a published speed, and that has decoded so much."""
    made = report(name, platform="RK3588", hardware=HEALTHY, own_bytes=2_000_000_000)
    return replace(made, decode_tokens=tokens, decode_ms=ms)


def measured(*others: float) -> Any:
    """Measure board a beside others that have decoded at these speeds in the last minutes."""
    names = [f"b{at}" for at in range(len(others))]
    boards = FakeBoards([rock("a"), *(rock(name) for name in names)])
    head = FakeHead(results={"a": BoardOutcome(ResultStatus.OK, 10.0, details=FIGURES)})
    of = House(boards, head=head)

    async def main() -> Any:
        await of.service.fleet.refresh()
        of.view.sample()
        boards.reported[1:] = [
            rock(name, 6000, 6000 * 1e3 / speed) for name, speed in zip(names, others, strict=True)
        ]
        await of.service.fleet.refresh()
        of.view.sample()
        return await of("POST", "/v1/boards/a/measure", json={})

    answer = run_loop(main())
    assert answer.status_code == 200, answer.text
    (call,) = of.head.calls
    assert call.params["boards"] == ["a"]
    return answer.json()


def test_a_board_is_judged_by_its_soc_and_model() -> None:
    found = measured()
    assert found["expected"]["basis"].startswith("estimated from 2000 MB")
    assert found["ratio"] == round(6.0 / found["expected"]["decode_tokens_per_s"], 3)
    assert found["peers"] is None


def test_a_board_is_judged_by_its_peers_where_two_of_them_have_worked() -> None:
    assert measured(12.0)["peers"] is None
    found = measured(12.0, 10.0)
    assert found["peers"] == {
        "decode_tokens_per_s": 11.0,
        "least_tokens_per_s": 8.8,
        "basis": "the median of 2 other boards of its SoC and model",
    }
    assert (found["verdict"], found["status"]) == ("slow", "measured")
