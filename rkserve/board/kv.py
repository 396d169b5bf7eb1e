"""What the live context of a board holds, and what a new request can reuse of it. Pure.

The KV cache of RKLLM can be appended to or cleared, not cut back (outside a pause). So a request
reuses all of the live context or nothing: its ids must extend it.
"""

from __future__ import annotations

from dataclasses import dataclass

Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """How to start a run: clear first or not, which ids to send, how many the context holds."""

    clear: bool
    send: Ids
    reused: int


class LiveContext:
    """The token ids that the runtime's KV cache holds, as far as they are known for certain."""

    def __init__(self, *, append: bool) -> None:
        """``append`` says whether the release may be sent only the new ids of a conversation."""
        self.append = append
        self._ids: Ids | None = ()

    @property
    def positions(self) -> int:
        """Positions known to be held."""
        return len(self._ids or ())

    def plan(self, prompt: Ids) -> Plan:
        """Return how a run over ``prompt`` begins.

        At least one id is always sent: the runtime computes the first new token from it.
        """
        held = self._ids
        if self.append and held and len(held) < len(prompt) and prompt[: len(held)] == held:
            return Plan(clear=False, send=prompt[len(held) :], reused=len(held))
        return Plan(clear=held != (), send=prompt, reused=0)

    def settle(self, transcript: Ids, positions: int) -> bool:
        """Record what a run that ended in order left: ``transcript``, perhaps without its end.

        ``transcript`` is the whole prompt with all generated ids. How many of them the KV holds is
        the runtime's word (``positions``): a token enters it only when the next one is computed,
        so whether the last one is in differs with the way the run ended. Any other number means
        that the runtime did not append what it was sent, or moved its window: it returns False
        then and forgets the context.
        """
        if len(transcript) - 1 <= positions <= len(transcript):
            self._ids = transcript[:positions]
            return True
        self.forget()
        return False

    def forget(self) -> None:
        """The content is unknown (abort, failure): the next run clears first."""
        self._ids = None

    def reset(self) -> None:
        """A new handle: nothing is held."""
        self._ids = ()
