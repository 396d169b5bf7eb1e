"""The collector of the measurement."""

from __future__ import annotations

import httpx
import pytest

from benchmarks.tracing.collector import collector

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_it_takes_spans_until_its_end() -> None:
    with collector() as url:
        assert httpx.post(f"{url}/v1/traces", content=b"spans").status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.post(f"{url}/v1/traces", content=b"spans")
