"""The Router's side of the Coordinator: what the cluster shall be, and asking for changes of it.

It knows the Coordinator through ``HeadLink`` only. While that cannot be reached, what was heard
last stays true: requests are served on, and the cluster cannot be changed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

from rkserve.control.artifact_manifest import Claim
from rkserve.control.artifact_metadata import FoundWeights
from rkserve.control.calls import Call, Outcome
from rkserve.control.operations import Operation
from rkserve.core.desired_state import AdapterVersion, Artifact, BaseVersion, Desired, KeptCache
from rkserve.core.errors import CoordinatorAway, RkserveError

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


class HeadLink(Protocol):
    """How a Router reaches the Coordinator."""

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call one of its methods; raises ``RkserveError`` only, ``CoordinatorAway`` unreached."""


class Cluster:
    """What the cluster shall be, as one Router has heard. Use it from one event loop."""

    def __init__(
        self, link: HeadLink, on_change: Callable[[Desired], None] = lambda _desired: None
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

    async def perform(self, call: Call) -> Outcome:
        """Have the Coordinator change the cluster. Raises ``RkserveError``.

        It goes on where the client leaves: half a change would be worse.
        """
        if not self.reachable:
            await self.refresh()  # Ray would wait for one that is gone as long as it takes
        asked = asyncio.ensure_future(self._link.call("perform", call, timeout_s=CHANGE_S))
        asked.add_done_callback(_look_at_error)
        outcome: Outcome = await asyncio.shield(asked)
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

    async def keep_cache(self, cache: KeptCache) -> None:
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
        claim: Claim,
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

    async def register(self, kind: str, place: str, claim: Claim, scale: float) -> AdapterVersion:
        """Take a file that is at a ``path`` of the head, or behind a ``url``."""
        done: AdapterVersion = await self._store(f"register_{kind}", place, claim, scale)
        return done

    async def register_model(self, kind: str, place: str, claim: Claim) -> BaseVersion | None:
        """Take base weights likewise; None is the file in the model's own folder."""
        done: BaseVersion | None = await self._store("register_model", kind, place, claim)
        return done

    async def find_weights(self, model: str, artifact: str) -> FoundWeights:
        """Return what can be served as ``<name>@<version>``. Raises ``ArtifactNotFound``."""
        found: FoundWeights = await self._store("find_weights", model, artifact)
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
