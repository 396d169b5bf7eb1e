"""Operations of a Router on a real Coordinator: pauses, repeated, shown and undone."""

from __future__ import annotations

from pathlib import Path

import pytest

from rkserve.control.calls import ResumeAction
from rkserve.control.operations import ControlError, ControlOperation, OperationOutcome
from rkserve.router.features.operations import made
from tests.support.cluster.fake_cluster import Control
from tests.support.http.coordinator_house import BOARDS, Ask, with_both


def test_a_pause_is_made_repeated_shown_and_ended(tmp_path: Path) -> None:
    async def work(ask: Ask, control: Control) -> None:
        once = {"headers": {"idempotency-key": "once"}, "json": {"mode": "keep", "lease_s": 60}}
        first = await ask("POST", "/pause", **once)
        assert first.status_code == 200, first.text
        assert control.held == ["a", "b"]
        assert first.json()["results"].keys() == {"a", "b"}
        again = (await ask("POST", "/pause", **once)).json()
        assert again["applied"] is False
        assert again["operation_id"] == first.json()["operation_id"]
        told = (await ask("GET", "/is_paused")).json()
        assert (told["is_paused"], told["all"], told["epoch"]) == (True, True, again["epoch"])
        assert (await ask("GET", "/v1/cluster")).json()["total"]["paused_boards"] == len(BOARDS)
        stale = await ask("POST", "/resume", json={"epoch": again["epoch"] - 1})
        assert stale.status_code == 409
        assert stale.json()["error"]["code"] == "stale_epoch"
        assert (await ask("POST", "/resume")).json()["status"] == "resumed"
        assert control.held == []
        listed = (await ask("GET", "/v1/operations")).json()["data"]
        assert {entry["kind"] for entry in listed} == {"pause", "resume"}
        one = await ask("GET", f"/v1/operations/{first.json()['operation_id']}")
        assert one.json()["idempotency_key"] == "once"
        lines = (await ask("GET", "/v1/audit")).json()["data"]
        assert {line["who"] for line in lines} == {"local 127.0.0.1"}

    with_both(tmp_path, work)


def test_a_board_that_is_silent_undoes_the_pause_of_the_other(tmp_path: Path) -> None:
    async def work(ask: Ask, control: Control) -> None:
        control.cluster["b"].slow_s["adopt"] = 100.0
        response = await ask("POST", "/pause", json={"timeout_s": 0.3})
        assert response.status_code == 504, response.text
        assert response.json()["error"]["code"] == "operation_timeout"
        control.cluster["b"].slow_s.clear()
        assert not control.desired.pauses
        assert (await ask("GET", "/is_paused")).json()["is_paused"] is False

    with_both(tmp_path, work)


@pytest.mark.parametrize(
    ("status", "headers"),
    [(200, {}), (207, {}), (409, {}), (503, {"retry-after": "3"}), (504, {})],
)
def test_a_change_that_a_board_has_failed_says_when_to_come_back(
    status: int, headers: dict[str, str]
) -> None:
    failed = ControlError(status, "board_failed", "Board b is out of order.")
    error = failed if status >= 400 else None
    operation = ControlOperation("op-1", ResumeAction(), error=error)
    answer = made({}, OperationOutcome(status, operation))
    assert (answer.status, answer.headers) == (status, headers)
