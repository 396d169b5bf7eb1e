"""The accepted releases of the vendor's runtime, one class each.

Everything in which a release differs stands on its class: the header in ``decl`` that declares its
structs and functions, the offset that identifies its layout, its capabilities, its known quirks,
and the conversion of values to its structs. No other module compares releases. A release is added
only after its header was read: the library checks nothing, and a wrong layout corrupts memory
instead of failing.

The conversion of a run's inputs is the same for all releases. Memory that C reads is appended to a
``keep`` list, whose owner keeps it alive; sizes are checked beforehand in ``preconditions``.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import import_module
from types import MappingProxyType
from typing import Any, ClassVar

from rkserve.core.errors import Misuse
from rkserve.core.run_params import Sampling
from rkserve.native.runtime import (
    CrossAttention,
    EmbedInput,
    EvaluateMode,
    Image,
    LoadParams,
    MultimodalInput,
    PromptInput,
    RunInput,
    RunParams,
    TokenInput,
    Video,
)

NO_IMAGE_TAGS = ("", "", "")
_IMAGE_TAGS = ("img_start", "img_end", "img_content")


@dataclass(frozen=True, slots=True)
class CallbackPointers:
    """The functions that C calls. The last two are NULL where the model needs neither."""

    on_result: Any
    tokenize: Any
    embed: Any


class RuntimeRelease(ABC):
    """One release; the defaults are those of 1.2.1, the oldest one that is accepted.

    Objects that C refers to are appended to the ``keep`` lists, whose owner keeps them alive. Only
    ``init`` calls the library with a handle.
    """

    version: ClassVar[str]
    listed: ClassVar[bool] = True  # False: a later release that is driven as this one
    declarations: ClassVar[str]  # the header in ``decl``, without its suffix
    extend_param_offset: ClassVar[int]  # of ``extend_param`` in RKLLMParam, in bytes
    per_run_sampling: ClassVar[bool] = False  # and a token limit per run
    image_tags_at_load: ClassVar[bool] = True  # otherwise with each image
    one_mark_for_all_images: ClassVar[bool] = True  # a single <image> may stand for several images
    takes_video: ClassVar[bool] = False
    quirks: ClassVar[Mapping[str, bool]] = MappingProxyType({})  # differences from their defaults

    @cached_property
    def ffi(self) -> Any:
        """The declarations of the release, imported at first use."""
        return import_module(f"rkserve.native.decl.{self.declarations}").ffi

    @abstractmethod
    def missing_settings(self, load: LoadParams) -> Iterator[str]:
        """Yield the settings in ``load`` that the release lacks and would ignore."""

    def init_params(self, library: Any, load: LoadParams, keep: list[Any]) -> Any:
        """Return the parameters of init, based on the library's own defaults.

        Zeros are no valid base: ``n_batch`` 0 is refused, and NULL image tags crash 1.2.x.
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
        """Call ``rkllm_init`` with the arguments that this release takes; return its code."""

    def inputs(self, library: Any, given: Sequence[RunInput], keep: list[Any]) -> Any:
        """Return the input array of one run, one entry per input."""
        return make_inputs(self.ffi, library, given, keep, self._put_media)

    @abstractmethod
    def _put_media(self, target: Any, given: MultimodalInput, keep: list[Any]) -> None:
        """Fill in the image and video of a zeroed RKLLMMultiModalInput."""

    def infer_params(
        self, library: Any, run: RunParams, mode: EvaluateMode | None, keep: list[Any]
    ) -> Any:
        """Return the parameters of one run; a NULL adapter is the base model."""
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
        """Set the sampling and token limit of the run, where the release has them."""

    def adapter(self, path: str, name: str, scale: float, keep: list[Any]) -> Any:
        """Return the struct that ``rkllm_load_lora`` takes."""
        ffi = self.ffi
        values = [c_path(ffi, path, keep), c_string(ffi, name, keep), scale]
        struct = ffi.new("RKLLMLoraAdapter *", values)
        keep.append(struct)
        return struct

    def cross_attention(self, given: CrossAttention, keep: list[Any]) -> Any:
        """Return the struct of an encoder output."""
        ffi = self.ffi
        arrays = (given.k_cache, given.v_cache, given.mask)
        values = [c_floats(ffi, data, keep) for data in arrays]
        values += [c_ints(ffi, given.positions, keep), given.n_tokens]
        struct = ffi.new("RKLLMCrossAttnParam *", values)
        keep.append(struct)
        return struct


class Rkllm121(RuntimeRelease):
    """RKLLM 1.2.1: sampling, the token limit and image tags are fixed at init."""

    version = "1.2.1"
    declarations = "rkllm_1_2"
    extend_param_offset = 88

    def missing_settings(self, load: LoadParams) -> Iterator[str]:
        if load.ignore_eos_token:
            yield "ignore_eos_token"
        if load.tokenize is not None:
            yield "tokenizer callback"
        if load.embed is not None:
            yield "embedding callback"

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
        """Do nothing: ``preconditions`` refuses such a run."""


class Rkllm122(Rkllm121):
    """RKLLM 1.2.2: binary identical to 1.2.1, with asynchronous runs repaired."""

    version = "1.2.2"
    quirks = MappingProxyType({"run_async": True})


class Rkllm123(Rkllm122):
    """RKLLM 1.2.3: binary identical to 1.2.2."""

    version = "1.2.3"


class Rkllm130(RuntimeRelease):
    """RKLLM 1.3.0: callbacks in a struct, sampling, limit and image tags per run, video."""

    version = "1.3.0"
    declarations = "rkllm_1_3"
    extend_param_offset = 60
    per_run_sampling = True
    image_tags_at_load = False
    one_mark_for_all_images = False
    takes_video = True
    quirks = MappingProxyType(
        {
            "drain_by_limit": True,
            "run_async": True,
            "eos_uint32_misread": True,
            "thinking_ends_run": True,
            "return_2_frees_buffer": True,
            "prefix_reuse_in_ram": True,
        }
    )

    def missing_settings(self, load: LoadParams) -> Iterator[str]:
        if load.image_tags != NO_IMAGE_TAGS:
            yield "image_tags at load, but with each image"

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
        if given.image is not None:
            self._put_image(target.image, given.image, keep)
        if given.video is not None:
            self._put_video(target.video, given.video, keep)

    def _put_image(self, place: Any, image: Image, keep: list[Any]) -> None:
        place.image_embed = c_floats(self.ffi, image.data, keep)
        place.n_image_tokens, place.n_image = image.n_tokens, image.n_images
        place.image_width, place.image_height = image.width, image.height
        for name, tag in zip(("start", "end", "content"), image.tags, strict=True):
            setattr(place, f"image_{name}", c_string(self.ffi, tag, keep))

    def _put_video(self, place: Any, video: Video, keep: list[Any]) -> None:
        place.video_embed = c_floats(self.ffi, video.data, keep)
        place.n_frame_tokens, place.n_video = video.n_tokens, video.n_videos
        place.n_frame_per_video = video.n_frames
        place.frame_width, place.frame_height = video.width, video.height
        for name, tag in zip(("start", "end", "content"), video.tags, strict=True):
            setattr(place, f"video_{name}", c_string(self.ffi, tag, keep))

    def _limit_run(self, infer: Any, run: RunParams, keep: list[Any]) -> None:
        infer.max_new_tokens = run.max_new_tokens or 0  # 0: the value of init
        if run.sampling is None:
            return
        sampling = self.ffi.new("RKLLMSamplingParam *")
        keep.append(sampling)
        _put_sampling(sampling, run.sampling)
        infer.sampling_params = sampling


class Rkllm131(Rkllm130):
    """RKLLM 1.3.1: room for audio in each input, which makes the inputs of a batch larger.

    Its default parameters are laid out like those of 1.3.0: only the version string tells them
    apart. Its layout was measured by a third party; see the header. Audio is not passed on.
    """

    version = "1.3.1"
    declarations = "rkllm_1_3_1"


RELEASES: Mapping[str, RuntimeRelease] = MappingProxyType(
    {one.version: one for one in (Rkllm121(), Rkllm122(), Rkllm123(), Rkllm130(), Rkllm131())}
)


_PLAIN = re.compile(r"(\d{1,9})\.(\d{1,9})\.(\d{1,9})")


def unlisted(version: str, offset: int | None) -> RuntimeRelease | None:
    """Return an unlisted version as the newest listed release with its layout.

    None if there is no such layout, or if the version is a beta or not later than that release.
    """
    alike = [one for one in RELEASES.values() if one.extend_param_offset == offset]
    if not alike or _PLAIN.fullmatch(version) is None:
        return None
    newest = max(alike, key=lambda one: _numbers(one.version))
    if _numbers(version) <= _numbers(newest.version):
        return None
    name = f"{version} (unlisted, driven as {newest.version})"
    made: RuntimeRelease = type("Unlisted", (type(newest),), {"version": name, "listed": False})()
    return made


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _put_sampling(target: Any, sampling: Sampling) -> None:
    """Set all nine fields, which the library overrides together; the names are the library's."""
    for entry in fields(sampling):
        setattr(target, entry.name, getattr(sampling, entry.name))
    if sampling.temperature == 0:
        # Greedy by both names: a temperature of 0 is documented as argmax, top_k 1 needs no trust.
        # Mirostat would choose in place of either.
        target.top_k, target.mirostat = 1, 0


PutMedia = Callable[[Any, MultimodalInput, "list[Any]"], None]


def make_inputs(
    ffi: Any, library: Any, inputs: Sequence[RunInput], keep: list[Any], put_media: PutMedia
) -> Any:
    """Return the input array of one run."""
    entries = ffi.new("RKLLMInput[]", len(inputs))
    keep.append(entries)
    for place, given in enumerate(inputs):
        entry = entries[place]
        if isinstance(given, (PromptInput, MultimodalInput)):
            entry.role = c_string(ffi, given.role, keep)
            entry.enable_thinking = given.enable_thinking
        else:
            entry.role = c_string(ffi, "user", keep)
        if isinstance(given, MultimodalInput):
            entry.input_type = library.RKLLM_INPUT_MULTIMODAL
            entry.multimodal_input.prompt = c_string(ffi, given.text, keep)
            put_media(entry.multimodal_input, given, keep)
        else:
            _put_plain(ffi, library, entry, given, keep)
    return entries


def _put_plain(
    ffi: Any,
    library: Any,
    entry: Any,
    given: PromptInput | EmbedInput | TokenInput,
    keep: list[Any],
) -> None:
    if isinstance(given, PromptInput):
        entry.input_type = library.RKLLM_INPUT_PROMPT
        entry.prompt_input = c_string(ffi, given.text, keep)
    elif isinstance(given, EmbedInput):
        entry.input_type = library.RKLLM_INPUT_EMBED
        entry.embed_input.embed = c_floats(ffi, given.data, keep)
        entry.embed_input.n_tokens = given.n_tokens
    else:
        ids = ffi.new("int32_t[]", given.ids)
        keep.append(ids)
        entry.input_type = library.RKLLM_INPUT_TOKEN
        entry.token_input.input_ids = ids
        entry.token_input.n_tokens = len(given.ids)


def c_string(ffi: Any, text: str, keep: list[Any]) -> Any:
    """Return ``text`` as a C string. Raises ``Misuse`` for NUL and for invalid Unicode."""
    if "\0" in text:
        raise Misuse("the text contains a NUL character, at which the library would truncate it")
    try:
        value = ffi.new("char[]", text.encode())
    except UnicodeEncodeError as exc:
        raise Misuse(f"the text is not valid Unicode: {exc.reason}") from exc
    keep.append(value)
    return value


def c_path(ffi: Any, path: str, keep: list[Any]) -> Any:
    """Return a path as a C string, which need not be Unicode. Raises ``Misuse``."""
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError as exc:
        raise Misuse(f"{path!r} is not a path: {exc.reason}") from exc
    if not raw or b"\0" in raw:
        raise Misuse(f"{path!r} is empty or contains a NUL character")
    value = ffi.new("char[]", raw)
    keep.append(value)
    return value


def c_floats(ffi: Any, data: bytes, keep: list[Any]) -> Any:
    """Return raw float32 bytes as a C array, without a copy."""
    return _view(ffi, "float[]", data, keep)


def c_ints(ffi: Any, data: bytes, keep: list[Any]) -> Any:
    """Return raw int32 bytes as a C array, without a copy."""
    return _view(ffi, "int32_t[]", data, keep)


def _view(ffi: Any, ctype: str, data: bytes, keep: list[Any]) -> Any:
    view = ffi.from_buffer(ctype, data)  # keeps the bytes alive
    keep.append(view)
    return view
