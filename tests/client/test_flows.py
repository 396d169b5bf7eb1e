"""The client's retries, its waiting for operations, and its uploads."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from rkserve.client import (
    Client,
    OperationFailed,
    Progress,
    UnexpectedAnswer,
    Unreachable,
    WaitTimeout,
)
from rkserve.client.requests import PIECE_BYTES
from tests.support.cluster.control_clients import (
    CONTENT,
    PAUSE,
    RESUME,
    ROLLOUT,
    UPLOAD,
    pushing,
    waiting,
)
from tests.support.cluster.fake_control import PARTLY, FakeControl, envelope, error, ok, stored


def test_a_lost_connection_is_tried_again_with_the_same_key(
    server: FakeControl, client: Client
) -> None:
    lost = httpx.RemoteProtocolError("Server disconnected")
    server.on(PAUSE, lost, httpx.ReadError("reset"), ok(envelope(applied=False)))
    assert client.pause().applied is False
    keys = {request.headers["idempotency-key"] for request in server.asked}
    assert (len(server.asked), len(keys)) == (3, 1)
    assert server.slept == [0.2, 0.4]


@pytest.mark.parametrize(
    ("first", "slept"),
    [
        pytest.param(error(503, "coordinator_unavailable", retry_after="3"), 3.0, id="our own 503"),
        pytest.param(httpx.Response(502, text="Bad gateway"), 0.2, id="a proxy's words"),
    ],
)
def test_what_will_pass_is_tried_again(
    server: FakeControl, client: Client, first: httpx.Response, slept: float
) -> None:
    server.on(RESUME, first, ok(envelope()))
    client.resume()
    assert server.slept == [slept]


def test_patience_ends(server: FakeControl, client: Client) -> None:
    server.on(PAUSE, httpx.ConnectError("Connection refused"))
    with pytest.raises(Unreachable, match="POST /pause: Connection refused"):
        client.pause()
    assert 25 < sum(server.slept) <= 30


def test_an_answer_that_comes_too_late_is_not_asked_for_again(
    server: FakeControl, client: Client
) -> None:
    server.on(PAUSE, httpx.ReadTimeout(""))
    with pytest.raises(Unreachable, match="no answer came in time"):
        client.pause()
    assert len(server.asked) == 1


def test_an_answer_that_cannot_be_decoded_is_named_so_by_both_clients(
    server: FakeControl, client: Client
) -> None:
    def torn(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-encoding": "gzip"}, content=b"no gzip")

    server.on(PAUSE, torn)
    with pytest.raises(UnexpectedAnswer, match="POST /pause"):
        client.pause()

    async def main() -> None:
        async with waiting(server) as other:
            with pytest.raises(UnexpectedAnswer, match="POST /pause"):
                await other.pause()

    asyncio.run(main())
    assert len(server.asked) == 2


@pytest.mark.parametrize("kind", ["file", "folder", "bytes"])
def test_a_push_uploads_stages_and_rolls_out(
    server: FakeControl, client: Client, tmp_path: Path, kind: str
) -> None:
    pushing(server, stored("running", operation_id="op-2"), stored("succeeded"))
    file = tmp_path / "adapter.rkllm"
    file.write_bytes(CONTENT)
    source: Path | bytes = {"file": file, "folder": tmp_path, "bytes": CONTENT}[kind]  # type: ignore[assignment]
    told: list[Progress] = []
    pushed = client.push_adapter(
        source, "tone", "v1", strategy="canary", weight=0.25, on_progress=told.append
    )
    digest = hashlib.sha256(CONTENT).hexdigest()
    assert (pushed.label, pushed.sha256, pushed.size_bytes) == ("tone@v1", digest, len(CONTENT))
    assert pushed.rollout is not None
    assert pushed.rollout.state == "succeeded"
    upload, rollout = server.asked[0], server.asked[3]
    assert server.bodies[0] == CONTENT
    assert dict(upload.url.params) == {
        "name": "tone",
        "version": "v1",
        "sha256": digest,
        "size": str(len(CONTENT)),
        "activate": "false",
        "async": "true",
    }
    assert upload.headers["content-length"] == str(len(CONTENT))
    assert "transfer-encoding" not in upload.headers
    assert rollout.headers["idempotency-key"].startswith(upload.headers["idempotency-key"])
    assert server.json(3) == {
        "version": "v1",
        "model": "sim-chat",
        "strategy": "canary",
        "weight": 0.25,
        "async": True,
    }
    sent = [one.done for one in told if one.step == "upload"]
    assert sent == [PIECE_BYTES, 2 * PIECE_BYTES, len(CONTENT)]
    assert {one.total for one in told if one.step == "upload"} == {len(CONTENT)}
    assert [one.operation.state for one in told if one.operation] == [
        "running",
        "succeeded",
        "running",
        "succeeded",
    ]


def test_a_push_that_is_lost_sends_all_of_the_file_again(
    server: FakeControl, client: Client
) -> None:
    pushing(server, stored("succeeded"))
    server.answers[UPLOAD].insert(0, httpx.WriteError("broken pipe"))
    client.push_adapter(CONTENT, "tone", "v1")
    assert server.routes[:2] == [UPLOAD, UPLOAD]
    assert server.bodies[0] == server.bodies[1] == CONTENT


def test_what_is_not_staged_is_not_rolled_out(server: FakeControl, client: Client) -> None:
    pushing(server, stored("succeeded"))
    failed = stored("failed", succeeded=1, failed=PARTLY["failed"])
    server.on("GET /v1/operations/op-1", ok(failed))
    with pytest.raises(OperationFailed, match="is failed: sim-1: It does not answer"):
        client.push_adapter(b"x", "tone", "v1")
    assert ROLLOUT not in server.routes


def test_a_rollout_that_was_undone_says_why(server: FakeControl, client: Client) -> None:
    why = {"code": "adapter_broken", "message": "The probe failed on sim-1."}
    pushing(server, {**stored("undone"), "error": why})
    with pytest.raises(OperationFailed, match=r"undone: The probe failed on sim-1") as caught:
        client.push_adapter(b"x", "tone", "v1")
    assert caught.value.operation.error_code == "adapter_broken"


def test_a_push_without_activation_ends_with_the_staging(
    server: FakeControl, client: Client
) -> None:
    pushing(server, stored("succeeded"))
    assert client.push_adapter(b"x", "tone", activate=False).rollout is None
    assert ROLLOUT not in server.routes


@pytest.mark.parametrize(
    ("call", "route"),
    [
        (lambda c: c.rollback("tone"), "POST /v1/lora_adapters/tone/rollback"),
        (lambda c: c.promote("tone", model="m"), "POST /v1/lora_adapters/tone/promote"),
        (lambda c: c.remove_adapter("tone", "v1"), "DELETE /v1/lora_adapters/tone/v1"),
        (lambda c: c.remove_adapter("tone"), "DELETE /v1/lora_adapters/tone"),
        (lambda c: c.rollout("tone", "v1"), ROLLOUT),
    ],
    ids=["rollback", "promote", "remove a version", "remove all", "rollout"],
)
def test_long_work_is_begun_and_waited_for(
    server: FakeControl, client: Client, call: Callable[[Client], Any], route: str
) -> None:
    server.on(route, ok(envelope("running", applied=False), 202))
    server.on("GET /v1/operations/op-1", ok(stored("running")), ok(stored("succeeded")))
    done = call(client)
    assert (done.state, done.applied) == ("succeeded", False)
    assert server.json(0)["async"] is True
    assert len(server.slept) == 1


def test_waiting_can_be_given_up(server: FakeControl, client: Client) -> None:
    server.on("GET /v1/operations/op-1", ok(stored("running")))
    with pytest.raises(WaitTimeout, match="still runs after 5 s") as caught:
        client.wait("op-1", timeout_s=5)
    assert caught.value.operation.id == "op-1"
    assert max(server.slept) <= 1.0
