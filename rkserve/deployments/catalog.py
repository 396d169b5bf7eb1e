"""What the model names of requests mean: this machine's model folders and the adapters in them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from rkserve.adapterfolder import Adapter, Chosen, adapters, resolve
from rkserve.errors import ConfigError

log = logging.getLogger(__name__)

# Looking costs a few stat calls, and once per new file a reading of it all.
LOOK_AGAIN_S = 1.0


class Catalog:
    """The models of one Router and their adapters. Use it from one event loop.

    The folders are looked through when a request names more than a model, so that an adapter that
    was just copied there is found by the first request for it.
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        """``folders`` are the model folders by model."""
        self._folders = dict(folders)
        self._known: dict[str, tuple[Adapter, ...]] = {}
        self._looked_s = float("-inf")
        self._looking = asyncio.Lock()

    async def resolve(self, asked: str) -> Chosen:
        """Return the model and the adapter that a request means.

        Raises:
            ModelNotFound, AdapterBroken, RequestError: as ``adapterfolder.resolve`` does.
        """
        if asked in self._folders:
            return Chosen(asked, None)
        await self._look()
        return resolve(asked, self._known)

    async def adapters(self, model: str) -> list[tuple[Adapter, ...]]:
        """Return the adapters of a model, each with its versions, the newest last."""
        await self._look()
        by_name: dict[str, tuple[Adapter, ...]] = {}
        for one in self._known.get(model, ()):
            by_name[one.name] = (*by_name.get(one.name, ()), one)
        return list(by_name.values())

    async def _look(self) -> None:
        """Look through the folders, at most once a second; requests that wait share a look."""
        async with self._looking:
            if time.monotonic() - self._looked_s < LOOK_AGAIN_S:
                return
            self._known = await asyncio.to_thread(self._scan)  # hashing a new file takes a while
            self._looked_s = time.monotonic()

    def _scan(self) -> dict[str, tuple[Adapter, ...]]:
        return {model: self._found(model, folder) for model, folder in self._folders.items()}

    def _found(self, model: str, folder: Path) -> tuple[Adapter, ...]:
        try:
            return adapters(folder)
        except ConfigError as exc:
            log.warning("the adapters of %s stay as they were: %s", model, exc)
            return self._known.get(model, ())
