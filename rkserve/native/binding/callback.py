"""What C calls, and what races it: the result callback, the handle's state, aborts.

The callback copies, asks the run's sink, stores what that raises, and returns; it acts on NORMAL
alone. It takes no lock, so an abort always gets through. It knows the handle and makes one call
of its own, ``rkllm_abort``; the calls of the owner are in ``binding`` and ``runs``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rkserve.core.errors import CallFailed, Misuse
from rkserve.native.binding.handle import Handle
from rkserve.native.handle_states import TRANSITIONS, HandleEvent, HandleState, advance
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

    Written by the thread in the callback, except for ``abort_wanted`` and ``abort_owed``. What only
    an asynchronous run has: ``ended``, a list that whoever tells the end empties first, so that it
    is told once; ``told``; and ``quiet``, the tokens and the time of a look that found it silent.
    """

    userdata: Any  # a number: a stale pointer could not be told apart
    params: RunParams
    sink: Sink
    mode: EvaluateMode | None = None  # what is evaluated; None generates
    last: bool = False  # of what is evaluated only the last row is wanted
    ended: list[Ended] | None = None
    keep: list[Any] = field(default_factory=list)  # what C points to
    tokens: int = 0
    inside: int | None = None  # the thread that is in the sink
    pausing: bool = False  # the callback returns 1, or has just done so
    paused_on: tuple[int, ...] = ()  # the ids of the step that paused it, one per entry
    abort_wanted: bool = False
    abort_owed: bool = False  # the library may not have noticed: tell it at the next token
    abort_made: bool = False  # the library was told
    finished: bool = False
    error: bool = False
    perf: Perf = field(default_factory=Perf)
    matrix: Matrix | None = None
    failure: BaseException | None = None
    told: bool = False
    quiet: tuple[int, float] | None = None

    @property
    def silent(self) -> bool:
        """Whether the library never called back, so that it may not have begun."""
        return not (self.tokens or self.finished or self.error)

    def end(self, code: int) -> RunEnd:
        """Say how the run ended, from what the library showed."""
        if self.error:
            return RunEnd.FAILED
        if self.mode is not None:
            # FINISH was seen not to come in these modes: such a run is over when it returns.
            return RunEnd.FINISHED if code == 0 else RunEnd.FAILED
        if self.finished:
            # What an aborted run returns is nowhere documented; its FINISH is.
            return RunEnd.FINISHED if code == 0 or self.abort_wanted else RunEnd.FAILED
        if self.pausing:
            return RunEnd.PAUSED
        # Without FINISH a run was refused or cut off, whatever it returned.
        return RunEnd.FINISHED if self.abort_wanted and code == 0 else RunEnd.FAILED


def perf_of(result: Any) -> Perf:
    """Return the figures of a FINISH callback, which speaks of a whole batch in entry 0."""
    perf = result.perf
    return Perf(
        prefill_ms=perf.prefill_time_ms,
        prefill_tokens=perf.prefill_tokens,
        decode_ms=perf.generate_time_ms,
        decode_tokens=perf.generate_tokens,
        memory_mb=perf.memory_usage_mb,
    )


log = logging.getLogger(__name__)

# What the result callback may say. 2 exists on 1.3.0 only: free the output buffer at once.
_GO_ON, _PAUSE, _FREE = 0, 1, 2

# A callback that C may still know must never be freed; one per handle, so this stays small.
_CALLBACKS: list[Any] = []

# The first two bring tokens, the others end a run.
_NORMAL, _WAITING = CallState.NORMAL.value, CallState.WAITING.value
_FINISH, _ERROR = CallState.FINISH.value, CallState.ERROR.value
_END_EVENTS = {
    RunEnd.FINISHED: HandleEvent.RETURNED,
    RunEnd.PAUSED: HandleEvent.PAUSE,
    RunEnd.FAILED: HandleEvent.CALL_FAILED,
}
_FLOAT = 4


class ResultCallback:
    """The side of one handle that C and aborting threads see."""

    def __init__(self, handle: Handle, quirks: Mapping[str, bool]) -> None:
        self._handle, self._quirks = handle, quirks
        self._ffi = handle.ffi
        self.handle_state = HandleState.UNLOADED
        self.n_batch = 1
        self.run: NativeRun | None = None
        self.failure: BaseException | None = None  # of a callback outside of a run
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
        """Where the handle is."""
        run, state = self.run, self.handle_state
        if run is None:
            return state
        if run.told:
            return HandleState.IDLE
        if run.abort_wanted:
            return TRANSITIONS.get((state, HandleEvent.ABORT), state)
        return state

    # -- calls of the owner -------------------------------------------------------------------

    def begin(self, run: NativeRun, started: HandleState) -> None:
        """Let the library have ``run``: an abort from now on is for it."""
        with self._abort_lock:  # an abort sees both or neither
            self.handle_state, self.run = started, run

    def settle(self, run: NativeRun, code: int) -> RunEnd:
        """The library has returned: note where that leaves the handle."""
        end = run.end(code)
        # A resumption that it never began was refused, and the library is still paused.
        refused = end is RunEnd.FAILED and run.params.resume and run.silent
        event = HandleEvent.PAUSE if refused else _END_EVENTS[end]
        with self._abort_lock:  # an abort on its way in has left the library after this
            state = self.handle_state
            if run.abort_wanted:
                state = TRANSITIONS.get((state, HandleEvent.ABORT), state)
            self.handle_state, self.run = advance(state, event), None
        return end

    # -- calls of anyone ----------------------------------------------------------------------

    def abort(self) -> None:
        """Ask a run to end at the next token; does nothing where none is running."""
        run = self.run
        if run is not None and run.inside == threading.get_ident():
            # From the sink: the callback sees to it, without the lock, on its way out.
            run.abort_owed = run.abort_wanted = True
            return
        with self._abort_lock:
            advance(self.state, HandleEvent.ABORT)
            run = self.run
            if run is None or run.told:
                return
            # The library may not even have begun, and would take it for an abort of nothing.
            run.abort_owed = run.tokens == 0
            run.abort_wanted = True
            if run.pausing:  # the callback decides: it withdraws the pause, or has ended the run
                run.abort_owed = True
            # A resumption that has not begun is a paused handle, which must not hear of aborts. It
            # loses nothing: no abort cuts its prefill.
            elif not (run.params.resume and run.abort_owed):
                self._call_abort(run)

    def note(self, exc: BaseException) -> None:
        """Keep what a callback raised, and have the run that it belongs to aborted."""
        run = self.run
        if run is None:
            self.failure = self.failure or exc
            return
        run.failure = run.failure or exc
        run.abort_owed = run.abort_wanted = True

    def tell(self, run: NativeRun) -> bool:
        """Tell the end of an asynchronous run, if nobody else did or does."""
        try:
            ended = (run.ended or []).pop()
        except IndexError:
            return False
        try:
            ended(run.failure or RunOutcome(run.end(0), run.perf, 0))
        except BaseException:  # nothing may unwind through a C frame
            log.exception("what was to hear of an asynchronous run's end failed")
        run.told = True
        return True

    # -- called from C ------------------------------------------------------------------------

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
                text = result.text if normal else None  # WAITING: partial or NULL, and comes again
                piece = TokenPiece(result.token_id, self._string(text) if text else b"", not normal)
                verdict = run.sink((piece,))
            else:
                verdict = run.sink(self._step(result, normal=normal))
            if verdict is SinkAction.PAUSE and normal:
                self._grant_pause(run, result)
        # After the lines above, so that an abort either sees `pausing` or is seen here.
        if run.abort_wanted:
            self._on_abort_wanted(run)
        run.inside = None
        return _PAUSE if run.pausing else _GO_ON

    def _step(self, results: Any, *, normal: bool) -> Step:
        pieces: list[TokenPiece | None] = []
        for entry in range(self.n_batch):
            result = results[entry]
            if result.token_id < 0:  # it has ended, and its text is typically NULL
                pieces.append(None)
                continue
            text = result.text if normal else None
            pieces.append(
                TokenPiece(result.token_id, self._string(text) if text else b"", not normal)
            )
        return tuple(pieces)

    def _grant_pause(self, run: NativeRun, results: Any) -> None:
        if run.ended is not None:
            raise Misuse("an asynchronous run cannot be paused: the vendor knows of rkllm_run only")
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
        """Copy what is evaluated. A callback without data may come before; FINISH may never."""
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
        if run.matrix is None:  # what might follow is of the token that nobody asked for
            skipped = rows - 1 if run.last else 0
            kept = rows - skipped
            data = bytes(self._ffi.buffer(start + skipped * columns, kept * columns * _FLOAT))
            run.matrix = Matrix(kept, columns, data)
        return self._freeing

    def _on_async_end(self, run: NativeRun) -> None:
        run.inside = threading.get_ident()  # whoever hears of it must not call the library here
        self.tell(run)
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
        traceback: Any,  # noqa: ARG002
    ) -> None:
        """An exception left the callback: nothing may unwind through C, so keep it and abort."""
        run = self.run
        self.note(exc)
        if run is None:
            log.error("the result callback failed outside a run", exc_info=exc)
            return
        self._on_abort_wanted(run)
        run.inside = None

    def _abort_from_aside(self, run: NativeRun) -> None:
        with self._abort_lock:
            if self.run is run:
                self._call_abort(run)

    def _call_abort(self, run: NativeRun) -> None:
        """Make the call. FINISH may still come right after the look: only C could close that."""
        if run.finished or run.error or run.told:
            return  # it is over in the library, if not yet here
        run.abort_made = True
        code = self._handle.lib.rkllm_abort(self._handle.pointer)
        if code != 0:
            log.warning("rkllm_abort returned %d while a run was going on", code)


def keep_for_good(callback: Any) -> None:
    """Never let go of a function that C may call."""
    _CALLBACKS.append(callback)
