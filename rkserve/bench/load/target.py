"""Which server is asked, for which model and with which key; requests as bytes. No sockets here."""

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

from rkserve.bench.child import BenchFailed, Json
from rkserve.bench.client import request_bytes

CHAT, COMPLETIONS = "chat", "completions"
ASK_S = 10.0
PORTS = {"http": 80, "https": 443}


class Unreachable(BenchFailed):
    """Nobody answers at the address that was given."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and how it is asked.

    ``url`` is what OpenAI's clients call the base URL; without a path ``/v1`` is added. ``body`` is
    added to every request and wins over what the trace says.
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
        """Whether the server is asked over TLS."""
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

    def request(
        self,
        messages: Sequence[Json],
        max_tokens: int,
        more: Mapping[str, Any] = MappingProxyType({}),
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> bytes:
        """Return a streamed call as it goes over the wire."""
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
            path, body["messages"] = "/chat/completions", list(messages)
        else:
            path, body["prompt"] = "/completions", plain(messages)
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
        raise ValueError(f"{url!r} is no http:// or https:// URL")
    return parts.path.rstrip("/") or "/v1"


def plain(messages: Sequence[Json]) -> str:
    """Return a conversation as the prompt of a completion."""
    lines = [f"{one['role'].capitalize()}: {one['content']}" for one in messages]
    return "\n".join([*lines, "Assistant:"])


def first_model(url: str, key: str | None) -> str:
    """Ask a server for its models and return the first. Raises ``Unreachable``, ``BenchFailed``."""
    parts = urlsplit(url)
    where = f"{parts.scheme}://{parts.netloc}{base_path(url)}/models"
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    try:
        asked = urllib.request.Request(where, headers=headers)
        with urllib.request.urlopen(asked, timeout=ASK_S, context=_tls(parts.scheme)) as answer:
            return str(json.load(answer)["data"][0]["id"])
    except urllib.error.HTTPError as exc:
        raise BenchFailed(f"{where} answers HTTP {exc.code}; name the model instead") from exc
    except (OSError, urllib.error.URLError) as exc:
        raise Unreachable(f"{where} cannot be reached: {exc}") from exc
    except (ValueError, KeyError, IndexError, TypeError) as exc:
        raise BenchFailed(f"{where} lists no model; name the model instead") from exc


def _tls(scheme: str) -> ssl.SSLContext | None:
    return ssl.create_default_context() if scheme == "https" else None
