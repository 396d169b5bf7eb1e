"""A hang-up between Serve and ASGI, the names of Routers, and the clients behind HAProxy."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from ray.exceptions import TaskCancelledError
from starlette.types import Message

from rkserve.deployments.haproxy_config import CLIENT_HEADER
from rkserve.deployments.replica import Node
from rkserve.deployments.router import ProxyPeers, _until_gone, router_name
from rkserve.http.auth import PEER

pytestmark = pytest.mark.virtual_time

class Client:
    """As Serve: it hands the body out, raises at the hang-up, and is then silent for good."""

    def __init__(self) -> None:
        self.asked = 0

    async def __call__(self) -> Message:
        self.asked += 1
        if self.asked == 1:
            return {"type": "http.request", "body": b"x", "more_body": False}
        if self.asked == 2:
            raise TaskCancelledError
        await asyncio.Event().wait()
        raise AssertionError("it never comes back")


async def test_a_hang_up_is_said_as_asgi_does_and_as_often_as_it_is_asked() -> None:
    client = Client()
    receive = _until_gone(client)
    assert (await receive())["body"] == b"x"
    for _ in range(3):
        assert await asyncio.wait_for(receive(), 5) == {"type": "http.disconnect"}
    assert client.asked == 2


async def test_what_is_no_hang_up_is_raised() -> None:
    async def broken() -> Message:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await _until_gone(broken)()


# -- names ----------------------------------------------------------------------------------------


def test_a_router_takes_the_first_free_name_of_its_node(tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    first, name = router_name(state_dir, Node("head", is_head=True), "abcdefghij")
    second, other = router_name(state_dir, Node("head", is_head=True), "klmnopqrst")
    assert (name, other) == ("0", "1")
    assert first is not None
    first.release()
    successor, name = router_name(state_dir, Node("head", is_head=True), "uvwxyz")
    assert name == "0"
    elsewhere, name = router_name(tmp_path / "other", Node("rock", is_head=False), "uvwxyz")
    assert name == "0@rock"
    for slot in (second, successor, elsewhere):
        assert slot is not None
        slot.release()


def test_a_router_without_a_state_folder_is_called_by_its_replica(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    slot, name = router_name(tmp_path / "file", Node("head", is_head=True), "abcdefghij")
    assert (slot, name) == (None, "abcdefgh")


# -- clients behind HAProxy -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "header", "address"),
    [
        pytest.param("127.0.0.1", "203.0.113.7", "203.0.113.7", id="HAProxy of this machine"),
        pytest.param("10.0.0.2", "203.0.113.7", "203.0.113.7", id="HAProxy of another node"),
        pytest.param("203.0.113.9", "203.0.113.7", "203.0.113.9", id="a client that pretends"),
        pytest.param("127.0.0.1", None, "127.0.0.1", id="a program of this machine"),
        pytest.param(None, None, "unknown", id="no address"),
    ],
)
@pytest.mark.parametrize("local_only", [True, False])
async def test_only_a_node_may_name_another_address_as_its_client(
    peer: str | None, header: str | None, address: str, local_only: bool
) -> None:
    peers = ProxyPeers(local_only=local_only, nodes=lambda: ["10.0.0.1", "10.0.0.2"])
    client = None if peer is None else (peer, 1)
    headers = [] if header is None else [(CLIENT_HEADER.encode(), header.encode())]
    found = peers.named({"type": "http", "client": client, "headers": headers})
    assert found[PEER] == address
    assert found["client"] == (client if local_only else None)


async def test_the_nodes_are_looked_up_at_most_once_in_a_while() -> None:
    looked: list[int] = []

    def nodes() -> list[str]:
        looked.append(1)
        return []

    peers = ProxyPeers(local_only=False, nodes=nodes)
    scope = {"client": ("203.0.113.9", 1), "headers": [(CLIENT_HEADER.encode(), b"x")]}
    for _ in range(100):
        peers.named(scope)
    assert len(looked) == 1
