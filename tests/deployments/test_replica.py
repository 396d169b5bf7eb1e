"""Names of boards, from Ray's node table as a value; and the logs of replicas."""

from __future__ import annotations

import ast
import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from ray._common.formatters import JSONFormatter
from ray.serve._private.constants import SERVE_LOG_REQUEST_ID, SERVE_LOGGER_NAME
from ray.serve._private.logging_utils import log_access_log_filter

from rkserve.config.board_group import BoardGroupConfig
from rkserve.core.errors import StateConflict
from rkserve.core.logs import ACCESS, LogQuery, LogRing
from rkserve.core.request_record import log_for
from rkserve.deployments.replica import (
    HEAD,
    Node,
    board_name,
    find_node,
    forget_admin_key,
    log_with_serve,
)

REAL = BoardGroupConfig.model_validate({"name": "g", "model": "m", "library": "/usr/lib/x.so"})
SIMULATED = BoardGroupConfig.model_validate({"name": "g", "model": "m", "simulated": {}})


def test_a_board_forgets_the_operators_key() -> None:
    environ = {"RKSERVE_ADMIN_KEY": "secret", "PATH": "/bin"}
    forget_admin_key(environ)
    forget_admin_key(environ)
    assert environ == {"PATH": "/bin"}


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


class Kept(logging.Handler):
    """A handler that keeps records."""

    def __init__(self, lines: list[logging.LogRecord]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record)


class Serve:
    """Serve's logger as it is in a replica: handlers whose filters set Serve's own request id."""

    def __init__(self, foreign: str = "") -> None:
        self.logger = logging.getLogger("ray.serve")
        self.lines: list[logging.LogRecord] = []
        self.foreign = foreign
        self.configure()

    def configure(self) -> None:
        """Replace the handlers, as a change of the configuration does."""
        handler = Kept(self.lines)
        handler.addFilter(self._context)
        self.logger.handlers = [handler]

    def _context(self, record: logging.LogRecord) -> bool:
        if self.foreign:
            record.request_id = self.foreign
        return True


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Return Serve's logger, restored afterwards."""
    loggers = [logging.getLogger(name) for name in ("ray.serve", "rkserve", "opentelemetry")]
    before = [(one, one.handlers, one.filters, one.level, one.propagate) for one in loggers]
    made = Serve()
    made.logger.setLevel(logging.INFO)
    yield made
    for one, handlers, filters, level, propagate in before:
        one.handlers, one.filters, one.propagate = handlers, filters, propagate
        one.setLevel(level)
    log_for("")


OURS = logging.getLogger("rkserve.test")


def messages(ring: LogRing) -> list[str]:
    return [line.message for line in ring.page(LogQuery()).lines]


def refuse(logger: logging.Logger, error: Exception) -> None:
    try:
        raise error
    except type(error):
        logger.exception("Request failed.")


def test_a_refusal_is_one_line_of_information(serve: Serve) -> None:
    ring = log_with_serve()
    refuse(serve.logger, StateConflict("resume", "generating"))
    (record,) = serve.lines
    assert record.levelno == logging.INFO
    assert record.exc_info is None
    assert record.getMessage() == (
        "refused: StateConflict: Cannot resume a generation that is generating."
    )
    assert messages(ring) == [record.getMessage()]


def test_a_fault_keeps_its_level_and_its_traceback(serve: Serve) -> None:
    ring = log_with_serve()
    refuse(serve.logger, ZeroDivisionError("x"))
    (record,) = serve.lines
    assert record.levelno == logging.ERROR
    assert record.exc_info
    assert record.getMessage() == "Request failed."
    assert messages(ring)[0].endswith("ZeroDivisionError: x")


def test_serves_access_lines_are_left_to_rkserve(serve: Serve) -> None:
    ring = log_with_serve()
    serve.logger.info("CALL report OK 1ms", extra={ACCESS: True})
    assert (serve.lines, messages(ring)) == ([], [])
    OURS.info("POST /v1/chat/completions 200", extra={ACCESS: True})
    assert [record.getMessage() for record in serve.lines] == ["POST /v1/chat/completions 200"]
    assert getattr(serve.lines[0], ACCESS), "Serve's switch for access lines counts for it"


def test_a_line_has_the_id_of_rkserves_request_instead_of_serves(serve: Serve) -> None:
    serve.foreign = "who\nknows"
    ring = log_with_serve()
    OURS.info("before")
    log_for("chatcmpl-1")
    OURS.info("ours")
    serve.logger.warning("serve's")
    found = [getattr(record, "request_id", None) for record in serve.lines]
    assert found == ["who_knows", "chatcmpl-1", "chatcmpl-1"]
    assert [line.request_id for line in ring.page(LogQuery()).lines] == [
        "",
        "chatcmpl-1",
        "chatcmpl-1",
    ]


def test_lines_follow_serve_to_the_handlers_of_another_configuration(serve: Serve) -> None:
    log_with_serve()
    serve.foreign = "a b"
    serve.configure()
    OURS.info("after")
    (record,) = serve.lines
    assert record.request_id == "a_b"  # type: ignore[attr-defined]  # a filter has set it


def test_lines_below_the_level_of_a_handler_or_of_serve_are_dropped(serve: Serve) -> None:
    serve.logger.handlers[0].setLevel(logging.ERROR)
    ring = log_with_serve()
    OURS.debug("never")
    OURS.info("only kept")
    logging.getLogger("opentelemetry.sdk").error("the collector is away")
    assert [record.getMessage() for record in serve.lines] == ["the collector is away"]
    assert messages(ring) == ["only kept", "the collector is away"]


def test_with_serves_json_a_line_is_an_object_with_its_fields(serve: Serve) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JSONFormatter())
    serve.logger.handlers = [handler]
    log_with_serve()
    log_for("chatcmpl-1")
    OURS.info("POST /v1/chat/completions 200", extra={"status": 200, "boards": ["a", "b"]})
    found = json.loads(stream.getvalue())
    assert (found["request_id"], found["status"]) == ("chatcmpl-1", 200)
    assert (found["boards"], found["levelname"]) == (["a", "b"], "INFO")


def test_serve_still_has_the_filters_and_names_that_these_rely_on() -> None:
    """A release of Ray that renames them would log clients' ids, or access lines twice."""
    record = logging.LogRecord("ray.serve", logging.INFO, "", 1, "x", None, None)
    vars(record)[ACCESS] = True
    assert not log_access_log_filter(record)
    assert {SERVE_LOGGER_NAME, SERVE_LOG_REQUEST_ID} == {"ray.serve", "request_id"}


def test_a_start_collects_rarely_and_a_started_replica_as_python_does() -> None:
    program = (
        "import gc; first = gc.get_threshold(); import rkserve.deployments.replica as replica; "
    )
    program += "during = gc.get_threshold(); replica.settle(); "
    program += "print([first, during, gc.get_threshold(), gc.get_freeze_count() > 10_000])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    first, during, after, frozen = ast.literal_eval(done.stdout)
    assert first == after
    assert during[0] > 10 * first[0]
    assert frozen
