"""What the two binary interfaces do differently, and how our values become their structs.

One ``ffi`` per interface, from the vendor's declarations. It knows the structs and who has to keep
them alive (the list that is passed in); it makes no call that needs a handle but ``init``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from typing import Any, ClassVar

from rkserve.core.run_params import Sampling
from rkserve.native.binding.inputs import c_floats, c_ints, c_path, c_string, make_inputs
from rkserve.native.releases import Abi
from rkserve.native.runtime import (
    CrossAttention,
    EvaluateMode,
    Image,
    LoadParams,
    MultimodalInput,
    RunInput,
    RunParams,
)

_IMAGE_TAGS = ("img_start", "img_end", "img_content")


@dataclass(frozen=True, slots=True)
class CallbackPointers:
    """What C may call of ours. The last two are NULL where the model needs no help."""

    on_result: Any
    tokenize: Any
    embed: Any


class Dialect(ABC):
    """What is the same in all accepted releases."""

    declarations: ClassVar[str]
    per_run_sampling: ClassVar[bool]

    def __init__(self) -> None:
        self.ffi: Any = import_module(f"rkserve.native.decl.{self.declarations}").ffi

    def init_params(self, library: Any, load: LoadParams, keep: list[Any]) -> Any:
        """Return the parameters of init, made from the library's own defaults.

        Never from zeros: ``n_batch`` 0 is refused, and NULL image tags crash 1.2.x.
        """
        param = self.ffi.new("RKLLMParam *", library.rkllm_createDefaultParam())
        keep.append(param)
        param.model_path = c_path(self.ffi, load.model_path, keep)
        param.max_context_len = load.max_context_len
        param.max_new_tokens = load.max_new_tokens
        param.n_keep = load.n_keep
        param.skip_special_token = load.skip_special_token
        param.is_async = False
        _put_sampling(param, load.sampling)
        extend = param.extend_param
        extend.base_domain_id = load.base_domain_id
        extend.n_batch = load.n_batch
        extend.use_cross_attn = int(load.use_cross_attn)
        if load.embed_flash is not None:
            extend.embed_flash = int(load.embed_flash)
        if load.cpus:
            extend.enabled_cpus_num = len(load.cpus)
            extend.enabled_cpus_mask = sum(1 << cpu for cpu in load.cpus)
        return param

    @abstractmethod
    def init(
        self, library: Any, handle: Any, param: Any, callbacks: CallbackPointers, keep: list[Any]
    ) -> int:
        """Call ``rkllm_init`` the way this interface wants it."""

    def inputs(self, library: Any, given: Sequence[RunInput], keep: list[Any]) -> Any:
        """Return the input array of one run: exactly ``n_batch`` entries."""
        return make_inputs(self.ffi, library, given, keep, self._put_media)

    @abstractmethod
    def _put_media(self, target: Any, given: MultimodalInput, keep: list[Any]) -> None:
        """Put the image, or what else there is, into a RKLLMMultiModalInput of zeros."""

    def infer_params(
        self, library: Any, run: RunParams, mode: EvaluateMode | None, keep: list[Any]
    ) -> Any:
        """Return how one run is to be done. Its adapter is said every time; NULL is the base."""
        ffi = self.ffi
        infer = ffi.new("RKLLMInferParam *")
        keep.append(infer)
        infer.mode = {
            None: library.RKLLM_INFER_GENERATE,
            EvaluateMode.HIDDEN: library.RKLLM_INFER_GET_LAST_HIDDEN_LAYER,
            EvaluateMode.LOGITS: library.RKLLM_INFER_GET_LOGITS,
        }[mode]
        infer.keep_history = int(run.keep_history)
        if run.adapter is not None:
            adapter = ffi.new("RKLLMLoraParam *", [c_string(ffi, run.adapter, keep)])
            keep.append(adapter)
            infer.lora_params = adapter
        if run.save_cache is not None:
            save = ffi.new("RKLLMPromptCacheParam *", [1, c_path(ffi, run.save_cache, keep)])
            keep.append(save)
            infer.prompt_cache_params = save
        self._limit_run(infer, run, keep)
        return infer

    @abstractmethod
    def _limit_run(self, infer: Any, run: RunParams, keep: list[Any]) -> None:
        """Say the run's own sampling and token limit, where the interface has them."""

    def adapter(self, path: str, name: str, scale: float, keep: list[Any]) -> Any:
        """Return the struct of an adapter that is to be loaded."""
        ffi = self.ffi
        values = [c_path(ffi, path, keep), c_string(ffi, name, keep), scale]
        struct = ffi.new("RKLLMLoraAdapter *", values)
        keep.append(struct)
        return struct

    def cross_attention(self, given: CrossAttention, keep: list[Any]) -> Any:
        """Return the struct of an encoder's output."""
        ffi = self.ffi
        arrays = (given.k_cache, given.v_cache, given.mask)
        values = [c_floats(ffi, data, keep) for data in arrays]
        values += [c_ints(ffi, given.positions, keep), given.n_tokens]
        struct = ffi.new("RKLLMCrossAttnParam *", values)
        keep.append(struct)
        return struct


class _Dialect12(Dialect):
    """RKLLM 1.2.1 to 1.2.3: sampling, the token limit and image tags are fixed at init."""

    declarations = "rkllm_1_2"
    per_run_sampling = False

    def init_params(self, library: Any, load: LoadParams, keep: list[Any]) -> Any:
        param = super().init_params(library, load, keep)
        for name, tag in zip(_IMAGE_TAGS, load.image_tags, strict=True):
            if tag or getattr(param, name) == self.ffi.NULL:
                setattr(param, name, c_string(self.ffi, tag, keep))
        return param

    def init(
        self, library: Any, handle: Any, param: Any, callbacks: CallbackPointers, keep: list[Any]
    ) -> int:
        keep.append(callbacks)
        return int(library.rkllm_init(handle, param, callbacks.on_result))

    def _put_media(self, target: Any, given: MultimodalInput, keep: list[Any]) -> None:
        image = given.image
        if image is None:
            return
        target.image_embed = c_floats(self.ffi, image.data, keep)
        target.n_image_tokens, target.n_image = image.n_tokens, image.n_images
        target.image_width, target.image_height = image.width, image.height

    def _limit_run(self, infer: Any, run: RunParams, keep: list[Any]) -> None:
        """Nothing can be limited; the binding refused to try."""


class _Dialect13(Dialect):
    """RKLLM 1.3.0: callbacks in a struct, sampling and token limit per run, video."""

    declarations = "rkllm_1_3"
    per_run_sampling = True

    def init_params(self, library: Any, load: LoadParams, keep: list[Any]) -> Any:
        param = super().init_params(library, load, keep)
        param.ignore_eos_token = load.ignore_eos_token
        return param

    def init(
        self, library: Any, handle: Any, param: Any, callbacks: CallbackPointers, keep: list[Any]
    ) -> int:
        struct = self.ffi.new(
            "RKLLMCallback *",
            {
                "result_callback": callbacks.on_result,
                "tokenizer_callback": callbacks.tokenize,
                "embed_callback": callbacks.embed,
            },
        )
        keep += [callbacks, struct]
        return int(library.rkllm_init(handle, param, struct))

    def _put_media(self, target: Any, given: MultimodalInput, keep: list[Any]) -> None:
        if (image := given.image) is not None:
            self._put_image(target.image, image, keep)
        if (video := given.video) is not None:
            place = target.video
            place.video_embed = c_floats(self.ffi, video.data, keep)
            place.n_frame_tokens, place.n_video = video.n_tokens, video.n_videos
            place.n_frame_per_video = video.n_frames
            place.frame_width, place.frame_height = video.width, video.height
            for name, tag in zip(("start", "end", "content"), video.tags, strict=True):
                setattr(place, f"video_{name}", c_string(self.ffi, tag, keep))

    def _put_image(self, place: Any, image: Image, keep: list[Any]) -> None:
        place.image_embed = c_floats(self.ffi, image.data, keep)
        place.n_image_tokens, place.n_image = image.n_tokens, image.n_images
        place.image_width, place.image_height = image.width, image.height
        for name, tag in zip(("start", "end", "content"), image.tags, strict=True):
            setattr(place, f"image_{name}", c_string(self.ffi, tag, keep))

    def _limit_run(self, infer: Any, run: RunParams, keep: list[Any]) -> None:
        infer.max_new_tokens = run.max_new_tokens or 0  # 0: the value of init
        if run.sampling is None:
            return
        sampling = self.ffi.new("RKLLMSamplingParam *")
        keep.append(sampling)
        _put_sampling(sampling, run.sampling)
        infer.sampling_params = sampling


@cache
def dialect_for(abi: Abi) -> Dialect:
    """Return the dialect of ``abi``; one for the whole process."""
    return {Abi.V1_2: _Dialect12, Abi.V1_3: _Dialect13}[abi]()


def _put_sampling(target: Any, sampling: Sampling) -> None:
    """Put all nine fields, which override together; they have the library's names."""
    for entry in fields(sampling):
        setattr(target, entry.name, getattr(sampling, entry.name))
    if sampling.temperature == 0:
        # Greedy by both names: a temperature of 0 is documented as argmax, top_k 1 needs no trust.
        # Mirostat would choose in place of either.
        target.top_k, target.mirostat = 1, 0
