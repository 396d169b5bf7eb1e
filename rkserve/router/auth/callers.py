"""Callers, and the limits of each caller.

Each limit per minute is a token bucket that holds one minute's worth. A prompt's tokens are counted
on admission; generated tokens and board time are counted as they occur, which may take a bucket
below zero.

Routers tell each other every second what keys have used, so that limits are those of the cluster: a
key may exceed one by what it does within that second at the other Routers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping

from rkserve.api.json.fields import quoted
from rkserve.config.router import RouterConfig
from rkserve.core.answer_metrics import KeyUsage
from rkserve.core.api_keys import CallerLimits, SpentLimits
from rkserve.core.block_hashes import owned
from rkserve.core.errors import RateLimited, RequestError
from rkserve.core.metrics import NO_KEY, OTHER_KEYS, RouterMetrics
from rkserve.router.auth.key_ring import MINUTE_S, ClientKey, Keys, TokenBucket
from rkserve.router.queue.admission import ANONYMOUS, QueueTerms

SHARE_S = 1.0
# Calls that another Router has reported as running are forgotten after this: it may have ended.
REPORT_AGE_S = 5.0


class Caller:
    """The owner of a key, with its usage of the cluster as one Router knows it. All calls without a
    key have one owner.
    """

    def __init__(
        self,
        owner: str,
        limits: CallerLimits,
        clock: Callable[[], float] | None = None,
        usage: KeyUsage | None = None,
        name: str | None = None,
    ) -> None:
        """``owner`` is the identity of the key, and ``name`` its name, if that differs. ``clock``
        returns the time in seconds; None is the monotonic clock. ``usage`` are the metrics of its
        key.
        """
        self.owner, self.name, self.limits = owner, owner if name is None else name, limits
        self._usage = usage
        self._clock = clock
        self.running = 0
        # Since the last report.
        self._calls = self._spent_tokens = self._reported_running = 0
        self._board_s = 0.0
        self._elsewhere: dict[str, tuple[int, float]] = {}  # running calls and time, by Router
        self._requests = self._bucket(limits.requests_per_minute)
        self._tokens = self._bucket(limits.tokens_per_minute)
        self._board = self._bucket(limits.board_seconds_per_minute)

    def enter(self) -> None:
        """Admit a call until ``leave``. Raises ``RateLimited``; then nothing was counted."""
        concurrent = self.limits.concurrent
        if concurrent is not None and self.running + self._running_elsewhere() >= concurrent:
            raise RateLimited(f"{concurrent} calls at once", 1)
        for bucket, unit in ((self._tokens, "tokens"), (self._board, "s of board time")):
            if bucket is not None:
                bucket.fill(self._now_s())
                if bucket.level <= 0:
                    raise RateLimited(f"{bucket.per_minute} {unit} per minute", bucket.wait_s(1.0))
        if (bucket := self._requests) is not None:
            bucket.fill(self._now_s())
            if bucket.level < 1:
                raise RateLimited(f"{bucket.per_minute} requests per minute", bucket.wait_s(1.0))
            bucket.level -= 1
        self.running += 1
        self._calls += 1
        if self._usage is not None:
            self._usage.called()

    def spend(self, prompt: int = 0, completion: int = 0) -> None:
        """Count tokens read and generated."""
        if self._tokens is not None:
            self._tokens.fill(self._now_s())
            self._tokens.level -= prompt + completion
        self._spent_tokens += prompt + completion
        if self._usage is not None:
            self._usage.spent(prompt=prompt, completion=completion)

    def use_board(self, seconds: float) -> None:
        """Count board time of a request, including pauses on the board."""
        if self._board is not None:
            self._board.fill(self._now_s())
            self._board.level -= seconds
        self._board_s += seconds
        if self._usage is not None:
            self._usage.used_board(seconds)

    def salt(self, salt: str) -> str:
        """Return the salt of its calls, of which ``salt`` is the one in the call.

        Keys share no KV cache: the time to the first token would tell one what another has sent.
        """
        return salt if self.owner == ANONYMOUS else owned(self.owner, salt)

    def leave(self) -> None:
        """End an admitted call."""
        self.running -= 1

    def report(self) -> SpentLimits | None:
        """Return the use since the last report for the other Routers; None where there is none."""
        spent = SpentLimits(self._calls, self._spent_tokens, self._board_s, self.running)
        changed = spent != SpentLimits() or self._reported_running > 0
        self._calls = self._spent_tokens = 0
        self._board_s, self._reported_running = 0.0, self.running
        limits = self.limits
        limited = (
            *(limits.requests_per_minute, limits.tokens_per_minute),
            *(limits.board_seconds_per_minute, limits.concurrent),
        )
        return spent if changed and any(limited) else None

    def spent_elsewhere(self, router: str, spent: SpentLimits) -> None:
        """Count the use that another Router reports."""
        now_s = self._now_s()
        buckets = (
            (self._requests, spent.calls),
            (self._tokens, spent.tokens),
            (self._board, spent.board_s),
        )
        for bucket, amount in buckets:
            if bucket is not None:
                bucket.fill(now_s)
                bucket.level -= amount
        self._elsewhere[router] = (spent.running, now_s)

    def _running_elsewhere(self) -> int:
        since_s = self._now_s() - REPORT_AGE_S
        self._elsewhere = {r: one for r, one in self._elsewhere.items() if one[1] >= since_s}
        return sum(running for running, _ in self._elsewhere.values())

    def _bucket(self, per_minute: int | None) -> TokenBucket | None:
        return None if per_minute is None else TokenBucket.full(per_minute, self._now_s())

    def _now_s(self) -> float:
        return time.monotonic() if self._clock is None else self._clock()


class Callers:
    """The owners of all keys, with their usage at one Router, and as far as that concerns limits at
    all of them.
    """

    def __init__(self, keys: Keys, metrics: RouterMetrics, counted_keys: int) -> None:
        """The first ``counted_keys`` names of keys have metrics of their own; those of the
        configured file begin. Usage is counted by the name of each key.
        """
        self._metrics, self._counted_keys = metrics, counted_keys
        self._labels: set[str] = set()
        self.anybody = Caller(ANONYMOUS, CallerLimits(), usage=metrics.key_usage(NO_KEY))
        self._known: dict[str, Caller] = {}
        # Of keys that this Router has not seen: the others' reports, and the time of the first.
        self._unseen: dict[str, tuple[dict[str, SpentLimits], float]] = {}
        for key in keys.clients or ():
            self.of(key)
        self._configured = frozenset(self._known)

    def of(self, key: ClientKey | None) -> Caller:
        """Return the owner of a key; None is the anonymous one."""
        if key is None:
            return self.anybody
        found = self._known.get(key.owner)
        if found is None:
            usage = self._metrics.key_usage(key.name, self._label(key.name))
            found = Caller(key.owner, key.limits, usage=usage, name=key.name)
            self._known[key.owner] = found
            reports, since_s = self._unseen.pop(key.owner, ({}, 0.0))
            if time.monotonic() - since_s < MINUTE_S:
                for router, spent in reports.items():
                    found.spent_elsewhere(router, spent)
        return found

    def report(self) -> dict[str, SpentLimits]:
        """Return the use of limits since the last report, by owner; see ``spent_elsewhere``."""
        found = ((owner, caller.report()) for owner, caller in self._known.items())
        return {owner: spent for owner, spent in found if spent is not None}

    def spent_elsewhere(self, router: str, report: Mapping[str, SpentLimits]) -> None:
        """Count the use of limits that another Router reports."""
        now_s = time.monotonic()
        for owner, spent in report.items():
            if (caller := self._known.get(owner)) is not None:
                caller.spent_elsewhere(router, spent)
                continue
            reports, since_s = self._unseen.get(owner, ({}, now_s))
            if now_s - since_s >= MINUTE_S:
                reports, since_s = {}, now_s
            reports[router] = reports.get(router, SpentLimits()) + spent
            self._unseen[owner] = reports, since_s

    def name_of(self, owner: str) -> str:
        """Return the name of a key's owner; empty for the anonymous one."""
        found = self._known.get(owner)
        return owner if found is None else found.name

    def keep(self, ids: Collection[str]) -> None:
        """Forget the owners of the cluster's keys that are not among ``ids``."""
        gone = self._known.keys() - self._configured - set(ids)
        for owner in gone:
            del self._known[owner]
        self._unseen = {owner: one for owner, one in self._unseen.items() if owner in ids}
        for label in self._labels - {one.name for one in self._known.values()}:
            self._labels.remove(label)
            self._metrics.forget_key(label)

    def _label(self, name: str) -> str:
        if name not in self._labels and len(self._labels) >= self._counted_keys:
            return OTHER_KEYS
        self._labels.add(name)
        return name


def queue_terms(
    caller: Caller,
    config: RouterConfig,
    arrived_s: float,
    *,
    priority: int | None,
    timeouts_s: Iterable[float | None],
) -> QueueTerms:
    """Return the queue terms of a call's requests.

    The shortest of several timeouts counts, which its headers and its body give. Without a
    priority, a call gets the usual one, or the most urgent that its key allows.

    Raises:
        RequestError: the priority is outside of the allowed range.
    """
    limits = caller.limits
    least = config.priority_min
    if limits.min_priority is not None:
        least = max(least, limits.min_priority)
    if priority is None:
        priority = max(0, least)
    if not least <= priority <= config.priority_max:
        raise RequestError(
            f"Invalid 'priority': expected a value from {least} to {config.priority_max}, "
            f"but got {quoted(priority)}.",
            "priority",
        )
    limit_s = min((one for one in timeouts_s if one is not None), default=config.request_timeout_s)
    return QueueTerms(
        flow=caller.owner,
        weight=limits.weight,
        priority=priority,
        deadline_s=None if limit_s is None else arrived_s + limit_s,
        timeout_s=limit_s or 0.0,
        use=lambda _, seconds: caller.use_board(seconds),
        came_s=arrived_s,
    )
