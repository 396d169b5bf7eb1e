"""The state of one generation: tokens and edits in, certain text and a finish reason out.

It decides *that* its run must end or be interrupted; the caller does it. It knows no engine, and of
the KV cache only the number of positions that the caller passes in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum

from rkserve.board.answer.hooks import (
    AnswerPiece,
    HookChain,
    HookFactory,
    Replace,
    hooks_of,
)
from rkserve.board.answer.transcript import (
    Ids,
    PendingDelta,
    Range,
    ReasoningSpan,
    Transcript,
    Utf8Decoder,
    ordered,
    reasoning_span,
)
from rkserve.core.block_hashes import common_prefix
from rkserve.core.errors import ContextOverflow, HookFailed, RequestError, StateConflict
from rkserve.core.messages import (
    Delta,
    Edit,
    FailoverState,
    FinishReason,
    GenerateRequest,
    TokenOrigin,
    TranscriptToken,
)
from rkserve.core.run_params import Scored

# A hook that keeps replacing its own output is stopped after this many tries without progress.
REWINDS_WITHOUT_PROGRESS = 64
# Token ids of the runtime have 32 bits; this is the limit where the vocabulary's size is unknown.
TOKEN_IDS = 2**31

log = logging.getLogger(__name__)


class RunSignal(Enum):
    """The change that a generation's run needs now."""

    STOP = "end it"
    PAUSE = "interrupt it and wait"
    REWIND = "interrupt it and go on from the changed context"


class Generation:
    """The transcript of one request while it grows, is interrupted, edited and resumed.

    ``runtime_counts`` is true where the runtime itself enforces ``budget`` (1.3.0) and ends the run
    there; otherwise the run must be aborted at the limit. Set it before each run.

    Call ``accept`` for each token of a run and follow ``want``. Once the run has been left, however
    it returned, call ``interrupted``, then perhaps ``apply``, and unless it is ``complete`` start
    another run over ``context``; or call ``ended``.
    """

    def __init__(
        self,
        request: GenerateRequest,
        eos_ids: frozenset[int],
        *,
        runtime_counts: bool,
        hooks: Sequence[HookFactory] = (),
        vocab_size: int | None = None,
        context_len: int | None = None,
    ) -> None:
        """A request that began on another board starts with the state it reached there.

        Raises ``HookFailed`` where a hook cannot be created.
        """
        self.request = request
        self.runtime_counts = runtime_counts
        self._eos_ids = eos_ids
        self._stop_ids = frozenset(request.stop_ids) - eos_ids
        self._vocab_size = vocab_size
        self._context_len = context_len
        self._unseen = 0  # tokens of a text-mode prompt, counted by the runtime
        self._factories = hooks_of(request, hooks)
        self._chain = HookChain(self._factories, request)
        self._characters = Utf8Decoder()
        self._transcript = Transcript(request.prompt_ids)
        asked = request.stepwise
        self._scored = asked is not None and asked.top_logprobs is not None
        self._handout = PendingDelta(request.prompt_ids, scored=self._scored)
        self._open: list[TranscriptToken] = []  # tokens that wait for their text
        self.token_ids: list[int] = []  # of the answer
        self._score: Scored | None = None  # of the next token
        self._prompt_scores: list[Scored] = []
        self._prompt_told = False  # the prompt's logprobs were emitted
        self._rewinding = False
        self._pause: str | None = None
        self._rewinds, self._furthest = 0, 0
        self._runtime_ends, self._beyond = False, False
        # Ranges that edits cleared since the last interruption, in an order to clear them in.
        self.cuts: tuple[Range, ...] = ()
        # The reason of the hook that caused the last interruption.
        self.paused_by: str | None = None
        self.rests = False  # it was paused on another board
        self.failure: HookFailed | None = None
        self.reason: FinishReason | None = None
        self._left = self.budget  # tokens that the run may still generate
        if request.continued is not None:
            self._take_over(request.continued)
        elif request.max_tokens == 0 and not self.begin_scores():
            self.reason = FinishReason.LENGTH  # the request needs no run

    # -- state ------------------------------------------------------------------------------------

    @property
    def want(self) -> RunSignal | None:
        """The change that the run needs now, until it has been left.

        After an EOS, or at a limit that it was given, the runtime ends by itself; it is stopped
        only if it continues, as 1.3.0 does with models whose EOS it misreads.
        """
        if self.complete:
            return None if self._runtime_ends and not self._beyond else RunSignal.STOP
        if self._rewinding:
            return RunSignal.REWIND
        return RunSignal.PAUSE if self._pause is not None else None

    @property
    def complete(self) -> bool:
        """True where no run may follow: the answer is complete, or a hook failed; see ``ended``."""
        return self.reason is not None or self.failure is not None

    @property
    def context(self) -> Ids:
        """The ids that the next run needs in its KV cache: all of them, less cleared ranges."""
        return self._transcript.context

    @property
    def tokens(self) -> int:
        """The number of tokens of the answer so far."""
        return len(self.token_ids)

    @property
    def budget(self) -> int:
        """The number of tokens that may still be generated, by the request and the context."""
        asked = self.request.max_tokens - self.tokens
        if self._context_len is not None:
            asked = min(asked, self._context_len - self._unseen - len(self.context))
        return max(0, asked)

    @property
    def partial_output(self) -> str:
        """The answer's text as far as it is certain."""
        return "".join(self._chain.shown)

    @property
    def generated_text(self) -> str:
        """The generated text before hooks changed it, from which text mode continues."""
        data = b"".join(slot.data for slot in self._transcript.slots)
        return data.decode(errors="replace")

    @property
    def reasoning(self) -> ReasoningSpan:
        """The reasoning part of the answer so far."""
        thinking = self.request.thinking
        if thinking is None:
            return ReasoningSpan()
        return reasoning_span(self._transcript.slots, thinking)

    # -- runs -------------------------------------------------------------------------------------

    def accept(self, token_id: int, data: bytes, waiting: bool = False) -> bool:
        """Take one token of the run; True where there may be something new to emit.

        ``waiting``: the runtime holds its text back until a character is complete. It becomes part
        of the answer with the tokens that complete it.
        """
        if self.complete or self._rewinding or self._pause is not None:
            self._beyond = True
            return False
        slot = TranscriptToken(token_id, data, waiting=waiting, scored=self._score)
        self._score = None
        self._transcript.slots.append(slot)
        self.token_ids.append(token_id)
        self._left -= 1
        if token_id in self._eos_ids:
            self._end_of_sequence()
            return True
        if token_id in self._stop_ids and not self.request.include_stop:
            self._stop_token()
            return True
        self._open.append(slot)
        if not waiting:
            with self._hooked():
                self._feed_newest()
        if token_id in self._stop_ids and not self.complete and not self._rewinding:
            self.reason, self._runtime_ends = FinishReason.STOP, False
        if not self.complete and not self._rewinding and self._left <= 0:
            self.reason, self._runtime_ends = FinishReason.LENGTH, self.runtime_counts
        return not waiting or self.complete

    def begin_scores(self) -> bool:
        """Start a run; return whether it must deliver the prompt's logprobs."""
        self._prompt_scores = []
        asked = self.request.stepwise
        return asked is not None and asked.prompt_logprobs and not self._prompt_told

    def score(self, found: Sequence[Scored], *, prompt: bool) -> None:
        """Take logprobs: of the next token, or of the prompt's next positions."""
        if prompt:
            self._prompt_scores += found
        else:
            (self._score,) = found

    def cut(self) -> None:
        """End the answer at the engine's context limit, which only the engine knew."""
        if not self.complete:
            self.reason, self._runtime_ends = FinishReason.LENGTH, True

    def aborted(self) -> None:
        """End the answer as aborted; tokens that still arrive are not part of it."""
        if not self.complete:
            self.reason, self._runtime_ends = FinishReason.ABORT, False

    def interrupted(self, prompt_tokens: int = 0) -> None:
        """Note that the run was left before the answer's end, however it returned.

        Tokens after that decision are dropped, and so is an incomplete character at the end: the
        next run generates them again. ``prompt_tokens`` is the runtime's count for a prompt in text
        mode. Where the context has no room for another token, the answer is complete.
        """
        if self.request.prompt_text is not None:
            self._unseen = prompt_tokens
        self.paused_by, self._pause, self._rewinding = self._pause, None, False
        if not self.complete and self._transcript.drop_unfinished():
            self._open.clear()
            self.token_ids = self._transcript.answer
        self.cuts = ()
        self._beyond = False
        self._make_room()

    def end_thinking(self) -> bool:
        """Append the mark that ends the reasoning, which the runtime swallowed when the run ended.

        Return False where the run did not end that way, or where no token can follow. See the quirk
        ``thinking_ends_run``.
        """
        thinking = self.request.thinking
        if self.complete or thinking is None or not self.reasoning.unended:
            return False
        # In text mode no id is ever sent: any will do for the token that it was.
        ids = thinking.mark_ids if self.request.prompt_text is None else (0,)
        if self.budget <= len(ids):
            return False
        changed = self._transcript.spliced(0, ids, thinking.close, TokenOrigin.APPENDED)
        with self._hooked():
            self._become(changed)
        return not self.complete

    def ended(self, *, context_full: bool) -> FinishReason:
        """Settle the finish reason and release held-back text.

        A run that ended by itself before the limit and without a known EOS met an EOS that only the
        runtime knows, unless the context is full: in text mode no room could be reserved.

        Raises:
            HookFailed: a hook failed, now or before; the text before that can still be taken.
        """
        if self.failure is not None:
            raise self.failure
        if self.reason is None:
            full = context_full or self.request.max_tokens == 0
            self.reason = FinishReason.LENGTH if full else FinishReason.STOP
        self._all_certain()
        with self._hooked():
            if self._chain.end().stop:
                self.reason = FinishReason.STOP
        self._show()
        if self.failure is not None:
            raise self.failure
        return self.reason

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the answer; None where something else did."""
        return self._chain.stopped_by if self.reason is FinishReason.STOP else None

    @property
    def pending(self) -> bool:
        """True where ``take`` has something to return."""
        return self._handout.pending or self._prompt_scored

    def take(self) -> Delta | None:
        """Return the delta since the last call, or None.

        Ids that an edit took back are not taken back here: ``tokens`` is their valid number.
        """
        delta = self._handout.take(self._transcript, self.token_ids)
        if not self._prompt_scored:
            return delta
        self._prompt_told, scores = True, tuple(self._prompt_scores)
        return replace(Delta("", ()) if delta is None else delta, prompt=scores)

    @property
    def _prompt_scored(self) -> bool:
        """True where the prompt's logprobs are complete and not emitted yet."""
        if self._prompt_told or self.request.stepwise is None:
            return False
        asked = self.request.stepwise.prompt_logprobs
        found = len(self._prompt_scores)
        return asked and 0 < found == len(self.request.prompt_ids) - 1

    # -- edits ------------------------------------------------------------------------------------

    def apply(self, edit: Edit, *, kv_positions: int, context_len: int) -> None:
        """Change an interrupted generation, or raise and change nothing.

        ``kv_positions`` is the number of leading positions of ``context`` in the KV cache. Ids
        inserted as part of the answer pass the hooks as a replay does. An edit may complete the
        answer (a stop string, the limit) and may reopen one that an edit completed.

        Raises:
            StateConflict: a hook has failed.
            RequestError: the edit refers to something that is not there.
            ContextOverflow: the context would leave no room for a token.
        """
        if self.failure is not None:
            raise StateConflict("edit", "ended", self.failure.message)
        if self.request.prompt_text is not None:
            raise RequestError(
                "A generation with images, or of a model without a tokenizer, cannot be edited: "
                "the token ids of its prompt are not known."
            )
        self._check_ids(edit.ids)
        kind = TokenOrigin.INJECTED if edit.injected else TokenOrigin.APPENDED
        held = min(kv_positions, len(self.context))
        cuts = ordered(edit.clear, held)
        changed = self._transcript.cleared(edit.clear, held)
        changed = changed.spliced(edit.replace_last, edit.ids, edit.text, kind)
        size = len(changed.context)
        if size < 1:
            raise RequestError("the edit would leave nothing of the context", "clear")
        if size >= context_len:
            raise ContextOverflow(size, context_len, "ids")
        self.cuts = (*self.cuts, *cuts)
        with self._hooked():
            self._become(changed)
        self._beyond = False
        self._make_room()

    # -- internal ---------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Say how many tokens the next run may give; without room for one there is no such run."""
        self._left = self.budget
        if self.request.max_tokens == 0 and self.begin_scores():
            return  # a run that gives none is what it is about
        if not self.complete and self._left == 0:
            self.reason = FinishReason.LENGTH

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Do what involves hooks: whatever comes of it ends this generation and nothing else.

        Tokens are taken in the loop that reads from the engine, which must not end for a hook.
        """
        try:
            yield
        except HookFailed as exc:
            self.failure = exc
        except Exception as exc:
            log.exception("the hooks of %s made an internal error", self.request.request_id)
            self.failure = HookFailed("chain", "what it returned made an error", repr(exc))

    def _check_ids(self, ids: Ids) -> None:
        for token_id in ids:
            if not 0 <= token_id < (self._vocab_size or TOKEN_IDS):
                size = "" if self._vocab_size is None else f" of {self._vocab_size} tokens"
                raise RequestError(f"the id {token_id} is not in the vocabulary{size}", "ids")

    def _end_of_sequence(self) -> None:
        # Its text, if any, is markup and not the answer.
        self.reason, self._runtime_ends = FinishReason.STOP, True
        self._handout.add_silent()
        self._all_certain()

    def _stop_token(self) -> None:
        # The runtime does not know these ids, so that the run has to be ended.
        self._end_of_sequence()
        self._runtime_ends = False

    def _all_certain(self) -> None:
        """Nothing waits for its text any more."""
        self._handout.certain, self._handout.ids = len(self._transcript.slots), self.tokens

    def _close(self, tokens: int) -> AnswerPiece:
        """Make one piece of the tokens that share their text."""
        text = self._characters.feed(b"".join(slot.data for slot in self._open))
        piece = AnswerPiece(tokens - 1, tuple(slot.token_id for slot in self._open), text)
        self._open.clear()
        return piece

    def _feed_newest(self) -> None:
        """Pass the newest tokens through the hooks and follow their actions."""
        piece = self._close(self.tokens)
        outcome = self._chain.feed(piece)
        if outcome.rewind is not None:
            self._rewind(*outcome.rewind)
            return
        self._handout.add(len(piece.ids), piece.text, self._chain.shown[-1])
        if self._characters.whole:  # ids are given out with all of their text
            self._all_certain()
        if outcome.rewritten:
            self._show()
        self._pause = outcome.pause
        if outcome.stop:
            self.reason = FinishReason.STOP

    def _rewind(self, name: str, action: Replace) -> None:
        """Change the context now, so that the text is emitted; the run is left at once."""
        self._rewinds = 1 if self.tokens > self._furthest else self._rewinds + 1
        self._furthest = max(self._furthest, self.tokens)
        if self._rewinds > REWINDS_WITHOUT_PROGRESS:
            reason = f"it replaced {self._rewinds} times without progress of the answer"
            raise HookFailed(name, reason)
        try:
            changed = self._replaced(action)
        except RequestError as exc:
            raise HookFailed(name, exc.message) from exc
        self._rewinding = True
        self._become(changed)

    def _replaced(self, action: Replace) -> Transcript:
        if self.request.prompt_text is not None:
            raise RequestError("without a tokenizer there is no context to replace in")
        if action.last < 1:
            raise RequestError(f"it replaces the last {action.last} tokens")
        self._check_ids(action.ids)
        return self._transcript.spliced(action.last, action.ids, action.text, TokenOrigin.APPENDED)

    def _become(self, changed: Transcript) -> None:
        """Take over the transcript that an edit or a hook made."""
        before, self._transcript = self._transcript, changed
        same_slots = common_prefix(before.slots, changed.slots)
        self._handout.rewrite(common_prefix(self.token_ids, changed.answer), same_slots)
        self._replay()

    def _take_over(self, continued: FailoverState) -> None:
        """Restore the state that the generation reached on another board.

        The last piece may have caused a pause that was not announced there: that pause applies
        here. Other actions of a hook were carried out there.
        """
        request = self.request
        self._prompt_told = continued.scored
        prompt = request.prompt_ids if continued.prompt_ids is None else continued.prompt_ids
        self._transcript = Transcript(prompt, continued.slots)
        given = len(self._transcript.answer)
        self._handout = PendingDelta(
            prompt, continued.slots, given, continued.text, scored=self._scored
        )
        acknowledged = continued.pause_over or continued.paused is not None
        with self._hooked():
            self._replay(newest=not acknowledged)
        self.paused_by = self._pause if continued.paused is None else continued.paused.by
        self.rests = not self.complete and not (self._pause is None and continued.paused is None)
        self._pause, self._rewinding = None, False
        self._make_room()

    def _replay(self, *, newest: bool = False) -> None:
        """Pass the whole answer through fresh hooks after its content changed.

        ``newest``: the last piece counts as new, not as replayed.
        """
        self.token_ids = self._transcript.answer
        self.reason, self._runtime_ends = None, False
        self._chain, self._characters = HookChain(self._factories, self.request), Utf8Decoder()
        self._open.clear()
        tokens, slots = 0, list(self._transcript.slots)
        try:
            for at, slot in enumerate(slots):
                tokens += slot.kind is not TokenOrigin.INJECTED
                live = newest and at == len(slots) - 1 and slot.kind is TokenOrigin.GENERATED
                self._replay_slot(slot, tokens, live=live)
        finally:
            self._handout.certain = len(self._transcript.slots) - len(self._open)
            self._handout.ids = self.tokens - len(self._open)
            self._show()
        if self.reason is None and self.tokens >= self.request.max_tokens:
            self.reason = FinishReason.LENGTH

    def _replay_slot(self, slot: TranscriptToken, tokens: int, *, live: bool) -> None:
        if slot.kind is not TokenOrigin.GENERATED and not self._open:
            self._characters.drop()  # no token completes a character across this border
        if slot.kind is TokenOrigin.INJECTED:
            return
        stops = slot.kind is TokenOrigin.GENERATED and slot.token_id in self._stop_ids
        hidden = stops and not self.request.include_stop
        if hidden or (slot.kind is TokenOrigin.GENERATED and slot.token_id in self._eos_ids):
            self.reason = FinishReason.STOP
            self._open.clear()
            return
        if stops:
            self.reason = FinishReason.STOP
        self._open.append(slot)
        if slot.waiting:
            return
        if live:
            self._feed_newest()
        elif self._chain.feed(self._close(tokens), replayed=True).stop:
            self.reason = FinishReason.STOP

    def _show(self) -> None:
        """Compare the shown text with the emitted text."""
        self._handout.show(self.partial_output)
