"""Errors of control calls and of the Coordinator: what clients can rely on."""

from __future__ import annotations

import pytest

from rkserve.api.common.output import error_object
from rkserve.core import errors
from rkserve.core.errors import RkserveError

INVALID = "invalid_request_error"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        pytest.param(
            errors.OperationConflict("x"),
            (409, INVALID, None, "operation_conflict", None),
            id="conflict",
        ),
        pytest.param(
            errors.StaleEpoch("x"), (409, INVALID, None, "stale_epoch", None), id="stale epoch"
        ),
        pytest.param(
            errors.ArtifactRefused("x", "sha256"),
            (400, INVALID, "sha256", "artifact_refused", None),
            id="refused artifact",
        ),
        pytest.param(
            errors.EnginePaused("the cluster", 7),
            (503, "server_error", None, "engine_paused", "7"),
            id="paused",
        ),
        pytest.param(
            errors.OperationTimeout("x"),
            (504, "server_error", None, "operation_timeout", None),
            id="timeout",
        ),
    ],
)
def test_clients_can_rely_on(error: RkserveError, said: tuple[object, ...]) -> None:
    status, headers, body = error_object(error)
    got = body["error"]
    retry_after = headers.get("retry-after")
    assert (status, got["type"], got["param"], got["code"], retry_after) == said


def test_a_board_that_is_left_out_counts_as_a_failed_board() -> None:
    for error in (
        errors.BoardBehind("b", "it obeys epoch 3"),
        errors.BoardAsleep("b", "its model is unloaded"),
        errors.StageFailed("b", "no space left"),
        errors.RebaseFailed("b", "the trial failed"),
    ):
        assert isinstance(error, errors.BoardFailed)
        assert error.board_id == "b"
