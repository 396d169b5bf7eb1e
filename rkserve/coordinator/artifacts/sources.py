"""Sources of adapters besides uploads: folders of this machine, and the web.

The allow-lists hold for every path, link and redirect.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar
from urllib.parse import unquote, urljoin, urlsplit

from rkserve.core.errors import ArtifactNotFound, ArtifactRefused, ConfigError
from rkserve.models.adapters import ADAPTER_FILE

if TYPE_CHECKING:
    # A tenth of a Coordinator's start, and most download nothing: imported by what does.
    import httpx

BLOCK_BYTES = 1 << 20
MAX_REDIRECTS = 5
SILENCE_S = 15.0
PORTS = {"http": 80, "https": 443}
NOT_FOUND = frozenset({404, 410})


class Source:
    """A file that is open for reading, once; ``size_bytes`` is None if unknown."""

    def __init__(self, blocks: Iterator[bytes], size_bytes: int | None, stack: ExitStack) -> None:
        self.blocks = blocks
        self.size_bytes = size_bytes
        self._stack = stack

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


# -- folders --------------------------------------------------------------------------------------


def adapter_in(folder: Path) -> Path:
    """Return the path of the adapter file in a folder."""
    return folder / ADAPTER_FILE


def open_path(
    path: str, allowed: tuple[Path, ...], file_in: Callable[[Path], Path] = adapter_in
) -> Source:
    """Open a file, or the one in a folder, that lies in one of the allowed folders.

    ``file_in`` selects the file of a folder: that of an adapter, or of a model.

    Raises:
        ArtifactRefused: it lies elsewhere, is no regular file, or cannot be read.
        ArtifactNotFound: there is none.
    """
    if not allowed:
        raise ArtifactRefused(
            "Nothing is taken from paths: `coordinator.allowed_paths` names no folder.",
            "path",
        )
    asked = Path(path)
    if not asked.is_absolute() or "\0" in path:
        raise ArtifactRefused("The path must be absolute.", "path")
    try:
        return _open_within(asked, [folder.expanduser().resolve() for folder in allowed], file_in)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise ArtifactNotFound(f"There is no file '{path}' on the head.", "path") from exc
    except RuntimeError as exc:  # so says Python up to 3.12 of a link to itself
        raise ArtifactRefused(f"'{path}' is a link to itself.", "path") from exc
    except OSError as exc:
        why = "it is a link to itself" if exc.errno == errno.ELOOP else exc.strerror
        raise ArtifactRefused(f"'{path}' cannot be read: {why or exc}.", "path") from exc


def _open_within(asked: Path, allowed: list[Path], file_in: Callable[[Path], Path]) -> Source:
    real = asked.resolve()
    _require_within(real, allowed)  # first: callers must not learn anything about files elsewhere
    if real.is_dir():
        real = file_in(real).resolve()
        _require_within(real, allowed)
    # O_NONBLOCK: opening a pipe without a writer would wait forever.
    descriptor = os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with ExitStack() as stack:
        file = stack.enter_context(os.fdopen(descriptor, "rb"))
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise ArtifactRefused(f"'{asked}' is not a regular file.", "path")
        # A parent folder may have become a link since: the opened file is checked.
        _require_within(Path(f"/proc/self/fd/{descriptor}").readlink(), allowed)
        blocks = iter(lambda: file.read(BLOCK_BYTES), b"")
        return Source(blocks, found.st_size, stack.pop_all())
    raise AssertionError("unreachable")  # the stack above swallows nothing


def _require_within(real: Path, allowed: list[Path]) -> None:
    if not any(real.is_relative_to(folder) for folder in allowed):
        raise ArtifactRefused(
            "That path is in none of the folders that `coordinator.allowed_paths` names.", "path"
        )


# -- the web --------------------------------------------------------------------------------------


def check_prefixes(prefixes: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` unless every prefix is one that a URL can be compared with."""
    for prefix in prefixes:
        try:
            _parts(prefix)
        except ArtifactRefused as exc:
            raise ConfigError(f"coordinator.allowed_urls: '{prefix}': {exc}") from exc


def allows(url: str, prefixes: tuple[str, ...]) -> bool:
    """Return whether a URL is below one of the prefixes. Raises ``ArtifactRefused`` for a malformed
    one.
    """
    scheme, host, port, path = _parts(url)
    for prefix in prefixes:
        *origin, folder = _parts(prefix)
        below = path == folder or path.startswith(f"{folder.rstrip('/')}/")
        if origin == [scheme, host, port] and below:
            return True
    return False


def open_url(url: str, prefixes: tuple[str, ...], limit_s: float) -> Source:
    """Open a URL; redirects are followed as far as the prefixes allow.

    Raises:
        ArtifactRefused: it is not allowed, or the server's answer is unusable.
        ArtifactNotFound: the server has nothing there.
    """
    import httpx  # see above

    deadline_s = time.monotonic() + limit_s
    with ExitStack() as stack:
        # No proxy and no credentials from this process' environment: only the list counts.
        client = stack.enter_context(httpx.Client(trust_env=False, timeout=min(SILENCE_S, limit_s)))
        try:
            response = _follow(client, stack, url, prefixes)
        except httpx.HTTPError as exc:
            raise _no_answer(exc) from exc
        length = response.headers.get("content-length", "")
        blocks = _blocks(response, deadline_s)
        return Source(blocks, int(length) if length.isdecimal() else None, stack.pop_all())
    raise AssertionError("unreachable")  # the stack above swallows nothing


def _follow(
    client: httpx.Client, stack: ExitStack, url: str, prefixes: tuple[str, ...]
) -> httpx.Response:
    for _ in range(MAX_REDIRECTS + 1):
        if not allows(url, prefixes):
            raise ArtifactRefused(
                "That URL, or one that it redirects to, is below none of those that "
                "`coordinator.allowed_urls` names.",
                "url",
            )
        # Without compression: a compressed file could unpack to any size.
        request = client.build_request("GET", url, headers={"accept-encoding": "identity"})
        response = client.send(request, stream=True)
        if not response.has_redirect_location:
            stack.callback(response.close)
            _require_file(response)
            return response
        response.close()
        url = urljoin(url, response.headers["location"])
    raise ArtifactRefused(f"The URL redirects more than {MAX_REDIRECTS} times.", "url")


def _require_file(response: httpx.Response) -> None:
    if response.status_code in NOT_FOUND:
        raise ArtifactNotFound("The server of that URL has no such file.", "url")
    if response.status_code != HTTPStatus.OK:
        raise ArtifactRefused(f"The server of that URL answered {response.status_code}.", "url")
    if response.headers.get("content-encoding", "identity").lower() != "identity":
        raise ArtifactRefused("The server of that URL sends a packed file unasked.", "url")


def _blocks(response: httpx.Response, deadline_s: float) -> Iterator[bytes]:
    import httpx  # see above

    try:
        for block in (
            response.iter_raw()
        ):  # in small pieces, so that a slow trickle meets the time limit too
            if time.monotonic() > deadline_s:
                raise ArtifactRefused("The server of that URL took too long.", "url")
            yield block
    except httpx.HTTPError as exc:
        raise _no_answer(exc) from exc


def _no_answer(exc: httpx.HTTPError) -> ArtifactRefused:
    why = str(exc) or type(exc).__name__
    return ArtifactRefused(f"The server of that URL did not send the file: {why}.", "url")


def _parts(url: str) -> tuple[str, str, int, str]:
    """Return scheme, host, port and path. Raises ``ArtifactRefused`` for ambiguous URLs."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise ArtifactRefused(f"It is not a URL: {exc}.", "url") from exc
    if parts.scheme not in PORTS or not parts.hostname:
        raise ArtifactRefused("Only URLs with http or https and a host are taken.", "url")
    if parts.username is not None or parts.password is not None:
        raise ArtifactRefused("A URL must not hold a user's name or password.", "url")
    path = unquote(parts.path)
    # "%2e%2e", "%5c" and "%252e" too: servers interpret them differently.
    if re.search(r"[\x00-\x20\x7f\\]", url) or {"..", "."} & set(path.split("/")):
        raise ArtifactRefused("The path of a URL must lead straight to the file.", "url")
    if re.search(r"[%\\\x00-\x1f]", path):
        raise ArtifactRefused("The path of a URL must lead straight to the file.", "url")
    return parts.scheme, parts.hostname.lower(), port or PORTS[parts.scheme], path or "/"


P = ParamSpec("P")
T = TypeVar("T")

AT_ONCE = 4


class DownloadPool:
    """A limited number of blocking calls in threads of their own. Use it from one event loop.

    A slow server holds its thread for minutes. In asyncio's shared threads a few of them would keep
    chunks from being read, and so every board from being staged.
    """

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._going_on = 0
        self._threads = ThreadPoolExecutor(at_once, thread_name_prefix="fetch")

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call in one of the threads.

        Raises:
            ArtifactRefused: the limit of concurrent downloads is reached.
        """
        if self._going_on >= self._at_once:
            raise ArtifactRefused(
                f"{self._going_on} files are being fetched at once, which is the limit; try "
                "again in a moment."
            )
        self._going_on += 1
        future = self._threads.submit(partial(call, *args, **kwargs))
        loop = asyncio.get_running_loop()
        # Also when the caller was cancelled: the thread is free only once the call has ended.
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._ended))
        return await asyncio.wrap_future(future)

    def _ended(self) -> None:
        self._going_on -= 1

    def close(self) -> None:
        """Start no more calls; running ones end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)
