"""``build(args)``: the Ray Serve application from its configuration."""

from __future__ import annotations

import os
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from rkserve.config.board_group import BoardGroupConfig
from rkserve.config.serve_config import RkserveConfig
from rkserve.core.errors import ConfigError
from rkserve.deployments.board import BoardReplica, CatalogPlace
from rkserve.deployments.coordinator import CoordinatorReplica
from rkserve.deployments.haproxy import check_environ
from rkserve.deployments.model_origin import COORDINATOR
from rkserve.deployments.preflight import check_args, check_folders
from rkserve.deployments.replica import HEAD, ROUTER
from rkserve.deployments.router import RouterReplica
from rkserve.deployments.tracing import check_tracing
from rkserve.router.upstreams.upstreams import read_key

# Requests beyond the board's own queue are rejected by the board, never by Serve.
BOARD_HEADROOM = 64
# A graceful shutdown ends the engine, which takes 12 s at most.
FAREWELL_S = 15.0
# A replaced Router only finishes its answers, which end with their boards at the latest. Cut off
# earlier, its clients would get no error, and the boards would continue without a reader.
ROUTER_DRAIN_S = 3600.0
# Every Router has a long poll there, and every control call waits for its end.
COORDINATOR_CALLS = 1000
COORDINATOR_DRAIN_S = 5.0
MARKER_SHARE = 0.001  # the share of a resource that marks nodes, of which each has 1
# How long the boards that Ray counts may differ from those that run before one is stopped: longer
# than Serve takes to notice a dead replica, so that a dying node never costs a healthy one.
DOWNSCALE_DELAY_S = 15.0


class ConfigurationRefused(ConfigError, RayServeException):
    """A ``ConfigError`` that Ray reports by its message, instead of four attempts' tracebacks."""


def build(args: dict[str, Any]) -> serve.Application:
    """Return the application for the ``args`` of serve_config.yaml.

    Raises:
        ConfigError: a setting is wrong, a model folder is missing or unusable on this machine, or
            Ray's HAProxy is on without rkserve's configuration.
    """
    try:
        config = check_args(args)
        check_folders(config)
        check_environ(os.environ)
        if config.router.nodes == "head":
            check_tracing(config.router.tracing)
            for group in config.upstreams:
                assert group.upstream is not None
                read_key(group.name, group.upstream, os.environ)
    except ConfigError as exc:
        raise ConfigurationRefused(str(exc)) from exc
    handles = {group.name: _boards(group, config) for group in config.deployed}
    coordinator = serve.deployment(
        CoordinatorReplica,
        name=COORDINATOR,
        num_replicas=1,
        max_ongoing_requests=COORDINATOR_CALLS,
        # A frozen one is replaced soon: tokens flow on without it, and nothing can be changed.
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.2,
        # What it leaves undone its successor finds in the ledger; Routers' long polls never end.
        graceful_shutdown_timeout_s=COORDINATOR_DRAIN_S,
        # Its ledger is on the head's disk.
        ray_actor_options={"num_cpus": 0, "resources": {HEAD: MARKER_SHARE}},
    ).bind(config, handles)
    router = serve.deployment(
        RouterReplica,
        name=ROUTER,
        num_replicas=config.router.replicas,
        max_ongoing_requests=config.router.max_concurrent,
        # As the Coordinator: by default a frozen one is replaced after two minutes.
        health_check_period_s=2.0,
        health_check_timeout_s=10.0,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=ROUTER_DRAIN_S,
        ray_actor_options={"num_cpus": 0, "resources": router_place(config.router.nodes)},
    )
    return router.bind(config, handles, coordinator)


def router_place(nodes: str) -> dict[str, float]:
    """Return the resources that place a Router on the nodes of the setting ``router.nodes``."""
    if nodes == "any":
        return {}
    return {HEAD if nodes == "head" else nodes: MARKER_SHARE}


def _boards(group: BoardGroupConfig, config: RkserveConfig) -> DeploymentHandle:
    deployment = serve.deployment(
        BoardReplica,
        name=f"Board-{group.name}",
        max_ongoing_requests=group.queue_limit + 1 + BOARD_HEADROOM,
        health_check_period_s=group.health_check_period_s,
        health_check_timeout_s=group.health_check_timeout_s,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=group.drain_timeout_s + FAREWELL_S,
        # Where the head's RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT allows it; Ray takes the smaller.
        max_constructor_retry_count=1_000_000,
        request_router_config=RequestRouterConfig(
            request_router_class="rkserve.deployments.ray_extensions:PickReplica"
        ),
        **_placement(group),
    )
    place = None
    if group.catalog_model is not None:
        folder = config.folder_of(group).absolute()
        place = CatalogPlace(folder, config.catalog.max_bytes_per_s)
    return deployment.bind(group, config.state_dir, config.channel, place)


def _placement(group: BoardGroupConfig) -> dict[str, Any]:
    if group.simulated is not None:
        return {"num_replicas": group.simulated.boards, "ray_actor_options": {"num_cpus": 0}}
    resource, share = group.resource
    return {
        "ray_actor_options": {"num_cpus": 0, "resources": {resource: share}},
        # As many as FollowNodes counts: a share leaves the rest of the node to other groups.
        "max_replicas_per_node": 1,
        "autoscaling_config": AutoscalingConfig(
            min_replicas=0,
            max_replicas=group.max_boards,
            upscale_delay_s=0.0,
            downscale_delay_s=DOWNSCALE_DELAY_S,
            policy=AutoscalingPolicy(
                policy_function="rkserve.deployments.ray_extensions:FollowNodes",
                policy_kwargs={"share": share, "resource": resource},
            ),
        ),
    }
