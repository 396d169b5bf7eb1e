"""The objects of GET /v1/models; it knows reports of boards and no board."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rkserve.messages import BoardReport
from rkserve.wire.jsonbody import JsonObject

OWNER = "rkserve"


def model_entry(
    model_id: str, created: int, context_length: int, boards: Iterable[BoardReport]
) -> JsonObject:
    """Return OpenAI's Model object, with what is rkserve's own under one key.

    ``created`` is in seconds since 1970. A board that does not serve is listed with its reason.
    """
    ordered = sorted(boards, key=lambda board: board.board_id)
    return {
        "id": model_id,
        "object": "model",
        "created": created,
        "owned_by": OWNER,
        "rkserve": {
            "context_length": context_length,
            "boards": [_board(board) for board in ordered],
        },
    }


def models_list(entries: Sequence[JsonObject]) -> JsonObject:
    """Return the answer of GET /v1/models."""
    return {"object": "list", "data": list(entries)}


def _board(board: BoardReport) -> JsonObject:
    return {
        "id": board.board_id,
        "state": board.state.value,
        "reason": board.reason,
        "release": board.release,
        "platform": board.platform,
        "library": board.library,
        "node": board.node,
    }
