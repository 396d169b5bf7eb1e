"""The engine process: owns one RKLLM handle and exchanges frames over its stdin and stdout.

A crash of the vendor's library ends this process and nothing else. It knows no Ray, no HTTP and no
request queue. It ends when its stdin closes, so that no orphan keeps NPU memory. The board starts
it as ``python -m rkserve.native.engine.process``.

It has three threads: the main thread reads commands, so that an abort is read while the library is
busy; the *runner* makes the blocking calls of the library; the *writer* writes the frames. Where
several entries run at the same time, each but the first has a thread beside the runner.
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
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol

from rkserve.core.errors import LoadFailed, NativeError, RkserveError
from rkserve.core.files import open_private, private_folder
from rkserve.core.run_params import Confine
from rkserve.native import engine_frames
from rkserve.native.engine import commands
from rkserve.native.engine.confinement import Confinement, confine, harden, is_whole
from rkserve.native.engine.entry import EntryRuns, Work
from rkserve.native.engine_frames import FrameKind, FrameWriter, NpuLock
from rkserve.native.runtime import Runtime

READ_SIZE = 1 << 16
CONFINED_AT = 2  # in the command line
MANY = 2  # entries that run at the same time

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
        self._work: SimpleQueue[Work] = SimpleQueue()
        self._runtime: Runtime | None = None
        self._entries: tuple[EntryRuns, ...] = ()  # of the loaded model
        self._npu_lock: NpuLock | None = None  # held until the process ends

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
        if kind in (FrameKind.ABORT, FrameKind.PAUSE):
            self._interrupt(kind, engine_frames.unpack(payload))
        elif (number := self._entry_of(kind, payload)) > 0:
            self._entries[number].work.put((kind, payload))
        else:
            self._work.put((kind, payload))

    def _interrupt(self, kind: FrameKind, given: dict[str, Any]) -> None:
        if not self._entries:
            return  # nothing has begun
        entry = self._entries[given.get("entry", 0)]
        interrupt = entry.abort if kind is FrameKind.ABORT else entry.pause
        interrupt(given["run_id"])

    def _entry_of(self, kind: FrameKind, payload: bytes) -> int:
        """Return the entry whose thread executes a command."""
        if len(self._entries) < MANY or kind not in (FrameKind.RUN, FrameKind.CALL):
            return 0
        run = kind is FrameKind.RUN
        given = engine_frames.unpack_run(payload)[1] if run else engine_frames.unpack(payload)
        return min(int(given.get("entry", 0)), len(self._entries) - 1)

    def carry_out(self, kind: FrameKind, payload: bytes) -> None:
        """Execute a queued command."""
        if kind is FrameKind.LOAD:
            self._load(engine_frames.unpack(payload))
        elif kind is FrameKind.STOP:
            self._stop()
        elif self._entries:
            self._entries[0].carry_out(kind, payload)
        else:
            self._refuse(kind, payload)

    def _refuse(self, kind: FrameKind, payload: bytes) -> None:
        """Answer a command that needs a loaded model."""
        reason = "no model is loaded"
        if kind is FrameKind.RUN:
            run_id, *_ = engine_frames.unpack_run(payload)
            ended = {"run_id": run_id, "end": "failed", "error": reason}
            self._frames.put(engine_frames.pack(FrameKind.ENDED, ended))
        elif kind is FrameKind.CALL:
            error = {"kind": LoadFailed.__name__, "args": (reason,)}
            result = {"call_id": engine_frames.unpack(payload)["call_id"], "error": error}
            self._frames.put(engine_frames.pack(FrameKind.RESULT, result))

    def _runner(self) -> None:
        _execute(self._work, self.carry_out)

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
            "entries": len(self._entries),
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
        entries = tuple(EntryRuns(one, self._frames.put) for one in runtime.entries)
        entries[0].needs_encoder = load.use_cross_attn
        if vision is not None:
            from rkserve.native.binding.image_encoder import open_vision  # late, as the library

            entries[0].vision = open_vision(vision, tags_at_load=runtime.image_tags_at_load)
        if command["text_mode"] or vision is not None:
            # The prompt is rendered already: the model's template must not wrap it again.
            runtime.set_chat_template("", "", "")
        for number, entry in enumerate(entries[1:], 1):  # the runner has the first
            work = (entry.work, entry.carry_out)
            threading.Thread(
                target=_execute, args=work, name=f"entry {number}", daemon=True
            ).start()
        self._entries = entries
        return runtime

    def _stop(self) -> None:
        if self._runtime is not None:
            try:
                self._runtime.destroy()
            except NativeError as exc:
                sys.stderr.write(f"rkserve: the handle was not freed: {exc}\n")
        self._frames.close()
        os._exit(0)  # the main thread is blocked in read()


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


def _execute(work: SimpleQueue[Work], carry_out: Callable[[FrameKind, bytes], None]) -> None:
    """Execute queued commands for ever; an error ends the process."""
    try:
        while True:
            carry_out(*work.get())
    except BaseException as exc:  # noqa: BLE001 - a thread that ends would stop its entry unnoticed
        _crash(exc)


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
