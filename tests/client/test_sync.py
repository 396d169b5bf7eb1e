"""The client: what it sends, tries again, waits for and raises."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import pickle
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import rkserve.client
from rkserve.client import (
    AsyncClient,
    CallError,
    Client,
    ClientError,
    Conflict,
    LeaseLost,
    NotAllowed,
    NotFound,
    Operation,
    OperationError,
    OperationFailed,
    OperationUndone,
    PartlyDone,
    Progress,
    Refused,
    ServerFailed,
    SourceFailed,
    Unavailable,
    UnexpectedAnswer,
    Unreachable,
    WaitTimeout,
    errors,
)
from rkserve.client.lease import Lease
from rkserve.client.requests import PIECE_BYTES, Upload
from tests.support.cluster.fake_control import PARTLY, FakeControl, envelope, error, ok, stored

PAUSE, RESUME = "POST /pause", "POST /resume"
UPLOAD, ROLLOUT = "POST /v1/lora_adapters", "POST /v1/lora_adapters/tone/rollout"
CONTENT = b"adapter" * 400_000  # several pieces


@pytest.fixture
def server() -> FakeControl:
    return FakeControl()


@pytest.fixture
def client(server: FakeControl) -> Client:
    return Client(
        "http://head:8000/v1",
        admin_key="secret",
        transport=httpx.MockTransport(server.handle),
        sleep=server.sleep,
        clock=server.clock,
    )


def waiting(server: FakeControl) -> AsyncClient:
    return AsyncClient(
        "http://head:8000",
        admin_key="secret",
        transport=httpx.MockTransport(server.handle_async),
        sleep=server.sleep_async,
        clock=server.clock,
    )


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


def test_a_lost_connection_is_tried_again_with_the_same_key(
    server: FakeControl, client: Client
) -> None:
    lost = httpx.RemoteProtocolError("Server disconnected")
    server.on(PAUSE, lost, httpx.ReadError("reset"), ok(envelope(applied=False)))
    assert client.pause().applied is False
    keys = {request.headers["idempotency-key"] for request in server.asked}
    assert (len(server.asked), len(keys)) == (3, 1)
    assert server.slept == [0.2, 0.4]


def test_two_calls_have_two_keys_unless_the_caller_says_otherwise(
    server: FakeControl, client: Client
) -> None:
    server.on(PAUSE, ok(envelope()))
    for key in (None, None, "mine", "mine"):
        client.pause(key=key)
    keys = [request.headers["idempotency-key"] for request in server.asked]
    assert keys[2:] == ["mine", "mine"]
    assert len(set(keys)) == 3


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


@pytest.mark.parametrize(
    ("status", "code", "raised"),
    [
        (400, "artifact_refused", Refused),
        (401, "invalid_api_key", NotAllowed),
        (403, "forbidden", NotAllowed),
        (404, "operation_not_found", NotFound),
        (409, "stale_epoch", Conflict),
        (413, "body_too_large", Refused),
        (500, "internal_error", ServerFailed),
        (503, "engine_paused", Unavailable),
        (504, "operation_timeout", OperationUndone),
    ],
)
def test_errors_have_a_class_by_their_status(
    server: FakeControl, client: Client, status: int, code: str, raised: type[CallError]
) -> None:
    server.on(PAUSE, error(status, code, retry_after="4", operation_id="op-9"))
    with pytest.raises(raised) as caught:
        client.pause()
    exc = pickle.loads(pickle.dumps(caught.value))
    assert type(exc) is raised
    assert (exc.status, exc.code, exc.retry_after_s) == (status, code, 4.0)
    assert exc.operation_id == "op-9"
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(httpx.Response(200, text="<html>"), id="no JSON"),
        pytest.param(ok([1]), id="no object"),
        pytest.param(ok({"status": "paused"}), id="another server's pause"),
        pytest.param(httpx.Response(404, text="nothing here"), id="an error in other words"),
    ],
)
def test_answers_of_something_else_are_named_so(
    server: FakeControl, client: Client, answer: httpx.Response
) -> None:
    server.on(PAUSE, answer)
    with pytest.raises(UnexpectedAnswer):
        client.pause()


def test_a_partial_result_is_an_error_that_has_the_results(
    server: FakeControl, client: Client
) -> None:
    server.on(RESUME, ok(envelope("partial", **PARTLY), 207))
    with pytest.raises(PartlyDone, match=r"1 of 2 boards; sim-1: It does not answer") as caught:
        client.resume()
    exc = pickle.loads(pickle.dumps(caught.value))
    assert [failure.board for failure in exc.failed] == ["sim-1"]
    assert list(exc.results) == ["sim-0"]


def test_the_key_is_shown_nowhere(client: Client) -> None:
    assert "secret" not in f"{client!r} {vars(client)}"


@pytest.mark.parametrize(
    ("given", "sent"),
    [
        pytest.param("secret\n", b"Bearer secret", id="a line of a file"),
        pytest.param("geh\u00ebim", "Bearer geh\u00ebim".encode(), id="as a Router reads it"),
        pytest.param(" \n", None, id="an empty variable"),
    ],
)
def test_a_key_is_sent_without_what_stands_around_it(
    server: FakeControl, given: str, sent: bytes | None
) -> None:
    server.on(PAUSE, ok(envelope()))
    transport = httpx.MockTransport(server.handle)
    with Client("http://head:8000", admin_key=given, transport=transport) as client:
        client.pause()
    raw = {name.lower(): value for name, value in server.asked[0].headers.raw}
    assert raw.get(b"authorization") == sent


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize("key", ["se\ncret", "se\0cret", "se\udc80cret"])
def test_a_key_that_cannot_be_sent_is_refused_and_not_shown(
    kind: type[Client] | type[AsyncClient], key: str
) -> None:
    with pytest.raises(ValueError, match="admin key") as caught:
        kind("http://head:8000", admin_key=key)
    assert "cret" not in f"{caught.value!r}"


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


@pytest.mark.parametrize("url", ["head:8000", "ftp://head", "http://", "http://[::1"])
def test_what_is_no_url_is_refused_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r"URL|http"):
        Client(url)


# Adapters


def pushing(server: FakeControl, *ends: dict[str, Any]) -> None:
    names = {"name": "tone", "version": "v1", "model": "sim-chat"}
    server.on(UPLOAD, ok({**names, **envelope("running", kind="adapter_stage")}, 202))
    server.on(ROLLOUT, ok({**names, **envelope("running", operation_id="op-2")}, 202))
    server.on("GET /v1/operations/op-1", ok(stored("running")), ok(stored("succeeded")))
    server.on("GET /v1/operations/op-2", *(ok(end) for end in ends))


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


def test_a_file_that_is_not_there_is_said_before_anything_is_sent(
    server: FakeControl, client: Client, tmp_path: Path
) -> None:
    with pytest.raises(SourceFailed, match="cannot be read: No such file"):
        client.push_adapter(tmp_path / "none", "tone")
    assert server.asked == []


def test_a_file_that_shrinks_on_the_way_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "adapter.rkllm"
    file.write_bytes(CONTENT)
    source = Upload.of(file, lambda _: None)
    file.write_bytes(b"short")
    with pytest.raises(SourceFailed, match="became shorter"):
        list(source.pieces())


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


def test_what_there_is_can_be_asked_for(server: FakeControl, client: Client) -> None:
    rows = ok({"object": "list", "data": [{"id": "a"}]})
    for path in ("boards", "models", "lora_adapters", "audit"):
        server.on(f"GET /v1/{path}", rows)
    server.on("GET /v1/operations", ok({"data": [stored("partial", **PARTLY)]}))
    server.on("GET /v1/cluster", ok({"epoch": 7}))
    server.on("GET /weight_info", ok({"weight_version": "step-9"}))
    server.on("POST /update_weight_version", ok(envelope(kind="label")))
    server.on("POST /reset_prefix_cache", ok(envelope(kind="cache_reset")))
    server.on(
        "GET /is_paused",
        ok(
            {
                "is_paused": True,
                "all": False,
                "epoch": 7,
                "boards": {"a": {"paused": True, "mode": "keep"}, "b": {"paused": False}},
            }
        ),
    )
    assert (
        client.boards() == client.models() == client.adapters() == client.audit() == [{"id": "a"}]
    )
    assert [one.state for one in client.operations(limit=5)] == ["partial"]
    assert server.asked[-1].url.params["limit"] == "5"
    assert client.cluster() == {"epoch": 7}
    assert client.weight_version("sim-chat") == "step-9"
    assert client.set_weight_version("step-10").kind == "label"
    assert server.json() == {"new_version": "step-10"}
    assert client.reset_cache(boards="a").kind == "cache_reset"
    paused = client.is_paused()
    assert (bool(paused), paused.all, dict(paused.boards)) == (
        True,
        False,
        {"a": "keep", "b": None},
    )


# Leases


def test_a_block_is_paused_and_resumed(server: FakeControl, client: Client) -> None:
    server.on(PAUSE, ok(envelope())).on(RESUME, ok(envelope()))
    with client.paused(adapter="tone", lease_s=60) as lease:
        assert lease.operation.id == "op-1"
        lease.check()
    assert server.routes == [PAUSE, RESUME]
    assert server.json(0)["lease_s"] == 60
    assert server.json(1) == {"adapter": "tone"}


def test_a_block_that_raises_is_resumed_and_its_error_is_the_one_to_see(
    server: FakeControl, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    server.on(PAUSE, ok(envelope())).on(RESUME, error(409, "operation_conflict"))
    with pytest.raises(ZeroDivisionError), client.paused():
        raise ZeroDivisionError
    assert server.routes == [PAUSE, RESUME]
    assert "ends with its lease" in caplog.text


def test_what_could_not_be_paused_is_not_entered_and_not_resumed(
    server: FakeControl, client: Client
) -> None:
    server.on(PAUSE, error(504, "operation_timeout"))
    with pytest.raises(OperationUndone), client.paused():
        pytest.fail("the block must not be entered")
    assert server.routes == [PAUSE]


def test_a_lease_is_renewed_while_the_block_runs(server: FakeControl, client: Client) -> None:
    renewed = threading.Event()

    def again(_: httpx.Request) -> httpx.Response:
        if len(server.asked) >= 3:
            renewed.set()
        return ok(envelope())

    server.on(PAUSE, again).on(RESUME, ok(envelope()))
    with client.paused(lease_s=0.03):
        assert renewed.wait(30)
    assert server.routes[-1] == RESUME
    assert server.routes.count(RESUME) == 1
    pauses = [at for at, route in enumerate(server.routes) if route == PAUSE]
    bodies = [{k: v for k, v in server.json(at).items() if k != "timeout_s"} for at in pauses]
    assert all(body == bodies[0] for body in bodies), "another pause would not take its place"
    keys = {server.asked[at].headers["idempotency-key"] for at in pauses}
    assert len(keys) == len(pauses)


def test_a_lease_that_was_not_renewed_in_time_is_told_at_the_end(
    server: FakeControl, client: Client
) -> None:
    server.on(PAUSE, ok(envelope())).on(RESUME, ok(envelope()))
    with pytest.raises(LeaseLost, match="lease of 60 s"), client.paused(lease_s=60):
        server.now += 61
    assert server.routes == [PAUSE, RESUME]


def test_a_lease_that_was_lost_once_stays_lost() -> None:
    now = [0.0]
    lease = Lease(None, 10.0, 0.0, lambda: now[0])  # type: ignore[arg-type]
    now[0] = 9.0
    lease.began(8.0)
    now[0] = 17.0
    assert not lease.lost
    now[0] = 19.0
    assert lease.lost
    lease.began(19.0)
    assert lease.lost


# The asynchronous client does the same


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


def test_the_asynchronous_client_renews_and_resumes_when_it_is_cancelled(
    server: FakeControl,
) -> None:
    async def main() -> None:
        renewed = asyncio.Event()

        def again(_: httpx.Request) -> httpx.Response:
            if len(server.asked) >= 3:
                renewed.set()
            return ok(envelope())

        server.on(PAUSE, again).on(RESUME, ok(envelope()))

        async def train() -> None:
            async with waiting(server) as client, client.paused(lease_s=0.03):
                await asyncio.Event().wait()

        task = asyncio.create_task(train())
        await asyncio.wait_for(renewed.wait(), 30)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert server.routes[-1] == RESUME


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
    own = inspect.unwrap(other)
    assert inspect.iscoroutinefunction(own) or inspect.isasyncgenfunction(own)


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error_is_of_the_one_tree_and_survives_a_process(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, ClientError)
    assert getattr(rkserve.client, name) is kind
    assert re.search(rf"^ *(\|   )*(\+-- )?{name}\b", errors.__doc__ or "", re.MULTILINE)
    args: tuple[Any, ...] = ("It is said.",)
    if issubclass(kind, CallError):
        args = (409, "stale_epoch", "It is said.", "epoch", 2.0, {"operation_id": "op-1"})
    elif issubclass(kind, OperationError | WaitTimeout):
        ended = Operation("op-1", "pause", "partial", 7, 2, 1)
        args = (ended, 5.0) if kind is WaitTimeout else (ended,)
    again = pickle.loads(pickle.dumps(kind(*args)))
    assert (type(again), again.args, str(again)) == (kind, args, str(kind(*args)))


def test_no_error_is_missing_in_the_tree() -> None:
    def below(kind: type[ClientError]) -> set[str]:
        return {kind.__name__}.union(*(below(one) for one in kind.__subclasses__()))

    assert sorted(below(ClientError)) == errors.__all__
