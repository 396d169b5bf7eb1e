"""Collections of boards: a set with random sampling, and a consistent hash ring. Pure."""

from __future__ import annotations

import bisect
import hashlib
import random
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, Protocol, TypeVar


class Keyed(Protocol):
    """An object with a key."""

    @property
    def key(self) -> Hashable:
        """The key."""


T = TypeVar("T", bound=Keyed)


class RandomSet(Generic[T]):
    """A set by key with random sampling; sampling is reproducible for one seed."""

    __slots__ = ("_items", "_where")

    def __init__(self) -> None:
        self._items: list[T] = []
        self._where: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, item: T) -> None:
        """Add an item whose key is not in the set."""
        self._where[item.key] = len(self._items)
        self._items.append(item)

    def remove(self, item: T) -> None:
        """Remove an item of the set."""
        at = self._where.pop(item.key)
        last = self._items.pop()
        if last.key != item.key:
            self._items[at] = last
            self._where[last.key] = at

    def sample(self, rng: random.Random, most: int, but: Collection[Hashable] = ()) -> list[T]:
        """Return up to ``most`` random items whose keys are not in ``but``."""
        if len(self._items) <= most + len(but):
            found = [item for item in self._items if item.key not in but]
            return rng.sample(found, min(most, len(found)))
        some = rng.sample(self._items, most + len(but))
        return [item for item in some if item.key not in but][:most]


POINTS = 64  # per board: with 8 boards the largest share is about a third above the mean


class HashRing:
    """A consistent hash ring of board names, which stay the same when replicas are replaced."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._points: list[tuple[int, str]] = []

    def add(self, name: str) -> None:
        """Add a board, unless it is there."""
        if name not in self._names:
            self._names.add(name)
            for number in range(POINTS):
                bisect.insort(self._points, (_point(f"{name}\0{number}"), name))

    def remove(self, name: str) -> None:
        """Remove a board; only its own sessions move."""
        self._names.discard(name)
        self._points = [point for point in self._points if point[1] != name]

    def of(self, session: str) -> Iterator[str]:
        """Yield the session's board, then its successors in order."""
        points = self._points
        begin = bisect.bisect_left(points, (_point(session), ""))
        seen: set[str] = set()
        for step in range(len(points)):
            name = points[(begin + step) % len(points)][1]
            if name not in seen:
                seen.add(name)
                yield name


def _point(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
