"""Answers as typed values, read from JSON bodies and HTTP statuses.

Tables for people (boards, models, adapters, the cluster) stay JSON; answers that programs decide by
have types.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from rkserve.client.errors import (
    OperationFailed,
    PartlyDone,
    ServerFailed,
    UnexpectedAnswer,
    of_status,
)

FIRST_ERROR = 400
SHOWN_CHARACTERS = 200
RUNNING, SUCCEEDED, PARTIAL = "running", "succeeded", "partial"


@dataclass(frozen=True, slots=True)
class BoardResult:
    """The result of one board; ``details`` are the remaining fields of its answer."""

    status: str
    latency_ms: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class BoardFailure:
    """A board that failed: an error code such as ``board_failed``, and a sentence."""

    board: str
    error: str
    message: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of the cluster, as of the answer that it was read from.

    ``state`` is ``running``, ``succeeded``, ``partial``, ``failed`` or ``undone``; ``phase`` is the
    current phase of a running one. ``applied`` is False if this call changed nothing: it repeated
    an earlier call, or the requested state held already. ``phases`` are milliseconds by name.
    ``body`` is the whole answer. Times are in seconds since 1970.
    """

    id: str
    kind: str
    state: str
    epoch: int
    total: int
    succeeded: int
    results: Mapping[str, BoardResult] = field(default_factory=dict, hash=False)
    failed: tuple[BoardFailure, ...] = ()
    phases: Mapping[str, float] = field(default_factory=dict, hash=False)
    phase: str = ""
    applied: bool = True
    error_code: str | None = None
    error_message: str = ""
    created_s: float | None = None
    finished_s: float | None = None
    body: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)

    @property
    def over(self) -> bool:
        """True once the operation has ended."""
        return self.state != RUNNING


@dataclass(frozen=True, slots=True)
class IsPaused:
    """The paused boards. ``boards`` has the mode of each board, None for one that runs.

    ``adapters`` has the modes of adapters that are paused on their own.
    """

    any: bool
    all: bool
    epoch: int
    boards: Mapping[str, str | None] = field(default_factory=dict, hash=False)
    adapters: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __bool__(self) -> bool:
        """Return True if anything is paused."""
        return self.any


@dataclass(frozen=True, slots=True)
class IsSleeping:
    """The sleeping boards. ``boards`` has the level of each board, None for one that is awake."""

    any: bool
    all: bool
    epoch: int
    boards: Mapping[str, int | None] = field(default_factory=dict, hash=False)

    def __bool__(self) -> bool:
        """Return True if anything is asleep."""
        return self.any


@dataclass(frozen=True, slots=True)
class Pushed:
    """An adapter version that is on every board; ``rollout`` is None if it is only staged."""

    name: str
    version: str
    model: str
    sha256: str
    size_bytes: int
    staging: Operation
    rollout: Operation | None = None

    @property
    def label(self) -> str:
        """The name of exactly this version in requests."""
        return f"{self.name}@{self.version}"


@dataclass(frozen=True, slots=True)
class PushedWeights:
    """Base weights on the head's disk that no board has loaded yet.

    ``label`` is their name in calls: ``model@version``, or ``default`` for weights equal to the
    file of the model's own folder. ``body`` is the whole answer.
    """

    label: str
    model: str
    sha256: str
    size_bytes: int
    body: Mapping[str, Any] = field(default_factory=dict, hash=False, repr=False)


def json_of(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a successful answer.

    Raises:
        CallError: the answer is an error object; its status chooses the class.
        UnexpectedAnswer: it is neither.
    """
    body = _object(response)
    if response.status_code >= FIRST_ERROR:
        raise _error(response, body)
    if body is None:
        raise UnexpectedAnswer(_unexpected(response))
    return body


def error_code(response: httpx.Response) -> tuple[bool, str | None]:
    """Return True and the error code if an answer has rkserve's error object."""
    error = (_object(response) or {}).get("error")
    return (True, error.get("code")) if isinstance(error, dict) else (False, None)


def operation_of(response: httpx.Response) -> Operation:
    """Return the operation of an answer. Raises the same as ``json_of``."""
    return operation(json_of(response))


def operation(body: Mapping[str, Any]) -> Operation:
    """Read an operation, from the list of operations or from the answer to a call."""
    try:
        return _operation(body)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise UnexpectedAnswer(
            f"The answer is not an operation ({exc!r}): {str(body)[:SHOWN_CHARACTERS]}"
        ) from exc


def settled(one: Operation) -> Operation:
    """Return an operation that succeeded or still runs. Raises ``OperationError`` for others."""
    if one.state in (RUNNING, SUCCEEDED):
        return one
    raise PartlyDone(one) if one.state == PARTIAL else OperationFailed(one)


def is_paused(body: Mapping[str, Any]) -> IsPaused:
    """Read the answer of ``GET /is_paused``. Raises ``UnexpectedAnswer``."""
    try:
        boards = {
            name: (str(one["mode"]) if one["paused"] else None)
            for name, one in body["boards"].items()
        }
        adapters = {name: str(one["mode"]) for name, one in body.get("adapters", {}).items()}
        return IsPaused(
            bool(body["is_paused"]), bool(body["all"]), int(body["epoch"]), boards, adapters
        )
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise UnexpectedAnswer(f"The answer is not that of /is_paused ({exc!r})") from exc


def is_sleeping(body: Mapping[str, Any]) -> IsSleeping:
    """Read the answer of ``GET /is_sleeping``. Raises ``UnexpectedAnswer``."""
    try:
        boards = {
            name: (int(one["level"]) if one["sleeping"] else None)
            for name, one in body["boards"].items()
        }
        return IsSleeping(bool(body["is_sleeping"]), bool(body["all"]), int(body["epoch"]), boards)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise UnexpectedAnswer(f"The answer is not that of /is_sleeping ({exc!r})") from exc


def event_of(line: str) -> dict[str, Any] | None:
    """Return the event in a line of a stream, or None.

    Raises:
        ServerFailed: the answer ended with an error.
        UnexpectedAnswer: the line is not an event.
    """
    if not line.startswith("data:") or (text := line[len("data:") :].strip()) == "[DONE]":
        return None
    try:
        event = json.loads(text)
    except ValueError as exc:
        raise UnexpectedAnswer(f"The line is not an event: {text[:SHOWN_CHARACTERS]}") from exc
    if not isinstance(event, dict):
        raise UnexpectedAnswer(f"The line is not an event: {text[:SHOWN_CHARACTERS]}")
    if isinstance(error := event.get("error"), dict):
        raise ServerFailed(500, error.get("code"), str(error.get("message")))
    return event


def line_of(text: str) -> dict[str, Any]:
    """Return a line of a log. Raises ``UnexpectedAnswer``."""
    try:
        line = json.loads(text)
    except ValueError as exc:
        raise UnexpectedAnswer(f"The line is no JSON: {text[:SHOWN_CHARACTERS]}") from exc
    if not isinstance(line, dict):
        raise UnexpectedAnswer(f"The line is no object: {text[:SHOWN_CHARACTERS]}")
    return line


def rows(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a list. Raises ``UnexpectedAnswer``."""
    found = body.get("data")
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise UnexpectedAnswer(f"The answer is not a list: {str(body)[:SHOWN_CHARACTERS]}")
    return found


def operations(body: Mapping[str, Any]) -> list[Operation]:
    """Return the operations of a list. Raises ``UnexpectedAnswer``."""
    return [operation(row) for row in rows(body)]


def weight_version(body: Mapping[str, Any]) -> str:
    """Read the label from ``GET /weight_info``. Raises ``UnexpectedAnswer``."""
    return text_of(body, "weight_version")


def text_of(body: Mapping[str, Any], name: str) -> str:
    """Return a string field of an answer. Raises ``UnexpectedAnswer``."""
    found = body.get(name)
    if not isinstance(found, str):
        raise UnexpectedAnswer(f"'{name}' is missing in: {str(body)[:SHOWN_CHARACTERS]}")
    return found


def _operation(body: Mapping[str, Any]) -> Operation:
    error = body.get("error") or {}
    return Operation(
        id=str(body["operation_id"] if "operation_id" in body else body["id"]),
        kind=str(body["kind"]),
        state=str(body["state"]),
        epoch=int(body["epoch"]),
        total=int(body["total"]),
        succeeded=int(body["succeeded"]),
        results={name: _result(one) for name, one in body["results"].items()},
        failed=tuple(
            BoardFailure(str(one["board"]), str(one["error"]), str(one["message"]))
            for one in body["failed"]
        ),
        phases={name: float(ms) for name, ms in body.get("phases", {}).items()},
        phase=str(body.get("phase", "")),
        applied=bool(body.get("applied", True)),
        error_code=error.get("code"),
        error_message=str(error.get("message", "")),
        created_s=body.get("created_s"),
        finished_s=body.get("finished_s"),
        body=body,
    )


def _result(body: Mapping[str, Any]) -> BoardResult:
    rest = {name: value for name, value in body.items() if name not in ("status", "latency_ms")}
    return BoardResult(str(body["status"]), body.get("latency_ms"), rest)


def _object(response: httpx.Response) -> dict[str, Any] | None:
    try:
        body = response.json()
    except ValueError:
        return None
    return body if isinstance(body, dict) else None


def _error(response: httpx.Response, body: dict[str, Any] | None) -> Exception:
    error = (body or {}).get("error")
    if body is None or not isinstance(error, dict):
        return UnexpectedAnswer(_unexpected(response))
    return of_status(response.status_code)(
        response.status_code,
        error.get("code"),
        str(error.get("message") or "No reason was given."),
        error.get("param"),
        retry_after_s(response),
        body,
    )


def retry_after_s(response: httpx.Response) -> float | None:
    """Return the seconds of Retry-After; None where it is absent or a date."""
    value = response.headers.get("retry-after", "")
    return float(value) if value.isascii() and value.isdigit() else None


def _unexpected(response: httpx.Response) -> str:
    shown = response.text[:SHOWN_CHARACTERS].strip() or "an empty body"
    where = response.request.url
    return f"{where} answered {response.status_code}, but not in rkserve's form: {shown}"
