"""A server's address and key."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rkserve.bench.target import Target
from tests.support.http.fake_openai import FakeOpenAi, serving


@pytest.fixture
def server() -> Iterator[FakeOpenAi]:
    with serving() as fake:
        yield fake


def test_a_key_is_not_shown() -> None:
    assert "secret" not in repr(Target("server", "http://a", "ok", key="secret"))


@pytest.mark.parametrize(
    ("url", "base", "address"),
    [
        pytest.param("http://h", "/v1", ("h", 80), id="bare"),
        pytest.param("http://h:8000/", "/v1", ("h", 8000), id="slash"),
        pytest.param("https://h/openai/v1", "/openai/v1", ("h", 443), id="path"),
        pytest.param("http://[::1]:9/v1/", "/v1", ("::1", 9), id="ipv6"),
    ],
)
def test_a_base_url_is_read_as_openais_clients_read_it(
    url: str, base: str, address: tuple[str, int]
) -> None:
    target = Target("server", url, "m")
    assert (target.base, target.address) == (base, address)
