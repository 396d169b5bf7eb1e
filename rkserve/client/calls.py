"""Every call of both clients, written once: each returns the flow of its steps.

``call`` makes a method of it, which returns the result for ``Client`` and an awaitable of it for
``AsyncClient``.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from typing_extensions import Unpack

from rkserve.client import answers, flows
from rkserve.client.answers import IsPaused, IsSleeping, Operation, Pushed, PushedWeights
from rkserve.client.flows import (
    ADAPTERS,
    OPERATIONS,
    ChangeOptions,
    EpochOptions,
    Flow,
    OnProgress,
    RetryPolicy,
    RolloutOptions,
    WaitEpochOptions,
    WaitOptions,
)
from rkserve.client.push_model import MODELS, PushedModel, prefetch_model, push_model
from rkserve.client.requests import (
    BUILD_S,
    FILE_S,
    DrainMode,
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

P = ParamSpec("P")
T = TypeVar("T")
GENERATIONS, CACHES, MEMBERS = "/v1/generations", "/v1/cache", "/v1/members"
BOARDS = "/v1/boards"


class Runner(ABC):
    """A client that waits for the steps of a flow."""

    @abstractmethod
    def _run(self, flow: Flow[T]) -> T:
        """Execute the steps of a flow and return its result."""


class AsyncRunner(ABC):
    """A client that awaits the steps of a flow."""

    @abstractmethod
    async def _run(self, flow: Flow[T]) -> T:
        """Execute the steps of a flow and return its result."""


class call(Generic[P, T]):  # noqa: N801 - a decorator
    """A method of both clients, by the flow of its steps."""

    def __init__(self, flow: Callable[Concatenate[Any, P], Flow[T]]) -> None:
        self._flow = flow

    @overload
    def __get__(self, client: None, owner: type) -> Callable[Concatenate[Any, P], Flow[T]]: ...

    @overload
    def __get__(self, client: Runner, owner: type) -> Callable[P, T]: ...

    @overload
    def __get__(self, client: AsyncRunner, owner: type) -> Callable[P, Coroutine[Any, Any, T]]: ...

    def __get__(self, client: Any, owner: type) -> Callable[..., Any]:
        """Return the method of a client, or of the class the function itself."""
        if client is None:
            return self._flow
        flow = MethodType(self._flow, client)

        def waits(*args: P.args, **options: P.kwargs) -> Any:
            return client._run(flow(*args, **options))  # noqa: SLF001 - it is its method

        async def awaits(*args: P.args, **options: P.kwargs) -> Any:
            return await client._run(flow(*args, **options))  # noqa: SLF001 - as above

        return functools.wraps(flow)(awaits if isinstance(client, AsyncRunner) else waits)


class Calls:
    """The parts that calls are made of. Subclasses run the flows."""

    _retry: RetryPolicy

    def _ask(
        self, path: str, read: Callable[[dict[str, Any]], T], **query: str | int | None
    ) -> Flow[T]:
        return flows.ask(fetch(path, **query), self._retry, read)

    def _command(self, request: Request) -> Flow[dict[str, Any]]:
        """Send a change without an idempotency key: once, without retries."""
        return flows.ask(request, flows.once(self._retry), dict)

    def _change(
        self, path: str, params: Mapping[str, Any], **options: Unpack[EpochOptions]
    ) -> Flow[Operation]:
        """Send a change, and return its operation."""
        return flows.perform(change("POST", path, params, **options), self._retry)

    def _complete(
        self,
        path: str,
        params: Mapping[str, Any],
        *,
        method: str = "POST",
        read_s: float | None = None,
        wait: bool = True,
        on_progress: OnProgress | None = None,
        **options: Unpack[EpochOptions],
    ) -> Flow[Operation]:
        """Start an operation in the background; return it when it has succeeded, or at once."""
        request = change(method, path, params, background=True, read_s=read_s, **options)
        return flows.complete(request, self._retry, wait=wait, on_progress=on_progress)


class ClusterCalls(Calls):
    """Calls that pause, change adapters, and show operations and the state of the cluster."""

    @call
    def pause(
        self,
        mode: Mode = "keep",
        *,
        models: Names | None = None,
        boards: Names | None = None,
        adapter: str | None = None,
        clear_cache: bool = False,
        lease_s: float | None = None,
        **options: Unpack[EpochOptions],
    ) -> Flow[Operation]:
        """Stop generating; return when no board in scope emits tokens.

        With ``lease_s`` the pause ends after that time. ``epoch`` refuses the call if the cluster
        has changed since. Unlike the defaults of ``POST /pause`` itself, which are vLLM's, these
        lose nothing.

        Raises:
            OperationUndone: not every board stopped in time; none is paused now.
        """
        meant = scope(models, boards, adapter)
        params = {**meant, "mode": mode, "clear_cache": clear_cache, "lease_s": lease_s}
        return self._change("/pause", params, **options)

    @call
    def resume(
        self,
        *,
        models: Names | None = None,
        boards: Names | None = None,
        adapter: str | None = None,
        **options: Unpack[EpochOptions],
    ) -> Flow[Operation]:
        """Resume. Without a scope every pause ends.

        Raises:
            PartlyDone: some boards did not answer; they resume once they reconnect.
        """
        return self._change("/resume", scope(models, boards, adapter), **options)

    @call
    def is_paused(self, model: str | None = None) -> Flow[IsPaused]:
        """Return which boards and adapters are paused."""
        return self._ask("/is_paused", answers.is_paused, model=model)

    @call
    def reset_cache(
        self,
        *,
        models: Names | None = None,
        boards: Names | None = None,
        running: bool = False,
        **options: Unpack[ChangeOptions],
    ) -> Flow[Operation]:
        """Drop the KV caches; with ``running`` also those of running requests."""
        params = {**scope(models, boards), "reset_running_requests": running}
        return self._change("/reset_prefix_cache", params, **options)

    # Adapters

    @call
    def push_adapter(
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
        force: bool = False,
        manifest: Path | str | Mapping[str, Any] | None = None,
        allow_older: bool = False,
        timeout_s: float | None = None,
        key: str | None = None,
        on_progress: OnProgress | None = None,
        **rollout: Unpack[RolloutOptions],
    ) -> Flow[Pushed]:
        """Stage an adapter on every board, and serve it unless ``activate`` is False.

        ``source`` is a file, a folder with an ``adapter.rkllm``, or the bytes; files are never
        held in memory as a whole. The default ``version`` is the first 12 digits of its sha256.
        Return when every board serves it; no board does unless it can be staged on all.
        ``parameters`` are its tensors (``{name, shape, dtype}``), which a weight update must then
        name, and ``base_digest`` is the sha256 of the base weights that it was trained on. One
        board tries it first, in an engine that serves nothing; a content that failed is refused
        until ``force`` has it tried again.

        ``manifest`` is its signed manifest, as a file or its content; the default is
        ``<file>.manifest.json``, if that is there. With a manifest the default ``version`` is ``v``
        and its number. ``allow_older`` takes a lower version than the highest one that was signed,
        and needs a key with the scope ``admin``.

        Raises:
            SourceFailed: the file, or its manifest, cannot be read.
            Refused: it has no signature that the cluster wants, or its manifest does not fit.
            Conflict: a later version was signed and sent before.
            OperationFailed: it was not staged, or its rollout was undone.
            PartlyDone: it has taken effect, and some boards have not followed yet.
        """
        params = {
            "name": name,
            "version": version,
            "model": model,
            "scale": scale,
            "parameters": parameters,
            "base_digest": base_digest,
            "force": "true" if force else None,
            "manifest": manifest,
            "allow_older": "true" if allow_older else None,
        }
        return flows.push_adapter(
            source,
            params,
            given(**rollout) if activate else None,
            key,
            timeout_s=timeout_s,
            retry=self._retry,
            on_progress=on_progress,
        )

    @call
    def adapters(self, model: str | None = None) -> Flow[list[dict[str, Any]]]:
        """Return the adapters with their versions, by board."""
        return self._ask(ADAPTERS, answers.rows, model=model)

    @call
    def rollout(
        self,
        name: str,
        version: str,
        *,
        model: str | None = None,
        timeout_s: float | None = None,
        wait: bool = True,
        key: str | None = None,
        on_progress: OnProgress | None = None,
        **rollout: Unpack[RolloutOptions],
    ) -> Flow[Operation]:
        """Roll out a staged version; without ``wait`` return while the operation still runs.

        Raises:
            OperationFailed: it was undone; the previous version is served.
            PartlyDone: it has taken effect, and some boards have not followed yet.
        """
        path = path_of(ADAPTERS, name, "rollout")
        params = {"version": version, "model": model, **rollout}
        return self._complete(
            path, params, timeout_s=timeout_s, wait=wait, key=key, on_progress=on_progress
        )

    @call
    def rollback(
        self, name: str, *, model: str | None = None, **options: Unpack[WaitOptions]
    ) -> Flow[Operation]:
        """Return to the previous version, or end a canary. Raises the same as ``rollout``."""
        path = path_of(ADAPTERS, name, "rollback")
        return self._complete(path, {"model": model}, **options)

    @call
    def promote(
        self, name: str, *, model: str | None = None, **options: Unpack[WaitOptions]
    ) -> Flow[Operation]:
        """Serve the canary's version to all sessions. Raises the same as ``rollout``."""
        path = path_of(ADAPTERS, name, "promote")
        return self._complete(path, {"model": model}, **options)

    @call
    def remove_adapter(
        self,
        name: str,
        version: str | None = None,
        *,
        model: str | None = None,
        **options: Unpack[WaitOptions],
    ) -> Flow[Operation]:
        """Remove a version, or all versions of an adapter. Raises the same as ``rollout``."""
        path = path_of(ADAPTERS, name, *([] if version is None else [version]))
        return self._complete(path, {"model": model}, method="DELETE", **options)

    # Operations and state

    @call
    def operations(self, limit: int | None = None) -> Flow[list[Operation]]:
        """Return the last operations, the newest first."""
        return self._ask(OPERATIONS, answers.operations, limit=limit)

    @call
    def operation(self, operation_id: str) -> Flow[Operation]:
        """Return one operation in its current state."""
        return self._ask(path_of(OPERATIONS, operation_id), answers.operation)

    @call
    def wait(
        self,
        operation_id: str,
        *,
        timeout_s: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> Flow[Operation]:
        """Return an operation once it has ended; ``state`` tells how.

        Raises:
            WaitTimeout: it still runs after ``timeout_s`` seconds.
        """
        return flows.follow(operation_id, self._retry, timeout_s=timeout_s, on_progress=on_progress)

    @call
    def audit(self, limit: int | None = None) -> Flow[list[dict[str, Any]]]:
        """Return the audit log, the newest entry first."""
        return self._ask("/v1/audit", answers.rows, limit=limit)

    @call
    def cluster(self) -> Flow[dict[str, Any]]:
        """Return the totals of the cluster, its models, boards and pauses."""
        return self._ask("/v1/cluster", dict)

    @call
    def verdict(self) -> Flow[dict[str, Any]]:
        """Return the verdict on the cluster, with its reasons and their commands."""
        return self._ask("/v1/cluster/verdict", dict)

    @call
    def board_history(self, board: str) -> Flow[dict[str, Any]]:
        """Return the figures of one board over the last half an hour, every five seconds."""
        return self._ask(path_of("/v1/boards", board, "history"), dict)

    @call
    def usage(self, days: int | None = None) -> Flow[dict[str, Any]]:
        """Return the usage of each API key on each of the last days (UTC), the latest first in
        ``data``, and the Routers that it is from.
        """
        return self._ask("/v1/usage", dict, days=days)

    @call
    def boards(self) -> Flow[list[dict[str, Any]]]:
        """Return the reports of all boards."""
        return self._ask("/v1/boards", answers.rows)

    @call
    def drain_boards(
        self,
        boards: Names | None = None,
        mode: DrainMode = "wait",
        *,
        models: Names | None = None,
        **options: Unpack[WaitEpochOptions],
    ) -> Flow[Operation]:
        """Send boards no new requests until they are undrained; return when they have none left.

        ``boards`` are ids or shell patterns; with ``models`` alone all boards of these. Answers
        that have begun end where they are, or with ``mode`` ``move`` continue on other boards at
        once.

        Raises:
            PartlyDone: boards still have requests; they stay drained.
            Conflict: with ``move``, no other board serves the model.
        """
        params = {**scope(models, boards), "mode": mode}
        return self._complete(f"{BOARDS}/drain", params, **options)

    @call
    def undrain_boards(
        self,
        boards: Names | None = None,
        *,
        models: Names | None = None,
        **options: Unpack[EpochOptions],
    ) -> Flow[Operation]:
        """Let drained boards take requests again; without ``boards`` and ``models`` all of them."""
        return self._change(f"{BOARDS}/undrain", scope(models, boards), **options)

    @call
    def restart_board(self, board: str, **options: Unpack[WaitOptions]) -> Flow[Operation]:
        """Replace the engine of one board; return when its model is loaded again.

        What runs there continues, recomputed.

        Raises:
            NotFound: there is no such board.
            Conflict: another operation changes its engine.
            OperationFailed: the board cannot load its model.
        """
        return self._complete(path_of(BOARDS, board, "restart"), {}, **options)

    @call
    def measure_board(
        self, board: str, seconds: float | None = None, *, wait: bool = False
    ) -> Flow[dict[str, Any]]:
        """Measure the speed of one board, and return it beside the speed that it should reach.

        ``measured``, ``expected`` and ``ratio`` have the figures, ``sentence`` the result. Requests
        that come meanwhile wait.

        Raises:
            NotFound: there is no such board.
            Conflict: it is asleep or paused, or it has requests and ``wait`` is not set.
        """
        request = change(
            "POST",
            path_of(BOARDS, board, "measure"),
            {"seconds": seconds, "wait": wait or None},
            read_s=BUILD_S,
        )
        return flows.ask(request, self._retry, dict)

    @call
    def members(self) -> Flow[list[dict[str, Any]]]:
        """Return the boards that have asked to join: joined, waiting and denied ones."""
        return self._ask(MEMBERS, answers.rows)

    @call
    def approve_boards(self, names: Names = (), *, waiting: bool = False) -> Flow[dict[str, Any]]:
        """Approve boards by host name or id, or all that are ``waiting``, and return them.

        Raises:
            NotFound: no board of that name has asked to join.
        """
        body = given(boards=listed(names) or None, all=waiting or None)
        return self._command(Request("POST", f"{MEMBERS}/approve", body=body))

    @call
    def deny_boards(self, names: Names) -> Flow[dict[str, Any]]:
        """Deny boards by host name or id, and return them. Raises what ``approve_boards`` does."""
        return self._command(Request("POST", f"{MEMBERS}/deny", body={"boards": listed(names)}))


class ModelCalls(Calls):
    """Calls that load models, unload them, and list them."""

    @call
    def sleep(
        self,
        level: Level = 1,
        mode: Mode = "keep",
        *,
        models: Names | None = None,
        boards: Names | None = None,
        wake_on_request: bool = False,
        lease_s: float | None = None,
        **options: Unpack[WaitEpochOptions],
    ) -> Flow[Operation]:
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
        return self._complete("/sleep", params, **options)

    @call
    def wake(
        self,
        tags: Sequence[Tag] | None = None,
        *,
        models: Names | None = None,
        boards: Names | None = None,
        **options: Unpack[WaitEpochOptions],
    ) -> Flow[Operation]:
        """Load what sleeps, and go on; without a scope everything. Returns when it is loaded.

        ``tags`` of only ``["weights"]`` loads the models and leaves the requests waiting, until
        the rest is woken too.

        Raises:
            PartlyDone: some boards have not loaded yet; they follow as soon as they can.
        """
        params = {**scope(models, boards), "tags": None if tags is None else list(tags)}
        return self._complete("/wake_up", params, **options)

    @call
    def is_sleeping(self, model: str | None = None) -> Flow[IsSleeping]:
        """Return what is asleep."""
        return self._ask("/is_sleeping", answers.is_sleeping, model=model)

    @call
    def load_model(self, model: str, **options: Unpack[WaitOptions]) -> Flow[Operation]:
        """Wake a model on all its boards. Raises what ``wake`` does."""
        return self._complete("/v1/models/load", {"model": model}, **options)

    @call
    def unload_model(
        self,
        model: str,
        level: Level | None = None,
        mode: Mode | None = None,
        *,
        wake_on_request: bool | None = None,
        **options: Unpack[WaitOptions],
    ) -> Flow[Operation]:
        """Put a model to sleep on all its boards, once what runs has ended.

        What is None is the server's default: level 1, mode ``wait``, and whether requests wake it
        as the boards' groups are configured. Raises what ``sleep`` does.
        """
        params = {"model": model, "level": level, "mode": mode, "wake_on_request": wake_on_request}
        return self._complete("/v1/models/unload", params, **options)

    @call
    def models(self) -> Flow[list[dict[str, Any]]]:
        """Return the models and adapters that can be asked for, and whether they are loaded."""
        return self._ask("/v1/models", answers.rows)


class WeightCalls(Calls):
    """Calls that change the weights and read which are served: by step, by file, by label."""

    @call
    def receive_weight_update(
        self,
        version: int,
        artifact: str | Pushed | PushedWeights,
        parameters: Sequence[Mapping[str, Any]] | None = None,
        *,
        model: str | None = None,
        in_flight: InFlight | None = None,
        **options: Unpack[WaitOptions],
    ) -> Flow[Operation]:
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
        return self._complete("/receive_weight_update", params, read_s=FILE_S, **options)

    @call
    def update_weights(
        self,
        path: str | PushedWeights,
        version: str | None = None,
        *,
        model: str | None = None,
        in_flight: InFlight | None = None,
        max_unavailable: int | None = None,
        **options: Unpack[WaitOptions],
    ) -> Flow[Operation]:
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
        return self._complete("/update_weights_from_disk", params, read_s=FILE_S, **options)

    @call
    def push_weights(
        self,
        source: Path | str | bytes,
        version: str | None = None,
        *,
        model: str | None = None,
        parameters: Sequence[Mapping[str, Any]] | None = None,
        manifest: Path | str | Mapping[str, Any] | None = None,
        allow_older: bool = False,
        key: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Flow[PushedWeights]:
        """Upload a file of base weights to the head; no board loads it.

        The default ``version`` is the first 12 digits of its sha256. With ``parameters`` an update
        that names other tensors is refused. ``manifest`` and ``allow_older`` are those of
        ``push_adapter``.

        Raises:
            SourceFailed: the file, or its manifest, cannot be read.
            Refused: it is not a model for these boards, or not signed as the cluster wants.
            Conflict: a later version was signed and sent before.
        """
        params = {
            "version": version,
            "model": model,
            "parameters": parameters,
            "manifest": manifest,
            "allow_older": "true" if allow_older else None,
        }
        return flows.push_weights(source, params, key, self._retry, on_progress)

    @call
    def push_model(
        self,
        folder: Path | str,
        *,
        replace: bool = False,
        manifest: Path | str | Mapping[str, Any] | None = None,
        allow_older: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Flow[PushedModel]:
        """Upload a model folder into the head's catalogue; boards with a group for it fetch it.

        Pieces that the head has are not sent again: a repeated call resumes. With ``replace`` it
        takes the place of another model of that name. ``manifest`` is the signed one of the folder,
        by default ``<folder>.manifest.json``, and ``allow_older`` that of ``push_adapter``.

        Raises:
            SourceFailed: the folder is no model, or cannot be read.
            Conflict: another model has the name, or it is being added.
            CallError: with ``disk_full``, the head has no room for it.
        """
        more = {"replace": replace, "allow_older": allow_older or None}
        return push_model(Path(folder), manifest, more, retry=self._retry, on_progress=on_progress)

    @call
    def prefetch_model(
        self, name: str, *, on_progress: OnProgress | None = None
    ) -> Flow[list[dict[str, Any]]]:
        """Have boards fetch a model of the catalogue before it is deployed, once for each node.

        Returns one row for each node when all have ended, or made no progress for five minutes; its
        ``state`` is ``present``, ``staged`` (whole; it replaces an earlier version when a board
        with this model starts next), ``unfit`` (for another SoC), ``failed`` or ``fetching``.

        Raises:
            NotFound: the catalogue has no such model.
        """
        return prefetch_model(name, retry=self._retry, on_progress=on_progress)

    @call
    def catalog(self) -> Flow[list[dict[str, Any]]]:
        """Return the models of the head's catalogue, with the boards that have or fetch them."""
        return self._ask(MODELS, lambda body: list(body["models"]))

    @call
    def weight_info(self, model: str | None = None) -> Flow[dict[str, Any]]:
        """Return the labels, steps and files of the weights, by model and board."""
        return self._ask("/weight_info", dict, model=model)

    @call
    def weight_version(self, model: str | None = None) -> Flow[str]:
        """Return the label of a model's weights."""
        return self._ask("/weight_info", answers.weight_version, model=model)

    @call
    def set_weight_version(
        self, version: str, *, model: str | None = None, key: str | None = None
    ) -> Flow[Operation]:
        """Label the weights of a model; answers carry the label."""
        params = {"new_version": version, "model": model}
        return self._change("/update_weight_version", params, key=key)


class GenerationCalls(Calls):
    """Calls on single generations, boards, KV caches and prompt caches.

    Changes have no idempotency key and are sent once.
    """

    @call
    def board(self, board: str) -> Flow[dict[str, Any]]:
        """Return the report of one board."""
        return self._ask(path_of("/v1/boards", board), dict)

    @call
    def generations(self) -> Flow[list[dict[str, Any]]]:
        """Return the generations that run, wait or are paused."""
        return self._ask("/v1/generations", answers.rows)

    @call
    def generation(self, generation: str) -> Flow[dict[str, Any]]:
        """Return one generation with its text so far."""
        return self._ask(path_of(GENERATIONS, generation), dict)

    def _control(self, generation: str, action: str, **params: Any) -> Flow[dict[str, Any]]:
        path = path_of(GENERATIONS, generation, action)
        return self._command(Request("POST", path, body=given(**params)))

    @call
    def pause_generation(self, generation: str, choice: int | None = None) -> Flow[dict[str, Any]]:
        """Pause a generation or one of its choices; return when it emits no more tokens."""
        return self._control(generation, "pause", choice=choice)

    @call
    def edit_generation(
        self,
        generation: str,
        *,
        choice: int | None = None,
        replace_last: int | None = None,
        text: str | None = None,
        token_ids: Sequence[int] | None = None,
        role: str | None = None,
        clear: Sequence[tuple[int, int]] | None = None,
    ) -> Flow[dict[str, Any]]:
        """Change a paused generation: drop its last tokens, append a text or token ids."""
        return self._control(
            generation,
            "edit",
            choice=choice,
            replace_last=replace_last,
            text=text,
            token_ids=token_ids,
            role=role,
            clear=clear,
        )

    @call
    def resume_generation(self, generation: str, choice: int | None = None) -> Flow[dict[str, Any]]:
        """Resume a paused generation."""
        return self._control(generation, "resume", choice=choice)

    @call
    def abort_generation(self, generation: str, choice: int | None = None) -> Flow[dict[str, Any]]:
        """Abort a generation; its client gets the text so far."""
        return self._control(generation, "abort", choice=choice)

    @call
    def kv_size(
        self, *, model: str | None = None, boards: Names | None = None
    ) -> Flow[dict[str, Any]]:
        """Return the size of the KV caches, by board and in total."""
        return self._ask("/v1/cache/kv/size", dict, model=model, boards=joined(boards))

    @call
    def clear_kv(
        self,
        *,
        model: str | None = None,
        boards: Names | None = None,
        generation: str | None = None,
        ranges: Sequence[tuple[int, int]] | None = None,
        everything: bool = False,
        keep_system_prompt: bool | None = None,
    ) -> Flow[dict[str, Any]]:
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
        return self._command(Request("POST", "/v1/cache/kv/clear", body=body))

    @call
    def caches(self, model: str) -> Flow[list[dict[str, Any]]]:
        """Return the prompt caches of a model, by board."""
        return self._ask(path_of(CACHES, model), answers.rows)

    @call
    def build_cache(
        self,
        model: str,
        name: str,
        *,
        prompt: str | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
    ) -> Flow[dict[str, Any]]:
        """Build a prompt cache from a prompt or messages, on every board of a model."""
        listing = None if messages is None else [dict(one) for one in messages]
        body = given(cache_name=name, prompt=prompt, messages=listing)
        request = Request("POST", path_of(CACHES, model), body=body, read_s=BUILD_S)
        return self._command(request)

    @call
    def delete_cache(self, model: str, name: str) -> Flow[dict[str, Any]]:
        """Delete a prompt cache on all boards."""
        return self._command(Request("DELETE", path_of(CACHES, model, name)))
