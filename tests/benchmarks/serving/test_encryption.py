"""The measurement of the channel's encryption."""

from __future__ import annotations

from benchmarks.serving.encryption import Round, measure, table


def test_a_round_measures_both_ends_of_a_real_connection() -> None:
    clear, encrypted = measure(rounds=1, frames=100)
    for one in (*clear, *encrypted):
        assert one.board_us > 0
        assert one.router_us > 0
    assert [one.identity is not None for one in (*clear, *encrypted)] == [False, True]


def test_the_table_has_medians_and_their_ratio() -> None:
    clear = [Round(None, 1, board, 10.0) for board in (10.0, 20.0, 90.0)]
    encrypted = [Round(None, 1, board, 15.0) for board in (1.0, 30.0, 40.0)]
    assert table(clear, encrypted).splitlines()[2:] == [
        "| board | 20.0 | 30.0 | 1.50 |",
        "| Router | 10.0 | 15.0 | 1.50 |",
    ]
