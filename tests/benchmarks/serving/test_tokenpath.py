"""Case (h): what is computed from timed answers, and what of it is reported."""

from __future__ import annotations

import pytest

from benchmarks.harness.exchange import Exchange
from benchmarks.serving.cases import Load, Loaded
from benchmarks.serving.report_cases import tokenpath_section
from benchmarks.serving.tokenpath import (
    FAST,
    PLAIN,
    PROMPT_BYTES,
    STREAMS,
    LongPrompt,
    Shown,
    Taken,
    TokenPaths,
    Way,
    ways,
)
from benchmarks.serving.tokenpath_figures import path_figures, path_verdicts
from rkserve.bench.processes import CpuUse

TOKENS = 11


def exchange(start_s: float, ttft_s: float, prefill_ms: float = 100.0) -> Exchange:
    """An answer with a token each 20 ms."""
    times = tuple(start_s + ttft_s + 0.02 * k for k in range(TOKENS))
    return Exchange(
        start_s,
        times,
        end_s=times[-1] + 0.001,
        board="sim-0",
        prompt_tokens=128,
        completion_tokens=TOKENS,
        prefill_ms=prefill_ms,
        prefill_tokens=128,
    )


def loaded(ttft_s: float, cost_ms: float, idle_ms: float = 0.0) -> Loaded:
    """Ten answers in ten seconds; every part of the path takes ``cost_ms`` for a token."""
    answers = [exchange(float(k), ttft_s) for k in range(10)]
    spent = dict.fromkeys(("proxy", "router", "board replica", "engine"), cost_ms * TOKENS * 10)
    idle = CpuUse(2, 1000.0, dict.fromkeys(("proxy", "router", "board replica"), idle_ms))
    return Loaded(Load(1, 1, 1.0), answers, 0.0, 10.0, 11.0, CpuUse(2, 10_000.0, spent), {}, idle)


def taken(way: Way, ttft_s: float, cost_ms: float, held_up_ms: float = 0.0) -> Taken:
    """A way on which one stream stands still for ``held_up_ms`` while a long prompt is read."""
    calm = exchange(0.0, 0.1)
    times = [10.0 + 0.02 * k for k in range(TOKENS)]
    late = [at_s + (held_up_ms / 1e3 if k >= 5 else 0.0) for k, at_s in enumerate(times)]
    held = Exchange(9.9, tuple(late), end_s=late[-1])
    prompts = [LongPrompt(size, 10.09, 10.12) for size in PROMPT_BYTES]
    return Taken(
        way,
        lone=loaded(ttft_s, cost_ms),
        one=loaded(ttft_s, cost_ms, idle_ms=1.0),
        many=loaded(ttft_s, cost_ms),
        shown=Shown(prompts, [calm, held], (0.1, 0.2)),
        ceiling=loaded(ttft_s, cost_ms),
    )


def paths(*found: Taken) -> TokenPaths:
    """What was measured, with a binding that adds 2 ms of its own."""
    alone = [exchange(float(k), 0.102) for k in range(3)]
    return TokenPaths(alone, list(found))


def test_what_is_added_to_ttft_is_beyond_the_runtime_s_own() -> None:
    (figures,) = path_figures(paths(taken(FAST, 0.105, 0.1)))
    # 105 ms, of which 100 are the prefill, and 2 the binding's own.
    assert figures.one.added_ms.p50 == pytest.approx(3.0)


def test_the_cost_of_a_token_is_that_of_the_path_and_is_given_without_idling_too() -> None:
    (figures,) = path_figures(paths(taken(FAST, 0.1, 0.1)))
    cost = figures.many.cost
    assert cost.gross == pytest.approx(0.3), "the engine is not on the path"
    # Three parts idle for 1 ms each second, ten seconds long, for 110 tokens.
    assert cost.net == pytest.approx(0.3 - 30 / 110)


@pytest.mark.parametrize("held_up_ms", [0.0, 35.0], ids=["nobody is held up", "one stream is"])
def test_a_long_prompt_holds_up_others_by_what_is_more_than_a_token(held_up_ms: float) -> None:
    (figures,) = path_figures(paths(taken(FAST, 0.1, 0.1, held_up_ms)))
    for shown in figures.shown:
        assert shown.largest_ms == pytest.approx(held_up_ms, abs=1e-6)
        assert shown.calm_largest_ms == pytest.approx(0.0, abs=1e-6)
        assert shown.answered_ms.p50 == pytest.approx(30.0)


def test_the_targets_hold_the_last_way_to_the_first() -> None:
    figures = path_figures(paths(taken(PLAIN, 0.3, 1.0), taken(FAST, 0.104, 0.1, 35.0)))
    verdicts = {verdict.what: verdict for verdict in path_verdicts(figures)}
    reached = {
        f"(h) CPU per token above idle at {STREAMS} streams, of the plain way's": True,
        "(h) TTFT above the runtime's own, p50, 1 stream, 1 board": True,
        f"(h) TTFT above the runtime's own, p50, 1 stream, {STREAMS} boards": True,
        f"(h) TTFT above the runtime's own, p50, {STREAMS} streams, {STREAMS} boards": True,
        "(h) a prompt of 15 KB holds up others, beyond the calm, by": False,
        "(h) a prompt of 220 KB holds up others, beyond the calm, by": False,
        "(h) tokens/s through one Router, boards that take no time": False,
    }
    assert {what: verdict.reached for what, verdict in verdicts.items()} == reached
    idle_ms = 30 / 110  # of each token
    ratio = (0.3 - idle_ms) / (3.0 - idle_ms)
    assert next(iter(verdicts.values())).measured == pytest.approx(ratio)


def test_the_plain_way_comes_first_and_the_fast_one_last_where_it_is_to_be_had() -> None:
    few, many = ways(all_of_them=False), ways(all_of_them=True)
    assert few[0] == many[0] == PLAIN
    assert set(few) <= set(many)
    assert len({(way.front, way.channel) for way in many}) == len(many)


def test_the_report_has_every_way_and_size() -> None:
    figures = path_figures(paths(taken(PLAIN, 0.3, 1.0), taken(FAST, 0.104, 0.1)))
    text = tokenpath_section(figures)
    for name in (PLAIN.name, FAST.name):
        for words in (f"{name}, 1 stream ", f"{name}, {STREAMS} streams", f"{name}, 220 KB"):
            assert f"| {words}" in text
