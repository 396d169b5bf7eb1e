"""The Router's connection to the Coordinator: desired state, operations, wake on request."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

from rkserve.control.artifact_metadata import DeclaredArtifact, StoredArtifact
from rkserve.control.calls import OperationOutcome, OperationRequest
from rkserve.control.operations import Operation, OperationKind
from rkserve.control.sleep import REQUEST, requested, wakeable
from rkserve.core.desired_state import AdapterVersion, Artifact, BaseVersion, Desired, DesiredCache
from rkserve.core.errors import CoordinatorAway, ModelAsleep, RkserveError
from rkserve.fleet.fleet import Fleet

log = logging.getLogger(__name__)


POLL_S = 20.0  # how long the Coordinator holds a question for what is newer
GRACE_S = 5.0  # for the way there and back
TRY_AGAIN_S = 0.5
LOOKUP_S = 10.0
METRICS_S = 2.0  # a scrape should not wait
# A changing call has a limit of its own, kept by the Coordinator, which undoes what it must. This
# one is for a Coordinator that is gone without Ray's noticing; a canary may be observed for a day.
CHANGE_S = 2 * 24 * 3600.0
HEAR_OF_IT_S = 2.0
STORE_S = 3600.0  # gigabytes may be copied or fetched, and are hashed


class CoordinatorLink(Protocol):
    """How a Router reaches the Coordinator."""

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call one of its methods; raises ``RkserveError`` only, ``CoordinatorAway`` unreached."""


class CoordinatorClient:
    """What the cluster shall be, as one Router has heard. Use it from one event loop."""

    def __init__(
        self, link: CoordinatorLink, on_change: Callable[[Desired], None] = lambda _desired: None
    ) -> None:
        self._link = link
        self._on_change = on_change
        self._desired: Desired | None = None
        self._heard_s: float | None = None
        self.reachable = False

    @property
    def desired(self) -> Desired:
        """What the cluster shall be; nothing in particular as long as nothing was heard."""
        return Desired() if self._desired is None else self._desired

    @property
    def known(self) -> bool:
        """Whether the Coordinator has been heard at all."""
        return self._desired is not None

    @property
    def heard_s_ago(self) -> float | None:
        """Seconds since the Coordinator was heard last."""
        return None if self._heard_s is None else time.monotonic() - self._heard_s

    # -- following ----------------------------------------------------------------------------

    async def follow(self) -> None:
        """Hear of every change, forever; without the Coordinator try again and again."""
        while True:
            try:
                await self._poll(POLL_S, POLL_S + GRACE_S)
            except CoordinatorAway as exc:
                if self.reachable:
                    log.warning("what the cluster shall be stays as it was: %s", exc)
                self.reachable = False
                await asyncio.sleep(TRY_AGAIN_S)
            except Exception:
                # A Router that stopped following would serve old versions for ever, unseen.
                log.exception("the Coordinator could not be asked; trying again")
                await asyncio.sleep(TRY_AGAIN_S)

    async def find(self, timeout_s: float) -> None:
        """Hear what the cluster shall be, before the first request; give up after ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while not self.known:
            try:
                await self.refresh(max(0.1, deadline_s - time.monotonic()))
            except RkserveError as exc:
                if time.monotonic() >= deadline_s:
                    log.warning("serving without knowing what the cluster shall be: %s", exc)
                    return
                await asyncio.sleep(min(TRY_AGAIN_S, timeout_s / 10))

    async def refresh(self, timeout_s: float = GRACE_S) -> None:
        """Hear at once what the cluster shall be. Raises ``RkserveError``."""
        await self._poll(0.0, timeout_s)

    async def _poll(self, wait_s: float, timeout_s: float) -> None:
        after = -1 if self._desired is None else self._desired.epoch
        found: Desired = await self._link.call("desired", after, wait_s, timeout_s=timeout_s)
        self._take(found)

    def _take(self, found: Desired) -> None:
        self._heard_s, self.reachable = time.monotonic(), True
        # Never back: an answer to an older question may come late.
        if self._desired is not None and found.epoch <= self._desired.epoch:
            return
        self._desired = found
        self._on_change(found)

    async def catch_up(self) -> None:
        """Know every epoch that the Coordinator has answered until now; without it, change nothing.

        One that is away is not waited for: ``follow`` asks it again and again.
        """
        if not self.reachable:
            return
        try:
            await self.refresh(HEAR_OF_IT_S)
        except CoordinatorAway as exc:
            log.warning("answering from what was heard last: %s", exc)

    async def _hear_of(self, epoch: int) -> None:
        """Know that epoch, so that what this Router says next fits what it answered.

        Mostly it has been heard by now: the Coordinator tells it before it tells the boards.
        """
        if self.desired.epoch >= epoch:
            return
        try:
            await self.refresh(HEAR_OF_IT_S)
        except CoordinatorAway as exc:
            log.warning("epoch %d was answered and has not been heard of yet: %s", epoch, exc)

    # -- changing -----------------------------------------------------------------------------

    async def perform(self, call: OperationRequest) -> OperationOutcome:
        """Have the Coordinator change the cluster. Raises ``RkserveError``.

        It goes on where the client leaves: half a change would be worse.
        """
        if not self.reachable:
            await self.refresh()  # Ray would wait for one that is gone as long as it takes
        asked = asyncio.ensure_future(self._link.call("perform", call, timeout_s=CHANGE_S))
        asked.add_done_callback(_look_at_error)
        outcome: OperationOutcome = await asyncio.shield(asked)
        await self._hear_of(outcome.operation.epoch)
        return outcome

    # -- looking ------------------------------------------------------------------------------

    async def operations(self, limit: int) -> list[Operation]:
        """Return the latest operations, the newest first."""
        found: list[Operation] = await self._look("operations", limit)
        return found

    async def operation(self, operation_id: str) -> Operation:
        """Return one of them. Raises ``OperationNotFound``."""
        found: Operation = await self._look("operation", operation_id)
        return found

    async def operation_by_key(self, key: str) -> Operation | None:
        """Return the operation that a call with that idempotency key became, if there was one."""
        found: Operation | None = await self._look("operation_by_key", key)
        return found

    async def audit(self, limit: int) -> list[Any]:
        """Return the latest lines of the audit log."""
        found: list[Any] = await self._look("audit", limit)
        return found

    async def metrics(self) -> bytes:
        """Return the Coordinator's metrics in Prometheus' text format."""
        if not self.reachable:
            raise CoordinatorAway("The Coordinator is not heard at the moment.")
        found: bytes = await self._link.call("metrics", timeout_s=METRICS_S)
        return found

    # -- prompt caches ------------------------------------------------------------------------

    async def keep_cache(self, cache: DesiredCache) -> None:
        """Have every board hold a prompt cache, also those that join. Raises ``RkserveError``."""
        await self._look("keep_cache", cache)

    async def drop_cache(self, model: str, name: str) -> bool:
        """Have no board hold it any more; False where it was not kept. Raises ``RkserveError``."""
        dropped: bool = await self._look("drop_cache", model, name)
        return dropped

    async def kept_caches(self, model: str) -> list[dict[str, object]]:
        """Return what is kept for a model, and what boards could not build."""
        found: list[dict[str, object]] = await self._look("kept_caches", model)
        return found

    # -- artifacts ----------------------------------------------------------------------------

    async def upload(
        self,
        parts: AsyncIterator[bytes],
        claim: DeclaredArtifact,
        manifest: Mapping[str, Any],
    ) -> Artifact:
        """Bring a file to the Coordinator part by part, of which one is in memory at a time.

        What was brought is thrown away if it does not come to its end.
        """
        # Whether it was trained on the weights that are served may have to be read from these.
        upload: str = await self._store("upload_begin", claim)
        try:
            offset = 0
            async for part in parts:
                await self._look("upload_part", upload, offset, part)
                offset += len(part)
            end = "upload_end_model" if claim.base else "upload_end"
            done: Artifact = await self._store(end, upload, dict(manifest))
        except BaseException:
            # Also where the client has left, which cancels this; and nobody waits for it.
            forgotten = asyncio.ensure_future(self._look("upload_abort", upload))
            forgotten.add_done_callback(_look_at_error)
            raise
        return done

    async def register(
        self, kind: str, place: str, claim: DeclaredArtifact, scale: float
    ) -> AdapterVersion:
        """Take a file that is at a ``path`` of the head, or behind a ``url``."""
        done: AdapterVersion = await self._store(f"register_{kind}", place, claim, scale)
        return done

    async def register_model(
        self, kind: str, place: str, claim: DeclaredArtifact
    ) -> BaseVersion | None:
        """Take base weights likewise; None is the file in the model's own folder."""
        done: BaseVersion | None = await self._store("register_model", kind, place, claim)
        return done

    async def find_weights(self, model: str, artifact: str) -> StoredArtifact:
        """Return what can be served as ``<name>@<version>``. Raises ``ArtifactNotFound``."""
        found: StoredArtifact = await self._store("find_weights", model, artifact)
        return found

    async def _look(self, method: str, *args: Any) -> Any:
        return await self._link.call(method, *args, timeout_s=LOOKUP_S)

    async def _store(self, method: str, *args: Any) -> Any:
        """It reads all of a file, or fetches it first."""
        return await self._link.call(method, *args, timeout_s=STORE_S)


def _look_at_error(task: asyncio.Future[Any]) -> None:
    """What nobody waits for any more is not to be logged as an error nobody looked at."""
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.info("a call to the Coordinator ended with: %s", exc)


# Whoever comes so soon after a wake-up that failed is told the same: each one is an operation.
FAILED_S = 1.0


class WakeOnRequest:
    """Use it from one event loop."""

    def __init__(self, cluster: CoordinatorClient, fleet: Fleet, limit_s: float) -> None:
        """Waits ``limit_s`` for the Coordinator to say that boards are about to load."""
        self._cluster = cluster
        self._fleet = fleet
        self._limit_s = limit_s
        self._going_on: dict[str, asyncio.Task[int]] = {}
        self._failed: dict[str, tuple[float, ModelAsleep]] = {}

    def needed(self, model: str) -> bool:
        """Whether a request for the model finds no board awake, and wakes one."""
        desired = self._cluster.desired
        return bool(desired.pauses) and wakeable(desired, model, self._fleet.reports(model))

    async def ready(self, model: str) -> int:
        """Return once the model's boards are awake or about to be: from which epoch on, or 0.

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
        # One client that leaves must not take the others' wake-up with it.
        return await asyncio.shield(task)

    async def _wake(self, model: str) -> int:
        call = OperationRequest(OperationKind.WAKE, requested(model), who=REQUEST, background=True)
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
