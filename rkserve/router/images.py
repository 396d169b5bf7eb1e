"""The images of a request: downloaded, decoded and resized for the vision encoder within limits.

A file is untrusted: its format (by its first bytes), its size in pixels and its number of passes
are checked before it is unpacked, and boards receive pixels only.

Downloads are guarded against server-side request forgery. A host's addresses are looked up once and
checked, and the connection goes to the checked address, for every redirect anew. Only public
addresses are allowed: no loopback, link-local (such as clouds' metadata services) or private
networks, nor other forms of such addresses. No proxy is used, no credentials are sent, and no
connection is kept.
"""

from __future__ import annotations

import asyncio
import io
import ipaddress
import socket
import struct
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from urllib.parse import urljoin, urlsplit

import httpcore
from PIL import Image

from rkserve.api.prompting.images import ImagePart
from rkserve.config.router import ImagesConfig
from rkserve.core.errors import RequestError, UnsupportedParameter
from rkserve.core.run_params import Picture
from rkserve.models.settings import VisionSettings

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# Each pass of a progressive JPEG processes all of its pixels and costs the sender a few bytes.
# Encoders make about ten.
MAX_SCANS = 64
_JPEG, _SCAN = b"\xff\xd8", b"\xff\xda"
_ORIENTATION = 0x0112  # of EXIF
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_14_BITS = 0x3FFF

# The configured limit is checked for every file before it is loaded; the library's own limit
# would warn of some files and reject others.
Image.MAX_IMAGE_PIXELS = None


def picture_of(data: bytes, path: str, vision: VisionSettings, max_pixels: int) -> Picture:
    """Return an image as its encoder takes it; of an animation the first frame.

    Raises:
        RequestError: the image cannot be read or is too large; names ``path``.
    """
    try:
        found = _read(data, path, vision, max_pixels)
    except RequestError:
        raise
    except Exception as exc:  # decoders raise all kinds of errors for damaged files
        raise RequestError(
            f"Invalid '{path}': it is no PNG, JPEG, WebP or GIF image, or a damaged one.", path
        ) from exc
    return Picture(vision.size, vision.size, found.tobytes())


def _read(data: bytes, path: str, vision: VisionSettings, max_pixels: int) -> Image.Image:
    if data[:4] == b"RIFF":
        # The WebP decoder allocates all pixels when the file is opened.
        _hold_to(_webp_size(data), path, max_pixels)
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        _hold_to(image.size, path, max_pixels)
        if data.startswith(
            _JPEG
        ):  # the library has another format name for photos with several pictures
            if data.count(_SCAN) > MAX_SCANS:
                raise RequestError(f"Invalid '{path}': its JPEG has too many passes.", path)
            image.draft("RGB", (vision.size, vision.size))  # decodes at a reduced size
        turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
        image.load()
        # Transparency is removed after shrinking, because that takes memory at full size.
        shrunk = _opaque(_shrunk(_plain(image), vision), vision.background)
    return _squared(shrunk if turn is None else shrunk.transpose(turn), vision.background)


def _hold_to(size: tuple[int, int], path: str, max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise RequestError(
            f"Invalid '{path}': the image has {width} x {height} pixels; {max_pixels} are the "
            "most that are read.",
            path,
        )


def _webp_size(data: bytes) -> tuple[int, int]:
    """Return the size in the header. Raises ``ValueError``, ``struct.error``."""
    kind = data[12:16]
    if kind == b"VP8X":
        low, high, also_low, also_high = struct.unpack_from("<HBHB", data, 24)
        return (low | high << 16) + 1, (also_low | also_high << 16) + 1
    if kind == b"VP8L":
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & _14_BITS) + 1, (bits >> 14 & _14_BITS) + 1
    if kind == b"VP8 ":
        width, height = struct.unpack_from("<HH", data, 26)
        return width & _14_BITS, height & _14_BITS
    raise ValueError("no WebP")


def _plain(image: Image.Image) -> Image.Image:
    """Return the image in RGB, or in RGBA if it has transparent parts."""
    if image.mode.startswith(
        "I"
    ):  # 16 bits per pixel; the lower bits make no difference to an encoder
        return image.convert("I").point(lambda value: value / 256).convert("L").convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        return image.convert("RGBA")
    return image.convert("RGB")


def _opaque(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Return the image in RGB, with the background in transparent parts."""
    if image.mode == "RGB":
        return image
    below = Image.new("RGBA", image.size, (*background, 255))
    return Image.alpha_composite(below, image).convert("RGB")


def _shrunk(image: Image.Image, vision: VisionSettings) -> Image.Image:
    """Return the image in the encoder's size, or fitted into it, as configured."""
    side = vision.size
    if vision.fit == "stretch":
        return image.resize((side, side), Image.Resampling.BILINEAR)
    longest = max(image.size)
    width, height = (max(1, round(one * side / longest)) for one in image.size)
    return image.resize((width, height), Image.Resampling.BILINEAR)


def _squared(image: Image.Image, background: tuple[int, int, int]) -> Image.Image:
    """Return the image centred in a square."""
    width, height = image.size
    if width == height:
        return image
    side = max(width, height)
    square = Image.new("RGB", (side, side), background)
    square.paste(image, ((side - width) // 2, (side - height) // 2))
    return square


# Own threads: in asyncio's shared pool a few large images would block other work.
DECODED_AT_ONCE = 2
# The limit of one request: it is sent to the board in one frame of at most 64 MiB, as base64, and
# delays all other events of that connection.
MAX_PIXEL_BYTES = 32 * 1024 * 1024
Fetch = Callable[[ImagePart], Awaitable[bytes]]


class ImageInputs:
    """Decoder of a Router's images. Use from its event loop."""

    def __init__(self, config: ImagesConfig, fetch: Fetch | None = None) -> None:
        """``fetch`` downloads the image at a URL; None if that is not allowed."""
        self._config, self._fetch = config, fetch
        self._threads = ThreadPoolExecutor(DECODED_AT_ONCE, thread_name_prefix="image")

    async def pictures(
        self, images: tuple[ImagePart, ...], vision: VisionSettings | None
    ) -> tuple[Picture, ...]:
        """Return the images of a call as the encoder of its model takes them.

        Raises:
            RequestError: one cannot be read, is too large, or may not be fetched; names its path.
        """
        vision = self.check(images, vision)
        # Sequentially, so that a request with eight images takes no more memory than one with one.
        return tuple([await self._picture(image, vision) for image in images])

    def check(self, images: tuple[ImagePart, ...], vision: VisionSettings | None) -> VisionSettings:
        """Check that the model takes images, and this many.

        Raises:
            RequestError: it takes none, or there are too many.
        """
        if vision is None:
            raise UnsupportedParameter(
                "Unsupported content part: this model takes no images.", images[0].path
            )
        most = min(self._config.max_count, MAX_PIXEL_BYTES // (3 * vision.size**2))
        if len(images) > most:
            raise RequestError(
                f"Invalid '{images[most].path}': a request may have {most} images, those of "
                f"earlier turns included; this one has {len(images)}.",
                images[most].path,
            )
        return vision

    async def _picture(self, image: ImagePart, vision: VisionSettings) -> Picture:
        data = await self._file(image)
        most = self._config.max_bytes
        if len(data) > most:
            raise RequestError(
                f"Invalid '{image.path}': the image has {len(data)} bytes; {most} are the most "
                "that are read.",
                image.path,
            )
        work = partial(picture_of, data, image.path, vision, self._config.max_pixels)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def _file(self, image: ImagePart) -> bytes:
        if not image.url:
            return image.data
        if self._fetch is None:
            raise UnsupportedParameter(
                "Unsupported image: this server fetches none from URLs. Send it as a data URI, "
                "such as 'data:image/png;base64,...'.",
                image.path,
            )
        return await self._fetch(image)


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

MAX_REDIRECTS = 3
FETCHED_AT_ONCE = 8  # of one Router
PORTS = {"http": 80, "https": 443}
MOVED = frozenset({301, 302, 303, 307, 308})
OK = 200
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_NAT64_LOCAL = ipaddress.ip_network("64:ff9b:1::/48")
# IPv4-compatible, deprecated: some systems send to the IPv4 address inside.
_COMPATIBLE = ipaddress.ip_network("::/96")
_LAST_32 = 0xFFFF_FFFF


class ImageUnavailable(Exception):
    """The reason why an image was not fetched, for the client."""


def is_public(address: Address) -> bool:
    """Return whether the address is in a public network."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = _inner(address)
        if inner is not None:
            return is_public(inner)
        if address in _NAT64_LOCAL or address in _COMPATIBLE:
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
        self._places = asyncio.Semaphore(FETCHED_AT_ONCE)

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
            headers_of = {name.lower(): value for name, value in response.headers}
            if response.status in MOVED and b"location" in headers_of:
                return headers_of[b"location"].decode("latin-1")
            if response.status != OK:
                raise ImageUnavailable(f"its server answers {response.status}")
            if headers_of.get(b"content-encoding", b"identity").lower() != b"identity":
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
