"""A server to load, with model and key, and its requests as bytes. No sockets."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from rkserve.bench.harness.child import BenchFailed, Json
from rkserve.bench.harness.client import request_bytes

CHAT, COMPLETIONS = "chat", "completions"
ASK_S = 10.0
PORTS = {"http": 80, "https": 443}


class ServerUnreachable(BenchFailed):
    """No server answers at the given address."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server and the form of its requests.

    ``url`` is the base URL as OpenAI's clients define it; without a path ``/v1`` is added. ``body``
    is added to every request and overrides the trace.
    """

    name: str
    url: str
    model: str
    api: str = CHAT
    key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tls(self) -> bool:
        """True if the server uses TLS."""
        return urlsplit(self.url).scheme == "https"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url)
        return parts.hostname or "", parts.port or PORTS[parts.scheme]

    @property
    def base(self) -> str:
        """The path that all calls begin with."""
        return base_path(self.url)

    def body_of(
        self,
        messages: Sequence[Json],
        max_tokens: int,
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> Json:
        """Return the body of a streamed call."""
        body: Json = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **more,
            **self.body,
        }
        if self.api == CHAT:
            body["messages"] = list(messages)
        else:
            body["prompt"] = plain(messages)
        return body

    def request(self, body: Json, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
        """Return a request as bytes."""
        path = "/chat/completions" if self.api == CHAT else "/completions"
        host, port = self.address
        host = f"[{host}]" if ":" in host else host
        return request_bytes(host, port, body, self.base + path, {**self._headers(), **headers})

    def _headers(self) -> dict[str, str]:
        own = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
        return {**own, **self.headers}


def base_path(url: str) -> str:
    """Return the path of a base URL. Raises ``ValueError`` where it is none of HTTP."""
    parts = urlsplit(url)
    if parts.scheme not in PORTS or not parts.hostname:
        raise ValueError(f"{url!r} is not an http:// or https:// URL")
    return parts.path.rstrip("/") or "/v1"


def plain(messages: Sequence[Json]) -> str:
    """Return a conversation as the prompt of a completion."""
    lines = [f"{one['role'].capitalize()}: {one['content']}" for one in messages]
    return "\n".join([*lines, "Assistant:"])


def models_of(url: str, key: str | None) -> list[str]:
    """Return the models and adapters that a server lists, without embedding models.

    Models that rkserve lists with an ``embedding`` section are left out.

    Raises:
        Unreachable: no server answers.
        BenchFailed: it lists none.
    """
    where = f"{base_path(url)}/models"
    try:
        listed = get_json(url, "/models", key)["data"]
        embedding = [one["id"] for one in listed if (one.get("rkserve") or {}).get("embedding")]
        found = [str(one["id"]) for one in listed if one["id"] not in embedding]
    except urllib.error.HTTPError as exc:
        raise BenchFailed(f"{where} answers HTTP {exc.code}; name the model instead") from exc
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as exc:
        raise BenchFailed(f"{where} lists no model; name the model instead") from exc
    except (OSError, urllib.error.URLError) as exc:
        raise ServerUnreachable(f"{url} cannot be reached: {exc}") from exc
    if not found:
        raise BenchFailed(f"{where} lists no model; name the model instead")
    return found


def get_json(url: str, path: str, key: str | None, timeout_s: float = ASK_S) -> Any:
    """Return what a path below the base URL answers. Raises ``OSError``, ``ValueError``."""
    parts = urlsplit(url)
    where = f"{parts.scheme}://{parts.netloc}{base_path(url)}{path}"
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    asked = urllib.request.Request(where, headers=headers)
    context = _tls(parts.scheme)
    with urllib.request.urlopen(asked, timeout=timeout_s, context=context) as answer:
        return json.load(answer)


def _tls(scheme: str) -> ssl.SSLContext | None:
    return ssl.create_default_context() if scheme == "https" else None
