"""The benchmark's cases about one board: parked conversations, pauses and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.exchange import Exchange
from benchmarks.harness.processes import BenchCrew
from benchmarks.harness.prompts import SMALL_PROFILE
from benchmarks.serving.oneboard_figures import (
    BatchRun,
    flaws_of_batch,
    flaws_of_interrupted,
    flaws_of_parked,
    parked_figures,
    pause_figures,
)
from benchmarks.serving.summary import verdicts
from tests.support.values.bench_answers import answer, batches, interrupted, parked_round

# -- (e) ------------------------------------------------------------------------------------------


def test_a_returning_conversation_is_held_to_a_cold_one_and_its_guest_to_a_calm_one() -> None:
    learning = [parked_round(n, cached_tokens=1005 * (n > 1)) for n in range(4)]

    figures = parked_figures([parked_round(n) for n in range(5)], learning)

    assert (figures.rounds, figures.learning_rounds, figures.learning_anew) == (5, 4, 2)
    assert figures.ttft.value == pytest.approx(0.25)
    assert figures.displacing.value == pytest.approx(4.0)
    assert (figures.prompt_tokens, figures.cached_tokens) == (1027, 1005)
    assert (figures.prefill_tokens, figures.new_tokens, figures.most_beyond_new) == (22, 22, 0)
    assert figures.save_ms.p50 == pytest.approx(600)
    assert figures.unsaved_ms.p50 == pytest.approx(0)


@pytest.mark.parametrize(("prefilled", "reached"), [(22, True), (23, True), (24, False)])
def test_a_returning_conversation_may_prefill_its_new_tokens_and_the_one_that_no_run_computed(
    prefilled: int, reached: bool
) -> None:
    rounds = [parked_round(0), parked_round(1, prefill_tokens=prefilled)]

    (verdict,) = verdicts(None, None, [], parked_figures(rounds))

    assert verdict.reached is reached


@pytest.mark.parametrize(
    ("of_returned", "flaw"),
    [
        pytest.param({}, [], id="none"),
        pytest.param(
            {"cached_tokens": 0},
            ["1 x a returning conversation was computed anew"],
            id="nothing was restored",
        ),
        pytest.param({"error": "it died"}, ["it died"], id="an error"),
        pytest.param(
            {"completion_tokens": 4},
            ["1 x a returning conversation was answered too briefly"],
            id="a shorter answer",
        ),
    ],
)
def test_a_round_that_says_nothing_of_parking_is_named(
    of_returned: dict[str, Any], flaw: list[str]
) -> None:
    rounds = [parked_round(0), parked_round(1, **of_returned)]

    assert flaws_of_parked(rounds, short_tokens=128, completion_tokens=5) == flaw


# -- (f) ------------------------------------------------------------------------------------------


def test_a_pause_is_timed_to_its_last_text_and_a_resumption_to_its_first() -> None:
    figures = pause_figures([interrupted()], step_ms=100.0)

    assert (figures.kv, figures.count) == ("kept", 2)
    assert figures.answered_ms.p50 == pytest.approx((60 + 10) / 2)
    assert figures.last_ms.p50 == pytest.approx((50 + 0) / 2)  # after the second one none came
    assert figures.largest_last_ms == pytest.approx(50)
    assert figures.resumed_ms.p50 == pytest.approx((100 + 20) / 2)


@pytest.mark.parametrize(("step_ms", "reached"), [(30.1, True), (29.9, False)])
def test_a_pause_may_take_a_decode_step_and_20_ms(step_ms: float, reached: bool) -> None:
    found = [interrupted() for _ in range(100)]

    (verdict,) = verdicts(None, None, [], None, [pause_figures(found, step_ms)])

    assert verdict.measured == pytest.approx(50)
    assert verdict.reached is reached


@pytest.mark.parametrize(
    ("found", "flaw"),
    [
        pytest.param(interrupted(), [], id="none"),
        pytest.param(
            interrupted(text="abXde"),
            ["an interrupted answer says something else"],
            id="another text than without a pause",
        ),
        pytest.param(
            interrupted(kv="recomputed"),
            ["a pause with its KV cache recomputed, not kept"] * 2,
            id="another kind of pause",
        ),
        pytest.param(
            interrupted(completion_tokens=4), ["4 tokens, not 5"], id="another number of tokens"
        ),
        pytest.param(
            interrupted(content_s=(10.1, 10.2)),
            ["nothing followed a resumption"],
            id="it was at its end",
        ),
        pytest.param(interrupted(error="it died"), ["it died"], id="an error"),
        pytest.param(interrupted(end_s=None), ["an answer did not end"], id="no end"),
    ],
)
def test_an_interrupted_answer_that_says_nothing_of_pauses_is_named(
    found: Any, flaw: list[str]
) -> None:
    assert flaws_of_interrupted([found], ["abcde"], completion_tokens=5, kv="kept") == flaw


# -- (g) ------------------------------------------------------------------------------------------


def test_a_token_costs_its_share_of_a_step_and_one_slow_run_does_not_count() -> None:
    alone, together = batches().costs

    assert (alone.us_per_step, alone.us_per_token) == pytest.approx((2.0, 2.0))
    assert (together.us_per_step, together.us_per_token) == pytest.approx((2.0, 0.5))


@pytest.mark.parametrize(
    ("n_batch", "gain", "rate"),
    [
        pytest.param(1, "none", 10.0, id="alone"),
        pytest.param(1, "bound", 10.0, id="alone, where there is nothing to gain"),
        pytest.param(4, "none", 10.0, id="four without a gain"),
        pytest.param(4, "bound", 40.0, id="four with one"),
        pytest.param(4, "modest", None, id="not measured"),
    ],
)
def test_a_batchs_rate_is_that_of_all_entries(n_batch: int, gain: str, rate: float | None) -> None:
    assert batches().rate(n_batch, gain) == (rate if rate is None else pytest.approx(rate))


@pytest.mark.parametrize(
    ("run", "fits"),
    [
        pytest.param(BatchRun(8, 14, 0.0, 1.0, 0.1), True, id="all entries went on"),
        pytest.param(BatchRun(8, 13, 0.0, 1.0, 0.1), False, id="an entry ended early"),
        pytest.param(BatchRun(7, 12, 0.0, 1.0, 0.1), False, id="all ended early"),
    ],
)
def test_a_batch_is_fit_where_every_entry_went_on_to_the_limit(run: BatchRun, fits: bool) -> None:
    assert (not flaws_of_batch([run], n_batch=2, max_tokens=8)) is fits


# -- the binding alone ----------------------------------------------------------------------------


def test_a_process_with_the_binding_alone_answers_and_batches(tmp_path: Path) -> None:
    crew = BenchCrew(tmp_path, lambda _: None)
    ids = [
        crew.renderer.chat([{"role": "user", "content": f"Write 40 tokens {n}."}]).ids
        for n in (1, 2)
    ]
    try:
        with crew.batching_binding(SMALL_PROFILE, 2, time_scale=0.0, gain="none") as child:
            command = {"do": "batch", "prompts": ids, "max_tokens": 30}
            batch = BatchRun(**child.ask(command, 60))
        with crew.batching_binding(SMALL_PROFILE, 1, time_scale=0.0, gain="none") as child:
            command = {"do": "run", "ids": ids[0], "max_tokens": 30}
            alone = Exchange.from_json(child.ask(command, 60))
    finally:
        crew.close()

    assert (batch.steps, batch.tokens) == (30, 58)  # decoded; the first ones come with prefill
    assert not flaws_of_batch([batch], n_batch=2, max_tokens=30)
    assert batch.first_s < batch.last_s
    assert batch.cpu_s > 0
    assert (alone.prompt_tokens, alone.completion_tokens) == (len(ids[0]), 30)
    assert answer(0, 1, 2).content_s[0] < alone.content_s[0] <= (alone.end_s or 0.0)
