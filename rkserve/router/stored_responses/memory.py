"""What a call may need of earlier answers, and where its own is kept: most have no memory."""

from __future__ import annotations

from typing import Protocol

from rkserve.api.common.dialect import Answer, AnyCall


class Memory(Protocol):
    """The memory of one call."""

    @property
    def recalled(self) -> bool:
        """Whether the call is longer than its body, by what was said before."""

    async def recall(self, call: AnyCall) -> AnyCall:
        """Return the call with what it needs of earlier ones. Raises ``RkserveError``."""

    async def keep(self, answer: Answer, failure: BaseException | None = None) -> None:
        """Keep an answer that is over, or what came of one that fails; the first time counts.

        Where that is not possible the answer is told so, and goes on.
        """

    def left(self, answer: Answer) -> None:
        """Keep what came of an answer whose client has gone; nobody waits for that."""


class _NoMemory:
    """Every call stands for itself."""

    recalled = False

    async def recall(self, call: AnyCall) -> AnyCall:
        """Return the call as it is."""
        return call

    async def keep(self, answer: Answer, failure: BaseException | None = None) -> None:
        """Keep nothing."""

    def left(self, answer: Answer) -> None:
        """Keep nothing."""


NO_MEMORY: Memory = _NoMemory()
