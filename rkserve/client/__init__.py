"""Drive a cluster from a program: pause it, roll adapters out, look at it.

docs/how-to/client.md is the guide.
"""

from __future__ import annotations

from rkserve.client.answers import (
    BoardFailure,
    BoardResult,
    IsPaused,
    IsSleeping,
    Operation,
    Pushed,
    PushedWeights,
)
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
    "IsSleeping",
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
    "PushedWeights",
    "Refused",
    "ServerFailed",
    "SourceFailed",
    "Unavailable",
    "UnexpectedAnswer",
    "Unreachable",
    "WaitTimeout",
]
