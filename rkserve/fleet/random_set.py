"""A set from which a few by chance are taken in no more time than it takes to name them. Pure."""

from __future__ import annotations

import random
from collections.abc import Collection, Hashable, Iterator
from typing import Generic, Protocol, TypeVar


class Keyed(Protocol):
    """Something with a name."""

    @property
    def key(self) -> Hashable:
        """The name."""


T = TypeVar("T", bound=Keyed)


class Bag(Generic[T]):
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
