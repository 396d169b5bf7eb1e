"""The node and the board name of a replica, and the setup of its log.

Ray's node table is passed in.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from rkserve.config.board_group import BoardGroupConfig
from rkserve.config.router import ADMIN_KEY_VARIABLE
from rkserve.core.errors import RkserveError
from rkserve.core.logs import ACCESS, LogRing
from rkserve.core.request_record import request_id, safe_id

HEAD = "node:__internal_head__"  # the resource that Ray gives its head node
ROUTER = "Router"  # the deployment
PYTHONS_THRESHOLD = (700, 10, 10)


@dataclass(frozen=True, slots=True)
class Node:
    """The node of a replica. ``name`` is its host name, made unique in the cluster."""

    name: str
    is_head: bool


def find_node(nodes: Sequence[Mapping[str, Any]], node_id: str) -> Node:
    """Return the node ``node_id`` of ``ray.nodes()``.

    Freshly flashed boards often share a host name; the address is then appended.
    """
    alive = {node["NodeID"]: node for node in nodes if node["Alive"]}
    mine = alive[node_id]
    host = str(mine["NodeManagerHostname"])
    namesakes = [node for node in alive.values() if node["NodeManagerHostname"] == host]
    name = host if len(namesakes) == 1 else f"{host}-{mine['NodeManagerAddress']}"
    return Node(name, HEAD in mine["Resources"])


def board_name(group: BoardGroupConfig, index: int, node: Node) -> str:
    """Return ``sim-0`` for a simulated board on the head, ``group@host`` for a real one."""
    if group.simulated is None:
        return f"{group.name}@{node.name}"
    return f"{group.name}-{index}" + ("" if node.is_head else f"@{node.name}")


class ServesRecords(logging.Filter):
    """The records of Serve's own logger: shortens refusals, drops access lines, keeps the rest.

    Serve logs every exception of a replica's method as an error with its traceback. Ours are
    answers: a client with invalid requests would fill the log and hide real faults in it. Its
    access lines are of calls between replicas, or of requests that a Router logs itself.
    """

    def __init__(self, ring: LogRing) -> None:
        super().__init__()
        self._ring = ring

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False for an access line; add any other record to the latest lines."""
        if getattr(record, ACCESS, False):
            return False
        exc = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(exc, RkserveError):
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
            record.msg, record.args = "refused: %s: %s", (type(exc).__name__, exc)
            record.exc_info = record.exc_text = None
        self._ring.handle(record)
        return True


class RequestIds(logging.Filter):
    """The last filter of Serve's handlers: the id of rkserve's request instead of Serve's.

    Serve's is the ``X-Request-ID`` of the client, whatever that wrote there.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Set the id, where there is one."""
        found = request_id()
        if found:
            record.request_id = found
        elif foreign := getattr(record, "request_id", ""):
            record.request_id = safe_id(foreign)
        return True


class ToServe(logging.Handler):
    """The handler of rkserve's own loggers: the latest lines, and Serve's handlers.

    Serve configures only its own logger, and that anew when its configuration changes.
    """

    def __init__(self, serve: logging.Logger, ring: LogRing) -> None:
        super().__init__()
        self._serve, self._ring = serve, ring
        self._ids = RequestIds()

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record on."""
        self._ring.handle(record)
        self.follow()
        for handler in self._serve.handlers:
            if record.levelno >= handler.level:
                handler.handle(record)

    def follow(self) -> None:
        """Add the filter to Serve's handlers of now."""
        for handler in self._serve.handlers:
            if self._ids not in handler.filters:
                handler.addFilter(self._ids)

    def handle(self, record: logging.LogRecord) -> bool:
        """Handle a record without a lock: each handler behind this one has its own."""
        self.emit(record)
        return True


def forget_admin_key(environ: MutableMapping[str, str]) -> None:
    """Take the operator's key out of a board's environment.

    Ray's workers inherit that of their node. A board has no use for the key, and neither have hooks
    and the children of the board.
    """
    environ.pop(ADMIN_KEY_VARIABLE, None)


def settle() -> None:
    """Leave the objects of a replica's start out of garbage collection from now on.

    A full collection of a Router took 0.19 s on a busy core, in which no token is passed on.
    """
    gc.freeze()
    gc.set_threshold(*PYTHONS_THRESHOLD)


def log_with_serve() -> LogRing:
    """Send the logs of rkserve, and the warnings of the exporter of traces, where Serve's go.

    Returns the latest lines of this process.
    """
    serve, ours = logging.getLogger("ray.serve"), logging.getLogger("rkserve")
    ring = LogRing()
    handler = ToServe(serve, ring)
    ours.handlers = [handler]
    ours.setLevel(serve.level)
    ours.propagate = False
    exporter = logging.getLogger("opentelemetry")
    exporter.handlers = [handler]
    exporter.propagate = False
    serve.filters = [one for one in serve.filters if not isinstance(one, ServesRecords)]
    serve.addFilter(ServesRecords(ring))
    handler.follow()
    return ring
