"""An answer of HTTP as it arrives: however the network cuts it, and whatever its status."""

from __future__ import annotations

import json

import pytest

from benchmarks.harness.exchange import (
    read_exchange,
)
from rkserve.bench.connection import Incoming
from tests.support.values.bench_answers import EVENTS, HEAD, chunked


@pytest.mark.parametrize("size", [1, 2, 7, 64, 100_000])
def test_it_does_not_matter_how_the_network_cuts_an_answer(size: int) -> None:
    wire = HEAD + b"".join(chunked(EVENTS))
    incoming = Incoming(sent_s=0.0)
    for at in range(0, len(wire), size):
        incoming.feed(wire[at : at + size], 1.0)

    exchange = read_exchange(incoming)

    assert incoming.done
    assert (len(exchange.content_s), exchange.completion_tokens) == (2, 2)
    assert exchange.error == ""


def test_a_refusal_is_an_error_with_the_servers_words() -> None:
    body = json.dumps({"error": {"message": "busy"}}).encode()
    incoming = Incoming(sent_s=0.0)
    incoming.feed(b"HTTP/1.1 429 Too Many\r\ncontent-length: %d\r\n\r\n" % len(body), 1.0)
    assert not incoming.done
    incoming.feed(body, 2.0)

    assert incoming.done
    assert read_exchange(incoming).error == 'HTTP 429: {"error": {"message": "busy"}}'
