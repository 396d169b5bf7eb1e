"""Ray's replica of the Coordinator: one on the head node, where its ledger is.

It assembles the Coordinator and the file store, waits for a predecessor to release the ledger, and
defines the methods that a Router may call.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray

from rkserve.config.board_group import BoardGroupConfig
from rkserve.config.serve_config import CoordinatorConfig, RkserveConfig, resolve_folder
from rkserve.control.calls import (
    AcceptedManifest,
    DeclaredArtifact,
    OperationRequest,
    StoredArtifact,
)
from rkserve.control.keys import KeyOutcome, KeyRequest
from rkserve.control.operations import ControlOperation, OperationOutcome
from rkserve.control.sleep import SleepPolicy
from rkserve.coordinator.artifacts.model_catalog import ModelCatalog
from rkserve.coordinator.artifacts.sources import DownloadPool
from rkserve.coordinator.artifacts.store import ArtifactRules, ArtifactStore
from rkserve.coordinator.coordinator import Coordinator, CoordinatorPorts
from rkserve.coordinator.intake import ArtifactIntake
from rkserve.coordinator.operations.trust import TrustRules
from rkserve.coordinator.state.ledger import Ledger
from rkserve.coordinator.state.ledger_files import BackupKeeper
from rkserve.core.api_keys import ApiKey, KeyTable
from rkserve.core.desired_state import (
    SYSTEM_PROMPT,
    Artifact,
    Desired,
    DesiredCache,
)
from rkserve.core.errors import ConfigError, LedgerFailed, RkserveError
from rkserve.core.logs import LogPage, LogQuery
from rkserve.deployments.board_link import RayLink
from rkserve.deployments.model_origin import ModelHolder
from rkserve.deployments.replica import ROUTER, log_with_serve, settle
from rkserve.deployments.router_peers import RayRouters
from rkserve.fleet.fleet import Fleet
from rkserve.models.folder import ModelFolder, open_model_folder
from rkserve.models.incoming import UploadProgress
from rkserve.models.index import ModelIndex
from rkserve.transport.client import ChannelClient

log = logging.getLogger(__name__)

ARTIFACTS = "artifacts"
# A replaced predecessor releases it when its process ends; Serve gives it some time.
CLAIM_S = 30.0
FIND_BOARDS_S = 3.0
SWEEP_S = 60.0
# A Router that polls repeatedly costs more than one that waits.
LONGEST_WAIT_S = 60.0


class CoordinatorReplica:
    """The Coordinator deployment. ``handles`` maps a group's name to its boards' handle.

    Raises:
        LedgerFailed: from the constructor, so that ``serve status`` shows the reason.
    """

    async def __init__(  # type: ignore[misc] # Ray awaits an async constructor
        self, config: RkserveConfig, handles: dict[str, Any]
    ) -> None:
        self._log_ring = log_with_serve()
        settings = config.coordinator
        folder = settings.data_dir.expanduser()
        self._channels = channels = ChannelClient(config.channel)
        links = {
            name: RayLink(handle, name, config.router.report_timeout_s, channels)
            for name, handle in handles.items()
        }
        folders = {
            group.name: open_model_folder(config.folder_of(group), config.state_dir)
            for group in config.deployed
        }
        models = {group: opened.id for group, opened in folders.items()}
        own = {one.id: one.weights for one in folders.values() if one.weights is not None}
        fleet = Fleet(links, models)
        self._ledger = await open_ledger(folder, settings)
        self._store = ArtifactStore(folder / ARTIFACTS, _rules(settings), own=own)
        self._fetching = DownloadPool()
        await asyncio.to_thread(self._store.open)
        self._fleet = fleet
        self._catalog = ModelCatalog(_catalog_folder(config), config.catalog.piece_bytes)
        self._max_bytes_per_s = config.catalog.max_bytes_per_s
        policies = _policies(config, models)
        cpus = {models[group.name] for group in config.deployed if group.cpu is not None}
        npus = {models[group.name] for group in config.deployed if group.cpu is None}
        self._coordinator = Coordinator(
            settings,
            CoordinatorPorts(
                fleet,
                self._ledger,
                self._store,
                ray.put,
                policies=policies,
                system_prompts=await asyncio.to_thread(system_prompts, config.deployed, folders),
                routers=RayRouters(ROUTER),
                trust=await asyncio.to_thread(TrustRules.of, config.security),
                mixed=frozenset(cpus & npus),
            ),
        )
        self._intake = ArtifactIntake(self._coordinator, self._store, self._catalog, self._fetching)
        await fleet.find_boards(FIND_BOARDS_S)
        await self._coordinator.start()
        self._learning = asyncio.get_running_loop().create_task(
            asyncio.to_thread(self._coordinator.learn, tuple(own)), name="hash the model files"
        )
        self._sweeps = asyncio.get_running_loop().create_task(self._sweep(), name="sweep uploads")
        backups = BackupKeeper(self._ledger, time.time, self._coordinator.backed_up)
        self._backups = asyncio.get_running_loop().create_task(
            backups.follow(), name="back the ledger up"
        )
        settle()

    async def _sweep(self) -> None:
        """Remove abandoned uploads."""
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                await asyncio.to_thread(self._store.sweep)
                await asyncio.to_thread(self._catalog.sweep)
            except OSError as exc:
                log.warning("unfinished uploads could not be dropped: %s", exc)

    # -- desired state -------------------------------------------------------------------------

    async def perform(self, call: OperationRequest) -> OperationOutcome:
        """Execute a call; see ``Coordinator.perform``."""
        return await self._coordinator.perform(call)

    async def desired(self, after_epoch: int, wait_s: float) -> Desired:
        """Return the desired state as soon as its epoch is not ``after_epoch``."""
        return await self._coordinator.desired(after_epoch, min(wait_s, LONGEST_WAIT_S))

    async def operations(self, limit: int) -> list[ControlOperation]:
        """Return the latest operations, the last one first."""
        return await asyncio.to_thread(self._coordinator.operations, limit)

    async def operation(self, name: str) -> ControlOperation:
        """Return an operation. Raises ``OperationNotFound``."""
        return self._coordinator.operation(name)

    async def operation_by_key(self, key: str) -> ControlOperation | None:
        """Return the operation of the call with that idempotency key."""
        return self._coordinator.operation_by_key(key)

    async def audit(self, limit: int) -> list[dict[str, Any]]:
        """Return the latest entries of the audit log, the last one first."""
        lines = await asyncio.to_thread(self._coordinator.audit, limit)
        return [asdict(line) for line in lines]

    async def metrics(self) -> bytes:
        """Return the Coordinator's metrics in Prometheus' text format."""
        return self._coordinator.metrics()

    async def logs(self, query: LogQuery) -> LogPage:
        """Return lines of the Coordinator's log."""
        return self._log_ring.page(query)

    # -- API keys ------------------------------------------------------------------------------

    async def change_key(self, call: KeyRequest) -> KeyOutcome:
        """Create, rotate or revoke a key; see ``KeyKeeper.perform``."""
        return await self._coordinator.keys.perform(call)

    async def api_keys(
        self, router: str, revision: int, wait_s: float, used: Mapping[str, float]
    ) -> KeyTable:
        """Return the keys as soon as their revision is another one."""
        wait_s = min(wait_s, LONGEST_WAIT_S)
        return await self._coordinator.keys.after(router, revision, wait_s, used)

    async def listed_keys(self) -> list[tuple[ApiKey, float | None]]:
        """Return the keys with the times of their last use."""
        return self._coordinator.keys.listed()

    # -- files ---------------------------------------------------------------------------------

    async def upload_begin(self, claim: DeclaredArtifact) -> str:
        """Begin an upload; see ``ArtifactIntake.upload_begin``."""
        return await self._intake.upload_begin(claim)

    async def upload_part(self, upload: str, offset: int, data: bytes) -> int:
        """Write a part; return the total number of bytes."""
        return await self._intake.upload_part(upload, offset, data)

    async def upload_end(self, upload: str, manifest: Mapping[str, Any] | None = None) -> Artifact:
        """End an upload: the file is verified and kept."""
        return await self._intake.upload_end(upload, manifest)

    async def upload_abort(self, upload: str) -> None:
        """Drop an upload."""
        await asyncio.to_thread(self._store.upload_abort, upload)

    async def register(
        self, kind: str, place: str, claim: DeclaredArtifact, scale: float = 1.0
    ) -> Artifact | None:
        """Take a file of the head node, or fetch one; see ``ArtifactIntake.register``."""
        return await self._intake.register(kind, place, claim, scale)

    async def manifests(self, digests: list[str]) -> dict[str, tuple[AcceptedManifest, ...]]:
        """Return the manifests with which contents were accepted, by their sha256."""
        return self._coordinator.manifests(digests)

    async def find_weights(self, model: str, artifact: str) -> StoredArtifact:
        """Return the artifact of a name; see ``Coordinator.find_weights``."""
        return await self._coordinator.find_weights(model, artifact)

    # -- the catalogue -------------------------------------------------------------------------

    async def model_index(self, name: str) -> ModelIndex:
        """Return the index of a model; see ``ModelCatalog.index``."""
        return await asyncio.to_thread(self._catalog.index, name)

    async def model_piece(self, name: str, version: str, path: str, number: int) -> bytes:
        """Return a piece of a model; see ``ModelCatalog.piece``."""
        return await asyncio.to_thread(self._catalog.piece, name, version, path, number)

    async def model_holders(self, name: str, version: str) -> list[ModelHolder]:
        """Return the boards that have that version of a model whole."""
        holders = []
        for address in self._fleet.addresses(name):
            report = self._fleet.report_of(address)
            if report is not None and report.copy == version and not address.silent:
                holders.append(
                    ModelHolder(f"Board-{address.group}", address.replica, address.board_id)
                )
        return holders

    async def catalog_models(self) -> list[tuple[str, str, int]]:
        """Return the models of the catalogue; see ``ModelCatalog.models``."""
        return await asyncio.to_thread(self._catalog.models)

    async def catalog_target(self, name: str) -> tuple[str, float | None]:
        """Return the SoC that a model is for, empty if unknown, and the limit of its fetches."""
        return await asyncio.to_thread(self._catalog.platform, name), self._max_bytes_per_s

    async def catalog_upload(
        self, index: ModelIndex, replace: bool, claim: DeclaredArtifact | None = None
    ) -> UploadProgress:
        """Begin or resume an upload; see ``ArtifactIntake.folder_begin``."""
        return await self._intake.folder_begin(index, replaces=replace, claim=claim)

    async def catalog_piece(
        self, name: str, version: str, path: str, number: int, data: bytes
    ) -> int:
        """Write a piece of an upload; see ``ModelCatalog.upload_piece``."""
        write = self._catalog.upload_piece
        return await asyncio.to_thread(write, name, version, path, number, data)

    async def catalog_end(self, name: str, version: str) -> UploadProgress:
        """Publish an upload; see ``ArtifactIntake.folder_end``."""
        return await self._intake.folder_end(name, version)

    # -- prompt caches -------------------------------------------------------------------------

    async def keep_cache(self, cache: DesiredCache) -> None:
        """Have every board of a model hold a prompt cache; see ``PromptCacheKeeper.keep``."""
        self._coordinator.caches.keep(cache)

    async def drop_cache(self, model: str, name: str) -> bool:
        """Have no board hold a prompt cache; see ``PromptCacheKeeper.drop``."""
        return self._coordinator.caches.drop(model, name)

    async def kept_caches(self, model: str) -> list[dict[str, object]]:
        """Return the desired prompt caches; see ``PromptCacheKeeper.desired``."""
        return self._coordinator.caches.desired(model)

    async def __del__(self) -> None:
        """Release everything. Called by Ray, also after a constructor that failed."""
        if hasattr(self, "_sweeps"):
            self._sweeps.cancel()
            self._backups.cancel()
            self._store.stop()
            await asyncio.gather(self._learning, return_exceptions=True)
            await self._coordinator.stop()
        if hasattr(self, "_fetching"):
            self._fetching.close()
        if hasattr(self, "_catalog"):
            self._catalog.close()
        if hasattr(self, "_channels"):
            await self._channels.close()
        if hasattr(self, "_ledger"):
            self._ledger.close()


def _catalog_folder(config: RkserveConfig) -> Path:
    """Return the folder of the catalogue; one that does not exist yet is made by an upload."""
    try:
        return resolve_folder(config.catalog.folder).absolute()
    except ConfigError:
        return config.catalog.folder.absolute()


def _rules(settings: CoordinatorConfig) -> ArtifactRules:
    return ArtifactRules(
        max_bytes=settings.max_adapter_bytes,
        max_model_bytes=settings.max_model_bytes,
        allowed_paths=settings.allowed_paths,
        allowed_urls=settings.allowed_urls,
    )


def system_prompts(
    groups: Iterable[BoardGroupConfig], folders: Mapping[str, ModelFolder]
) -> dict[str, DesiredCache]:
    """Return the configured prompt caches, by group. It reads tokenizers.

    A prompt that the model cannot take is logged, and does not prevent a start.
    """
    texts = {group.name: group.prompt_cache.system_prompt for group in groups}
    prompts = {name: text for name, text in texts.items() if text is not None}
    if not prompts:
        return {}
    # Templates and tokenizers, without which a Coordinator starts in half the time.
    from rkserve.api.admin.caches import BuildCall, ids_of
    from rkserve.api.common.renderer import Renderer

    found = {}
    for group, text in prompts.items():
        folder = folders[group]
        call = BuildCall(SYSTEM_PROMPT, messages=({"role": "system", "content": text},))
        try:
            ids = ids_of(call, Renderer(folder), folder.settings.context_length)
        except RkserveError as exc:
            log.warning("group %s: prompt_cache.system_prompt is not built: %s", group, exc)
            continue
        found[group] = DesiredCache(folder.id, SYSTEM_PROMPT, ids)
    return found


def _policies(config: RkserveConfig, models: Mapping[str, str]) -> dict[str, SleepPolicy]:
    """Return each model's sleep policy; ``models`` is the model of each group."""
    found: dict[str, list[SleepPolicy]] = {}
    for group in config.deployed:
        one = SleepPolicy(group.idle_unload_s, group.wake_on_request, group.load_timeout_s)
        found.setdefault(models[group.name], []).append(one)
    return {model: SleepPolicy.of(groups) for model, groups in found.items()}


async def open_ledger(
    folder: Path, settings: CoordinatorConfig, claim_s: float = CLAIM_S
) -> Ledger:
    """Open the ledger; a predecessor may take a moment to release it. Raises ``LedgerFailed``."""
    deadline_s = time.monotonic() + claim_s
    while True:
        try:
            return Ledger.open(folder, settings.max_operations)
        except LedgerFailed:
            if time.monotonic() >= deadline_s:
                raise
        await asyncio.sleep(0.2)
