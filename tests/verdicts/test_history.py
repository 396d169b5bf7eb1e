"""Histories: what is kept, for how long, and in how many bytes."""

from __future__ import annotations

import sys
from array import array
from dataclasses import replace

import pytest

from rkserve.core.board_report import BoardReport, BoardState
from rkserve.verdicts.history import (
    EVERY_S,
    FIGURES,
    POINTS,
    SPARK_POINTS,
    SPARKS,
    BoardHistory,
    CountHistory,
    figures_of,
)
from tests.support.values.cluster_facts import HEALTHY, board

READY, LOST = BoardState.READY, BoardState.LOST


def sample(value: float | None) -> list[float | None]:
    return [value] * len(FIGURES)


def test_the_figures_of_a_board_are_rounded_to_what_a_reader_can_use() -> None:
    found = dict(zip(FIGURES, figures_of(board(1)), strict=True))
    assert found == {
        "decode_tokens_per_s": 12.1,
        "prefill_tokens_per_s": 40.2,
        "speed_tokens_per_s": 12.4,
        "running": 1,
        "queued": 0,
        "paused": 0,
        "kv_percent": 10,
        "cached_percent": 60,
        "npu_percent": 48,
        "npu_mhz": 1000,
        "ddr_mhz": 2112,
        "temperature_c": 61,
        "memory_mb": 9000,
    }
    bare = board(1, replace(HEALTHY, npu_load=(), ddr_hz=None), prompt_tokens=0)
    unknown = {name for name, one in zip(FIGURES, figures_of(bare), strict=True) if one is None}
    assert unknown == {"cached_percent", "npu_percent", "ddr_mhz"}


def test_thirty_minutes_are_kept_and_older_samples_forgotten() -> None:
    history = BoardHistory()
    for number in range(POINTS + 7):
        history.add(LOST if number < 10 else READY, sample(number))
    assert POINTS * EVERY_S == 1800
    assert history.column(0) == list(range(7, POINTS + 7))
    assert history.spans() == [(LOST, 3), (READY, POINTS - 3)]


def test_an_unknown_figure_is_none_and_a_known_one_short() -> None:
    history = BoardHistory()
    for value in (None, 12.1, 2112):
        history.add(READY, sample(value))
    assert history.column(3) == [None, 12.1, 2112]


def test_a_spark_s_point_is_the_mean_of_half_a_minute_and_its_worst_state() -> None:
    history = BoardHistory()
    for number in range(9):
        history.add(LOST if number == 4 else READY, sample(None if number == 8 else number))
    columns, states = history.sparks()
    assert [*columns] == [*SPARKS]
    assert columns["running"] == [1, 5]  # 0, 1, 2, and 3 to 7 without the unknown one
    assert states == [(READY, 1), (LOST, 1)]
    for number in range(POINTS):
        history.add(READY, sample(number))
    assert len(history.sparks()[0]["running"]) == SPARK_POINTS


def decoding(tokens: int, ms: float, replica: str = "r-1") -> BoardReport:
    return BoardReport("b", "m", READY, replica=replica, decode_tokens=tokens, decode_ms=ms)


def test_the_speed_is_that_of_decoding_alone_over_ten_minutes() -> None:
    history = BoardHistory()

    def look(*reports: BoardReport) -> float | None:
        for report in reports:
            history.decoded(report)
            history.add(READY, sample(0))
        return history.speed_tokens_per_s

    assert look(decoding(5000, 5000.0)) is None  # from before the first look
    assert look(decoding(5050, 10_000.0)) is None  # 50 tokens are too few
    assert look(decoding(5100, 15_000.0)) == pytest.approx(10.0)
    # A new replica's counters begin at zero.
    assert look(decoding(100, 5000.0, "r-2")) == pytest.approx(200 / 15)
    assert look(*[decoding(100, 5000.0, "r-2")] * 120) is None


def test_a_board_takes_the_bytes_that_the_module_states() -> None:
    history = BoardHistory()
    for _ in range(2 * POINTS):
        history.add(READY, sample(1))
    parts = [history._states, *history._columns, *history._decoded]
    assert sum(map(sys.getsizeof, parts)) <= 24_000


def counters(value: int) -> dict[str, array[int]]:
    return {"m": array("Q", (value,))}


def test_counters_of_the_past_are_found_for_each_window() -> None:
    history, day_s = CountHistory(), 86400
    end_s = 4 * day_s
    for now_s in range(0, end_s + 1, 5):
        history.add(float(now_s), counters(now_s))
    for window_s, slack_s in (
        (300, 15),
        (1800, 15),
        (3600, 300),
        (6 * 3600, 3600),
        (3 * day_s, 3600),
    ):
        found = history.before(end_s - window_s)["m"][0]
        assert end_s - window_s - slack_s <= found <= end_s - window_s
    kept = [len(level) for level in history._levels]
    assert kept == [241, 73, 73]


def test_before_the_first_counters_there_were_none() -> None:
    history = CountHistory()
    assert history.before(5.0) == {}
    history.add(100.0, counters(3))
    assert history.before(99.0) == {}
    assert history.before(100.0) == counters(3)
