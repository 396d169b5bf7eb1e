"""The synchronous client, and the calls that it shares with the asynchronous one."""

from __future__ import annotations

import asyncio
import inspect
import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import httpx
import pytest

from rkserve.client import (
    AsyncClient,
    CallError,
    Client,
    Unreachable,
)
from tests.support.cluster.control_clients import (
    CONTENT,
    PAUSE,
    RESUME,
    UPLOAD,
    pushing,
    waiting,
)
from tests.support.cluster.fake_control import FakeControl, envelope, error, ok, stored
from tests.support.http.certificates import https_server, write_certificate


def test_a_pause_is_sent_with_its_scope_key_and_time_limits(
    server: FakeControl, client: Client
) -> None:
    server.on(PAUSE, ok(envelope()))
    done = client.pause(models="sim-chat", boards=["sim-*"], lease_s=5, timeout_s=9, epoch=6)
    (request,) = server.asked
    assert request.headers["authorization"] == "Bearer secret"
    assert len(request.headers["idempotency-key"]) >= 32
    assert request.extensions["timeout"]["read"] > 9
    assert server.json() == {
        "model": ["sim-chat"],
        "selector": ["sim-*"],
        "mode": "keep",
        "clear_cache": False,
        "lease_s": 5,
        "timeout_s": 9,
        "epoch": 6,
    }
    assert (done.id, done.epoch, done.state, done.over) == ("op-1", 7, "succeeded", True)
    assert done.results["sim-0"].details == {"stopped": 3}


def test_a_certificate_of_one_s_own_is_trusted_where_a_file_or_the_environment_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Head(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", "12")
            self.end_headers()
            self.wfile.write(b'{"data": []}')

        def log_message(self, *_: object) -> None:
            """Keep stderr clean."""

    certificate, key = write_certificate(tmp_path, "own")
    with https_server(Head, certificate, key) as url:
        with Client(url, patience_s=0) as client, pytest.raises(Unreachable, match="CERTIFICATE"):
            client.boards()
        with Client(url, ca_file=certificate) as client:
            assert client.boards() == []
        monkeypatch.setenv("RKSERVE_CA_FILE", str(certificate))
        with Client(url) as client:
            assert client.boards() == []
    monkeypatch.setenv("RKSERVE_CA_FILE", str(tmp_path / "none"))
    with pytest.raises(ValueError, match="none cannot be read"):
        Client(url)


def test_two_calls_have_two_keys_unless_the_caller_says_otherwise(
    server: FakeControl, client: Client
) -> None:
    server.on(PAUSE, ok(envelope()))
    for key in (None, None, "mine", "mine"):
        client.pause(key=key)
    keys = [request.headers["idempotency-key"] for request in server.asked]
    assert keys[2:] == ["mine", "mine"]
    assert len(set(keys)) == 3


async def both_ways(server: FakeControl, tmp_path: Path) -> None:
    pushing(server, stored("succeeded"))
    server.on(PAUSE, httpx.ConnectError("refused"), ok(envelope())).on(RESUME, ok(envelope()))
    file = tmp_path / "adapter.rkllm"
    file.write_bytes(CONTENT)
    async with waiting(server) as client:
        async with client.paused(lease_s=60) as lease:
            pushed = await client.push_adapter(file, "tone", "v1")
            assert not lease.lost
        assert pushed.label == "tone@v1"
    assert server.bodies[server.routes.index(UPLOAD)] == CONTENT
    assert (server.routes[:2], server.routes[-1]) == ([PAUSE, PAUSE], RESUME)


def test_the_asynchronous_client_pauses_and_pushes(server: FakeControl, tmp_path: Path) -> None:
    asyncio.run(both_ways(server, tmp_path))


def public(kind: type) -> list[str]:
    return sorted(name for name in dir(kind) if not name.startswith("_"))


def test_both_clients_have_the_same_calls() -> None:
    assert set(public(Client)) ^ set(public(AsyncClient)) == {"close", "aclose"}


@pytest.mark.parametrize("name", [name for name in public(Client) if name != "close"])
def test_a_call_takes_and_says_the_same_in_both_clients(name: str) -> None:
    one, other = getattr(Client, name), getattr(AsyncClient, name)
    both = inspect.signature(one), inspect.signature(other)
    assert both[0].parameters == both[1].parameters
    returned = [str(found.return_annotation).removeprefix("Async") for found in both]
    assert returned[0] == returned[1]
    assert one.__doc__ == other.__doc__
    bound = getattr(AsyncClient("http://head"), name)
    if one is other:  # written once; the client makes a method of it
        assert inspect.iscoroutinefunction(bound)
        assert inspect.signature(bound) == inspect.signature(getattr(Client("http://head"), name))
    else:
        assert inspect.isasyncgenfunction(inspect.unwrap(other))


VIEW = {"tick": 1, "boards": {"a": {"state": "ready"}, "b": {"state": "ready"}}}


def test_watching_yields_the_view_after_each_delta(server: FakeControl, client: Client) -> None:
    lines = (
        "retry: 1000",
        "event: snapshot\nid: 1\ndata: " + json.dumps({"view": VIEW, "history": {"every_s": 30}}),
        ": ",
        "event: delta\nid: 2\ndata: " + json.dumps({"tick": 2, "boards": {"b": None}}),
    )
    text = "".join(f"{line}\n\n" for line in lines)
    server.on("GET /v1/cluster/events", lambda _: httpx.Response(200, text=text))
    first, second = client.watch(seconds=0)
    assert first == {"view": VIEW, "history": {"every_s": 30}}
    assert second["view"] == {"tick": 2, "boards": {"a": {"state": "ready"}}}
    assert second["history"] == {"every_s": 30}
    assert server.asked[0].url.query == b"seconds=0"


def test_watching_beyond_the_limit_of_viewers_is_an_error(
    server: FakeControl, client: Client
) -> None:
    server.on("GET /v1/cluster/events", error(429, "too_many_viewers"))
    with pytest.raises(CallError, match="too_many_viewers"):
        next(iter(client.watch()))


def test_verdict_and_history_are_what_the_router_answers(
    server: FakeControl, client: Client
) -> None:
    server.on("GET /v1/cluster/verdict", ok({"verdict": "READY"}))
    server.on("GET /v1/boards/a/history", ok({"board": "a"}))
    assert client.verdict() == {"verdict": "READY"}
    assert client.board_history("a") == {"board": "a"}


def test_usage_is_what_the_router_answers(server: FakeControl, client: Client) -> None:
    answer = {"data": [{"key": "alice"}], "routers": {"up": ["0"], "silent": []}, "unstored": []}
    server.on("GET /v1/usage", ok(answer))
    assert client.usage(days=2) == answer
    assert server.asked[0].url.query == b"days=2"
