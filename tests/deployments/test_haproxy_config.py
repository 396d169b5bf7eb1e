"""HAProxy's configuration: limits from the environment, and lines of Ray's that are replaced."""

from __future__ import annotations

import pytest

from rkserve.core.errors import ConfigError
from rkserve.deployments.haproxy_config import (
    HEADER_TIMEOUT,
    MAXCONN,
    PER_ADDRESS,
    PROXIES,
    REPEATED,
    ProxyLimits,
    check_template,
    prepare_config,
)
from rkserve.http.auth import Access
from rkserve.http.openapi import GENERATION
from tests.support.http.reference_house import described_api


@pytest.mark.parametrize(
    ("given", "limits"),
    [
        pytest.param({}, ProxyLimits(10.0, 1024, ("127.0.0.0/8", "::1")), id="defaults"),
        pytest.param({HEADER_TIMEOUT: "2.5"}, ProxyLimits(header_timeout_s=2.5), id="header time"),
        pytest.param({PER_ADDRESS: "0"}, ProxyLimits(connections_per_address=0), id="no limit"),
        pytest.param(
            {PROXIES: "192.0.2.1, ::2"}, ProxyLimits(proxies=("192.0.2.1", "::2")), id="list"
        ),
        pytest.param({PROXIES: ""}, ProxyLimits(proxies=()), id="no proxies"),
    ],
)
def test_limits_are_read_from_the_environment(given: dict[str, str], limits: ProxyLimits) -> None:
    assert ProxyLimits.of(given) == limits


@pytest.mark.parametrize(
    "given",
    [
        pytest.param({HEADER_TIMEOUT: "0"}, id="no time"),
        pytest.param({HEADER_TIMEOUT: "nan"}, id="not a number"),
        pytest.param({PER_ADDRESS: "-1"}, id="negative"),
        pytest.param({PER_ADDRESS: "inf"}, id="endless"),
        pytest.param({PROXIES: "127.0.0.1 { src 0.0.0.0/0 }"}, id="words of HAProxy"),
    ],
)
def test_a_wrong_limit_is_named(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        ProxyLimits.of(given)


def test_the_installed_ray_writes_a_configuration_that_is_known() -> None:
    check_template()


KNOWN = """global
    stats socket /f/admin.sock mode 666 level admin expose-fd listeners
    maxconn 4096
defaults
    option abortonclose
    option splice-request
    option splice-response
    errorfile 502 /f/500.http
    errorfile 503 /f/500.http
    errorfile 504 /f/500.http
frontend prometheus
    bind :9101
frontend http_frontend
    bind 127.0.0.1:8000
backend default_backend
    http-request return status 404 content-type text/plain lf-string "Path '%[path]' not found."
listen stats
  bind *:8404
"""


@pytest.mark.parametrize(
    "line",
    [line for line in KNOWN.splitlines() if line.startswith(" ") and "splice-response" not in line],
)
def test_a_configuration_without_a_line_that_is_replaced_is_refused(line: str) -> None:
    prepare_config(KNOWN, ProxyLimits(), 4000)
    with pytest.raises(ConfigError, match="Unsupported HAProxy configuration"):
        prepare_config(KNOWN.replace(line, "    other"), ProxyLimits(), 4000)


@pytest.mark.parametrize(
    "line",
    [
        pytest.param("option splice-auto", id="splicing of another name"),
        pytest.param("option splice-request", id="splicing in a section of its own"),
        pytest.param("stats socket /f/second.sock mode 660", id="a second socket"),
    ],
)
def test_what_would_undo_it_elsewhere_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="in an unknown place"):
        prepare_config(f"{KNOWN}backend one\n    {line}\n", ProxyLimits(), 4000)


@pytest.mark.parametrize(
    ("files", "given", "maxconn"),
    [
        pytest.param(1 << 20, None, 10_000, id="as many as memory should be spent on"),
        pytest.param(4500, None, 1600, id="as many as there are files for"),
        pytest.param(4500, "4096", 4096, id="an operator's"),
    ],
)
def test_connections_are_limited_by_files(
    files: int, given: str | None, maxconn: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(MAXCONN, raising=False)
    if given is not None:
        monkeypatch.setenv(MAXCONN, given)
    assert f"    maxconn {maxconn}\n" in prepare_config(KNOWN, ProxyLimits(), files)


def test_generating_calls_and_no_control_call_go_to_another_router() -> None:
    generating, control = 0, 0
    for one in described_api().endpoints:
        is_repeated = one.method == "POST" and one.path.endswith(REPEATED)
        if one.method == "POST" and set(GENERATION) <= set(one.errors):
            generating += 1
            assert is_repeated, one.path
        if one.access in (Access.CONTROL, Access.OPERATE, Access.ADMIN):
            control += 1
            assert not is_repeated, one.path
    assert generating > 10
    assert control > 10
