"""Names of boards as operators see them; from Ray's node table, which is passed in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rkserve.config.board_group import BoardGroupConfig

HEAD = "node:__internal_head__"  # the resource that Ray gives its head node
ROUTER = "Router"  # the deployment


@dataclass(frozen=True, slots=True)
class Node:
    """The node that a replica runs on. ``name`` is its host's, made unique in the cluster."""

    name: str
    is_head: bool


def find_node(nodes: Sequence[Mapping[str, Any]], node_id: str) -> Node:
    """Return the node ``node_id`` of ``ray.nodes()``.

    Freshly flashed boards often share a host name; there the address is added.
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
