"""Who calls, and what that one's requests may ask of the queue.

It knows keys, limits and deadlines, and nothing of queues, boards or HTTP.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from rkserve.api.json.fields import quoted
from rkserve.config.serve_config import RouterConfig
from rkserve.core.errors import RequestError
from rkserve.router.auth.api_keys import ClientKey, Keys
from rkserve.router.auth.rate_limits import Limits, Meter
from rkserve.router.queue.admission import ANONYMOUS, Claim


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose a call is: all without an API key are one owner, without limits."""

    name: str
    meter: Meter

    def enter(self) -> None:
        """Let a call in, which ``leave`` ends. Raises ``RateLimited``; then it is not in."""
        self.meter.enter(time.monotonic())

    def spend(self, tokens: int) -> None:
        """That many tokens were read or generated for it."""
        self.meter.spend(tokens, time.monotonic())

    def use_board(self, seconds: float) -> None:
        """Count time for which one of its requests had a board."""
        self.meter.use_board(seconds, time.monotonic())

    def leave(self) -> None:
        """A call is over."""
        self.meter.leave()


class Callers:
    """The owners of all keys, as one Router counts what they do."""

    def __init__(self, keys: Keys) -> None:
        now_s = time.monotonic()
        self.anybody = Caller(ANONYMOUS, Meter(Limits(), now_s))
        self._known = {
            key.name: Caller(key.name, Meter(key.limits, now_s)) for key in keys.clients or ()
        }

    def of(self, key: ClientKey | None) -> Caller:
        """Return the owner of a key; None is nobody's."""
        return self.anybody if key is None else self._known[key.name]


class Urgent(Protocol):
    """What a call says of its urgency."""

    @property
    def priority(self) -> int | None:
        """Lower goes first."""

    @property
    def timeout_s(self) -> float | None:
        """How long its answer is of use."""


def claim_of(
    call: Urgent,
    caller: Caller,
    timeout_s: float | None,
    config: RouterConfig,
    arrived_s: float,
) -> Claim:
    """Return what the requests of a call may ask; ``timeout_s`` is what its headers say.

    Of several timeouts the shortest counts. A call that does not say is as urgent as most are, or
    as it may be.

    Raises:
        RequestError: it may not be as urgent as it says, or is less so than anything.
    """
    limits = caller.meter.limits
    least = config.priority_min
    if limits.min_priority is not None:
        least = max(least, limits.min_priority)
    priority = max(0, least) if call.priority is None else call.priority
    if not least <= priority <= config.priority_max:
        raise RequestError(
            f"Invalid 'priority': expected a value from {least} to {config.priority_max}, "
            f"but got {quoted(priority)}.",
            "priority",
        )
    given = [one for one in (timeout_s, call.timeout_s) if one is not None]
    limit_s = min(given, default=config.request_timeout_s)
    return Claim(
        flow=caller.name,
        weight=limits.weight,
        priority=priority,
        deadline_s=None if limit_s is None else arrived_s + limit_s,
        timeout_s=limit_s or 0.0,
        use=lambda _, seconds: caller.use_board(seconds),
        came_s=arrived_s,
    )
