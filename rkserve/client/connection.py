"""Arguments of httpx that both clients share: address, headers, time limits."""

from __future__ import annotations

from typing import Any

import httpx

from rkserve.client.requests import Request

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_S = 5.0
READ_S = 30.0
# Serve restarts a Router or a Coordinator within this time.
PATIENCE_S = 30.0


def check_url(url: str) -> str:
    """Return the base URL without the ``/v1`` that OpenAI's clients need.

    Raises:
        ValueError: it is not an http or https URL.
    """
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as exc:
        raise ValueError(f"{url!r} is not a URL: {exc}") from exc
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ValueError(f"{url!r} must begin with http:// or https:// and name a host")
    return url.rstrip("/").removesuffix("/v1")


def headers(admin_key: str | None) -> httpx.Headers:
    """Return the headers of every call.

    Raises:
        ValueError: the key is not valid in a header. The message of httpx would contain the key.
    """
    fields = {"accept": "application/json"}
    if admin_key and (key := admin_key.strip()):
        if not key.isprintable():
            raise ValueError("the admin key has a character that cannot be printed")
        fields["authorization"] = f"Bearer {key}"
    return httpx.Headers(fields, encoding="utf-8")  # as a Router reads the key


def arguments(request: Request, read_s: float) -> dict[str, Any]:
    """Return the keyword arguments of httpx's ``request`` except method, path and content."""
    given: dict[str, Any] = {"params": dict(request.query), "headers": {}}
    if request.body is not None:
        given["json"] = request.body
    if request.upload is not None:
        given["headers"] = {
            "content-type": "application/octet-stream",
            "content-length": str(request.upload.size_bytes),
        }
    if request.key is not None:
        given["headers"]["idempotency-key"] = request.key
    if request.read_s is not None:
        limit_s = max(read_s, request.read_s)
        given["timeout"] = httpx.Timeout(limit_s, connect=CONNECT_S)
    return given
