"""The Router's side of the Coordinator: its desired state, and calls that must not be lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from rkserve.control.calls import DeclaredArtifact, OperationRequest, PauseAction
from rkserve.control.operations import OperationOutcome
from rkserve.core.desired_state import Desired
from rkserve.core.errors import CoordinatorAway
from rkserve.router.coordinator_client import CoordinatorClient
from tests.support.boards.fake_boards import eventually
from tests.support.cluster.fake_head import FakeHead

pytestmark = pytest.mark.virtual_time

PAUSE = OperationRequest(PauseAction())


async def test_every_change_is_heard_and_none_goes_back() -> None:
    heard: list[int] = []
    head = FakeHead(Desired(3))
    cluster = CoordinatorClient(head, lambda desired: heard.append(desired.epoch))
    assert not cluster.known
    assert cluster.heard_s_ago is None
    following = asyncio.create_task(cluster.follow())
    for epoch in (3, 4, 2, 9):
        head.desired = Desired(epoch)
        await eventually(lambda: cluster.desired.epoch >= head.desired.epoch)
        await asyncio.sleep(0.03)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert heard == [3, 4, 9]
    assert cluster.reachable


async def test_a_coordinator_that_comes_back_is_followed_again() -> None:
    head = FakeHead(Desired(1))
    cluster = CoordinatorClient(head)
    following = asyncio.create_task(cluster.follow())
    await eventually(lambda: cluster.desired.epoch == 1)
    head.away = True
    await eventually(lambda: not cluster.reachable)
    assert cluster.desired.epoch == 1, "what was heard last stays true"
    with pytest.raises(CoordinatorAway):
        await cluster.perform(PAUSE)
    head.desired, head.away = Desired(2), False
    await eventually(lambda: cluster.desired.epoch == 2)
    assert cluster.reachable
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_router_that_starts_without_the_coordinator_gives_up_in_time() -> None:
    cluster = CoordinatorClient(FakeHead(away=True))
    await cluster.find(0.2)
    assert not cluster.known
    assert cluster.desired == Desired()


async def test_a_change_does_not_wait_for_a_coordinator_that_is_gone() -> None:
    head = FakeHead(says={"desired": CoordinatorAway("It is gone (test).")})
    cluster = CoordinatorClient(head)
    for change in (cluster.perform(PAUSE), cluster.metrics()):
        with pytest.raises(CoordinatorAway):
            await change
    assert head.asked == [], "Ray would keep these calls until one is there again"


async def test_what_a_call_made_is_known_when_it_is_answered() -> None:
    head = FakeHead(Desired(4))
    cluster = CoordinatorClient(head)
    await cluster.perform(PAUSE)
    assert cluster.desired.epoch == 4


async def test_a_client_that_leaves_does_not_cut_its_call_short() -> None:
    done: list[OperationRequest] = []
    gate = asyncio.Event()
    head = FakeHead()

    async def slow(call: OperationRequest) -> OperationOutcome:
        await gate.wait()
        done.append(call)
        return head.outcome(call)

    head.says["perform"] = slow
    cluster = CoordinatorClient(head)
    asked = asyncio.create_task(cluster.perform(PAUSE))
    await eventually(lambda: head.calls)
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    gate.set()
    await eventually(lambda: done)


async def test_an_upload_whose_client_leaves_is_thrown_away() -> None:
    head = FakeHead()
    cluster = CoordinatorClient(head)
    begun = asyncio.Event()

    async def parts() -> AsyncIterator[bytes]:
        yield b"one"
        begun.set()
        await asyncio.Event().wait()

    claim = DeclaredArtifact("tone", None, "sim-chat")
    upload = asyncio.create_task(cluster.upload(parts(), claim, {}))
    await begun.wait()
    assert head.parts == [b"one"]
    upload.cancel()
    await asyncio.gather(upload, return_exceptions=True)
    await eventually(lambda: not head.parts)
    assert ("upload_abort", ("upload-1",)) in head.asked
