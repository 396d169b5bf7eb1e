"""Three boards whose cluster tests pause and give adapters to; see ``controlled``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import httpx
import pytest

from tests.support.cluster.controlled import deploy
from tests.support.cluster.local_cluster import App, LocalCluster


@pytest.fixture(scope="session")
def controlled(ray_cluster: LocalCluster) -> App:
    """Three boards, and a folder from which adapters may be registered."""
    ray_cluster.model_copy("sim-chat", max_adapters=8)
    (ray_cluster.folder / "shelf").mkdir()
    deployed = deploy(ray_cluster)
    ray_cluster.shared.append(deployed.name)
    deployed.ready()
    deployed.settled()
    return deployed


@pytest.fixture(scope="module")
def app(controlled: App) -> App:
    """The boards, all ready and idle."""
    controlled.settled()
    return controlled


@pytest.fixture
def http(app: App) -> Iterator[httpx.Client]:
    """A client, whose test must leave nothing paused and every board ready and idle."""
    with app.http_sync() as client:
        yield client
        paused = client.get("/is_paused").json()["is_paused"]
        with contextlib.suppress(httpx.HTTPError):
            client.post("/resume")  # the next test is not to fail for this one's reason
    assert not paused
    app.settled()
