"""A policy whose decisions are counted and timed; it decides nothing itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from rkserve.core.metrics import RouterMetrics
from rkserve.fleet.prefix_index import Reuse
from rkserve.router.policies.policies import Ask, Boards, Policy, Take, Verdict, WaitFor


class Watched:
    """Stands in for a policy."""

    def __init__(self, policy: Policy, seen: RouterMetrics) -> None:
        self.name = policy.name
        self.uses_prefixes = policy.uses_prefixes
        self._policy = policy
        self._seen = seen

    def watch(self, model: str, boards: Boards) -> None:
        """Count what those boards find, too."""
        boards.listeners.append(partial(self._found, model))

    def satisfied(self, take: Take, /) -> bool:
        """See ``Policy``."""
        return self._policy.satisfied(take)

    def first(self, offers: Sequence[tuple[Ask, Take]], /) -> int:
        """See ``Policy``. What it says is what is done."""
        chosen = self._policy.first(offers)
        ask, take = offers[chosen]
        self._seen.decisions.labels(ask.model, _word(take.reuse)).inc()
        return chosen

    def choose(self, ask: Ask, boards: Boards, now_s: float, /) -> Verdict:
        """See ``Policy``."""
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
