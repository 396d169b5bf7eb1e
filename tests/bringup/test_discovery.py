"""The head's announcement by mDNS, and the heads that a board lists: without a network, and once on
the loopback.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import pytest
from zeroconf import NonUniqueNameException, ServiceInfo

from rkserve import __version__
from rkserve.bringup.discovery import (
    SERVICE,
    Announcement,
    FoundHead,
    find_heads,
    open_network,
    suggest_heads,
)
from rkserve.core.child_process import free_port
from rkserve.core.errors import ConfigError

pytestmark = pytest.mark.slow

HEAD = FoundHead("head", "http://192.0.2.1:8000", "0.1.0")


class FakeMdns:
    """A network's mDNS, and this machine's part in it."""

    def __init__(self, *infos: ServiceInfo, fails: Exception | None = None) -> None:
        self.infos = {one.name: one for one in infos}
        self.fails = fails
        self.opened: list[str] = []
        self.is_closed = False

    def open(self, addresses: Sequence[str] = ()) -> Any:
        if isinstance(self.fails, OSError):
            raise self.fails
        self.opened = [*addresses]
        return self

    def register_service(self, info: ServiceInfo, *, allow_name_change: bool) -> None:
        if self.fails is not None:
            raise self.fails
        self.infos[info.name] = info
        assert allow_name_change

    def add_service_listener(self, kind: str, listener: Any) -> None:
        for name in [*self.infos, "left before", f"\x1b.{SERVICE}"]:
            listener.add_service(self, kind, name)
            listener.update_service(self, kind, name)
        listener.remove_service(self, kind, "left before")

    def get_service_info(self, kind: str, name: str, _limit_ms: int) -> ServiceInfo | None:
        assert kind == SERVICE
        return self.infos[name] if name in self.infos else ServiceInfo(kind, name)

    def close(self) -> None:
        self.is_closed = True


def info(name: str, *addresses: str, port: int = 8000, **text: str) -> ServiceInfo:
    return ServiceInfo(
        SERVICE, f"{name}.{SERVICE}", port, parsed_addresses=[*addresses], properties=text
    )


def found(network: FakeMdns) -> list[FoundHead]:
    return find_heads(0, network.open, lambda _: None)


def test_a_head_is_announced_with_its_address_and_version_alone() -> None:
    network, notes = FakeMdns(), list[str]()
    with Announcement("192.0.2.7", 8001, notes.append, network.open) as announcement:
        assert not network.infos
        announcement.begin()
        assert network.opened == ["192.0.2.7"]
        (heard,) = network.infos.values()
        assert heard.properties == {b"version": __version__.encode(), b"scheme": b"http"}
        assert [one.url for one in found(network)] == ["http://192.0.2.7:8001"]
    assert network.is_closed
    assert notes == []


def test_a_head_with_tls_is_found_by_its_https_url() -> None:
    network = FakeMdns()
    with Announcement("192.0.2.7", 8001, print, network.open, tls=True) as announcement:
        announcement.begin()
        assert [one.url for one in found(network)] == ["https://192.0.2.7:8001"]


@pytest.mark.parametrize(
    ("address", "host", "announced"),
    [
        pytest.param("192.0.2.7", "0.0.0.0", True, id="all interfaces"),
        pytest.param("192.0.2.7", "192.0.2.7", True, id="one interface"),
        pytest.param("192.0.2.7", "127.0.0.1", False, id="an endpoint on the loopback"),
        pytest.param("192.0.2.7", "::1", False, id="on that of IPv6"),
        pytest.param("192.0.2.7", "localhost", False, id="by its name"),
        pytest.param("127.0.0.1", "0.0.0.0", False, id="Ray on the loopback"),
    ],
)
def test_a_head_that_no_board_reaches_is_not_announced(
    address: str, host: str, announced: bool
) -> None:
    assert (Announcement.of(address, host, 8000, print) is not None) is announced


@pytest.mark.parametrize(
    ("address", "fails", "reason"),
    [
        pytest.param("192.0.2.7", OSError(19, "No such device"), "No such device", id="no network"),
        pytest.param("192.0.2.7", NonUniqueNameException(), "NonUniqueName", id="a taken name"),
        pytest.param("no-head.invalid", None, "Name or service not known", id="a name of nobody"),
    ],
)
def test_a_head_that_cannot_be_announced_is_one_note(
    address: str, fails: Exception | None, reason: str
) -> None:
    network, notes = FakeMdns(fails=fails), list[str]()
    with Announcement(address, 8000, notes.append, network.open) as announcement:
        announcement.begin()
    assert len(notes) == 1
    assert notes[0].startswith(f"rkserve: mDNS does not announce {address}: ")
    assert reason in notes[0]


def test_heads_are_listed_without_what_no_board_can_use() -> None:
    network = FakeMdns(
        info("two", "192.0.2.2", version="0.2.0"),
        info("one", "2001:db8::1", "192.0.2.1", version="0.1.0"),
        info("the same", "192.0.2.1", version="0.1.0"),
        info("IPv6", "2001:db8::2"),
        info("multicast", "224.0.0.1"),
        info("nowhere", "0.0.0.0"),
        info("without an address"),
    )
    assert found(network) == [
        FoundHead("the same", "http://192.0.2.1:8000", "0.1.0"),
        FoundHead("two", "http://192.0.2.2:8000", "0.2.0"),
    ]
    assert network.is_closed


def test_an_answer_cannot_write_to_the_terminal() -> None:
    network = FakeMdns(info("a\x9b2Jb`c", "192.0.2.1", version="1\x07" * 40))
    (head,) = found(network)
    assert head.name == "a?2Jb?c"
    assert head.version == "1?" * 16


def test_a_machine_without_mdns_is_one_sentence() -> None:
    with pytest.raises(ConfigError, match=r"cannot be used here \(.*\): name the head by `rkserve"):
        found(FakeMdns(fails=OSError(98, "Address already in use")))


def test_without_a_head_the_command_is_named() -> None:
    with pytest.raises(ConfigError) as hit:
        suggest_heads([], list)
    assert str(hit.value) == (
        "This board has not joined yet, and no head answered by mDNS within 4 s: name it by "
        "`rkserve join http://HEAD:8000 --token TOKEN`, which `rkserve token` prints there."
    )


def test_each_head_comes_with_the_command_as_it_was_begun() -> None:
    two = FoundHead("two", "http://192.0.2.2:8000", "0.2.0")
    with pytest.raises(ConfigError) as hit:
        suggest_heads(["--library", "/a b/librkllmrt.so", "--detach"], lambda: [HEAD, two])
    first, *lines = str(hit.value).splitlines()
    assert "which proves nothing" in first
    rest = "--token TOKEN --library '/a b/librkllmrt.so' --detach"
    assert lines == [
        f"  head (rkserve 0.1.0): rkserve join http://192.0.2.1:8000 {rest}",
        f"  two (rkserve 0.2.0): rkserve join http://192.0.2.2:8000 {rest}",
    ]


def test_a_head_is_found_on_the_loopback_while_it_runs() -> None:
    loopback = ["127.0.0.1"]
    try:
        open_network(loopback).close()
    except OSError as exc:
        pytest.skip(f"no multicast on the loopback: {exc}")
    port, notes = free_port(), list[str]()
    url = f"http://127.0.0.1:{port}"

    def answers(seconds: float) -> list[FoundHead]:
        heads = find_heads(seconds, lambda: open_network(loopback))
        return [one for one in heads if one.url == url]

    with Announcement("127.0.0.1", port, notes.append) as announcement:
        announcement.begin()
        assert notes == []
        # A packet may be lost, and this process may stop meanwhile.
        heads = next((one for _ in range(20) if (one := answers(2.0))), [])
        assert [one.version for one in heads] == [__version__]
        assert heads[0].name.startswith(socket.gethostname().partition(".")[0])
    assert answers(2.0) == []
