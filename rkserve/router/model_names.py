"""Resolution of model names: desired adapter lines, and adapters in this machine's model
folders.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from rkserve.api.common.version_policy import (
    ANY,
    POLICY,
    ResolvedModel,
    VersionPolicy,
    bind,
    check_label,
    find_line,
)
from rkserve.core.desired_state import Desired
from rkserve.core.errors import ConfigError, RequestError, VersionUnavailable
from rkserve.models.adapters import Adapter, AdapterChoice, adapters, resolve

log = logging.getLogger(__name__)

# Looking costs a few stat calls, and once per new file a reading of it all.
LOOK_AGAIN_S = 1.0


class ModelNames:
    """The models of one Router and their adapters. Use from one event loop.

    A line of the desired state takes precedence over a folder of the same name. Folders are scanned
    when a request names more than a model, so that a newly copied adapter is found by its first
    request.
    """

    def __init__(
        self, folders: Mapping[str, Path], desired: Callable[[], Desired] = Desired
    ) -> None:
        """``folders`` are the model folders by model; ``desired`` returns the desired state."""
        self._folders = dict(folders)
        self._desired = desired
        self._known: dict[str, tuple[Adapter, ...]] = {}
        self._looked_s = float("-inf")
        self._looking = asyncio.Lock()

    async def resolve(self, asked: str, policy: VersionPolicy = ANY) -> ResolvedModel:
        """Return the model and adapter that a model name refers to.

        Raises:
            ModelNotFound, AdapterBroken, RequestError: as ``models.adapters.resolve`` does.
            VersionUnavailable: the policy does not allow the version in service.
        """
        desired = self._desired()
        if asked in self._folders:
            check_label(desired.weights_of(asked).label, policy)
            return ResolvedModel(asked)
        found = find_line(asked, self._folders, desired)
        meant = None if found is None else bind(*found, policy)
        if meant is not None:
            return meant
        await self._look()
        return _of_folder(resolve(asked, self._known), asked, policy)

    async def adapters(self, model: str) -> list[tuple[Adapter, ...]]:
        """Return the adapters in a model's folder, each with its versions, newest last."""
        await self._look()
        by_name: dict[str, tuple[Adapter, ...]] = {}
        for one in self._known.get(model, ()):
            by_name[one.name] = (*by_name.get(one.name, ()), one)
        return list(by_name.values())

    async def has_adapter(self, name: str, models: tuple[str, ...]) -> bool:
        """Return whether one of the models (none: any) has an adapter of that name."""
        among = models or tuple(self._folders)
        if any(line.name == name and line.model in among for line in self._desired().lines):
            return True
        await self._look()
        return any(one.name == name for model in among for one in self._known.get(model, ()))

    async def _look(self) -> None:
        """Scan the folders at most once a second; concurrent requests share a scan."""
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


def _of_folder(chosen: AdapterChoice, asked: str, policy: VersionPolicy) -> ResolvedModel:
    """Return an adapter of a folder, which the policy must allow."""
    if chosen.adapter is None:
        return ResolvedModel(chosen.model)
    named = "@" in asked
    version = chosen.adapter.version
    if not policy.allows(version):
        if named:
            raise RequestError(
                f"The request names version '{version}', which its own '{POLICY}' does not allow.",
                POLICY,
            )
        raise VersionUnavailable(policy.text, f"'{chosen.adapter.name}' is at {version}")
    return ResolvedModel(chosen.model, chosen.adapter, named=named)
