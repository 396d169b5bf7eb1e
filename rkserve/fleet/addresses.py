"""Where boards can be reached, which of them hold a generation of this Router, and their answers
to a question that several are asked. It knows neither Ray nor what is asked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from rkserve.core.errors import RkserveError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Seat:
    """One board as it can be asked: its group's link, and its replica there.

    A ``silent`` one has missed its last report: waiting for it would cost the others' answers time.
    """

    group: str
    replica: str
    board_id: str
    model: str
    silent: bool = False


@dataclass
class Answers(Generic[T]):
    """What boards said: by board an answer and how long it took, or an error."""

    said: dict[str, T] = field(default_factory=dict)
    failed: dict[str, RkserveError] = field(default_factory=dict)
    took_ms: dict[str, float] = field(default_factory=dict)

    @property
    def partial(self) -> bool:
        """Whether some boards did what they were asked, and others did not."""
        return bool(self.said) and bool(self.failed)

    def require_one(self) -> None:
        """Raise the error of a board, of the first by name, where all have failed."""
        if self.failed and not self.said:
            raise min(self.failed.items())[1]


class Holders:
    """Which boards hold the generations that this Router sent them."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, tuple[str, str]]] = {}

    def enter(self, request_id: str, group: str, replica: str) -> None:
        """That replica gets the request."""
        completion, _, choice = request_id.rpartition("/")
        self._held.setdefault(completion, {})[choice] = (group, replica)

    def leave(self, request_id: str) -> None:
        """It is over there."""
        completion, _, choice = request_id.rpartition("/")
        choices = self._held.get(completion, {})
        choices.pop(choice, None)
        if not choices:
            self._held.pop(completion, None)

    def of(self, generation: str, choice: int | None) -> list[tuple[str, str]]:
        """Return groups and replicas, without repeats; none where this Router knows nothing."""
        choices = self._held.get(generation, {})
        wanted: Iterable[tuple[str, str] | None] = (
            choices.values() if choice is None else [choices.get(str(choice))]
        )
        return list(dict.fromkeys(place for place in wanted if place is not None))

    def __len__(self) -> int:
        return len(self._held)


def merged(lists: Iterable[Sequence[T]]) -> list[T]:
    """Return the boards' lists as one."""
    return [item for one in lists for item in one]
