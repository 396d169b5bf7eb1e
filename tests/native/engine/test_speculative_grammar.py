"""Optimistic runs on a scripted library: where it is paused, resumed, ended, asked for logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pytest

from rkserve.core.errors import CallFailed, NativeError
from rkserve.core.run_params import Sampling, Stepwise
from rkserve.native import engine_frames
from rkserve.native.engine.speculative_grammar import MOST_AGREEMENTS, Detokenizer, SpeculativeRun
from rkserve.native.engine_frames import FrameReader, Ids, StepParams
from rkserve.native.runtime import (
    Perf,
    RunEnd,
    RunOutcome,
    RunParams,
    Runtime,
    Sink,
    SinkAction,
    TokenInput,
    TokenPiece,
)
from tests.support.values.grammar_walk import END, EOS, GUIDES, IDS, TOKENS, VOCABULARY, regex

GREEDY = Sampling(temperature=0.0, top_k=1, repeat_penalty=1.0)
PROMPT = (700, 701)


def letter(text: str) -> int:
    return IDS[text.encode()]


class Library:
    """It says a text, whatever it is told to have said: the place alone decides."""

    per_run_sampling = True

    def __init__(self, text: str, *, lag: int = 0, by_limit: bool = True) -> None:
        self.text, self.lag = text, lag
        self.quirks = MappingProxyType({"drain_by_limit": by_limit})
        self.kv: tuple[int, ...] = ()
        self.paused = self.aborting = self.refuses = self.sizeless = False
        self.did: list[str] = []
        self.row_text = text  # what it would say by its logits
        self.cleared = 0

    def _next(self, text: str) -> int:
        at = sum(len(VOCABULARY.bytes_of(one)) for one in self.kv[len(PROMPT) :])
        return letter(text[at]) if at < len(text) else END

    def run(self, params: RunParams, sink: Sink) -> RunOutcome:
        assert params.resume is self.paused
        assert not params.keep_history
        (given,) = params.inputs
        assert isinstance(given, TokenInput)
        self.did.append("resume" if params.resume else "run")
        if params.resume and self.refuses:
            self.paused = False
            return RunOutcome(RunEnd.FAILED, Perf(), -1)
        self.kv = (*self.kv, *given.ids) if params.resume else given.ids
        self.paused = self.aborting = False
        late: int | None = None
        for _ in range(params.max_new_tokens or 10**6):
            token_id = self._next(self.text)
            verdict = sink((TokenPiece(token_id, b""),))
            if verdict is SinkAction.PAUSE and late is None:
                late = self.lag
            if late == 0:
                self.paused = True
                return RunOutcome(RunEnd.PAUSED, Perf(), 0)
            late = None if late is None else late - 1
            if self.aborting or token_id == END:
                break
            self.kv = (*self.kv, token_id)
        return RunOutcome(RunEnd.FINISHED, Perf(), 0)

    def logits(self, ids: Ids) -> Any:
        assert not self.paused, "RKLLM computes nothing on a paused handle"
        self.did.append("logits")
        self.kv = ids
        row = np.zeros(len(VOCABULARY), np.float32)
        row[self._next(self.row_text)] = 9
        row[letter("c")] = 5
        return row

    def drain(self) -> None:
        assert self.paused
        self.paused = False
        self.did.append("drain")

    def abort(self) -> None:
        self.aborting = True
        self.did.append("abort")

    def kv_cache_sizes(self) -> tuple[int, ...]:
        if self.sizeless:
            raise CallFailed("rkllm_get_kv_cache_size", -1)
        return (len(self.kv),)

    def clear_kv_range(self, ranges: Sequence[tuple[int, int]]) -> None:
        assert self.paused
        ((start, end),) = ranges
        self.kv = self.kv[:start] + self.kv[end:]
        self.did.append("cut")

    def clear_kv_cache(self) -> None:
        assert not self.paused, "that is what crashed others"
        self.cleared += 1


def told(
    library: Library, pattern: str, limit: int = 100, left: Callable[[], bool] = lambda: False
) -> tuple[str, SpeculativeRun]:
    guide, said = regex(pattern), list[bytes]()
    steps = StepParams(
        TOKENS, GREEDY, Stepwise(1, guide=guide, free=True), EOS, limit, optimistic=True
    )
    run = SpeculativeRun(
        cast(Runtime, library),
        7,
        steps,
        adapter=None,
        trail=GUIDES.follow(guide, VOCABULARY, EOS, ()),
        speech=Detokenizer(VOCABULARY),
        put=said.append,
        logits=library.logits,
    )
    count = run.go_on(PROMPT, limit, left)
    tokens = [engine_frames.unpack_token(data) for _, data in FrameReader().feed(b"".join(said))]
    assert len(tokens) == count
    assert not library.paused, "nobody else would end that"
    return b"".join(one[3] for one in tokens).decode(), run


def test_a_library_that_follows_is_asked_nothing() -> None:
    library = Library("Abba")
    text, run = told(library, "A[ab]*")
    assert (text, library.did, library.cleared) == ("Abba", ["run"], 0)
    assert not run.aborted


def test_where_one_way_is_left_the_paused_run_goes_on_with_it() -> None:
    library = Library("Axxxbcab")
    assert told(library, "AbbbbC?[abc]*")[0] == "Abbbbcab"
    assert "logits" not in library.did
    assert library.did == ["run", "resume"]


def test_what_came_behind_the_place_is_cut_first() -> None:
    library = Library("Axxxbcab", lag=2)
    assert told(library, "AbbbbC?[abc]*")[0] == "Abbbbcab"
    assert library.did == ["run", "cut", "resume"]


def test_where_several_ways_are_left_the_logits_decide() -> None:
    library = Library("Axaab")
    assert told(library, "A[bc]a*b")[0] == "Acaab"
    assert library.did[:3] == ["run", "drain", "logits"]
    assert "run" in library.did[3:]
    assert library.cleared


def test_where_the_size_of_the_kv_cache_is_unknown_nothing_is_resumed() -> None:
    library = Library("Axxxbcab")
    library.sizeless = True
    assert told(library, "AbbbbC?[abc]*")[0] == "Abbbbcab"
    assert "resume" not in library.did


def test_a_resumption_that_is_refused_costs_a_step_and_no_answer() -> None:
    library = Library("Axxxbcab")
    library.refuses = True
    assert told(library, "AbbbbC?[abc]*")[0] == "Abbbbcab"
    assert library.did[:3] == ["run", "resume", "logits"]


def test_an_end_that_comes_too_early_is_none() -> None:
    library = Library("Ab")
    text, _ = told(library, "Ab[bc]{3}")
    assert text == "Abccc"


@pytest.mark.parametrize(("by_limit", "how"), [(True, "drain"), (False, "abort")])
def test_an_answer_that_is_over_ends_the_librarys_run(by_limit: bool, how: str) -> None:
    library = Library("abababab", by_limit=by_limit)
    text, run = told(library, "[ab]{4}")
    assert (text, library.did) == ("abab", ["run", how])
    assert run.aborted is not by_limit
    assert library.cleared == 1


@pytest.mark.parametrize("by_limit", [True, False])
def test_who_leaves_ends_it_at_the_next_token(by_limit: bool) -> None:
    library = Library("ab" * 50, by_limit=by_limit)
    asked = iter([False] * 8 + [True] * 1000)
    text, _ = told(library, "[ab]*", left=lambda: next(asked))
    assert 0 < len(text) < 10


def test_a_limit_is_kept_to_the_token() -> None:
    for most in (1, 2, 5):
        assert len(told(Library("ab" * 50), "[ab]*", limit=most)[0]) == most
        assert len(told(Library("ax" * 50), "[ac]*", limit=most)[0]) == most


def test_a_library_that_never_follows_is_tried_once() -> None:
    library = Library("x" * 100)
    assert told(library, "[abc]{60}")[0] == "c" * 60
    assert library.did.count("run") == 1


def test_one_that_only_seems_to_follow_is_tried_less_and_less() -> None:
    library = Library("x" * 300)
    library.row_text = "c" * 300
    assert told(library, "[abc]{200}", limit=300)[0] == "c" * 200
    # After 2, 4, 8, 16 and then each 32 tokens, and at first.
    assert library.did.count("run") <= 6 + 200 // MOST_AGREEMENTS


def test_a_failure_of_the_library_is_told_and_leaves_nothing_paused() -> None:
    library = Library("Axxx")

    def broken(_: Ids) -> Any:
        raise NativeError("no logits")

    library.logits = broken  # type: ignore[method-assign, assignment] # the script of this one test
    with pytest.raises(NativeError, match="no logits"):
        told(library, "A[bc]*")
    assert not library.paused
    assert library.cleared
