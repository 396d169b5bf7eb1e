"""A server to load: its address, its models, its requests as bytes, and its boards' figures."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from rkserve.bench.connection import request_bytes
from rkserve.bench.processes import BenchFailed, Json
from rkserve.core.tls import context_for

CHAT, COMPLETIONS = "chat", "completions"
ASK_S = 10.0
PORTS = {"http": 80, "https": 443}
BOARDS_EVERY_S = 0.5  # Routers ask their boards once a second
BOARDS_LIMIT_S = 2.0


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
    context = context_for(where)
    with urllib.request.urlopen(asked, timeout=timeout_s, context=context) as answer:
        return json.load(answer)


@dataclass(frozen=True, slots=True)
class BoardSample:
    """A board's own figures at one moment of the monotonic clock; None is what it does not tell.

    ``npu_load`` is the mean over its cores, in percent. ``memory_mb`` is the engine's peak.
    """

    at_s: float
    board: str
    npu_load: float | None = None
    npu_mhz: float | None = None
    memory_mb: float | None = None
    memory_available_mb: float | None = None
    temperature_c: float | None = None


class BoardMonitor:
    """Reads a server's boards again and again around a run; nothing, where it lists none."""

    def __init__(self, target: Target, every_s: float = BOARDS_EVERY_S) -> None:
        self._target, self._every_s = target, every_s
        self._samples: list[BoardSample] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="boards", daemon=True)

    def start(self) -> None:
        """Begin with a first reading."""
        self._read()
        if self._samples:  # else it has no boards, and does not get any
            self._thread.start()

    def stop(self) -> tuple[BoardSample, ...]:
        """Return all readings, the last of which is of now."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._samples:
            self._read()
        return tuple(self._samples)

    def _run(self) -> None:
        while not self._over.wait(self._every_s):
            self._read()

    def _read(self) -> None:
        at_s = time.monotonic()
        try:
            boards = get_json(self._target.url, "/boards", self._target.key, BOARDS_LIMIT_S)
            self._samples += [_sample(at_s, one) for one in boards["data"]]
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # Other servers have no boards, and one that is overloaded tells of them next time.
            return


def _sample(at_s: float, board: dict[str, Any]) -> BoardSample:
    hardware = board.get("hardware") or {}
    loads, available = hardware.get("npu_load") or (), hardware.get("memory_available_bytes")
    return BoardSample(
        at_s,
        str(board["id"]),
        sum(loads) / len(loads) if loads else None,
        None if hardware.get("npu_hz") is None else hardware["npu_hz"] / 1e6,
        board.get("memory_mb"),
        None if available is None else available / 1e6,
        hardware.get("temperature_c"),
    )
