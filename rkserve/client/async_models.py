"""The calls of ``AsyncClient`` that put models to sleep, wake them, and list them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from rkserve.client import answers, requests
from rkserve.client.answers import IsSleeping, Operation
from rkserve.client.calls import Level, Mode, Names, ScopeParams, Tag
from rkserve.client.flows import OnProgress
from rkserve.client.lease import Lease
from rkserve.client.leased import leased_async
from rkserve.client.running import AsyncRuns


class AsyncModelCalls(AsyncRuns):
    """Which models are loaded on the boards, and which sleep."""

    async def sleep(
        self,
        level: Level = 1,
        mode: Mode = "keep",
        *,
        models: Names | None = None,
        boards: Names | None = None,
        wake_on_request: bool = False,
        lease_s: float | None = None,
        timeout_s: float | None = None,
        epoch: int | None = None,
        wait: bool = True,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Operation:
        """Unload models for a while; returns when every board that is meant sleeps.

        Level 0 is a pause, 1 gives back the memory of model and KV cache and keeps what can be
        restored on the boards' disks, 2 keeps nothing but the requests. These wait and go on when
        they are woken, unless ``mode`` says otherwise: other than in ``POST /sleep`` itself, which
        is vLLM's, nothing is lost unless asked for. With ``wake_on_request`` the next request wakes
        its model; with ``lease_s`` all wake by themselves after that time. ``epoch`` refuses it if
        the cluster has changed since. Without ``wait`` return while it goes on.

        Raises:
            OperationFailed: not every board slept in time, and none of them sleeps now.
        """
        scope = ScopeParams(models, boards)
        request = requests.sleep(
            scope,
            level,
            mode,
            wake_on_request=wake_on_request,
            lease_s=lease_s,
            timeout_s=timeout_s,
            epoch=epoch,
            key=key,
        )
        return await self._complete(request, wait, on_progress)

    async def wake(
        self,
        tags: Sequence[Tag] | None = None,
        *,
        models: Names | None = None,
        boards: Names | None = None,
        timeout_s: float | None = None,
        epoch: int | None = None,
        wait: bool = True,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Operation:
        """Load what sleeps, and go on; without a scope everything. Returns when it is loaded.

        ``tags`` of only ``["weights"]`` loads the models and leaves the requests waiting, until
        the rest is woken too.

        Raises:
            PartlyDone: some boards have not loaded yet; they follow as soon as they can.
        """
        scope = ScopeParams(models, boards)
        request = requests.wake(scope, tags, timeout_s=timeout_s, epoch=epoch, key=key)
        return await self._complete(request, wait, on_progress)

    async def is_sleeping(self, model: str | None = None) -> IsSleeping:
        """Return what is asleep."""
        return await self._ask("/is_sleeping", answers.is_sleeping, model=model)

    @contextlib.asynccontextmanager
    async def asleep(
        self,
        level: Level = 1,
        mode: Mode = "keep",
        *,
        models: Names | None = None,
        boards: Names | None = None,
        lease_s: float = 300.0,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> AsyncIterator[Lease]:
        """Have models sleep for the length of a block, and wake them however it ends.

        The lease is renewed as long as this process lives, and wakes them soon after it died.

        Raises:
            LeaseLost: at the end of a block that went well, if they had woken before it.
            PartlyDone: at its end, if some boards have not loaded yet.
        """

        async def sleep(within_s: float | None) -> Operation:
            return await self.sleep(
                level,
                mode,
                models=models,
                boards=boards,
                lease_s=lease_s,
                timeout_s=within_s,
                on_progress=on_progress,
            )

        async def wake() -> Operation:
            return await self.wake(
                models=models, boards=boards, timeout_s=timeout_s, on_progress=on_progress
            )

        clock = self._patience.clock
        async with leased_async(sleep, wake, lease_s, timeout_s, clock) as lease:
            yield lease

    async def load_model(
        self,
        model: str,
        *,
        timeout_s: float | None = None,
        wait: bool = True,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Operation:
        """Wake a model on all its boards. Raises what ``wake`` does."""
        request = requests.load(model, timeout_s=timeout_s, key=key)
        return await self._complete(request, wait, on_progress)

    async def unload_model(
        self,
        model: str,
        level: Level | None = None,
        mode: Mode | None = None,
        *,
        wake_on_request: bool | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Operation:
        """Put a model to sleep on all its boards, once what runs has ended.

        What is None is the server's default: level 1, mode ``wait``, and whether requests wake it
        as the boards' groups are configured. Raises what ``sleep`` does.
        """
        request = requests.unload(
            model, level, mode, wake_on_request=wake_on_request, timeout_s=timeout_s, key=key
        )
        return await self._complete(request, wait, on_progress)

    async def models(self) -> list[dict[str, Any]]:
        """Return the models and adapters that can be asked for, and whether they are loaded."""
        return await self._ask("/v1/models", answers.rows)
