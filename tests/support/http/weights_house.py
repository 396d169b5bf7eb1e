"""A Router without Ray whose Coordinator has weights."""

from __future__ import annotations

from typing import Any

from rkserve.control.calls import StoredArtifact
from rkserve.core.desired_state import BaseVersion, Desired
from rkserve.core.errors import ArtifactNotFound
from rkserve.models.files import Parameter
from tests.support.boards.fake_boards import FakeBoards
from tests.support.boards.fakes import run_loop
from tests.support.cluster.fake_head import FakeHead, line, version
from tests.support.http.router_house import House

MODEL = "sim-chat"

BASE = BaseVersion(MODEL, "step-7", "b" * 64, 5678)

UPDATE = "/receive_weight_update"

DISK = "/update_weights_from_disk"

WEIGHTS = "/v1/weights"


def house(**head: Any) -> House:
    """A Coordinator that has an adapter's version v2 and base weights of step 7."""

    def find(_model: str, artifact: str) -> StoredArtifact:
        if artifact == f"{MODEL}@step-7":
            return StoredArtifact(BASE)
        if artifact == "tone@v2":
            return StoredArtifact(version(called="v2"), (Parameter("lm_head", (4, 8), "bfloat16"),))
        raise ArtifactNotFound(f"no '{artifact}'", "artifact")

    says = {"find_weights": find, "register_model": BASE, **head.pop("says", {})}
    desired = head.pop("desired", Desired(lines=(line(),)))
    return House(FakeBoards.answering("a"), head=FakeHead(desired=desired, says=says, **head))


def send(of: House, method: str, path: str, **rest: Any) -> Any:
    return run_loop(of(method, path, **rest))


def request(**changes: Any) -> dict[str, Any]:
    """PipelineRL's body, for an adapter as a whole file."""
    size = version(called="v2").size_bytes
    entry = {"name": "tone@v2", "shape": [size], "dtype": "uint8"}
    return {
        "kind": "weight_update_request",
        "version": 7,
        "parameters_info": [entry],
        "timestamp": 1.5,
        **changes,
    }
