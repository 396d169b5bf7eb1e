"""How many replicas there should be, given how many boards have joined and how many run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.deployments.ray_extensions import FollowNodes, PickReplica, ReplicaGone, target


@pytest.mark.parametrize(
    ("boards", "current", "running", "expected"),
    [
        pytest.param(0, 0, 0, 0, id="no board yet"),
        pytest.param(1, 0, 0, 1, id="the first one joins"),
        pytest.param(5, 2, 2, 5, id="three join at once"),
        pytest.param(2, 3, 3, 3, id="one has died and its replica still counts"),
        pytest.param(2, 3, 2, 2, id="it no longer counts"),
        pytest.param(0, 1, 1, 1, id="the last one has died and still counts"),
        pytest.param(0, 1, 0, 0, id="the last one is gone"),
        pytest.param(3, 3, 2, 3, id="a replica is being replaced"),
        pytest.param(4, 3, 4, 4, id="one joins while one is being replaced"),
    ],
)
def test_the_target_follows_the_boards(
    boards: int, current: int, running: int, expected: int
) -> None:
    assert target(boards, current, running) == expected


def test_nodes_count_by_the_resource_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"Alive": True, "Resources": {"rknpu": 1.0, "rkcpu": 1.0}},
        {"Alive": True, "Resources": {"rkcpu": 1.0}},
        {"Alive": True, "Resources": {"CPU": 8.0}},
        {"Alive": False, "Resources": {"rkcpu": 1.0}},
    ]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    now = SimpleNamespace(target_num_replicas=0, current_num_replicas=0, policy_state={})
    assert FollowNodes(0.5)(now) == (1, {})
    assert FollowNodes(1.0, "rkcpu")(now) == (2, {})


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 50))
def test_a_healthy_replica_is_never_asked_to_go(boards: int, current: int, running: int) -> None:
    found = target(boards, current, running)
    assert found >= min(boards, current)
    if found < current:  # then there are not more replicas than boards
        assert running <= boards
    assert found in {boards, current}


def replica(name: str) -> Any:
    """A running replica as Ray's request router sees it."""
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name))


async def pick(wanted: str | None, *running: str) -> tuple[list[list[str]], Any]:
    """Choose among running replicas; returns the choice and the pending request."""
    pending = wanted and SimpleNamespace(
        metadata=SimpleNamespace(session_id=wanted),
        routing_context=SimpleNamespace(should_backoff=False),
        future=asyncio.get_running_loop().create_future(),
    )
    choose: Any = PickReplica.choose_replicas
    ranks = await choose(None, [replica(name) for name in running], pending)
    return [[r.replica_id.unique_id for r in rank] for rank in ranks], pending


def test_a_request_goes_to_the_replica_that_was_chosen_for_it() -> None:
    async def main() -> None:
        ranks, pending = await pick("b", "a", "b", "c")
        assert ranks == [["b"]]
        assert not pending.future.done()

    asyncio.run(main())


def test_a_request_for_a_replica_that_is_gone_fails_at_once() -> None:
    async def main() -> None:
        _, pending = await pick("b", "a", "c")
        with pytest.raises(ReplicaGone, match="b"):
            await pending.future

    asyncio.run(main())


def test_without_a_request_all_replicas_will_do() -> None:
    ranks, _ = asyncio.run(pick(None, "a", "b"))
    assert ranks == [["a", "b"]]
