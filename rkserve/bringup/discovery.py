"""mDNS in a board's network: the head announces its address, and a board lists heads.

An answer proves nothing, since every machine of the network can send one. A board therefore prints
the command by which it would join, and a person types it; the join token is never in mDNS.
"""

from __future__ import annotations

import ipaddress
import re
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from rkserve import __version__
from rkserve.core.errors import ConfigError
from rkserve.deployments.haproxy import is_loopback

if TYPE_CHECKING:
    from zeroconf import ServiceInfo, Zeroconf

SERVICE = "_rkserve._tcp.local."
VERSION, SCHEME = "version", "scheme"
# Heads answer a first question within 1.2 s; a lost packet is asked for again after 1 s and 3 s.
SEARCH_S = 4.0
ADDRESS_MS = 1000  # for the address of a head, which usually came with its name
MOST_HEADS = 20
LONGEST_NAME, LONGEST_VERSION = 63, 32
ANY_HEAD = "http://HEAD:8000"
# The addresses of the network interfaces to use; all of them without any.
OpenNetwork = Callable[[Sequence[str]], "Zeroconf"]


def open_network(addresses: Sequence[str] = ()) -> Zeroconf:
    """Return mDNS on the interfaces with these addresses, or on all. Raises ``OSError``."""
    # Late: it takes a quarter of a second, and most commands need none of it.
    from zeroconf import InterfaceChoice, IPVersion, Zeroconf

    return Zeroconf(list(addresses) or InterfaceChoice.All, ip_version=IPVersion.V4Only)


class Announcement:
    """The head's announcement, from ``begin`` to the end of the context."""

    def __init__(
        self,
        address: str,
        port: int,
        note: Callable[[str], None],
        open_mdns: OpenNetwork = open_network,
        *,
        tls: bool = False,
    ) -> None:
        """``address`` and ``port`` are those of the endpoint as boards reach it."""
        self._scheme = "https" if tls else "http"
        self._address, self._port, self._note = address, port, note
        self._open = open_mdns
        self._network: Zeroconf | None = None

    def __enter__(self) -> Announcement:
        return self

    def __exit__(self, *_: object) -> None:
        if self._network is not None:
            self._network.close()  # tells the network that the head is gone
            self._network = None

    @classmethod
    def of(
        cls,
        address: str,
        host: str,
        port: int,
        note: Callable[[str], None],
        *,
        tls: bool = False,
    ) -> Announcement | None:
        """Return the announcement of a head whose endpoint listens on ``host``.

        None where it listens on the loopback only, which no board reaches.
        """
        if is_loopback(host) or is_loopback(address):
            return None
        return cls(address, port, note, tls=tls)

    def begin(self) -> None:
        """Announce the head; where that is impossible, note the reason."""
        from zeroconf import Error

        try:
            found = socket.getaddrinfo(self._address, None, socket.AF_INET, socket.SOCK_STREAM)
            address = str(found[0][4][0])
            self._network = self._open([address])
            announced = _announced(address, self._port, self._scheme)
            self._network.register_service(announced, allow_name_change=True)
        except (OSError, Error) as exc:
            self.__exit__()
            reason = str(exc) or type(exc).__name__
            self._note(f"rkserve: mDNS does not announce {self._address}: {reason}.")


def _announced(address: str, port: int, scheme: str) -> ServiceInfo:
    from zeroconf import ServiceInfo

    host = _plain(socket.gethostname().partition(".")[0], LONGEST_NAME) or "head"
    return ServiceInfo(
        SERVICE,
        f"{host}.{SERVICE}",
        port,
        parsed_addresses=[address],
        properties={VERSION: __version__, SCHEME: scheme},
    )


def _plain(text: str, longest: int) -> str:
    """Return a foreign text without characters that a terminal obeys."""
    return re.sub(r"[^\w .+-]", "?", text, flags=re.ASCII)[:longest]


@dataclass(frozen=True, order=True, slots=True)
class FoundHead:
    """A machine that answered as a head. Its name and version are free of control characters."""

    name: str
    url: str
    version: str


class _Names:
    """The names of services as ``Zeroconf`` reports them, in its thread."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def add_service(self, _zc: Zeroconf, _type: str, name: str) -> None:
        if name not in self.found and len(self.found) < MOST_HEADS:
            self.found.append(name)

    update_service = add_service

    def remove_service(self, _zc: Zeroconf, _type: str, name: str) -> None:
        if name in self.found:
            self.found.remove(name)


def find_heads(
    seconds: float = SEARCH_S,
    open_mdns: Callable[[], Zeroconf] = open_network,
    pause: Callable[[float], None] = time.sleep,
) -> list[FoundHead]:
    """Return the heads that answer within some seconds. Raises ``ConfigError``."""
    names = _Names()
    try:
        network = open_mdns()
    except OSError as exc:
        raise ConfigError(
            f"mDNS cannot be used here ({exc}): name the head by `{command_of(ANY_HEAD)}`."
        ) from exc
    try:
        # The library's own type needs its class as a base, and with it the import.
        network.add_service_listener(SERVICE, names)  # type: ignore[arg-type]
        pause(seconds)
        infos = [_info(network, one) for one in [*names.found]]
    finally:
        network.close()
    heads = {head.url: head for one in infos if one is not None for head in _heads_of(one)}
    return sorted(heads.values())


def _info(network: Zeroconf, name: str) -> ServiceInfo | None:
    """Return the answer of that name, None without one, or for a name that DNS-SD forbids."""
    from zeroconf import Error

    try:
        return network.get_service_info(SERVICE, name, ADDRESS_MS)
    except Error:
        return None


def _heads_of(info: ServiceInfo) -> Iterable[FoundHead]:
    """Yield the head of an answer that has an address for other machines."""
    version = (info.properties.get(VERSION.encode()) or b"").decode("ascii", "replace")
    for text in info.parsed_addresses():
        address = ipaddress.ip_address(text)
        foreign = not isinstance(address, ipaddress.IPv4Address) or not info.port
        if not (foreign or address.is_multicast or address.is_unspecified):
            name = _plain(info.name.removesuffix(f".{SERVICE}"), LONGEST_NAME)
            tls = info.properties.get(SCHEME.encode()) == b"https"
            url = f"{'https' if tls else 'http'}://{address}:{info.port}"
            yield FoundHead(name, url, _plain(version, LONGEST_VERSION) or "unknown")
            return


def command_of(url: str, words: Sequence[str] = ()) -> str:
    """Return the command by which this board joins a head, with further words as typed."""
    return shlex.join(["rkserve", "join", url, "--token", "TOKEN", *words])


def suggest_heads(
    words: Sequence[str], find: Callable[[], Sequence[FoundHead]] = find_heads
) -> NoReturn:
    """Name the heads of this network, each with the command that joins it.

    Raises:
        ConfigError: always, because nothing was joined.
    """
    heads = find()
    if not heads:
        raise ConfigError(
            f"This board has not joined yet, and no head answered by mDNS within {SEARCH_S:.0f} s: "
            f"name it by `{command_of(ANY_HEAD, words)}`, which `rkserve token` prints there."
        )
    lines = [f"  {one.name} (rkserve {one.version}): {command_of(one.url, words)}" for one in heads]
    raise ConfigError(
        "This board has not joined yet. By mDNS these answered as heads, which proves nothing; "
        "compare the address, then type the command with what `rkserve token` prints on that "
        "head:\n" + "\n".join(lines)
    )
