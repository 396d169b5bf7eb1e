"""Every call as a value: method, path, parameters by the names of the HTTP API, file to upload.

A parameter that is None is left out, so that the server's own default holds. Nothing is sent here.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import ssl
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal
from urllib.parse import quote

import httpx

from rkserve.client.errors import SourceFailed
from rkserve.core.files import MANIFEST_MAX_CHARS, SIGNED_SUFFIX, file_digest
from rkserve.core.tls import add_authorities, named_authorities

DEFAULT_URL = "http://127.0.0.1:8000"
CONNECT_S = 5.0
READ_S = 30.0
WATCH_S = 120.0  # a stream without news has comments more often than that
QUIET_S = 300.0  # a log that is followed has empty lines meanwhile, every few seconds
# Serve restarts a Router or a Coordinator within this time.
PATIENCE_S = 30.0
PIECE_BYTES = 1 << 20
ADAPTER_FILE = "adapter.rkllm"

Mode = Literal["keep", "wait", "abort"]
DrainMode = Literal["wait", "move"]
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
class Upload:
    """A source to upload. ``on_sent`` is called with the bytes sent, from 0 at each try."""

    source: Path | bytes
    size_bytes: int
    sha256: str
    on_sent: Callable[[int], None] = field(default=lambda _: None, compare=False)

    @classmethod
    def of(cls, source: Path | str | bytes, on_sent: Callable[[int], None]) -> Upload:
        """Read the source once. A folder stands for the ``adapter.rkllm`` in it.

        Raises:
            SourceFailed: the source cannot be read.
        """
        if isinstance(source, bytes):
            return cls(source, len(source), hashlib.sha256(source).hexdigest(), on_sent)
        path = Path(source)
        path = path / ADAPTER_FILE if path.is_dir() else path
        try:
            return cls(path, path.stat().st_size, file_digest(path), on_sent)
        except OSError as exc:
            raise SourceFailed(f"{path} cannot be read: {exc.strerror or exc}") from exc

    def pieces(self) -> Iterator[bytes]:
        """Yield all bytes. Raises ``SourceFailed``."""
        with self._open() as file:
            sent = 0
            while piece := self._next(file, sent):
                yield piece
                sent += len(piece)
                self.on_sent(sent)

    async def pieces_async(self) -> AsyncIterator[bytes]:
        """Yield all bytes, read in a thread. Raises ``SourceFailed``."""
        file = await asyncio.to_thread(self._open)
        try:
            sent = 0
            while piece := await asyncio.to_thread(self._next, file, sent):
                yield piece
                sent += len(piece)
                self.on_sent(sent)
        finally:
            file.close()

    def _open(self) -> BinaryIO:
        if isinstance(self.source, bytes):
            return BytesIO(self.source)
        try:
            return self.source.open("rb")
        except OSError as exc:
            raise SourceFailed(f"{self.source} cannot be read: {exc.strerror or exc}") from exc

    def _next(self, file: BinaryIO, sent: int) -> bytes:
        """Return the next piece; the pieces add up to the announced size."""
        due = min(PIECE_BYTES, self.size_bytes - sent)
        try:
            piece = file.read(due)
        except OSError as exc:
            raise SourceFailed(f"{self.source!r} cannot be read: {exc.strerror or exc}") from exc
        if len(piece) < due:
            raise SourceFailed(f"{self.source!r} became shorter during the upload.")
        return piece


def manifest_of(
    source: Path | str | bytes, given: Path | str | Mapping[str, Any] | None
) -> str | None:
    """Return the signed manifest of a file or a model folder: the given one, or that beside it.

    Raises:
        SourceFailed: it cannot be read, or is no JSON object of at most 8 KB.
    """
    if isinstance(given, Mapping):
        return json.dumps(dict(given), separators=(",", ":"))
    if given is None:
        if isinstance(source, bytes):
            return None
        path = Path(source)
        path = path / ADAPTER_FILE if (path / ADAPTER_FILE).is_file() else path
        given = path.with_name(path.name + SIGNED_SUFFIX)
        if not given.is_file():
            return None
    try:
        found = json.loads(Path(given).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as exc:
        raise SourceFailed(f"The manifest {given} cannot be read: {exc}") from exc
    text = json.dumps(found, separators=(",", ":"))
    if not isinstance(found, dict) or len(text) > MANIFEST_MAX_CHARS:
        raise SourceFailed(
            f"The manifest {given} is no JSON object of at most {MANIFEST_MAX_CHARS} characters."
        )
    return text


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


def authorities(url: str, ca_file: Path | str | None) -> ssl.SSLContext | bool:
    """Return the context for a URL: httpx's own, with the authorities of a file where one is named.

    Raises:
        ValueError: the file cannot be read, or has no certificate.
    """
    file = Path(ca_file) if ca_file is not None else named_authorities(os.environ)
    if file is None or not url.startswith("https://"):
        return True
    context = httpx.create_ssl_context()
    add_authorities(context, file)
    return context


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


def fetch(path: str, **query: str | int | None) -> Request:
    """Return a call that changes nothing."""
    given = {name: str(value) for name, value in query.items() if value is not None}
    return Request("GET", path, given)


def change(
    method: str,
    path: str,
    params: Mapping[str, Any],
    *,
    key: str | None = None,
    timeout_s: float | None = None,
    epoch: int | None = None,
    background: bool = False,
    read_s: float | None = None,
) -> Request:
    """Return a call that changes something; without ``key`` it gets a random one."""
    if read_s is None and not background:
        read_s = (timeout_s or OPERATION_TIMEOUT_S) + MARGIN_S
    return Request(
        method,
        path,
        body=given(**params, timeout_s=timeout_s, epoch=epoch, **{"async": background or None}),
        key=key or new_key(),
        read_s=read_s,
    )


def send_file(
    path: str, source: Upload, params: Mapping[str, Any], *, key: str, read_s: float
) -> Request:
    """Return a call that uploads a file; ``parameters``, its tensors, are JSON in the query."""
    query = {**params, "sha256": source.sha256, "size": source.size_bytes}
    if params["parameters"] is not None:
        tensors = [dict(one) for one in params["parameters"]]
        query["parameters"] = json.dumps(tensors, separators=(",", ":"))
    texts = {name: str(value) for name, value in given(**query).items()}
    return Request("POST", path, texts, upload=source, key=key, read_s=read_s)


def new_key() -> str:
    """Return a random idempotency key."""
    return str(uuid.uuid4())


def given(**params: Any) -> dict[str, Any]:
    """Return the parameters that are not None."""
    return {name: value for name, value in params.items() if value is not None}


def scope(
    models: Names | None = None, boards: Names | None = None, adapter: str | None = None
) -> dict[str, Any]:
    """Return the parameters of a part of the cluster; None restricts nothing.

    ``boards`` are ids or shell patterns such as ``sim-*``.
    """
    return given(model=listed(models), selector=listed(boards), adapter=adapter)


def listed(names: Names | None) -> list[str] | None:
    """Return names as a parameter of a body."""
    return [names] if isinstance(names, str) else None if names is None else list(names)


def joined(names: Names | None) -> str | None:
    """Return names as a query parameter."""
    return names if names is None or isinstance(names, str) else ",".join(names)


def path_of(root: str, *names: str) -> str:
    """Return a path below ``root``, whatever characters the names have."""
    return "/".join([root, *(quote(name, safe="") for name in names)])
