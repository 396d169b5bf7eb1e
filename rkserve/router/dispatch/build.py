"""Assembly of a Router's dispatch: fleet, instrumented policy, queues, circuit breaker."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from functools import partial

from rkserve.config.router import RouterConfig
from rkserve.core.metrics import QueueCollector, RouterMetrics
from rkserve.fleet.fleet import BoardLink, Fleet
from rkserve.fleet.load import ModelBoards
from rkserve.fleet.prefix_index import Reuse
from rkserve.fleet.requests import RoutingRequest
from rkserve.router.dispatch.circuit_breaker import CircuitBreaker
from rkserve.router.dispatch.dispatch import Dispatch, FailoverLimits
from rkserve.router.policies import POLICIES
from rkserve.router.policies.base import Decision, PolicySettings, RoutingPolicy, SendTo, WaitFor
from rkserve.router.queue.queues import ModelQueues, QueueRules


class InstrumentedPolicy:
    """A routing policy with metrics of another one's decisions."""

    def __init__(self, policy: RoutingPolicy, seen: RouterMetrics) -> None:
        self.name = policy.name
        self.uses_prefixes = policy.uses_prefixes
        self._policy = policy
        self._seen = seen

    def watch(self, model: str, boards: ModelBoards) -> None:
        """Count expected and actual cached prefixes of those boards, too."""
        boards.listeners.append(partial(self._found, model))

    def satisfied(self, take: SendTo, /) -> bool:
        """See ``RoutingPolicy``."""
        return self._policy.satisfied(take)

    def first(self, offers: Sequence[tuple[RoutingRequest, SendTo]], /) -> int:
        """See ``RoutingPolicy``. The result is the decision that is carried out."""
        chosen = self._policy.first(offers)
        ask, take = offers[chosen]
        self._seen.decisions.labels(ask.model, _word(take.reuse)).inc()
        return chosen

    def choose(self, ask: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        """See ``RoutingPolicy``."""
        began_s = time.perf_counter()
        verdict = self._policy.choose(ask, boards, now_s)
        self._seen.decision.observe(time.perf_counter() - began_s)
        if isinstance(verdict, WaitFor):
            self._seen.decisions.labels(ask.model, "wait").inc()
        return verdict

    def _found(self, model: str, expected: Reuse, cached: int) -> None:
        self._seen.prefix_tokens.labels(model, "expected").inc(expected.tokens)
        self._seen.prefix_tokens.labels(model, "found").inc(cached)


def _word(reuse: Reuse) -> str:
    if not reuse.tokens:
        return "none"
    return "live" if reuse.live else "file"


def open_fleet(
    config: RouterConfig, links: Mapping[str, BoardLink], groups: Mapping[str, str]
) -> Fleet:
    """Return the fleet; cached prefixes are tracked if the policy uses them."""
    uses_prefixes = POLICIES[config.policy].uses_prefixes
    remembered = config.prefix_files_per_board if uses_prefixes else None
    return Fleet(links, groups, remembered)


def open_dispatch(
    config: RouterConfig, fleet: Fleet, metrics: RouterMetrics, rng: random.Random
) -> Dispatch:
    """Return the dispatch of a fleet, with its queues."""
    breaker = CircuitBreaker()
    rules = QueueRules(config.queue_limit, config.queue_timeout_s, config.replicas)
    chosen = POLICIES[config.policy](rng, PolicySettings(max_wait_s=config.board_wait_s))
    watched = InstrumentedPolicy(chosen, metrics)
    for model, boards in fleet.listing.boards.items():
        watched.watch(model, boards)
    places = ModelQueues(fleet, watched, rules, breaker, metrics)
    metrics.registry.register(QueueCollector(places.depths))
    persistence = FailoverLimits(
        config.accept_timeout_s, config.max_continuations, config.restart_wait_s
    )
    return Dispatch(fleet, places, rng, persistence, breaker=breaker, losses=metrics)
