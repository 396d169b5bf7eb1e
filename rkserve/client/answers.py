"""Answers as values. It reads JSON and statuses, and knows no connection.

Tables that exist to be looked at (boards, models, adapters, the cluster) stay the JSON that they
are; what a program decides by is a value with a type.
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
    """What one board did; ``details`` is the rest of what it answered."""

    status: str
    latency_ms: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class BoardFailure:
    """A board that did not do it: an error code such as ``board_failed``, and a sentence."""

    board: str
    error: str
    message: str


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of the cluster, as it stood when it was answered.

    ``state`` is ``running``, ``succeeded``, ``partial``, ``failed`` or ``undone``; ``phase`` is
    what a running one is at. ``applied`` is False where nothing was changed by this call: it
    repeated an earlier one, or what it asked for held already. ``phases`` are milliseconds by name.
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
        """Whether it has ended."""
        return self.state != RUNNING


@dataclass(frozen=True, slots=True)
class IsPaused:
    """What is paused. ``boards`` has the mode of each board, None where it is not paused.

    ``adapters`` has the modes of adapters that are paused by themselves.
    """

    any: bool
    all: bool
    epoch: int
    boards: Mapping[str, str | None] = field(default_factory=dict, hash=False)
    adapters: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __bool__(self) -> bool:
        """Whether anything is paused."""
        return self.any


@dataclass(frozen=True, slots=True)
class IsSleeping:
    """What is asleep. ``boards`` has the level of each board, None where it is awake."""

    any: bool
    all: bool
    epoch: int
    boards: Mapping[str, int | None] = field(default_factory=dict, hash=False)

    def __bool__(self) -> bool:
        """Whether anything is asleep."""
        return self.any


@dataclass(frozen=True, slots=True)
class Pushed:
    """An adapter version that is on every board; ``rollout`` is None where it is not served yet."""

    name: str
    version: str
    model: str
    sha256: str
    size_bytes: int
    staging: Operation
    rollout: Operation | None = None

    @property
    def label(self) -> str:
        """The name by which a request can ask for exactly this one."""
        return f"{self.name}@{self.version}"


def json_of(response: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a good answer.

    Raises:
        CallError: the answer is an error object; the class goes by its status.
        UnexpectedAnswer: it is something else.
    """
    body = _object(response)
    if response.status_code >= FIRST_ERROR:
        raise _error(response, body)
    if body is None:
        raise UnexpectedAnswer(_told(response))
    return body


def error_code(response: httpx.Response) -> tuple[bool, str | None]:
    """Return whether an answer has rkserve's error object, and the code in it."""
    error = (_object(response) or {}).get("error")
    return (True, error.get("code")) if isinstance(error, dict) else (False, None)


def operation_of(response: httpx.Response) -> Operation:
    """Return the operation that a call became. Raises what ``json_of`` does."""
    return operation(json_of(response))


def operation(body: Mapping[str, Any]) -> Operation:
    """Return an operation: of the list of operations, or of the answer to a call."""
    try:
        return _operation(body)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise UnexpectedAnswer(
            f"This is no operation ({exc!r}): {str(body)[:SHOWN_CHARACTERS]}"
        ) from exc


def settled(one: Operation) -> Operation:
    """Return an operation that succeeded or goes on. Raises ``OperationError`` for others."""
    if one.state in (RUNNING, SUCCEEDED):
        return one
    raise PartlyDone(one) if one.state == PARTIAL else OperationFailed(one)


def is_paused(body: Mapping[str, Any]) -> IsPaused:
    """Return what ``GET /is_paused`` says. Raises ``UnexpectedAnswer``."""
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
        raise UnexpectedAnswer(f"This does not say what is paused ({exc!r})") from exc


def is_sleeping(body: Mapping[str, Any]) -> IsSleeping:
    """Return what ``GET /is_sleeping`` says. Raises ``UnexpectedAnswer``."""
    try:
        boards = {
            name: (int(one["level"]) if one["sleeping"] else None)
            for name, one in body["boards"].items()
        }
        return IsSleeping(bool(body["is_sleeping"]), bool(body["all"]), int(body["epoch"]), boards)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise UnexpectedAnswer(f"This does not say what is asleep ({exc!r})") from exc


def event_of(line: str) -> dict[str, Any] | None:
    """Return the event of a line of a stream, None where it has none.

    Raises:
        ServerFailed: the answer ended with an error.
        UnexpectedAnswer: the line is no event.
    """
    if not line.startswith("data:") or (text := line[len("data:") :].strip()) == "[DONE]":
        return None
    try:
        event = json.loads(text)
    except ValueError as exc:
        raise UnexpectedAnswer(f"This is no event: {text[:SHOWN_CHARACTERS]}") from exc
    if not isinstance(event, dict):
        raise UnexpectedAnswer(f"This is no event: {text[:SHOWN_CHARACTERS]}")
    if isinstance(error := event.get("error"), dict):
        raise ServerFailed(500, error.get("code"), str(error.get("message")))
    return event


def rows(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a list. Raises ``UnexpectedAnswer``."""
    found = body.get("data")
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise UnexpectedAnswer(f"This is no list: {str(body)[:SHOWN_CHARACTERS]}")
    return found


def operations(body: Mapping[str, Any]) -> list[Operation]:
    """Return the operations of a list. Raises ``UnexpectedAnswer``."""
    return [operation(row) for row in rows(body)]


def weight_version(body: Mapping[str, Any]) -> str:
    """Return what ``GET /weight_info`` says. Raises ``UnexpectedAnswer``."""
    return text_of(body, "weight_version")


def text_of(body: Mapping[str, Any], name: str) -> str:
    """Return one string of an answer. Raises ``UnexpectedAnswer``."""
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
        return UnexpectedAnswer(_told(response))
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
    said = response.headers.get("retry-after", "")
    return float(said) if said.isascii() and said.isdigit() else None


def _told(response: httpx.Response) -> str:
    shown = response.text[:SHOWN_CHARACTERS].strip() or "an empty body"
    return (
        f"{response.request.url} answered {response.status_code}, and not as rkserve does: {shown}"
    )
