"""The result callback of a handle, its run record, and aborts from other threads.

The callback copies the tokens, calls the run's sink, stores an exception of the sink, and returns;
only NORMAL callbacks may pause. It takes no lock, so that an abort is never blocked by it. Its only
library call is ``rkllm_abort``; the owner's calls are in ``runtime`` and ``runs``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rkserve.core.errors import CallFailed, Misuse
from rkserve.native.binding.library import Handle
from rkserve.native.binding.preconditions import TRANSITIONS, HandleEvent, HandleState, advance
from rkserve.native.runtime import (
    CallState,
    EvaluateMode,
    Matrix,
    Perf,
    RunEnd,
    RunOutcome,
    RunParams,
    Sink,
    SinkAction,
    Step,
    TokenPiece,
)

Ended = Callable[[RunOutcome | BaseException], None]


@dataclass(slots=True, eq=False)
class NativeRun:
    """One run for as long as the library can see it, or may resume it.

    There is no lock: each field has one writer, and the order of the writes keeps an abort from
    being lost. The thread in the callback writes all fields but ``abort_wanted`` and
    ``abort_owed``. Only an asynchronous run uses ``ended`` (a list that is emptied before its
    function is called, so that this happens once), ``reported``, and ``quiet`` (token count and
    time of the poll that first found no progress).
    """

    userdata: Any  # a number, because a stale pointer could not be distinguished
    params: RunParams
    sink: Sink
    mode: EvaluateMode | None = None  # None generates
    last: bool = False  # keep only the last row of an evaluation
    ended: list[Ended] | None = None
    keep: list[Any] = field(default_factory=list)  # objects that C points to
    tokens: int = 0
    inside: int | None = None  # the thread that is in the sink
    pausing: bool = False  # the callback returns 1, or has just done so
    paused_on: tuple[int, ...] = ()  # the ids of the step that paused it, one per entry
    abort_wanted: bool = False
    abort_owed: bool = False  # repeat the abort at the next token: the library may have missed it
    abort_made: bool = False  # rkllm_abort was called
    finished: bool = False
    error: bool = False
    perf: Perf = field(default_factory=Perf)
    matrix: Matrix | None = None
    failure: BaseException | None = None
    cutoff: threading.Timer | None = None  # ends a logits run that continues after its rows
    reported: bool = False
    quiet: tuple[int, float] | None = None

    @property
    def silent(self) -> bool:
        """True if the library has not called back, so that the run may not have begun."""
        return not (self.tokens or self.finished or self.error)

    def end(self, code: int) -> RunEnd:
        """Return the end of the run from its callbacks and the return code."""
        if self.error:
            return RunEnd.FAILED
        if self.mode is not None:
            # FINISH was observed to be missing in these modes: the run is over when it returns.
            cut = self.abort_wanted and self.matrix is not None
            return RunEnd.FINISHED if code == 0 or cut else RunEnd.FAILED
        if self.finished:
            # The return code of an aborted run is undocumented; its FINISH is documented.
            return RunEnd.FINISHED if code == 0 or self.abort_wanted else RunEnd.FAILED
        if self.pausing:
            return RunEnd.PAUSED
        # Without FINISH a run was refused or cut off, independent of its return code.
        return RunEnd.FINISHED if self.abort_wanted and code == 0 else RunEnd.FAILED


def perf_of(result: Any) -> Perf:
    """Return the figures of a FINISH callback; entry 0 has those of the whole batch."""
    perf = result.perf
    return Perf(
        prefill_ms=perf.prefill_time_ms,
        prefill_tokens=perf.prefill_tokens,
        decode_ms=perf.generate_time_ms,
        decode_tokens=perf.generate_tokens,
        memory_mb=perf.memory_usage_mb,
    )


log = logging.getLogger(__name__)

# Return values of the result callback. 2 (free the output buffer at once) exists since 1.3.0.
_GO_ON, _PAUSE, _FREE = 0, 1, 2

# The time in which a logits run that does not generate on has returned after its rows: much less
# than one decode, so that no abort is made where none is needed.
_RETURNS_S = 0.01

# A callback that C may still call must never be freed; one per handle keeps this small.
_CALLBACKS: list[Any] = []

# The first two carry tokens, the others end a run.
_NORMAL, _WAITING = CallState.NORMAL.value, CallState.WAITING.value
_FINISH, _ERROR = CallState.FINISH.value, CallState.ERROR.value
_END_EVENTS = {
    RunEnd.FINISHED: HandleEvent.RETURNED,
    RunEnd.PAUSED: HandleEvent.PAUSE,
    RunEnd.FAILED: HandleEvent.CALL_FAILED,
}
_FLOAT = 4


class ResultCallback:
    """The state of a handle, shared by its owner, the C callback and aborting threads."""

    def __init__(self, handle: Handle, quirks: Mapping[str, bool]) -> None:
        self._handle, self._quirks = handle, quirks
        self._ffi = handle.ffi
        self.handle_state = HandleState.UNLOADED
        self.n_batch = 1
        self.run: NativeRun | None = None
        self.settled: NativeRun | None = None  # the last run that has ended or is paused
        self.failure: BaseException | None = None  # of a callback outside a run
        self.late = 0
        # Held over an abort, and by the end of a run: no abort may hit an idle handle.
        self._abort_lock = threading.Lock()
        self._string = self._ffi.string
        self._waiting_tokens = quirks["waiting_token_id_valid"]
        self._freeing = _FREE if quirks["return_2_frees_buffer"] else _GO_ON
        self.on_result_c = self._ffi.callback(
            "LLMResultCallback", self._on_result, error=_GO_ON, onerror=self._on_escape
        )
        keep_for_good(self.on_result_c)

    @property
    def state(self) -> HandleState:
        """The state of the handle, including a pending abort."""
        run, state = self.run, self.handle_state
        if run is None:
            return state
        if run.reported:
            return HandleState.IDLE
        if run.abort_wanted:
            return TRANSITIONS.get((state, HandleEvent.ABORT), state)
        return state

    # -- calls of the owner --------------------------------------------------------------------

    def begin(self, run: NativeRun, started: HandleState) -> None:
        """Make ``run`` the current run; later aborts are for it."""
        with self._abort_lock:  # an abort sees both or neither
            self.handle_state, self.run = started, run

    def settle(self, run: NativeRun, code: int) -> RunEnd:
        """Record that the library returned from ``run``; return the end of the run."""
        end = run.end(code)
        # A resumption that never began was refused, and the library is still paused.
        refused = end is RunEnd.FAILED and run.params.resume and run.silent
        event = HandleEvent.PAUSE if refused else _END_EVENTS[end]
        with self._abort_lock:  # waits until an abort in progress has left the library
            state = self.handle_state
            if run.abort_wanted:
                state = TRANSITIONS.get((state, HandleEvent.ABORT), state)
            self.handle_state, self.run, self.settled = advance(state, event), None, run
        if run.cutoff is not None:
            run.cutoff.cancel()
        return end

    # -- calls of anyone -----------------------------------------------------------------------

    def abort(self) -> None:
        """Request the end of the run at its next token; a no-op without a run."""
        run = self.run
        if run is not None and run.inside == threading.get_ident():
            # Called by the sink: the callback makes the abort before it returns, without the lock.
            run.abort_owed = run.abort_wanted = True
            return
        with self._abort_lock:
            advance(self.state, HandleEvent.ABORT)
            run = self.run
            if run is None or run.reported:
                return
            # The library may not have begun the run and would ignore the abort.
            run.abort_owed = run.tokens == 0
            run.abort_wanted = True
            if run.pausing:  # the callback withdraws the pause, or has ended the run already
                run.abort_owed = True
            # A resumption that has not begun is a paused handle, which must not be aborted. It is
            # aborted at its first token; a prefill cannot be interrupted anyway.
            elif not (run.params.resume and run.abort_owed):
                self._call_abort(run)

    def note(self, exc: BaseException) -> None:
        """Store the exception of a callback, and request the abort of its run."""
        run = self.run
        if run is None:
            self.failure = self.failure or exc
            return
        run.failure = run.failure or exc
        run.abort_owed = run.abort_wanted = True

    def report(self, run: NativeRun) -> bool:
        """Call the ``ended`` function of an asynchronous run; False if it was called before."""
        try:
            ended = (run.ended or []).pop()
        except IndexError:
            return False
        try:
            ended(run.failure or RunOutcome(run.end(0), run.perf, 0))
        except BaseException:  # nothing may unwind through a C frame
            log.exception("the end function of an asynchronous run failed")
        run.reported = True
        return True

    # -- called from C -------------------------------------------------------------------------

    def _on_result(self, result: Any, userdata: Any, state: int) -> int:
        run = self.run
        if run is None or userdata != run.userdata:
            self.late += 1
            return _GO_ON
        if state <= _WAITING:
            if run.mode is not None:
                return self._on_rows(run, run.mode, result)
            return self._on_step(run, result, normal=state == _NORMAL)
        if state == _FINISH:
            run.finished, run.perf = True, perf_of(result)
        elif state == _ERROR:
            run.error = True
        else:
            raise CallFailed("the result callback's state", state)
        if run.ended is not None:
            self._on_async_end(run)
        return _GO_ON

    def _on_step(self, run: NativeRun, result: Any, *, normal: bool) -> int:
        run.inside = threading.get_ident()
        run.tokens += 1
        run.pausing = False
        if self.handle_state is HandleState.PREFILL:
            self.handle_state = advance(self.handle_state, HandleEvent.TOKEN)
        if run.failure is None and (normal or self._waiting_tokens):
            if self.n_batch == 1:
                text = (
                    result.text if normal else None
                )  # WAITING: partial or NULL, and repeated later
                piece = TokenPiece(result.token_id, self._string(text) if text else b"", not normal)
                verdict = run.sink((piece,))
            else:
                verdict = run.sink(self._step(result, normal=normal))
            if verdict is SinkAction.PAUSE and normal:
                self._grant_pause(run, result)
        # After the lines above: an abort either sees `pausing`, or is seen here.
        if run.abort_wanted:
            self._on_abort_wanted(run)
        run.inside = None
        return _PAUSE if run.pausing else _GO_ON

    def _step(self, results: Any, *, normal: bool) -> Step:
        pieces: list[TokenPiece | None] = []
        for entry in range(self.n_batch):
            result = results[entry]
            if result.token_id < 0:  # the entry has ended; its text is typically NULL
                pieces.append(None)
                continue
            text = result.text if normal else None
            pieces.append(
                TokenPiece(result.token_id, self._string(text) if text else b"", not normal)
            )
        return tuple(pieces)

    def _grant_pause(self, run: NativeRun, results: Any) -> None:
        if run.ended is not None:
            raise Misuse(
                "an asynchronous run cannot be paused: only rkllm_run is documented to pause"
            )
        release = self._handle.release.version
        if run.params.keep_history and not self._quirks["pause_with_history"]:
            raise Misuse(
                f"RKLLM {release} is not known to pause a run with keep_history: abort it and "
                "continue by token ids"
            )
        if self.n_batch > 1 and not self._quirks["pause_with_batch"]:
            raise Misuse(
                f"RKLLM {release} is not known to pause a batch: abort it and continue by token ids"
            )
        run.paused_on = tuple(results[entry].token_id for entry in range(self.n_batch))
        run.pausing = True

    def _on_rows(self, run: NativeRun, mode: EvaluateMode, result: Any) -> int:
        """Copy the rows. A callback without data may come first, and FINISH may be missing."""
        run.tokens += 1
        if self.handle_state is HandleState.PREFILL:
            self.handle_state = advance(self.handle_state, HandleEvent.TOKEN)
        if run.abort_wanted:
            self._on_abort_wanted(run)
        if mode is EvaluateMode.HIDDEN:
            layer = result.last_hidden_layer
            start, rows, columns = layer.hidden_states, layer.num_tokens, layer.embd_size
        else:
            layer = result.logits
            start, rows, columns = layer.logits, layer.num_tokens, layer.vocab_size
        if not start or rows < 1 or columns < 1:
            return _GO_ON
        if run.matrix is None:  # later callbacks are for tokens that were not requested
            skipped = rows - 1 if run.last else 0
            kept = rows - skipped
            data = bytes(self._ffi.buffer(start + skipped * columns, kept * columns * _FLOAT))
            run.matrix = Matrix(kept, columns, data)
            if mode is EvaluateMode.LOGITS and not self._handle.release.per_run_sampling:
                run.cutoff = threading.Timer(_RETURNS_S, self._cut_off, (run,))
                run.cutoff.daemon = True
                run.cutoff.start()
        return self._freeing

    def _on_async_end(self, run: NativeRun) -> None:
        run.inside = threading.get_ident()  # the end function must not call the library here
        self.report(run)
        run.inside = None

    def _on_abort_wanted(self, run: NativeRun) -> None:
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
        traceback: Any,  # noqa: ARG002 - cffi's signature
    ) -> None:
        """Store an exception of the callback and abort: nothing may unwind through a C frame."""
        run = self.run
        self.note(exc)
        if run is None:
            log.error("the result callback failed outside a run", exc_info=exc)
            return
        self._on_abort_wanted(run)
        run.inside = None

    def _cut_off(self, run: NativeRun) -> None:
        """Abort a logits run that generates an answer that was not requested."""
        with self._abort_lock:
            if self.run is run:
                run.abort_wanted = True
                self._call_abort(run)

    def _abort_from_aside(self, run: NativeRun) -> None:
        with self._abort_lock:
            if self.run is run:
                self._call_abort(run)

    def _call_abort(self, run: NativeRun) -> None:
        """Call ``rkllm_abort`` unless the run has ended.

        FINISH may still arrive between the check and the call; only C could close that gap.
        """
        if run.finished or run.error or run.reported:
            return  # the library has ended the run, even if its owner has not settled it
        run.abort_made = True
        code = self._handle.lib.rkllm_abort(self._handle.pointer)
        if code != 0:
            log.warning("rkllm_abort returned %d during a run", code)


def keep_for_good(callback: Any) -> None:
    """Keep a function that C may call alive until the process ends."""
    _CALLBACKS.append(callback)
