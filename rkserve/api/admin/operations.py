"""Operations as JSON: the record, and the envelope of every changing call.

Records are Protocols, so that this room does not import the Coordinator's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from rkserve.api.json.body import JsonObject

WAITING = "waiting"  # the status of a board during an operation: neither done nor failed
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


class OperationResult(Protocol):
    """One board's part of an operation."""

    @property
    def status(self) -> str: ...
    @property
    def latency_ms(self) -> float: ...
    @property
    def error(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def details(self) -> Mapping[str, Any]: ...
    @property
    def good(self) -> bool: ...


class OperationFailure(Protocol):
    """The reason that an operation failed."""

    @property
    def status(self) -> int: ...
    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...


class OperationRecord(Protocol):
    """One operation."""

    @property
    def id(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def state(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def params(self) -> Mapping[str, Any]: ...
    @property
    def who(self) -> str: ...
    @property
    def created_s(self) -> float: ...
    @property
    def finished_s(self) -> float | None: ...
    @property
    def epoch(self) -> int: ...
    @property
    def key(self) -> str | None: ...
    @property
    def results(self) -> Mapping[str, OperationResult]: ...
    @property
    def phases(self) -> tuple[tuple[str, float], ...]: ...
    @property
    def error(self) -> OperationFailure | None: ...


def envelope(record: OperationRecord, *, applied: bool) -> JsonObject:
    """Return the facts about an operation in an answer."""
    return {
        "operation_id": record.id,
        "kind": _text(record.kind),
        "state": _text(record.state),
        "epoch": record.epoch,
        "applied": applied,
        **_boards(record),
    }


def changed(body: JsonObject, record: OperationRecord, *, applied: bool) -> JsonObject:
    """Return the answer of a changing call; ``body`` is the dialect's own part on success."""
    told = envelope(record, applied=applied)
    if record.error is None:
        return {**body, **told}
    return {"error": error_of(record.error), **told}


def error_of(failure: OperationFailure) -> JsonObject:
    """Return OpenAI's error object for an operation that did not succeed."""
    kind = _KINDS.get(failure.status, "server_error")
    return {"message": failure.message, "type": kind, "param": None, "code": failure.code}


def operation_entry(record: OperationRecord) -> JsonObject:
    """Return the answer of GET /v1/operations/{id}."""
    failure = record.error
    return {
        "id": record.id,
        "object": "operation",
        "kind": _text(record.kind),
        "state": _text(record.state),
        "phase": _text(record.phase),
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


def operations_list(records: Iterable[OperationRecord]) -> JsonObject:
    """Return the answer of GET /v1/operations, in the order given."""
    return {"object": "list", "data": [operation_entry(record) for record in records]}


def total_of(record: OperationRecord, figure: str) -> int:
    """Add up one of the boards' figures."""
    values = (result.details.get(figure) for result in record.results.values())
    return sum(value for value in values if isinstance(value, int))


def _boards(record: OperationRecord) -> JsonObject:
    done = _DONE.get(_text(record.kind), "ok")
    ordered = sorted(record.results.items())
    return {
        "total": len(ordered),
        "succeeded": sum(result.good for _, result in ordered),
        "results": {board: _result(one, done) for board, one in ordered if one.good},
        "failed": [
            {
                "board": board,
                "error": one.error or _text(one.status),
                "message": one.message,
                "latency_ms": round(one.latency_ms, 3),
            }
            for board, one in ordered
            if not one.good and _text(one.status) != WAITING
        ],
        "phases": _phases(record.phases),
    }


def _result(result: OperationResult, done: str) -> JsonObject:
    status = _text(result.status)
    return {
        **result.details,
        "status": done if status == "ok" else status,
        "latency_ms": round(result.latency_ms, 3),
    }


def _phases(phases: Iterable[tuple[str, float]]) -> JsonObject:
    """Return the milliseconds by phase, in order; repeated phases are added up."""
    spent: dict[str, float] = {}
    for name, ms in phases:
        spent[name] = spent.get(name, 0.0) + ms
    return {name: round(ms, 3) for name, ms in spent.items()}


def _text(value: str) -> str:
    """Return the plain string of a string enum."""
    return str.__str__(value)
