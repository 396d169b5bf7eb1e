"""Ray's settings and ports: one table for every start."""

from __future__ import annotations

import pytest

from rkserve.bringup.processes import BOARD, HEAD
from rkserve.bringup.settings import (
    SETTINGS,
    NodePorts,
    board_options,
    environment_of,
    head_options,
    sent_to_boards,
    settings_of,
)


def test_each_variable_is_stated_once_with_its_reason() -> None:
    names = [one.name for one in SETTINGS]
    assert len(names) == len(set(names))
    assert all(one.reason.endswith(".") and set(one.nodes) <= {HEAD, BOARD} for one in SETTINGS)


def test_a_variable_of_the_operator_wins_except_for_the_authentication() -> None:
    given = {"RAY_worker_niceness": "5", "RAY_AUTH_MODE": "disabled", "HOME": "/root"}
    made = environment_of(BOARD, given)
    assert made["RAY_worker_niceness"] == "5"
    assert made["RAY_AUTH_MODE"] == "token"
    assert made["HOME"] == "/root"
    assert made["RAY_SERVE_METRICS_EXPORT_INTERVAL_MS"] == "5000"


@pytest.mark.parametrize(("flag", "sent"), [("1", True), ("0", False), (None, False)])
def test_boards_get_their_own_settings_and_haproxy_as_the_head_has_it(
    flag: str | None, sent: bool
) -> None:
    found = sent_to_boards({} if flag is None else {"RAY_SERVE_ENABLE_HA_PROXY": flag})
    assert ("RAY_SERVE_ENABLE_HA_PROXY" in found) is sent
    assert "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT" not in found
    assert found.items() >= settings_of(BOARD).items()


def test_no_two_options_have_one_port() -> None:
    ports = NodePorts(7000)
    options = head_options(ports, "192.0.2.1", 8265)
    used = [int(one.partition("=")[2]) for one in options if "port=" in one]
    assert sorted(used) == [*range(7000, ports.last + 1), 8265]
    assert "--block" not in options, "for which Ray stays in memory; see rkserve.bringup.ray_node"
    assert "--node-ip-address=192.0.2.1" in options
    assert not [one for one in options if "resources" in one]


def test_a_head_that_computes_and_every_board_offer_their_cpu() -> None:
    ports = NodePorts(7000)
    assert '--resources={"rkcpu": 1.0}' in head_options(ports, "192.0.2.1", 8265, cpu=True)
    options = board_options(ports, "192.0.2.1:7000", 0.5)
    assert '--resources={"rknpu": 0.5, "rkcpu": 1.0}' in options
