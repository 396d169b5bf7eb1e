"""Checks before calls of the library: a handle's state, and arguments that it mishandles. Pure.

The runtime checks almost nothing: a full clear of a paused handle, or a second run on a running
one, crashes the process. Every call is therefore an event of the table of states first; an unlisted
event raises ``Misuse`` and never reaches the library.

The checks of KV contents that outlive a run need a record of them: the live context and the loaded
prompt cache. The library does not check that KV positions belong to the adapter of a run, or to a
complete turn.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from rkserve.core.errors import LoadFailed, Misuse
from rkserve.native.binding.releases import NO_IMAGE_TAGS, RuntimeRelease
from rkserve.native.runtime import (
    CrossAttention,
    EmbedInput,
    EvaluateMode,
    Image,
    LoadParams,
    MultimodalInput,
    PromptInput,
    RunEnd,
    RunInput,
    RunParams,
    TokenInput,
    Video,
)


class HandleState(Enum):
    """The state of a handle."""

    UNLOADED = "unloaded"
    IDLE = "idle"
    PREFILL = "prefill"
    GENERATING = "generating"
    PAUSED = "paused"
    ABORTING = "aborting"
    BROKEN = "broken"
    DESTROYED = "destroyed"


class HandleEvent(Enum):
    """A call on a handle, or a report from it."""

    INIT = "init"
    INIT_FAILED = "init failed"
    RUN = "run"
    TOKEN = "token"
    PAUSE = "pause"
    RESUME = "resume"
    DRAIN = "drain"
    EVALUATE = "compute hidden states or logits"
    ABORT = "abort"
    RETURNED = "run returned"
    CALL_FAILED = "call failed"
    CLEAR_KV = "clear the whole KV cache"
    CLEAR_KV_RANGE = "clear a KV range"
    KV_SIZE = "get the KV cache size"
    CONFIGURE = "set template, tools, adapter or cross attention"
    PROMPT_CACHE = "load or release a prompt cache"
    DESTROY = "destroy"


_S, _E = HandleState, HandleEvent

TRANSITIONS: dict[tuple[HandleState, HandleEvent], HandleState] = {
    (_S.UNLOADED, _E.INIT): _S.IDLE,
    # A failed init may have left anything behind (1.3.0 can even crash later): never reuse it.
    (_S.UNLOADED, _E.INIT_FAILED): _S.BROKEN,
    (_S.IDLE, _E.RUN): _S.PREFILL,
    (_S.IDLE, _E.EVALUATE): _S.PREFILL,
    (_S.IDLE, _E.CLEAR_KV): _S.IDLE,
    (_S.IDLE, _E.KV_SIZE): _S.IDLE,
    (_S.IDLE, _E.CONFIGURE): _S.IDLE,
    (_S.IDLE, _E.PROMPT_CACHE): _S.IDLE,
    (_S.IDLE, _E.DESTROY): _S.DESTROYED,
    # Harmless in the field on an idle handle, but unproven: the binding does not pass it on.
    (_S.IDLE, _E.ABORT): _S.IDLE,
    (_S.PREFILL, _E.TOKEN): _S.GENERATING,
    (_S.PREFILL, _E.ABORT): _S.ABORTING,
    (_S.PREFILL, _E.RETURNED): _S.IDLE,
    (_S.PREFILL, _E.CALL_FAILED): _S.IDLE,
    (_S.GENERATING, _E.TOKEN): _S.GENERATING,
    (_S.GENERATING, _E.PAUSE): _S.PAUSED,
    (_S.GENERATING, _E.ABORT): _S.ABORTING,
    (_S.GENERATING, _E.RETURNED): _S.IDLE,
    (_S.GENERATING, _E.CALL_FAILED): _S.IDLE,
    # An abort is asynchronous: tokens still arrive, and a second abort changes nothing.
    (_S.ABORTING, _E.TOKEN): _S.ABORTING,
    (_S.ABORTING, _E.ABORT): _S.ABORTING,
    (_S.ABORTING, _E.RETURNED): _S.IDLE,
    # The callback had returned 1 before the abort came, and the library paused: so it is.
    (_S.ABORTING, _E.PAUSE): _S.PAUSED,
    (_S.ABORTING, _E.CALL_FAILED): _S.IDLE,
    # Paused: resume, drain, look, cut a range, or destroy. No full clear, no other conversation,
    # nothing computed (M6). A resumption that is refused leaves the library paused, as a PAUSE.
    (_S.PAUSED, _E.RESUME): _S.GENERATING,
    (_S.PAUSED, _E.DRAIN): _S.GENERATING,
    (_S.PAUSED, _E.CLEAR_KV_RANGE): _S.PAUSED,
    (_S.PAUSED, _E.KV_SIZE): _S.PAUSED,
    (_S.PAUSED, _E.DESTROY): _S.DESTROYED,
}


def advance(state: HandleState, event: HandleEvent) -> HandleState:
    """Return the state after ``event``.

    Raises:
        Misuse: the table does not list the event in this state.
    """
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise Misuse(f"'{event.value}' is not allowed while the handle is {state.value}") from None


_CPU_BITS = 32
_DEVICE_TREE = Path("/proc/device-tree/compatible")
_NPU_CORES = {b"rk3588": 3, b"rk3576": 2}  # by the beginning of the SoC's name; the others have 1
_MAX_BATCH = 100  # the library's own limit
_DOMAINS = 16  # the kernel driver's RKNPU_MAX_IOMMU_DOMAIN_NUM
_FLOAT = 4

# Markup that a tokenizer maps to special tokens; DeepSeek's has full-width bars.
_MARKUP = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<\uff5c[^\uff5c<>]{1,40}\uff5c>|<(?:start|end)_of_turn>"
)


# -- load ------------------------------------------------------------------------------------------


def npu_cores() -> int:
    """Return the number of NPU cores of this machine's SoC; 1 where it is not known."""
    try:
        socs = re.findall(rb"rockchip,(\w+)", _DEVICE_TREE.read_bytes())
    except OSError:
        return 1
    return max(
        (cores for soc in socs for name, cores in _NPU_CORES.items() if soc.startswith(name)),
        default=1,
    )


def check_load(params: LoadParams, release: RuntimeRelease, quirks: Mapping[str, bool]) -> None:
    """Raise ``LoadFailed`` if init is bound to fail, which crashes some releases."""
    if not Path(params.model_path).is_file():
        raise LoadFailed(f"model file {params.model_path} does not exist")
    if min(params.max_context_len, params.max_new_tokens) < 1:
        raise LoadFailed("max_context_len and max_new_tokens must be at least 1")
    cpus = params.cpus
    if len(set(cpus)) != len(cpus) or not all(0 <= cpu < _CPU_BITS for cpu in cpus):
        raise LoadFailed(f"cpus must be distinct numbers from 0 to {_CPU_BITS - 1}, not {cpus}")
    if cpus and len(cpus) < npu_cores() and not quirks["fewer_cpus_than_cores"]:
        raise LoadFailed(
            f"the library may use {len(cpus)} CPUs (library_cpus, instance_cpus), and RKLLM loads "
            f"no model with fewer CPUs than NPU cores; this SoC has {npu_cores()}. Allow as many. "
            "A model that was converted for fewer cores may load: set the quirk "
            "fewer_cpus_than_cores"
        )
    if not 1 <= params.n_batch <= _MAX_BATCH:
        raise LoadFailed(f"n_batch must be from 1 to {_MAX_BATCH}, not {params.n_batch}")
    if not 0 <= params.base_domain_id < _DOMAINS:
        raise LoadFailed(
            f"base_domain_id must be from 0 to {_DOMAINS - 1}, not {params.base_domain_id}"
        )
    for name in release.missing_settings(params):
        raise LoadFailed(f"RKLLM {release.version} has no {name}")


# -- a run -----------------------------------------------------------------------------------------


def check_run(params: RunParams, n_batch: int, release: RuntimeRelease) -> None:
    """Raise ``Misuse`` for a run that ``release`` cannot make."""
    limit = params.max_new_tokens
    if (params.sampling is not None or limit is not None) and not release.per_run_sampling:
        raise Misuse(f"RKLLM {release.version} takes sampling and max_new_tokens at load only")
    if limit is not None and limit < 1:
        raise Misuse(f"max_new_tokens must be at least 1, not {limit}")
    if len(params.inputs) != n_batch:
        # The library always reads n_batch inputs, and crashes on missing ones.
        raise Misuse(f"a run takes exactly {n_batch} inputs (n_batch), not {len(params.inputs)}")
    for given in params.inputs:
        _check_input(given, release)


def _check_input(given: RunInput, release: RuntimeRelease) -> None:
    if isinstance(given, TokenInput):
        if not given.ids or min(given.ids) < 0:
            raise Misuse("token input must have at least one id, and no id below 0")
    elif isinstance(given, EmbedInput):
        _check_rows("embeddings", given.data, given.n_tokens)
    elif isinstance(given, MultimodalInput):
        _check_multimodal(given, release)


def _check_rows(what: str, data: bytes, rows: int) -> None:
    if rows < 1 or not data or len(data) % (_FLOAT * rows):
        raise Misuse(f"{len(data)} bytes of {what} are not {rows} rows of float32")


def _check_multimodal(given: MultimodalInput, release: RuntimeRelease) -> None:
    if given.image is None and given.video is None:
        raise Misuse("multimodal input needs an image or a video")
    if given.video is not None and not release.takes_video:
        raise Misuse(f"RKLLM {release.version} takes no video")
    if given.image is not None:
        _check_image(given.image, given.text.count("<image>"), release)
    if given.video is not None:
        _check_video(given.video, given.text.count("<video>"))


def _check_image(image: Image, places: int, release: RuntimeRelease) -> None:
    # Without the counts an asynchronous run returned 0 and never called back.
    _check_counts("an image", image.n_images, image.n_tokens, image.width, image.height)
    _check_rows("image embeddings", image.data, image.n_images * image.n_tokens)
    # Releases differ: one <image> per image, or a single one for all of them.
    if places != image.n_images and not (release.one_mark_for_all_images and places == 1):
        raise Misuse(
            f"the text has <image> {places} times; the number of images is {image.n_images}"
        )
    if image.tags != NO_IMAGE_TAGS and release.image_tags_at_load:
        raise Misuse(f"RKLLM {release.version} takes image tags at load, not with each image")


def _check_video(video: Video, places: int) -> None:
    _check_counts(
        "a video", video.n_videos, video.n_frames, video.n_tokens, video.width, video.height
    )
    _check_rows("video embeddings", video.data, video.n_videos * video.n_frames * video.n_tokens)
    if places != video.n_videos:
        raise Misuse(
            f"the text has <video> {places} times; the number of videos is {video.n_videos}"
        )


def _check_counts(what: str, *counts: int) -> None:
    if min(counts) < 1:
        raise Misuse(f"{what} needs counts, width and height of at least 1, not {counts}")


def check_prompts(params: RunParams) -> None:
    """Raise ``Misuse`` for rendered text while a chat template is active."""
    for given in params.inputs:
        if not isinstance(given, (PromptInput, MultimodalInput)):
            continue
        if (found := _MARKUP.search(given.text)) is not None:
            raise Misuse(
                f"PROMPT text contains {found.group()}, and the active chat template would wrap it "
                "again: send token ids, or set an empty template first"
            )


def check_save(params: RunParams, n_batch: int, quirks: Mapping[str, bool]) -> None:
    """Raise ``Misuse`` for a prompt cache that cannot be saved correctly."""
    if params.save_cache is None:
        return
    if n_batch > 1:
        raise Misuse("a prompt cache is not known to work with a batch")
    if params.keep_history and not quirks["prompt_cache_save_with_history"]:
        raise Misuse("a run with keep_history is not known to save its whole context")
    if not Path(params.save_cache).parent.is_dir():
        raise Misuse(f"the folder of the prompt cache {params.save_cache} does not exist")


def check_resume(params: RunParams, paused: RunParams, *, by_prompt: bool) -> None:
    """Raise ``Misuse`` if ``params`` cannot resume ``paused``."""
    for given in params.inputs:
        if not isinstance(given, (TokenInput, PromptInput)):
            raise Misuse("a paused run is resumed with token ids, not with embeddings")
        if isinstance(given, PromptInput) and not by_prompt:
            raise Misuse("a paused run is resumed with token ids, not with PROMPT text")
    if params.keep_history != paused.keep_history:
        raise Misuse("a paused run is resumed with the keep_history of its start")
    if params.adapter != paused.adapter:
        raise Misuse(
            f"a paused run with {adapter_words(paused.adapter)} cannot be resumed with "
            f"{adapter_words(params.adapter)}"
        )


def check_evaluate(
    given: RunInput,
    mode: EvaluateMode,
    n_batch: int,
    *,
    keep_history: bool,
    quirks: Mapping[str, bool],
) -> None:
    """Raise ``Misuse`` if an evaluation was observed to fail or to end the process."""
    if n_batch > 1:
        raise Misuse(f"{mode.value} of a batch cannot be computed")
    tokens = isinstance(given, TokenInput)
    if (
        mode is EvaluateMode.LOGITS
        and keep_history
        and tokens
        and not quirks["logits_with_history"]
    ):
        raise Misuse("logits of token input with keep_history end the process")


# -- the other calls -------------------------------------------------------------------------------


def check_ranges(ranges: Sequence[tuple[int, int]], sizes: Sequence[int]) -> None:
    """Raise ``Misuse`` for ranges outside of the KV cache."""
    if len(ranges) != len(sizes):
        raise Misuse(f"a clear takes exactly {len(sizes)} ranges (n_batch), not {len(ranges)}")
    for entry, ((start, end), size) in enumerate(zip(ranges, sizes, strict=True)):
        if not 0 <= start <= end <= size:
            raise Misuse(
                f"the range [{start}, {end}) of entry {entry} is not within the {size} positions "
                "of the KV cache"
            )


def check_adapter(path: str, name: str, scale: float, names: set[str]) -> None:
    """Raise ``Misuse`` for an ambiguous name, a wrong scale or a missing file."""
    if not name or name in names:
        raise Misuse(f"adapter name {name!r} is empty or in use")
    if not math.isfinite(scale):
        raise Misuse(f"an adapter's scale must be a finite number, not {scale}")
    check_file(path, "adapter")


def check_file(path: str, what: str) -> None:
    """Raise ``Misuse`` for a missing file: the library's reaction to one is unknown."""
    if not Path(path).is_file():
        raise Misuse(f"{what} file {path} does not exist")


def check_tools(tools: str) -> None:
    """Raise ``Misuse`` for a tool description that is not JSON; an empty one is valid."""
    if not tools:
        return
    try:
        json.loads(tools)
    except ValueError as exc:
        raise Misuse(f"the tools are not JSON: {exc}") from exc


def check_cross_attention(given: CrossAttention, *, loaded_for_it: bool) -> None:
    """Raise ``Misuse`` if the library would read past an encoder output, or ignore it."""
    if not loaded_for_it:
        raise Misuse("the handle was not loaded with use_cross_attn")
    _check_rows("the encoder K cache", given.k_cache, given.n_tokens)
    if len(given.v_cache) != len(given.k_cache):
        raise Misuse("the encoder K and V caches must have the same size")
    for what, data in (("mask", given.mask), ("positions", given.positions)):
        if len(data) != _FLOAT * given.n_tokens:
            raise Misuse(f"the encoder {what} must have one value per token")


@dataclass(slots=True)
class KvContext:
    """The KV cache contents of runs with ``keep_history``."""

    filled: bool = False
    adapter: str | None = None
    spoiled: str = ""  # the reason why it is unusable, if it is

    def check(self, params: RunParams) -> None:
        """Raise ``Misuse`` if ``params`` would continue an unusable or foreign context."""
        if not params.keep_history:
            return
        if self.spoiled:
            raise Misuse(
                f"{self.spoiled}: clear the KV cache before the next run with keep_history, or it "
                "would continue a truncated turn"
            )
        if self.filled and params.adapter != self.adapter:
            raise Misuse(
                f"the live context was computed with {adapter_words(self.adapter)}, not with "
                f"{adapter_words(params.adapter)}: clear the KV cache first"
            )

    def after(self, params: RunParams, end: RunEnd, *, aborted: bool, trusted: bool) -> None:
        """Record a run. A ``trusted`` abort leaves exactly the delivered tokens."""
        if end is RunEnd.PAUSED:
            return  # part of the live context only after its resumption
        if not params.keep_history:
            self.filled = False  # a single turn drops the context, and its own
            return
        self.filled, self.adapter = True, params.adapter
        if end is RunEnd.FAILED:
            self.spoiled = "the last run with keep_history failed"
        elif aborted and not trusted:
            self.spoiled = "the last run with keep_history was aborted"

    def encoder_replaced(self) -> None:
        """Record that the encoder output that all positions attended to was replaced."""
        if self.filled:
            self.spoiled = "the encoder's output was replaced"

    def cleared(self, *, all_of_it: bool) -> None:
        """Record a clear; a kept system prompt keeps its adapter."""
        self.filled, self.spoiled = self.filled and not all_of_it, ""


@dataclass(slots=True)
class PromptCache:
    """The loaded cache file, of which the next runs may use a prefix."""

    loaded: bool = False
    adapter: str | None = None
    bound: bool = False  # a run has determined the adapter of the file
    after_abort: bool = False  # loading a file after an abort crashed the library

    def check_load(self, n_batch: int, quirks: Mapping[str, bool]) -> None:
        """Raise ``Misuse`` if a file must not be loaded now."""
        if n_batch > 1:
            raise Misuse("a prompt cache is not known to work with a batch")
        if self.after_abort and not quirks["prompt_cache_after_abort"]:
            raise Misuse(
                "a run of this handle was aborted; loading a prompt cache afterwards crashed the "
                "library: create the handle anew"
            )

    def fits(self, adapter: str | None) -> bool:
        """Return True if the next run may use the file; the first run determines its adapter."""
        if not self.loaded or (self.bound and self.adapter == adapter):
            return True
        if self.bound:
            return False
        self.bound, self.adapter = True, adapter
        return True

    def took(self, *, loaded: bool) -> None:
        """Record that the library holds another file, or none."""
        self.loaded, self.adapter, self.bound = loaded, None, False


def adapter_words(adapter: str | None) -> str:
    """Return an adapter's name for a message."""
    return "no adapter" if adapter is None else f"adapter {adapter!r}"
