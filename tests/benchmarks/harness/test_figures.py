"""The benchmark's arithmetic. No cluster."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.harness.exchange import Exchange, HangUp
from benchmarks.harness.figures import (
    Spread,
    board_rates,
    decode_rate,
    flaws,
    flaws_of_hang_ups,
    freed_ms,
    gaps_ms,
    never_idle_rate,
    ratio,
    tokens_between,
    ttft_ms,
    whole_rate,
)
from benchmarks.serving.summary import hang_up_figures
from rkserve.bench.processes import BenchFailed
from tests.support.values.bench_answers import (
    answer,
    back_to_back,
    left_at,
)


def test_a_ratio_is_that_of_the_medians_and_lies_in_its_interval() -> None:
    rng = random.Random(1)
    alone = [100 + rng.gauss(0, 2) for _ in range(30)]
    through = [value * 1.1 for value in alone]

    found = ratio(through, alone, random.Random(0))

    assert found.value == pytest.approx(1.1)
    assert found.low < 1.1 < found.high
    assert found.high - found.low < 0.05


def test_one_answer_gives_ttft_gaps_and_both_rates() -> None:
    exchange = answer(sent_s=10.0, first_s=11.0, end_s=13.0)

    assert ttft_ms(exchange) == pytest.approx(1000)
    assert gaps_ms(exchange) == pytest.approx([500] * 4)
    assert decode_rate(exchange) == pytest.approx(4 / 2)
    assert whole_rate(exchange) == pytest.approx(5 / 3)


def test_a_board_that_is_never_idle_pays_for_its_prefills() -> None:
    runs = [answer(0, 1, 2), answer(100, 101, 103)]

    assert never_idle_rate(runs) == pytest.approx(10 / 5)


@pytest.mark.parametrize("offset_s", [0.0, 0.3, 1.1, 1.9])
def test_a_boards_rate_does_not_depend_on_where_the_window_cuts_its_cycle(offset_s: float) -> None:
    runs = back_to_back("sim-0", 20, offset_s)

    rates = board_rates(runs, start_s=7.0, end_s=21.5, load_end_s=30.0)

    assert rates == {"sim-0": pytest.approx(2.5)}


def test_a_board_that_pauses_or_stops_pays_for_it() -> None:
    with_pause = [*back_to_back("sim-0", 5), *back_to_back("sim-0", 5, offset_s=20.0)]
    stops = back_to_back("sim-1", 5)

    rates = board_rates([*with_pause, *stops], start_s=4.0, end_s=28.0, load_end_s=30.0)

    assert rates["sim-0"] == pytest.approx(5 * 7 / 24)  # 7 answers between the ends at 4 and 28
    assert rates["sim-1"] == pytest.approx(5 * 3 / 26)  # 3 after the end at 4, until the load's end


def test_an_answer_that_names_no_board_is_not_taken_for_a_board_of_its_own() -> None:
    runs = [*back_to_back("sim-0", 5), *back_to_back("", 5)]
    with pytest.raises(BenchFailed, match="5 x an answer names no board"):
        board_rates(runs, start_s=0.0, end_s=9.0, load_end_s=10.0)


def test_answers_that_the_window_cuts_count_with_what_arrived_in_it() -> None:
    whole = answer(0.0, 1.0, 2.0)
    cut = Exchange(sent_s=1.0, content_s=(1.5, 2.5, 3.5), board="sim-0")

    assert tokens_between([whole, cut], 1.5, 3.0) == pytest.approx(3 + 2)


def test_answers_unfit_for_measuring_are_named_and_counted() -> None:
    fine, hung_up = answer(0, 1, 2), Exchange(sent_s=0.0)
    short = Exchange(0.0, (1.0,), 2.0, prompt_tokens=128, completion_tokens=4, cached_tokens=64)

    assert flaws([fine, hung_up], 128, 5) == []
    assert flaws([short, short, Exchange(0.0, error="HTTP 429: busy")], 128, 5) == [
        "2 x 4 completion tokens, not 5",
        "2 x 64 cached tokens, not 0",
        "1 x HTTP 429: busy",
    ]


# -- hang-ups -------------------------------------------------------------------------------------


def test_a_board_is_free_when_the_next_answer_comes_less_its_prefill() -> None:
    hang_ups = [left_at(10.0 * n, free_after_s=0.03 + 0.001 * n) for n in range(21)]

    figures = hang_up_figures(hang_ups)

    assert freed_ms(hang_ups[0]) == pytest.approx(30)
    assert figures.freed_ms.p50 == pytest.approx(40)
    assert figures.largest_ms == pytest.approx(50)
    assert figures.step_ms == pytest.approx(1000 / 16.69, rel=0.02)  # the profile's own rate
    assert flaws_of_hang_ups(hang_ups, 128, 5) == []


def test_who_waits_behind_a_hang_up_may_have_its_headers_before_it_has_a_board() -> None:
    assert flaws_of_hang_ups([left_at(5.0, board="")], 128, 5) == []


@pytest.mark.parametrize(
    ("hang_up", "flaw"),
    [
        pytest.param(
            replace(left_at(5.0), left=answer(1, 2, 3)),
            "an answer was not left in mid-stream",
            id="the client stayed to the end",
        ),
        pytest.param(
            replace(left_at(5.0), left=Exchange(4.0, board="sim-0")),
            "an answer was not left in mid-stream",
            id="it left before the first text",
        ),
        pytest.param(
            left_at(5.0, content_s=(), end_s=None),
            "nothing was answered after a hang-up",
            id="the board was never free",
        ),
        pytest.param(
            left_at(5.0, board="sim-1"),
            "the next answer came from another board",
            id="another board was free",
        ),
        pytest.param(
            left_at(5.0, content_s=(4.9, 6.0)),
            "the next answer did not wait for the hang-up",
            id="the board was free before",
        ),
        pytest.param(left_at(5.0, cached_tokens=9), "9 cached tokens, not 0", id="a reused prefix"),
    ],
)
def test_a_hang_up_that_says_nothing_of_the_board_is_named(hang_up: HangUp, flaw: str) -> None:
    assert flaws_of_hang_ups([left_at(1.0), hang_up], 128, 5) == [f"1 x {flaw}"]


def test_a_spread_counts_its_values() -> None:
    spread = Spread.of([1.0, 2.0, 6.0])

    assert (spread.count, spread.mean, spread.p50) == (3, 3.0, 2.0)
    assert spread.p99 == pytest.approx(5.92)
