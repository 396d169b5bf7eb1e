"""Downloads of images from untrusted URLs, guarded against server-side request forgery.

A host's addresses are looked up once and checked, and the connection goes to the checked address,
for every redirect anew. Only public addresses are allowed: no loopback, link-local (such as clouds'
metadata services) or private networks, nor other forms of such addresses. No proxy is used, no
credentials are sent, and no connection is kept.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore

from rkserve.api.prompting.images import ImagePart
from rkserve.config.router import ImagesConfig
from rkserve.core.errors import RequestError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

MAX_REDIRECTS = 3
AT_ONCE = 8  # of one Router
PORTS = {"http": 80, "https": 443}
MOVED = frozenset({301, 302, 303, 307, 308})
OK = 200
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NAT64_LOCAL = ipaddress.ip_network("64:ff9b:1::/48")
_LAST_32 = 0xFFFF_FFFF


class ImageUnavailable(Exception):
    """The reason why an image was not fetched, for the client."""


def is_public(address: Address) -> bool:
    """Return whether the address is in a public network."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = _inner(address)
        if inner is not None:
            return is_public(inner)
        if address in _NAT64_LOCAL:
            return False
    return address.is_global and not address.is_multicast


def _inner(address: ipaddress.IPv6Address) -> Address | None:
    """Return the IPv4 address that an IPv6 address embeds, if any."""
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & _LAST_32)
    if address.teredo is not None:
        return address.teredo[1]
    return address.ipv4_mapped or address.sixtofour


async def look_up(host: str, port: int) -> Sequence[str]:
    """Return the addresses of a host. Raises ``OSError``."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(info[4][0]) for info in found]


class CheckedNetwork(httpcore.AsyncNetworkBackend):
    """A network backend that connects to allowed addresses only."""

    def __init__(
        self, resolve: Resolve = look_up, allowed: Callable[[Address], bool] = is_public
    ) -> None:
        self._resolve, self._allowed = resolve, allowed
        self._inner = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Connect to the first address of ``host`` if all of them are allowed.

        Raises ``ImageUnavailable``.
        """
        try:
            found = [ipaddress.ip_address(one) for one in await self._resolve(host, port)]
        except (OSError, UnicodeError, ValueError) as exc:
            raise ImageUnavailable("its host is not known") from exc
        if not found:
            raise ImageUnavailable("its host is not known")
        if not all(map(self._allowed, found)):
            # One forbidden address suffices: an honest name does not mix both kinds.
            raise ImageUnavailable("its host is in a network that images are not fetched from")
        return await self._inner.connect_tcp(
            str(found[0]), port, timeout, local_address, socket_options
        )

    async def connect_unix_socket(self, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        """Refuse: URLs must not lead to sockets of this machine."""
        raise ImageUnavailable("it leads to a socket of this machine")

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)


class ImageFetcher:
    """Downloads images for one Router. Use from its event loop."""

    def __init__(
        self,
        config: ImagesConfig,
        network: Callable[[], CheckedNetwork] = CheckedNetwork,
        ports: Callable[[str, int], bool] = lambda scheme, port: PORTS[scheme] == port,
    ) -> None:
        """``ports`` returns whether a port of a scheme may be reached."""
        self._config, self._network, self._ports = config, network, ports
        self._places = asyncio.Semaphore(AT_ONCE)

    async def fetch(self, image: ImagePart) -> bytes:
        """Return the file of an image. Raises ``RequestError`` that names it."""
        limit_s = self._config.fetch_timeout_s
        try:
            return await asyncio.wait_for(self._within(image.url), limit_s)
        except (asyncio.TimeoutError, TimeoutError) as exc:
            why: str = f"it took more than {limit_s:g} s"
            raise _refused(image, why) from exc
        except ImageUnavailable as exc:
            raise _refused(image, str(exc)) from exc
        except (OSError, httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException):
            # The original messages could reveal details of internal networks.
            raise _refused(image, "its server could not be spoken to") from None

    async def _within(self, url: str) -> bytes:
        async with self._places:
            for _ in range(MAX_REDIRECTS + 1):
                self._check(url)
                answer = await self._get(url)
                if isinstance(answer, bytes):
                    return answer
                url = urljoin(url, answer)
        raise ImageUnavailable(f"it is redirected more than {MAX_REDIRECTS} times")

    def _check(self, url: str) -> None:
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme.lower(), parts.hostname, parts.port
        except ValueError as exc:
            raise ImageUnavailable("it is no URL") from exc
        plain = url.isascii() and url.isprintable() and " " not in url
        if scheme not in PORTS or not host or not plain:
            raise ImageUnavailable("it is no http(s) URL in ASCII")
        if parts.username is not None or parts.password is not None:
            raise ImageUnavailable("it has a name or a password in it")
        if not self._ports(scheme, PORTS[scheme] if port is None else port):
            raise ImageUnavailable("it names a port that images are not fetched from")
        if self._config.fetch_hosts and host not in self._config.fetch_hosts:
            raise ImageUnavailable("its host is none that images are fetched from")

    async def _get(self, url: str) -> bytes | str:
        """Return the body, or the URL that it redirects to."""
        headers = [
            ("accept", "image/*"),
            ("accept-encoding", "identity"),
            ("user-agent", "rkserve"),
        ]
        timeouts = dict.fromkeys(("connect", "read", "write"), self._config.fetch_timeout_s)
        async with (
            httpcore.AsyncConnectionPool(network_backend=self._network()) as pool,
            pool.stream(
                "GET", url.partition("#")[0], headers=headers, extensions={"timeout": timeouts}
            ) as response,
        ):
            said = {name.lower(): value for name, value in response.headers}
            if response.status in MOVED and b"location" in said:
                return said[b"location"].decode("latin-1")
            if response.status != OK:
                raise ImageUnavailable(f"its server answers {response.status}")
            if said.get(b"content-encoding", b"identity").lower() != b"identity":
                raise ImageUnavailable("its server packs it, which was not asked for")
            return await self._body(response)

    async def _body(self, response: httpcore.Response) -> bytes:
        most, found = self._config.max_bytes, bytearray()
        async for block in response.aiter_stream():
            found += block
            if len(found) > most:
                raise ImageUnavailable(f"it has more than {most} bytes")
        return bytes(found)


def fetch_of(config: ImagesConfig) -> Callable[[ImagePart], Awaitable[bytes]] | None:
    """Return the download function; None if downloads are disabled."""
    return ImageFetcher(config).fetch if config.fetch else None


def _refused(image: ImagePart, why: str) -> RequestError:
    return RequestError(f"Invalid '{image.path}': the image was not fetched: {why}.", image.path)
