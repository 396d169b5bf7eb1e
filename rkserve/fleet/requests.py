"""A request in the terms of board selection, and its share of a board's load in flight. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rkserve.core.block_hashes import Chain, seed_of
from rkserve.core.kv_origin import origin_of
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

CHARS_OF_A_TOKEN = 4  # where nobody has counted the tokens
SOON_S = 0.02  # who waits for a board that should be free by now does not ask all the time
AGAIN_S = 1.0  # after that long it is asked anew whether waiting for a board still pays


@dataclass(slots=True, eq=False)
class RoutingRequest:
    """Make one for each request, and use it as long as the request waits: hashing takes time.

    ``chain`` is of its prompt under its adapter and ``salt``, None where the ids are not known or
    of no use.
    ``tried`` are the keys of boards that it must not go to, ``most`` how much one may be held.
    Requests that came later have ``overtaken`` it so many times. Until ``until_s`` it waits for one
    board, as was decided.
    """

    request_id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    chain: Chain | None = None
    session: str = ""
    salt: str = ""
    tried: Collection[str] = ()
    most: PauseEffect = PauseEffect.REFUSES
    since_s: float | None = None
    overtaken: int = 0
    until_s: float = 0.0
    _board: Candidate | None = None

    def waited_ms(self, now_s: float) -> float:
        """How long it has been waiting since it was asked for first."""
        if self.since_s is None:
            self.since_s = now_s
        return (now_s - self.since_s) * 1e3

    def wait_for(self, board: Candidate, until_ms: float, now_s: float) -> None:
        """It was decided that it waits for that board."""
        self._board = board
        self.until_s = now_s + max(SOON_S, min(until_ms / 1e3, AGAIN_S))

    def waits(self, now_s: float) -> bool:
        """Whether it still waits for its board, and nobody need decide anew: where many wait, most
        of what happens is not about their boards.
        """
        board = self._board
        if board is None or now_s >= self.until_s or board.key in self.tried:
            return False
        return board.ready and board.held is PauseEffect.NOT and not board.has_place

    @classmethod
    def of(
        cls, request: GenerateRequest, adapter: str | None = None, *, hashed: bool = True
    ) -> RoutingRequest:
        """Return what is asked for a request; ``adapter`` is the key of the one it would get.

        Without ``hashed`` nobody wants to know what boards hold. What was generated elsewhere
        already is part of what the board has to prefill.
        """
        if isinstance(request, EmbedRequest):
            # Nothing of it is left on the board, nor was there before.
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
            chain = Chain(ids, seed_of(origin_of(adapter, request.salt))) if hashed else None
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
    """From the moment that a request is sent to a board until it has ended there.

    ``expected`` is what it should find there. ``answer`` collects the ids generated so far.
    """

    def __init__(
        self, boards: ModelBoards, candidate: Candidate, ask: RoutingRequest, now_s: float
    ) -> None:
        self.candidate = candidate
        self.expected: Reuse = NOTHING
        self._boards = boards
        self._ask = ask
        self._resting = False
        self._over = False
        self._tokens = 0
        self._answer: list[int] = []
        self._unknown = False
        self._finished = False
        boards.unbook(ask.request_id)
        boards.visited(ask.session, candidate)
        if boards.index is not None:
            self.expected = boards.index.began(candidate.slot, ask.chain, now_s)
        prefill_ms = max(0, ask.prompt_tokens - self.expected.tokens) * candidate.speed.prefill_ms
        self._first_s = now_s + prefill_ms / 1e3  # when its first token is expected
        candidate.began(self, now_s)

    def rest_ms(self, now_s: float) -> float:
        """How long it will keep the board yet, as well as can be said."""
        if self._resting:
            return 0.0
        typical = self._boards.typical_tokens
        limit = self._ask.max_tokens - self._tokens
        rest = min(max(typical - self._tokens, MIN_REST * typical), max(0, limit))
        prefill_ms = 0.0 if self._tokens else max(0.0, (self._first_s - now_s) * 1e3)
        return prefill_ms + rest * self.candidate.speed.decode_ms

    def heard(self, event: Event) -> None:
        """Take over an event of the answer."""
        if isinstance(event, Delta):
            self._tokens += len(event.token_ids)
            self._answer += event.token_ids
            if event.retract or event.splice or event.bound:
                self._unknown = True  # what the context is now only the board can say
        elif isinstance(event, Accepted):
            self._accepted(event)
        elif isinstance(event, Finished):
            self._finished = True
            self._boards.found(self.expected, event.usage.cached_tokens)
        self._pause(event)

    def _accepted(self, event: Accepted) -> None:
        """The board says which weights it is for; of a line it chooses the version itself."""
        chain, adapter = self._ask.chain, event.adapter
        if chain is None:
            return
        key = None if adapter is None else adapter.key
        if chain.seed != seed_of(origin_of(key, self._ask.salt)):
            self._unknown = True

    def _pause(self, event: Event) -> None:
        """Count it as what it is now: at work or paused."""
        if isinstance(event, Paused):
            if not self._resting:
                self._resting = True
                self.candidate.rested(held=event.kv is Kv.KEPT)
        elif self._resting and _goes_on(event):
            self._resting = False
            self.candidate.went_on()

    def ended(self, now_s: float, *, left: bool) -> None:
        """It is over; ``left`` says that its client went before the board was done.

        Only the first call counts.
        """
        if self._over:
            return
        self._over = True
        if self._resting:
            self._resting = False
            self.candidate.went_on()
        self.candidate.ended(self, left=left)
        if self._finished and self._ask.max_tokens:  # else it was no answer
            self._boards.answered(self._tokens)
        if self._boards.index is not None:
            file = self.expected.tokens > 0 and not self.expected.live
            self._boards.index.ended(self.candidate.slot, self._left(), now_s, from_file=file)

    def _left(self) -> Chain | None:
        """What the board can extend, should it not have stopped the run by an abort."""
        chain = self._ask.chain
        if chain is None or not self._finished or self._unknown:
            return None
        # The last token is given out and not computed yet: the next run would do that.
        return chain.extended(tuple(self._answer[:-1]))


def _goes_on(event: Event) -> bool:
    """Whether a pause is over with that; edits of what is paused are told of in deltas too."""
    return isinstance(event, Finished) or (isinstance(event, Delta) and not event.paused)
