"""Operations as JSON: the record, and the answers of calls that change the cluster."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from rkserve.api.json.body import JsonObject
from rkserve.api.json.schemas import Count, Seconds, one_of
from rkserve.control.calls import OperationKind
from rkserve.control.operations import (
    BoardOutcome,
    ControlError,
    ControlOperation,
    OperationState,
    ResultStatus,
)
from rkserve.core.desired_state import PauseMode

ACCEPTED = 202
REFUSED = 400  # statuses from here on carry an error object

# The status of a board's success, by the kind of operation.
_DONE = {
    "pause": "paused",
    "resume": "resumed",
    "sleep": "sleeping",
    "wake": "awake",
    "cache_reset": "cleared",
    "abort": "aborted",
    "adapter_stage": "staged",
    "adapter_rollout": "serving",
    "adapter_rollback": "serving",
    "adapter_promote": "serving",
    "adapter_retire": "retired",
    "label": "labelled",
    "weight_update": "updated",
    "rebase": "updated",
}
_KINDS = {400: "invalid_request_error", 404: "invalid_request_error", 409: "invalid_request_error"}


Kind = Annotated[str, one_of(OperationKind)]
State = Annotated[str, one_of(OperationState)]
ModeName = Annotated[str, one_of(PauseMode)]


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


# Answers of the calls that change the cluster; ``changed`` adds the envelope to their own part.


class StatusDone(Envelope):
    """A change of the state of boards."""

    status: str


class PauseDone(StatusDone):
    """A pause."""

    mode: ModeName


class MessageDone(StatusDone):
    """A change in SGLang's form."""

    message: str


class PauseMessageDone(MessageDone):
    """A pause in SGLang's form."""

    mode: ModeName


class AbortDone(StatusDone):
    """Ended requests."""

    aborted: Count


class SuccessDone(Envelope):
    """A change that tells its success."""

    success: bool


class LabelDone(SuccessDone):
    """The new label of a model's weights."""

    new_version: str
    model: str


class SleepDone(StatusDone):
    """A sleep."""

    level: Count
    mode: ModeName


class WakeDone(StatusDone):
    """The end of a sleep."""

    tags: list[str]


class ModelLoadDone(StatusDone):
    """A model that is loaded on all of its boards."""

    id: str
    object: Literal["model"]


class ModelUnloadDone(ModelLoadDone):
    """A model that is unloaded from all of its boards."""

    level: Count


def envelope(record: ControlOperation, *, applied: bool) -> Envelope:
    """Return the facts about an operation in an answer."""
    return {
        "operation_id": record.id,
        "kind": record.kind.value,
        "state": record.state.value,
        "epoch": record.epoch,
        "applied": applied,
        **_boards(record),
    }


def changed(body: Mapping[str, object], record: ControlOperation, *, applied: bool) -> JsonObject:
    """Return the answer of a changing call; ``body`` is the dialect's own part on success."""
    told = envelope(record, applied=applied)
    if record.error is None:
        return {**body, **told}
    return {"error": error_of(record.error), **told}


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
    done = _DONE.get(record.kind.value, "ok")
    ordered = sorted(record.results.items())
    return {
        "total": len(ordered),
        "succeeded": sum(result.good for _, result in ordered),
        "results": {board: _result(one, done) for board, one in ordered if one.good},
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
    told = {**result.details, "status": status, "latency_ms": round(result.latency_ms, 3)}
    return cast("BoardResultEntry", told)  # its type has no names for the details


def _phases(phases: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the milliseconds by phase, in order; repeated phases are added up."""
    spent: dict[str, float] = {}
    for name, ms in phases:
        spent[name] = spent.get(name, 0.0) + ms
    return {name: round(ms, 3) for name, ms in spent.items()}
