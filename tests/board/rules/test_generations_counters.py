"""Counters of a board and of a generation: every figure is added up, and where it comes from."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from rkserve.board.rules.generations import BoardCounters, GenerationCounters, VersionSpans
from rkserve.core.messages import Timings, Usage
from rkserve.native.runtime import Perf

FIRST = Timings(1.0, 20.0, 30, 40.0, 50, 600.0)
SECOND = Timings(2.0, 3.0, 4, 5.0, 6, 0.0)


def test_a_board_adds_up_the_generations_that_ended_in_order() -> None:
    counters = BoardCounters()
    assert set(asdict(counters).values()) == {0}

    counters.count(Usage(100, 50, 70), FIRST)
    counters.count(Usage(10, 5, 7), SECOND)

    counted = {name: value for name, value in asdict(counters).items() if value}
    assert counted == {
        "prompt_tokens": 110,
        "cached_tokens": 77,
        "completion_tokens": 55,
        "prefill_tokens": 34,
        "prefill_ms": 23.0,
        "decode_tokens": 56,
        "decode_ms": 45.0,
        "memory_mb": 600.0,  # the last one that the runtime reported
    }


def test_a_generation_adds_up_its_runs_and_reports_milliseconds() -> None:
    counters = GenerationCounters(100, queue_s=0.5, paused_s=0.25, batch=4, batch_wait_s=0.125)
    counters.continued = 2

    counters.add(Perf(10.0, 40, 20.0, 8, 300.0, 7.0), reused=60)
    counters.add(Perf(1.0, 4, 2.0, 3, 0.0, 0.5), reused=90)

    assert counters.usage(11, 5) == Usage(100, 11, 60, 5)
    assert counters.timings() == Timings(
        queue_ms=500.0,
        prefill_ms=11.0,
        prefill_tokens=44,
        decode_ms=22.0,
        decode_tokens=11,
        memory_mb=300.0,
        paused_ms=250.0,
        batch=4,
        batch_wait_ms=125.0,
        continued=2,
        encode_ms=7.5,
    )


@pytest.mark.parametrize(
    ("prompt", "begun", "prefilled", "reused", "expected"),
    [
        pytest.param(100, 0, 40, 60, (100, 60), id="as planned"),
        pytest.param(100, 0, 90, 60, (100, 10), id="the runtime prefilled more than planned"),
        pytest.param(100, 0, 120, 60, (100, 0), id="the runtime prefilled more than there is"),
        pytest.param(100, 0, 0, 60, (100, 60), id="a run without figures keeps the plan"),
        pytest.param(100, 0, 0, 130, (100, 100), id="never more than the prompt"),
        pytest.param(0, 0, 40, 0, (40, 0), id="text mode: the runtime knows the prompt"),
        pytest.param(0, 15, 40, 0, (25, 0), id="text mode, continued"),
        pytest.param(100, 15, 20, 95, (100, 95), id="continued: begun tokens are no prompt"),
        pytest.param(0, 50, 40, 0, (0, 0), id="continued, with more begun than sent"),
    ],
)
def test_the_first_run_says_what_was_cached(
    prompt: int, begun: int, prefilled: int, reused: int, expected: tuple[int, int]
) -> None:
    counters = GenerationCounters(prompt, begun_tokens=begun)
    counters.add(Perf(prefill_tokens=prefilled), reused)
    counters.add(Perf(prefill_tokens=5), 1)
    usage = counters.usage(0)
    assert (usage.prompt_tokens, usage.cached_tokens) == expected
    assert counters.runs == 2


def test_spans_count_how_often_a_run_began() -> None:
    spans = VersionSpans()
    for tokens in (0, 3, 5):
        spans.begin("a", tokens)
    assert spans.begun == 3
