"""HAProxy before the Routers, as far as no Ray is needed: who is hidden, and what turns it on."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from rkserve.deployments.front import FLAG, environ, is_loopback
from rkserve.deployments.guard import check_operator
from rkserve.deployments.keys import Keys
from rkserve.errors import Forbidden


@pytest.mark.parametrize(
    ("host", "alone"),
    [
        pytest.param("127.0.0.1", True, id="this machine"),
        pytest.param("127.0.0.5", True, id="another of its addresses"),
        pytest.param("::1", True, id="in version 6"),
        pytest.param("localhost", True, id="by name"),
        pytest.param("0.0.0.0", False, id="every interface"),
        pytest.param("::", False, id="every interface, version 6"),
        pytest.param("192.0.2.1", False, id="an address of the network"),
        pytest.param("board.example.org", False, id="a name"),
        pytest.param(None, False, id="nothing"),
        pytest.param("", False, id="an empty word"),
    ],
)
def test_only_addresses_of_this_machine_hide_nobody(host: str | None, alone: bool) -> None:
    assert is_loopback(host) is alone


def test_two_rays_of_a_machine_share_neither_files_nor_ports(tmp_path: Path) -> None:
    ports = itertools.count(1)
    one, two = (environ(tmp_path / name, ports) for name in ("one", "two"))
    assert one[FLAG] == two[FLAG] == "1"
    own = {name for name in one if one[name] != two[name]}
    assert own == {
        name for name in one if any(w in name for w in ("PATH", "LOC", "STATE", "_PORT"))
    }


def request(client: tuple[str, int] | None) -> Request:
    """A call that comes from there."""
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/pause",
        "headers": [],
        "client": client,
    }
    return Request(scope)


def test_a_caller_that_is_hidden_is_not_taken_for_a_program_of_this_machine() -> None:
    check_operator(request(("127.0.0.1", 1)), Keys())
    with pytest.raises(Forbidden, match="Without an admin key"):
        check_operator(request(None), Keys())
