"""The runs and calls of one entry of the engine's handle, executed in order on one thread.

A handle has one entry, or several that run at the same time. Aborts and pauses come from another
thread, and take effect while the library is busy.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from rkserve.core.errors import Misuse, NativeError, StepsRefused
from rkserve.core.run_params import Embeds, EncoderStates, Picture, Pooling
from rkserve.native import engine_frames
from rkserve.native.engine import commands
from rkserve.native.engine_frames import FrameKind
from rkserve.native.runtime import (
    CrossAttention,
    Image,
    Perf,
    RunEnd,
    RunOutcome,
    Runtime,
    Sink,
    SinkAction,
    Step,
)

if TYPE_CHECKING:
    from rkserve.native.binding.image_encoder import CachedEncoder
    from rkserve.native.engine.stepwise import StepwiseRuns

Work = tuple[FrameKind, bytes]


class EntryRuns:
    """One entry: ``put`` sends its frames, and ``work`` has its queued commands.

    The reading thread calls ``abort`` and ``pause``, the entry's own thread ``carry_out``.
    """

    def __init__(self, runtime: Runtime, put: Callable[[bytes], None]) -> None:
        self.work: SimpleQueue[Work] = SimpleQueue()
        self.vision: CachedEncoder | None = None
        self.needs_encoder = False  # the model is a decoder with cross-attention
        self._runtime, self._put = runtime, put
        self._steps: StepwiseRuns | None = None
        self._pictures: list[tuple[int, Picture, int]] = []  # of the next run
        self._embeds: list[tuple[int, Embeds]] = []
        self._encoder: list[tuple[int, EncoderStates]] = []
        # Guards the three fields below: an abort that overtakes its run must keep it from starting,
        # and a late one must not abort the next run. The library's callback never takes it.
        self._lock = threading.Lock()
        self._current: int | None = None  # the run inside the runtime
        self._aborted: frozenset[int] = frozenset()
        self._pause_wanted: int | None = None  # the current run or None; read by the sink

    def carry_out(self, kind: FrameKind, payload: bytes) -> None:
        """Execute a queued command."""
        if kind is FrameKind.IMAGE:
            self._pictures.append(engine_frames.unpack_picture(payload))
        elif kind is FrameKind.EMBEDS:
            self._embeds.append(engine_frames.unpack_embeds(payload))
        elif kind is FrameKind.ENCODER:
            self._encoder.append(engine_frames.unpack_encoder(payload))
        elif kind is FrameKind.RUN:
            self._run(*engine_frames.unpack_run(payload))
            self._pictures.clear()
            self._embeds.clear()
            self._encoder.clear()
        elif kind is FrameKind.CALL:
            self._call(engine_frames.unpack(payload))

    def abort(self, run_id: int) -> None:
        """Abort a run, also one that has not begun."""
        with self._lock:  # held during the call, so that run_id stays the current run
            self._aborted |= {run_id}
            if self._current != run_id:
                return
            self._pause_wanted = None
            try:
                self._runtime.abort()
            except NativeError as exc:  # the run has ended, or the board's watchdog will end it
                sys.stderr.write(f"W rkserve: the abort was refused: {exc}\n")

    def pause(self, run_id: int) -> None:
        """Pause the current run at its next possible token."""
        with self._lock:
            if self._current == run_id and run_id not in self._aborted:
                self._pause_wanted = run_id

    def _run(
        self, run_id: int, params: dict[str, Any], entries: tuple[tuple[int, ...], ...]
    ) -> None:
        try:
            ended = self._generate(run_id, params, entries)
        except StepsRefused as exc:
            ended = {"end": "failed", "error": str(exc), "refused": True}
        except NativeError as exc:
            ended = {"end": "failed", "error": str(exc)}
        self._put(engine_frames.pack(FrameKind.ENDED, {"run_id": run_id, **ended}))

    def _generate(
        self, run_id: int, params: dict[str, Any], entries: tuple[tuple[int, ...], ...]
    ) -> dict[str, Any]:
        runtime = self._runtime
        try:
            if run_id in self._aborted:
                return {"end": "unstarted"}
            cache_refused = commands.prepare(runtime, params)
            self._hand_over_encoder(runtime, run_id)
            if params["steps"] is not None:
                # A stepwise run never becomes the current run: it stops between two steps, where
                # the library has no run to abort.
                ended = self._own_steps().run(
                    runtime, run_id, params, entries[0], lambda: run_id in self._aborted
                )
                return {**ended, "cache_refused": cache_refused}
            seen = self.vision.encoded if self.vision is not None else 0
            began_s = time.monotonic()
            image = self._image(run_id)
            encode_ms = (time.monotonic() - began_s) * 1e3 if image is not None else 0.0
            embeds = next((one for of, one in self._embeds if of == run_id), None)
            run = commands.run_params(params, entries, image, embeds)
            if not self._begins(run_id):  # aborted while the handle was prepared
                return {"end": "unstarted", "cache_refused": cache_refused}
            if params["pooling"] is not None:
                tokens, vector = commands.embed(runtime, run, Pooling(params["pooling"]))
                self._put(engine_frames.pack_vector(run_id, tokens, vector))
                outcome = RunOutcome(RunEnd.FINISHED, Perf(), 0)  # an evaluation reports no figures
            else:
                outcome = runtime.run(run, self._sink(run_id))
        finally:
            self._is_over(run_id)
        return {
            "end": outcome.end.value,
            "return_code": outcome.return_code,
            "perf": asdict(replace(outcome.perf, encode_ms=encode_ms)),
            "kv_positions": commands.positions(runtime),
            "cache_refused": cache_refused,
            "encoded": self.vision.encoded - seen if self.vision is not None else 0,
        }

    def _hand_over_encoder(self, runtime: Runtime, run_id: int) -> None:
        """Set the encoder output of this run.

        The library keeps an output until the next one and cannot clear it. A run without output is
        therefore refused: its answer would depend on another client's data.
        """
        states = next((one for of, one in self._encoder if of == run_id), None)
        if states is not None:
            runtime.set_cross_attention(
                CrossAttention(
                    states.k_cache, states.v_cache, states.mask, states.positions, states.tokens
                )
            )
        elif self.needs_encoder:
            raise Misuse("a run of an encoder-decoder model has no encoder output")

    def _image(self, run_id: int) -> Image | None:
        """Return the encoded images of a run; None without images and for an aborted run."""
        pictures = [(picture, owner) for of, picture, owner in self._pictures if of == run_id]
        if not pictures:
            return None
        if self.vision is None:
            raise Misuse("a run has images, but the model has no image encoder")
        return self.vision.encode(pictures, lambda: run_id in self._aborted)

    def _own_steps(self) -> StepwiseRuns:
        if self._steps is None:
            # Imported late: the modules of stepwise runs would take 20 MB of every engine.
            from rkserve.native.engine.stepwise import StepwiseRuns

            self._steps = StepwiseRuns(self._put)
        return self._steps

    def _begins(self, run_id: int) -> bool:
        with self._lock:
            if run_id in self._aborted:
                return False
            self._current = run_id
            return True

    def _is_over(self, run_id: int) -> None:
        with self._lock:
            self._current = self._pause_wanted = None
            # Run ids only grow: earlier ones are never used again.
            self._aborted = frozenset(late for late in self._aborted if late > run_id)

    def _sink(self, run_id: int) -> Sink:
        """Return the sink of a run, which is short because it is called for every token."""
        put, pack_token = self._put, engine_frames.pack_token
        go_on, pause = SinkAction.CONTINUE, SinkAction.PAUSE
        first = True

        def sink(step: Step) -> SinkAction:
            nonlocal first
            if first:
                first = False
                self._abort_again(run_id)
            if len(step) == 1:
                (piece,) = step
                if piece is not None:
                    put(pack_token(run_id, 0, piece.token_id, piece.text, piece.waiting))
            else:
                put(_pack_step(run_id, step))
            return pause if self._pause_wanted == run_id else go_on

        return sink

    def _abort_again(self, run_id: int) -> None:
        """Repeat an abort that may have come before the library had begun the run."""
        if run_id in self._aborted:
            # On another thread: an abort inside the callback is unproven on hardware.
            threading.Thread(target=self.abort, args=(run_id,), daemon=True).start()

    def _call(self, command: dict[str, Any]) -> None:
        result: dict[str, Any] = {"call_id": command["call_id"]}
        try:
            result["value"] = commands.call(self._runtime, command["method"], command["args"])
        except NativeError as exc:
            result["error"] = {"kind": type(exc).__name__, "args": exc.args}
        self._put(engine_frames.pack(FrameKind.RESULT, result))


def _pack_step(run_id: int, step: Step) -> bytes:
    return b"".join(
        engine_frames.pack_token(run_id, entry, piece.token_id, piece.text, piece.waiting)
        for entry, piece in enumerate(step)
        if piece is not None
    )
