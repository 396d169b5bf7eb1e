"""Stepwise runs: the library computes logits, and the engine chooses each token.

For the board it is a run like any other. An abort takes effect between two steps. The output are
frames of tokens, each after a frame of its log-probabilities if those were requested. ``sampling``
chooses the tokens.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rkserve.core.errors import ConfigError, StepsRefused
from rkserve.models.files import Vocabulary, read_vocabulary
from rkserve.native import engine_frames
from rkserve.native.engine import commands
from rkserve.native.engine.speculative_grammar import Detokenizer, SpeculativeRun
from rkserve.native.engine_frames import Ids, StepParams
from rkserve.native.runtime import EvaluateMode, Matrix, Perf, RunEnd, Runtime, TokenInput
from rkserve.sampling.draw import Allowed, Row, Sampler, score, scores
from rkserve.sampling.grammar import GrammarCompiler, GrammarMatcher

_FLOAT = 4
_ROWS_PER_FRAME = 256  # of log-probabilities


@dataclass(frozen=True, slots=True)
class LogitsMemory:
    """Memory limits for logits: the library returns a row for each position, needed or not.

    ``part_bytes`` limits each part of a context that is sent in parts, ``context_bytes`` a context
    that has to be sent whole.
    """

    part_bytes: int = 64 << 20
    context_bytes: int = 1 << 30


class _Feed:
    """Sends tokens to the library and returns their logits."""

    def __init__(
        self, runtime: Runtime, adapter: str | None, room: LogitsMemory, *, history: bool, size: int
    ) -> None:
        """``size`` is the vocabulary's. Without ``history`` the KV cache keeps nothing."""
        self._room = room
        self._runtime, self.adapter, self._history = runtime, adapter, history
        self._row_bytes = max(1, size) * _FLOAT
        self._sent: list[int] = []

    @property
    def room(self) -> int | None:
        """The limit of positions per call; None if a context is sent in parts."""
        return None if self._history else self._room.context_bytes // self._row_bytes

    def parts(self, ids: Ids, *, all_rows: bool) -> Iterator[NDArray[np.float32]]:
        """Send the prompt in parts; yield the rows of each part, or only its last one."""
        self._sent += ids
        step = max(1, self._room.part_bytes // self._row_bytes) if self._history else len(ids)
        for at in range(0, len(ids), step):
            yield self._rows(ids[at : at + step], last=not all_rows)

    def whole(self, ids: Ids) -> Row:
        """Send a context whole; return the logits after it."""
        last: Row = self._rows(ids, last=True)[-1]
        return last

    def next(self, ids: Ids) -> Row:
        """Send tokens; return the logits after them."""
        self._sent += ids
        last: Row = self._rows(ids if self._history else tuple(self._sent), last=True)[-1]
        return last

    def catch_up(self, unsent: Ids) -> None:
        """Send all unsent tokens but the last, so that the KV cache holds the answer."""
        if self._history and len(unsent) > 1:
            self._rows(unsent[:-1], last=True)

    def _rows(self, ids: Ids, *, last: bool) -> NDArray[np.float32]:
        found: Matrix = self._runtime.evaluate(
            TokenInput(ids),
            EvaluateMode.LOGITS,
            keep_history=self._history,
            adapter=self.adapter,
            last=last,
        )
        return np.frombuffer(found.data, np.float32).reshape(found.rows, found.columns)


class StepwiseRuns:
    """The stepwise runs of one engine process; ``put`` sends its frames."""

    def __init__(self, put: Callable[[bytes], None], room: LogitsMemory | None = None) -> None:
        self._put = put
        self._room = LogitsMemory() if room is None else room
        self._known: tuple[Path, Vocabulary] | None = None
        self._guides = GrammarCompiler()

    def run(
        self,
        runtime: Runtime,
        run_id: int,
        params: Mapping[str, Any],
        ids: Ids,
        left: Callable[[], bool],
    ) -> dict[str, Any]:
        """Generate until the end, or until ``left`` returns True; return the facts of the end.

        Raises:
            StepsRefused: the model cannot generate stepwise, or the grammar allows no next token.
            NativeError: the library failed.
        """
        steps = StepParams.read(params["steps"])
        vocabulary = self._vocabulary(steps.tokenizer)
        history = params["keep_history"]
        feed = _Feed(runtime, params["adapter"], self._room, history=history, size=len(vocabulary))
        limit = _limit(steps, len(ids), feed.room)
        trail = None
        if steps.wanted.guide is not None:
            trail = self._guides.follow(steps.wanted.guide, vocabulary, steps.eos, steps.generated)
        if trail is not None and steps.optimistic:
            return self._optimistic(
                runtime, run_id, steps, ids, limit=limit, feed=feed, trail=trail, left=left
            )
        run = _Run(run_id, steps, vocabulary, feed, self._put, trail=trail)
        begun_s = time.monotonic()
        row = run.begin(ids, left)
        first_s = time.monotonic()
        emitted = 0 if row is None else run.go_on(row, ids, limit, left)
        ended = _ended(len(ids), emitted, begun_s, first_s)
        positions = commands.positions(runtime)
        return {**ended, "kv_positions": positions, "cut": emitted == limit < steps.limit}

    def _optimistic(
        self,
        runtime: Runtime,
        run_id: int,
        steps: StepParams,
        ids: Ids,
        *,
        limit: int,
        feed: _Feed,
        trail: GrammarMatcher,
        left: Callable[[], bool],
    ) -> dict[str, Any]:
        begun_s, first_s = time.monotonic(), list[float]()

        def put(frame: bytes) -> None:
            if not first_s:
                first_s.append(time.monotonic())
            self._put(frame)

        speech = Detokenizer(self._vocabulary(steps.tokenizer))
        run = SpeculativeRun(
            runtime,
            run_id,
            steps,
            adapter=feed.adapter,
            trail=trail,
            speech=speech,
            put=put,
            logits=feed.whole,
        )
        emitted = run.go_on(ids, limit, left)
        ended = _ended(len(ids), emitted, begun_s, *(first_s or [time.monotonic()]))
        cut = emitted == limit < steps.limit
        positions = commands.positions(runtime)
        return {**ended, "kv_positions": positions, "cut": cut, "aborted": run.aborted}

    def _vocabulary(self, file: Path) -> Vocabulary:
        if self._known is None or self._known[0] != file:
            try:
                self._known = (file, read_vocabulary(file))
            except ConfigError as exc:
                raise StepsRefused(exc.message) from exc
        return self._known[1]


def _ended(sent: int, emitted: int, begun_s: float, first_s: float) -> dict[str, Any]:
    perf = Perf(
        prefill_ms=(first_s - begun_s) * 1e3,
        prefill_tokens=sent,
        decode_ms=(time.monotonic() - first_s) * 1e3,
        decode_tokens=emitted,
        memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )
    return {"end": RunEnd.FINISHED.value, "return_code": 0, "perf": asdict(perf)}


def _limit(steps: StepParams, sent: int, room: int | None) -> int:
    """Return the token limit. Raises ``StepsRefused`` if the prompt does not fit."""
    if room is None:
        return steps.limit
    if sent > room:
        raise StepsRefused(
            f"the context has {sent} tokens; the limit is {room}, because this board's runtime "
            "computes the logits of a whole context at once"
        )
    return min(steps.limit, room - sent + 1)


class _Run:
    """One stepwise run."""

    def __init__(
        self,
        run_id: int,
        steps: StepParams,
        vocabulary: Vocabulary,
        feed: _Feed,
        put: Callable[[bytes], None],
        *,
        trail: GrammarMatcher | None,
    ) -> None:
        self._trail = trail
        self._run_id, self._steps, self._feed, self._put = run_id, steps, feed, put
        self._vocabulary = vocabulary
        self._top = steps.wanted.top_logprobs

    def begin(self, ids: Ids, left: Callable[[], bool]) -> Row | None:
        """Send the context; return the logits of the next token, or None for an aborted run."""
        row: Row | None = None
        at = 0
        for rows in self._feed.parts(ids, all_rows=self._steps.prompt):
            row = rows[-1]
            if self._steps.prompt:
                self._tell_prompt(rows, ids[at + 1 : at + 1 + len(rows)])
                at += len(rows)
            if left():
                return None
        return row

    def _tell_prompt(self, rows: NDArray[np.float32], follow: Sequence[int]) -> None:
        # The last row of the prompt belongs to the answer's first token.
        found = iter(scores(rows[: len(follow)], follow, self._top or 0))
        while part := list(islice(found, _ROWS_PER_FRAME)):
            self._put(engine_frames.pack_scores(self._run_id, part, prompt=True))

    def go_on(self, row: Row, ids: Ids, limit: int, left: Callable[[], bool]) -> int:
        """Choose and send tokens; return their number."""
        steps, wanted = self._steps, self._steps.wanted
        sampler = Sampler(
            steps.sampling,
            seed=wanted.seed,
            choice=wanted.choice,
            min_p=wanted.min_p,
            logit_bias=wanted.logit_bias,
            context=(*steps.held, *ids),
            generated=steps.generated,
            ends=steps.eos,
            least=wanted.least,
        )
        speech, size = Detokenizer(self._vocabulary), len(self._vocabulary)
        emitted, unsent = 0, list[int]()
        while emitted < limit:
            token_id = self._only_way()
            if token_id is None:
                if unsent:
                    row = self._feed.next(tuple(unsent))
                    unsent.clear()
                token_id = sampler.choose(row[:size], self._allowed())  # the rest is padding
            if token_id is None:
                raise StepsRefused("the grammar allows no next token")
            self._emit(row, token_id, *speech.text_of(token_id))
            sampler.take(token_id)
            unsent.append(token_id)
            emitted += 1
            if token_id in steps.eos or self._is_over(token_id) or left():
                break
        self._feed.catch_up(tuple(unsent))
        return emitted

    def _only_way(self) -> int | None:
        """Return the only token that the grammar allows; it needs no logits.

        None if there are several, or if log-probabilities were requested.
        """
        return None if self._trail is None or self._top is not None else self._trail.only()

    def _allowed(self) -> Allowed | None:
        return None if self._trail is None else self._trail.allowed()

    def _is_over(self, token_id: int) -> bool:
        """Advance the grammar by a token; return True if it ends there."""
        if self._trail is None:
            return False
        self._trail.take(token_id)
        return self._trail.over

    def _emit(self, row: Row, token_id: int, text: bytes, waiting: bool) -> None:
        frame = engine_frames.pack_token(self._run_id, 0, token_id, text, waiting)
        if self._top is not None:
            found = [score(row, token_id, self._top, self._steps.wanted.also)]
            frame = engine_frames.pack_scores(self._run_id, found, prompt=False) + frame
        self._put(frame)
