"""The hook of ``ray start`` on a head, with stand-ins for Ray's functions that start processes."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
from ray._common.utils import load_class
from ray._private import services
from ray._private.node import Node

from rkserve.bringup import ray_start, ray_worker
from rkserve.bringup.processes import BOARD, HEAD
from rkserve.bringup.ray_node import RAYLET_RUNS
from rkserve.bringup.settings import settings_of

HOOK = "RAY_START_HOOK"
ASKED = {"include_dashboard": None, "raise_on_failure": False}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The steps of a start, in their order; the raylet registers at the third look."""
    made: list[Any] = []

    def get_node(address: str, _: str) -> dict[str, Any]:
        made.append(f"look at {address}")
        if made.count(made[-1]) <= 2:
            raise RuntimeError("no such node")
        return {}

    monkeypatch.setattr(Node, "start_ray_processes", lambda _: made.append("raylet"))
    monkeypatch.setattr(Node, "start_api_server", lambda _, **options: made.append(options))
    monkeypatch.setattr(services, "get_node", get_node)
    monkeypatch.setattr(os, "nice", made.append)
    monkeypatch.setattr(ray_start, "POLL_S", 0.0)
    return made


def started() -> SimpleNamespace:
    """Call the hook and then the steps of Ray's start; return the parameters."""
    params = SimpleNamespace(ray_client_server_port=10001, worker_path="ray's own")
    node = Node.__new__(Node)
    node._gcs_address, node._node_id = "head:6379", "id"
    load_class(settings_of(HEAD)[HOOK])(params, True)
    node.start_api_server(**ASKED)
    node.start_ray_processes()
    return params


def test_the_dashboard_follows_the_raylet(
    steps: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    params = started()
    assert steps == [
        "raylet",
        *["look at head:6379"] * 3,
        ray_start.DASHBOARD_NICENESS,
        ASKED,
    ]
    assert RAYLET_RUNS in capsys.readouterr().out
    assert params.worker_path == ray_worker.__file__
    assert params.ray_client_server_port is None, "0 would be refused, and no option is 10001"


def test_workers_are_executed_where_an_operator_asks_for_it(
    steps: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert settings_of(HEAD)[ray_start.FORKED_WORKERS] == "1"
    monkeypatch.setenv(ray_start.FORKED_WORKERS, "0")
    assert started().worker_path == "ray's own"


def test_a_raylet_that_does_not_register_is_left_to_ray(
    steps: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_start, "REGISTERED_S", 0.0)
    started()
    assert steps == ["raylet", ray_start.DASHBOARD_NICENESS, ASKED]
    assert RAYLET_RUNS not in capsys.readouterr().out


def test_a_node_that_joins_starts_as_ever(steps: list[Any]) -> None:
    assert HOOK not in settings_of(BOARD)
    params = SimpleNamespace(ray_client_server_port=10001, worker_path="ray's own")
    ray_start.tune(params, head=False)
    Node.__new__(Node).start_ray_processes()
    assert (steps, params.ray_client_server_port) == (["raylet"], 10001)
    assert params.worker_path == "ray's own"
