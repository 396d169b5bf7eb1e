"""Ray's errors in our words, and a stream that is cancelled when it is closed."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Generator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.exceptions import ActorDiedError, GetTimeoutError, RayTaskError, TaskCancelledError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.schema import ReplicaState

from rkserve.core.board_report import BoardReport
from rkserve.core.errors import BoardFailed, BoardGone, QueueFull, StateConflict
from rkserve.core.messages import Delta, Embedded, EmbedRequest, Event, GenerateRequest
from rkserve.deployments.board_link import RayLink
from rkserve.deployments.ray_extensions import ReplicaGone
from tests.support.boards.fake_boards import accepted, finished, report

pytestmark = pytest.mark.virtual_time

REQUEST = GenerateRequest("r", "m", (1,), 4)
UNAVAILABLE = DeploymentUnavailableError(DeploymentID(name="Board-x"))


class Response:
    """A streaming response of Ray's: steps to yield or raise.

    As in Ray, ``cancel`` raises what kept the call from reaching a replica.
    """

    def __init__(self, steps: Sequence[Event | Exception]) -> None:
        self._steps = list(steps)
        first = self._steps[0] if self._steps else None
        self._unassigned = None if isinstance(first, Event) else first
        self.cancelled = False

    async def __anext__(self) -> Event:
        if not self._steps:
            raise StopAsyncIteration
        step = self._steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    def cancel(self) -> None:
        self.cancelled = True
        if self._unassigned is not None:
            raise self._unassigned


class Broadcast:
    """Answers of all replicas."""

    def __init__(self, answers: list[Any] | Exception) -> None:
        self._answers = answers

    async def results_async(self, **_: Any) -> list[Any]:
        if isinstance(self._answers, Exception):
            raise self._answers
        return self._answers


class Handle:
    """A deployment handle that notes which replica was asked for."""

    def __init__(
        self, *steps: Event | Exception, answers: list[Any] | Exception | None = None
    ) -> None:
        self.response = Response(steps)
        self.asked_for: list[str] = []
        self.generate = SimpleNamespace(remote=lambda _: self.response)
        self.embed = SimpleNamespace()
        self._answers = answers if answers is not None else []
        self._router = None  # nothing has come from Serve's controller
        self.app_name = self.deployment_name = ""

    def options(self, *, stream: bool = True, session_id: str | None = None) -> Handle:
        if session_id is not None:
            self.asked_for.append(session_id)
        return self

    def broadcast(self, method: str) -> Broadcast:
        assert method == "report"
        return Broadcast(self._answers)


def task_error(cause: Exception) -> RayTaskError:
    """An exception of a replica as Ray hands it on."""
    return RayTaskError("generate", "a traceback", cause)


def link(handle: Handle) -> RayLink:
    """A link over that handle."""
    return RayLink(handle, "sim", report_timeout_s=1.0)


async def test_events_come_through_and_the_chosen_replica_is_asked() -> None:
    events: list[Event] = [accepted("sim-0"), Delta("x", (1,)), finished(1)]
    handle = Handle(*events)
    assert [e async for e in link(handle).open(REQUEST, "abc")] == events
    assert handle.asked_for == ["abc"]


async def test_a_request_for_vectors_is_a_call_of_its_own() -> None:
    events: list[Event] = [accepted("sim-0"), Embedded((b"1234",)), finished(0)]
    handle = Handle(*events)
    handle.embed, handle.generate = handle.generate, SimpleNamespace()
    asked = EmbedRequest("e/0", "m", (), 0, inputs=((1, 2),))
    assert [e async for e in link(handle).open(asked, "abc")] == events
    assert handle.asked_for == ["abc"]


async def test_closing_a_stream_cancels_it() -> None:
    handle = Handle(accepted("sim-0"), Delta("x", (1,)))
    events = link(handle).open(REQUEST, "abc")
    await anext(events)
    assert not handle.response.cancelled
    await events.aclose()
    assert handle.response.cancelled


@pytest.mark.parametrize(
    ("raised", "expected", "words"),
    [
        pytest.param(task_error(QueueFull(3, 2)), QueueFull, "3 requests", id="the board's own"),
        pytest.param(
            task_error(BoardFailed("sim-0", "SIGSEGV")), BoardFailed, "SIGSEGV", id="its failure"
        ),
        pytest.param(
            task_error(ZeroDivisionError("x")), BoardFailed, "internal error", id="a bug there"
        ),
        pytest.param(ActorDiedError(), BoardFailed, "its replica died", id="SIGKILL"),
        pytest.param(GetTimeoutError("x"), BoardFailed, "could not reach", id="Ray is slow"),
        pytest.param(TaskCancelledError(), BoardFailed, "could not reach", id="cancelled by Ray"),
        pytest.param(BackPressureError(1, 1), BoardFailed, "could not reach", id="Serve is full"),
        pytest.param(UNAVAILABLE, BoardFailed, "could not reach", id="the deployment is gone"),
        pytest.param(
            ReplicaGone("abc"), BoardFailed, "ReplicaGone", id="the replica left meanwhile"
        ),
    ],
)
async def test_every_error_of_ray_s_becomes_one_of_ours(
    raised: Exception, expected: type[Exception], words: str
) -> None:
    handle = Handle(raised)
    with pytest.raises(expected, match=words):
        await anext(link(handle).open(REQUEST, "abc"))
    assert handle.response.cancelled


async def test_a_board_that_dies_in_mid_answer_is_called_by_its_name() -> None:
    events = link(Handle(accepted("sim-7"), ActorDiedError())).open(REQUEST, "abc")
    await anext(events)
    with pytest.raises(BoardFailed, match="Board sim-7 failed"):
        await anext(events)


@pytest.mark.parametrize(
    ("answers", "boards"),
    [
        pytest.param([report("a"), report("b")], ["a", "b"], id="all answer"),
        pytest.param([report("a"), ActorDiedError()], ["a"], id="one has died"),
        pytest.param([], [], id="no replicas"),
        pytest.param(UNAVAILABLE, [], id="no deployment"),
    ],
)
async def test_reports_are_those_that_came(
    answers: list[Any] | Exception, boards: list[str]
) -> None:
    found = await link(Handle(answers=answers)).reports()
    assert [r.board_id for r in found] == boards


async def test_no_report_in_time_is_said_of_the_group() -> None:
    with pytest.raises(BoardFailed, match=r"Board sim failed.*time limit"):
        await link(Handle(answers=TimeoutError())).reports()


class Listed:
    """One replica in Ray's table."""

    def __init__(self, name: str) -> None:
        self.replica_id = SimpleNamespace(unique_id=name)
        self.ends: Exception | None = None

    async def get_queue_len(self, *, deadline_s: float) -> int:
        if self.ends is not None:
            raise self.ends
        return 0


class Group:
    """A handle of replicas of which some never answer; ``results_async`` gathers, as Ray's does."""

    def __init__(self, *boards: str) -> None:
        self.silent: set[str] = set()
        self.cancelled: list[str] = []
        self.errors: dict[str, Exception] = {}
        self._reports: dict[str, Any] = {f"replica of {board}": report(board) for board in boards}
        self._wanted = ""
        self.listed = {name: Listed(name) for name in self._reports}
        table = SimpleNamespace(curr_replicas=self.listed)
        router = SimpleNamespace(_request_router=table)
        self._router = SimpleNamespace(_asyncio_router=router)

    def options(self, *, session_id: str = "", **_: Any) -> Group:
        one = copy.copy(self)
        one._wanted = session_id
        return one

    def broadcast(self, _: str) -> Group:
        return self

    async def results_async(self, *, timeout_s: float, **_: Any) -> list[Any]:
        return await asyncio.wait_for(self._all(), timeout_s)

    async def _fetch_replica_results_async(self) -> list[Any]:
        if not self.listed:
            raise UNAVAILABLE
        return [SimpleNamespace(get_async=partial(self._one, name)) for name in self.listed]

    @property
    def report(self) -> Any:
        return SimpleNamespace(remote=lambda: self)

    @property
    def delete_cache(self) -> Any:
        return SimpleNamespace(remote=self._deleting)

    def _deleting(self, name: str) -> Group:
        one = copy.copy(self)
        one._reports = {key: (key, name) for key in self._reports}
        return one

    def __await__(self) -> Generator[Any, None, Any]:
        return self._one(self._wanted).__await__()

    def cancel(self) -> None:
        self.cancelled.append(self._wanted)

    async def _all(self) -> list[Any]:
        # Ray gathers, with exceptions as answers; a silent one keeps it from ending.
        return await asyncio.gather(*map(self._one, self.listed), return_exceptions=True)

    async def _one(self, replica: str) -> Any:
        if replica not in self.listed:
            raise ReplicaGone(replica)
        if replica in self.silent:
            await asyncio.Event().wait()
        if replica in self.errors:
            raise self.errors[replica]
        return self._reports[replica]


async def test_a_silent_replica_does_not_silence_the_others() -> None:
    group = Group("a", "b", "c")
    found = RayLink(group, "sim", 0.05)
    assert len(await found.reports()) == 3
    group.silent.add("replica of b")
    for _ in range(2):
        assert [r.board_id for r in await found.reports()] == ["a", "c"]
    assert "replica of b" in group.cancelled
    group.silent.clear()
    assert len(await found.reports()) == 3


async def test_all_are_asked_by_one_call_and_who_fails_or_is_silent_hides_nobody() -> None:
    group = Group("a", "b", "c", "d")
    heard: list[BoardReport] = []
    found = RayLink(group, "sim", 0.05)
    await found.ask_all("emitted", timeout_s=60.0, take=heard.append)
    assert [said.board_id for said in heard] == ["a", "b", "c", "d"]
    heard.clear()
    group.silent.add("replica of a")
    group.errors["replica of c"] = ActorDiedError()
    group.errors["replica of d"] = task_error(BoardFailed("d", "SIGSEGV"))
    await found.ask_all("emitted", timeout_s=0.05, take=heard.append)
    assert [said.board_id for said in heard] == ["b"]
    group.listed.clear()
    await found.ask_all("emitted", timeout_s=60.0, take=heard.append)
    assert len(heard) == 1


async def test_replicas_that_were_never_heard_are_asked_beside_a_silent_one() -> None:
    group = Group("a", "b", "c")
    found = RayLink(group, "sim", 0.05)
    group.silent.add("replica of b")
    assert [r.board_id for r in await found.reports()] == ["a", "c"]
    assert not found.complete
    group.silent.clear()
    assert len(await found.reports()) == 3
    assert found.complete


async def test_a_group_whose_only_replica_is_silent_is_not_complete() -> None:
    group = Group("a")
    group.silent.add("replica of a")
    found = RayLink(group, "sim", 0.05)
    assert await found.reports() == []
    assert not found.complete


@pytest.mark.parametrize(
    ("answers", "complete"),
    [
        pytest.param(UNAVAILABLE, True, id="no replica at all"),
        pytest.param([report("a")], True, id="all there are"),
    ],
)
async def test_a_round_that_left_nobody_out_is_complete(
    answers: list[Any] | Exception, complete: bool
) -> None:
    found = link(Handle(answers=answers))
    assert not found.complete
    await found.reports()
    assert found.complete is complete


async def test_a_replica_that_died_does_not_keep_a_round_from_being_complete() -> None:
    group = Group("a", "b")
    group.errors["replica of b"] = ActorDiedError()
    found = RayLink(group, "sim", 0.05)
    assert [r.board_id for r in await found.reports()] == ["a"]
    assert found.complete


async def test_a_replica_that_left_the_table_is_gone_only_once_it_has_died() -> None:
    group = Group("a", "b")
    found = RayLink(group, "sim", 1.0)
    await found.reports()
    draining = group.listed.pop("replica of b")
    for _ in range(2):
        assert [r.board_id for r in await found.reports()] == ["a"]
        with pytest.raises(BoardFailed, match="being ended") as caught:
            await found.ask("replica of b", "report", timeout_s=1.0)
        assert type(caught.value) is BoardFailed, "its fate is not known"
    draining.ends = GetTimeoutError("Ray is slow")
    with pytest.raises(BoardFailed) as caught:
        await found.ask("replica of b", "report", timeout_s=1.0)
    assert type(caught.value) is BoardFailed, "its fate is not known"
    draining.ends = ActorDiedError()
    with pytest.raises(BoardGone, match="has ended"):
        await found.ask("replica of b", "report", timeout_s=1.0)
    await found.reports()
    with pytest.raises(BoardGone, match="has ended"):
        await found.ask("replica of b", "report", timeout_s=1.0)


async def test_a_question_goes_to_its_replica_with_its_arguments() -> None:
    found = RayLink(Group("a", "b"), "sim", 1.0)
    answered = await found.ask("replica of b", "delete_cache", "doc", timeout_s=1.0)
    assert answered == ("replica of b", "doc")


@pytest.mark.parametrize(
    ("raised", "expected", "words"),
    [
        pytest.param(
            task_error(StateConflict("resume", "ended")), StateConflict, "ended", id="the board's"
        ),
        pytest.param(task_error(ZeroDivisionError("x")), BoardFailed, "internal", id="a bug there"),
        pytest.param(ActorDiedError(), BoardFailed, "its replica died", id="SIGKILL"),
    ],
)
async def test_a_question_that_fails_fails_in_our_words(
    raised: Exception, expected: type[Exception], words: str
) -> None:
    group = Group("a")
    group.errors["replica of a"] = raised
    with pytest.raises(expected, match=words):
        await RayLink(group, "sim", 1.0).ask("replica of a", "report", timeout_s=1.0)


async def test_a_question_has_a_time_limit_and_is_taken_back_then() -> None:
    group = Group("a")
    group.silent.add("replica of a")
    with pytest.raises(BoardFailed, match=r"did not answer: nothing came within 0\.02 s"):
        await RayLink(group, "sim", 1.0).ask("replica of a", "report", timeout_s=0.02)
    assert group.cancelled == ["replica of a"]


def serve_status(**states: int) -> SimpleNamespace:
    """Serve's status with the replicas of the group's deployment by their states."""
    replicas = {ReplicaState(name): number for name, number in states.items()}
    deployment = SimpleNamespace(replica_states=replicas)
    application = SimpleNamespace(deployments={"Board-sim": deployment})
    return SimpleNamespace(applications={"rkserve": application})


@pytest.mark.parametrize(
    ("states", "runs"),
    [
        ({"STARTING": 3}, False),
        ({"STOPPING": 1, "RUNNING": 0}, False),
        ({}, False),
        ({"STARTING": 2, "RUNNING": 1}, True),
        ({"RECOVERING": 1}, True),  # the controller has been started again
    ],
)
async def test_boards_that_run_are_those_of_serve_s_status(
    states: dict[str, int], runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "status", lambda: serve_status(**states))
    handle = Handle()
    handle.app_name, handle.deployment_name = "rkserve", "Board-sim"
    assert await link(handle).has_running() is runs
    handle.app_name = "another"
    assert not await link(handle).has_running()


async def test_a_replica_that_ray_lists_is_new_until_a_round_has_asked_it() -> None:
    group = Group("a", "b")
    second = group.listed.pop("replica of b")
    found = RayLink(group, "sim", 0.05)
    assert found.has_new()
    await found.reports()
    assert not found.has_new()
    group.listed["replica of b"] = second
    assert found.has_new()
    await found.reports()
    del group.listed["replica of a"]
    assert not found.has_new(), "one has gone"


async def test_boards_may_run_where_serve_has_no_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def status() -> None:
        raise RayServeException("There is no Serve instance running on this Ray cluster.")

    monkeypatch.setattr(serve, "status", status)
    assert await link(Handle()).has_running()
