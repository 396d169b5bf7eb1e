"""A request in the terms of board selection, and its share of a board's load in flight. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rkserve.core.block_hashes import BlockHashes, origin_of, seed_of
from rkserve.core.messages import (
    Accepted,
    Delta,
    EmbedRequest,
    Event,
    Finished,
    GenerateRequest,
    Kv,
    Paused,
)
from rkserve.fleet.load import MIN_REST, Candidate, ModelBoards, PauseEffect
from rkserve.fleet.prefix_index import NOTHING, Reuse

CHARS_OF_A_TOKEN = 4  # an estimate for prompts without a token count
SOON_S = 0.02  # the shortest time before a decision to wait is reconsidered
AGAIN_S = 1.0  # and the longest


@dataclass(slots=True, eq=False)
class RoutingRequest:
    """A request in the terms of board selection; reused while the request waits.

    ``chain`` is the block hash chain of the prompt under its adapter and ``salt``; None if the
    token IDs are unknown or not needed. ``tried`` are the keys of boards to skip, ``most`` the
    worst acceptable pause effect. ``overtaken`` counts later requests that were sent first. Until
    ``until_s`` it waits for the board that was chosen.
    """

    request_id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    chain: BlockHashes | None = None
    session: str = ""
    salt: str = ""
    tried: Collection[str] = ()
    most: PauseEffect = PauseEffect.REFUSES
    since_s: float | None = None
    overtaken: int = 0
    until_s: float = 0.0
    _board: Candidate | None = None

    def waited_ms(self, now_s: float) -> float:
        """Return the time since the first call of this method."""
        if self.since_s is None:
            self.since_s = now_s
        return (now_s - self.since_s) * 1e3

    def wait_for(self, board: Candidate, until_ms: float, now_s: float) -> None:
        """Record the decision to wait for a board."""
        self._board = board
        self.until_s = now_s + max(SOON_S, min(until_ms / 1e3, AGAIN_S))

    def waits(self, now_s: float) -> bool:
        """Return whether the last decision to wait still holds.

        It saves deciding again for every waiting request on each event, most of which concern other
        boards.
        """
        board = self._board
        if board is None or now_s >= self.until_s or board.key in self.tried:
            return False
        return board.ready and board.held is PauseEffect.NOT and not board.has_place

    @classmethod
    def of(
        cls, request: GenerateRequest, adapter: str | None = None, *, hashed: bool = True
    ) -> RoutingRequest:
        """Return the features of a request; ``adapter`` is the key of its adapter.

        Without ``hashed`` no block hashes are computed. Tokens generated before a failover count as
        prompt.
        """
        if isinstance(request, EmbedRequest):
            # Embedding requests neither use nor leave cached prefixes.
            tokens = (
                sum(map(len, request.inputs)) or sum(map(len, request.texts)) // CHARS_OF_A_TOKEN
            )
            return cls(request.request_id, request.model, tokens, 0, None, request.session)
        ids, spoken = request.prompt_ids, ""
        before = request.continued
        if before is not None:
            ids = before.prompt_ids or ids
            ids += tuple(slot.token_id for slot in before.slots if not slot.cleared)
            spoken = before.text
        if request.prompt_text is not None or not ids:
            text = f"{request.prompt_text or ''}{spoken}"
            tokens, chain = request.counted or len(text) // CHARS_OF_A_TOKEN, None
        else:
            tokens = len(ids)
            chain = BlockHashes(ids, seed_of(origin_of(adapter, request.salt))) if hashed else None
        return cls(
            request.request_id,
            request.model,
            tokens,
            request.max_tokens,
            chain,
            request.session,
            request.salt,
        )


class InFlightRequest:
    """A request at a board, from sending until its end there.

    ``expected`` is the cached prefix expected there. Generated token IDs are collected for the
    prediction of the context that is left.
    """

    def __init__(
        self, boards: ModelBoards, candidate: Candidate, routing: RoutingRequest, now_s: float
    ) -> None:
        self.candidate = candidate
        self.expected: Reuse = NOTHING
        self._boards = boards
        self._routing = routing
        self._resting = False
        self._over = False
        self._tokens = 0
        self._answer: list[int] = []
        self._unknown = False
        self._finished = False
        boards.unbook(routing.request_id)
        boards.visited(routing.session, candidate)
        if boards.index is not None:
            self.expected = boards.index.began(candidate.slot, routing.chain, now_s)
        prefill_ms = (
            max(0, routing.prompt_tokens - self.expected.tokens) * candidate.speed.prefill_ms
        )
        self._first_s = now_s + prefill_ms / 1e3  # when its first token is expected
        candidate.began(self, now_s)

    def rest_ms(self, now_s: float) -> float:
        """Return the estimated time until the request leaves the board."""
        if self._resting:
            return 0.0
        typical = self._boards.typical_tokens
        limit = self._routing.max_tokens - self._tokens
        rest = min(max(typical - self._tokens, MIN_REST * typical), max(0, limit))
        prefill_ms = 0.0 if self._tokens else max(0.0, (self._first_s - now_s) * 1e3)
        return prefill_ms + rest * self.candidate.speed.decode_ms

    def heard(self, event: Event) -> None:
        """Process an event of the answer."""
        if isinstance(event, Delta):
            self._tokens += len(event.token_ids)
            self._answer += event.token_ids
            if event.retract or event.splice or event.bound:
                self._unknown = True  # only the board knows the context after an edit
        elif isinstance(event, Accepted):
            self._accepted(event)
        elif isinstance(event, Finished):
            self._finished = True
            self._boards.found(self.expected, event.usage.cached_tokens)
        self._pause(event)

    def _accepted(self, event: Accepted) -> None:
        """Compare the adapter version chosen by the board with the assumed one."""
        chain, adapter = self._routing.chain, event.adapter
        if chain is None:
            return
        key = None if adapter is None else adapter.key
        if chain.seed != seed_of(origin_of(key, self._routing.salt)):
            self._unknown = True

    def _pause(self, event: Event) -> None:
        """Count the request as running or paused at the board."""
        if isinstance(event, Paused):
            if not self._resting:
                self._resting = True
                self.candidate.rested(held=event.kv is Kv.KEPT)
        elif self._resting and _goes_on(event):
            self._resting = False
            self.candidate.went_on()

    def ended(self, now_s: float, *, left: bool) -> None:
        """Remove the request; ``left``: its client disconnected before the board was done.

        Only the first call counts.
        """
        if self._over:
            return
        self._over = True
        if self._resting:
            self._resting = False
            self.candidate.went_on()
        self.candidate.ended(self, left=left)
        if self._finished and self._routing.max_tokens:  # an embedding request has no answer length
            self._boards.answered(self._tokens)
        if self._boards.index is not None:
            file = self.expected.tokens > 0 and not self.expected.live
            self._boards.index.ended(self.candidate.slot, self._left(), now_s, from_file=file)

    def _left(self) -> BlockHashes | None:
        """Return the reusable context left at the board, unless the run was aborted."""
        chain = self._routing.chain
        if chain is None or not self._finished or self._unknown:
            return None
        # The last token was emitted but not yet evaluated; the next run would do that.
        return chain.extended(tuple(self._answer[:-1]))


def _goes_on(event: Event) -> bool:
    """Return whether the event ends a pause; edits while paused are sent as deltas, too."""
    return isinstance(event, Finished) or (isinstance(event, Delta) and not event.paused)
