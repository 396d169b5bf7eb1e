"""Speculative generation under a grammar: the library generates, and each token is checked.

The callback checks each token. At the first violation the run is paused. If the grammar allows only
one continuation, the run is resumed with it; otherwise the run is ended and the token is chosen
from the logits of the context. The library continues once its own choice follows the grammar often
enough. For the board all of it is one stepwise run.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable
from contextlib import suppress
from enum import Enum, auto

from rkserve.core.errors import CallFailed, NativeError, StepsRefused
from rkserve.models.files import Vocabulary
from rkserve.native import engine_frames
from rkserve.native.engine_frames import Ids, StepParams
from rkserve.native.runtime import RunEnd, RunParams, Runtime, SinkAction, Step, TokenInput
from rkserve.sampling.draw import Row, Sampler
from rkserve.sampling.grammar import GrammarMatcher

# A library run with fewer tokens was not worth its prefill.
WORTH_TOKENS = 8
# The largest number of consecutive agreements required before the library is tried again.
MOST_AGREEMENTS = 32


class _Left(Enum):
    """The end of the library's part."""

    DONE = auto()  # the answer is complete, or the run was aborted
    STRAYED = auto()  # the next token has to be chosen here


class SpeculativeRun:
    """One speculative run. ``logits`` returns the logits after a whole context."""

    def __init__(
        self,
        runtime: Runtime,
        run_id: int,
        steps: StepParams,
        *,
        adapter: str | None,
        trail: GrammarMatcher,
        speech: Detokenizer,
        put: Callable[[bytes], None],
        logits: Callable[[Ids], Row],
    ) -> None:
        self._runtime, self._run_id, self._steps = runtime, run_id, steps
        self._adapter, self._trail, self._speech = adapter, trail, speech
        self._put, self._logits = put, logits
        self._context: list[int] = []
        self._limit = 0
        self._emitted = 0
        self._left: Callable[[], bool] = lambda: False
        self._over = False  # the answer is complete
        self._strayed = self._stopped = False  # of the current library run
        self._needed = 1  # agreements before the library is tried again
        self._dirty = False  # the KV cache holds tokens that are not part of the answer
        self.aborted = False  # a library run was aborted

    def go_on(self, ids: Ids, limit: int, left: Callable[[], bool]) -> int:
        """Generate after ``ids``; return the number of generated tokens.

        Raises:
            StepsRefused: the grammar allows no next token.
            NativeError: the library failed.
        """
        self._context, self._limit, self._left = list(ids), limit, left
        sampler = self._sampler()
        try:
            while not self._ends():
                before = self._emitted
                if self._by_the_library() is _Left.DONE:
                    break
                short = self._emitted - before < WORTH_TOKENS
                self._needed = min(MOST_AGREEMENTS, 2 * self._needed) if short else 1
                self._by_ourselves(sampler)
        except BaseException:
            self._dirty = True
            raise
        finally:
            if self._dirty:
                # A stopped run leaves a context that no later run may extend.
                with suppress(NativeError):
                    self._runtime.clear_kv_cache()
        return self._emitted

    def _sampler(self) -> Sampler:
        wanted = self._steps.wanted
        return Sampler(
            self._steps.sampling,
            seed=wanted.seed,
            choice=wanted.choice,
            context=(*self._steps.held, *self._context),
            generated=self._steps.generated,
        )

    def _ends(self) -> bool:
        return self._over or self._emitted >= self._limit or self._left()

    # -- the library's part --------------------------------------------------------------------

    def _by_the_library(self) -> _Left:
        """Let the library generate until the end, or until several tokens could follow."""
        send, resume = tuple(self._context), False
        while True:
            self._strayed = self._stopped = False
            outcome = self._runtime.run(self._params(send, resume=resume), self._sink)
            if outcome.end is RunEnd.FAILED and not resume:
                raise CallFailed("rkllm_run", outcome.return_code)
            if outcome.end is RunEnd.FAILED:  # the resumption was refused, and is drained
                self._dirty = self._strayed = True
            if outcome.end is not RunEnd.PAUSED:
                return self._after_its_end()
            send = self._way_on()
            if not send:
                return _Left.DONE if self._ends() else _Left.STRAYED
            resume = True

    def _way_on(self) -> Ids:
        """Return the tokens to resume the paused run with; () if the run was ended instead."""
        send: Ids = ()
        try:
            if not self._ends() and self._is_where_it_strayed():
                send = self._only_way()
        finally:  # nothing else would end the pause
            if not send or self._ends():
                send = ()
                self._drain()
        return send

    def _params(self, send: Ids, *, resume: bool) -> RunParams:
        per_run = self._runtime.per_run_sampling
        return RunParams(
            (TokenInput(send),),
            sampling=self._steps.sampling if per_run else None,
            max_new_tokens=self._limit - self._emitted if per_run else None,
            resume=resume,
            adapter=self._adapter,
        )

    def _sink(self, step: Step) -> SinkAction:
        piece = step[0]
        if piece is None:
            return SinkAction.CONTINUE
        if self._strayed:
            return SinkAction.PAUSE  # it did not pause at once
        if self._ends():
            return self._stop()
        token_id = piece.token_id
        if not self._trail.may_take(token_id, is_end=token_id in self._steps.eos):
            self._strayed = True
            return SinkAction.PAUSE
        self._take(token_id)
        if token_id in self._steps.eos or (
            self._emitted >= self._limit and self._runtime.per_run_sampling
        ):
            return SinkAction.CONTINUE  # the library ends the run
        return self._stop() if self._ends() else SinkAction.CONTINUE

    def _stop(self) -> SinkAction:
        """End the run: by a drained pause if draining needs no abort, otherwise by an abort."""
        if self._runtime.quirks["drain_by_limit"]:
            return SinkAction.PAUSE
        if not self._stopped:
            self._stopped = self.aborted = self._dirty = True
            self._runtime.abort()
        return SinkAction.CONTINUE

    def _after_its_end(self) -> _Left:
        """Classify a run that the library ended at a hidden EOS or at a limit."""
        if self._strayed:
            return _Left.STRAYED
        return _Left.DONE if self._ends() or self._trail.may_end else _Left.STRAYED

    def _is_where_it_strayed(self) -> bool:
        """Return True if the KV cache of the paused run holds exactly the accepted tokens."""
        wanted = len(self._context)
        try:
            size = self._runtime.kv_cache_sizes()[0]
            if size > wanted:  # it did not pause at once
                self._runtime.clear_kv_range(((wanted, size),))
                size = self._runtime.kv_cache_sizes()[0]
        except NativeError:
            return False
        return size == wanted

    def _drain(self) -> None:
        self._dirty = True
        self.aborted |= not self._runtime.quirks["drain_by_limit"]
        self._runtime.drain()

    # -- the engine's part ---------------------------------------------------------------------

    def _by_ourselves(self, sampler: Sampler) -> None:
        """Choose tokens until the library's choice agrees with the grammar often enough."""
        agreed, size = 0, self._speech.size
        while agreed < self._needed and not self._ends():
            self._only_way()
            if self._ends():
                return
            row = self._logits(tuple(self._context))[:size]
            sampler.catch_up(self._told_ids)
            free, allowed = sampler.choose(row), self._trail.allowed()
            token_id = sampler.choose(row, allowed)
            if token_id is None:
                raise StepsRefused("the grammar allows no next token")
            keeps = free is not None and free < len(allowed) and bool(allowed[free])
            agreed = agreed + 1 if keeps else 0
            self._take(token_id)

    def _only_way(self) -> Ids:
        """Take the tokens that the grammar forces; return them."""
        before = self._emitted
        while not self._ends() and (token_id := self._trail.only()) is not None:
            self._take(token_id)
        return tuple(self._context[len(self._context) - (self._emitted - before) :])

    @property
    def _told_ids(self) -> list[int]:
        return self._context[len(self._context) - self._emitted :]

    def _take(self, token_id: int) -> None:
        self._trail.take(token_id)
        text, waiting = self._speech.text_of(token_id)
        self._put(engine_frames.pack_token(self._run_id, 0, token_id, text, waiting))
        self._context.append(token_id)
        self._emitted += 1
        self._over = token_id in self._steps.eos or self._trail.over


class Detokenizer:
    """The text of one answer's tokens, by one vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""

    @property
    def size(self) -> int:
        """The number of tokens; further columns of a row of logits are padding."""
        return len(self._vocabulary)

    def text_of(self, token_id: int) -> tuple[bytes, bool]:
        """Return the text of a token, and True if it is delayed to the next token."""
        self._held += self._vocabulary.bytes_of(token_id)
        self._decoder.reset()
        self._decoder.decode(self._held)
        if self._decoder.getstate()[0]:
            return b"", True
        held, self._held = self._held, b""
        return held, False
