"""Names of boards, from Ray's node table as a value."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from rkserve.config.board_group import BoardGroupConfig
from rkserve.core.errors import StateConflict
from rkserve.deployments.replica import HEAD, Node, RefusalsInOneLine, board_name, find_node

REAL = BoardGroupConfig.model_validate({"name": "g", "model": "m", "library": "/usr/lib/x.so"})
SIMULATED = BoardGroupConfig.model_validate({"name": "g", "model": "m", "simulated": {}})


def row(node_id: str, host: str, *, alive: bool = True, head: bool = False) -> dict[str, Any]:
    """One entry of ``ray.nodes()``."""
    return {
        "NodeID": node_id,
        "NodeManagerHostname": host,
        "NodeManagerAddress": f"10.0.0.{node_id}",
        "Alive": alive,
        "Resources": {"CPU": 4.0, **({HEAD: 1.0} if head else {})},
    }


@pytest.mark.parametrize(
    ("nodes", "name"),
    [
        pytest.param([row("1", "pi"), row("2", "opi")], "pi", id="a host name of its own"),
        pytest.param([row("1", "opi"), row("2", "opi")], "opi-10.0.0.1", id="a shared one"),
        pytest.param([row("1", "opi"), row("2", "opi", alive=False)], "opi", id="with a dead one"),
    ],
)
def test_boards_that_share_a_host_name_are_told_apart(
    nodes: list[dict[str, Any]], name: str
) -> None:
    assert find_node(nodes, "1").name == name


def test_the_head_is_known_by_the_resource_that_ray_gives_it() -> None:
    nodes = [row("1", "a", head=True), row("2", "b")]
    assert [find_node(nodes, node_id).is_head for node_id in "12"] == [True, False]


@pytest.mark.parametrize(
    ("group", "index", "node", "name"),
    [
        pytest.param(SIMULATED, 0, Node("pc", is_head=True), "g-0", id="simulated"),
        pytest.param(SIMULATED, 7, Node("pc", is_head=True), "g-7", id="the eighth"),
        pytest.param(SIMULATED, 0, Node("pc", is_head=False), "g-0@pc", id="on another node"),
        pytest.param(REAL, 0, Node("opi", is_head=False), "g@opi", id="real"),
    ],
)
def test_boards_have_names_that_operators_know(
    group: BoardGroupConfig, index: int, node: Node, name: str
) -> None:
    assert board_name(group, index, node) == name


def logged(error: Exception, caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    logger = logging.getLogger("test of Serve's logger")
    said = RefusalsInOneLine()
    logger.addFilter(said)
    try:
        raise error
    except type(error):
        logger.exception("Request failed.")
    finally:
        logger.removeFilter(said)
    return caplog.records[-1]


def test_a_refusal_is_one_line_of_information(caplog: pytest.LogCaptureFixture) -> None:
    record = logged(StateConflict("resume", "generating"), caplog)
    assert record.levelno == logging.INFO
    assert record.exc_info is None
    assert record.getMessage() == (
        "refused: StateConflict: Cannot resume a generation that is generating."
    )


def test_a_fault_keeps_its_level_and_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    record = logged(ZeroDivisionError("x"), caplog)
    assert record.levelno == logging.ERROR
    assert record.exc_info
    assert record.getMessage() == "Request failed."
