"""One generation as pure bookkeeping: tokens and edits in, certain text and a true reason out.

It decides *that* its run must be ended or interrupted; doing so is the caller's job. It knows no
engine, and of the KV cache only how many positions the caller says it holds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum

from rkserve.board.answer.builtin_hooks import (
    ReasoningSpan,
    pause_on,
    reasoning_span,
    stop_strings,
    thinking_limit,
)
from rkserve.board.answer.hooks import AnswerPiece, HookChain, HookFactory, Replace
from rkserve.board.answer.kv_plan import Ids, Range, common_prefix
from rkserve.board.answer.transcript import PendingDelta, Transcript, Utf8Decoder, ordered
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

# A hook that takes back its way out of an answer gets so many tries before it has to get further.
REWINDS_WITHOUT_PROGRESS = 64
# The runtime's are of 32 bits, where the size of the vocabulary is not known.
TOKEN_IDS = 2**31

log = logging.getLogger(__name__)


class RunSignal(Enum):
    """What has to be done with a generation's run now."""

    STOP = "end it"
    PAUSE = "interrupt it and wait"
    REWIND = "interrupt it and go on from the changed context"


class Generation:
    """The transcript of one request while it grows, is interrupted, edited and goes on.

    ``runtime_counts`` says that the runtime itself was given ``budget`` as its limit (1.3.0) and
    ends the run there; otherwise it has to be aborted at the limit. Set it before each run.

    The life of one: ``accept`` for each token of a run, and do what it ``want``s. Once the run has
    been left, in whichever way it returned, ``interrupted``, then perhaps ``apply``, and unless it
    is ``complete`` another run over ``context``; or ``ended``.
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
        """One that was begun elsewhere is what the request says that it became there.

        Raises ``HookFailed`` where a hook cannot be made.
        """
        self.request = request
        self.runtime_counts = runtime_counts
        self._eos_ids = eos_ids
        self._stop_ids = frozenset(request.stop_ids) - eos_ids
        self._vocab_size = vocab_size
        self._context_len = context_len
        self._unseen = 0  # tokens of a prompt in text mode, which only the runtime has counted
        # A pause is asked for by what the model says. Stop strings are about what is shown, and
        # they hold text back, which other hooks must not be made to wait for.
        self._factories = (thinking_limit, pause_on, *hooks, stop_strings)
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
        self._prompt_told = False  # its logprobs were given out
        self._rewinding = False
        self._pause: str | None = None
        self._rewinds, self._furthest = 0, 0
        self._runtime_ends, self._beyond = False, False
        # Ranges that edits cleared since the last interruption, in an order to clear them in.
        self.cuts: tuple[Range, ...] = ()
        self.paused_by: str | None = None  # the hook's word, if one led to the last interruption
        self.rests = False  # it came from another board paused
        self.failure: HookFailed | None = None
        self.reason: FinishReason | None = None
        self._left = self.budget  # tokens that the run may still give
        if request.continued is not None:
            self._take_over(request.continued)
        elif request.max_tokens == 0 and not self.begin_scores():
            self.reason = FinishReason.LENGTH  # nothing is asked for that needs a run

    # -- what it is ---------------------------------------------------------------------------

    @property
    def want(self) -> RunSignal | None:
        """What the run must do now, until it has been left.

        After an EOS, or at a limit that it was given, the runtime ends by itself; it is ended
        only if it goes on, as 1.3.0 does with models whose EOS it misreads.
        """
        if self.complete:
            return None if self._runtime_ends and not self._beyond else RunSignal.STOP
        if self._rewinding:
            return RunSignal.REWIND
        return RunSignal.PAUSE if self._pause is not None else None

    @property
    def complete(self) -> bool:
        """No run may follow: the answer is whole, or a hook failed; ``ended`` says how."""
        return self.reason is not None or self.failure is not None

    @property
    def context(self) -> Ids:
        """The ids that a run has to hold to go on: all that there are, less what was cleared."""
        return self._transcript.context

    @property
    def tokens(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids)

    @property
    def budget(self) -> int:
        """Tokens that may still be generated: what was asked for, as far as the context goes."""
        asked = self.request.max_tokens - self.tokens
        if self._context_len is not None:
            asked = min(asked, self._context_len - self._unseen - len(self.context))
        return max(0, asked)

    @property
    def partial_output(self) -> str:
        """The answer's text as far as it is certain."""
        return "".join(self._chain.shown)

    @property
    def spoken(self) -> str:
        """What was said so far, before hooks changed what is shown of it: text mode goes on so."""
        data = b"".join(slot.data for slot in self._transcript.slots)
        return data.decode(errors="replace")

    @property
    def reasoning(self) -> ReasoningSpan:
        """What the model has thought so far, before its answer."""
        return reasoning_span(self._transcript.slots, self.request.thinking)

    # -- a run --------------------------------------------------------------------------------

    def accept(self, token_id: int, data: bytes, waiting: bool = False) -> bool:
        """Take one token of the run; True where there may be something new to give out.

        ``waiting``: the runtime holds its text back until a character is whole. It becomes part of
        the answer with the tokens that complete it.
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
        """A run begins: say whether it owes the logprobs of the prompt."""
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
        """The run ended where there was no more room, which only the engine knew."""
        if not self.complete:
            self.reason, self._runtime_ends = FinishReason.LENGTH, True

    def aborted(self) -> None:
        """The answer ends here because somebody said so; what still arrives is not part of it."""
        if not self.complete:
            self.reason, self._runtime_ends = FinishReason.ABORT, False

    def interrupted(self, prompt_tokens: int = 0) -> None:
        """The run was left before the answer's end, whichever way it returned.

        What came after the decision is no part of the answer, and neither is the beginning of a
        character: whoever continues makes these tokens again. ``prompt_tokens`` is what the
        runtime has counted, for a prompt that was text. Where the context has no room for another
        token, the answer is complete.
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
        """Say the mark that ends the thoughts, which the runtime kept to itself with the run's end.

        False where that is not how the run ended, or where nothing can follow. See the quirk
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
        """The generation is over: settle the reason, release what was held back.

        A run that ended by itself before the limit and without a known EOS met an EOS that only
        the runtime knows, unless the context is full: in text mode nobody could leave room there.

        Raises:
            HookFailed: a hook did, now or before; the text before that can still be taken.
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
        """The stop string that ended the answer, None where something else did."""
        return self._chain.stopped_by if self.reason is FinishReason.STOP else None

    @property
    def pending(self) -> bool:
        """Whether ``take`` has something to return."""
        return self._handout.pending or self._prompt_scored

    def take(self) -> Delta | None:
        """Return what came since the last call, or None.

        Ids that an edit took back are not taken back here: ``tokens`` says how many count.
        """
        delta = self._handout.take(self._transcript, self.token_ids)
        if not self._prompt_scored:
            return delta
        self._prompt_told, scores = True, tuple(self._prompt_scores)
        return replace(Delta("", ()) if delta is None else delta, prompt=scores)

    @property
    def _prompt_scored(self) -> bool:
        """Whether all logprobs of the prompt are there, and nobody has them."""
        if self._prompt_told or self.request.stepwise is None:
            return False
        asked = self.request.stepwise.prompt_logprobs
        found = len(self._prompt_scores)
        return asked and 0 < found == len(self.request.prompt_ids) - 1

    # -- an edit ------------------------------------------------------------------------------

    def apply(self, edit: Edit, *, kv_positions: int, context_len: int) -> None:
        """Change an interrupted generation, or raise and change nothing.

        ``kv_positions`` is how many leading positions of ``context`` the KV cache holds. What is
        put in as the answer's own goes through the hooks as a replay does. An edit may complete
        the answer (a stop string, the limit) and may reopen one that an edit completed.

        Raises:
            StateConflict: a hook of it has failed.
            RequestError: the edit asks for something that is not there.
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

    # -- inside -------------------------------------------------------------------------------

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
        """Make one piece of the tokens that had to wait for each other."""
        text = self._characters.feed(b"".join(slot.data for slot in self._open))
        piece = AnswerPiece(tokens - 1, tuple(slot.token_id for slot in self._open), text)
        self._open.clear()
        return piece

    def _feed_newest(self) -> None:
        """Lead the newest tokens through the hooks, and do what these say."""
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
        """Change the context now, so that the text goes out; the run is left as soon as it can."""
        self._rewinds = 1 if self.tokens > self._furthest else self._rewinds + 1
        self._furthest = max(self._furthest, self.tokens)
        if self._rewinds > REWINDS_WITHOUT_PROGRESS:
            reason = f"it replaced {self._rewinds} times and the answer got no further"
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
        """Take over what an edit, or a hook, has made of the transcript."""
        before, self._transcript = self._transcript, changed
        same_slots = common_prefix(before.slots, changed.slots)
        self._handout.rewrite(common_prefix(self.token_ids, changed.answer), same_slots)
        self._replay()

    def _take_over(self, continued: FailoverState) -> None:
        """Be what the generation has become on another board.

        The last piece may have asked for a pause that nobody has heard of: that holds here. Any
        other word of a hook has been followed there.
        """
        request = self.request
        self._prompt_told = continued.scored
        prompt = request.prompt_ids if continued.prompt_ids is None else continued.prompt_ids
        self._transcript = Transcript(prompt, continued.slots)
        given = len(self._transcript.answer)
        self._handout = PendingDelta(
            prompt, continued.slots, given, continued.text, scored=self._scored
        )
        heard = continued.pause_over or continued.paused is not None
        with self._hooked():
            self._replay(newest=not heard)
        self.paused_by = self._pause if continued.paused is None else continued.paused.by
        self.rests = not self.complete and not (self._pause is None and continued.paused is None)
        self._pause, self._rewinding = None, False
        self._make_room()

    def _replay(self, *, newest: bool = False) -> None:
        """Lead the whole answer through fresh hooks, after what it consists of has changed.

        ``newest``: the last piece has just come, as far as anybody knows.
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
            self._characters.drop()  # nothing completes a character across this border
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
        """Compare what is shown with what was given out."""
        self._handout.show(self.partial_output)
