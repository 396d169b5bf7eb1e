"""Which adapters a handle has loaded; there is no unloading, only a fresh handle."""

from __future__ import annotations

import pytest

from rkserve.board.run.loaded_engine import AdapterNeed, AdapterTable
from rkserve.core.errors import AdapterBroken
from rkserve.core.messages import AdapterRef

MB = 1 << 20


def adapter(name: str, version: str = "1", digest: str = "ab" * 32) -> AdapterRef:
    return AdapterRef(name, version, digest)


A, B, C, D = (adapter(name) for name in "abcd")


def table(*loaded: AdapterRef, limit: int = 3, budget_bytes: int | None = None) -> AdapterTable:
    made = AdapterTable(limit, budget_bytes)
    for ref in loaded:
        assert made.need(ref, MB) is AdapterNeed.LOAD
        made.loaded(ref, MB)
    return made


def test_an_adapter_is_loaded_once() -> None:
    made = table(A)
    assert made.need(A, MB) is AdapterNeed.NOTHING
    assert (made.keys, made.used_bytes) == ((A.key,), MB)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(adapter("a", version="2"), id="another version"),
        pytest.param(adapter("a", digest="cd" * 32), id="another content"),
        pytest.param(AdapterRef("a", "1", "ab" * 32, scale=0.5), id="another scale"),
    ],
)
def test_what_differs_is_another_adapter(other: AdapterRef) -> None:
    assert table(A).need(other, MB) is AdapterNeed.LOAD


def test_one_that_was_asked_for_and_not_loaded_is_asked_for_again() -> None:
    made = AdapterTable(3)
    assert made.need(A, MB) is made.need(A, MB) is AdapterNeed.LOAD
    assert made.keys == ()


def test_one_too_many_needs_a_fresh_handle() -> None:
    made = table(A, B, C)
    assert made.need(D, MB) is AdapterNeed.ENGINE
    assert made.keys == (A.key, B.key, C.key), "that handle serves those it has until it is gone"


def test_the_most_recently_used_is_last() -> None:
    made = table(A, B, C)
    assert made.need(A, MB) is AdapterNeed.NOTHING
    assert made.keys == (B.key, C.key, A.key)


def test_bytes_count_too() -> None:
    made = table(A, B, limit=10, budget_bytes=3 * MB)
    assert made.need(C, MB) is AdapterNeed.LOAD
    assert made.used_bytes == 2 * MB
    assert made.need(C, MB + 1) is made.need(C, 3 * MB) is AdapterNeed.ENGINE


def test_one_that_no_handle_could_hold_is_refused_with_the_numbers() -> None:
    with pytest.raises(AdapterBroken, match=r"'a@1'.* 3000 bytes.* 2000 bytes") as refused:
        AdapterTable(3, budget_bytes=2000).need(A, 3000)
    assert refused.value.http_status == 400


def test_one_that_the_runtime_refused_is_not_tried_again_on_that_handle() -> None:
    made = table(A)
    made.refused(B, "E rkllm: invalid lora")
    with pytest.raises(AdapterBroken, match=r"'b@1' .*: E rkllm: invalid lora"):
        made.need(B, MB)
    assert made.need(A, MB) is AdapterNeed.NOTHING, "the others are unharmed"
