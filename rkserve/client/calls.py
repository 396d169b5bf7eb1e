"""Every call as a value: method, path, parameters. It knows the wire's names and no connection.

A parameter that is None is left out, so that the server's own default holds.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import quote

from rkserve.client.upload import Upload

Mode = Literal["keep", "wait", "abort"]
Strategy = Literal["atomic", "rolling", "canary"]
InFlight = Literal["pin", "switch", "abort"]
Level = Literal[0, 1, 2]
Tag = Literal["weights", "kv_cache"]
Names = str | Sequence[str]

# What the server takes for a control call that names no time limit, and what an answer may take
# beyond the limit that it was given: undoing, and the way.
OPERATION_TIMEOUT_S = 60.0
MARGIN_S = 15.0
# The head reads a whole file of base weights before it answers, from a disk that may be an SD card.
FILE_S = 900.0


@dataclass(frozen=True, slots=True)
class Request:
    """One call. With a ``key`` it changes something, and can be sent again without doing it twice.

    ``read_s`` is how long its answer may take where that is more than usual.
    """

    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] | None = None
    upload: Upload | None = None
    key: str | None = None
    read_s: float | None = None


@dataclass(frozen=True, slots=True)
class ScopeParams:
    """A part of the cluster; what is None restricts nothing.

    ``boards`` are ids or shell patterns such as ``sim-*``.
    """

    models: Names | None = None
    boards: Names | None = None
    adapter: str | None = None

    def params(self) -> dict[str, Any]:
        """Return it by the wire's names."""
        return {
            "model": _names(self.models),
            "selector": _names(self.boards),
            "adapter": self.adapter,
        }


@dataclass(frozen=True, slots=True)
class RolloutParams:
    """Settings of a rollout; docs/explanation/cluster-control.md. None: the server's default."""

    strategy: Strategy | None = None
    max_unavailable: int | None = None
    weight: float | None = None
    in_flight: InFlight | None = None
    observe_s: float | None = None
    auto: bool | None = None

    def params(self) -> dict[str, Any]:
        """Return it by the wire's names."""
        return {
            "strategy": self.strategy,
            "max_unavailable": self.max_unavailable,
            "weight": self.weight,
            "in_flight": self.in_flight,
            "observe_s": self.observe_s,
            "auto": self.auto,
        }


def fetch(path: str, **query: str | int | None) -> Request:
    """Ask for something that changes nothing."""
    given = {name: str(value) for name, value in query.items() if value is not None}
    return Request("GET", path, given)


def change(
    method: str,
    path: str,
    params: Mapping[str, Any],
    *,
    key: str | None,
    timeout_s: float | None = None,
    epoch: int | None = None,
    background: bool = False,
) -> Request:
    """Change something. Without ``key`` the call gets one of its own."""
    given = {**params, "timeout_s": timeout_s, "epoch": epoch, "async": background or None}
    return Request(
        method,
        path,
        body={name: value for name, value in given.items() if value is not None},
        key=key or new_key(),
        read_s=None if background else (timeout_s or OPERATION_TIMEOUT_S) + MARGIN_S,
    )


def upload(
    source: Upload,
    name: str,
    *,
    version: str | None,
    model: str | None,
    scale: float | None,
    parameters: Sequence[Mapping[str, Any]] | None,
    base_digest: str | None,
    timeout_s: float | None,
    key: str,
) -> Request:
    """Send an adapter and have it staged on every board, without having it served."""
    given = {
        "name": name,
        "version": version,
        "model": model,
        "scale": scale,
        "parameters": listed(parameters),
        "base_digest": base_digest,
        "timeout_s": timeout_s,
        "sha256": source.sha256,
        "size": source.size_bytes,
        "activate": "false",
        "async": "true",
    }
    query = {name: str(value) for name, value in given.items() if value is not None}
    # The head answers once it has all bytes on its disk and has read them again.
    read_s = (timeout_s or OPERATION_TIMEOUT_S) + MARGIN_S
    return Request("POST", "/v1/lora_adapters", query, upload=source, key=key, read_s=read_s)


def adapter_path(name: str, *rest: str) -> str:
    """Return the path of an adapter, whatever characters its name has."""
    return "/".join(["/v1/lora_adapters", *(quote(part, safe="") for part in (name, *rest))])


def operation_path(operation_id: str) -> str:
    """Return the path of an operation."""
    return f"/v1/operations/{quote(operation_id, safe='')}"


def listed(parameters: Sequence[Mapping[str, Any]] | None) -> str | None:
    """Return a list of tensors as a query has it."""
    if parameters is None:
        return None
    return json.dumps([dict(one) for one in parameters], separators=(",", ":"))


def new_key() -> str:
    """Return an idempotency key that nobody else has."""
    return str(uuid.uuid4())


def _names(given: Names | None) -> list[str] | None:
    if given is None:
        return None
    return [given] if isinstance(given, str) else list(given)
