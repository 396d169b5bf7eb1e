"""What the two binary interfaces do differently, and how our values become their structs.

One ``FFI`` per interface, made from the vendor's declarations. It knows the structs and who has to
keep them alive (the list that is passed in); it makes no call that needs a handle but ``init``.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from functools import cache
from importlib import resources
from typing import Any, ClassVar

from cffi import FFI

from rkserve.errors import Misuse
from rkserve.messages import Sampling
from rkserve.native.releases import Abi
from rkserve.native.runtime import LoadParams, PromptInput, RunInput, RunParams

_IMAGE_TAGS = ("img_start", "img_end", "img_content")


class Dialect(ABC):
    """What is the same in all accepted releases."""

    declarations: ClassVar[str]
    per_run_sampling: ClassVar[bool]

    def __init__(self) -> None:
        self.ffi: Any = FFI()
        source = resources.files("rkserve.native.decl").joinpath(self.declarations)
        self.ffi.cdef(source.read_text(encoding="utf-8"))

    def init_params(self, library: Any, load: LoadParams, keep: list[Any]) -> Any:
        """Return the parameters of init, made from the library's own defaults.

        Never from zeros: ``n_batch`` 0 is refused, and NULL image tags crash 1.2.x.
        """
        param = self.ffi.new("RKLLMParam *", library.rkllm_createDefaultParam())
        path = self.ffi.new("char[]", os.fsencode(load.model_path))
        keep += [param, path]
        param.model_path = path
        param.max_context_len = load.max_context_len
        param.max_new_tokens = load.max_new_tokens
        param.n_keep = load.n_keep
        param.skip_special_token = load.skip_special_token
        param.is_async = False
        _put_sampling(param, load.sampling)
        param.extend_param.base_domain_id = load.base_domain_id
        param.extend_param.n_batch = 1
        if load.cpus:
            param.extend_param.enabled_cpus_num = len(load.cpus)
            param.extend_param.enabled_cpus_mask = sum(1 << cpu for cpu in load.cpus)
        return param

    @abstractmethod
    def init(self, library: Any, handle: Any, param: Any, on_result: Any, keep: list[Any]) -> int:
        """Call ``rkllm_init`` the way this interface wants it."""

    def inputs(self, library: Any, given: RunInput, keep: list[Any]) -> Any:
        """Return the input array of one run: exactly ``n_batch`` entries, which is one."""
        ffi = self.ffi
        inputs = ffi.new("RKLLMInput[1]")
        keep.append(inputs)
        entry = inputs[0]
        if isinstance(given, PromptInput):
            entry.role = c_string(ffi, given.role, keep)
            entry.enable_thinking = given.enable_thinking
            entry.input_type = library.RKLLM_INPUT_PROMPT
            entry.prompt_input = c_string(ffi, given.text, keep)
            return inputs
        entry.role = c_string(ffi, "user", keep)
        entry.input_type = library.RKLLM_INPUT_TOKEN
        ids = ffi.new("int32_t[]", given.ids)
        keep.append(ids)
        entry.token_input.input_ids = ids
        entry.token_input.n_tokens = len(given.ids)
        return inputs

    def infer_params(self, library: Any, run: RunParams, keep: list[Any]) -> Any:
        """Return how one run is to be done. Its adapter is said every time; NULL is the base."""
        infer = self.ffi.new("RKLLMInferParam *")
        keep.append(infer)
        infer.mode = library.RKLLM_INFER_GENERATE
        infer.lora_params = self.ffi.NULL
        infer.prompt_cache_params = self.ffi.NULL
        infer.keep_history = int(run.keep_history)
        self._limit_run(library, infer, run, keep)
        return infer

    @abstractmethod
    def _limit_run(self, library: Any, infer: Any, run: RunParams, keep: list[Any]) -> None:
        """Say the run's own sampling and token limit, where the interface has them."""


class _Dialect12(Dialect):
    """RKLLM 1.2.1 to 1.2.3: sampling and the token limit are fixed at init."""

    declarations = "rkllm_1_2.h"
    per_run_sampling = False

    def init_params(self, library: Any, load: LoadParams, keep: list[Any]) -> Any:
        param = super().init_params(library, load, keep)
        for tag in _IMAGE_TAGS:
            if getattr(param, tag) == self.ffi.NULL:
                setattr(param, tag, c_string(self.ffi, "", keep))
        return param

    def init(self, library: Any, handle: Any, param: Any, on_result: Any, keep: list[Any]) -> int:
        keep.append(on_result)
        return int(library.rkllm_init(handle, param, on_result))

    def _limit_run(self, library: Any, infer: Any, run: RunParams, keep: list[Any]) -> None:
        """Nothing can be limited; the binding refused to try."""


class _Dialect13(Dialect):
    """RKLLM 1.3.0: callbacks in a struct, sampling and token limit per run."""

    declarations = "rkllm_1_3.h"
    per_run_sampling = True

    def init(self, library: Any, handle: Any, param: Any, on_result: Any, keep: list[Any]) -> int:
        callbacks = self.ffi.new("RKLLMCallback *", {"result_callback": on_result})
        keep += [on_result, callbacks]
        return int(library.rkllm_init(handle, param, callbacks))

    def _limit_run(self, library: Any, infer: Any, run: RunParams, keep: list[Any]) -> None:
        infer.max_new_tokens = run.max_new_tokens or 0  # 0: the value of init
        infer.sampling_params = self.ffi.NULL
        if run.sampling is None:
            return
        sampling = self.ffi.new("RKLLMSamplingParam *")
        keep.append(sampling)
        # All nine fields override together, so those that we do not offer keep their defaults.
        defaults = library.rkllm_createDefaultParam()
        for name in ("mirostat", "mirostat_tau", "mirostat_eta"):
            setattr(sampling, name, getattr(defaults, name))
        _put_sampling(sampling, run.sampling)
        infer.sampling_params = sampling


@cache
def dialect_for(abi: Abi) -> Dialect:
    """Return the dialect of ``abi``; one for the whole process."""
    return {Abi.V1_2: _Dialect12, Abi.V1_3: _Dialect13}[abi]()


def c_string(ffi: Any, text: str, keep: list[Any]) -> Any:
    """Return ``text`` as C sees it. Raises ``Misuse`` where C would see less, or cannot."""
    if "\0" in text:
        raise Misuse("the text holds a NUL character, where the library would cut it off")
    try:
        value = ffi.new("char[]", text.encode())
    except UnicodeEncodeError as exc:
        raise Misuse(f"the text is not valid Unicode: {exc.reason}") from exc
    keep.append(value)
    return value


def _put_sampling(target: Any, sampling: Sampling) -> None:
    target.temperature = sampling.temperature
    target.top_p = sampling.top_p
    # Greedy by both names: a temperature of 0 is documented as argmax, top_k 1 needs no trust.
    target.top_k = 1 if sampling.temperature == 0 else sampling.top_k
    target.repeat_penalty = sampling.repeat_penalty
    target.frequency_penalty = sampling.frequency_penalty
    target.presence_penalty = sampling.presence_penalty
