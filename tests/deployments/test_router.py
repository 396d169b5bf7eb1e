"""A hang-up between Serve and ASGI, and Ray's errors of handles in rkserve's terms."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorDiedError, RayTaskError, TaskCancelledError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from starlette.types import Message

from rkserve.core.board_report import GenerationInfo, GenerationState, RouterGenerations
from rkserve.core.desired_state import Scope
from rkserve.core.errors import BoardFailed, CoordinatorAway, OperationNotFound, RkserveError
from rkserve.core.messages import ControlAction
from rkserve.deployments.router import RayCoordinatorLink, RayPeers, RayRouters, _until_gone

pytestmark = pytest.mark.virtual_time

UNAVAILABLE = DeploymentUnavailableError(DeploymentID(name="Coordinator"))


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("call", "traceback", cause)


class Response:
    """A response of Ray's; ``answer`` is a value, an error, or None for none at all."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.cancelled = False

    def __await__(self) -> Any:
        return self._wait().__await__()

    async def _wait(self) -> Any:
        await asyncio.sleep(1e9 if self._answer is None else 0.0)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer

    def cancel(self) -> None:
        self.cancelled = True
        raise UNAVAILABLE  # as Ray does for a call that never reached a replica


class Handle:
    """The handle of a deployment whose replicas give the same answer, or those of a list."""

    def __init__(self, answer: Any) -> None:
        self.response = Response(answer)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._called(method, args))

    def broadcast(self, method: str, *args: Any) -> Any:
        self._called(method, args)

        async def results_async(timeout_s: float) -> Any:
            return await asyncio.wait_for(self.response._wait(), timeout_s)

        return SimpleNamespace(results_async=results_async)

    def _called(self, method: str, args: tuple[Any, ...]) -> Response:
        self.calls.append((method, args))
        return self.response


async def test_the_coordinators_answer_is_returned() -> None:
    handle = Handle(["op"])
    assert await RayCoordinatorLink(handle).call("operations", 5, timeout_s=1.0) == ["op"]
    assert handle.calls == [("operations", (5,))]
    assert not handle.response.cancelled


@pytest.mark.parametrize(
    ("answer", "kind", "words", "cancelled"),
    [
        pytest.param(
            task_error(OperationNotFound("op-1")), OperationNotFound, "op-1", False, id="its own"
        ),
        pytest.param(
            task_error(ZeroDivisionError("x")), CoordinatorAway, "its log says", False, id="a bug"
        ),
        pytest.param(ActorDiedError(), CoordinatorAway, "ActorDiedError", True, id="its death"),
        pytest.param(UNAVAILABLE, CoordinatorAway, "DeploymentUnavailable", True, id="no replica"),
        pytest.param(None, CoordinatorAway, "'operation' within 2 s", True, id="no answer"),
    ],
)
async def test_an_error_of_the_coordinators_handle_is_translated(
    answer: Any, kind: type[RkserveError], words: str, cancelled: bool
) -> None:
    handle = Handle(answer)
    with pytest.raises(kind, match=words):
        await RayCoordinatorLink(handle).call("operation", "op-1", timeout_s=2.0)
    assert handle.response.cancelled is cancelled, "a call that still waits is cancelled"


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return peers, and Routers, whose handle gives an answer."""
    context = SimpleNamespace(deployment="Router", app_name="app")
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)

    def made(answer: Any) -> tuple[RayPeers, RayRouters, Handle]:
        handle = Handle(answer)
        monkeypatch.setattr(serve, "get_deployment_handle", lambda *_: handle)
        return RayPeers(3.0), RayRouters("Router"), handle

    return made


def info(request_id: str) -> GenerationInfo:
    return GenerationInfo(request_id, "", "m", GenerationState.QUEUED, 1, 0, 1)


async def test_the_answers_of_all_routers_are_merged(peers: Any) -> None:
    one, two = info("a/0"), info("b/0")
    of, _, handle = peers([[one], [], [two]])
    assert await of.unassigned() == [one, two]
    assert handle.calls == [("unassigned", ())]
    of, _, handle = peers(
        [RouterGenerations((one,), (), (), known=True), RouterGenerations((), (two,), (two,))]
    )
    found = await of.control_unassigned("a", ControlAction.ABORT, None)
    assert found == RouterGenerations((one,), (two,), (two,), known=True)
    assert handle.calls == [("control_unassigned", ("a", ControlAction.ABORT, None))]
    of, _, _ = peers([False, True])
    assert await of.forget_response("owner", "resp-1") is True
    of, _, _ = peers([["one"], ["one", "two"], []])
    assert await of.kept_chain("owner", "resp-2", 100) == ["one", "two"]


async def test_the_aborted_requests_of_all_routers_are_counted(peers: Any) -> None:
    _, routers, handle = peers([2, 0, 1])
    assert await routers.abort(Scope(), ["r"], 1.0) == 3
    assert handle.calls == [("abort_waiting", (Scope(), ["r"]))]


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        pytest.param(
            task_error(OperationNotFound("op")), OperationNotFound, "op", id="a Router's own error"
        ),
        pytest.param(
            task_error(KeyError("x")), BoardFailed, "one of them failed .KeyError", id="a bug"
        ),
        pytest.param(ActorDiedError(), BoardFailed, "no answer .ActorDiedError", id="a death"),
        pytest.param(None, BoardFailed, "no answer .TimeoutError", id="no answer"),
    ],
)
async def test_an_error_of_a_router_is_translated(
    peers: Any, answer: Any, kind: type[RkserveError], words: str
) -> None:
    of, _, _ = peers(answer)
    with pytest.raises(kind, match=words):
        await of.unassigned()


async def test_routers_that_are_not_deployed_yet_are_an_error(
    peers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, routers, _ = peers([1])

    def missing(*_: str) -> Handle:
        raise UNAVAILABLE

    monkeypatch.setattr(serve, "get_deployment_handle", missing)
    with pytest.raises(BoardFailed, match="not found"):
        await routers.abort(Scope(), None, 1.0)


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
