"""Construction of a ``Board`` from a group's settings, its slot, and its hardware. No Ray.

The board gets its model, library, files and hooks of this node; nothing is started. Its name comes
from a slot of the node, the first free one by a file lock: a lock ends with its process, so a
replaced replica finds the slot of its predecessor free and keeps the name. The hardware is read
from the kernel's files, or from a simulated board's own tree of them; a stuck driver must not
delay a report, so that a missing reading leaves the previous one in place.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkserve.board.answer.hooks import HookFactory
from rkserve.board.board import Board
from rkserve.board.engine.process import EngineStarts
from rkserve.board.engine.protocol import Engine, EngineSpec, with_weights
from rkserve.board.engine.telemetry import fastest_cores, read_soc, read_telemetry
from rkserve.board.rules.hang_limits import RunTimeouts
from rkserve.board.run.settings import BoardSettings
from rkserve.board.storage.ledger_copies import FOLDER as LEDGERS
from rkserve.board.storage.prompt_cache import CacheFingerprint, CacheStore
from rkserve.config.board_group import BoardGroupConfig
from rkserve.config.serve_config import engine_environ, resolve_folder
from rkserve.core.board_report import Hardware
from rkserve.core.errors import ConfigError, LoadFailed
from rkserve.core.files import content_digest, file_digest, open_private, private_folder
from rkserve.models.folder import ModelFolder, open_model_folder
from rkserve.native.library_file import llama_cpp_library
from rkserve.native.quirks import read_quirks_file
from rkserve.native.runtime import LoadParams, VisionParams
from rkserve.native.sim import telemetry as simulated
from rkserve.transport.cache_transfer import fetched

ADAPTERS = "adapters"
WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class BoardLocation:
    """A board's name, its node's name, and the node's folder for state."""

    board_id: str
    node: str
    state_dir: Path


def assemble(
    group: BoardGroupConfig, place: BoardLocation, platform: str, *, governed: bool = True
) -> Board:
    """Return the board, not yet started. Raises ``ConfigError``, ``OSError``.

    A ``governed`` board serves nothing before it has received the desired state from a Coordinator.
    """
    folder = open_model_folder(resolve_folder(group.model), place.state_dir)
    if group.cpu is not None:
        folder.check_cpu()
    if group.n_batch > 1 and folder.tokenizer_file is None:
        raise ConfigError(
            f"n_batch: group {group.name} cannot serve batches, because {folder.path} has no "
            "tokenizer.json: without it the number of tokens of each prompt of a batch is unknown. "
            "Add the file, or set n_batch to 1."
        )
    if group.n_batch > 1 and folder.settings.vision is not None:
        raise ConfigError(
            f"n_batch: group {group.name} cannot serve batches, because {folder.path} is a model "
            "that sees images, which have runs of their own. Set n_batch to 1."
        )
    cross = folder.settings.cross_attention
    if group.n_batch > 1 and cross is not None:
        raise ConfigError(
            f"n_batch: group {group.name} cannot serve batches, because {folder.path} is the "
            "decoder of an encoder-decoder model, and the runtime takes one encoder output for all "
            "entries of a batch. Set n_batch to 1."
        )
    spec = _spec(group, place, folder)
    settings = BoardSettings(
        board_id=place.board_id,
        model=folder.id,
        context_len=folder.settings.context_length,
        eos_ids=frozenset(folder.settings.eos_token_ids),
        sampling=folder.settings.sampling.values(),
        platform=platform,
        node=place.node,
        library=Path(spec.library).name,
        queue_limit=group.queue_limit,
        queue_timeout_s=group.queue_timeout_s,
        patience=RunTimeouts(**group.patience.model_dump()),
        crash_limit=group.crash_limit,
        crash_window_s=group.crash_window_s,
        engine_growth_bytes=group.engine_growth_mb * 1_000_000,
        quarantine_s=group.quarantine_s,
        n_batch=group.n_batch,
        batch_window_s=group.batch_window_ms / 1e3,
        pause_hold_s=group.pause_hold_s,
        pause_timeout_s=group.pause_timeout_s,
        max_paused=group.max_paused,
        max_adapters=folder.settings.max_adapters,
        max_adapter_bytes=folder.settings.max_adapter_bytes,
        model_dir=folder.path,
        governed=governed,
        staged_dir=place.state_dir / ADAPTERS / place.board_id,
        weights_dir=place.state_dir / WEIGHTS / place.board_id,
        base_file=place.state_dir / f"{place.board_id}.base",
        ledgers_dir=place.state_dir / LEDGERS / place.board_id,
        own_file=Path(spec.params.model_path),
        own_digest_file=place.state_dir / f"{place.board_id}.digest",
        text_mode=spec.text_mode,
        vision=spec.vision is not None,
        hidden_size=folder.settings.hidden_size,
        encoder=None if cross is None else cross.shape,
        encoder_tokens=0 if cross is None else cross.max_tokens,
        tokenizer_file=folder.tokenizer_file,
        guided=group.guided,
        asleep_file=place.state_dir / f"{place.board_id}.asleep",
        kv_position_bytes=folder.settings.kv_bytes_per_token,
        caches=_caches(group, place, folder, spec),
        disk_bytes_per_s=_simulated_disk(group),
        share_bytes_per_s=_share_rate(group),
        fetch_cache=fetched,
        park=group.prompt_cache.park,
        park_min_tokens=group.prompt_cache.park_min_tokens,
        hooks=tuple(load_hook(path) for path in group.hooks),
    )

    starts = EngineStarts(place.board_id)

    async def start_engine(weights: Path | None) -> Engine:
        # Weights that were sent may be on trial; the folder's are the operator's.
        return await starts.start(with_weights(spec, weights), trusted=weights is None)

    return Board(settings, start_engine)


def load_hook(path: str) -> HookFactory:
    """Import ``package.module:factory``. Raises ``ConfigError`` with the missing part."""
    module_name, _, name = path.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(
            f"hooks: {path} cannot be loaded on this node: {exc}. Install the package there, or "
            "give its folder in PYTHONPATH or in Ray's runtime_env."
        ) from exc
    if not callable(found):
        raise ConfigError(f"hooks: {path} is not callable; a factory takes the request")
    factory: HookFactory = found
    return factory


def _spec(group: BoardGroupConfig, place: BoardLocation, folder: ModelFolder) -> EngineSpec:
    context_len = folder.settings.context_length
    # Real engines are fenced per NPU domain, whatever group they belong to.
    own = group.simulated is not None or group.cpu is not None
    cpus, pinned = group.library_cpus, group.pin_cpus
    if group.cpu is not None:
        pinned = pinned or fastest_cores(ROOT, os.sched_getaffinity(0))
        cpus = pinned[: group.cpu.threads]
    # The kernel looks at the ends of links, such as those of Hugging Face's cache.
    linked = folder.parts(cpu=True) if group.cpu is not None else ()
    linked += () if folder.tokenizer_file is None else (folder.tokenizer_file,)
    fence = f"{place.board_id}.fence" if own else f"npu-{group.base_domain_id}.fence"
    return EngineSpec(
        library=str(_library(group)),
        params=LoadParams(
            model_path=str(folder.require_weights(cpu=group.cpu is not None)),
            max_context_len=context_len,
            max_new_tokens=context_len,  # the ceiling; each request has its own limit below it
            sampling=folder.settings.sampling.values(),
            n_keep=folder.settings.n_keep,
            base_domain_id=group.base_domain_id,
            cpus=cpus,
            n_batch=group.n_batch,
            embed_flash=group.embed_flash,
            use_cross_attn=folder.settings.cross_attention is not None,
            ignore_eos_token=folder.settings.ignore_eos_token,
        ),
        fence=str(place.state_dir / fence),
        cpu=group.cpu is not None,
        text_mode=folder.tokenizer_file is None,
        vision=vision_params(group, folder),
        quirks=quirks_of(group),
        allow_unlisted=group.allow_unlisted,
        environ=engine_environ(group, place.board_id),
        inherit=group.engine_environ,
        confine=group.confine,
        reads=(
            str(folder.path),
            *(str(one.resolve()) for one in linked),
            str(place.state_dir / ADAPTERS / place.board_id),
            str(place.state_dir / WEIGHTS / place.board_id),
        ),
        writes=(str(_cache_root(group, place) / place.board_id),),
        pin_cpus=pinned,
        load_timeout_s=group.load_timeout_s,
    )


def vision_params(group: BoardGroupConfig, folder: ModelFolder) -> VisionParams | None:
    """Return the vision settings of the group's engines; None for a model without vision."""
    settings = folder.settings.vision
    if settings is None:
        return None
    library = group.encoder_library.expanduser()
    if group.simulated is not None:
        from rkserve.native.sim.build import ensure_encoder_built

        library = ensure_encoder_built()
    return VisionParams(
        library=library,
        model=folder.path / settings.encoder,
        width=settings.size,
        height=settings.size,
        tokens=settings.tokens,
        tags=settings.tags,
        cores=group.encoder_cores,
        cache_bytes=group.image_cache_bytes,
    )


def _library(group: BoardGroupConfig) -> Path:
    if group.cpu is not None:
        return llama_cpp_library()
    if group.simulated is None:
        assert group.library is not None  # the configuration requires one of the two
        return group.library.expanduser()
    from rkserve.native.sim.build import ensure_built

    return ensure_built(group.simulated.release)


def quirks_of(group: BoardGroupConfig) -> dict[str, bool]:
    """Return a group's overrides: its quirks file's, and its own. Raises ``ConfigError``."""
    # The simulated library's files load on other boards; of the vendor's that is not known.
    if group.cpu is not None:
        return {}
    known = {} if group.simulated is None else {"prompt_cache_portable": True}
    if group.quirks_file is not None:
        known |= read_quirks_file(group.quirks_file.expanduser(), _library(group))
    return known | group.quirks


def _caches(
    group: BoardGroupConfig, place: BoardLocation, folder: ModelFolder, spec: EngineSpec
) -> CacheStore | None:
    settings = group.prompt_cache
    if settings.max_bytes == 0 or group.n_batch > 1 or not folder.prompt_cache:
        return None
    if folder.settings.cross_attention is not None:
        return None  # a KV cache depends on the encoder's output, and a file's name on token ids
    seal = CacheFingerprint(
        model=folder.content_digest(cpu=group.cpu is not None),
        release=_digest_of(Path(spec.library), file_digest),
        template=hashlib.sha256((folder.chat_template or "").encode()).hexdigest(),
        tokenizer=_digest_of(folder.tokenizer_file, content_digest),
        load=" ".join(
            (
                f"{spec.params.max_context_len} {spec.params.n_keep}",
                # A real model is converted for one SoC; a simulated one loads on all of them.
                *(() if group.simulated is None else (soc_of(group.simulated.profile),)),
            )
        ),
    )
    return CacheStore(_cache_root(group, place) / place.board_id, seal, settings.max_bytes)


def _simulated_disk(group: BoardGroupConfig) -> float | None:
    """Return the rate of a simulated board's disk in bytes/s, by its own clock."""
    if group.simulated is None:
        return None
    return group.simulated.disk_mb_per_s * (1 << 20) / _scale(group)


def _share_rate(group: BoardGroupConfig) -> float:
    """Return the rate at which files go to other boards, in bytes/s, by a board's own clock."""
    return group.prompt_cache.share_mb_per_s * 1e6 / _scale(group)


def soc_of(profile: str) -> str:
    """Return the SoC of a simulated board's profile, such as ``RK3588``."""
    return profile.partition("-")[0].upper()


def _scale(group: BoardGroupConfig) -> float:
    return 1.0 if group.simulated is None else max(group.simulated.time_scale, 1e-9)


def _cache_root(group: BoardGroupConfig, place: BoardLocation) -> Path:
    folder = group.prompt_cache.folder
    return place.state_dir / "cache" if folder is None else folder.expanduser()


def _digest_of(file: Path | None, digest: Callable[[Path], str]) -> str:
    # The engine reports a missing library itself.
    return digest(file) if file is not None and file.is_file() else ""


log = logging.getLogger(__name__)

ROOT = Path("/")
READ_S = 0.5
# Figures are read again after so long: at each report, of which Routers and the Coordinator ask for
# four a second, that took a quarter of a percent of a PC's core.
BUSY_AGE_S, IDLE_AGE_S = 1.0, 5.0
BUSY_PERCENT, IDLE_PERCENT = 50, 0  # three cores at 48 to 50 % is what a decoding RK3588 showed


class HardwareView:
    """Reads one board's figures. ``platform`` is the SoC's name, if known."""

    def __init__(
        self, root: Path, platform: str, *, is_simulated: bool, state: Path | None = None
    ) -> None:
        """``state`` is a folder on the disk whose free space is a figure, too."""
        self._root, self._state = root, state
        self.platform = platform
        self._is_simulated = is_simulated
        self._reading: asyncio.Task[Hardware] | None = None
        self._latest: Hardware | None = None
        self._read_s, self._was_busy = -math.inf, False
        self._shown: int | None = None  # the simulated load

    @classmethod
    def of(cls, group: BoardGroupConfig, folder: Path) -> HardwareView:
        """Return the view of a board of ``group``; a simulated one gets its tree in ``folder``."""
        if group.simulated is None:
            platform = read_soc(ROOT) or os.uname().machine
            return cls(ROOT, platform, is_simulated=False, state=folder.parent)
        soc = soc_of(group.simulated.profile)
        try:
            simulated.ensure_tree(folder, soc, simulated.BoardReadings())
        except (ConfigError, OSError) as exc:
            log.warning("the simulated board's figures cannot be shown: %s", exc)
        return cls(folder, "simulated", is_simulated=True, state=folder.parent)

    async def read(self, *, busy: bool) -> Hardware | None:
        """Return figures of the last seconds; None until there are any."""
        reading, now_s = self._reading, time.monotonic()
        age_s = BUSY_AGE_S if busy else IDLE_AGE_S
        if reading is None and busy is self._was_busy and now_s - self._read_s < age_s:
            return self._latest
        if reading is None:
            self._read_s, self._was_busy = now_s, busy
            reading = asyncio.create_task(asyncio.to_thread(self._read, busy=busy))
            self._reading = reading
        done, _ = await asyncio.wait({reading}, timeout=READ_S)
        if done:
            self._latest = reading.result()
            if self._reading is reading:  # several callers may have waited for it
                self._reading = None
        return self._latest

    def _read(self, *, busy: bool) -> Hardware:
        if self._is_simulated:
            self._show_load(BUSY_PERCENT if busy else IDLE_PERCENT)
        return read_telemetry(self._root, self._state)

    def _show_load(self, percent: int) -> None:
        if percent == self._shown:
            return  # each report would write a file
        soc = read_soc(self._root)
        try:
            simulated.show_load(self._root, soc, percent)
            self._shown = percent
        except (ConfigError, OSError) as exc:
            log.debug("the simulated load is not shown: %s", exc)


@dataclass(frozen=True, slots=True)
class NodeSlot:
    """A claimed slot; keep it as long as the replica lives."""

    index: int
    fd: int

    def release(self) -> None:
        """Release it for another replica."""
        os.close(self.fd)


def claim_slot(state_dir: Path, group: str, slots: int) -> NodeSlot:
    """Claim the lowest free of ``slots``.

    Raises:
        LoadFailed: all are held, or the folder is not private or cannot be written.
    """
    holders: list[str] = []
    try:
        private_folder(state_dir)
        for index in range(slots):
            fd = open_private(state_dir / f"{group}-{index}.slot", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holders.append(os.pread(fd, 32, 0).decode(errors="replace").strip() or "?")
                os.close(fd)
                continue
            # The lock works without the name, for example on a full disk.
            with contextlib.suppress(OSError):
                os.ftruncate(fd, 0)
                os.pwrite(fd, str(os.getpid()).encode(), 0)
            return NodeSlot(index, fd)
    except OSError as exc:
        raise LoadFailed(f"the state folder {state_dir} cannot be used: {exc}") from exc
    raise LoadFailed(
        f"all {slots} slots of group {group} on this node are held, by the processes "
        f"{', '.join(holders)} ({state_dir})"
    )
