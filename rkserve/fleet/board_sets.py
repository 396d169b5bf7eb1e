"""Collections of boards: a set with random sampling, and a consistent hash ring. Pure."""

from __future__ import annotations

import bisect
import hashlib
import random
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, Protocol, TypeVar


class Keyed(Protocol):
    """Something with a name."""

    @property
    def key(self) -> Hashable:
        """The name."""


T = TypeVar("T", bound=Keyed)


class RandomSet(Generic[T]):
    """Things with different keys. The same calls in the same order give the same samples."""

    __slots__ = ("_items", "_where")

    def __init__(self) -> None:
        self._items: list[T] = []
        self._where: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def add(self, item: T) -> None:
        """Put it in."""
        self._where[item.key] = len(self._items)
        self._items.append(item)

    def remove(self, item: T) -> None:
        """Take it out; it must be in."""
        at = self._where.pop(item.key)
        last = self._items.pop()
        if last.key != item.key:
            self._items[at] = last
            self._where[last.key] = at

    def sample(self, rng: random.Random, most: int, but: Collection[Hashable] = ()) -> list[T]:
        """Return up to ``most`` of those whose key is not in ``but``, by chance, in any order."""
        if len(self._items) <= most + len(but):
            found = [item for item in self._items if item.key not in but]
            return rng.sample(found, min(most, len(found)))
        some = rng.sample(self._items, most + len(but))
        return [item for item in some if item.key not in but][:most]


POINTS = 64  # of each board: with 8 boards the largest part is about a third above the mean


class HashRing:
    """Boards by their names, which outlive their replicas."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._points: list[tuple[int, str]] = []

    def add(self, name: str) -> None:
        """A board has come, or was there already."""
        if name not in self._names:
            self._names.add(name)
            for number in range(POINTS):
                bisect.insort(self._points, (_point(f"{name}\0{number}"), name))

    def remove(self, name: str) -> None:
        """It has gone; only its own sessions move."""
        self._names.discard(name)
        self._points = [point for point in self._points if point[1] != name]

    def of(self, session: str) -> Iterator[str]:
        """Yield the session's board, then those that take it over one after the other."""
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
