"""What the calls of a client need of it: something that does the steps of a flow, to its result.

It knows flows and neither httpx nor threads. The calls are in classes by what they are about, in
pairs: one for ``Client`` and one for ``AsyncClient``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

from rkserve.client import calls, flows
from rkserve.client.answers import Operation
from rkserve.client.calls import Request
from rkserve.client.flows import Flow, OnProgress, RetryPolicy

T = TypeVar("T")


class Runs(ABC):
    """A client that waits for each step."""

    _patience: RetryPolicy

    @abstractmethod
    def _run(self, flow: Flow[T]) -> T:
        """Do what a flow asks for until it has its result."""

    def _ask(self, path: str, read: Callable[[dict[str, Any]], T], **query: str | int | None) -> T:
        return self._run(flows.ask(calls.fetch(path, **query), self._patience, read))

    def _tell(self, request: Request) -> dict[str, Any]:
        """Change something that has no idempotency key: sent once, and never again."""
        return self._run(flows.ask(request, flows.once(self._patience), dict))

    def _complete(self, request: Request, wait: bool, told: OnProgress | None) -> Operation:
        return self._run(flows.complete(request, self._patience, wait=wait, told=told))


class AsyncRuns(ABC):
    """A client that awaits each step."""

    _patience: RetryPolicy

    @abstractmethod
    async def _run(self, flow: Flow[T]) -> T:
        """Do what a flow asks for until it has its result."""

    async def _ask(
        self, path: str, read: Callable[[dict[str, Any]], T], **query: str | int | None
    ) -> T:
        return await self._run(flows.ask(calls.fetch(path, **query), self._patience, read))

    async def _tell(self, request: Request) -> dict[str, Any]:
        """Change something that has no idempotency key: sent once, and never again."""
        return await self._run(flows.ask(request, flows.once(self._patience), dict))

    async def _complete(self, request: Request, wait: bool, told: OnProgress | None) -> Operation:
        return await self._run(flows.complete(request, self._patience, wait=wait, told=told))
