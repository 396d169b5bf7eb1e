"""The tree of the client's errors, and their HTTP statuses.

::

    ClientError
    +-- Unreachable            no answer, or not in time
    +-- UnexpectedAnswer       an answer that is not rkserve's, or not of this version
    +-- LeaseLost              a pause may have expired while it was needed
    +-- SourceFailed           the file to send cannot be read
    +-- WaitTimeout            the operation still runs after the time limit
    +-- CallError              rkserve answered with an error: status, code, message, ...
    |   +-- NotAllowed         401, 403
    |   +-- NotFound           404
    |   +-- Conflict           409
    |   +-- Refused            any other 4xx
    |   +-- OperationUndone    504: not done in time, and undone
    |   +-- Unavailable        503, often with retry_after_s
    |   +-- ServerFailed       any other 5xx
    +-- OperationError         the operation ended without full success
        +-- OperationFailed    it has no effect
        +-- PartlyDone         it has taken effect, and some boards have not followed yet
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rkserve.client.answers import BoardFailure, BoardResult, Operation


class ClientError(Exception):
    """The root of the tree."""


class Unreachable(ClientError):
    """No answer. A change may have been executed nevertheless."""


class UnexpectedAnswer(ClientError):
    """An answer that this client cannot read."""


class LeaseLost(ClientError):
    """A pause was not renewed in time: requests may have continued meanwhile."""


class SourceFailed(ClientError):
    """The file to send cannot be read, or was changed while it was sent."""


class WaitTimeout(ClientError):
    """The operation still ran at the end of the wait; ``operation`` is its last known state."""

    def __init__(self, operation: Operation, timeout_s: float) -> None:
        super().__init__(operation, timeout_s)
        self.operation, self.timeout_s = operation, timeout_s

    def __str__(self) -> str:
        """Return the sentence for the user."""
        return (
            f"Operation '{self.operation.id}' ({self.operation.kind}) still runs after "
            f"{self.timeout_s:g} s."
        )


class CallError(ClientError):
    """An answer with an error object. ``body`` is the whole answer, with results of boards."""

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
        """The operation ID, if one was created."""
        found = self.body.get("operation_id")
        return found if isinstance(found, str) else None

    def __str__(self) -> str:
        """Return the sentence for the user."""
        status = f"{self.status}, {self.code}" if self.code else str(self.status)
        return f"{self.message} ({status})"


class NotAllowed(CallError):
    """A key is missing or wrong, or calls from this address are not allowed."""


class NotFound(CallError):
    """No such adapter, version, board, model, operation or file."""


class Conflict(CallError):
    """Another operation runs (`operation_conflict`), or the epoch or step is stale."""


class Refused(CallError):
    """The call is invalid; a repeat would fail again."""


class OperationUndone(CallError):
    """The change was not done in time and has been undone."""


class Unavailable(CallError):
    """A part that the call needs is unavailable."""


class ServerFailed(CallError):
    """A fault in the server."""


class OperationError(ClientError):
    """An operation that ended without full success."""

    def __init__(self, operation: Operation) -> None:
        super().__init__(operation)
        self.operation = operation

    @property
    def results(self) -> Mapping[str, BoardResult]:
        """The results of the boards that succeeded."""
        return self.operation.results

    @property
    def failed(self) -> tuple[BoardFailure, ...]:
        """The boards that failed, with the reasons."""
        return self.operation.failed

    def _boards(self) -> str:
        return "; ".join(f"{one.board}: {one.message or one.error}" for one in self.failed)


class OperationFailed(OperationError):
    """The operation has no effect: it failed before any change, or was undone."""

    def __str__(self) -> str:
        """Return the sentence for the user."""
        one = self.operation
        why = one.error_message or self._boards() or "no reason was given"
        return f"Operation '{one.id}' ({one.kind}) is {one.state}: {why}"


class PartlyDone(OperationError):
    """The operation has taken effect; the cluster keeps applying it to the boards in ``failed``."""

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
