"""Slow servers take threads of their own, and so many only."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from rkserve.coordinator.artifacts.sources import DownloadPool
from rkserve.core.errors import ArtifactNotFound, ArtifactRefused
from tests.support.boards.fake_boards import eventually


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What slow servers wait for."""
    event = threading.Event()
    yield event
    event.set()


def slow(gate: threading.Event, name: str) -> str:
    assert gate.wait(30.0)
    return f"{name} by {threading.current_thread().name}"


async def test_slow_fetches_leave_the_shared_threads_to_others(gate: threading.Event) -> None:
    fetching = DownloadPool(at_once=40)  # more than asyncio's shared threads on any small head
    going_on = [asyncio.create_task(fetching.run(slow, gate, "a")) for _ in range(40)]
    await asyncio.sleep(0)
    assert await asyncio.wait_for(asyncio.to_thread(lambda: "chunk"), 30.0) == "chunk"
    gate.set()
    assert all(said.startswith("a by fetch") for said in await asyncio.gather(*going_on))
    fetching.close()


async def test_one_more_than_the_limit_is_refused_until_one_has_ended(
    gate: threading.Event,
) -> None:
    fetching = DownloadPool(at_once=2)
    going_on = [asyncio.create_task(fetching.run(slow, gate, "a")) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ArtifactRefused, match="2 files are being fetched"):
        await fetching.run(slow, gate, "b")
    going_on[0].cancel()  # its caller leaves, and its thread still waits for the server
    await asyncio.gather(going_on[0], return_exceptions=True)
    with pytest.raises(ArtifactRefused):
        await fetching.run(slow, gate, "b")
    gate.set()
    assert (await going_on[1]).startswith("a by")
    await eventually(lambda: fetching._going_on == 0)
    assert (await fetching.run(slow, gate, "b")).startswith("b by")
    fetching.close()


async def test_an_error_of_a_fetch_is_passed_on(gate: threading.Event) -> None:
    def missing() -> None:
        raise ArtifactNotFound("There is no such file (test).")

    fetching = DownloadPool(at_once=1)
    for _ in range(2):
        with pytest.raises(ArtifactNotFound, match="no such file"):
            await fetching.run(missing)
        await eventually(lambda: fetching._going_on == 0)
    fetching.close()
