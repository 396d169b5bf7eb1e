"""One generation as pure bookkeeping: tokens in, certain text and a true finish reason out.

It decides *that* the run must be stopped; stopping it is the caller's job.
"""

from __future__ import annotations

from rkserve.board.text import TextStream
from rkserve.messages import Delta, FinishReason, GenerateRequest


class Generation:
    """The transcript of one request while it grows.

    ``runtime_counts`` says that the runtime itself was given the token limit (1.3.0) and ends the
    run there; otherwise it has to be aborted at the limit.
    """

    def __init__(
        self, request: GenerateRequest, eos_ids: frozenset[int], *, runtime_counts: bool
    ) -> None:
        self.request = request
        self._eos_ids = eos_ids
        self._runtime_counts = runtime_counts
        self._text = TextStream(request.stop)
        self.token_ids: list[int] = []
        self._beyond: list[int] = []
        self._pending_text = ""
        self._taken = 0
        self._runtime_ends = False
        self.reason: FinishReason | None = None

    @property
    def must_stop(self) -> bool:
        """The answer is complete and the runtime has to be told.

        After an EOS, or at a limit that it was given, the runtime ends by itself; it is aborted
        only if it goes on, as 1.3.0 does with models whose EOS it misreads.
        """
        return self.reason is not None and (not self._runtime_ends or bool(self._beyond))

    @property
    def transcript(self) -> tuple[int, ...]:
        """Every id of the context: the prompt and all tokens, also those after the answer's end."""
        return (*self.request.prompt_ids, *self.token_ids, *self._beyond)

    def accept(self, token_id: int, data: bytes) -> bool:
        """Take one token; True where there is something new to give out."""
        if self.reason is not None:
            self._beyond.append(token_id)
            return False
        self.token_ids.append(token_id)
        if token_id in self._eos_ids:
            # Its text, if any, is markup and not the answer.
            self.reason, self._runtime_ends = FinishReason.STOP, True
            return True
        self._pending_text += self._text.feed(data)
        if self._text.stopped:
            self.reason = FinishReason.STOP
        elif len(self.token_ids) >= self.request.max_tokens:
            self.reason, self._runtime_ends = FinishReason.LENGTH, self._runtime_counts
        return True

    def ended(self, *, context_full: bool) -> FinishReason:
        """The run is over: settle the reason, release what was held back.

        A run that ended by itself before the limit and without a known EOS met an EOS that only
        the runtime knows, unless the context is full: in text mode nobody could leave room there.
        """
        if self.reason is None:
            self.reason = FinishReason.LENGTH if context_full else FinishReason.STOP
        self._pending_text += self._text.flush()
        return self.reason

    def take(self) -> Delta | None:
        """Return what came since the last call, or None."""
        fresh = tuple(self.token_ids[self._taken :])
        if not fresh and not self._pending_text:
            return None
        delta = Delta(self._pending_text, fresh)
        self._taken, self._pending_text = len(self.token_ids), ""
        return delta
