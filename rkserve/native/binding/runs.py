"""The runs of one handle: checked, made, settled and drained.

This module tracks the state that runs depend on and leave behind: adapters, the live context, a
prompt cache, a paused run, and the objects to keep alive. It holds no lock: ``runtime`` admits one
owner at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

from rkserve.core.errors import CallFailed, Misuse, NothingComputed
from rkserve.native.binding import preconditions
from rkserve.native.binding.callback import Ended, NativeRun, ResultCallback
from rkserve.native.binding.library import Handle
from rkserve.native.binding.preconditions import HandleState, KvContext, PromptCache
from rkserve.native.runtime import (
    EvaluateMode,
    Matrix,
    RunEnd,
    RunInput,
    RunOutcome,
    RunParams,
    Sink,
    SinkAction,
    Step,
    TokenInput,
)

_T = TypeVar("_T")

_CUTTABLE = 2  # positions; removing all of them is as risky as a full clear of a paused handle

# The time from the last callback of an asynchronous run to its end, and the time for which the
# library has to report no running run before a run without a callback is abandoned.
_LANDING_S = 5.0
_QUIET_S = 0.1
_LOOK_S = 0.001


class HandleRuns:
    """The runs of one handle, one at a time."""

    def __init__(
        self, handle: Handle, callback: ResultCallback, quirks: Mapping[str, bool]
    ) -> None:
        self._handle, self._callback, self._quirks = handle, callback, quirks
        self._release = handle.release
        self._cookies = count(1)  # never 0: 1.3.0 would replace a NULL userdata
        self.paused: NativeRun | None = None
        self.context = KvContext()
        self.cache = PromptCache()
        self.adapters: set[str] = set()
        self.template_emptied = False

    # -- kinds of runs -------------------------------------------------------------------------

    def generate(self, params: RunParams, sink: Sink, started: HandleState) -> RunOutcome:
        """Make a run and wait for its end; an exception of its sink is raised again."""
        run = self._prepared(params, sink)
        code, end = self._make(run, started)
        if self._refused(end):
            self.drain(started)  # nothing else would end the pause
        if run.failure is not None:
            raise run.failure
        return RunOutcome(end, run.perf, code)

    def drain(self, started: HandleState) -> None:
        """Resume the paused run for one token that is not delivered, and end it.

        If the library refuses, as with a full KV cache, the last position is removed first.

        Raises:
            CallFailed: the run failed, or is still paused after a second refusal.
        """
        code, end = self._drained(started)
        if self._refused(end) and self._made_room():
            code, end = self._drained(started)
        if end is not RunEnd.FINISHED:
            raise CallFailed("rkllm_run (to end a paused run)", code)

    def cut(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Clear a range of each entry of a paused run. Raises ``Misuse``, ``CallFailed``."""
        paused, ffi = self.paused, self._handle.ffi
        assert paused is not None  # by the state table
        if not self._may_cut(paused):
            raise Misuse("ranges can be cleared only while a run without keep_history is paused")
        preconditions.check_ranges(ranges, self._handle.kv_sizes(self._callback.n_batch))
        if all(start == end for start, end in ranges):
            return
        starts, ends = (ffi.new("int[]", [span[side] for span in ranges]) for side in (0, 1))
        self._handle.call("rkllm_clear_kv_cache", 0, starts, ends)

    def _may_cut(self, paused: NativeRun) -> bool:
        return not paused.params.keep_history or self._quirks["clear_range_with_history"]

    def _made_room(self) -> bool:
        """Remove the last position of each entry of the paused run; False if that is impossible."""
        sizes = self._handle.kv_sizes(self._callback.n_batch)
        if self.paused is None or not self._may_cut(self.paused) or max(sizes) < _CUTTABLE:
            return False
        self.cut([(size - 1, size) if size >= _CUTTABLE else (size, size) for size in sizes])
        return True

    def _drained(self, started: HandleState) -> tuple[int, RunEnd]:
        """Make the run that ends the paused one; return its code and end."""
        paused = self.paused
        assert paused is not None  # by the state table
        limited = self._quirks["drain_by_limit"] and self._release.per_run_sampling
        # An ended entry of a batch is resumed with the token of another one: its text is dropped.
        spare = max(paused.paused_on)
        ids = [token if token >= 0 else spare for token in paused.paused_on]
        params = RunParams(
            tuple(TokenInput((token,)) for token in ids),
            keep_history=paused.params.keep_history,
            max_new_tokens=1 if limited else None,
            resume=True,
            adapter=paused.params.adapter,
        )

        def hush(_: Step) -> SinkAction:
            # Also if the limit had no effect. Only once: a second abort might hit an idle handle.
            if run.tokens > int(limited) and not run.abort_wanted:
                self._callback.abort()
            return SinkAction.CONTINUE

        run = self._prepared(params, hush)
        code, end = self._make(run, started, drained=True)
        if run.failure is not None:
            raise run.failure
        return code, end

    def evaluate(
        self,
        given: RunInput,
        mode: EvaluateMode,
        started: HandleState,
        *,
        history: bool,
        adapter: str | None,
        last: bool = False,
    ) -> Matrix:
        """Compute rows; see ``Runtime.evaluate``."""
        n_batch = self._callback.n_batch
        preconditions.check_evaluate(
            given, mode, n_batch, keep_history=history, quirks=self._quirks
        )
        # Without a limit GET_LOGITS was seen to generate a whole answer after the rows. Releases
        # that have no limit per run are aborted by the callback instead.
        limited = mode is EvaluateMode.LOGITS and self._release.per_run_sampling
        params = RunParams(
            (given,),
            keep_history=history,
            adapter=adapter,
            max_new_tokens=1 if limited else None,
        )
        run = self._prepared(params, _no_sink, mode)
        run.last = last
        code, end = self._make(run, started)
        if run.failure is not None:
            raise run.failure
        if end is not RunEnd.FINISHED:
            raise CallFailed("rkllm_run", code)
        if run.matrix is None:
            why = "it was aborted" if run.abort_wanted else "it gave no reason"
            raise NothingComputed(mode.value, why)
        return run.matrix

    # -- asynchronous runs ---------------------------------------------------------------------

    def start(self, params: RunParams, sink: Sink, ended: Ended, started: HandleState) -> None:
        """Start an asynchronous run; see ``Runtime.run_async``."""
        if not self._quirks["run_async"]:
            raise Misuse(f"asynchronous runs of RKLLM {self._release.version} are broken")
        run = self._prepared(params, sink)
        run.ended = [ended]
        inputs, infer = self._structs(run)
        self._callback.begin(run, started)  # callbacks may come before the call returns
        lib, pointer = self._handle.lib, self._handle.pointer
        code = lib.rkllm_run_async(pointer, inputs, infer, run.userdata)
        if code != 0 and not run.reported:
            self._settle(run, code)
            raise CallFailed("rkllm_run_async", code)

    def look_after(self) -> bool:
        """Settle an ended asynchronous run, or abandon a silent one; True while it continues."""
        run = self._callback.run
        if run is None or run.ended is None:
            return False
        if self._handle.is_running() or (not run.reported and (run.finished or run.error)):
            run.quiet = None
            return not run.reported
        if not run.reported and not self._quiet_for_good(run):
            return True
        if self._callback.report(run):
            # It may only be late: its inputs must outlive any later access.
            self._handle.keep.append(run.keep)
        self._settle(run, 0)
        return False

    def await_landing(self) -> None:
        """Wait until an ended asynchronous run has left the library."""
        run = self._callback.run
        if run is None or not run.reported:
            return
        give_up = time.monotonic() + _LANDING_S
        while self.look_after() or self._callback.run is not None:
            if time.monotonic() > give_up:
                raise Misuse("an ended asynchronous run did not leave the library in time")
            time.sleep(_LOOK_S)

    @staticmethod
    def _quiet_for_good(run: NativeRun) -> bool:
        now = time.monotonic()
        if run.quiet is None or run.quiet[0] != run.tokens:
            run.quiet = (run.tokens, now)
        return now - run.quiet[1] >= _QUIET_S

    # -- a run from start to end ---------------------------------------------------------------

    def _prepared(
        self, params: RunParams, sink: Sink, mode: EvaluateMode | None = None
    ) -> NativeRun:
        """Check a run and return its record."""
        n_batch, paused = self._callback.n_batch, self.paused
        preconditions.check_run(params, n_batch, self._release)
        preconditions.check_save(params, n_batch, self._quirks)
        if not self.template_emptied:
            preconditions.check_prompts(params)
        if params.adapter is not None and params.adapter not in self.adapters:
            raise Misuse(f"adapter {params.adapter!r} is not loaded")
        if paused is not None:
            by_prompt = self._quirks["resume_with_prompt"]
            preconditions.check_resume(params, paused.params, by_prompt=by_prompt)
            # The library may still read the inputs of the paused run, and may call back with the
            # userdata of either: both share one cookie, and all inputs are kept.
            return NativeRun(paused.userdata, params, sink, keep=[paused.keep])
        self.context.check(params)
        if mode is not None or not self.cache.fits(params.adapter):
            self.release_cache()  # rows of reused positions would be missing or wrong
        return NativeRun(self._handle.ffi.cast("void *", next(self._cookies)), params, sink, mode)

    def _structs(self, run: NativeRun) -> tuple[Any, Any]:
        release, lib, params, keep = self._release, self._handle.lib, run.params, run.keep
        inputs = fitting(lambda: release.inputs(lib, params.inputs, keep))
        return inputs, fitting(lambda: release.infer_params(lib, params, run.mode, keep))

    def _make(
        self, run: NativeRun, started: HandleState, *, drained: bool = False
    ) -> tuple[int, RunEnd]:
        inputs, infer = self._structs(run)
        self._callback.begin(run, started)
        code, end = -1, RunEnd.FAILED
        try:
            code = self._handle.lib.rkllm_run(self._handle.pointer, inputs, infer, run.userdata)
        finally:  # a signal's exception may be raised on the way back from C
            end = self._settle(run, code, drained=drained)
        return code, end

    def _settle(self, run: NativeRun, code: int, *, drained: bool = False) -> RunEnd:
        end = self._callback.settle(run, code)
        if self.paused is not None and self._refused(end):
            self.paused.keep.append(run.keep)  # the library has seen it
            return end
        self.paused = run if end is RunEnd.PAUSED else None
        aborted = drained or run.abort_wanted
        trusted = self._quirks["kv_valid_after_abort"] and not drained
        self.context.after(run.params, end, aborted=aborted, trusted=trusted)
        self.cache.after_abort |= run.abort_made
        return end

    def _refused(self, end: RunEnd) -> bool:
        """Return True if the ended run was a resumption that the library did not begin."""
        return end is RunEnd.FAILED and self._callback.state is HandleState.PAUSED

    def release_cache(self) -> None:
        """Release the loaded prompt cache file, if there is one."""
        if self.cache.loaded:
            self._handle.call("rkllm_release_prompt_cache")
            self.cache.took(loaded=False)


def fitting(make: Callable[[], _T]) -> _T:
    """Return the result of ``make``; a value that C cannot represent raises ``Misuse``."""
    try:
        return make()
    except (OverflowError, TypeError) as exc:
        raise Misuse(f"a value does not fit its C type: {exc}") from exc


def _no_sink(_: Step) -> SinkAction:
    raise AssertionError("an evaluation has no sink")
