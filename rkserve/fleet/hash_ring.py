"""Which board a session belongs to while boards come and go: consistent hashing. Pure."""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator

POINTS = 64  # of each board: with 8 boards the largest part is about a third above the mean


class Ring:
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
