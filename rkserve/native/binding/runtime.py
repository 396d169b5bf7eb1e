"""The vendor's library as a ``Runtime``: the calls of a handle's owner, one at a time.

Each call is checked by the state table before it reaches the library, and all memory that the
library can read is kept alive. The module knows no requests, no text (tokens are bytes) and no
policy. Runs are made in ``runs``; the functions that C calls are in ``callback``.

One owner at a time holds ``_owner``; a second one is refused instead of waiting. ``abort`` and
``is_running`` work without it, and the callback takes no lock, so that an abort is never blocked.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rkserve.core.errors import LoadFailed, Misuse
from rkserve.native.binding import preconditions
from rkserve.native.binding.callback import Ended, NativeRun, ResultCallback, keep_for_good
from rkserve.native.binding.library import Handle, ModelCallbacks, detect
from rkserve.native.binding.preconditions import HandleEvent, HandleState, advance
from rkserve.native.binding.releases import CallbackPointers, RuntimeRelease, c_path, c_string
from rkserve.native.binding.runs import HandleRuns, fitting
from rkserve.native.quirks import quirks_for
from rkserve.native.runtime import (
    CrossAttention,
    EvaluateMode,
    LoadParams,
    Matrix,
    RunInput,
    RunOutcome,
    RunParams,
    Sink,
)


def open_runtime(
    path: Path, quirks: Mapping[str, bool] | None = None, *, allow_unlisted: bool = False
) -> Binding:
    """Open the library at ``path``, of any accepted release; ``quirks`` are overrides.

    Raises:
        LibraryMissing, ReleaseRefused: see ``detect``.
        ConfigError: an override is not in the quirk table.
    """
    release = detect(path, allow_unlisted=allow_unlisted)
    return Binding(path, release, quirks_for(release.quirks, quirks))


class Binding:
    """One handle of one library; ``Runtime`` documents its methods."""

    def __init__(self, path: Path, release: RuntimeRelease, quirks: Mapping[str, bool]) -> None:
        self._release, self._quirks = release, quirks
        self._handle = Handle(path, release)
        self._callback = ResultCallback(self._handle, quirks)
        self._runs = HandleRuns(self._handle, self._callback, quirks)
        self._owner = threading.Lock()
        # By function: the arguments that the library keeps until the next call of that function.
        self._kept: dict[str, list[Any]] = {}
        self._cross_attention = False

    # -- facts ---------------------------------------------------------------------------------

    @property
    def release(self) -> str:
        """The detected release."""
        return self._release.version

    @property
    def per_run_sampling(self) -> bool:
        """True if a run may carry sampling and a token limit."""
        return self._release.per_run_sampling

    @property
    def image_tags_at_load(self) -> bool:
        """True if image tags belong to the load, and not to each image."""
        return self._release.image_tags_at_load

    @property
    def quirks(self) -> Mapping[str, bool]:
        """The values of the quirks by name."""
        return self._quirks

    @property
    def entries(self) -> tuple[Binding, ...]:
        """The handle itself: all entries of a batch have one run."""
        return (self,)

    @property
    def state(self) -> HandleState:
        """The state of the handle."""
        return self._callback.state

    @property
    def late_callbacks(self) -> int:
        """The number of callbacks without a run, or for an earlier one."""
        return self._callback.late

    @property
    def last_run(self) -> NativeRun | None:
        """The record of the last run that has ended or is paused: its callbacks and figures."""
        return self._callback.settled

    # -- load and destroy ----------------------------------------------------------------------

    def load(self, params: LoadParams) -> None:
        """Create the handle. Raises ``LoadFailed``."""
        callback = self._callback
        with self._owned(HandleEvent.INIT) as loaded:
            preconditions.check_load(params, self._release, self._quirks)
            callback.n_batch = params.n_batch
            try:
                self._handle.init(params, self._functions(params))
            except (OverflowError, TypeError, Misuse) as exc:
                raise LoadFailed(f"a parameter does not fit its C type: {exc}") from exc
            except LoadFailed as exc:
                callback.handle_state = advance(callback.handle_state, HandleEvent.INIT_FAILED)
                raise exc from callback.failure
            self._cross_attention = params.use_cross_attn
            callback.handle_state = loaded

    def _functions(self, params: LoadParams) -> CallbackPointers:
        hooks = ModelCallbacks(self._handle.ffi, self._callback.note, params.tokenize, params.embed)
        functions = CallbackPointers(self._callback.on_result_c, hooks.tokenize, hooks.embed)
        keep_for_good(functions)
        return functions

    def destroy(self) -> None:
        """Free the handle; allowed on an idle or paused one only. Raises ``CallFailed``."""
        with self._owned(HandleEvent.DESTROY) as destroyed:
            # Even if the call fails: the state of the handle is then undefined.
            self._callback.handle_state = destroyed
            self._handle.destroy()
            self._runs.paused = None
            self._runs.cache.took(loaded=False)
            self._kept = {}

    # -- runs ----------------------------------------------------------------------------------

    def run(self, params: RunParams, sink: Sink) -> RunOutcome:
        """Generate until the end, a pause or an abort; see ``Runtime``."""
        with self._owned(HandleEvent.RESUME if params.resume else HandleEvent.RUN) as started:
            return self._runs.generate(params, sink, started)

    def run_async(self, params: RunParams, sink: Sink, ended: Ended) -> None:
        """Start a run on a thread of the library's; see ``Runtime``."""
        if params.resume:
            raise Misuse("a paused run cannot be resumed asynchronously")
        with self._owned(HandleEvent.RUN) as started:
            self._runs.start(params, sink, ended, started)

    def poll_async(self) -> bool:
        """Check an asynchronous run; return True while it continues. See ``Runtime``."""
        if not self._owner.acquire(blocking=False):
            run = self._callback.run
            return run is not None and not run.reported
        try:
            return self._runs.look_after()
        finally:
            self._owner.release()

    def drain(self) -> None:
        """End a paused run without resuming it. Raises ``CallFailed``."""
        with self._owned(HandleEvent.DRAIN) as started:
            self._runs.drain(started)

    def evaluate(
        self,
        given: RunInput,
        mode: EvaluateMode,
        *,
        keep_history: bool = False,
        adapter: str | None = None,
        last: bool = False,
    ) -> Matrix:
        """Compute one row per position of ``given``; see ``Runtime``."""
        with self._owned(HandleEvent.EVALUATE) as started:
            return self._runs.evaluate(
                given, mode, started, history=keep_history, adapter=adapter, last=last
            )

    def abort(self) -> None:
        """Request the end of the run at its next token; a no-op without a run."""
        self._callback.abort()

    def is_running(self) -> bool:
        """Return the library's own report of a running run; False without a handle."""
        return self._handle.is_running()

    # -- the KV cache --------------------------------------------------------------------------

    def clear_kv_cache(self, *, keep_system_prompt: bool = False) -> None:
        """Empty the KV cache of an idle handle. Raises ``CallFailed``."""
        with self._owned(HandleEvent.CLEAR_KV):
            null = self._handle.ffi.NULL
            self._handle.call("rkllm_clear_kv_cache", int(keep_system_prompt), null, null)
            self._runs.context.cleared(all_of_it=not keep_system_prompt)

    def clear_kv_range(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Remove ranges from a paused handle's KV cache; see ``Runtime``."""
        with self._owned(HandleEvent.CLEAR_KV_RANGE):
            self._runs.cut(ranges)

    def kv_cache_sizes(self) -> tuple[int, ...]:
        """Return the positions in each entry's KV cache. Raises ``CallFailed``."""
        with self._owned(HandleEvent.KV_SIZE):
            return self._handle.kv_sizes(self._callback.n_batch)

    def load_prompt_cache(self, path: str) -> None:
        """Load a cache file for the next runs; see ``Runtime``."""
        with self._owned(HandleEvent.PROMPT_CACHE):
            self._runs.cache.check_load(self._callback.n_batch, self._quirks)
            preconditions.check_file(path, "prompt cache")
            keep: list[Any] = []
            c_file = c_path(self._handle.ffi, path, keep)
            self._runs.release_cache()  # required by the vendor before another load
            self._call_keeping("rkllm_load_prompt_cache", keep, c_file)
            self._runs.cache.took(loaded=True)

    def release_prompt_cache(self) -> None:
        """Release the loaded cache file. Raises ``CallFailed``."""
        with self._owned(HandleEvent.PROMPT_CACHE):
            self._runs.release_cache()

    # -- adapters, templates, tools ------------------------------------------------------------

    def load_adapter(self, path: str, name: str, scale: float = 1.0) -> None:
        """Load a LoRA adapter into an idle handle; see ``Runtime``."""
        with self._owned(HandleEvent.CONFIGURE):
            preconditions.check_adapter(path, name, scale, self._runs.adapters)
            # Kept even if it is refused: the library may have stored the pointers by then.
            adapter = self._release.adapter(path, name, scale, self._handle.keep)
            self._handle.call("rkllm_load_lora", adapter)
            self._runs.adapters.add(name)

    def set_chat_template(self, system: str, prefix: str, postfix: str) -> None:
        """Replace the model's chat template for PROMPT input. Raises ``CallFailed``."""
        with self._owned(HandleEvent.CONFIGURE):
            self._set_texts("rkllm_set_chat_template", system, prefix, postfix)
            self._runs.template_emptied = not (system or prefix or postfix)

    def set_function_tools(self, system: str, tools: str, response_tag: str) -> None:
        """Describe tools (JSON text) to the model for PROMPT input. Raises ``CallFailed``."""
        with self._owned(HandleEvent.CONFIGURE):
            preconditions.check_tools(tools)
            self._set_texts("rkllm_set_function_tools", system, tools, response_tag)
            self._runs.template_emptied = False  # tools are passed through a template

    def set_cross_attention(self, given: CrossAttention) -> None:
        """Set the encoder output; see ``Runtime``."""
        with self._owned(HandleEvent.CONFIGURE):
            preconditions.check_cross_attention(given, loaded_for_it=self._cross_attention)
            keep: list[Any] = []
            struct = fitting(lambda: self._release.cross_attention(given, keep))
            self._call_keeping("rkllm_set_cross_attn_params", keep, struct)
            self._runs.context.encoder_replaced()

    def _set_texts(self, function: str, *texts: str) -> None:
        keep: list[Any] = []
        parts = [c_string(self._handle.ffi, text, keep) for text in texts]
        self._call_keeping(function, keep, *parts)

    def _call_keeping(self, function: str, keep: list[Any], *args: Any) -> None:
        """Call a function whose arguments stay alive until its next call, or destroy."""
        before = self._kept.get(function, [])
        self._kept[function] = [before, keep]  # a failed call may leave either in use
        self._handle.call(function, *args)
        self._kept[function] = keep

    # -- one owner -----------------------------------------------------------------------------

    @contextmanager
    def _owned(self, event: HandleEvent) -> Iterator[HandleState]:
        """Own the handle during a call that the state table allows; yield the state after it."""
        if not self._owner.acquire(blocking=False):
            advance(self.state, event)  # a better message if a run is the reason
            raise Misuse(f"'{event.value}' while another call is inside the library")
        try:
            self._runs.await_landing()
            yield advance(self.state, event)
        finally:
            self._owner.release()
