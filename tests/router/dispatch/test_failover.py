"""A generation's progress from one board to the next."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.core.errors import (
    BoardFailed,
    BoardGone,
    EngineDied,
    EngineHung,
    PoisonRequest,
    RunFailed,
)
from rkserve.core.messages import (
    Accepted,
    AdapterRef,
    Bound,
    Delta,
    FailoverState,
    Finished,
    GenerateRequest,
    Kv,
    Paused,
    Splice,
    TokenOrigin,
    TranscriptToken,
    merged,
)
from rkserve.core.run_params import Scored
from rkserve.router.dispatch.failover import GenerationProgress
from tests.support.boards.fake_boards import finished

REQUEST = GenerateRequest("r/0", "m", (1, 2, 3), 10, use_cache="persona")
TAKEN = Accepted("a", "1.3.0", 0, version="tone@1", adapter=AdapterRef("tone", "1", "d"))
GONE = BoardGone("a", "its node died")


def course(*deltas: Delta | Paused, limit: int = 9) -> GenerationProgress:
    made = GenerationProgress(REQUEST, limit)
    made.observe(TAKEN)
    for delta in deltas:
        made.observe(delta)
    return made


def told(made: GenerationProgress) -> FailoverState:
    assert made.lost("a", GONE, 0.0) is None
    assert made.request.continued is not None
    return made.request.continued


def test_before_anything_is_lost_the_request_is_what_was_asked() -> None:
    assert course(Delta("a", (10,))).request is REQUEST


def test_ids_and_their_text_are_all_that_the_next_board_needs() -> None:
    made = course(Delta("Hé", (10,)), Delta("lo!", (11, 12), lengths=(2, 1)))
    continued = told(made)
    assert continued == FailoverState(
        slots=(
            TranscriptToken(10, "Hé".encode()),
            TranscriptToken(11, b"lo"),
            TranscriptToken(12, b"!"),
        ),
        text="Hélo!",
        bound=Bound(((0, "tone@1"),), TAKEN.adapter),
    )
    assert continued.tokens == 3
    assert made.request.use_cache is None


def test_what_has_no_token_yet_is_bound_anew_and_keeps_its_cache() -> None:
    made = course()
    assert told(made) == FailoverState()
    assert made.request.use_cache == "persona"


def test_a_splice_is_what_the_board_says_that_it_has_become() -> None:
    put_in = TranscriptToken(40, b"X", TokenOrigin.APPENDED)
    hidden = TranscriptToken(41, b"", TokenOrigin.INJECTED)
    made = course(
        Delta("abc", (10, 11, 12), lengths=(1, 1, 1)),
        Delta("X", (40,), retract=2, splice=Splice(1, (put_in, hidden), (1, 3))),
    )
    continued = told(made)
    assert continued.slots == (TranscriptToken(10, b"a"), put_in, hidden)
    assert (continued.text, continued.prompt_ids, continued.tokens) == ("aX", (1, 3), 2)
    assert made.tokens == 2


def test_the_weights_are_those_that_were_told_last() -> None:
    bound = Bound(((0, "tone@1"), (1, "tone@2")), AdapterRef("tone", "2", "e"), 7)
    made = course(Delta("a", (10,)), Delta("b", (11,), bound=bound))
    assert told(made).bound == bound
    # What the next board would begin with is not what this one has begun with.
    made.observe(replace(TAKEN, version="tone@3"))
    assert told(made).bound == bound


PAUSE = Paused("a hook", 1, Kv.KEPT)
HELD = replace(PAUSE, by="cluster")
EDITED = Delta(
    "X", (40,), splice=Splice(1, (TranscriptToken(40, b"X", TokenOrigin.APPENDED),)), paused=True
)
RESUMED = Delta("", ())


@pytest.mark.parametrize(
    ("events", "paused", "over"),
    [
        pytest.param([], None, False, id="the last token's own pause may still come"),
        pytest.param([PAUSE], PAUSE, False, id="it rests"),
        pytest.param([PAUSE, EDITED], PAUSE, False, id="an edit does not end a pause"),
        pytest.param([PAUSE, RESUMED], None, True, id="a resumption does"),
        pytest.param([PAUSE, Delta("b", (11,))], None, False, id="a token does, and may pause"),
        pytest.param([HELD], None, True, id="the cluster's pause is not the client's"),
        pytest.param([PAUSE, HELD], None, True, id="it goes on after the cluster's"),
        pytest.param([HELD, PAUSE], PAUSE, True, id="the client makes it its own"),
        pytest.param(
            [PAUSE, replace(EDITED, paused=False)], None, True, id="edited and resumed at once"
        ),
    ],
)
def test_whether_it_rests_on_the_next_board(
    events: list[Delta | Paused], paused: Paused | None, over: bool
) -> None:
    continued = told(course(Delta("a", (10,)), *events))
    assert (continued.paused, continued.pause_over) == (paused, over)


def test_a_board_that_takes_over_a_rest_tells_the_client_nothing_new() -> None:
    made = course(Delta("a", (10,)), PAUSE)
    told(made)
    assert made.observe(TAKEN) is None
    assert made.observe(replace(PAUSE, kv=Kv.RECOMPUTED)) is None
    assert made.observe(RESUMED) == RESUMED
    later = replace(PAUSE, tokens=2)
    assert made.observe(later) == later


def test_the_end_tells_of_losses_and_of_the_queue() -> None:
    made = course(Delta("a", (10,)))
    made.queued_ms = 5.0
    told(made)
    assert made.waits
    assert made.back(TAKEN, 1.0) is None
    assert made.back(Delta("b", (11,)), 1.5) == 1.5
    assert not made.waits
    end = made.observe(finished())
    assert isinstance(end, Finished)
    assert (end.timings.continued, end.timings.lost_ms, end.timings.queue_ms) == (1, 1500.0, 6.0)


@pytest.mark.parametrize(
    ("visits", "wrote"),
    [
        pytest.param([("a", 1)], ("a",), id="one"),
        pytest.param([("a", 1), ("b", 1)], ("a", "b"), id="two"),
        pytest.param([("a", 0), ("b", 1)], ("b",), id="the first gave it away before a token"),
        pytest.param([("a", 1), ("b", 0)], ("a",), id="the second was lost before a token"),
        pytest.param([("a", 1), ("a", 1)], ("a",), id="a replica that came back"),
        pytest.param([("a", 1), ("b", 1), ("a", 1)], ("a", "b"), id="each once"),
        pytest.param([("a", 0), ("b", 0)], ("b",), id="an empty answer"),
    ],
)
def test_the_end_names_the_boards_that_wrote_the_answer(
    visits: list[tuple[str, int]], wrote: tuple[str, ...]
) -> None:
    made = GenerationProgress(REQUEST, 9)
    for board, tokens in visits:
        made.observe(Accepted(board, "1.3.0", 0))
        for _ in range(tokens):
            made.observe(Delta("a", (10,)))
    end = made.observe(finished())
    assert isinstance(end, Finished)
    assert end.timings.boards == wrote


def test_a_loss_while_it_waits_for_the_next_board_is_one_wait() -> None:
    made = course()
    made.lost("a", GONE, 1.0)
    made.lost("b", GONE, 2.0)
    assert made.back(Delta("a", (10,)), 4.0) == 3.0


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        pytest.param([EngineDied, EngineDied], PoisonRequest, id="two crashes"),
        pytest.param([EngineDied, EngineHung], PoisonRequest, id="a crash and a hang"),
        pytest.param([EngineHung, BoardGone, EngineDied], PoisonRequest, id="a node in between"),
        pytest.param([RunFailed, RunFailed], RunFailed, id="two runs that are refused"),
        pytest.param([BoardGone, BoardGone], None, id="two replicas"),
        pytest.param([BoardFailed, EngineDied], None, id="one crash"),
    ],
)
def test_what_its_own_run_ends_twice_at_one_place_goes_no_further(
    losses: list[type[BoardFailed]], ends: type[Exception] | None
) -> None:
    made = course(Delta("a", (10,)))
    found = [made.lost("a", loss("a", "why"), 0.0) for loss in losses]
    assert found[:-1] == [None] * (len(losses) - 1)
    assert found[-1] is None if ends is None else isinstance(found[-1], ends)


def test_a_board_that_crashes_while_it_rests_there_says_nothing_of_it() -> None:
    made = course(Delta("a", (10,)), PAUSE)
    for _ in range(3):
        assert made.lost("a", EngineDied("a", "SIGSEGV"), 0.0) is None
    assert not made.strikes


TEXT = st.text(alphabet="aé€😀", max_size=3)
PIECES = st.lists(st.tuples(st.integers(0, 9), TEXT), min_size=1, max_size=12)


@given(st.lists(PIECES, max_size=20))
def test_however_deltas_are_merged_on_their_way_the_transcript_is_the_same(
    batches: list[list[tuple[int, str]]],
) -> None:
    single, whole = course(), course()
    for batch in batches:
        deltas = [Delta(text, (token_id,)) for token_id, text in batch]
        one = deltas[0]
        for delta in deltas:
            single.observe(delta)
        for delta in deltas[1:]:
            both = merged(one, delta)
            assert both is not None
            one = both
        whole.observe(one)
    assert told(single) == told(whole)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(Delta("", (), retract=1), id="takes back"),
        pytest.param(EDITED, id="an edit"),
        pytest.param(Delta("b", (11,), bound=Bound()), id="other weights"),
        pytest.param(Delta("tail", ()), id="text of no token"),
    ],
)
def test_what_would_be_lost_by_it_is_not_merged(second: Delta) -> None:
    assert merged(Delta("a", (10,)), second) is None
    assert merged(second, Delta("a", (10,))) is None


def test_a_long_answer_takes_little_memory() -> None:
    made = course()
    for at in range(20_000):
        made.observe(Delta("word ", (1000 + at % 50_000,)))
    kept = made._news
    assert len(kept) < 200
    size = sum(sys.getsizeof(one.token_ids) + sys.getsizeof(one.lengths) for one in kept)
    assert size + sum(sys.getsizeof(one.text) for one in kept) < 50 * 20_000
    assert told(made).tokens == 20_000


def test_logprobs_stay_with_their_ids_where_deltas_become_one() -> None:
    one, two = Scored(-1.0), Scored(-2.0, ((7, -2.0),))
    whole = merged(Delta("a", (1,), logprobs=(one,)), Delta("b", (2,), logprobs=(two,)))
    assert whole == Delta("ab", (1, 2), lengths=(1, 1), logprobs=(one, two))
    assert merged(Delta("", (), prompt=(one,)), Delta("b", (2,))) is None
