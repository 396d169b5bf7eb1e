"""Calls of boards for pieces: Ray's errors become rkserve's, and nothing is left pending."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import pytest
from ray.exceptions import RayTaskError
from ray.serve.exceptions import RayServeException

from rkserve.core.errors import ArtifactNotFound, BoardFailed, RkserveError
from rkserve.deployments.model_origin import RayPieceSource
from rkserve.models.index import Piece

PIECE = Piece("model.rkllm", 2, 8192, 4096, "0" * 64)


class FakeResponse:
    """The response of a handle's call."""

    def __init__(self, outcome: Any) -> None:
        self._outcome = outcome
        self.cancelled = False

    def __await__(self) -> Generator[Any, None, Any]:
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        if self._outcome is None:
            yield from asyncio.get_running_loop().create_future().__await__()
        return self._outcome

    def cancel(self) -> None:
        """Note the cancellation."""
        self.cancelled = True


class FakeHandle:
    """A handle with one outcome for every call."""

    def __init__(self, outcome: Any) -> None:
        self.response = FakeResponse(outcome)
        self.asked: list[tuple[Any, ...]] = []
        self.model_piece = self

    def remote(self, *args: Any) -> FakeResponse:
        """Note the call."""
        self.asked.append(args)
        return self.response


async def test_a_piece_is_asked_for_by_model_version_file_and_number() -> None:
    handle = FakeHandle(b"content")
    source = RayPieceSource("head", handle, "chat")
    assert await source.piece("v" * 64, PIECE) == b"content"
    assert handle.asked == [("chat", "v" * 64, "model.rkllm", 2)]


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        pytest.param(
            RayTaskError("model_piece", "", ArtifactNotFound("another version", "version")),
            ArtifactNotFound,
            id="an error of the machine itself",
        ),
        pytest.param(
            RayTaskError("model_piece", "", ValueError("a bug")), BoardFailed, id="a bug there"
        ),
        pytest.param(RayServeException("gone"), BoardFailed, id="a machine that left"),
    ],
)
async def test_errors_of_ray_become_errors_of_rkserve(
    outcome: Exception, kind: type[RkserveError]
) -> None:
    handle = FakeHandle(outcome)
    with pytest.raises(kind):
        await RayPieceSource("sim-1", handle, "chat").piece("v" * 64, PIECE)
    assert handle.response.cancelled
