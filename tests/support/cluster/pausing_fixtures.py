"""Boards behind two Routers, whose generations tests pause.

They are in strict mode, where misuse of the C API ends the engine; each call may land on the Router
that does not have the client's stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.boards.pausing import (
    BRIEF,
    COUNT,
    COUNTED,
    FAST,
    HOLD_S,
    KEY,
    SLOW,
    WITH_USAGE,
    engines,
    is_free,
    pace,
)
from tests.support.cluster.local_cluster import App, LocalCluster, wait_for
from tests.support.http.talk import Reply, ask

HOOK = """
from rkserve.board.answer.hooks import Continue


class Trouble:
    def on_piece(self, piece):
        if "boom" in piece.answer:
            raise ValueError("the hook has blown up")
        return Continue()

    def on_end(self):
        return ""


def trouble(request):
    return Trouble()
"""


@pytest.fixture(scope="session")
def two_routers(ray_cluster: LocalCluster) -> App:
    """Two boards, one more where pauses are brief, and two Routers."""
    (ray_cluster.python_dir / "trouble.py").write_text(HOOK, encoding="utf-8")
    strict = {"strict": True}
    settings: dict[str, Any] = {"queue_limit": 8, "crash_limit": 50, "hooks": ["trouble:trouble"]}
    model = ray_cluster.model_copy(BRIEF)
    groups = [
        ray_cluster.simulated("pause", 2, pause_hold_s=HOLD_S, simulated=strict, **settings),
        ray_cluster.simulated(BRIEF, 1, model=str(model), pause_timeout_s=0.4, simulated=strict),
    ]
    router = {"replicas": 2, "ping_s": 0.2, "admin_key": KEY}
    # A key that a test makes must not close the application to those of the others.
    args = {"boards": groups, "router": router, "security": {"open": True}}
    ray_cluster.deploy("pause", args)
    ray_cluster.shared.append("pause")
    deployed = App(ray_cluster, "pause", "pause", 2)
    deployed.ready()
    deployed.settled()
    return deployed


@pytest.fixture
def slow_boards(two_routers: App) -> Iterator[App]:
    """Slow boards, which the test leaves free, with nothing failed and the same engines."""
    pace(two_routers, SLOW)
    before = engines(two_routers)
    yield two_routers
    pace(two_routers, FAST)
    wait_for("the boards to be free", lambda: is_free(two_routers))
    assert engines(two_routers) == before, "an engine was lost"


@pytest.fixture(scope="module")
def plain(two_routers: App) -> Reply:
    """The answer that nobody interrupts."""

    async def talk() -> Reply:
        async with two_routers.http() as http:
            return await ask(http, COUNT, **WITH_USAGE)

    pace(two_routers, FAST)
    reply = asyncio.run(talk())
    assert reply.text == COUNTED
    return reply
