"""A hang-up between Serve and ASGI, the names of Routers, and the clients behind HAProxy."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import TaskCancelledError
from starlette.types import Message, Scope

from rkserve.deployments.haproxy_config import CLIENT_HEADER
from rkserve.deployments.haproxy_listeners import MARK_HEADER, ControlAddress, Listeners
from rkserve.deployments.replica import Node
from rkserve.deployments.router import ProxyPeers, _until_gone, router_name
from rkserve.http.auth import LISTENER, PEER, Listener

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

PROOF = "5f" * 32


def behind(
    peer: str | None, *headers: tuple[str, str], local_only: bool = True, **given: Any
) -> Scope:
    """Return the scope that Routers get of a request of a peer with these headers."""
    nodes = ("10.0.0.1", "10.0.0.2")
    peers = ProxyPeers(local_only=local_only, nodes=lambda: nodes, listeners=Listeners(**given))
    raw = [(name.encode(), value.encode()) for name, value in headers]
    client = None if peer is None else (peer, 1)
    return peers.named({"type": "http", "client": client, "headers": raw})


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
def test_only_a_node_may_name_another_address_as_its_client(
    peer: str | None, header: str | None, address: str, local_only: bool
) -> None:
    headers = [(MARK_HEADER, "any"), *([] if header is None else [(CLIENT_HEADER, header)])]
    found = behind(peer, *headers, local_only=local_only)
    assert found[PEER] == address
    assert found["client"] == ((peer, 1) if local_only and peer else None)


def test_the_nodes_are_looked_up_at_most_once_in_a_while() -> None:
    looked: list[int] = []

    def nodes() -> list[str]:
        looked.append(1)
        return []

    peers = ProxyPeers(local_only=False, nodes=nodes)
    scope = {"client": ("203.0.113.9", 1), "headers": [(MARK_HEADER.encode(), b"any")]}
    for _ in range(100):
        peers.named(scope)
    assert len(looked) == 1


CONTROL = ControlAddress("127.0.0.1", 8001)


@pytest.mark.parametrize(
    ("marks", "given", "listener"),
    [
        pytest.param([f"any {PROOF}"], {}, Listener.ANY, id="no control port"),
        pytest.param([f"client {PROOF}"], {}, Listener.CLIENT, id="clients' port"),
        pytest.param([f"control {PROOF}"], {}, Listener.CONTROL, id="the control port"),
        pytest.param(
            [f"any {PROOF}"], {"control": CONTROL}, Listener.CLIENT, id="another node knows of none"
        ),
        pytest.param([], {}, Listener.BESIDE, id="no mark"),
        pytest.param(["control"], {}, Listener.BESIDE, id="no proof"),
        pytest.param([f"control {'0' * 64}"], {}, Listener.BESIDE, id="another cluster's proof"),
        pytest.param([f"Control {PROOF}"], {}, Listener.BESIDE, id="another word"),
        pytest.param([f"beside {PROOF}"], {}, Listener.BESIDE, id="a word of the Router's own"),
        pytest.param([PROOF], {}, Listener.BESIDE, id="no word"),
        pytest.param(
            [f"control {PROOF}", f"client {PROOF}"], {}, Listener.BESIDE, id="two of them"
        ),
    ],
)
@pytest.mark.parametrize("peer", ["127.0.0.1", "10.0.0.1", "203.0.113.9"])
def test_a_mark_counts_with_the_proof_alone_whoever_sends_it(
    peer: str, marks: list[str], given: dict[str, Any], listener: Listener
) -> None:
    sent = [(MARK_HEADER, mark) for mark in marks]
    found = behind(peer, *sent, (CLIENT_HEADER, "192.0.2.1"), proof=PROOF, **given)
    assert found[LISTENER] is listener
    assert found[PEER] == (peer if listener is Listener.BESIDE else "192.0.2.1")
    assert found["headers"] == [(CLIENT_HEADER.encode(), b"192.0.2.1")], "the proof goes no further"


@pytest.mark.parametrize(
    ("peer", "listener"),
    [
        pytest.param("127.0.0.1", Listener.CONTROL, id="this machine"),
        pytest.param("10.0.0.1", Listener.CONTROL, id="a node"),
        pytest.param("203.0.113.9", Listener.BESIDE, id="the network"),
        pytest.param(None, Listener.BESIDE, id="no address"),
    ],
)
def test_without_a_token_of_ray_a_mark_counts_by_its_sender(
    peer: str | None, listener: Listener
) -> None:
    assert behind(peer, (MARK_HEADER, "control"))[LISTENER] is listener
    assert behind(peer)[LISTENER] is Listener.BESIDE, "HAProxy never leaves the mark out"
