"""The measurement of a Router's core."""

from __future__ import annotations

from benchmarks.serving.routercore import LOADS, CoreFigures, CoreLoad, measure, table


def test_a_load_is_played_over_real_connections() -> None:
    found = measure(CoreLoad("paced", clients=2, tokens=8, token_s=0.01, seconds=1.0))
    assert found.answers > 0
    assert found.tokens == found.events > 8
    assert found.cpu_ms > 0


def test_the_table_has_medians_of_tokens_and_of_requests() -> None:
    paced, short = LOADS[0], LOADS[3]
    figures = [CoreFigures(1000, 1000, 10, cpu_ms, 2.0) for cpu_ms in (90.0, 100.0, 500.0)]
    assert table({paced: figures, short: figures}).splitlines()[2:] == [
        f"| {paced.name} | 500 | 100.0 | 10000 | - | 5 |",
        f"| {short.name} | 500 | 100.0 | 10000 | 10.00 | 5 |",
    ]
