"""Prompt cache files are written and read where that pays on the board's disk."""

from __future__ import annotations

import pytest

from rkserve.board.rules.cache_costs import (
    DOUBLES_S,
    LEAST_BYTES,
    REMEMBERED,
    CacheCosts,
    ReturnStatistics,
    TransferRate,
)

MB = 1_000_000
BYTES = 28_672  # a token of Qwen2.5-1.5B
PREFILL_MS = 3.0


def links(first: int, count: int = 16) -> tuple[int, ...]:
    """The links of a context whose blocks no other one has."""
    return tuple(range(first, first + count))


def costs(mb_per_s: float | None, now_s: float = 1.0) -> CacheCosts:
    """The costs on a disk of that speed, measured now; None: not measured."""
    found = CacheCosts(BYTES, lambda: now_s)
    if mb_per_s is not None:
        for rate in (found.writing, found.reading):
            rate.observe(100 * MB, 100 / mb_per_s, now_s)
    return found


# -- rates ----------------------------------------------------------------------------------------


def test_the_first_transfer_replaces_an_estimate_and_later_ones_move_it() -> None:
    rate = TransferRate()
    assert rate.ms(100 * MB, 0.0) == 0.0  # nothing is known: tried once
    rate.set(1000.0 * MB)
    assert rate.ms(100 * MB, 0.0) == pytest.approx(100)
    rate.observe(100 * MB, 5.0, 1.0)
    assert rate.ms(100 * MB, 1.0) == pytest.approx(5000)
    rate.observe(100 * MB, 0.5, 1.0)
    assert 500 < rate.ms(100 * MB, 1.0) < 5000


@pytest.mark.parametrize(("size", "seconds"), [(LEAST_BYTES - 1, 1.0), (MB * 50, 0.0)])
def test_a_transfer_that_measures_nothing_is_ignored(size: int, seconds: float) -> None:
    rate = TransferRate()
    rate.observe(size, seconds, 1.0)
    assert rate.bytes_per_s is None


def test_a_rate_that_is_not_measured_any_more_counts_as_better_with_time() -> None:
    rate = TransferRate()
    rate.observe(20 * MB, 1.0, 1.0)
    assert rate.ms(20 * MB, 1.0 + DOUBLES_S) == pytest.approx(500)
    assert rate.ms(20 * MB, 1e12) >= 0


# -- returns --------------------------------------------------------------------------------------


def test_conversations_that_never_come_back_are_soon_not_expected_to() -> None:
    returns = ReturnStatistics()
    before = returns.chance(links(0))
    for number in range(4 * REMEMBERED):
        returns.asked(links(1000 * number), ())
        returns.displaced(links(1000 * number))
    assert returns.chance(links(9_999_000)) < 0.15 < before


def test_conversations_that_come_back_are_expected_to() -> None:
    returns = ReturnStatistics()
    for number in range(20):
        returns.displaced(links(1000 * number))
        returns.asked(links(1000 * number, 20), ())
    assert returns.chance(links(9_999_000)) > 0.8


def test_a_continued_conversation_is_rated_apart_from_those_of_one_turn() -> None:
    returns = ReturnStatistics()
    for number in range(4 * REMEMBERED):  # one-shot prompts
        returns.displaced(links(1000 * number))
    live = links(5_000_000)
    assert not returns.is_continued(live)
    returns.asked(links(5_000_000, 20), live)
    assert returns.is_continued(links(5_000_000, 20))
    assert returns.chance(links(5_000_000, 20)) > 0.5 > returns.chance(links(6_000_000))


def test_a_prompt_that_shares_less_than_half_is_no_return() -> None:
    returns = ReturnStatistics()
    returns.displaced(links(0, 16))
    returns.asked((*links(0, 7), *links(500)), ())
    assert not returns.is_continued(links(0, 16))
    returns.asked((*links(0, 8), *links(500)), ())
    assert returns.is_continued(links(0, 16))


def test_a_context_of_less_than_a_block_is_nothing_to_count() -> None:
    returns = ReturnStatistics()
    returns.displaced(())
    returns.asked((), ())
    assert returns.chance(()) == 0.3


# -- decisions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mb_per_s", "restores", "parks", "idles"),
    [
        pytest.param(None, True, True, True, id="not measured"),
        pytest.param(1000, True, True, True, id="NVMe"),
        pytest.param(200, True, True, True, id="eMMC"),
        pytest.param(80, True, True, True, id="a fast card"),
        pytest.param(20, True, False, True, id="a card: 1.4 s for what takes 3 s to compute"),
        pytest.param(5, False, False, False, id="slower than the prefill"),
    ],
)
def test_files_are_used_as_far_as_they_pay(
    mb_per_s: float | None, restores: bool, parks: bool, idles: bool
) -> None:
    found = costs(mb_per_s)
    assert found.restoring_pays(1000, 1000 * BYTES, PREFILL_MS) is restores
    assert found.parking_pays(links(0), 1000, PREFILL_MS, idle=False) is parks
    assert found.parking_pays(links(0), 1000, PREFILL_MS, idle=True) is idles
    assert found.least_tokens(256, PREFILL_MS) == (256 if restores else 0)


def test_a_file_that_is_mostly_of_no_use_must_pay_for_all_that_is_read() -> None:
    found = costs(20)
    assert found.restoring_pays(500, 1000 * BYTES, PREFILL_MS)
    assert not found.restoring_pays(400, 1000 * BYTES, PREFILL_MS)


def test_before_the_first_prefill_files_are_used() -> None:
    found = costs(1)
    assert found.restoring_pays(1, 1000 * BYTES, None)
    assert found.parking_pays(links(0), 1000, None, idle=False)


def test_a_model_with_a_large_kv_cache_and_a_fast_prefill_needs_a_faster_disk() -> None:
    found = costs(20)  # Qwen3-0.6B
    assert not found.restoring_pays(1000, 1000 * 114_688, 2.18)
    fast = costs(200)
    assert fast.restoring_pays(1000, 1000 * 114_688, 2.18)


def test_a_transfer_too_short_to_notice_is_no_cost() -> None:
    found = costs(1000)
    assert found.restoring_pays(100, 100 * BYTES, 0.01)  # 3 ms for what takes 1 ms to compute
    assert found.parking_pays(links(0), 100, 0.01, idle=False)
    assert not found.restoring_pays(1000, 1000 * BYTES, 0.01)
    assert not found.parking_pays(links(0), 1000, 0.01, idle=False)
