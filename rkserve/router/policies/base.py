"""The interface of routing policies, their decisions, and the registry of policies by name. Pure.

A policy decides from figures that it is given, and the caller acts on the decision. It chooses only
boards that are ready, have a free place and have not been tried for this request, or decides that
waiting for one busy board costs less time than any free one.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rkserve.fleet.load import Candidate, ModelBoards
from rkserve.fleet.prefix_index import NOTHING, Reuse
from rkserve.fleet.requests import RoutingRequest


@dataclass(frozen=True, slots=True)
class SendTo:
    """The decision to send a request to a board now.

    ``reuse`` is the cached prefix expected there, ``spared_ms`` the prefill time it saves, and
    ``ttft_ms`` the expected time to the first token.
    """

    board: Candidate
    reuse: Reuse = NOTHING
    ttft_ms: float = 0.0
    spared_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class WaitFor:
    """The decision to wait for a busy board, which is cheaper than any free one for ``until_ms``.

    The caller books the board's time, ``boards.book(request_id, board, work_ms)``, so that other
    requests take it into account, and decides again once ``RoutingRequest.waits`` is false. The
    next booking of the request replaces this one; ``unbook`` or its start on a board ends it.
    """

    board: Candidate
    until_ms: float
    work_ms: float
    reuse: Reuse = NOTHING


Decision = SendTo | WaitFor | None


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """The configuration of policies.

    ``max_wait_s`` bounds how long a request waits for one board while others are free. Restoring a
    token's KV cache from a file takes ``restore_ms``, writing it ``park_ms``.
    """

    max_wait_s: float = 20.0
    restore_ms: float = 0.15
    park_ms: float = 0.15


class RoutingPolicy(Protocol):
    """The choice of a board for each request."""

    name: str
    uses_prefixes: bool

    def satisfied(self, take: SendTo, /) -> bool:
        """Return whether no request further back in the queue could make better use of the board.

        If not, the offers of several requests are compared by ``first``.
        """

    def first(self, offers: Sequence[tuple[RoutingRequest, SendTo]], /) -> int:
        """Return the index of the request to send first, of those with a free board each.

        The offers are in queue order. The policy increments ``overtaken`` of skipped requests.
        """

    def choose(self, ask: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        """Return the board to send the request to or to wait for; None without a free board."""


class QueueOrderPolicy(ABC):
    """Base of the policies: requests are sent in queue order, and a subclass chooses the board."""

    name: str
    uses_prefixes = False

    def __init__(
        self, rng: random.Random | None = None, settings: PolicySettings | None = None
    ) -> None:
        self.rng = rng or random.Random()
        self.settings = settings or PolicySettings()

    def satisfied(self, _take: SendTo, /) -> bool:
        """See ``RoutingPolicy``."""
        return True

    def first(self, _offers: Sequence[tuple[RoutingRequest, SendTo]], /) -> int:
        """See ``RoutingPolicy``."""
        return 0

    @abstractmethod
    def choose(self, ask: RoutingRequest, boards: ModelBoards, now_s: float, /) -> Decision:
        """See ``RoutingPolicy``."""


POLICIES: dict[str, type[QueueOrderPolicy]] = {}
_P = TypeVar("_P", bound=type[QueueOrderPolicy])


def register(policy: _P) -> _P:
    """Make a policy available in the configuration under its ``name``."""
    POLICIES[policy.name] = policy
    return policy
