"""Operations as JSON: the record, and the answers of calls that change the cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, with_config
from typing_extensions import NotRequired, TypedDict

from rkserve.api.json.fields import JsonObject
from rkserve.api.json.schemas import Count, Seconds, one_of
from rkserve.control.calls import OperationKind
from rkserve.control.operations import (
    BoardOutcome,
    ControlError,
    ControlOperation,
    OperationState,
    ResultStatus,
)

OK, ACCEPTED = 200, 202
REFUSED = 400  # statuses from here on carry an error object

_KINDS = {400: "invalid_request_error", 404: "invalid_request_error", 409: "invalid_request_error"}


Kind = Annotated[str, one_of(OperationKind)]
State = Annotated[str, one_of(OperationState)]


@with_config(ConfigDict(extra="allow"))
class BoardResultEntry(TypedDict):
    """One board that succeeded, with figures of its own."""

    status: str
    latency_ms: Seconds


class BoardFailureEntry(TypedDict):
    """One board that failed."""

    board: str
    error: str
    message: str
    latency_ms: Seconds


class ResultsEntry(TypedDict):
    """The results of an operation by board, and its phases in milliseconds."""

    total: Count
    succeeded: Count
    results: dict[str, BoardResultEntry]
    failed: list[BoardFailureEntry]
    phases: dict[str, Seconds]


class Envelope(ResultsEntry):
    """The facts about an operation, in the answer of every call that changes the cluster."""

    operation_id: str
    kind: Kind
    state: State
    epoch: int
    applied: bool
    upstreams: NotRequired[dict[str, str]]


class OperationErrorEntry(TypedDict):
    """The reason that an operation failed."""

    status: int
    code: str
    message: str


class OperationAnswer(ResultsEntry):
    """One operation."""

    id: str
    object: Literal["operation"]
    kind: Kind
    state: State
    phase: str
    params: dict[str, Any]
    who: str
    created_s: float
    finished_s: float | None
    epoch: int
    idempotency_key: str | None
    error: OperationErrorEntry | None


class OperationsAnswer(TypedDict):
    """The latest operations."""

    object: Literal["list"]
    data: list[OperationAnswer]


class AuditAnswer(TypedDict):
    """The latest lines of the audit log."""

    object: Literal["list"]
    data: list[dict[str, Any]]


def envelope(record: ControlOperation, *, applied: bool) -> Envelope:
    """Return the facts about an operation in an answer."""
    entry = {
        "operation_id": record.id,
        "kind": record.kind.value,
        "state": record.state.value,
        "epoch": record.epoch,
        "applied": applied,
        **_boards(record),
    }
    return cast("Envelope", entry)  # what becomes of upstreams is added where it is known


def changed(body: Mapping[str, object], record: ControlOperation, *, applied: bool) -> JsonObject:
    """Return the answer of a changing call; ``body`` is the dialect's own part on success."""
    entry = envelope(record, applied=applied)
    if record.error is None:
        return {**body, **entry}
    return {"error": error_of(record.error), **entry}


def error_of(failure: ControlError) -> JsonObject:
    """Return OpenAI's error object for an operation that did not succeed."""
    kind = _KINDS.get(failure.status, "server_error")
    return {"message": failure.message, "type": kind, "param": None, "code": failure.code}


def operation_entry(record: ControlOperation) -> OperationAnswer:
    """Return the answer of GET /v1/operations/{id}."""
    failure = record.error
    return {
        "id": record.id,
        "object": "operation",
        "kind": record.kind.value,
        "state": record.state.value,
        "phase": record.phase.value,
        "params": dict(record.params),
        "who": record.who,
        "created_s": record.created_s,
        "finished_s": record.finished_s,
        "epoch": record.epoch,
        "idempotency_key": record.key,
        **_boards(record),
        "error": None
        if failure is None
        else {"status": failure.status, "code": failure.code, "message": failure.message},
    }


def operations_list(records: Iterable[ControlOperation]) -> OperationsAnswer:
    """Return the answer of GET /v1/operations, in the order given."""
    return {"object": "list", "data": [operation_entry(record) for record in records]}


def total_of(record: ControlOperation, figure: str) -> int:
    """Add up one of the boards' figures."""
    values = (result.details.get(figure) for result in record.results.values())
    return sum(value for value in values if isinstance(value, int))


def _boards(record: ControlOperation) -> ResultsEntry:
    ordered = sorted(record.results.items())
    return {
        "total": len(ordered),
        "succeeded": sum(result.good for _, result in ordered),
        "results": {board: _result(one, record.action.done) for board, one in ordered if one.good},
        "failed": [
            {
                "board": board,
                "error": one.error or one.status.value,
                "message": one.message,
                "latency_ms": round(one.latency_ms, 3),
            }
            for board, one in ordered
            if not one.good and one.status is not ResultStatus.WAITING
        ],
        "phases": _phases(record.phases),
    }


def _result(result: BoardOutcome, done: str) -> BoardResultEntry:
    status = done if result.status is ResultStatus.OK else result.status.value
    entry = {**result.details, "status": status, "latency_ms": round(result.latency_ms, 3)}
    return cast("BoardResultEntry", entry)  # its type has no names for the details


def _phases(phases: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the milliseconds by phase, in order; repeated phases are added up."""
    spent: dict[str, float] = {}
    for name, ms in phases:
        spent[name] = spent.get(name, 0.0) + ms
    return {name: round(ms, 3) for name, ms in spent.items()}
