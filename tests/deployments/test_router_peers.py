"""Calls to all Routers: their answers merged, one silent Router among them, Ray's errors; and those
to the Coordinator.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError

from rkserve.core.answer_metrics import RouterUsage
from rkserve.core.board_report import GenerationInfo, GenerationState, RouterGenerations
from rkserve.core.desired_state import Scope
from rkserve.core.errors import BoardFailed, CoordinatorAway, OperationNotFound, RkserveError
from rkserve.core.exposition import RouterFigures
from rkserve.core.messages import ControlAction
from rkserve.deployments.router_peers import RayCoordinatorLink, RayPeers, RayRouters

pytestmark = pytest.mark.virtual_time

UNAVAILABLE = DeploymentUnavailableError(DeploymentID(name="Router"))
OWN = "own-replica"


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("call", "traceback", cause)


async def given(answer: Any) -> Any:
    """Return an answer or raise an error; None is no answer at all."""
    await asyncio.sleep(1e9 if answer is None else 0.0)
    if isinstance(answer, Exception):
        raise answer
    return answer


Replica = Callable[[], Awaitable[Any]]


async def silent() -> None:
    """A replica that does not answer."""
    await asyncio.sleep(1e9)


async def itself() -> None:
    """The replica that has asked."""


async def broken() -> None:
    """A replica whose method raises what it should not."""
    raise task_error(KeyError("x"))


def has(replica: str, router: str) -> Replica:
    """A replica with its figures."""

    async def answer() -> tuple[str, RouterFigures]:
        return replica, RouterFigures(router)

    return answer


class Handle:
    """The handle of the Routers' deployment: all answers at once, or those of each replica.

    Of ``replicas`` by ID, each has an answer of its own. Ray knows of no replica before a call.
    """

    def __init__(self, answer: Any, replicas: dict[str, Replica] | None = None) -> None:
        self.answer, self.replicas = answer, replicas or {}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self._router: Any = None

    def broadcast(self, method: str, *args: Any) -> Any:
        self.calls.append((method, args))
        ids = {
            one: SimpleNamespace(replica_id=SimpleNamespace(unique_id=one)) for one in self.replicas
        }
        inner = SimpleNamespace(_request_router=SimpleNamespace(curr_replicas=ids))
        self._router = SimpleNamespace(_asyncio_router=inner)

        async def results_async(timeout_s: float) -> Any:
            return await asyncio.wait_for(given(self.answer), timeout_s)

        async def one_by_one() -> list[Any]:
            if isinstance(self.answer, Exception):
                raise self.answer
            return [SimpleNamespace(get_async=answer) for answer in self.replicas.values()]

        return SimpleNamespace(results_async=results_async, _fetch_replica_results_async=one_by_one)


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return peers, and Routers, whose handle gives an answer."""
    context = SimpleNamespace(
        deployment="Router", app_name="app", replica_id=SimpleNamespace(unique_id=OWN)
    )
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)

    def made(
        answer: Any, replicas: dict[str, Replica] | None = None
    ) -> tuple[RayPeers, RayRouters, Handle]:
        handle = Handle(answer, replicas)
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


# -- metrics --------------------------------------------------------------------------------------


async def test_one_silent_router_does_not_withhold_the_metrics_of_the_others(peers: Any) -> None:
    replicas = {OWN: itself, "first": has("first", "1"), "second": has("second", "2")}
    of, _, handle = peers("unused", replicas)
    answered, missing = await of.figures(2.0)
    assert (list(answered), list(missing)) == ([RouterFigures("1"), RouterFigures("2")], [])
    assert handle.calls == [("figures", (OWN,))]
    handle.replicas = {**replicas, "first": silent}
    began_s = asyncio.get_running_loop().time()
    answered, missing = await of.figures(2.0)
    assert list(answered) == [RouterFigures("2")]
    assert list(missing) == ["1"], "by the name under which it has answered before"
    assert asyncio.get_running_loop().time() - began_s == pytest.approx(2.0, abs=0.1)


async def test_a_router_that_fails_is_a_silent_one(peers: Any) -> None:
    of, _, _ = peers("unused", {"abcdefghijkl": broken, "second": has("second", "2")})
    answered, missing = await of.figures(2.0)
    assert (list(answered), list(missing)) == ([RouterFigures("2")], ["abcdefgh"])


async def test_a_router_alone_asks_only_once_for_the_metrics_of_others(peers: Any) -> None:
    # Ray knows of no replica before the first call.
    of, _, handle = peers("unused", {OWN: itself})
    for _ in range(3):
        answered, missing = await of.figures(2.0)
        assert (list(answered), list(missing)) == ([], [])
    assert handle.calls == [("figures", (OWN,))]


async def test_without_any_replica_there_are_no_metrics_of_others(peers: Any) -> None:
    of, _, _ = peers(UNAVAILABLE)
    answered, missing = await of.figures(2.0)
    assert (list(answered), list(missing)) == ([], [])


async def test_the_usage_of_the_others_is_asked_since_a_day_and_silent_ones_are_named(
    peers: Any,
) -> None:
    async def answer() -> tuple[str, RouterUsage]:
        return "first", RouterUsage("1", "file")

    of, _, handle = peers("unused", {OWN: itself, "first": answer, "abcdefghijkl": silent})
    answered, missing = await of.usage(20_455, 2.0)
    assert (list(answered), list(missing)) == ([RouterUsage("1", "file")], ["abcdefgh"])
    assert handle.calls == [("key_usage", (OWN, 20_455))]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(UNAVAILABLE, id="no other Router"),
        pytest.param(None, id="no answer"),
        pytest.param([None, None], id="they have it"),
    ],
)
async def test_the_beginning_and_the_end_of_a_router_are_announced(peers: Any, answer: Any) -> None:
    of, _, handle = peers(answer)
    await of.began("0")
    await of.ended(RouterFigures("0"))
    assert handle.calls == [("router_began", ("0",)), ("router_ended", (RouterFigures("0"),))]


# -- the Coordinator ------------------------------------------------------------------------------


class CoordinatorResponse:
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


class CoordinatorHandle:
    """The handle of a deployment with one replica."""

    def __init__(self, answer: Any) -> None:
        self.response = CoordinatorResponse(answer)
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *args: self._called(method, args))

    def _called(self, method: str, args: tuple[Any, ...]) -> CoordinatorResponse:
        self.calls.append((method, args))
        return self.response


async def test_the_coordinators_answer_is_returned() -> None:
    handle = CoordinatorHandle(["op"])
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
    handle = CoordinatorHandle(answer)
    with pytest.raises(kind, match=words):
        await RayCoordinatorLink(handle).call("operation", "op-1", timeout_s=2.0)
    assert handle.response.cancelled is cancelled, "a call that still waits is cancelled"
