"""What a policy is asked: one request, as far as the choice of a board depends on it. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from rkserve.core.block_hashes import Chain, seed_of
from rkserve.core.kv_origin import origin_of
from rkserve.core.messages import EmbedRequest, GenerateRequest
from rkserve.fleet.load import Candidate, Held

CHARS_OF_A_TOKEN = 4  # where nobody has counted the tokens
SOON_S = 0.02  # who waits for a board that should be free by now does not ask all the time
AGAIN_S = 1.0  # after that long it is asked anew whether waiting for a board still pays


@dataclass(slots=True, eq=False)
class Ask:
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
    most: Held = Held.REFUSES
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
        return board.ready and board.held is Held.NOT and not board.has_place

    @classmethod
    def of(
        cls, request: GenerateRequest, adapter: str | None = None, *, hashed: bool = True
    ) -> Ask:
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
