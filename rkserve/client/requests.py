"""Every call as a value: method, path and parameters, by the names of the HTTP API. No I/O.

A parameter that is None is left out, so that the server's own default holds.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import quote

from rkserve.client.answers import Pushed, PushedWeights
from rkserve.client.upload import Upload

Mode = Literal["keep", "wait", "abort"]
Strategy = Literal["atomic", "rolling", "canary"]
InFlight = Literal["pin", "switch", "abort"]
Level = Literal[0, 1, 2]
Tag = Literal["weights", "kv_cache"]
Names = str | Sequence[str]

# The server's limit for a control call that names none, and the extra time that an answer may take:
# the server undoes what it has begun, and the network adds its own delay.
OPERATION_TIMEOUT_S = 60.0
MARGIN_S = 15.0
# The head reads a whole file of base weights before it answers, from a disk that may be an SD card.
FILE_S = 900.0
BUILD_S = 300.0  # a prompt cache takes the prefill of its whole prompt


@dataclass(frozen=True, slots=True)
class Request:
    """One call. A call with an idempotency ``key`` can be sent again without being done twice.

    ``read_s`` is the time limit for its answer, where that is longer than usual.
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
    """A part of the cluster; None restricts nothing.

    ``boards`` are ids or shell patterns such as ``sim-*``.
    """

    models: Names | None = None
    boards: Names | None = None
    adapter: str | None = None

    def params(self) -> dict[str, Any]:
        """Return the parameters by their names in the API."""
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
        """Return the parameters by their names in the API."""
        return {
            "strategy": self.strategy,
            "max_unavailable": self.max_unavailable,
            "weight": self.weight,
            "in_flight": self.in_flight,
            "observe_s": self.observe_s,
            "auto": self.auto,
        }


def fetch(path: str, **query: str | int | None) -> Request:
    """Return a call that changes nothing."""
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
    """Return a call that changes something; without ``key`` it gets a random one."""
    given = {**params, "timeout_s": timeout_s, "epoch": epoch, "async": background or None}
    return Request(
        method,
        path,
        body={name: value for name, value in given.items() if value is not None},
        key=key or new_key(),
        read_s=None if background else (timeout_s or OPERATION_TIMEOUT_S) + MARGIN_S,
    )


def push_adapter(
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
    """Upload an adapter and stage it on every board, without serving it."""
    given = {
        "name": name,
        "version": version,
        "model": model,
        "scale": scale,
        "parameters": _listed(parameters),
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


def _listed(parameters: Sequence[Mapping[str, Any]] | None) -> str | None:
    """Return a list of tensors as a query parameter."""
    if parameters is None:
        return None
    return json.dumps([dict(one) for one in parameters], separators=(",", ":"))


def new_key() -> str:
    """Return a random idempotency key."""
    return str(uuid.uuid4())


def _names(given: Names | None) -> list[str] | None:
    if given is None:
        return None
    return [given] if isinstance(given, str) else list(given)


def pause(
    scope: ScopeParams,
    mode: Mode,
    *,
    clear_cache: bool,
    lease_s: float | None,
    timeout_s: float | None,
    epoch: int | None,
    key: str | None,
) -> Request:
    """Pause a part of the cluster."""
    params = {**scope.params(), "mode": mode, "clear_cache": clear_cache, "lease_s": lease_s}
    return change("POST", "/pause", params, key=key, timeout_s=timeout_s, epoch=epoch)


def resume(
    scope: ScopeParams, *, timeout_s: float | None, epoch: int | None, key: str | None
) -> Request:
    """Resume a part of the cluster."""
    return change("POST", "/resume", scope.params(), key=key, timeout_s=timeout_s, epoch=epoch)


def sleep(
    scope: ScopeParams,
    level: Level,
    mode: Mode,
    *,
    wake_on_request: bool,
    lease_s: float | None,
    timeout_s: float | None,
    epoch: int | None,
    key: str | None,
) -> Request:
    """Put a part of the cluster to sleep."""
    params = {
        **scope.params(),
        "level": level,
        "mode": mode,
        "lease_s": lease_s,
        "wake_on_request": wake_on_request or None,
    }
    return change(
        "POST", "/sleep", params, key=key, timeout_s=timeout_s, epoch=epoch, background=True
    )


def wake(
    scope: ScopeParams,
    tags: Sequence[Tag] | None,
    *,
    timeout_s: float | None,
    epoch: int | None,
    key: str | None,
) -> Request:
    """Wake a part of the cluster; ``tags`` restricts what is restored."""
    params = {**scope.params(), "tags": None if tags is None else list(tags)}
    return change(
        "POST", "/wake_up", params, key=key, timeout_s=timeout_s, epoch=epoch, background=True
    )


def load(model: str, *, timeout_s: float | None, key: str | None) -> Request:
    """Load a model on its boards."""
    return change(
        "POST", "/v1/models/load", {"model": model}, key=key, timeout_s=timeout_s, background=True
    )


def unload(
    model: str,
    level: Level | None,
    mode: Mode | None,
    *,
    wake_on_request: bool | None,
    timeout_s: float | None,
    key: str | None,
) -> Request:
    """Unload a model on its boards."""
    params = {"model": model, "level": level, "mode": mode, "wake_on_request": wake_on_request}
    return change(
        "POST", "/v1/models/unload", params, key=key, timeout_s=timeout_s, background=True
    )


def update(
    path: str | PushedWeights,
    version: str | None,
    model: str | None,
    in_flight: InFlight | None,
    *,
    max_unavailable: int | None,
    timeout_s: float | None,
    key: str | None,
) -> Request:
    """Load another file of base weights."""
    params = {
        "model_path": path if isinstance(path, str) else path.label,
        "weight_version": version,
        "model": model if isinstance(path, str) else model or path.model,
        "in_flight": in_flight,
        "max_unavailable": max_unavailable,
    }
    call = change(
        "POST",
        "/update_weights_from_disk",
        params,
        key=key,
        timeout_s=timeout_s,
        background=True,
    )
    return replace(call, read_s=FILE_S)


def receive(
    step: int,
    artifact: str | Pushed | PushedWeights,
    parameters: Sequence[Mapping[str, Any]] | None,
    *,
    model: str | None,
    in_flight: InFlight | None,
    timeout_s: float | None,
    key: str | None,
) -> Request:
    """Activate staged weights as those of a trainer's step, in PipelineRL's form.

    The body has no ``timestamp``, so that a repeated call is equal to the first.
    """
    named = artifact if isinstance(artifact, str) else artifact.label
    meant = model if isinstance(artifact, str) else model or artifact.model
    tensors: Sequence[Mapping[str, Any]] = [] if parameters is None else parameters
    if parameters is None and not isinstance(artifact, str):
        tensors = [{"name": named, "shape": [artifact.size_bytes], "dtype": "uint8"}]
    params = {
        "kind": "weight_update_request",
        "version": step,
        "parameters_info": [dict(one) for one in tensors],
        "artifact": named,
        "model": meant,
        "in_flight": in_flight,
    }
    call = change(
        "POST", "/receive_weight_update", params, key=key, timeout_s=timeout_s, background=True
    )
    return replace(call, read_s=FILE_S)


def reset_cache(
    scope: ScopeParams, *, running: bool, timeout_s: float | None, key: str | None
) -> Request:
    """Drop KV caches."""
    named = {name: value for name, value in scope.params().items() if name != "adapter"}
    params = {**named, "reset_running_requests": running}
    return change("POST", "/reset_prefix_cache", params, key=key, timeout_s=timeout_s)


def label(model: str | None, version: str, key: str | None) -> Request:
    """Label the weights of a model."""
    params = {"new_version": version, "model": model}
    return change("POST", "/update_weight_version", params, key=key)


def decide(
    what: str, name: str, model: str | None, timeout_s: float | None, key: str | None
) -> Request:
    """Roll an adapter back, or promote it."""
    return change(
        "POST",
        adapter_path(name, what),
        {"model": model},
        key=key,
        timeout_s=timeout_s,
        background=True,
    )


def remove(
    name: str, version: str | None, model: str | None, timeout_s: float | None, key: str | None
) -> Request:
    """Remove a version of an adapter, or with None all versions."""
    path = adapter_path(name, *([] if version is None else [version]))
    return change("DELETE", path, {"model": model}, key=key, timeout_s=timeout_s, background=True)


def roll_out(
    name: str,
    version: str,
    model: str | None,
    rollout: RolloutParams,
    *,
    timeout_s: float | None,
    key: str | None,
) -> Request:
    """Activate a version that is staged."""
    params = {"version": version, "model": model, **rollout.params()}
    path = adapter_path(name, "rollout")
    return change("POST", path, params, key=key, timeout_s=timeout_s, background=True)


def push_weights(
    source: Upload,
    version: str | None,
    model: str | None,
    parameters: Sequence[Mapping[str, Any]] | None,
    key: str,
) -> Request:
    """Upload a file of base weights to the head."""
    given = {
        "version": version,
        "model": model,
        "sha256": source.sha256,
        "size": source.size_bytes,
        "parameters": _listed(parameters),
    }
    query = {name: str(value) for name, value in given.items() if value is not None}
    return Request("POST", "/v1/weights", query, upload=source, key=key, read_s=FILE_S)


def _given(**params: Any) -> dict[str, Any]:
    """Return the parameters that are not None."""
    return {name: value for name, value in params.items() if value is not None}


def joined(names: Names | None) -> str | None:
    """Return names as a query parameter."""
    return names if names is None or isinstance(names, str) else ",".join(names)


def generation_path(generation: str, *rest: str) -> str:
    """Return the path of a generation."""
    return "/".join(["/v1/generations", quote(generation, safe=""), *rest])


def cache_path(model: str, *rest: str) -> str:
    """Return the path of a model's prompt caches."""
    return "/".join(["/v1/cache", *(quote(part, safe="") for part in (model, *rest))])


def control_generation(generation: str, action: str, **params: Any) -> Request:
    """Control one generation."""
    return Request("POST", generation_path(generation, action), body=_given(**params))


def clear_kv(
    model: str | None,
    boards: Names | None,
    *,
    generation: str | None,
    ranges: Sequence[tuple[int, int]] | None,
    everything: bool,
    keep_system_prompt: bool | None,
) -> Request:
    """Clear KV caches."""
    body = _given(
        model=model,
        boards=[boards] if isinstance(boards, str) else boards and list(boards),
        generation=generation,
        ranges=ranges and [list(one) for one in ranges],
        all=everything or None,
        keep_system_prompt=keep_system_prompt,
    )
    return Request("POST", "/v1/cache/kv/clear", body=body)


def build_cache(
    model: str, name: str, prompt: str | None, messages: Sequence[Mapping[str, Any]] | None
) -> Request:
    """Build a prompt cache."""
    listed = None if messages is None else [dict(one) for one in messages]
    body = _given(cache_name=name, prompt=prompt, messages=listed)
    return Request("POST", cache_path(model), body=body, read_s=BUILD_S)
