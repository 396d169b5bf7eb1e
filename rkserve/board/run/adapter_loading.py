"""Gets a LoRA adapter into the engine before a run that needs it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Protocol

from rkserve.board.rules.loaded_adapters import AdapterReady, RenewEngine
from rkserve.board.run.loaded_engine import LoadedEngine
from rkserve.core.errors import AdapterBroken, NativeError
from rkserve.core.messages import AdapterRef
from rkserve.models.adapters import Shelf, open_adapter

log = logging.getLogger(__name__)

# An adapter is read from flash storage, perhaps a slow card, while the call blocks.
LOAD_S = 60.0


class AdapterTarget(Protocol):
    """Where adapters are loaded."""

    @property
    def live(self) -> LoadedEngine:
        """The engine that is loaded now."""

    async def renew(self, reason: str) -> None:
        """Replace the engine by a fresh one: nothing else takes an adapter away."""


class AdapterLoader:
    """The adapters of one board as it loads them: those staged there, and the model folder's."""

    def __init__(self, folder: Path | None, staged: Shelf | None = None) -> None:
        """``folder`` is the model folder. What was ``staged`` on the board goes before it.

        Without either the base model alone is served.
        """
        shelves = (staged, None if folder is None else Shelf.of_model(folder))
        self._shelves = tuple(shelf for shelf in shelves if shelf is not None)

    async def ready(self, room: AdapterTarget, ref: AdapterRef) -> LoadedEngine:
        """Return the engine of ``room`` once that holds ``ref`` under its key.

        Raises:
            AdapterBroken: the file is missing, changed, or refused by the runtime.
            EngineHung, EngineDied: as any call.
        """
        found = await asyncio.to_thread(open_adapter, self._shelves, ref)
        engine = room.live
        need = engine.adapters.need(ref, found.size_bytes)
        if isinstance(need, AdapterReady):
            return engine
        if isinstance(need, RenewEngine):
            await room.renew("the memory of adapters is reclaimed")
            engine = room.live
        assert found.path is not None  # on a board an adapter without a file is broken
        try:
            await engine.call(
                "load_adapter", extra_s=LOAD_S, path=str(found.path), name=ref.key, scale=ref.scale
            )
        except NativeError as exc:
            log.warning("adapter %s was refused (%s): %s", found.label, found.path, exc)
            engine.adapters.refused(ref, str(exc))
            raise AdapterBroken(found.label, f"the runtime refused it: {exc}") from None
        engine.adapters.loaded(ref, found.size_bytes)
        log.info("adapter %s is loaded (%d bytes)", found.label, found.size_bytes)
        return engine
