"""The calls of ``AsyncClient`` by subject: models, weights, generations and caches.

``sync_calls`` is generated from this file: see scripts/make_sync_client.py.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rkserve.client import answers, flows
from rkserve.client.answers import IsSleeping, Operation, Pushed, PushedWeights
from rkserve.client.flows import Flow, OnProgress, RetryPolicy
from rkserve.client.lease import Lease, leased_async
from rkserve.client.requests import (
    BUILD_S,
    FILE_S,
    InFlight,
    Level,
    Mode,
    Names,
    Request,
    Tag,
    change,
    fetch,
    given,
    joined,
    listed,
    path_of,
    scope,
)

T = TypeVar("T")
GENERATIONS, CACHES = "/v1/generations", "/v1/cache"


class AsyncCalls(ABC):
    """A client that runs the flows of its calls."""

    _retry: RetryPolicy

    @abstractmethod
    async def _run(self, flow: Flow[T]) -> T:
        """Execute the steps of a flow and return its result."""

    async def _ask(
        self, path: str, read: Callable[[dict[str, Any]], T], **query: str | int | None
    ) -> T:
        return await self._run(flows.ask(fetch(path, **query), self._retry, read))

    async def _tell(self, request: Request) -> dict[str, Any]:
        """Send a change without an idempotency key: once, without retries."""
        return await self._run(flows.ask(request, flows.once(self._retry), dict))

    async def _complete(  # noqa: PLR0917 -- the calls pass on the parameters of their own
        self,
        path: str,
        params: Mapping[str, Any],
        key: str | None,
        timeout_s: float | None,
        wait: bool,
        on_progress: OnProgress | None,
        *,
        epoch: int | None = None,
        read_s: float | None = None,
    ) -> Operation:
        """Start an operation in the background; return it when it has succeeded, or at once."""
        request = change(
            "POST",
            path,
            params,
            key=key,
            timeout_s=timeout_s,
            epoch=epoch,
            background=True,
            read_s=read_s,
        )
        flow = flows.complete(request, self._retry, wait=wait, on_progress=on_progress)
        return await self._run(flow)


class AsyncModelCalls(AsyncCalls):
    """Calls that load models, unload them, and list them."""

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
        """Unload models for a while; return when every board in scope sleeps.

        Level 0 is a pause, 1 frees the memory of model and KV cache and keeps conversations that
        can be restored on the boards' disks, 2 keeps only the requests. Requests wait and continue
        after the wake unless ``mode`` says otherwise: unlike ``POST /sleep`` itself, which is
        vLLM's, nothing is lost by default. With ``wake_on_request`` the next request wakes its
        model; with ``lease_s`` all wake after that time. ``epoch`` refuses the call if the cluster
        has changed since. Without ``wait`` return while the operation still runs.

        Raises:
            OperationFailed: not every board slept in time; all of them are awake again.
        """
        params = {
            **scope(models, boards),
            "level": level,
            "mode": mode,
            "lease_s": lease_s,
            "wake_on_request": wake_on_request or None,
        }
        return await self._complete(
            "/sleep", params, key, timeout_s, wait, on_progress, epoch=epoch
        )

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
        params = {**scope(models, boards), "tags": None if tags is None else list(tags)}
        return await self._complete(
            "/wake_up", params, key, timeout_s, wait, on_progress, epoch=epoch
        )

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

        clock = self._retry.clock
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
        path = "/v1/models/load"
        return await self._complete(path, {"model": model}, key, timeout_s, wait, on_progress)

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
        params = {"model": model, "level": level, "mode": mode, "wake_on_request": wake_on_request}
        return await self._complete("/v1/models/unload", params, key, timeout_s, wait, on_progress)

    async def models(self) -> list[dict[str, Any]]:
        """Return the models and adapters that can be asked for, and whether they are loaded."""
        return await self._ask("/v1/models", answers.rows)


class AsyncWeightCalls(AsyncCalls):
    """Calls that change the weights and read which are served: by step, by file, by label."""

    async def receive_weight_update(
        self,
        version: int,
        artifact: str | Pushed | PushedWeights,
        parameters: Sequence[Mapping[str, Any]] | None = None,
        *,
        model: str | None = None,
        in_flight: InFlight | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Operation:
        """Activate staged weights on all boards at once, as those of a trainer's step.

        ``version`` is the step, which must grow. ``artifact`` is the result of ``push_adapter(...,
        activate=False)`` or ``push_weights``, or ``adapter@version``, ``model@version``;
        ``parameters`` are the tensors (``{name, shape, dtype}``) that it was pushed with. Running
        requests continue with the new weights unless ``in_flight`` says otherwise.

        Raises:
            Conflict: the step is not newer than the last one (`stale_weights`), or another update
                runs.
            Refused: the parameters do not fit the artifact; nothing was paused.
            OperationFailed: it was undone; the previous weights are served.
        """
        named, tensors = artifact, parameters
        if not isinstance(artifact, str):
            named, model = artifact.label, model or artifact.model
            whole = {"name": named, "shape": [artifact.size_bytes], "dtype": "uint8"}
            tensors = [whole] if parameters is None else parameters
        # Without the ``timestamp`` of PipelineRL, so that a repeated call is equal to the first.
        params = {
            "kind": "weight_update_request",
            "version": version,
            "parameters_info": [dict(one) for one in tensors or ()],
            "artifact": named,
            "model": model,
            "in_flight": in_flight,
        }
        return await self._complete(
            "/receive_weight_update", params, key, timeout_s, wait, on_progress, read_s=FILE_S
        )

    async def update_weights(
        self,
        path: str | PushedWeights,
        version: str | None = None,
        *,
        model: str | None = None,
        in_flight: InFlight | None = None,
        max_unavailable: int | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Operation:
        """Load another file of base weights on the boards, ``max_unavailable`` at a time.

        ``path`` is on the head node, in a folder of ``coordinator.allowed_paths``, or the result of
        ``push_weights``; ``default`` is the file in the model's own folder. ``version`` is the
        label that answers carry from then on. Sleeping boards load the file when they wake.

        Raises:
            Refused, NotFound: the file is not a model for these boards, or may not be read.
            OperationFailed: a board could not load it; all have the previous weights again.
            PartlyDone: it has taken effect, and some boards have not followed yet.
        """
        params = {
            "model_path": path if isinstance(path, str) else path.label,
            "weight_version": version,
            "model": model if isinstance(path, str) else model or path.model,
            "in_flight": in_flight,
            "max_unavailable": max_unavailable,
        }
        return await self._complete(
            "/update_weights_from_disk", params, key, timeout_s, wait, on_progress, read_s=FILE_S
        )

    async def push_weights(
        self,
        source: Path | str | bytes,
        version: str | None = None,
        *,
        model: str | None = None,
        parameters: Sequence[Mapping[str, Any]] | None = None,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> PushedWeights:
        """Upload a file of base weights to the head; no board loads it.

        The default ``version`` is the first 12 digits of its sha256. With ``parameters`` an update
        that names other tensors is refused.

        Raises:
            SourceFailed: the file cannot be read.
            Refused: it is not a model for these boards.
        """
        params = {"version": version, "model": model, "parameters": parameters}
        return await self._run(flows.push_weights(source, params, key, self._retry, on_progress))

    async def weight_info(self, model: str | None = None) -> dict[str, Any]:
        """Return the labels, steps and files of the weights, by model and board."""
        return await self._ask("/weight_info", dict, model=model)

    async def weight_version(self, model: str | None = None) -> str:
        """Return the label of a model's weights."""
        return await self._ask("/weight_info", answers.weight_version, model=model)

    async def set_weight_version(
        self, version: str, *, model: str | None = None, key: str | None = None
    ) -> Operation:
        """Label the weights of a model; answers carry the label."""
        params = {"new_version": version, "model": model}
        request = change("POST", "/update_weight_version", params, key=key)
        return await self._run(flows.perform(request, self._retry))


class AsyncGenerationCalls(AsyncCalls):
    """Calls on single generations, boards, KV caches and prompt caches.

    Changes have no idempotency key and are sent once.
    """

    async def board(self, board: str) -> dict[str, Any]:
        """Return the report of one board."""
        return await self._ask(path_of("/v1/boards", board), dict)

    async def generations(self) -> list[dict[str, Any]]:
        """Return the generations that run, wait or are paused."""
        return await self._ask("/v1/generations", answers.rows)

    async def generation(self, generation: str) -> dict[str, Any]:
        """Return one generation with its text so far."""
        return await self._ask(path_of(GENERATIONS, generation), dict)

    async def _control(self, generation: str, action: str, **params: Any) -> dict[str, Any]:
        path = path_of(GENERATIONS, generation, action)
        return await self._tell(Request("POST", path, body=given(**params)))

    async def pause_generation(self, generation: str, choice: int | None = None) -> dict[str, Any]:
        """Pause a generation or one of its choices; return when it emits no more tokens."""
        return await self._control(generation, "pause", choice=choice)

    async def edit_generation(
        self,
        generation: str,
        *,
        choice: int | None = None,
        replace_last: int | None = None,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        role: str | None = None,
        clear: Sequence[tuple[int, int]] | None = None,
    ) -> dict[str, Any]:
        """Change a paused generation: drop its last tokens, append a text or token ids."""
        return await self._control(
            generation,
            "edit",
            choice=choice,
            replace_last=replace_last,
            text=text,
            token_ids=token_ids,
            role=role,
            clear=clear,
        )

    async def resume_generation(self, generation: str, choice: int | None = None) -> dict[str, Any]:
        """Resume a paused generation."""
        return await self._control(generation, "resume", choice=choice)

    async def abort_generation(self, generation: str, choice: int | None = None) -> dict[str, Any]:
        """Abort a generation; its client gets the text so far."""
        return await self._control(generation, "abort", choice=choice)

    async def kv_size(
        self, *, model: str | None = None, boards: Names | None = None
    ) -> dict[str, Any]:
        """Return the size of the KV caches, by board and in total."""
        return await self._ask("/v1/cache/kv/size", dict, model=model, boards=joined(boards))

    async def clear_kv(
        self,
        *,
        model: str | None = None,
        boards: Names | None = None,
        generation: str | None = None,
        ranges: Sequence[tuple[int, int]] | None = None,
        everything: bool = False,
        keep_system_prompt: bool | None = None,
    ) -> dict[str, Any]:
        """Clear KV caches of a model, of boards, or of everything; the system prompt stays.

        With ``generation`` and ``ranges`` clear positions of one paused answer's context.
        """
        body = given(
            model=model,
            boards=listed(boards),
            generation=generation,
            ranges=ranges and [list(one) for one in ranges],
            all=everything or None,
            keep_system_prompt=keep_system_prompt,
        )
        return await self._tell(Request("POST", "/v1/cache/kv/clear", body=body))

    async def caches(self, model: str) -> list[dict[str, Any]]:
        """Return the prompt caches of a model, by board."""
        return await self._ask(path_of(CACHES, model), answers.rows)

    async def build_cache(
        self,
        model: str,
        name: str,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Build a prompt cache from a prompt or messages, on every board of a model."""
        listing = None if messages is None else [dict(one) for one in messages]
        body = given(cache_name=name, prompt=prompt, messages=listing)
        request = Request("POST", path_of(CACHES, model), body=body, read_s=BUILD_S)
        return await self._tell(request)

    async def delete_cache(self, model: str, name: str) -> dict[str, Any]:
        """Delete a prompt cache on all boards."""
        return await self._tell(Request("DELETE", path_of(CACHES, model, name)))
