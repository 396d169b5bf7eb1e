"""The calls that need more than a path: pausing, sleeping, weights, and what hangs on parameters.

It knows which routes there are, and no connection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rkserve.client import calls
from rkserve.client.answers import Pushed
from rkserve.client.calls import FILE_S, InFlight, Level, Mode, Request, ScopeParams, Tag
from rkserve.client.weights import PushedWeights


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
    return calls.change("POST", "/pause", params, key=key, timeout_s=timeout_s, epoch=epoch)


def resume(
    scope: ScopeParams, *, timeout_s: float | None, epoch: int | None, key: str | None
) -> Request:
    """Resume a part of the cluster."""
    return calls.change(
        "POST", "/resume", scope.params(), key=key, timeout_s=timeout_s, epoch=epoch
    )


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
    return calls.change(
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
    """Wake a part of the cluster, or of what it needs."""
    params = {**scope.params(), "tags": None if tags is None else list(tags)}
    return calls.change(
        "POST", "/wake_up", params, key=key, timeout_s=timeout_s, epoch=epoch, background=True
    )


def load(model: str, *, timeout_s: float | None, key: str | None) -> Request:
    """Have a model served again."""
    return calls.change(
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
    """Have the boards of a model end their engines."""
    params = {"model": model, "level": level, "mode": mode, "wake_on_request": wake_on_request}
    return calls.change(
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
    """Have boards load another file of their base model."""
    params = {
        "model_path": path if isinstance(path, str) else path.label,
        "weight_version": version,
        "model": model if isinstance(path, str) else model or path.model,
        "in_flight": in_flight,
        "max_unavailable": max_unavailable,
    }
    asked = calls.change(
        "POST",
        "/update_weights_from_disk",
        params,
        key=key,
        timeout_s=timeout_s,
        background=True,
    )
    return replace(asked, read_s=FILE_S)


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
    """Have weights that are staged come into use as those of a trainer's step, PipelineRL's form.

    What is sent has no ``timestamp``: the same call, made again, is the same call.
    """
    named = artifact if isinstance(artifact, str) else artifact.label
    meant = model if isinstance(artifact, str) else model or artifact.model
    told: Sequence[Mapping[str, Any]] = [] if parameters is None else parameters
    if parameters is None and not isinstance(artifact, str):
        told = [{"name": named, "shape": [artifact.size_bytes], "dtype": "uint8"}]
    params = {
        "kind": "weight_update_request",
        "version": step,
        "parameters_info": [dict(one) for one in told],
        "artifact": named,
        "model": meant,
        "in_flight": in_flight,
    }
    asked = calls.change(
        "POST", "/receive_weight_update", params, key=key, timeout_s=timeout_s, background=True
    )
    return replace(asked, read_s=FILE_S)


def reset_cache(
    scope: ScopeParams, *, running: bool, timeout_s: float | None, key: str | None
) -> Request:
    """Drop KV caches."""
    named = {name: value for name, value in scope.params().items() if name != "adapter"}
    params = {**named, "reset_running_requests": running}
    return calls.change("POST", "/reset_prefix_cache", params, key=key, timeout_s=timeout_s)


def label(model: str | None, version: str, key: str | None) -> Request:
    """Name the weights of a model."""
    params = {"new_version": version, "model": model}
    return calls.change("POST", "/update_weight_version", params, key=key)


def decide(
    what: str, name: str, model: str | None, timeout_s: float | None, key: str | None
) -> Request:
    """Roll an adapter back, or promote it."""
    return calls.change(
        "POST",
        calls.adapter_path(name, what),
        {"model": model},
        key=key,
        timeout_s=timeout_s,
        background=True,
    )


def remove(
    name: str, version: str | None, model: str | None, timeout_s: float | None, key: str | None
) -> Request:
    """Retire a version, or with None all of an adapter."""
    path = calls.adapter_path(name, *([] if version is None else [version]))
    return calls.change(
        "DELETE", path, {"model": model}, key=key, timeout_s=timeout_s, background=True
    )
