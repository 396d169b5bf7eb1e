"""What can come of a call, drawn once; it knows statuses and codes, and nothing of connections.

::

    ClientError
    +-- Unreachable            nobody answered, or not in time
    +-- UnexpectedAnswer       something answered that is not rkserve, or not this version of it
    +-- LeaseLost              a pause may have ended by itself while it was needed
    +-- SourceFailed           the file to send cannot be read
    +-- WaitTimeout            the operation goes on, and nobody waits for it any more
    +-- CallError              rkserve answered with an error: status, code, message, ...
    |   +-- NotAllowed         401, 403
    |   +-- NotFound           404
    |   +-- Conflict           409
    |   +-- Refused            any other 4xx
    |   +-- OperationUndone    504: not done in time, and what was done of it is undone
    |   +-- Unavailable        503, often with retry_after_s
    |   +-- ServerFailed       any other 5xx
    +-- OperationError         the operation ended, and not as it should have
        +-- OperationFailed    nothing of it is in force
        +-- PartlyDone         it is in force, and some boards have not followed yet
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rkserve.client.answers import BoardFailure, BoardResult, Operation


__all__ = [
    "CallError",
    "ClientError",
    "Conflict",
    "LeaseLost",
    "NotAllowed",
    "NotFound",
    "OperationError",
    "OperationFailed",
    "OperationUndone",
    "PartlyDone",
    "Refused",
    "ServerFailed",
    "SourceFailed",
    "Unavailable",
    "UnexpectedAnswer",
    "Unreachable",
    "WaitTimeout",
]


class ClientError(Exception):
    """The tree's root."""


class Unreachable(ClientError):
    """Nobody answered. A call that changes something may have been carried out all the same."""


class UnexpectedAnswer(ClientError):
    """What answered is not what this client can read."""


class LeaseLost(ClientError):
    """A pause could not be renewed in time: requests may have gone on during what followed."""


class SourceFailed(ClientError):
    """The file to send cannot be read, or was changed while it was sent."""


class WaitTimeout(ClientError):
    """Waiting was given up; the operation, as it was seen last, goes on."""

    def __init__(self, operation: Operation, timeout_s: float) -> None:
        super().__init__(operation, timeout_s)
        self.operation, self.timeout_s = operation, timeout_s

    def __str__(self) -> str:
        """Return the sentence for the user."""
        return (
            f"Operation '{self.operation.id}' ({self.operation.kind}) is not over after "
            f"{self.timeout_s:g} s; it goes on."
        )


class CallError(ClientError):
    """An answer with an error object. ``body`` is all of it, such as the results of boards."""

    def __init__(  # noqa: PLR0917 -- positional, so that it survives pickling
        self,
        status: int,
        code: str | None,
        message: str,
        param: str | None = None,
        retry_after_s: float | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(status, code, message, param, retry_after_s, body)
        self.status, self.code, self.message, self.param = status, code, message, param
        self.retry_after_s, self.body = retry_after_s, body or {}

    @property
    def operation_id(self) -> str | None:
        """Which operation it was, where it had become one."""
        found = self.body.get("operation_id")
        return found if isinstance(found, str) else None

    def __str__(self) -> str:
        """Return the sentence for the user."""
        said = f"{self.status}, {self.code}" if self.code else str(self.status)
        return f"{self.message} ({said})"


class NotAllowed(CallError):
    """A key is missing or wrong, or the call came from elsewhere than it may."""


class NotFound(CallError):
    """No such adapter, version, board, model, operation or file."""


class Conflict(CallError):
    """Another operation is in the way (`operation_conflict`), the epoch is past, or a step is."""


class Refused(CallError):
    """The call itself is wrong, and would be wrong again."""


class OperationUndone(CallError):
    """It was not done in time, and what had been done is undone."""


class Unavailable(CallError):
    """What the call needs is not there now."""


class ServerFailed(CallError):
    """A fault on the other side."""


class OperationError(ClientError):
    """An operation ended and is not what was asked for."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(operation)
        self.operation = operation

    @property
    def results(self) -> Mapping[str, BoardResult]:
        """What the boards that did it answered."""
        return self.operation.results

    @property
    def failed(self) -> tuple[BoardFailure, ...]:
        """The boards that did not do it, with the reasons."""
        return self.operation.failed

    def _boards(self) -> str:
        return "; ".join(f"{one.board}: {one.message or one.error}" for one in self.failed)


class OperationFailed(OperationError):
    """It is not in force: it failed before it changed anything, or was undone."""

    def __str__(self) -> str:
        """Return the sentence for the user."""
        one = self.operation
        why = one.error_message or self._boards() or "no reason was given"
        return f"Operation '{one.id}' ({one.kind}) is {one.state}: {why}"


class PartlyDone(OperationError):
    """It is in force, and the cluster goes on bringing it to the boards in ``failed``."""

    def __str__(self) -> str:
        """Return the sentence for the user."""
        one = self.operation
        return (
            f"Operation '{one.id}' ({one.kind}) is done on {one.succeeded} of {one.total} boards; "
            f"{self._boards()}"
        )


BY_STATUS: Mapping[int, type[CallError]] = {
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    409: Conflict,
    503: Unavailable,
    504: OperationUndone,
}
SERVER_SIDE = 500


def of_status(status: int) -> type[CallError]:
    """Return the class of an error status."""
    return BY_STATUS.get(status, ServerFailed if status >= SERVER_SIDE else Refused)
