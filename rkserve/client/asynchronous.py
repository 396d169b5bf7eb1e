"""The client for asyncio programs.

It executes the steps of ``flows`` with httpx.
``sync`` is generated from this file: see scripts/make_sync_client.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx
from typing_extensions import Unpack

from rkserve.client import answers, flows
from rkserve.client.answers import Operation
from rkserve.client.calls import (
    AsyncRunner,
    ClusterCalls,
    GenerationCalls,
    ModelCalls,
    WeightCalls,
)
from rkserve.client.errors import Unreachable
from rkserve.client.flows import (
    BlockingCall,
    Delay,
    Flow,
    OnProgress,
    RetryPolicy,
    Where,
    WhereOrAdapter,
)
from rkserve.client.keys import KeyCalls, own_key
from rkserve.client.lease import Lease, leased_async
from rkserve.client.requests import (
    CONNECT_S,
    DEFAULT_URL,
    PATIENCE_S,
    QUIET_S,
    READ_S,
    WATCH_S,
    Level,
    Mode,
    Request,
    arguments,
    authorities,
    check_url,
    fetch,
    headers,
    path_of,
)
from rkserve.core.merge_patch import patched

T = TypeVar("T")


class AsyncClient(ClusterCalls, ModelCalls, WeightCalls, GenerationCalls, KeyCalls, AsyncRunner):
    """The control API of a cluster. Calls raise ``ClientError``; see docs/how-to/client.md.

    ``admin_key`` is an API key with the scopes of the calls; without one it is that of the
    environment or of the user's file. It is never logged or shown. ``ca_file`` has certificates to
    trust for https beside those of this machine; without it ``RKSERVE_CA_FILE`` names one. A call
    is retried for ``patience_s`` seconds after lost connections and while the Coordinator is away,
    without being executed twice. ``read_s`` is the time limit of an answer unless the call needs
    longer. ``transport``, ``sleep`` and ``clock`` are for tests.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        admin_key: str | None = None,
        ca_file: Path | str | None = None,
        patience_s: float = PATIENCE_S,
        read_s: float = READ_S,
        transport: httpx.AsyncBaseTransport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.url = check_url(url)
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers(own_key(self.url) if admin_key is None else admin_key),
            timeout=httpx.Timeout(read_s, connect=CONNECT_S),
            transport=transport,
            verify=authorities(self.url, ca_file),
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

    # Blocks

    @contextlib.asynccontextmanager
    async def paused(
        self,
        mode: Mode = "keep",
        *,
        clear_cache: bool = False,
        lease_s: float = 60.0,
        timeout_s: float | None = None,
        **where: Unpack[WhereOrAdapter],
    ) -> AsyncIterator[Lease]:
        """Pause for the length of a block, and resume at its end, also after an error.

        The lease is renewed by this process, and ends the pause soon after the process has died.

        Raises:
            LeaseLost: at the end of a block without an error, if the pause had ended before it.
        """

        async def pause(within_s: float | None) -> Operation:
            return await self.pause(
                mode, clear_cache=clear_cache, lease_s=lease_s, timeout_s=within_s, **where
            )

        async def resume() -> Operation:
            return await self.resume(**where)

        clock = self._retry.clock
        async with leased_async(pause, resume, lease_s, timeout_s, clock) as lease:
            yield lease

    @contextlib.asynccontextmanager
    async def asleep(
        self,
        level: Level = 1,
        mode: Mode = "keep",
        *,
        lease_s: float = 300.0,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
        **where: Unpack[Where],
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
                lease_s=lease_s,
                timeout_s=within_s,
                on_progress=on_progress,
                **where,
            )

        async def wake() -> Operation:
            return await self.wake(timeout_s=timeout_s, on_progress=on_progress, **where)

        clock = self._retry.clock
        async with leased_async(sleep, wake, lease_s, timeout_s, clock) as lease:
            yield lease

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
        more = headers(api_key) if api_key else {}
        async for line in self._lines(request, more, self._read_s):
            if (event := answers.event_of(line)) is not None:
                yield event

    async def _lines(
        self, request: Request, more: Mapping[str, str], read_s: float
    ) -> AsyncIterator[str]:
        """Yield the lines of a streamed answer."""
        options = arguments(request, read_s)
        options["headers"].update(more)
        try:
            async with self._http.stream(request.method, request.path, **options) as response:
                if response.is_error:
                    await response.aread()
                    answers.json_of(response)
                async for line in response.aiter_lines():
                    yield line
        except httpx.RequestError as exc:
            raise Unreachable(flows.transport_error(request, exc)) from exc

    async def watch(self, seconds: float | None = None) -> AsyncIterator[dict[str, Any]]:
        """Yield the view of the cluster whenever it changes: the object with the key ``view``.

        ``history`` beside it are the sparklines up to the first one. The stream ends after
        ``seconds``, or a quarter of an hour at the latest; call again.

        Raises:
            CallError: it was refused.
            Unreachable: the connection was lost.
        """
        request = fetch("/v1/cluster/events", seconds=None if seconds is None else f"{seconds:g}")
        known: dict[str, Any] = {}
        async for line in self._lines(request, {}, max(self._read_s, WATCH_S)):
            event = answers.event_of(line)
            if event is None:
                continue
            if "view" in event:
                known = event
            elif known:
                known = {**known, "view": patched(known["view"], event)}
            if known:
                yield known

    async def logs(
        self,
        board: str | None = None,
        *,
        tail: int | None = None,
        follow: bool = False,
        request_id: str | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """Yield the last log lines of a board, or of all boards, Routers and the Coordinator.

        With ``follow`` new lines come until the loop is left; with ``request_id`` only those of
        requests whose ids begin so.

        Raises:
            NotFound: there is no such board.
            Unreachable: the connection was lost.
        """
        path = "/v1/logs" if board is None else path_of("/v1/boards", board, "logs")
        request = fetch(path, tail=tail, follow="true" if follow else None, request_id=request_id)
        async for line in self._lines(request, {}, max(self._read_s, QUIET_S)):
            if line:
                yield answers.line_of(line)

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
