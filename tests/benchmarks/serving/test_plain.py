"""The measurement beside a plain Ray Serve application."""

from __future__ import annotations

import json

import pytest

from benchmarks.serving.plain import HEAD, PREFILL_S, Side, _prefill_ms, _texts, table
from rkserve.bench.connection import Incoming


def side(name: str, head_ms: float, board_ms: float, streams: int = 8) -> Side:
    gross = {"proxy": head_ms / 2, "router": head_ms / 2, "board replica": board_ms, "gcs": 9.0}
    net = {part: ms / 2 for part, ms in gross.items()}
    return Side(name, streams, 400.0, 3.25, gross, net)


def chunk(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode()


def test_the_cost_of_a_side_is_that_of_its_parts() -> None:
    one = side("a", 1.0, 2.0)
    assert one.cost(HEAD) == pytest.approx(1.0)
    assert one.cost() == pytest.approx(12.0)
    assert one.cost(HEAD, net=True) == pytest.approx(0.5)


def test_the_table_has_the_ratio_of_head_and_of_all() -> None:
    lines = table([side("plain", 2.0, 4.0), side("ours", 0.5, 1.0)]).splitlines()
    assert lines[2] == "| plain | 8 | 400 | 3.2 | 2.000 | 1.000 | 6.000 | 3.000 |"
    assert lines[4] == "| ratio | 8 | | | 0.250 | 0.250 | 0.250 | 0.250 |"


def test_events_with_text_count_and_the_prefill_is_what_the_board_says() -> None:
    incoming = Incoming(sent_s=0.0)
    text = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
    empty = {"choices": [{"index": 0, "delta": {"content": ""}}]}
    incoming.events = [(1.0, chunk(**empty)), (2.0, chunk(**text)), (3.0, b"data: [DONE]")]
    assert _texts(incoming) == [2.0]
    assert _prefill_ms(incoming) == PREFILL_S * 1e3
    incoming.events.append((4.0, chunk(timings={"prefill_ms": 12.5})))
    assert _prefill_ms(incoming) == 12.5
