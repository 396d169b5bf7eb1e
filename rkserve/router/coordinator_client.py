"""The Router's connection to the Coordinator: desired state, operations, wake on request."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Protocol

from rkserve.control.calls import (
    AcceptedManifest,
    DeclaredArtifact,
    OperationKind,
    OperationRequest,
    StoredArtifact,
)
from rkserve.control.keys import KeyOutcome, KeyRequest
from rkserve.control.operations import HOLDS, ControlOperation, OperationOutcome
from rkserve.control.sleep import REQUEST, requested, wakeable
from rkserve.core.api_keys import ApiKey, KeyTable
from rkserve.core.desired_state import Artifact, Desired, DesiredCache
from rkserve.core.errors import CoordinatorAway, ModelAsleep, OperationTimeout, RkserveError
from rkserve.core.files import boot_id
from rkserve.core.logs import LogPage, LogQuery
from rkserve.core.request_record import request_id
from rkserve.fleet.fleet import Fleet
from rkserve.models.incoming import UploadProgress
from rkserve.models.index import ModelIndex
from rkserve.router.auth.key_ring import KeyRing

log = logging.getLogger(__name__)


POLL_S = 20.0  # how long the Coordinator holds a request for a newer state
GRACE_S = 5.0  # added for the round trip
TRY_AGAIN_S = 0.5
LOOKUP_S = 10.0
METRICS_S = 2.0  # a scrape must not wait
# Operations have time limits of their own, which the Coordinator enforces. This one is for a
# Coordinator whose loss Ray does not notice; a canary may be observed for a day.
CHANGE_S = 2 * 24 * 3600.0
# The Coordinator answers a pause at its limit, after it has undone it, for which it has 5 s.
LATE_S = 7.0
HEAR_OF_IT_S = 2.0
PIECE_S = 60.0
STORE_S = 3600.0  # gigabytes may be copied or fetched, and are hashed


class CoordinatorLink(Protocol):
    """The connection to the Coordinator."""

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call a method; raises ``RkserveError`` only, ``CoordinatorAway`` if unreachable."""


class CoordinatorClient:
    """The desired state as last received, and calls to the Coordinator. One event loop."""

    def __init__(
        self,
        link: CoordinatorLink,
        on_change: Callable[[Desired], None] = lambda _desired: None,
        hold_s: float | None = None,
    ) -> None:
        """``hold_s`` is the Coordinator's time limit of a pause that states none."""
        self._link = link
        self._on_change = on_change
        self._hold_s = hold_s
        self._heard_s: float | None = None
        self._going_on: set[asyncio.Future[Any]] = set()
        self._router = secrets.token_hex(8)  # names this Router to the Coordinator
        self.desired = Desired()  # empty until one was received
        self.known = False  # a desired state was received
        self.reachable = False

    @property
    def heard_s_ago(self) -> float | None:
        """The seconds since the Coordinator last answered."""
        return None if self._heard_s is None else time.monotonic() - self._heard_s

    # -- following ----------------------------------------------------------------------------

    async def follow(self) -> None:
        """Receive every change, forever; retry while the Coordinator is away."""

        async def ask() -> None:
            try:
                await self._poll(POLL_S, POLL_S + GRACE_S)
            except CoordinatorAway:
                self.reachable = False
                raise

        await self._forever(ask, "the last desired state")

    async def find(self, timeout_s: float) -> None:
        """Receive the desired state before the first request; give up after ``timeout_s``."""
        await self._until(lambda: self.known, self.refresh, timeout_s, "a desired state")

    async def _forever(self, ask: Callable[[], Awaitable[None]], kept: str) -> None:
        """Ask the Coordinator again and again; log the reason once while it does not answer."""
        failure = ""
        while True:
            try:
                await ask()
                failure = ""
            except RkserveError as exc:
                # Serve repeats the same error every half a second while it restarts it.
                if exc.message != failure:
                    failure = exc.message
                    log.warning("keeping %s: %s", kept, failure)
                await asyncio.sleep(TRY_AGAIN_S)
            except Exception:
                # A Router that stopped following would serve old versions, and take revoked keys,
                # forever, unnoticed.
                log.exception("the Coordinator could not be asked; trying again")
                await asyncio.sleep(TRY_AGAIN_S)

    async def _until(
        self,
        known: Callable[[], bool],
        ask: Callable[[float], Awaitable[None]],
        timeout_s: float,
        what: str,
    ) -> None:
        """Ask, each time within the rest of the time, until it is known or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while not known():
            try:
                await ask(max(0.1, deadline_s - time.monotonic()))
            except RkserveError as exc:
                if time.monotonic() >= deadline_s:
                    log.warning("serving without %s: %s", what, exc)
                    return
                await asyncio.sleep(min(TRY_AGAIN_S, timeout_s / 10))

    async def refresh(self, timeout_s: float = GRACE_S) -> None:
        """Get the desired state now. Raises ``RkserveError``."""
        await self._poll(0.0, timeout_s)

    async def _poll(self, wait_s: float, timeout_s: float) -> None:
        after = self.desired.epoch if self.known else -1
        found: Desired = await self._link.call("desired", after, wait_s, timeout_s=timeout_s)
        self._take(found)

    def _take(self, found: Desired) -> None:
        self._heard_s, self.reachable = time.monotonic(), True
        # Epochs never go back: the answer to an older request may arrive late.
        if self.known and found.epoch <= self.desired.epoch:
            return
        self.desired, self.known = found, True
        self._on_change(found)

    async def catch_up(self) -> None:
        """Get every epoch published so far; keep the state if that fails.

        A Coordinator that is away is not awaited: ``follow`` retries.
        """
        if not self.reachable:
            return
        try:
            await self.refresh(HEAR_OF_IT_S)
        except CoordinatorAway as exc:
            log.warning("answering from the last known state: %s", exc)

    async def _hear_of(self, epoch: int) -> None:
        """Get that epoch, so that later answers of this Router are consistent with it.

        Usually it is known already, because the Coordinator informs Routers before boards.
        """
        if self.desired.epoch >= epoch:
            return
        try:
            await self.refresh(HEAR_OF_IT_S)
        except CoordinatorAway as exc:
            log.warning("epoch %d was confirmed, but its state has not arrived yet: %s", epoch, exc)

    # -- changing -----------------------------------------------------------------------------

    async def perform(self, call: OperationRequest) -> OperationOutcome:
        """Have the Coordinator change the cluster. Raises ``RkserveError``.

        The call continues if the client leaves, because half a change would be worse. A pause or a
        sleep that a frozen Coordinator has not answered in time is an ``OperationTimeout``; the
        Coordinator undoes it, or does not begin it, when it goes on.
        """
        call = replace(call, request_id=request_id(), boot=boot_id(), sent_s=time.monotonic())
        if not self.reachable:
            await self.refresh()  # Ray would wait without limit for one that is gone
        asked = self._begun(self._link.call("perform", call, timeout_s=CHANGE_S))
        limit_s = self._limit_of(call)
        try:
            outcome: OperationOutcome = await asyncio.wait_for(asyncio.shield(asked), limit_s)
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            raise OperationTimeout(
                f"The Coordinator did not answer within {limit_s:g} s, with {LATE_S:g} s beyond "
                f"the time limit; the {call.kind.value} is not in effect once it answers again. "
                "GET /v1/operations has its record."
            ) from None
        await self._hear_of(outcome.operation.epoch)
        return outcome

    def _begun(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begin a call that goes on when its caller leaves."""
        task = asyncio.get_running_loop().create_task(call)
        self._going_on.add(task)
        task.add_done_callback(self._going_on.discard)
        task.add_done_callback(_look_at_error)
        return task

    def _limit_of(self, call: OperationRequest) -> float | None:
        """Return the longest wait for the answer to a pause or a sleep; None without a limit."""
        if call.kind not in HOLDS:
            return None
        limit_s = call.timeout_s
        if limit_s is None and call.kind is OperationKind.PAUSE:  # a sleep may load models
            limit_s = self._hold_s
        return None if limit_s is None else limit_s + LATE_S

    # -- looking ------------------------------------------------------------------------------

    async def operations(self, limit: int) -> list[ControlOperation]:
        """Return the latest operations, the newest first."""
        found: list[ControlOperation] = await self._look("operations", limit)
        return found

    async def operation(self, operation_id: str) -> ControlOperation:
        """Return one operation. Raises ``OperationNotFound``."""
        found: ControlOperation = await self._look("operation", operation_id)
        return found

    async def operation_by_key(self, key: str) -> ControlOperation | None:
        """Return the operation with that idempotency key, if any."""
        found: ControlOperation | None = await self._look("operation_by_key", key)
        return found

    async def audit(self, limit: int) -> list[Any]:
        """Return the latest lines of the audit log."""
        found: list[Any] = await self._look("audit", limit)
        return found

    async def metrics(self) -> bytes:
        """Return the Coordinator's metrics in Prometheus' text format."""
        if not self.reachable:
            raise CoordinatorAway("The Coordinator does not respond at the moment.")
        found: bytes = await self._link.call("metrics", timeout_s=METRICS_S)
        return found

    async def logs(self, query: LogQuery) -> LogPage:
        """Return lines of the Coordinator's log. Raises ``CoordinatorAway``."""
        found: LogPage = await self._link.call("logs", query, timeout_s=METRICS_S)
        return found

    # -- API keys -----------------------------------------------------------------------------

    async def follow_keys(self, keys: KeyRing) -> None:
        """Put every change of the cluster's keys into force, forever.

        While the Coordinator is away the last known ones stay in force.
        """
        await self._forever(
            lambda: self.refresh_keys(keys, POLL_S, POLL_S + GRACE_S), "the last keys"
        )

    async def find_keys(self, keys: KeyRing, timeout_s: float) -> None:
        """Receive the cluster's keys before the first request; give up after ``timeout_s``."""
        await self._until(
            lambda: keys.revision >= 0,
            lambda left_s: self.refresh_keys(keys, 0.0, left_s),
            timeout_s,
            "the cluster's keys",
        )

    async def refresh_keys(
        self, keys: KeyRing, wait_s: float = 0.0, timeout_s: float = GRACE_S
    ) -> None:
        """Get the cluster's keys, at a change or after ``wait_s``. Raises ``RkserveError``."""
        used = keys.take_used()
        asked = self._router, keys.revision, wait_s, used
        try:
            found: KeyTable = await self._link.call("api_keys", *asked, timeout_s=timeout_s)
        except BaseException:
            keys.put_back(used)
            raise
        if found.revision > keys.revision:  # the answer to an older request may arrive late
            keys.take(found)

    async def change_key(self, call: KeyRequest, keys: KeyRing) -> KeyOutcome:
        """Have the Coordinator create, rotate or revoke a key. Raises ``RkserveError``."""
        asked = self._begun(self._look("change_key", replace(call, router=self._router)))
        outcome: KeyOutcome = await asyncio.shield(asked)
        if keys.revision < outcome.revision:
            await self.refresh_keys(keys)
        return outcome

    async def listed_keys(self) -> list[tuple[ApiKey, float | None]]:
        """Return the cluster's keys with the times of their last use."""
        found: list[tuple[ApiKey, float | None]] = await self._look("listed_keys")
        return found

    # -- prompt caches ------------------------------------------------------------------------

    async def keep_cache(self, cache: DesiredCache) -> None:
        """Have every board build a prompt cache, also later ones. Raises ``RkserveError``."""
        await self._look("keep_cache", cache)

    async def drop_cache(self, model: str, name: str) -> bool:
        """Stop keeping a prompt cache; False if it was not kept. Raises ``RkserveError``."""
        dropped: bool = await self._look("drop_cache", model, name)
        return dropped

    async def kept_caches(self, model: str) -> list[dict[str, object]]:
        """Return the kept caches of a model, and failures of boards to build them."""
        found: list[dict[str, object]] = await self._look("kept_caches", model)
        return found

    # -- artifacts ----------------------------------------------------------------------------

    async def upload(
        self,
        parts: AsyncIterator[bytes],
        claim: DeclaredArtifact,
        manifest: Mapping[str, Any],
    ) -> Artifact:
        """Upload a file to the Coordinator in parts, one of them in memory at a time.

        An incomplete upload is discarded.
        """
        # Its base weights may have to be read, to compare their digest.
        upload: str = await self._store("upload_begin", claim)
        try:
            offset = 0
            async for part in parts:
                await self._look("upload_part", upload, offset, part)
                offset += len(part)
            done: Artifact = await self._store("upload_end", upload, dict(manifest))
        except BaseException:
            # Runs even if the client has left, which cancels this task; the result is not awaited.
            forgotten = asyncio.ensure_future(self._look("upload_abort", upload))
            forgotten.add_done_callback(_look_at_error)
            raise
        return done

    async def register(
        self, kind: str, place: str, claim: DeclaredArtifact, scale: float = 1.0
    ) -> Artifact | None:
        """Register a file by its ``path`` on the head node or its ``url``; None is the model
        folder's own base weights.
        """
        done: Artifact | None = await self._store("register", kind, place, claim, scale)
        return done

    async def manifests(
        self, digests: Collection[str]
    ) -> Mapping[str, tuple[AcceptedManifest, ...]]:
        """Return the manifests of contents by their sha256; none while the Coordinator is away."""
        if not digests or not self.reachable:
            return {}
        found: Mapping[str, tuple[AcceptedManifest, ...]] = await self._look(
            "manifests", sorted(digests)
        )
        return found

    async def find_weights(self, model: str, artifact: str) -> StoredArtifact:
        """Return weights by ``<name>@<version>``. Raises ``ArtifactNotFound``."""
        found: StoredArtifact = await self._store("find_weights", model, artifact)
        return found

    # -- the catalogue ------------------------------------------------------------------------

    async def catalog_models(self) -> list[tuple[str, str, int]]:
        """Return name, version and size of the models of the head's catalogue."""
        found: list[tuple[str, str, int]] = await self._look("catalog_models")
        return found

    async def catalog_target(self, name: str) -> tuple[str, float | None]:
        """Return the SoC that a model is for, empty if unknown, and the limit of its fetches."""
        found: tuple[str, float | None] = await self._look("catalog_target", name)
        return found

    async def catalog_upload(
        self, index: ModelIndex, replace: bool, claim: DeclaredArtifact
    ) -> UploadProgress:
        """Begin or resume the upload of a model, whose weights ``claim`` declares. Raises
        ``RkserveError``.
        """
        begun: UploadProgress = await self._store("catalog_upload", index, replace, claim)
        return begun

    async def catalog_piece(
        self, name: str, version: str, path: str, number: int, data: bytes
    ) -> int:
        """Write a piece of a model; return the bytes that are there. Raises ``RkserveError``."""
        there: int = await self._link.call(
            "catalog_piece", name, version, path, number, data, timeout_s=PIECE_S
        )
        return there

    async def catalog_end(self, name: str, version: str) -> UploadProgress:
        """Publish an uploaded model. Raises ``RkserveError``."""
        ended: UploadProgress = await self._store("catalog_end", name, version)
        return ended

    async def _look(self, method: str, *args: Any) -> Any:
        return await self._link.call(method, *args, timeout_s=LOOKUP_S)

    async def _store(self, method: str, *args: Any) -> Any:
        """Store the file, which reads all of it, or fetches it first."""
        return await self._link.call(method, *args, timeout_s=STORE_S)


def _look_at_error(task: asyncio.Future[Any]) -> None:
    """Retrieve the exception of an abandoned call, so that asyncio does not log it."""
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.info("a call to the Coordinator ended with: %s", exc)


# Requests this soon after a failed wake-up get the same error, since each attempt is an operation.
FAILED_S = 1.0


class WakeOnRequest:
    """Wakes sleeping models for requests, once for all waiting ones. Use from one event loop."""

    def __init__(self, cluster: CoordinatorClient, fleet: Fleet, limit_s: float) -> None:
        """``limit_s`` bounds the wait for the Coordinator's answer."""
        self._cluster = cluster
        self._fleet = fleet
        self._limit_s = limit_s
        self._going_on: dict[str, asyncio.Task[int]] = {}
        self._failed: dict[str, tuple[float, ModelAsleep]] = {}

    def needed(self, model: str) -> bool:
        """Return whether no board of the model is awake, and a request wakes one."""
        desired = self._cluster.desired
        return bool(desired.pauses) and wakeable(desired, model, self._fleet.reports(model))

    async def ready(self, model: str) -> int:
        """Wake the model if needed; return the epoch that boards need, or 0.

        Raises:
            ModelAsleep: it cannot be woken now.
        """
        if not self.needed(model):
            return 0
        failed_s, error = self._failed.get(model, (float("-inf"), None))
        if error is not None and time.monotonic() - failed_s < FAILED_S:
            raise ModelAsleep(error.model, error.reason)
        task = self._going_on.get(model)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._wake(model))
            self._going_on[model] = task
            task.add_done_callback(lambda done: self._ended(model, done))
        # A client that leaves must not cancel the wake-up of the others.
        return await asyncio.shield(task)

    async def _wake(self, model: str) -> int:
        call = OperationRequest(requested(model), who=REQUEST, background=True)
        try:
            outcome = await asyncio.wait_for(self._cluster.perform(call), self._limit_s)
        except RkserveError as exc:
            raise ModelAsleep(model, exc.message.rstrip(".")) from exc
        except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
            reason = f"the Coordinator did not answer within {self._limit_s:g} s"
            raise ModelAsleep(model, reason) from None
        error = outcome.operation.error
        if error is not None:
            raise ModelAsleep(model, error.message.rstrip("."))
        return max(outcome.operation.epoch, self._cluster.desired.epoch)

    def _ended(self, model: str, task: asyncio.Task[int]) -> None:
        del self._going_on[model]
        if task.cancelled():
            return
        error = task.exception()
        if isinstance(error, ModelAsleep):
            log.warning("%s", error.message)
            self._failed[model] = (time.monotonic(), error)
        else:
            self._failed.pop(model, None)
