"""HAProxy's control port as an environment names it, and the proof in HAProxy's mark."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from rkserve.core.errors import ConfigError
from rkserve.deployments.haproxy_listeners import (
    ANY_PORT,
    CLIENT_PORT,
    CONTROL,
    CONTROL_PORT,
    ControlAddress,
    Listeners,
    proof_of,
)
from rkserve.http.auth import Listener


@pytest.mark.parametrize(
    ("given", "named", "url", "local_only"),
    [
        ("127.0.0.1:8001", "127.0.0.1:8001", "http://127.0.0.1:8001", True),
        (" 192.0.2.7:8001 ", "192.0.2.7:8001", "http://192.0.2.7:8001", False),
        ("0.0.0.0:1", "0.0.0.0:1", "http://127.0.0.1:1", False),
        ("[::1]:65535", "[::1]:65535", "http://[::1]:65535", True),
        ("[::]:8001", "[::]:8001", "http://[::1]:8001", False),
    ],
)
def test_an_address_is_named_as_in_urls(given: str, named: str, url: str, local_only: bool) -> None:
    found = ControlAddress.of({CONTROL: given})
    assert found is not None
    assert (str(found), found.url("http"), found.local_only) == (named, url, local_only)
    assert ControlAddress.of(found.environ()) == found


def test_without_the_variable_there_is_no_control_port() -> None:
    assert ControlAddress.of({}) is ControlAddress.of({CONTROL: " "}) is None


@pytest.mark.parametrize(
    "given",
    [
        *("8001", ":8001", "localhost:8001", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0"),
        *("127.0.0.1:65536", "127.0.0.1:-1", "127.0.0.1:8001 ssl", "127.0.0.1:8001\nbind :1"),
        *("[fe80::1%eth0]:8001", "127.0.0.1:\u0668", "*:8001", "127.0.0.1:8001,127.0.0.1:1"),
    ],
)
def test_anything_else_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=rf"{CONTROL}: [\s\S]* such as 127\.0\.0\.1:8001"):
        ControlAddress.of({CONTROL: given})


def test_a_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = ControlAddress("127.0.0.1", taken.getsockname()[1])
        with pytest.raises(ConfigError, match=f"control port {address} .*: it is in use. Give"):
            address.check_free()
    address.check_free()
    with pytest.raises(ConfigError, match=r"192\.0\.2\.7:1 cannot be listened on: Cannot assign"):
        ControlAddress("192.0.2.7", 1).check_free()


def test_the_words_of_the_mark_are_those_of_the_router() -> None:
    words = {ANY_PORT, CLIENT_PORT, CONTROL_PORT}
    assert words == {one.value for one in Listener} - {Listener.BESIDE.value}


def test_only_the_control_port_has_its_mark() -> None:
    (usual,) = Listeners().rules()
    assert usual == 'http-request set-header x-rkserve-listener "any"'
    first, second = Listeners(ControlAddress("127.0.0.1", 1), "5f").rules()
    assert first == 'http-request set-header x-rkserve-listener "client 5f"'
    assert second.endswith('"control 5f" if { so_name -m str rkserve_control }')


def test_all_nodes_of_a_cluster_have_one_proof_wherever_their_token_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mode = {"RAY_AUTH_MODE": "token"}
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    proof = proof_of({**mode, "RAY_AUTH_TOKEN": "secret"})
    assert proof_of(mode) == proof
    named = tmp_path / "named"
    named.write_text(" secret")
    assert proof_of({**mode, "RAY_AUTH_TOKEN_PATH": str(named)}) == proof
    assert proof_of({**mode, "RAY_AUTH_TOKEN": "another"}) != proof
    assert b"secret".hex() not in proof
    for off in ({}, {"RAY_AUTH_MODE": "disabled"}):
        assert proof_of({**off, "RAY_AUTH_TOKEN": "secret"}) == ""
    named.unlink()
    with pytest.raises(ConfigError, match=r"Ray's token .*named cannot be read"):
        proof_of({**mode, "RAY_AUTH_TOKEN_PATH": str(named)})
