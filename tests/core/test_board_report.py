"""A board's report: a value that any later version of a Router can compare and send on."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.core.board_report import (
    BoardReport,
    BoardState,
    CacheEntry,
    Hardware,
    KvReport,
    VersionFigures,
    next_round,
)
from tests.support.paths import PROJECT

API_DOC = PROJECT / "docs" / "reference" / "api.md"
REPORT = BoardReport(
    "sim-0",
    "m",
    BoardState.READY,
    hardware=Hardware(npu_load=(1.0, 2.0), notes=("no sensor",)),
    versions=(VersionFigures("law@v1", requests=3),),
    serving=(("law", "a" * 64),),
)


@pytest.mark.parametrize(
    "value", [REPORT, KvReport("sim-0", "m", (5,), 8)], ids=lambda one: type(one).__name__
)
def test_reports_cross_processes(value: object) -> None:
    back = pickle.loads(pickle.dumps(value))
    assert back == value
    assert hash(back) == hash(value)


def test_a_report_needs_only_a_name_a_model_and_a_state() -> None:
    bare = BoardReport("b", "m", BoardState.LOADING)
    assert (bare.epoch, bare.level, bare.hardware, bare.n_batch) == (None, None, None, 1)
    assert replace(bare, state=BoardState.LOST) != bare


def test_a_report_has_no_mutable_field() -> None:
    values = [getattr(REPORT, field.name) for field in fields(REPORT)]
    assert not [value for value in values if isinstance(value, list | dict | set | bytearray)]


# A board that has stopped reports nothing any more.
SHOWN = [state for state in BoardState if state is not BoardState.STOPPED]


@pytest.mark.parametrize("state", SHOWN, ids=lambda state: state.value)
def test_every_state_of_a_board_is_documented(state: BoardState) -> None:
    pages = (PROJECT / "docs").rglob("*.md")
    assert any(f"`{state.value}`" in page.read_text(encoding="utf-8") for page in pages)


def test_a_named_cache_is_not_an_automatic_one() -> None:
    names = {field.name for field in fields(CacheEntry)}
    assert {"name", "adapter", "digest"} <= names


@pytest.mark.parametrize(
    ("now_s", "phase", "next_s"),
    [(10.0, 0.0, 11.0), (10.4, 0.0, 11.0), (10.6, 0.0, 12.0), (10.1, 0.5, 11.5), (10.9, 0.5, 11.5)],
)
def test_the_next_round_is_half_an_interval_away_at_least(
    now_s: float, phase: float, next_s: float
) -> None:
    assert next_round(now_s, 1.0, phase) == next_s


@given(st.floats(0, 1e7), st.floats(0.01, 100), st.sampled_from([0.0, 0.5]))
def test_processes_that_begin_at_any_time_meet(now_s: float, every_s: float, phase: float) -> None:
    wait_s = next_round(now_s, every_s, phase) - now_s
    assert 0.499 * every_s <= wait_s <= 1.501 * every_s
    at = next_round(now_s, every_s, phase) / every_s - phase
    assert at == pytest.approx(round(at), abs=1e-4)
