"""The board with the least work ahead takes the request. Pure.

A router knows at once what it sent itself; what other routers sent it learns from the boards'
reports, which are up to a second old. Both together cost no call per request.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


class Held(IntEnum):
    """What a board that is paused does with new requests, the better the less."""

    NOT = 0
    QUEUES = 1
    REFUSES = 2


@dataclass(slots=True)
class Candidate:
    """What is known of one board.

    ``key`` addresses its replica. ``capacity`` is how many may run and wait there. ``in_flight``
    is this router's own requests that do now, and ``resting`` those that are paused: they keep
    nobody from the board, which counts them apart. ``foreign`` are those of other routers when the
    board last reported. One that is ``ready`` takes requests, and starts them at once where its
    model is ``loaded``. ``last_prompt`` are the ids of the last prompt that this router sent it,
    and ``last_adapter`` the key of the adapter that it was for: what one adapter computed is of no
    use to another.
    """

    key: str
    capacity: int
    in_flight: int = 0
    resting: int = 0
    foreign: int = 0
    ready: bool = True
    loaded: bool = True
    held: Held = Held.NOT
    last_prompt: tuple[int, ...] = ()
    last_adapter: str | None = None
    _most_since_asked: int = 0
    _left_since_asked: int = 0

    @property
    def load(self) -> int:
        """Requests on the board now, as well as this router can know."""
        return self.foreign + self.in_flight

    @property
    def unused(self) -> bool:
        """Whether this router has nothing there, neither at work nor paused."""
        return self.in_flight == self.resting == 0

    def continues(self, prompt: tuple[int, ...], adapter: str | None = None) -> int:
        """Tokens that the board may still hold of ``prompt``: those of its last one, or none."""
        if adapter != self.last_adapter:
            return 0
        held = len(self.last_prompt)
        return held if held < len(prompt) and prompt[:held] == self.last_prompt else 0

    def began(self, prompt: tuple[int, ...], adapter: str | None = None) -> None:
        """This router sends the board a request."""
        self.in_flight += 1
        self.last_prompt, self.last_adapter = prompt, adapter
        self._most_since_asked = max(self._most_since_asked, self.in_flight)

    def rested(self, *, held: bool) -> None:
        """One of this router's requests is paused there; where it is ``held`` it keeps the board.

        For how long only the board knows, so that counts until the next report.
        """
        self.in_flight -= 1
        self.resting += 1
        self.foreign += held

    def went_on(self) -> None:
        """One that was paused goes on, or ends."""
        self.resting -= 1
        self.in_flight += 1
        self._most_since_asked = max(self._most_since_asked, self.in_flight)

    def ended(self, *, left: bool) -> None:
        """That request is over; ``left`` says that its client went before the board was done."""
        self.in_flight -= 1
        if left:
            self.last_prompt = ()  # an aborted run leaves nothing that can be continued
        self._left_since_asked += left

    def asked(self) -> None:
        """The board is asked for a report, which ``heard`` takes over."""
        # The board may still be ending what was left; the report after this one shows if it hangs.
        self._most_since_asked = self.in_flight + self._left_since_asked
        self._left_since_asked = 0

    def heard(self, reported: int) -> None:
        """Take over the running and queued requests of a report.

        Nobody knows how many of them were this router's in the moment that the board counted; as
        many as there were at most since it was asked. Counting one of its own as foreign would
        send the next request to wait behind a busy board while this one is idle.
        """
        self.foreign = max(0, reported - self._most_since_asked)


def choose(
    candidates: Iterable[Candidate],
    prompt: tuple[int, ...],
    rng: random.Random,
    adapter: str | None = None,
) -> Candidate | None:
    """Return the ready board with the least load that has room.

    One that is held is chosen only where all are: a request should rather be told to come back
    than queue behind a pause, and why a board refuses is its own to say. Among equals the one whose
    last prompt this one continues: a conversation finds its KV cache again, and never at the price
    of a longer wait. Then chance decides. None where there is no ready board, or none with room.
    """
    ready = [c for c in candidates if c.ready]
    freest = min((c.held for c in ready), default=Held.NOT)
    open_boards = [c for c in ready if c.held == freest and c.load < c.capacity]
    if not open_boards:
        return None
    least = min(c.load for c in open_boards)
    idle = [(c.continues(prompt, adapter), c) for c in open_boards if c.load == least]
    most = max(held for held, _ in idle)
    return rng.choice([c for held, c in idle if held == most])
