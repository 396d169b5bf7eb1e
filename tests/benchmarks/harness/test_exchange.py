"""A streamed answer as a value: its times, tokens, text and errors."""

from __future__ import annotations

import json

import pytest

from benchmarks.harness.exchange import (
    Exchange,
    read_exchange,
    read_id,
    read_text,
)
from rkserve.api.common import output
from rkserve.bench.connection import Incoming
from tests.support.values.bench_answers import EVENTS, HEAD, answer, chunk, chunked


def test_a_streamed_answer_is_timed_by_the_events_that_bring_text() -> None:
    incoming = Incoming(sent_s=1.0)
    for index, data in enumerate((HEAD, *chunked(EVENTS))):
        assert not incoming.done
        incoming.feed(data, 2.0 + index)

    assert read_exchange(incoming) == Exchange(
        sent_s=1.0,
        content_s=(5.0, 6.0),
        end_s=9.0,
        board="sim-1",
        prompt_tokens=128,
        completion_tokens=2,
        cached_tokens=3,
        queue_ms=12.5,
        prefill_ms=7.0,
    )


@pytest.mark.parametrize(
    ("events", "error"),
    [
        pytest.param(
            (chunk("a"), output.data({"error": {"message": "it died"}})), "it died", id="it says so"
        ),
        pytest.param((chunk("a"),), "the answer ended without its usage", id="it just ends"),
    ],
)
def test_an_answer_that_breaks_off_is_an_error(events: tuple[bytes, ...], error: str) -> None:
    incoming = Incoming(sent_s=0.0)
    incoming.feed(HEAD + b"".join(chunked(events)), 1.0)

    assert read_exchange(incoming).error == error


def test_the_text_and_the_id_of_a_stream_are_read_from_its_events() -> None:
    incoming = Incoming(sent_s=0.0)
    incoming.feed(HEAD + b"".join(chunked((output.PING, *EVENTS))), 1.0)

    assert read_text(incoming) == "Hello wörld"
    assert read_id(incoming) == "role"


def test_an_exchange_travels_as_json() -> None:
    exchange = answer(0.0, 1.0, 2.0)

    assert Exchange.from_json(json.loads(json.dumps(exchange.to_json()))) == exchange
