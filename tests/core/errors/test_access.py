"""Errors of access control: what of the caller's they repeat is cut."""

from __future__ import annotations

import pytest

from rkserve.core.errors import (
    KeyExists,
    KeyNotFound,
    ModelNotAllowed,
    OriginNotAllowed,
    RkserveError,
    TooManyWrongKeys,
)

LONG = "x" * 10_000


@pytest.mark.parametrize(
    "exc",
    [ModelNotAllowed("team", LONG), OriginNotAllowed(LONG), KeyNotFound(LONG), KeyExists(LONG)],
    ids=lambda exc: type(exc).__name__,
)
def test_what_the_caller_sent_is_cut(exc: RkserveError) -> None:
    assert len(exc.message) < 300
    assert "x" * 80 in exc.message


def test_too_many_wrong_keys_say_when_to_come_back() -> None:
    exc = TooManyWrongKeys(20, 7)
    assert (exc.http_status, exc.retry_after_s) == (429, 7)
    assert "20 wrong keys" in exc.message
    assert "7 s" in exc.message
