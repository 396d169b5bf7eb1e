"""The tree of the client's errors."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest

import rkserve.client
from rkserve.client import (
    CallError,
    Client,
    ClientError,
    Conflict,
    NotAllowed,
    NotFound,
    Operation,
    OperationError,
    OperationUndone,
    Refused,
    ServerFailed,
    Unavailable,
    WaitTimeout,
    errors,
)
from tests.support.cluster.control_clients import (
    PAUSE,
)
from tests.support.cluster.fake_control import FakeControl, error


@pytest.mark.parametrize(
    ("status", "code", "raised"),
    [
        (400, "artifact_refused", Refused),
        (401, "invalid_api_key", NotAllowed),
        (403, "forbidden", NotAllowed),
        (404, "operation_not_found", NotFound),
        (409, "stale_epoch", Conflict),
        (413, "body_too_large", Refused),
        (500, "internal_error", ServerFailed),
        (503, "engine_paused", Unavailable),
        (504, "operation_timeout", OperationUndone),
    ],
)
def test_errors_have_a_class_by_their_status(
    server: FakeControl, client: Client, status: int, code: str, raised: type[CallError]
) -> None:
    server.on(PAUSE, error(status, code, retry_after="4", operation_id="op-9"))
    with pytest.raises(raised) as caught:
        client.pause()
    exc = pickle.loads(pickle.dumps(caught.value))
    assert type(exc) is raised
    assert (exc.status, exc.code, exc.retry_after_s) == (status, code, 4.0)
    assert exc.operation_id == "op-9"
    assert len(server.asked) == 1


def below(kind: type[ClientError]) -> set[str]:
    return {kind.__name__}.union(*(below(one) for one in kind.__subclasses__()))


ERRORS = sorted(below(ClientError))


@pytest.mark.parametrize("name", ERRORS)
def test_every_error_is_of_the_one_tree_and_survives_a_process(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, ClientError)
    assert getattr(rkserve.client, name) is kind
    assert re.search(rf"^ *(\|   )*(\+-- )?{name}\b", errors.__doc__ or "", re.MULTILINE)
    args: tuple[Any, ...] = ("It is said.",)
    if issubclass(kind, CallError):
        args = (409, "stale_epoch", "It is said.", "epoch", 2.0, {"operation_id": "op-1"})
    elif issubclass(kind, OperationError | WaitTimeout):
        ended = Operation("op-1", "pause", "partial", 7, 2, 1)
        args = (ended, 5.0) if kind is WaitTimeout else (ended,)
    again = pickle.loads(pickle.dumps(kind(*args)))
    assert (type(again), again.args, str(again)) == (kind, args, str(kind(*args)))


def test_no_error_is_missing_in_the_package() -> None:
    assert set(ERRORS) <= set(rkserve.client.__all__)
