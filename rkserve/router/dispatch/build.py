"""Puts the parts together that a request goes through in one Router; it knows all of them."""

from __future__ import annotations

import random
from collections.abc import Mapping

from rkserve.config.serve_config import RouterConfig
from rkserve.core.metrics import QueueCollector, RouterMetrics
from rkserve.fleet.fleet import BoardLink, Fleet
from rkserve.router.dispatch.circuit_breaker import Breaker
from rkserve.router.dispatch.dispatch import Dispatch, Persistence
from rkserve.router.policies.instrumented import Watched
from rkserve.router.policies.policies import PolicySettings, Prefix, policy
from rkserve.router.queue.queues import Places, QueueRules


def open_fleet(
    config: RouterConfig, links: Mapping[str, BoardLink], groups: Mapping[str, str]
) -> Fleet:
    """Return the boards, of which is remembered what the policy wants to know."""
    remembered = config.prefix_files_per_board if config.policy == Prefix.name else None
    return Fleet(links, groups, remembered)


def open_dispatch(
    config: RouterConfig, fleet: Fleet, metrics: RouterMetrics, rng: random.Random
) -> Dispatch:
    """Return what sends requests to the boards of a fleet, with its queue in front."""
    breaker = Breaker()
    rules = QueueRules(config.queue_limit, config.queue_timeout_s, config.replicas)
    chosen = policy(config.policy, rng, PolicySettings(max_wait_s=config.board_wait_s))
    watched = Watched(chosen, metrics)
    for model, boards in fleet.listing.boards.items():
        watched.watch(model, boards)
    places = Places(fleet, watched, rules, breaker, metrics)
    metrics.registry.register(QueueCollector(places.depths))
    persistence = Persistence(
        config.accept_timeout_s, config.max_continuations, config.restart_wait_s
    )
    return Dispatch(fleet, places, rng, persistence, breaker=breaker, losses=metrics)
