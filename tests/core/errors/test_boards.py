"""Errors of boards and of queues for them: what clients can rely on."""

from __future__ import annotations

import pytest

from rkserve.api.common.output import DONE, broken_stream, error_object
from rkserve.core import errors
from rkserve.core.errors import RkserveError


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(
            errors.QueueFull(3, 7), (429, "rate_limit_error", None, "queue_full", "7"), id="full"
        ),
        pytest.param(
            errors.NoBoard("m", "none", 9),
            (503, "overloaded_error", None, "no_board", "9"),
            id="no board",
        ),
        pytest.param(
            errors.EngineDied("b", "x"), (503, "server_error", None, "board_failed", "1"), id="died"
        ),
    ],
)
def test_clients_can_rely_on(error: RkserveError, said: tuple[object, ...]) -> None:
    status, headers, body = error_object(error)
    got = body["error"]
    retry_after = headers.get("retry-after")
    assert (status, got["type"], got["param"], got["code"], retry_after) == said


def test_a_stream_ends_with_the_same_object_as_an_event() -> None:
    told = broken_stream(errors.EngineDied("board-1", "signal 11"))
    event = told.removesuffix(DONE).decode()
    assert event.startswith('data: {"error":{"message":"Board board-1 failed')
    assert event.endswith("\n\n")
    assert event.count("\n") == 2
