"""The vendor's library as a ``Runtime``: handles, the result callback, status codes.

The only file that sees a handle or is called from C. It judges every call by the state table
before the library sees it, and keeps everything that the library can see alive. It knows no
requests, no text (pieces are bytes) and no policy: who is to be aborted is for its callers.

Locks: one owner at a time (``_owner``), never waited for. ``abort`` and ``is_running`` do without
it, and the callback takes no lock at all, so an abort always gets through.
"""

from __future__ import annotations

import logging
import resource
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from rkserve.errors import CallFailed, LoadFailed, Misuse
from rkserve.native.abi import c_string, dialect_for
from rkserve.native.checks import check_load, check_prompt, check_resume, check_run
from rkserve.native.detect import detect
from rkserve.native.library import open_library
from rkserve.native.quirks import quirks_for
from rkserve.native.releases import Abi
from rkserve.native.run import Run, perf_of
from rkserve.native.runtime import (
    CallState,
    LoadParams,
    Piece,
    PromptInput,
    RunEnd,
    RunOutcome,
    RunParams,
    Sink,
    Verdict,
)
from rkserve.native.states import TRANSITIONS, HandleEvent, HandleState, advance

log = logging.getLogger(__name__)

# What the result callback may say. 2 (free the buffer) exists on 1.3.0 only and is never said.
_GO_ON, _PAUSE = 0, 1

# rkllm wants one descriptor per buffer; the vendor's own demo asks for this many.
_OPEN_FILES = 102_400

# Two inits at the same time are undefined, also for two handles.
_INIT_LOCK = threading.Lock()

# A callback that C may still know must never be freed; one per handle, so this stays small.
_CALLBACKS: list[Any] = []

_NORMAL, _WAITING = CallState.NORMAL.value, CallState.WAITING.value
_FINISH, _ERROR = CallState.FINISH.value, CallState.ERROR.value
_END_EVENTS = {
    RunEnd.FINISHED: HandleEvent.RETURNED,
    RunEnd.PAUSED: HandleEvent.PAUSE,
    RunEnd.FAILED: HandleEvent.CALL_FAILED,
}


def open_runtime(path: Path, quirks: Mapping[str, bool] | None = None) -> Binding:
    """Open the library at ``path``, whatever accepted release it is; ``quirks`` are overrides.

    Raises:
        LibraryMissing, ReleaseRefused: see ``detect``.
        ConfigError: an override is not in the quirk table.
    """
    detected = detect(path)
    return Binding(path, detected.release, detected.abi, quirks_for(detected.release, quirks))


class Binding:
    """One handle of one library; see ``Runtime`` for what its methods promise."""

    def __init__(self, path: Path, release: str, abi: Abi, quirks: Mapping[str, bool]) -> None:
        self._release, self._quirks = release, quirks
        self._dialect = dialect_for(abi)
        self._ffi: Any = self._dialect.ffi
        self._lib = open_library(self._ffi, path)
        self._word = self._ffi.typeof("uintptr_t")
        self._handle = self._ffi.NULL
        self._state = HandleState.UNLOADED
        self._owner = threading.Lock()
        # Held over an abort, and by the end of a run: no abort may hit an idle handle.
        self._abort_lock = threading.Lock()
        # Held over is_running, and while the handle is taken away to be destroyed.
        self._peek_lock = threading.Lock()
        self._run: Run | None = None
        self._paused: Run | None = None
        self._cookies = count(1)  # never 0: 1.3.0 would replace a NULL userdata
        self._keep: list[Any] = []  # what init was given, until destroy
        self._template: list[Any] = []
        self._kv_suspect = ""  # what happened to the live context, where that spoiled it
        self._template_emptied = False
        self._waiting_tokens = quirks["waiting_token_id_valid"]
        self.late_callbacks = 0
        self._on_result_c = self._ffi.callback(
            "LLMResultCallback", self._on_result, error=_GO_ON, onerror=self._on_escape
        )
        _CALLBACKS.append(self._on_result_c)

    # -- what it is ---------------------------------------------------------------------------

    @property
    def release(self) -> str:
        """The detected release."""
        return self._release

    @property
    def per_run_sampling(self) -> bool:
        """Whether a run may carry sampling and a token limit."""
        return self._dialect.per_run_sampling

    @property
    def quirks(self) -> Mapping[str, bool]:
        """What the release may be trusted with."""
        return self._quirks

    @property
    def state(self) -> HandleState:
        """Where the handle is."""
        run, state = self._run, self._state
        if run is None or not run.abort_wanted:
            return state
        return TRANSITIONS.get((state, HandleEvent.ABORT), state)

    # -- calls of the owner -------------------------------------------------------------------

    def load(self, params: LoadParams) -> None:
        """Create the handle. Raises ``LoadFailed``."""
        with self._owned(HandleEvent.INIT) as loaded:
            check_load(params)
            keep: list[Any] = []
            pointer = self._ffi.new("LLMHandle *")
            with _INIT_LOCK:
                raise_file_limit()
                try:
                    param = self._dialect.init_params(self._lib, params, keep)
                except (OverflowError, TypeError) as exc:
                    raise LoadFailed(f"a parameter does not fit the library's: {exc}") from exc
                code = self._dialect.init(self._lib, pointer, param, self._on_result_c, keep)
            if code != 0 or pointer[0] == self._ffi.NULL:
                self._state = advance(self._state, HandleEvent.INIT_FAILED)
                raise LoadFailed(_init_failure(params.model_path, code))
            self._keep, self._handle, self._state = keep, pointer[0], loaded

    def run(self, params: RunParams, sink: Sink) -> RunOutcome:
        """Generate until the end, a pause or an abort; see ``Runtime``."""
        event = HandleEvent.RESUME if params.resume else HandleEvent.RUN
        with self._owned(event) as started:
            check_run(params, self._release, per_run=self.per_run_sampling)
            if isinstance(params.input, PromptInput) and not self._template_emptied:
                check_prompt(params.input)
            self._check_history(params)
            run = self._prepare(params, sink)
            inputs = self._build(lambda: self._dialect.inputs(self._lib, params.input, run.keep))
            infer = self._build(lambda: self._dialect.infer_params(self._lib, params, run.keep))
            userdata = self._ffi.cast("void *", run.cookie)
            code, end = -1, RunEnd.FAILED
            with self._abort_lock:  # an abort sees both or neither
                self._state, self._run = started, run
            try:
                code = self._lib.rkllm_run(self._handle, inputs, infer, userdata)
            finally:  # a signal's exception may be raised on the way back from C
                end = self._settle(run, code)
        if run.failure is not None:
            raise run.failure
        return RunOutcome(end, run.perf, code)

    def clear_kv_cache(self, *, keep_system_prompt: bool = False) -> None:
        """Empty the KV cache of an idle handle. Raises ``CallFailed``."""
        with self._owned(HandleEvent.CLEAR_KV):
            null = self._ffi.NULL
            code = self._lib.rkllm_clear_kv_cache(self._handle, int(keep_system_prompt), null, null)
            _check("rkllm_clear_kv_cache", code)
            self._kv_suspect = ""

    def kv_cache_size(self) -> int:
        """Positions that the KV cache holds. Raises ``CallFailed``."""
        with self._owned(HandleEvent.KV_SIZE):
            sizes = self._ffi.new("int[1]")  # n_batch entries
            code = self._lib.rkllm_get_kv_cache_size(self._handle, sizes)
            _check("rkllm_get_kv_cache_size", code)
            return int(sizes[0])

    def set_chat_template(self, system: str, prefix: str, postfix: str) -> None:
        """Replace the model's own template for PROMPT input. Raises ``CallFailed``."""
        with self._owned(HandleEvent.CONFIGURE):
            keep: list[Any] = []
            parts = [c_string(self._ffi, text, keep) for text in (system, prefix, postfix)]
            code = self._lib.rkllm_set_chat_template(self._handle, *parts)
            _check("rkllm_set_chat_template", code)
            self._template = keep
            self._template_emptied = not (system or prefix or postfix)

    def destroy(self) -> None:
        """Free the handle; allowed on an idle or paused one only. Raises ``CallFailed``."""
        with self._owned(HandleEvent.DESTROY) as destroyed:
            with self._peek_lock:
                handle, self._handle = self._handle, self._ffi.NULL
            # Even if the call fails: nobody knows what the handle is worth then.
            self._state = destroyed
            _check("rkllm_destroy", self._lib.rkllm_destroy(handle))
            self._paused = None
            self._keep = []

    # -- calls of anyone ----------------------------------------------------------------------

    def abort(self) -> None:
        """Ask a run to end at the next token; does nothing where none is running."""
        run = self._run
        if run is not None and run.inside == threading.get_ident():
            # From the sink: the callback sees to it, without the lock, on its way out.
            run.abort_owed = run.abort_wanted = True
            return
        with self._abort_lock:
            advance(self.state, HandleEvent.ABORT)
            run = self._run
            if run is None:
                return
            # The library may not even have begun, and would take it for an abort of nothing.
            run.abort_owed = run.tokens == 0
            run.abort_wanted = True
            if run.pausing:  # the callback decides: it withdraws the pause, or has ended the run
                run.abort_owed = True
            else:
                self._call_abort(run)

    def is_running(self) -> bool:
        """Whether the library says that a run is going on; False without a handle."""
        with self._peek_lock:
            if self._handle == self._ffi.NULL:
                return False
            # The header of 1.2.x says the opposite, and is wrong.
            return bool(self._lib.rkllm_is_running(self._handle) == 1)

    # -- a run --------------------------------------------------------------------------------

    @contextmanager
    def _owned(self, event: HandleEvent) -> Iterator[HandleState]:
        """Be the one owner during a call that the table allows; yields the state after it."""
        if not self._owner.acquire(blocking=False):
            advance(self.state, event)  # says it better where a run is what is in the way
            raise Misuse(f"'{event.value}' while another call is inside the library")
        try:
            yield advance(self.state, event)
        finally:
            self._owner.release()

    def _check_history(self, params: RunParams) -> None:
        if self._paused is not None:
            by_prompt = self._quirks["resume_with_prompt"]
            check_resume(params, self._paused.params, by_prompt=by_prompt)
        elif params.keep_history and self._kv_suspect:
            raise Misuse(
                f"the last run with keep_history {self._kv_suspect}: clear the KV cache before the "
                "next one, which would continue a truncated turn"
            )

    def _prepare(self, params: RunParams, sink: Sink) -> Run:
        paused = self._paused
        if paused is None:
            return Run(next(self._cookies), params, sink)
        # The library may still look at what the paused run was given, and may call back with
        # either's userdata: one cookie, and everything kept.
        return Run(paused.cookie, params, sink, keep=list(paused.keep))

    def _build(self, make: Any) -> Any:
        try:
            return make()
        except (OverflowError, TypeError) as exc:
            raise Misuse(f"a value does not fit the library's: {exc}") from exc

    def _settle(self, run: Run, code: int) -> RunEnd:
        """The library has returned: note where that leaves the handle."""
        end = run.end(code)
        with self._abort_lock:  # an abort on its way in has left the library after this
            self._state = advance(self.state, _END_EVENTS[end])
            self._run = None
        self._paused = run if end is RunEnd.PAUSED else None
        if run.params.keep_history and end is RunEnd.FAILED:
            self._kv_suspect = "failed"
        elif run.params.keep_history and end is RunEnd.FINISHED and run.abort_wanted:
            self._kv_suspect = "" if self._quirks["kv_valid_after_abort"] else "was aborted"
        return end

    # -- called from C ------------------------------------------------------------------------

    def _on_result(self, result: Any, userdata: Any, state: int) -> int:
        run = self._run
        if run is None or int(self._ffi.cast(self._word, userdata)) != run.cookie:
            self.late_callbacks += 1
            return _GO_ON
        if state in (_NORMAL, _WAITING):
            return self._on_token(run, result, normal=state == _NORMAL)
        if state == _FINISH:
            run.finished, run.perf = True, perf_of(result)
        elif state == _ERROR:
            run.error = True
        else:
            raise CallFailed("the result callback's state", state)
        return _GO_ON

    def _on_token(self, run: Run, result: Any, *, normal: bool) -> int:
        run.inside = threading.get_ident()
        run.tokens += 1
        run.pausing = False
        if self._state is HandleState.PREFILL:
            self._state = advance(self._state, HandleEvent.TOKEN)
        if run.failure is None and (normal or self._waiting_tokens):
            text = result.text if normal else None  # WAITING: partial or NULL, and comes again
            verdict = run.sink(Piece(result.token_id, self._ffi.string(text) if text else b""))
            if verdict is Verdict.PAUSE and normal:
                self._grant_pause(run)
        # After the line above, so that an abort either sees `pausing` or is seen here.
        if run.abort_wanted:
            self._on_abort_wanted(run)
        run.inside = None
        return _PAUSE if run.pausing else _GO_ON

    def _grant_pause(self, run: Run) -> None:
        if run.params.keep_history and not self._quirks["pause_with_history"]:
            raise Misuse(
                f"RKLLM {self._release} is not known to pause a run with keep_history: abort it "
                "and continue by token ids"
            )
        run.pausing = True

    def _on_abort_wanted(self, run: Run) -> None:
        run.pausing = False
        if not run.abort_owed:
            return
        run.abort_owed = False
        if self._quirks["abort_in_callback"]:
            self._call_abort(run)
        else:
            work = threading.Thread(
                target=self._abort_from_aside, args=(run,), name="rkllm abort", daemon=True
            )
            work.start()

    def _on_escape(
        self,
        kind: Any,  # noqa: ARG002 - cffi's signature
        exc: BaseException,
        traceback: Any,  # noqa: ARG002
    ) -> None:
        """An exception left the callback: nothing may unwind through C, so keep it and abort."""
        run = self._run
        if run is None:
            log.error("the result callback failed outside a run", exc_info=exc)
            return
        run.failure = run.failure or exc
        run.abort_owed = run.abort_wanted = True
        self._on_abort_wanted(run)
        run.inside = None

    def _abort_from_aside(self, run: Run) -> None:
        with self._abort_lock:
            if self._run is run:
                self._call_abort(run)

    def _call_abort(self, run: Run) -> None:
        """Make the call. FINISH may still come right after the look: only C could close that."""
        if run.finished or run.error:
            return  # it is over in the library, if not yet here
        code = self._lib.rkllm_abort(self._handle)
        if code != 0:
            log.warning("rkllm_abort returned %d while a run was going on", code)


def raise_file_limit() -> None:
    """Raise the soft limit of open files towards what the library needs; never lower it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (file_limit(soft, hard), hard))


def file_limit(soft: int, hard: int) -> int:
    """Return the soft limit to set; -1 stands for no limit, as in ``resource``."""
    if soft == resource.RLIM_INFINITY:
        return soft
    return max(soft, _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES))


def _init_failure(model_path: str, code: int) -> str:
    if code == 0:
        return f"rkllm_init returned 0 but no handle for {model_path}"
    return (
        f"rkllm_init returned {code} for {model_path}; the library's own lines in the log say why"
    )


def _check(function: str, code: int) -> None:
    if code != 0:
        raise CallFailed(function, code)
