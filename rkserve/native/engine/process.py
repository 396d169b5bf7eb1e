"""The engine process: owns one RKLLM handle and exchanges frames over its stdin and stdout.

A crash of the vendor's library ends this process and nothing else. It knows no Ray, no HTTP and no
request queue. It ends when its stdin closes, so that no orphan keeps NPU memory. The board starts
it as ``python -m rkserve.native.engine.process``.

It has three threads: the main thread reads commands, so that an abort is read while the library is
busy; the *runner* makes the blocking calls of the library; the *writer* writes the frames.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from rkserve.core.errors import LoadFailed, Misuse, NativeError, RkserveError, StepsRefused
from rkserve.core.files import open_private, private_folder
from rkserve.core.run_params import Confine, Embeds, EncoderStates, Picture, Pooling
from rkserve.native import engine_frames
from rkserve.native.engine import commands
from rkserve.native.engine.confinement import Confinement, confine, harden, is_whole
from rkserve.native.engine_frames import FrameKind, FrameWriter, NpuLock
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

READ_SIZE = 1 << 16
CONFINED_AT = 2  # in the command line

OpenRuntime = Callable[[Mapping[str, Any]], Runtime]  # of a load command


class Sender(Protocol):
    """The destination of frames; see ``FrameWriter``."""

    def put(self, frame: bytes) -> None:
        """Queue a frame, or several as one string of bytes."""

    def close(self) -> None:
        """Write all queued frames, then end."""


class EngineServer:
    """The commands of a board, executed on one runtime.

    The reading thread calls ``command``, the runner ``carry_out``.
    """

    def __init__(self, frames: Sender, open_runtime: OpenRuntime, confined: str = "off") -> None:
        """``confined`` are the means by which the process is confined."""
        self._frames = frames
        self._confined = confined
        self._open_runtime = open_runtime
        self._work: SimpleQueue[tuple[FrameKind, bytes]] = SimpleQueue()
        self._runtime: Runtime | None = None
        self._steps: StepwiseRuns | None = None
        self._vision: CachedEncoder | None = None
        self._pictures: list[tuple[int, Picture, int]] = []  # of the next run
        self._embeds: list[tuple[int, Embeds]] = []
        self._encoder: list[tuple[int, EncoderStates]] = []
        self._needs_encoder = False  # the model is a decoder with cross-attention
        self._npu_lock: NpuLock | None = None  # held until the process ends
        # Guards the three fields below: an abort that overtakes its run must keep it from starting,
        # and a late one must not abort the next run. The library's callback never takes it.
        self._lock = threading.Lock()
        self._current: int | None = None  # the run inside the runtime
        self._aborted: frozenset[int] = frozenset()
        self._pause_wanted: int | None = None  # the current run or None; read by the sink

    def serve(self, command_fd: int) -> None:
        """Read and execute commands until the board closes the pipe."""
        threading.Thread(target=self._runner, name="runner", daemon=True).start()
        reader = engine_frames.FrameReader()
        while chunk := os.read(command_fd, READ_SIZE):
            for kind, payload in reader.feed(chunk):
                self.command(kind, payload)

    def beat(self, interval_s: float) -> None:
        """Send a heartbeat every ``interval_s``; never returns."""
        while True:
            self._frames.put(engine_frames.pack(FrameKind.BEAT, {}))
            time.sleep(interval_s)

    def command(self, kind: FrameKind, payload: bytes) -> None:
        """Execute an abort or pause at once; queue other commands for the runner."""
        if kind is FrameKind.ABORT:
            self._abort(engine_frames.unpack(payload)["run_id"])
        elif kind is FrameKind.PAUSE:
            self._pause(engine_frames.unpack(payload)["run_id"])
        else:
            self._work.put((kind, payload))

    def carry_out(self, kind: FrameKind, payload: bytes) -> None:
        """Execute a queued command."""
        if kind is FrameKind.LOAD:
            self._load(engine_frames.unpack(payload))
        elif kind is FrameKind.IMAGE:
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
        elif kind is FrameKind.STOP:
            self._stop()

    def _abort(self, run_id: int) -> None:
        with self._lock:  # held during the call, so that run_id stays the current run
            self._aborted |= {run_id}
            if self._current != run_id or self._runtime is None:
                return
            self._pause_wanted = None
            try:
                self._runtime.abort()
            except NativeError as exc:  # the run has ended, or the board's watchdog will end it
                sys.stderr.write(f"W rkserve: the abort was refused: {exc}\n")

    def _pause(self, run_id: int) -> None:
        with self._lock:
            if self._current == run_id and run_id not in self._aborted:
                self._pause_wanted = run_id

    def _runner(self) -> None:
        try:
            while True:
                self.carry_out(*self._work.get())
        except BaseException as exc:  # noqa: BLE001 - without this thread no command is executed
            _crash(exc)

    def _load(self, command: dict[str, Any]) -> None:
        try:
            started = time.monotonic()
            if command["pin_cpus"]:
                os.sched_setaffinity(0, command["pin_cpus"])
            self._npu_lock = NpuLock(Path(command["fence"]))
            self._npu_lock.take(command["fence_timeout_s"])
            self._runtime = self._open(command)
        except (RkserveError, OSError) as exc:
            kind = type(exc).__name__ if isinstance(exc, NativeError) else "LoadFailed"
            self._frames.put(
                engine_frames.pack(FrameKind.LOAD_FAILED, {"kind": kind, "message": str(exc)})
            )
            return
        facts = {
            "release": self._runtime.release,
            "per_run_sampling": self._runtime.per_run_sampling,
            "quirks": dict(self._runtime.quirks),
            "load_s": time.monotonic() - started,
            "n_batch": command["params"]["n_batch"],
            "confined": self._confined,
        }
        self._frames.put(engine_frames.pack(FrameKind.LOADED, facts))

    def _open(self, command: dict[str, Any]) -> Runtime:
        runtime = self._open_runtime(command)
        given, load = command["vision"], commands.load_params(command["params"])
        vision = None if given is None else commands.vision_params(given)
        if vision is not None and runtime.image_tags_at_load:
            load = replace(load, image_tags=vision.tags)
        runtime.load(load)
        self._needs_encoder = load.use_cross_attn
        if vision is not None:
            from rkserve.native.binding.image_encoder import open_vision  # late, as the library

            self._vision = open_vision(vision, tags_at_load=runtime.image_tags_at_load)
        if command["text_mode"] or vision is not None:
            # The prompt is rendered already: the model's template must not wrap it again.
            runtime.set_chat_template("", "", "")
        return runtime

    def _loaded(self) -> Runtime:
        if self._runtime is None:
            raise LoadFailed("no model is loaded")
        return self._runtime

    def _run(
        self, run_id: int, params: dict[str, Any], entries: tuple[tuple[int, ...], ...]
    ) -> None:
        try:
            ended = self._generate(run_id, params, entries)
        except StepsRefused as exc:
            ended = {"end": "failed", "error": str(exc), "refused": True}
        except NativeError as exc:
            ended = {"end": "failed", "error": str(exc)}
        self._frames.put(engine_frames.pack(FrameKind.ENDED, {"run_id": run_id, **ended}))

    def _generate(
        self, run_id: int, params: dict[str, Any], entries: tuple[tuple[int, ...], ...]
    ) -> dict[str, Any]:
        runtime = self._loaded()
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
            seen = self._vision.encoded if self._vision is not None else 0
            began_s = time.monotonic()
            image = self._image(run_id)
            encode_ms = (time.monotonic() - began_s) * 1e3 if image is not None else 0.0
            embeds = next((one for of, one in self._embeds if of == run_id), None)
            run = commands.run_params(params, entries, image, embeds)
            if not self._begins(run_id):  # aborted while the handle was prepared
                return {"end": "unstarted", "cache_refused": cache_refused}
            if params["pooling"] is not None:
                tokens, vector = commands.embed(runtime, run, Pooling(params["pooling"]))
                self._frames.put(engine_frames.pack_vector(run_id, tokens, vector))
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
            "encoded": self._vision.encoded - seen if self._vision is not None else 0,
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
        elif self._needs_encoder:
            raise Misuse("a run of an encoder-decoder model has no encoder output")

    def _image(self, run_id: int) -> Image | None:
        """Return the encoded images of a run; None without images and for an aborted run."""
        pictures = [(picture, owner) for of, picture, owner in self._pictures if of == run_id]
        if not pictures:
            return None
        if self._vision is None:
            raise Misuse("a run has images, but the model has no image encoder")
        return self._vision.encode(pictures, lambda: run_id in self._aborted)

    def _own_steps(self) -> StepwiseRuns:
        if self._steps is None:
            # Imported late: the modules of stepwise runs would take 20 MB of every engine.
            from rkserve.native.engine.stepwise import StepwiseRuns

            self._steps = StepwiseRuns(self._frames.put)
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
        put, pack_token = self._frames.put, engine_frames.pack_token
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
            threading.Thread(target=self._abort, args=(run_id,), daemon=True).start()

    def _call(self, command: dict[str, Any]) -> None:
        result: dict[str, Any] = {"call_id": command["call_id"]}
        try:
            result["value"] = commands.call(self._loaded(), command["method"], command["args"])
        except NativeError as exc:
            result["error"] = {"kind": type(exc).__name__, "args": exc.args}
        self._frames.put(engine_frames.pack(FrameKind.RESULT, result))

    def _stop(self) -> None:
        if self._runtime is not None:
            try:
                self._runtime.destroy()
            except NativeError as exc:
                sys.stderr.write(f"rkserve: the handle was not freed: {exc}\n")
        self._frames.close()
        os._exit(0)  # the main thread is blocked in read()


def _pack_step(run_id: int, step: Step) -> bytes:
    return b"".join(
        engine_frames.pack_token(run_id, entry, piece.token_id, piece.text, piece.waiting)
        for entry, piece in enumerate(step)
        if piece is not None
    )


def _open_library(command: Mapping[str, Any]) -> Runtime:
    if command["cpu"]:
        from rkserve.native.llama_cpp import open_llama_cpp  # late: with numpy and its own library

        return open_llama_cpp(Path(command["library"]), command["quirks"])
    from rkserve.native.binding.library import detect  # late: dlopen only after the lock
    from rkserve.native.binding.runtime import open_runtime

    path, allowed = Path(command["library"]), bool(command["allow_unlisted"])
    if allowed and not (release := detect(path, allow_unlisted=True)).listed:
        from rkserve.native.engine.trial import try_release

        sys.stderr.write(f"W rkserve: RKLLM {release.version} is tried in a process of its own\n")
        try_release(path, command["params"], release.version, command["trial_timeout_s"])
    return open_runtime(path, command["quirks"], allow_unlisted=allowed)


def _crash(exc: BaseException) -> NoReturn:
    """Log the exception and end the process, which the board then restarts."""
    traceback.print_exception(exc)
    sys.stderr.write(f"E rkserve: internal error: {exc!r}\n")
    sys.stderr.flush()
    os._exit(os.EX_SOFTWARE)


def _confine(given: str) -> str:
    """Confine the process as its command line says. Ends it where it must be, and cannot be."""
    order = json.loads(given)
    mode = Confine(order["mode"])
    if mode is Confine.OFF:
        return "off"
    lock = Path(order["lock"])
    with contextlib.suppress(OSError):  # to take the lock fails for the same reason
        private_folder(lock.parent)
        os.close(open_private(lock, os.O_RDWR | os.O_CREAT))  # a rule is about a file that exists
    allowed = Confinement(
        tuple(order["read"]), (*order["write"], str(lock)), order["programs"], (str(lock.parent),)
    )
    confined = confine(allowed)
    if not is_whole(confined):
        sys.stderr.write(f"W rkserve: this engine is confined by less than all means: {confined}\n")
        if mode is Confine.ON:
            sys.stderr.write("E rkserve: `confine: on` wants Landlock and seccomp\n")
            sys.stderr.flush()
            os._exit(os.EX_UNAVAILABLE)
    return confined


def main() -> None:
    """Serve the board at the other end of stdin and stdout."""
    import faulthandler

    faulthandler.enable()  # a crash in the library leaves a stack in the board's log
    harden()
    confined = _confine(sys.argv[2]) if len(sys.argv) > CONFINED_AT else "off"
    with contextlib.suppress(PermissionError):
        # Ray runs its workers at nice 15, too low to feed an NPU. Only root may raise it here.
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    # The vendor's library prints to stdout: the pipe is reserved for frames.
    frames_fd = os.dup(1)
    os.dup2(2, 1)
    frames = FrameWriter(frames_fd)
    engine = EngineServer(frames, _open_library, confined)
    interval_s = float(sys.argv[1])
    threading.Thread(target=engine.beat, args=(interval_s,), name="beat", daemon=True).start()
    try:
        engine.serve(0)
    except BaseException as exc:  # noqa: BLE001 - logged, then the process ends
        _crash(exc)
    os._exit(0)  # threads inside C cannot be joined; the kernel frees what they hold


if __name__ == "__main__":
    main()
