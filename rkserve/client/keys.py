"""Calls about API keys, and the key that a client sends where its program names none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rkserve.client import answers, flows
from rkserve.client.calls import Calls, call
from rkserve.client.flows import Flow
from rkserve.client.requests import Names, Request, given, listed, new_key, path_of

KEYS = "/v1/keys"
VARIABLES = ("RKSERVE_ADMIN_KEY", "RKSERVE_API_KEY")
OTHERS = 0o077  # permissions of the group and of everybody


def keys_file(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the user's file of keys: lines of a URL and the key for it."""
    root = environ.get("XDG_CONFIG_HOME", "")
    # The specification wants a relative value ignored.
    return (Path(root) if Path(root).is_absolute() else Path.home() / ".config") / "rkserve/keys"


def own_key(url: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the user's key for a URL: that of the environment, or of the file of keys.

    Raises:
        ValueError: the file cannot be read, or other accounts may read it.
    """
    for name in VARIABLES:
        if found := environ.get(name, "").strip():
            return found
    file = keys_file(environ)
    try:
        mode, text = file.stat().st_mode & 0o777, file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise ValueError(f"{file} cannot be read: {exc}") from exc
    if mode & OTHERS:
        raise ValueError(f"{file} has mode {mode:04o}, but it holds keys. Run: chmod 600 {file}")
    for line in text.splitlines():
        place, _, key = line.strip().partition(" ")
        # A key is sent to the cluster that it is for, and to no other.
        if place.rstrip("/").removesuffix("/v1") == url and key:
            return key.strip()
    return None


class KeyCalls(Calls):
    """Calls that create, list, rotate and revoke API keys."""

    @call
    def create_key(
        self,
        name: str,
        scopes: Names | None = None,
        *,
        models: Names | None = None,
        expires_in_s: float | None = None,
        limits: Mapping[str, float] | None = None,
        key: str | None = None,
    ) -> Flow[dict[str, Any]]:
        """Create an API key, and return it with its secret as ``value``, which is shown this once.

        ``scopes`` are those of the API, ``infer`` by default; ``limits`` its limits by name.
        ``key`` is the idempotency key: a repeat is answered without the secret.

        Raises:
            Conflict: another key has that name.
        """
        body = given(
            name=name,
            scopes=listed(scopes),
            models=listed(models) or None,
            expires_in_s=expires_in_s,
            **(limits or {}),
        )
        request = Request("POST", KEYS, body=body, key=key or new_key())
        return flows.ask(request, self._retry, dict)

    @call
    def api_keys(self) -> Flow[list[dict[str, Any]]]:
        """Return all API keys of the cluster, without their secrets."""
        return self._ask(KEYS, answers.rows)

    @call
    def rotate_key(
        self, key_id: str, grace_s: float | None = None, *, key: str | None = None
    ) -> Flow[dict[str, Any]]:
        """Give an API key another secret, and return it with that as ``value``.

        The secret before it stays good for ``grace_s`` seconds; ``routers_behind`` Routers have not
        confirmed the change yet.

        Raises:
            NotFound: there is no such key.
        """
        body = given(grace_s=grace_s)
        request = Request("POST", path_of(KEYS, key_id, "rotate"), body=body, key=key or new_key())
        return flows.ask(request, self._retry, dict)

    @call
    def revoke_key(self, key_id: str, *, key: str | None = None) -> Flow[dict[str, Any]]:
        """Revoke an API key. When it returns no Router takes it any more, but for
        ``routers_behind`` of them that have not confirmed it within a second, such as frozen ones.

        Raises:
            NotFound: there is no such key.
        """
        request = Request("DELETE", path_of(KEYS, key_id), key=key or new_key())
        return flows.ask(request, self._retry, dict)
