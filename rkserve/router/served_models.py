"""The models of a Router: names resolved to models and adapters, and their entries in lists.

Adapters are lines of the desired state, or files in this machine's model folders.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rkserve.api.common.renderer import Renderer
from rkserve.api.common.version_policy import (
    ANY,
    POLICY,
    ResolvedModel,
    VersionPolicy,
    bind,
    check_label,
    find_line,
)
from rkserve.api.json.fields import JsonObject
from rkserve.api.openai.models import adapter_entry, line_entry, model_entry, models_list
from rkserve.core.desired_state import Desired
from rkserve.core.errors import (
    ConfigError,
    CoordinatorAway,
    ModelNotAllowed,
    ModelNotFound,
    RequestError,
    VersionUnavailable,
)
from rkserve.core.request_record import record_of_request
from rkserve.core.run_params import Sampling
from rkserve.fleet.fleet import Fleet
from rkserve.models.adapters import Adapter, AdapterChoice, adapters, resolve
from rkserve.models.folder import ModelFolder
from rkserve.models.settings import FolderSettings
from rkserve.router.coordinator_client import CoordinatorClient

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
        self, folders: Mapping[str, Path | None], desired: Callable[[], Desired] = Desired
    ) -> None:
        """``folders`` are the model folders by model, None of one at upstreams; ``desired`` returns
        the desired state.
        """
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
            if policy is not ANY:
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

    def _found(self, model: str, folder: Path | None) -> tuple[Adapter, ...]:
        if folder is None:
            return ()
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


# The model name of the vendor's demo client, whose server has a single model and ignores it.
VENDOR_MODEL = "rkllm"


@dataclass(frozen=True)
class ServedModel:
    """A model's folder and renderer, as the Router uses them.

    One that is ``remote`` is with upstreams only, which render and parse: its folder is empty.
    """

    folder: ModelFolder
    renderer: Renderer
    sampling: Sampling  # the model's defaults
    created: int
    remote: bool = False

    @classmethod
    def open(cls, folder: ModelFolder) -> ServedModel:
        """Load tokenizer and template. Raises ``ConfigError``."""
        sampling = folder.settings.sampling.values()
        return cls(folder, Renderer(folder), sampling, int(folder.path.stat().st_mtime))

    @classmethod
    def at_upstreams(cls, model: str, context_len: int) -> ServedModel:
        """Return a model that only upstreams have."""
        # Not checked: an upstream's context may have any length.
        settings = FolderSettings.model_construct(context_length=context_len)
        nowhere = Path(os.devnull) / model
        folder = ModelFolder(id=model, path=nowhere, weights=None, settings=settings)
        return cls(folder, Renderer(folder), Sampling(), int(time.time()), remote=True)


class ServedModels:
    """The models of one Router, with their adapters. Use from one event loop."""

    def __init__(
        self, models: Mapping[str, ServedModel], cluster: CoordinatorClient, fleet: Fleet
    ) -> None:
        self.by_name, self._cluster, self._fleet = dict(models), cluster, fleet
        paths = {
            name: None if served.remote else served.folder.path for name, served in models.items()
        }
        self.names = ModelNames(paths, lambda: cluster.desired)

    @property
    def default(self) -> str:
        """The model of calls without one: the first that generates text, if any."""
        return next(iter([*self.generating, *self.by_name]))

    @property
    def only(self) -> str:
        """The model of calls without one: the only one that generates text, or the only one.

        Raises:
            RequestError: there are several.
        """
        if len(self.generating or self.by_name) > 1:
            raise RequestError(
                "Missing required parameter: 'model'. It may be left out only where a single model "
                "is served that generates text.",
                "model",
            )
        return self.default

    @property
    def generating(self) -> tuple[str, ...]:
        """The models that generate text: those whose folders make no embeddings."""
        return tuple(n for n, one in self.by_name.items() if one.folder.settings.embedding is None)

    async def one(self, asked: str) -> JsonObject:
        """Return the entry of one model or adapter. Raises ``ModelNotFound``, ``AdapterBroken``."""
        meant = await self.resolve(asked)
        if meant.adapter_name is None:
            return self._model_entry(meant.model)
        found = find_line(asked, self.by_name, self._cluster.desired)
        # Resolved as for a request: what a line does not serve yet, a folder may.
        if found is not None and bind(*found, ANY) is not None:
            return line_entry(*self._ages(meant.model), *found)
        listed = await self.names.adapters(meant.model)
        versions = next((v for v in listed if v[0].name == meant.adapter_name), None)
        if versions is None or meant.adapter is None:
            raise ModelNotFound(asked)  # it has been removed since it was resolved
        named = meant.adapter.version if meant.named else None
        return adapter_entry(meant.model, *self._ages(meant.model), versions, named)

    async def listed(self) -> JsonObject:
        """Return the list of models, each followed by its adapters: those of the request's key."""
        entries = []
        for model_id in self.by_name:
            ages = self._ages(model_id)
            in_folder = {of[0].name: of for of in await self.names.adapters(model_id)}
            lines = [line for line in self._cluster.desired.lines if line.model == model_id]
            served = [line for line in lines if bind(line, None, ANY) is not None]
            taken = {line.name for line in served} | in_folder.keys()
            entries.append(self._model_entry(model_id))
            entries += [line_entry(*ages, line) for line in served]
            # What was never rolled out has no version for its bare name.
            entries += [
                line_entry(*ages, line, one.ref.version)
                for line in lines
                if line.name not in taken
                for one in line.versions
            ]
            entries += [
                adapter_entry(model_id, *ages, versions)
                for name, versions in in_folder.items()
                if all(name != line.name for line in served)
            ]
        models = record_of_request().models
        if models:
            entries = [one for one in entries if models & {one["id"], one.get("parent")}]
        return models_list(entries)

    async def resolve(self, asked: str, policy: VersionPolicy = ANY) -> ResolvedModel:
        """Return the model and adapter that a model name refers to.

        Raises:
            ModelNotAllowed: the key of the current request is for other models.
            CoordinatorAway: the name is unknown, and so is the desired state.
            RkserveError: as ``ModelNames.resolve``.
        """
        meant = await self._resolve(asked, policy)
        self.permit(meant)
        return meant

    def permit(self, meant: ResolvedModel) -> None:
        """Raise ``ModelNotAllowed`` if the key of the current request is for other models."""
        record = record_of_request()
        if record.models and not record.models & {meant.model, meant.adapter_name}:
            raise ModelNotAllowed(record.key, meant.adapter_name or meant.model)

    async def _resolve(self, asked: str, policy: VersionPolicy) -> ResolvedModel:
        try:
            return await self.names.resolve(asked, policy)
        except ModelNotFound:
            if asked == VENDOR_MODEL:
                return await self.names.resolve(self.default, policy)
            if self._cluster.known:
                raise
            raise CoordinatorAway(
                f"Whether there is an adapter '{asked[:80]}' is not known before the Coordinator "
                "has sent its state."
            ) from None

    def _model_entry(self, model_id: str) -> JsonObject:
        desired, reports = self._cluster.desired, self._fleet.reports(model_id)
        served, ages = self.by_name[model_id], self._ages(model_id)
        embedding, vision = served.folder.settings.embedding, served.folder.settings.vision
        return model_entry(model_id, *ages, reports, desired, embedding=embedding, vision=vision)

    def position_bytes(self, model_id: str) -> int | None:
        """Return the bytes of one KV cache position, if the model's folder says so."""
        return self.by_name[model_id].folder.settings.kv_bytes_per_token

    def _ages(self, model_id: str) -> tuple[int, int]:
        """Return when the model was created, and its context length."""
        served = self.by_name[model_id]
        return served.created, served.folder.settings.context_length
