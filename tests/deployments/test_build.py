"""The application from its configuration, and what a replica remembers, without a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import serve

from rkserve.app import build
from rkserve.core.errors import ConfigError
from rkserve.deployments import tracing
from rkserve.deployments.board import MAX_REST_S, Failures
from rkserve.deployments.preflight import check_args
from rkserve.native.sim import profiles

pytestmark = pytest.mark.slow


def args(**changes: Any) -> dict[str, Any]:
    """Arguments with one group of simulated boards; changes go into the group."""
    return {"boards": [{"name": "sim", "model": "models/sim-chat", "simulated": {}, **changes}]}


REAL = {"simulated": None, "library": "/usr/lib/librkllmrt.so"}


def options(built: serve.Application) -> dict[str, Any]:
    """Return the one Board deployment of an application."""
    handles = built._bound_deployment.init_args[1]
    (board,) = handles.values()
    found: dict[str, Any] = board._bound_deployment._deployment_config.model_dump()
    return found | {"actor": board._bound_deployment.ray_actor_options}


def test_the_one_coordinator_is_on_the_head_and_known_to_boards_and_routers() -> None:
    built = build(args())
    _, handles, coordinator = built._bound_deployment.init_args
    deployment = coordinator._bound_deployment
    assert deployment.name == "Coordinator"
    assert deployment.init_args[1] is handles  # no second set of boards
    assert deployment._deployment_config.num_replicas == 1
    assert deployment.ray_actor_options == {
        "num_cpus": 0,
        "resources": {"node:__internal_head__": 0.001},
    }


@pytest.mark.parametrize(
    ("router", "resources"),
    [
        pytest.param({}, {"node:__internal_head__": 0.001}, id="the head, which nothing outlives"),
        pytest.param({"nodes": "any"}, None, id="wherever Serve likes"),
        pytest.param({"nodes": "ingress"}, {"ingress": 0.001}, id="nodes with that resource"),
    ],
)
def test_routers_run_where_the_operator_wants_them(
    router: dict[str, Any], resources: dict[str, float] | None
) -> None:
    deployment = build({**args(), "router": router})._bound_deployment
    assert (deployment.ray_actor_options["resources"] or None) == resources


def test_simulated_boards_are_a_fixed_number_of_replicas() -> None:
    found = options(build(args(simulated={"boards": 5})))
    assert found["num_replicas"] == 5
    assert found["autoscaling_config"] is None
    assert found["actor"]["num_cpus"] == 0
    assert "resources" not in found["actor"]


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_a_real_group_has_one_replica_for_each_board_whatever_its_share(share: float) -> None:
    built = build(args(**REAL, rknpu=share))
    (board,) = built._bound_deployment.init_args[1].values()
    found = options(built)
    assert found["actor"]["resources"] == {"rknpu": share}
    assert board._bound_deployment._replica_config.max_replicas_per_node == 1
    assert found["autoscaling_config"]["min_replicas"] == 0


def test_a_cpu_group_takes_its_share_of_each_nodes_cpu() -> None:
    found = options(build(args(simulated=None, cpu={"share": 0.5})))
    assert found["actor"]["resources"] == {"rkcpu": 0.5}
    policy = found["autoscaling_config"]["policy"]
    assert policy["policy_kwargs"] == {"share": 0.5, "resource": "rkcpu"}


def test_no_request_is_refused_by_serve_before_the_board_has_seen_it() -> None:
    assert options(build(args(queue_limit=100)))["max_ongoing_requests"] > 101


def test_traces_need_their_package_on_the_head_and_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced(**settings: Any) -> dict[str, Any]:
        return {**args(), "router": {"tracing": {"enabled": True, **settings}}}

    build(traced(endpoint="https://collector.example/otlp"))
    with pytest.raises(ConfigError, match=r"endpoint: must be a URL .*; not .here:4318"):
        build(traced(endpoint="here:4318"))
    monkeypatch.setattr(tracing, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'rkserve\[otel\]'"):
        build(traced())
    build(args())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"model": "models/nowhere"}, "models/nowhere does not exist", id="no model"),
        pytest.param(
            {"model": "models/sim-embed", "n_batch": 2},
            "n_batch: group sim cannot serve batches.*makes embeddings.*Set n_batch to 1",
            id="a batch of embeddings",
        ),
        pytest.param({"quue_limit": 1}, "did you mean 'queue_limit'", id="an unknown key"),
        pytest.param(
            {"simulated": {"profile": "RK3588-Qwen2.5-1.5B"}},
            r"args: boards\[0\]\.simulated\.profile: unknown profile 'RK3588-Qwen2.5-1.5B'; did "
            r"you mean 'rk3588-qwen2\.5-1\.5b-w8a8' or .*\? docs/reference/simulator\.md lists all",
            id="a profile that is almost right",
        ),
        pytest.param(
            {"simulated": {"profile": "?"}},
            r"unknown profile '\?'\. docs/reference/simulator\.md lists all profiles\.$",
            id="a profile like none",
        ),
    ],
)
def test_a_wrong_configuration_fails_before_anything_starts(
    changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        build(args(**changes))


def test_every_profile_of_the_simulator_may_be_configured() -> None:
    for profile in profiles.load():
        check_args(args(simulated={"profile": profile.name}))


@pytest.mark.parametrize(
    ("failed", "since_s", "rest_s"),
    [
        pytest.param(0, 0, 0, id="never"),
        pytest.param(1, 0, 1, id="once"),
        pytest.param(3, 0, 4, id="three times"),
        pytest.param(3, 1, 3, id="a second ago"),
        pytest.param(3, 60, 0, id="long ago"),
        pytest.param(40, 0, MAX_REST_S, id="over and over"),
    ],
)
def test_a_board_that_fails_to_start_rests_longer_each_time(
    tmp_path: Path, failed: int, since_s: float, rest_s: float
) -> None:
    failures = Failures(tmp_path / "sim-0.failures")
    for _ in range(failed):
        failures.add(now_s=1000.0)
    # Another replica reads it: the one that failed is gone.
    assert Failures(tmp_path / "sim-0.failures").rest_s(1000.0 + since_s) == rest_s


def test_a_start_that_works_ends_the_row(tmp_path: Path) -> None:
    failures = Failures(tmp_path / "sim-0.failures")
    failures.clear()  # nothing to clear is no error
    failures.add(1000.0)
    failures.clear()
    assert failures.rest_s(1000.0) == 0


@pytest.mark.parametrize("content", ["", "{", "[]", '{"count": "many", "time": 1}'])
def test_a_damaged_note_is_ignored_and_replaced(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "sim-0.failures"
    file.write_text(content, encoding="utf-8")
    failures = Failures(file)
    assert failures.rest_s(1000.0) == 0
    assert "is damaged" in caplog.text
    failures.add(1000.0)
    assert failures.rest_s(1000.0) == 1
