"""The client for asyncio programs.

It executes the steps of ``flows`` with httpx.
``sync`` is generated from this file: see scripts/make_sync_client.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx

from rkserve.client import answers, flows
from rkserve.client.answers import IsPaused, Operation, Pushed
from rkserve.client.async_calls import AsyncGenerationCalls, AsyncModelCalls, AsyncWeightCalls
from rkserve.client.errors import Unreachable
from rkserve.client.flows import (
    ADAPTERS,
    OPERATIONS,
    BlockingCall,
    Delay,
    Flow,
    OnProgress,
    RetryPolicy,
)
from rkserve.client.lease import Lease, leased_async
from rkserve.client.requests import (
    CONNECT_S,
    DEFAULT_URL,
    PATIENCE_S,
    READ_S,
    InFlight,
    Mode,
    Names,
    Request,
    Strategy,
    arguments,
    change,
    check_url,
    given,
    headers,
    path_of,
    scope,
)

T = TypeVar("T")


class AsyncClient(AsyncGenerationCalls, AsyncModelCalls, AsyncWeightCalls):
    """The control API of a cluster. Calls raise ``ClientError``; see docs/how-to/client.md.

    ``admin_key`` is never logged or shown. A call is retried for ``patience_s`` seconds after
    lost connections and while the Coordinator is away, without being executed twice. ``read_s`` is
    the time limit of an answer unless the call needs longer. ``transport``, ``sleep`` and
    ``clock`` are for tests.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        admin_key: str | None = None,
        patience_s: float = PATIENCE_S,
        read_s: float = READ_S,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = check_url(url)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers(admin_key),
            timeout=httpx.Timeout(read_s, connect=CONNECT_S),
            transport=transport,
        )
        self._read_s = read_s
        self._retry = RetryPolicy(patience_s, clock)
        self._sleep = sleep

    def __repr__(self) -> str:
        """Return the client's name and URL, without the key."""
        return f"AsyncClient({self.url!r})"

    async def __aenter__(self) -> AsyncClient:
        """Return the client; the end of the block closes it."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close its connections."""
        await self.aclose()

    async def aclose(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    # Pausing

    async def pause(
        self,
        mode: Mode = "keep",
        *,
        models: Names | None = None,
        boards: Names | None = None,
        adapter: str | None = None,
        clear_cache: bool = False,
        lease_s: float | None = None,
        timeout_s: float | None = None,
        epoch: int | None = None,
        key: str | None = None,
    ) -> Operation:
        """Stop generating; return when no board in scope emits tokens.

        With ``lease_s`` the pause ends after that time. ``epoch`` refuses the call if the cluster
        has changed since. Unlike the defaults of ``POST /pause`` itself, which are vLLM's, these
        lose nothing.

        Raises:
            OperationUndone: not every board stopped in time; none is paused now.
        """
        meant = scope(models, boards, adapter)
        params = {**meant, "mode": mode, "clear_cache": clear_cache, "lease_s": lease_s}
        request = change("POST", "/pause", params, key=key, timeout_s=timeout_s, epoch=epoch)
        return await self._run(flows.perform(request, self._retry))

    async def resume(
        self,
        *,
        models: Names | None = None,
        boards: Names | None = None,
        adapter: str | None = None,
        timeout_s: float | None = None,
        epoch: int | None = None,
        key: str | None = None,
    ) -> Operation:
        """Resume. Without a scope every pause ends.

        Raises:
            PartlyDone: some boards did not answer; they resume once they reconnect.
        """
        meant = scope(models, boards, adapter)
        request = change("POST", "/resume", meant, key=key, timeout_s=timeout_s, epoch=epoch)
        return await self._run(flows.perform(request, self._retry))

    async def is_paused(self, model: str | None = None) -> IsPaused:
        """Return which boards and adapters are paused."""
        return await self._ask("/is_paused", answers.is_paused, model=model)

    @contextlib.asynccontextmanager
    async def paused(
        self,
        mode: Mode = "keep",
        *,
        models: Names | None = None,
        boards: Names | None = None,
        adapter: str | None = None,
        clear_cache: bool = False,
        lease_s: float = 60.0,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Lease]:
        """Pause for the length of a block, and resume at its end, also after an error.

        The lease is renewed by this process, and ends the pause soon after the process has died.

        Raises:
            LeaseLost: at the end of a block without an error, if the pause had ended before it.
        """

        async def pause(within_s: float | None) -> Operation:
            return await self.pause(
                mode,
                models=models,
                boards=boards,
                adapter=adapter,
                clear_cache=clear_cache,
                lease_s=lease_s,
                timeout_s=within_s,
            )

        async def resume() -> Operation:
            return await self.resume(models=models, boards=boards, adapter=adapter)

        clock = self._retry.clock
        async with leased_async(pause, resume, lease_s, timeout_s, clock) as lease:
            yield lease

    async def reset_cache(
        self,
        *,
        models: Names | None = None,
        boards: Names | None = None,
        running: bool = False,
        timeout_s: float | None = None,
        key: str | None = None,
    ) -> Operation:
        """Drop the KV caches; with ``running`` also those of running requests."""
        params = {**scope(models, boards), "reset_running_requests": running}
        request = change("POST", "/reset_prefix_cache", params, key=key, timeout_s=timeout_s)
        return await self._run(flows.perform(request, self._retry))

    # Adapters

    async def push_adapter(
        self,
        source: Path | str | bytes,
        name: str,
        version: str | None = None,
        *,
        model: str | None = None,
        scale: float | None = None,
        parameters: Sequence[Mapping[str, Any]] | None = None,
        base_digest: str | None = None,
        activate: bool = True,
        strategy: Strategy | None = None,
        max_unavailable: int | None = None,
        weight: float | None = None,
        in_flight: InFlight | None = None,
        observe_s: float | None = None,
        auto: bool | None = None,
        timeout_s: float | None = None,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Pushed:
        """Stage an adapter on every board, and serve it unless ``activate`` is False.

        ``source`` is a file, a folder with an ``adapter.rkllm``, or the bytes; files are never
        held in memory as a whole. The default ``version`` is the first 12 digits of its sha256.
        Return when every board serves it; no board does unless it can be staged on all.
        ``parameters`` are its tensors (``{name, shape, dtype}``), which a weight update must then
        name, and ``base_digest`` is the sha256 of the base weights that it was trained on.

        Raises:
            SourceFailed: the file cannot be read.
            OperationFailed: it was not staged, or its rollout was undone.
            PartlyDone: it has taken effect, and some boards have not followed yet.
        """
        rollout = given(
            strategy=strategy,
            max_unavailable=max_unavailable,
            weight=weight,
            in_flight=in_flight,
            observe_s=observe_s,
            auto=auto,
        )
        params = {
            "name": name,
            "version": version,
            "model": model,
            "scale": scale,
            "parameters": parameters,
            "base_digest": base_digest,
        }
        flow = flows.push_adapter(
            source,
            params,
            rollout if activate else None,
            key,
            timeout_s=timeout_s,
            retry=self._retry,
            on_progress=on_progress,
        )
        return await self._run(flow)

    async def adapters(self, model: str | None = None) -> list[dict[str, Any]]:
        """Return the adapters with their versions, by board."""
        return await self._ask(ADAPTERS, answers.rows, model=model)

    async def rollout(
        self,
        name: str,
        version: str,
        *,
        model: str | None = None,
        strategy: Strategy | None = None,
        max_unavailable: int | None = None,
        weight: float | None = None,
        in_flight: InFlight | None = None,
        observe_s: float | None = None,
        auto: bool | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Operation:
        """Roll out a staged version; without ``wait`` return while the operation still runs.

        Raises:
            OperationFailed: it was undone; the previous version is served.
            PartlyDone: it has taken effect, and some boards have not followed yet.
        """
        params = {
            "version": version,
            "model": model,
            "strategy": strategy,
            "max_unavailable": max_unavailable,
            "weight": weight,
            "in_flight": in_flight,
            "observe_s": observe_s,
            "auto": auto,
        }
        path = path_of(ADAPTERS, name, "rollout")
        return await self._complete(path, params, key, timeout_s, wait, on_progress)

    async def rollback(
        self,
        name: str,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Operation:
        """Return to the previous version, or end a canary. Raises the same as ``rollout``."""
        path = path_of(ADAPTERS, name, "rollback")
        return await self._complete(path, {"model": model}, key, timeout_s, wait, on_progress)

    async def promote(
        self,
        name: str,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Operation:
        """Serve the canary's version to all sessions. Raises the same as ``rollout``."""
        path = path_of(ADAPTERS, name, "promote")
        return await self._complete(path, {"model": model}, key, timeout_s, wait, on_progress)

    async def remove_adapter(
        self,
        name: str,
        version: str | None = None,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Operation:
        """Remove a version, or all versions of an adapter. Raises the same as ``rollout``."""
        path = path_of(ADAPTERS, name, *([] if version is None else [version]))
        request = change(
            "DELETE", path, {"model": model}, key=key, timeout_s=timeout_s, background=True
        )
        flow = flows.complete(request, self._retry, wait=wait, on_progress=on_progress)
        return await self._run(flow)

    # Operations and state

    async def operations(self, limit: int | None = None) -> list[Operation]:
        """Return the last operations, the newest first."""
        return await self._ask(OPERATIONS, answers.operations, limit=limit)

    async def operation(self, operation_id: str) -> Operation:
        """Return one operation in its current state."""
        return await self._ask(path_of(OPERATIONS, operation_id), answers.operation)

    async def wait(
        self,
        operation_id: str,
        *,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Operation:
        """Return an operation once it has ended; ``state`` tells how.

        Raises:
            WaitTimeout: it still runs after ``timeout_s`` seconds.
        """
        flow = flows.follow(operation_id, self._retry, timeout_s=timeout_s, on_progress=on_progress)
        return await self._run(flow)

    async def audit(self, limit: int | None = None) -> list[dict[str, Any]]:
        """Return the audit log, the newest entry first."""
        return await self._ask("/v1/audit", answers.rows, limit=limit)

    async def cluster(self) -> dict[str, Any]:
        """Return the totals of the cluster, its models, boards and pauses."""
        return await self._ask("/v1/cluster", dict)

    async def boards(self) -> list[dict[str, Any]]:
        """Return the reports of all boards."""
        return await self._ask("/v1/boards", answers.rows)

    # Streams

    async def stream(
        self, path: str, body: Mapping[str, Any], *, api_key: str | None = None
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a streamed answer, such as that of ``/v1/chat/completions``.

        ``api_key`` is sent instead of the admin key. Leaving the loop aborts the answer.

        Raises:
            CallError: it was refused, or ended with an error.
            Unreachable: the connection was lost.
        """
        request = Request("POST", path, body={**body, "stream": True})
        options = arguments(request, self._read_s)
        options["headers"].update(headers(api_key) if api_key else {})
        try:
            async with self._http.stream("POST", path, **options) as response:
                if response.is_error:
                    await response.aread()
                    answers.json_of(response)
                async for line in response.aiter_lines():
                    if (event := answers.event_of(line)) is not None:
                        yield event
        except httpx.RequestError as exc:
            raise Unreachable(flows.transport_error(request, exc)) from exc

    # Steps of flows

    async def _run(self, flow: Flow[T]) -> T:
        """Execute the steps of a flow and return its result."""
        try:
            step = next(flow)
            while True:
                try:
                    result = await self._do(step)
                except httpx.RequestError as exc:
                    step = flow.throw(exc)
                else:
                    step = flow.send(result)
        except StopIteration as stop:
            found: T = stop.value
            return found

    async def _do(self, step: Request | Delay | BlockingCall) -> Any:
        if isinstance(step, Delay):
            return await self._sleep(step.seconds)
        if isinstance(step, BlockingCall):
            return await asyncio.to_thread(step.do)
        content = None if step.upload is None else step.upload.pieces_async()
        return await self._http.request(
            step.method, step.path, content=content, **arguments(step, self._read_s)
        )
