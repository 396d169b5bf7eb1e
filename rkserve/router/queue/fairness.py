"""Fair queueing by owner: the serving order of waiting requests, and the choice of an eviction.
Pure.

More urgent requests go first. At equal urgency the owner with the least service for its weight goes
first, so that a thousand requests of one owner do not delay the single request of another. Service
is measured in board time instead of requests, so that long requests gain nothing.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar


@dataclass(eq=False, slots=True)
class Waiting:
    """One waiting request.

    ``number`` grows with each arrival. ``flow`` is the owner, and ``cost_ms`` the expected board
    time. A request that is ``ahead`` goes before all that are not.
    """

    number: int
    flow: str
    weight: float
    priority: int
    cost_ms: float
    ahead: bool


T = TypeVar("T", bound=Waiting)


@dataclass(slots=True)
class _Flow(Generic[T]):
    """The waiting requests of one owner at one priority, in the order of arrival."""

    entries: dict[int, T] = field(default_factory=dict)
    cost_ms: float = 0.0  # the weighted cost of all of them


class FairQueue(Generic[T]):
    """The requests that wait for boards of one model."""

    def __init__(self) -> None:
        self._ahead: list[T] = []  # by priority and number
        self._levels: dict[int, dict[str, _Flow[T]]] = {}
        self._size = 0
        # The weighted service of each owner. An owner that returns starts at the level of the least
        # served one that waits, so that idle time earns no credit.
        self._served: dict[str, float] = {}
        self._floor = 0.0

    def __len__(self) -> int:
        return self._size + len(self._ahead)

    @property
    def size(self) -> int:
        """The number of waiting requests without those that are ahead, which were admitted
        before.
        """
        return self._size

    def by_priority(self) -> dict[int, int]:
        """Return the number of waiting requests at each priority."""
        counts: dict[int, int] = {}
        for one in self._ahead:
            counts[one.priority] = counts.get(one.priority, 0) + 1
        for priority, flows in self._levels.items():
            waiting = sum(len(flow.entries) for flow in flows.values())
            counts[priority] = counts.get(priority, 0) + waiting
        return counts

    def add(self, one: T) -> None:
        """Add a request behind those of its owner at the same priority."""
        if one.ahead:
            bisect.insort(self._ahead, one, key=lambda other: (other.priority, other.number))
            return
        flows = self._levels.setdefault(one.priority, {})
        if all(one.flow not in level for level in self._levels.values()):
            self._served[one.flow] = max(self._served.get(one.flow, 0.0), self._floor)
        flow = flows.setdefault(one.flow, _Flow())
        flow.entries[one.number] = one
        flow.cost_ms += one.cost_ms / one.weight
        self._size += 1

    def remove(self, one: T) -> None:
        """Remove a waiting request."""
        if one.ahead:
            self._ahead.remove(one)
            return
        flows = self._levels[one.priority]
        flow = flows[one.flow]
        del flow.entries[one.number]
        flow.cost_ms -= one.cost_ms / one.weight
        self._size -= 1
        if not flow.entries:
            del flows[one.flow]
        if not flows:
            del self._levels[one.priority]

    def serve(self, one: T) -> None:
        """Remove a request that gets a board, and charge its expected time to its owner."""
        self.remove(one)
        self._floor = max(self._floor, self._served.get(one.flow, self._floor))
        self.charge(one.flow, one.weight, one.cost_ms)

    def charge(self, flow: str, weight: float, ms: float) -> None:
        """Correct the service of an owner by that time, which may be negative."""
        self._served[flow] = self._served.get(flow, self._floor) + ms / weight

    def order(self) -> Iterator[T]:
        """Yield the waiting requests in serving order, without changing the queue."""
        had: dict[str, float] = {}  # the service of the owners by then

        def charged(one: T) -> float:
            before = had.get(one.flow, self._served.get(one.flow, self._floor))
            had[one.flow] = before + one.cost_ms / one.weight
            return had[one.flow]

        for one in self._ahead:
            charged(one)
            yield one
        for priority in sorted(self._levels):
            flows = self._levels[priority]
            turns = [
                (
                    had.get(name, self._served.get(name, self._floor)),
                    name,
                    iter(flow.entries.values()),
                )
                for name, flow in flows.items()
            ]
            heapq.heapify(turns)
            while turns:
                _, name, rest = turns[0]
                following = next(rest, None)
                if following is None:
                    heapq.heappop(turns)
                    continue
                yield following
                heapq.heapreplace(turns, (charged(following), name, rest))

    def ahead_of(self, flow: str, priority: int) -> float:
        """Return the service before one more request of that owner, in ms."""
        total = sum(one.cost_ms for one in self._ahead)
        for level, flows in self._levels.items():
            if level < priority:
                total += sum(_cost(one) for one in flows.values())
        mine = self._levels.get(priority, {})
        own = mine.get(flow)
        until = 0.0 if own is None else own.cost_ms
        until += self._served.get(flow, self._floor) if own is not None else self._floor
        for name, other in mine.items():
            share = other.cost_ms
            if name != flow:
                share = min(share, max(0.0, until - self._served.get(name, self._floor)))
            total += share * _weight(other)
        return total

    def victim(self, newcomer: T) -> T:
        """Return the request to evict: the youngest of the largest owner at the lowest urgency.

        It may be the new request.
        """
        worst = max(self._levels, default=newcomer.priority)
        if newcomer.priority > worst:
            return newcomer
        flows = self._levels.get(worst, {})
        backlog = {name: flow.cost_ms for name, flow in flows.items()}
        if newcomer.priority == worst:
            own = backlog.get(newcomer.flow, 0.0)
            backlog[newcomer.flow] = own + newcomer.cost_ms / newcomer.weight
        most = max(backlog, key=lambda name: backlog[name], default=newcomer.flow)
        if newcomer.priority == worst and backlog[newcomer.flow] >= backlog[most]:
            return newcomer
        return next(reversed(flows[most].entries.values()))


def _cost(flow: _Flow[T]) -> float:
    return flow.cost_ms * _weight(flow)


def _weight(flow: _Flow[T]) -> float:
    return next(iter(flow.entries.values())).weight
