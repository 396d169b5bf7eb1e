"""The calls that need more than a path: pausing, resuming and what hangs on their parameters.

It knows which routes there are, and no connection.
"""

from __future__ import annotations

from rkserve.client import calls
from rkserve.client.calls import Mode, Request, Scope


def pause(
    scope: Scope,
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


def resume(scope: Scope, *, timeout_s: float | None, epoch: int | None, key: str | None) -> Request:
    """Resume a part of the cluster."""
    return calls.change(
        "POST", "/resume", scope.params(), key=key, timeout_s=timeout_s, epoch=epoch
    )


def reset_cache(
    scope: Scope, *, running: bool, timeout_s: float | None, key: str | None
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
