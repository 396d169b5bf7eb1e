"""The stored responses that a Router can read: those of its node, and those of other nodes'
Routers.

A response is on the disk of the node whose Router gave it. A Router asks the other Routers for
responses that it does not have, so that a client may use any of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from rkserve.api.common.answer import AnyCall, DialectAnswer
from rkserve.api.json.fields import JsonObject
from rkserve.api.responses.answers import ResponseAnswer
from rkserve.api.responses.requests import ResponseCall, remembered
from rkserve.api.responses.stored import (
    StoredResponse,
    find_item,
    input_items,
    is_response_id,
    response_of,
)
from rkserve.config.router import RouterConfig
from rkserve.core.errors import (
    BodyTooLarge,
    ItemNotFound,
    PreviousResponseNotFound,
    ResponseNotFound,
    ResponsesFailed,
    UnsupportedParameter,
)
from rkserve.core.node_database import StoreThread
from rkserve.router.auth.key_ring import ClientKey, KeyRing
from rkserve.router.response_store import ResponseStore, remove_all, too_long

log = logging.getLogger(__name__)

FORGET_S = 3600.0
# The owners of calls without an API key; they cannot equal a digest, which is longer.
_OPERATOR, _ANYBODY = "operator", "anybody"


class ResponsePeers(Protocol):
    """The Routers of one application. Their calls raise ``BoardFailed``."""

    async def kept_chain(
        self, owner: str, response_id: str, most_bytes: int | None
    ) -> list[StoredResponse]:
        """Return the chain of any Router that has it; see ``ResponseStore.chain``."""

    async def forget_response(self, owner: str, response_id: str) -> bool:
        """Remove a response from all Routers; False if none had it."""


def owner_of(client: ClientKey | None, keys: KeyRing) -> str:
    """Return the owner of a caller's responses: its key, whatever secret it has."""
    if client is not None:
        return client.id or client.digest.hex()
    return _ANYBODY if keys.anonymous else _OPERATOR


class Responses:
    """The stored responses of one Router. Use from one event loop."""

    def __init__(
        self, config: RouterConfig, folder: Path, peers: ResponsePeers | None = None
    ) -> None:
        """``peers`` are all Routers, if there are several."""
        self._config, self._most_bytes = config.responses, config.max_body_bytes
        self._folder, self._peers = folder, peers
        kept = config.responses
        self._store = StoreThread(
            "responses", lambda: ResponseStore(folder, kept.max_bytes, kept.keep_s)
        )
        self._writing: set[asyncio.Task[None]] = set()

    def stores(self, asked: bool | None) -> bool:
        """Return whether the response of a call with this ``store`` value is stored."""
        default = {"default": True, "asked": False, "never": False}[self._config.store]
        return self._config.store != "never" and (default if asked is None else asked)

    @property
    def keeps(self) -> bool:
        """Return whether responses are stored at all."""
        return self._config.store != "never"

    async def one(self, owner: str, response_id: str) -> StoredResponse:
        """Return a response. Raises ``ResponseNotFound``, ``ResponsesFailed``, ``BoardFailed``."""
        found = await self._chain(owner, response_id, None)
        if not found:
            raise ResponseNotFound(response_id)
        return found[0]

    async def conversation(
        self, owner: str, response_id: str, *, as_far: bool = False
    ) -> list[StoredResponse]:
        """Return the response and those before it, the oldest first.

        ``as_far``: as far as they are still stored.

        Raises:
            PreviousResponseNotFound: one of them is not stored.
            BodyTooLarge: together they are longer than a body may be.
        """
        chain: list[StoredResponse] = []
        wanted: str | None = response_id
        while wanted is not None:
            found = await self._chain(owner, wanted, self._most_bytes)
            if not found and as_far:
                break
            if not found:
                raise PreviousResponseNotFound(wanted, response_id)
            chain += found
            self._check_size(sum(one.size for one in chain))
            wanted = found[-1].previous
        return chain[::-1]

    async def items(self, owner: str, item_ids: set[str]) -> dict[str, JsonObject]:
        """Return items of earlier responses. Raises ``ItemNotFound``, ``BodyTooLarge``."""
        found: dict[str, JsonObject] = {}
        by_response: dict[str, list[str]] = {}
        for item_id in sorted(item_ids):
            by_response.setdefault(response_of(item_id), []).append(item_id)
        size = 0
        for response_id, of_it in by_response.items():
            kept = await self._chain(owner, response_id, None)
            if not kept:
                raise ItemNotFound(of_it[0])
            size += kept[0].size
            self._check_size(size)
            found.update({item_id: find_item(kept[0], item_id) for item_id in of_it})
        return found

    async def delete(self, owner: str, response_id: str) -> None:
        """Remove a response. Raises ``ResponseNotFound``, ``ResponsesFailed``, ``BoardFailed``."""
        if not is_response_id(response_id) or not self.keeps:
            raise ResponseNotFound(response_id)
        if await self.forget_here(owner, response_id):
            return
        if self._peers is None or not await self._peers.forget_response(owner, response_id):
            raise ResponseNotFound(response_id)

    async def write(self, owner: str, kept: StoredResponse) -> None:
        """Store a response on this node. Raises ``ResponsesFailed``."""
        await self._store.call(lambda store: store.write(owner, kept))

    async def chain_here(
        self, owner: str, response_id: str, most_bytes: int | None
    ) -> list[StoredResponse]:
        """Return the chain on this node; see ``ResponseStore.chain``."""
        return await self._store.call(lambda store: store.chain(owner, response_id, most_bytes))

    async def forget_here(self, owner: str, response_id: str) -> bool:
        """Remove a response from this node; False if it is not there."""
        return await self._store.call(lambda store: store.delete(owner, response_id))

    async def forget_old(self) -> None:
        """Remove expired responses periodically; all of them if storage is disabled."""
        if not self.keeps:
            await asyncio.to_thread(remove_all, self._folder)
            return
        while True:
            try:
                await self._store.call(lambda store: store.sweep())
            except ResponsesFailed as exc:
                log.warning("old responses cannot be removed: %s", exc)
            await asyncio.sleep(FORGET_S)

    def later(self, writing: Coroutine[Any, Any, None]) -> None:
        """Write in the background, and keep track of the task."""
        task = asyncio.get_running_loop().create_task(writing)
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    def close(self) -> None:
        """Finish pending writes and close the file."""
        self._store.close()

    async def _chain(
        self, owner: str, response_id: str, most_bytes: int | None
    ) -> list[StoredResponse]:
        if not is_response_id(response_id) or not self.keeps:
            return []
        found = await self.chain_here(owner, response_id, most_bytes)
        if found or self._peers is None:
            return found
        return await self._peers.kept_chain(owner, response_id, most_bytes)

    def _check_size(self, size: int) -> None:
        if size > self._most_bytes:
            raise BodyTooLarge(too_long(self._most_bytes))


class CallMemory:
    """The stored conversation of one call of ``/v1/responses``."""

    def __init__(self, responses: Responses, owner: str) -> None:
        """``owner`` is the owner of the responses."""
        self._responses, self._owner = responses, owner
        self._kept = False
        self.recalled = False  # stored items were added to the call

    async def recall(self, call: AnyCall) -> AnyCall:
        """Return the call with the earlier items that it refers to.

        Raises:
            PreviousResponseNotFound, ItemNotFound: an item that the call refers to is not stored.
            UnsupportedParameter: nothing is stored here.
            BodyTooLarge: it is more than one request may bring.
            ResponsesFailed, BoardFailed: storage failed.
        """
        if not isinstance(call, ResponseCall):
            return call
        if not self._responses.keeps:
            self._refuse(call)
        before: list[StoredResponse] = []
        if call.previous is not None:
            before = await self._responses.conversation(self._owner, call.previous)
        wanted = {item_id for _, item_id in call.references}
        referenced = await self._responses.items(self._owner, wanted)
        self.recalled = bool(before or referenced)
        earlier = [item for one in before for item in one.conversation]
        stored = self._responses.stores(call.store)
        whole = partial(remembered, call, earlier, referenced, stored=stored)
        # Parsing a long conversation on the event loop would delay other streams.
        return await asyncio.to_thread(whole) if self.recalled else whole()

    async def keep(self, answer: DialectAnswer, failure: BaseException | None = None) -> None:
        """Store a finished answer, or the part of a failed one; the first call counts.

        A failure to store is noted in the answer, which continues.
        """
        if not isinstance(answer, ResponseAnswer):
            return
        response = answer.whole if failure is None else lambda: answer.failed(failure)
        await self._keep(answer, response)

    def left(self, answer: DialectAnswer) -> None:
        """Store the part of an answer whose client has left, in the background."""
        if isinstance(answer, ResponseAnswer):
            self._responses.later(self._keep(answer, answer.left))

    async def _keep(self, answer: ResponseAnswer, response: Callable[[], JsonObject]) -> None:
        call = answer.call
        if self._kept or call is None or not answer.to_be_kept:
            return
        self._kept = True
        items = input_items(call.items, answer.id)
        try:
            await self._responses.write(
                self._owner, StoredResponse(answer.id, call.previous, items, response())
            )
        except ResponsesFailed as exc:
            log.warning("the response %s is not kept: %s", answer.id, exc)
            answer.not_kept()

    def _refuse(self, call: ResponseCall) -> None:
        if call.previous is None and not call.references:
            return
        param = "previous_response_id" if call.previous is not None else "input"
        raise UnsupportedParameter(
            f"Unsupported parameter: '{param}' needs responses that are kept, and this server "
            "keeps none. Send the conversation as 'input'.",
            param,
        )
