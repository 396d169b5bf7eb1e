"""The node and the board name of a replica, and the setup of its log.

Ray's node table is passed in.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rkserve.config.board_group import BoardGroupConfig
from rkserve.core.errors import RkserveError

HEAD = "node:__internal_head__"  # the resource that Ray gives its head node
ROUTER = "Router"  # the deployment


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


class RefusalsInOneLine(logging.Filter):
    """Replaces Serve's traceback of a refused call by one line at level INFO.

    Serve logs every exception of a replica's method as an error with its traceback. Ours are
    answers: a client with invalid requests would fill the log and hide real faults in it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep every record, refusals shortened."""
        exc = record.exc_info[1] if isinstance(record.exc_info, tuple) else None
        if isinstance(exc, RkserveError):
            record.levelno, record.levelname = logging.INFO, logging.getLevelName(logging.INFO)
            record.msg, record.args = "refused: %s: %s", (type(exc).__name__, exc)
            record.exc_info = record.exc_text = None
        return True


def log_with_serve() -> None:
    """Send the log of ``rkserve`` to the handlers of Serve, which configures only its own
    logger.
    """
    serve, ours = logging.getLogger("ray.serve"), logging.getLogger("rkserve")
    ours.handlers = list(serve.handlers)
    ours.setLevel(serve.level)
    ours.propagate = False
    serve.addFilter(RefusalsInOneLine())
