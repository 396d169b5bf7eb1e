"""Images from URLs: where a Router may be sent, how far, and for how long."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from rkserve.api.prompting.images import ImagePart
from rkserve.config.router import ImagesConfig
from rkserve.core.errors import RequestError
from rkserve.router.images import (
    MAX_REDIRECTS,
    Address,
    CheckedNetwork,
    ImageFetcher,
    fetch_of,
    is_public,
)
from tests.support.boards.fakes import run_loop

PATH = "messages[0].content[0].image_url.url"
FILE = b"\x89PNG" + bytes(range(256)) * 40


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255"),
        *("192.168.1.1", "169.254.169.254", "100.64.0.1", "192.0.0.1", "198.18.0.1", "224.0.0.1"),
        *("240.0.0.1", "255.255.255.255", "192.0.2.1", "::", "::1", "fe80::1", "fc00::1"),
        *("fd00:ec2::254", "ff02::1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
        *("64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b:1::7f00:1", "2002:7f00:1::1"),
        *("2002:c0a8:101::1", "::127.0.0.1", "::10.0.0.1", "::8.8.8.8"),
    ],
)
def test_no_stranger_is_sent_into_our_networks(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))


@pytest.mark.parametrize(
    "address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "64:ff9b::808:808", "::ffff:8.8.8.8"]
)
def test_public_addresses_are_reached(address: str) -> None:
    assert is_public(ipaddress.ip_address(address))


Handler = Callable[[str, dict[str, str]], bytes | None]


def answer(status: str, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *(f"{k.replace('_', '-')}: {v}" for k, v in headers.items())]
    if "transfer_encoding" not in headers:
        lines.append(f"content-length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass
class Site:
    """A server on loopback that answers paths; a path without an answer keeps its caller waiting.

    ``names`` are what hosts resolve to; ``forbidden`` addresses are taken for private ones.
    """

    pages: dict[str, bytes] = field(default_factory=dict)
    names: dict[str, Sequence[str]] = field(default_factory=lambda: {"a.test": ["127.0.0.1"]})
    forbidden: frozenset[str] = frozenset()
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    resolved: list[str] = field(default_factory=list)
    port: int = 0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            path = first.split(" ")[1]
            pairs = (line.split(": ", 1) for line in lines)
            self.asked.append((path, {key.lower(): value for key, value in pairs}))
            page = self.pages.get(path)
            if page is None:
                await reader.read()  # until the caller leaves
                return
            writer.write(page.replace(b"PORT", str(self.port).encode()))
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # whoever has heard enough leaves
        finally:
            writer.close()

    async def _resolve(self, host: str, port: int) -> Sequence[str]:
        self.resolved.append(host)
        if host not in self.names:
            raise OSError("no such host")
        return self.names[host]

    def _allowed(self, address: Address) -> bool:
        return str(address) not in self.forbidden

    async def fetch(self, url: str, **config: Any) -> bytes:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            fetcher = ImageFetcher(
                ImagesConfig(fetch=True, **config),
                lambda: CheckedNetwork(self._resolve, self._allowed),
                ports=lambda _, port: port == self.port,
            )
            return await fetcher.fetch(ImagePart(PATH, url=url.replace("PORT", str(self.port))))


def fetched(site: Site, url: str = "http://a.test:PORT/x.png", **config: Any) -> bytes:
    found: list[bytes] = []

    async def main() -> None:
        found.append(await site.fetch(url, **config))

    run_loop(main())
    return found[0]


def refused(site: Site, url: str = "http://a.test:PORT/x.png", **config: Any) -> str:
    with pytest.raises(RequestError) as caught:
        fetched(site, url, **config)
    assert caught.value.param == PATH
    return caught.value.message


def test_a_file_is_fetched_as_it_is() -> None:
    site = Site({"/x.png?a=b": answer("200 OK", FILE, content_type="image/png")})
    assert fetched(site, "http://a.test:PORT/x.png?a=b#here") == FILE
    ((_, headers),) = site.asked
    assert headers["host"] == f"a.test:{site.port}"
    assert headers["accept-encoding"] == "identity"
    assert not {"authorization", "cookie", "referer"} & headers.keys()


def test_a_redirect_is_followed_and_its_host_judged_anew() -> None:
    site = Site(
        {
            "/x.png": answer("302 Found", location="//b.test:PORT/y"),
            "/y": answer("301 Moved", location="z"),
            "/z": answer("200 OK", FILE),
        },
        names={"a.test": ["127.0.0.1"], "b.test": ["127.0.0.1"]},
    )
    assert fetched(site) == FILE
    assert site.resolved == ["a.test", "b.test", "b.test"]


@pytest.mark.parametrize(
    "addresses",
    [
        pytest.param(["10.0.0.7"], id="a private one"),
        pytest.param(["127.0.0.1", "10.0.0.7"], id="one of two"),
    ],
)
def test_a_host_in_a_forbidden_network_is_never_spoken_to(addresses: list[str]) -> None:
    site = Site(
        {"/x.png": answer("200 OK", FILE)},
        names={"a.test": addresses},
        forbidden=frozenset({"10.0.0.7"}),
    )
    assert "network" in refused(site)
    assert site.asked == []


def test_a_redirect_into_a_forbidden_network_is_not_followed() -> None:
    site = Site(
        {"/x.png": answer("307 Over there", location="http://inner.test:PORT/secret")},
        names={"a.test": ["127.0.0.1"], "inner.test": ["127.0.0.2"]},
        forbidden=frozenset({"127.0.0.2"}),
    )
    assert "network" in refused(site)
    assert [path for path, _ in site.asked] == ["/x.png"]


def test_the_connection_goes_to_the_address_that_was_judged() -> None:
    """A name that resolves to something else the next time is asked for once only."""
    site = Site({"/x.png": answer("200 OK", FILE)})
    assert fetched(site) == FILE
    assert site.resolved == ["a.test"]


@pytest.mark.parametrize(
    ("page", "words"),
    [
        pytest.param(answer("404 Not Found"), "404", id="not there"),
        pytest.param(answer("200 OK", bytes(2001)), "more than 2000 bytes", id="too long"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
            + b"400\r\n"
            + bytes(1024)
            + b"\r\n400\r\n"
            + bytes(1024)
            + b"\r\n0\r\n\r\n",
            "more than 2000 bytes",
            id="too long without saying so",
        ),
        pytest.param(answer("200 OK", b"x", content_encoding="gzip"), "packs it", id="compressed"),
        pytest.param(b"what?\r\n\r\n", "could not be spoken to", id="no HTTP"),
        pytest.param(
            b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nhalf",
            "could not be spoken to",
            id="half a body",
        ),
        pytest.param(answer("302 Found", location="ftp://a.test/x"), "no http(s)", id="FTP"),
        pytest.param(answer("302 Found", location="file:///etc/passwd"), "no http(s)", id="a file"),
        pytest.param(answer("302 Found", location="/x.png"), "redirected more", id="a circle"),
    ],
)
def test_what_comes_back_is_not_taken_for_an_image(page: bytes, words: str) -> None:
    site = Site({"/x.png": page})
    assert words in refused(site, max_bytes=2000)
    assert len(site.asked) <= MAX_REDIRECTS + 1


def test_a_server_that_says_nothing_is_left() -> None:
    assert "took more than" in refused(Site(), fetch_timeout_s=0.05)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        pytest.param("http://user:pw@a.test:PORT/", "password", id="a password"),
        pytest.param("http://a.test:22/", "port", id="another port"),
        pytest.param("http://a.test:99999/", "no URL", id="no port at all"),
        pytest.param("http:///x", "no http(s)", id="no host"),
        pytest.param("http://a.test:PORT/\u00e4", "ASCII", id="not ASCII"),
        pytest.param("http://a.test:PORT/a b\r\nx: y", "ASCII", id="a header smuggled in"),
        pytest.param("http://a.test:PORT/a b", "ASCII", id="a blank"),
        pytest.param("http://[::1", "no URL", id="half an address"),
        pytest.param("http://nowhere.test:PORT/", "not known", id="an unknown host"),
        pytest.param("http://b.test:PORT/", "none that images", id="a host that is not listed"),
    ],
)
def test_a_url_that_must_not_be_followed_is_refused(url: str, words: str) -> None:
    hosts = {"fetch_hosts": ("a.test",)} if "b.test" in url else {}
    site = Site(names={"a.test": ["127.0.0.1"], "b.test": ["127.0.0.1"]})
    assert words in refused(site, url, **hosts)
    assert site.asked == []


def test_nothing_is_fetched_unless_that_is_allowed() -> None:
    assert fetch_of(ImagesConfig()) is None
    wanted: Callable[[ImagePart], Awaitable[bytes]] | None = fetch_of(ImagesConfig(fetch=True))
    assert wanted is not None


async def test_the_real_look_up_refuses_this_machine() -> None:
    fetch = fetch_of(ImagesConfig(fetch=True))
    assert fetch is not None
    for url in ("http://127.0.0.1/x", "http://[::1]/x", "http://localhost/x", "http://0/x"):
        with pytest.raises(RequestError, match="network"):
            await fetch(ImagePart(PATH, url=url))
