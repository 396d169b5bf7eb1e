"""Events as JSON: they come back as they were, and nothing else becomes one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.core.messages import (
    Accepted,
    AdapterRef,
    Bound,
    Delta,
    Embedded,
    Event,
    Finished,
    FinishReason,
    Kv,
    Paused,
    QueueChange,
    Splice,
    Timings,
    TokenOrigin,
    TranscriptToken,
    Usage,
    VersionSpan,
)
from rkserve.core.run_params import Scored
from rkserve.transport import codec
from rkserve.transport.codec import MalformedMessage
from tests.support.values.any_values import record_of

REF = AdapterRef("style", "v2", "ab" * 32, 0.5)
TIMINGS = Timings(1.5, 2.0, 3, 4.25, 5, 6.0)
EVENTS = [
    pytest.param(Delta("hello", (7,)), id="one token"),
    pytest.param(Delta("", ()), id="nothing at all"),
    pytest.param(Delta("ab", (1, 2), lengths=(1, 1)), id="merged"),
    pytest.param(Delta("\ud800 ü \u2028 \x00", (3,)), id="text that is no valid Unicode"),
    pytest.param(Delta("x", (), 4), id="a retraction"),
    pytest.param(
        Delta(
            "x",
            (1,),
            splice=Splice(
                3,
                (TranscriptToken(5, b"\x00\xff"), TranscriptToken(6, b"", TokenOrigin.INJECTED)),
                (1, 2),
            ),
            bound=Bound(((0, "default"), (9, "style@v2")), REF, 4),
            paused=True,
        ),
        id="an edit",
    ),
    pytest.param(Accepted("sim-0", "1.3.0", 2), id="accepted"),
    pytest.param(
        Accepted("sim-0", "1.3.0", 0, ("top_k", "x"), "style@v2", 9, REF, 4),
        id="accepted with an adapter",
    ),
    pytest.param(Accepted("sim-0", "1.3.0", 2, waits=True), id="accepted and queued"),
    pytest.param(QueueChange(waits=False), id="the end of a wait"),
    pytest.param(Paused(None, 4, Kv.KEPT), id="paused by a call"),
    pytest.param(Paused("###", 4, Kv.RECOMPUTED), id="paused by a text"),
    pytest.param(Embedded((bytes(range(256)), b"")), id="vectors"),
    pytest.param(Finished(FinishReason.LENGTH, Usage(1, 2), TIMINGS), id="finished"),
    pytest.param(
        Finished(
            FinishReason.ABORT,
            Usage(1, 2, 1),
            dataclasses.replace(TIMINGS, queue_ms=float("inf"), batch=3),
            (VersionSpan("default", 0, 2), VersionSpan("style@v2", 2, 3)),
        ),
        id="finished with versions",
    ),
    pytest.param(
        Delta("ab", (1, 2), lengths=(1, 1), logprobs=(Scored(-0.5, ((1, -0.5),)), None)),
        id="logprobs",
    ),
    pytest.param(Delta("", (), prompt=(Scored(-9999.0), Scored(-1.0))), id="of a prompt"),
]


def sent(event: Event, stream: int = 3) -> list[Any]:
    """An event after its way over the wire."""
    (item,) = codec.from_bytes(codec.to_bytes([codec.pack(stream, event)]))
    return item


@pytest.mark.parametrize("event", EVENTS)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    item = sent(event)
    assert item[0] == 3
    assert codec.unpack(item) == event


@given(st.one_of(*(record_of(kind) for kind in codec.EVENTS)))
def test_whatever_an_event_says_survives(event: Event) -> None:
    assert codec.unpack(sent(event)) == event


def test_the_usual_delta_is_short() -> None:
    assert codec.to_bytes([codec.pack(12, Delta(" the", (262,)))]) == b'[[12,0," the",[262]]]'


@pytest.mark.parametrize(
    "item",
    [
        pytest.param([1, 0], id="without fields"),
        pytest.param([1, 0, "x", 5], id="no list of ids"),
        pytest.param([1, 9, "x"], id="an unknown kind"),
        pytest.param([1, -9, "x"], id="a negative kind"),
        pytest.param([1, "Delta", "x"], id="a name for a kind"),
        pytest.param([1, 2, None, 4, "melted"], id="an unknown value of an enum"),
        pytest.param([1, 2, None, 4, "kept", 1, 2], id="too many fields"),
        pytest.param([1, 3, "stop", [1], TIMINGS.queue_ms], id="a record that is none"),
    ],
)
def test_what_is_no_event_is_refused(item: list[Any]) -> None:
    with pytest.raises(MalformedMessage):
        codec.unpack(item)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x80\x04.", id="a pickle"),
        pytest.param(b"{}", id="no list"),
        pytest.param(b"[7]", id="no list of items"),
        pytest.param(b"[[]]", id="an empty item"),
        pytest.param(b'[["1"]]', id="a stream without a number"),
        pytest.param(b"[[true]]", id="a stream that is true"),
        pytest.param(b"[" * 100_000, id="very deep"),
        pytest.param(b"\xff", id="no text"),
    ],
)
def test_what_is_no_frame_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedMessage):
        codec.from_bytes(payload)


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(int | str, id="a choice of types"),
        pytest.param(dict[str, int], id="a dictionary"),
        pytest.param(object, id="anything"),
    ],
)
def test_a_field_without_one_form_is_refused_when_the_module_is_read(kind: Any) -> None:
    with pytest.raises(TypeError, match="may not hold"):
        codec._coder(kind)
