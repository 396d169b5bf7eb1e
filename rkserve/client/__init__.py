"""Drive a cluster from a program: pause it, roll adapters out, look at it. See docs/client.md."""

from __future__ import annotations

from rkserve.client.answers import BoardFailure, BoardResult, IsPaused, Operation, Pushed
from rkserve.client.asynchronous import AsyncClient
from rkserve.client.errors import (
    CallError,
    ClientError,
    Conflict,
    LeaseLost,
    NotAllowed,
    NotFound,
    OperationError,
    OperationFailed,
    OperationUndone,
    PartlyDone,
    Refused,
    ServerFailed,
    SourceFailed,
    Unavailable,
    UnexpectedAnswer,
    Unreachable,
    WaitTimeout,
)
from rkserve.client.flows import Progress
from rkserve.client.lease import Lease
from rkserve.client.sync import Client

__all__ = [
    "AsyncClient",
    "BoardFailure",
    "BoardResult",
    "CallError",
    "Client",
    "ClientError",
    "Conflict",
    "IsPaused",
    "Lease",
    "LeaseLost",
    "NotAllowed",
    "NotFound",
    "Operation",
    "OperationError",
    "OperationFailed",
    "OperationUndone",
    "PartlyDone",
    "Progress",
    "Pushed",
    "Refused",
    "ServerFailed",
    "SourceFailed",
    "Unavailable",
    "UnexpectedAnswer",
    "Unreachable",
    "WaitTimeout",
]
