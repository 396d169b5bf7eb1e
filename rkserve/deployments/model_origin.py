"""The head's catalogue as boards reach it over Ray: its Coordinator, and boards with copies.

A piece is the answer of one call. It lies in Ray's object store of both nodes until it is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from rkserve.board.operations.fetch_model import PieceSource
from rkserve.core.errors import BoardFailed, CoordinatorAway, RkserveError
from rkserve.models.index import ModelIndex, Piece

COORDINATOR = "Coordinator"  # the deployment
HEAD_NAME = "head"
# The head may have to read gigabytes first.
INDEX_S = 900.0
LOOKUP_S = 10.0
PIECE_S = 60.0


@dataclass(frozen=True, slots=True)
class ModelHolder:
    """A board with a whole copy of a model: its deployment, its replica and its name."""

    deployment: str
    replica: str
    board_id: str


class RayModelOrigin:
    """``ModelOrigin`` in a Board's replica."""

    def __init__(self) -> None:
        self._app = serve.get_replica_context().app_name
        self._handles: dict[str, Any] = {}

    async def index(self, name: str) -> ModelIndex:
        """Return the index of a model."""
        handle = await self._handle(COORDINATOR)
        found: ModelIndex = await _call(handle, HEAD_NAME, "model_index", name, timeout_s=INDEX_S)
        return found

    async def sources(self, name: str, version: str) -> Sequence[PieceSource]:
        """Return the head, and the boards that have that version."""
        handle = await self._handle(COORDINATOR)
        holders: list[ModelHolder] = await _call(
            handle, HEAD_NAME, "model_holders", name, version, timeout_s=LOOKUP_S
        )
        found: list[PieceSource] = [RayPieceSource(HEAD_NAME, handle, name)]
        for one in holders:
            with contextlib.suppress(RkserveError):  # its deployment is being removed
                boards = (await self._handle(one.deployment)).options(session_id=one.replica)
                found.append(RayPieceSource(one.board_id, boards, name))
        return found

    async def _handle(self, deployment: str) -> Any:
        if deployment not in self._handles:
            find = serve.get_deployment_handle
            try:
                self._handles[deployment] = await asyncio.to_thread(find, deployment, self._app)
            except (RayError, RayServeException) as exc:
                raise CoordinatorAway(
                    f"{deployment} is not there yet ({type(exc).__name__})."
                ) from exc
        return self._handles[deployment]


class RayPieceSource:
    """``PieceSource`` over a handle of the Coordinator, or of one board."""

    def __init__(self, name: str, handle: Any, model: str) -> None:
        self.name = name
        self._handle = handle
        self._model = model

    async def piece(self, version: str, piece: Piece) -> bytes:
        """Return a piece, unverified."""
        found: bytes = await _call(
            self._handle,
            self.name,
            "model_piece",
            self._model,
            version,
            piece.path,
            piece.number,
            timeout_s=PIECE_S,
        )
        return found


async def _call(handle: Any, where: str, method: str, *args: Any, timeout_s: float) -> Any:
    """Call a method of a replica. Raises ``RkserveError``."""
    # In a context of its own: Ray's routers match waiting calls by the ID of an HTTP request.
    response = contextvars.Context().run(getattr(handle, method).remote, *args)

    async def answer() -> Any:
        return await response

    try:
        return await asyncio.wait_for(answer(), timeout_s)
    except RayTaskError as exc:
        if isinstance(exc.cause, RkserveError):
            raise exc.cause from None
        raise BoardFailed(where, f"{method} failed ({type(exc.cause).__name__})") from exc
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        raise BoardFailed(where, f"{method} did not end within {timeout_s:g} s") from None
    except (RayError, RayServeException) as exc:
        raise BoardFailed(where, f"Ray could not reach it ({type(exc).__name__})") from exc
    finally:
        with contextlib.suppress(RayError, RayServeException):
            response.cancel()
