"""From outcomes to figures: what counts, where, and how sure one can be."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from rkserve.bench.figures import (
    Distribution,
    Percentile,
    Slo,
    compare,
    figures,
    parse_slo,
    percentile,
    prefix_hits,
)
from rkserve.bench.outcome import OutcomeKind, RequestOutcome
from tests.support.values.bench_load import answered, failed, played

NO_LIMITS = Slo()


LIMITED = answered(10.0, ttft_s=0.5, tokens=5, step_s=0.1)  # ends after 0.95 s


@pytest.mark.parametrize(
    ("limits", "good"),
    [
        pytest.param("", True, id="no limits"),
        pytest.param("ttft=501,itl=101,gap=101,e2e=951", True, id="all held"),
        pytest.param("ttft=499", False, id="late"),
        pytest.param("itl=99", False, id="slow"),
        pytest.param("gap=99", False, id="a silence"),
        pytest.param("e2e=949", False, id="long"),
    ],
)
def test_an_answer_is_good_within_all_limits(limits: str, good: bool) -> None:
    assert parse_slo(limits).met(LIMITED) is good
    assert not parse_slo(limits).met(failed())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("tft=3", "none of ttft, itl, gap, e2e", id="unknown"),
        pytest.param("ttft=fast", "not a limit in milliseconds", id="no number"),
        pytest.param("ttft", "not a limit", id="no value"),
        pytest.param("ttft=0", "more than 0", id="nothing"),
        pytest.param("ttft=nan", "more than 0", id="not a number"),
    ],
)
def test_bad_limits_are_named(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_slo(text)


def test_limits_are_said_in_words() -> None:
    assert str(parse_slo("ttft=500,e2e=2000")) == "TTFT ≤ 500 ms, end-to-end ≤ 2000 ms"
    assert str(NO_LIMITS) == "answered to the end"


def test_rates_count_the_window_and_errors_count_all_that_was_asked_in_it() -> None:
    outcomes = [
        answered(9.0, ttft_s=0.1),  # before the window: it warms up
        *(answered(11.0 + number) for number in range(5)),
        answered(19.9, ttft_s=2.0),  # asked in it, and answered after it
        failed(12.0),
        failed(13.0),
        failed(14.0, OutcomeKind.STALLED, "before text"),
        failed(15.0, OutcomeKind.CUT, ""),
    ]
    found = figures(played(outcomes), Slo(ttft_ms=1000))
    assert (found.asked, found.answered, found.cut) == (10, 6, 1)
    assert found.errors == {"refused 429 queue_full": 2, "stalled before text": 1}
    assert found.good == 5
    assert found.good_share == pytest.approx(5 / 9)
    assert found.offered_rate == pytest.approx(1.0)
    assert (found.answer_rate, found.goodput) == pytest.approx((0.5, 0.5))
    assert found.token_rate == pytest.approx(2.5)
    assert found.good_token_rate == pytest.approx(2.5)
    assert found.ttft_ms is not None
    assert found.ttft_ms.count == 6


def test_tokens_that_arrive_together_are_all_counted() -> None:
    found = figures(played([answered(11.0, tokens=5, completion_tokens=20)]), NO_LIMITS)
    assert found.tokens_per_event == pytest.approx(4.0)
    assert found.token_rate == pytest.approx(2.0)


def test_nothing_is_a_result_too() -> None:
    found = figures(played([]), NO_LIMITS)
    assert (found.asked, found.good_share, found.goodput) == (0, 0.0, 0.0)
    assert (found.ttft_ms, found.queue_ms) == (None, None)
    assert found.prefix.ratio is None
    assert found.prefix.of_reusable is None


def test_what_is_odd_about_answers_is_counted() -> None:
    outcomes = [
        answered(11.0, usage=False, streamed=False, continued=2, finish_reason="stop"),
        answered(12.0, board="sim-1", queue_ms=30.0, finish_reason="length"),
        failed(13.0, retry_after_s=4.0),
    ]
    found = figures(played(outcomes), NO_LIMITS)
    assert (found.without_usage, found.not_streamed, found.continued) == (1, 1, 2)
    assert found.finish_reasons == {"stop": 1, "length": 1}
    assert found.boards == {"sim-1": 1}
    assert found.queue_ms is not None
    assert found.retry_after_s is not None
    assert (found.queue_ms.p50.value, found.retry_after_s.p50.value) == (30.0, 4.0)


# -- intervals ------------------------------------------------------------------------------------


def test_the_interval_of_a_percentile_holds_the_true_one_as_often_as_it_says() -> None:
    rng, held = random.Random(1), 0
    for _ in range(1000):
        drawn = sorted(rng.random() for _ in range(400))
        found = Percentile.of(drawn, 0.9)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 0.9 <= found.high
    assert 930 <= held <= 980


@pytest.mark.parametrize(
    ("count", "share", "known"),
    [
        pytest.param(10, 0.5, True, id="a median of ten"),
        pytest.param(3, 0.5, False, id="a median of three"),
        pytest.param(100, 0.99, False, id="the largest of a hundred says nothing of p99"),
        pytest.param(1000, 0.99, True, id="p99 of a thousand"),
    ],
)
def test_too_few_answers_have_no_interval(count: int, share: float, known: bool) -> None:
    found = Percentile.of([float(number) for number in range(count)], share)
    assert (found.low is not None, found.high is not None) == (known, known)


def test_a_distribution_of_one_value_is_that_value() -> None:
    found = Distribution.of([3.0])
    assert found is not None
    assert (found.p50.value, found.p99.value, found.largest, found.count) == (3.0, 3.0, 3.0, 1)


# -- caches ---------------------------------------------------------------------------------------


def talk(session: str, *turns: tuple[int, int | None]) -> list[RequestOutcome]:
    """Turns of so many prompt tokens, of which so many were cached; each answer is of 10."""
    return [
        answered(
            11.0 + number,
            session=session,
            turn=number,
            prompt_tokens=prompt,
            completion_tokens=10,
            cached_tokens=cached,
        )
        for number, (prompt, cached) in enumerate(turns)
    ]


def test_prefix_hits_are_by_tokens_and_beside_what_a_session_could_have_reused() -> None:
    found = prefix_hits([*talk("a", (100, 0), (150, 110), (200, 0)), *talk("b", (100, 40))])
    assert (found.reporting, found.prompt, found.cached, found.hits) == (4, 550, 150, 2)
    assert found.reusable == 110 + 160
    assert found.ratio == pytest.approx(150 / 550)
    assert found.of_reusable == pytest.approx(150 / 270)


def test_servers_that_say_nothing_of_caches_have_no_hit_ratio() -> None:
    assert prefix_hits(talk("a", (100, None), (150, None))).ratio is None


# -- comparisons ----------------------------------------------------------------------------------


def test_ratios_are_of_the_same_sessions_and_their_interval_holds_them() -> None:
    sessions = [f"s{number}" for number in range(40)]
    slow = [answered(11.0, session=name, ttft_s=1.0, cached_tokens=10) for name in sessions]
    fast = [answered(11.0, session=name, ttft_s=0.25, cached_tokens=40) for name in sessions]
    found = compare(played(fast), played(slow), Slo(ttft_ms=500))
    hits, ttft = found.ratios["prefix hit ratio"], found.ratios["TTFT p50"]
    assert hits is not None
    assert ttft is not None
    assert (hits.value, hits.low, hits.high) == pytest.approx((4.0, 4.0, 4.0))
    assert ttft.value == pytest.approx(0.25)
    assert found.ratios["share within the limits"] is None  # none of the slow ones is


def test_noise_makes_an_interval_that_holds_one() -> None:
    rng = random.Random(3)
    one, other = (
        played([answered(11.0, session=f"s{n}", ttft_s=rng.expovariate(2)) for n in range(60)])
        for _ in range(2)
    )
    found = compare(one, other, NO_LIMITS).ratios["TTFT p50"]
    assert found is not None
    assert found.low < found.value < found.high
    assert found.low < 1 < found.high


def test_sessions_that_only_one_run_has_are_left_out() -> None:
    both = answered(11.0, session="both", ttft_s=1.0)
    alone = answered(11.0, session="alone", ttft_s=50.0)
    found = compare(played([both, alone]), played([both]), NO_LIMITS).ratios["TTFT p99"]
    assert found is not None
    assert found.value == pytest.approx(1.0)


# -- the load generator ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param({}, "", id="idle"),
        pytest.param({"cpu_s": 19.0}, "95% of a core", id="busy"),
        pytest.param({"lag_ms": (1.0, 80.0)}, "its loop came 79 ms late", id="held up"),
    ],
)
def test_the_load_generator_says_when_it_measures_itself(change: dict[str, Any], said: str) -> None:
    doubt = figures(played([answered()], **change), NO_LIMITS).generator.doubt
    assert said in doubt
    assert bool(doubt) == bool(said)


def test_requests_that_were_sent_late_are_told() -> None:
    found = figures(played([answered(11.0, late_s=0.2)]), NO_LIMITS).generator
    assert found.late_most_ms == pytest.approx(200)
    assert "sent 200 ms late" in found.doubt


def test_other_limits_change_what_is_good_and_nothing_else() -> None:
    run = played([answered(11.0), answered(12.0, ttft_s=3.0)])
    loose, tight = figures(run, NO_LIMITS), figures(run, Slo(ttft_ms=1000))
    assert (loose.good, tight.good) == (2, 1)
    same = {"good": 0, "good_share": 0.0, "goodput": 0.0, "good_token_rate": 0.0}
    assert replace(loose, **same) == replace(tight, **same)  # type: ignore[arg-type] # by name


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        pytest.param([3.0, 1.0, 2.0], 0.5, 2.0, id="the middle of an odd number"),
        pytest.param([1.0, 2.0, 3.0, 4.0], 0.5, 2.5, id="between two of an even number"),
        pytest.param([1.0, 2.0], 1.0, 2.0, id="the largest"),
        pytest.param([7.0], 0.99, 7.0, id="of a single value"),
        pytest.param([float(n) for n in range(101)], 0.99, 99.0, id="of a hundred"),
    ],
)
def test_percentile(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)
