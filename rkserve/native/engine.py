"""The engine process: owns one RKLLM handle, speaks frames over its stdin and stdout.

It is what a crash in the vendor's library takes down, and all of it. It knows ``native`` only: no
Ray, no HTTP, no queue of requests. It ends when its stdin closes, so that no orphan keeps NPU
memory. ``python -m rkserve.native.engine`` is started by the board, never by hand.

Three threads: the main one reads commands (so an abort gets through while the library is busy),
the *runner* is the only one that enters blocking calls of the library, the *writer* is the only
one that writes frames, so that the library's callback never waits for a pipe.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NoReturn

from rkserve.errors import LoadFailed, NativeError, RkserveError
from rkserve.messages import Sampling
from rkserve.native import frames
from rkserve.native.frames import Kind
from rkserve.native.runtime import (
    LoadParams,
    Piece,
    PromptInput,
    RunParams,
    Runtime,
    TokenInput,
    Verdict,
)

READ_SIZE = 1 << 16
FENCE_POLL_S = 0.05
STDERR = 2


class Outbox:
    """Frames on their way out. ``put`` never blocks; a thread of its own writes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="writer", daemon=True)
        self._thread.start()

    def put(self, frame: bytes) -> None:
        """Queue a frame."""
        self._queue.put(frame)

    def close(self) -> None:
        """Write what is queued, then end."""
        self._queue.put(None)
        self._thread.join()

    def _write(self) -> None:
        while (first := self._queue.get()) is not None:
            batch = [first]
            while not self._queue.empty():
                frame = self._queue.get()
                if frame is None:
                    self._queue.put(None)
                    break
                batch.append(frame)
            try:
                self._write_all(b"".join(batch))
            except (BrokenPipeError, ConnectionResetError):
                os._exit(0)  # the board is gone; the main thread sees EOF at the same moment

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


@dataclass
class Fence:
    """An exclusive file lock: two processes never hold the same NPU's handle at once."""

    path: Path
    fd: int = -1

    def take(self, timeout_s: float) -> None:
        """Wait for the lock. Raises ``LoadFailed`` naming the holder after ``timeout_s``."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o660)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    holder = os.pread(self.fd, 32, 0).decode(errors="replace").strip() or "unknown"
                    raise LoadFailed(
                        f"the NPU is held by another engine (pid {holder}, lock {self.path}); it "
                        f"did not let go within {timeout_s:.0f} s"
                    ) from None
                time.sleep(FENCE_POLL_S)
        with contextlib.suppress(OSError):  # a full disk: the lock holds without the name
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, str(os.getpid()).encode(), 0)


class Engine:
    """The commands of a board, carried out on one runtime."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._work: SimpleQueue[tuple[Kind, bytes]] = SimpleQueue()
        self._runtime: Runtime | None = None
        self._fence: Fence | None = None  # held until the process ends
        # Guards the pair below: an abort that overtakes its run must keep it from starting, and
        # one that comes late must not hit the next run. The library's callback never takes it.
        self._lock = threading.Lock()
        self._current: int | None = None
        self._aborted: frozenset[int] = frozenset()
        self._tokens = 0

    def serve(self, command_fd: int) -> None:
        """Carry out commands until the board closes the pipe."""
        threading.Thread(target=self._runner, name="runner", daemon=True).start()
        reader = frames.FrameReader()
        while chunk := os.read(command_fd, READ_SIZE):
            for kind, payload in reader.feed(chunk):
                if kind is Kind.ABORT:
                    self._abort(frames.unpack(payload)["run_id"])
                else:
                    self._work.put((kind, payload))

    def beat(self, interval_s: float) -> None:
        """Tell every ``interval_s`` that this process is alive; never returns."""
        while True:
            self._outbox.put(frames.pack(Kind.BEAT, {}))
            time.sleep(interval_s)

    def _abort(self, run_id: int) -> None:
        with self._lock:  # held over the call: run_id stays the current run until it is made
            self._aborted |= {run_id}
            if self._current != run_id or self._runtime is None:
                return
            try:
                self._runtime.abort()
            except NativeError as exc:  # the board's watchdog ends a run that goes on after this
                sys.stderr.write(f"E rkserve: the abort was refused: {exc}\n")

    def _runner(self) -> None:
        try:
            while True:
                self._carry_out(*self._work.get())
        except BaseException as exc:  # noqa: BLE001 - without this thread the engine is deaf
            _crash(exc)

    def _carry_out(self, kind: Kind, payload: bytes) -> None:
        if kind is Kind.LOAD:
            self._load(frames.unpack(payload))
        elif kind is Kind.RUN:
            self._run(*frames.unpack_run(payload))
        elif kind is Kind.STOP:
            self._stop()

    def _load(self, command: dict[str, Any]) -> None:
        try:
            started = time.monotonic()
            if command["pin_cpus"]:
                os.sched_setaffinity(0, command["pin_cpus"])
            self._fence = Fence(Path(command["fence"]))
            self._fence.take(command["fence_timeout_s"])
            self._runtime = self._open(command)
        except (RkserveError, OSError) as exc:
            kind = type(exc).__name__ if isinstance(exc, NativeError) else "LoadFailed"
            self._outbox.put(frames.pack(Kind.LOAD_FAILED, {"kind": kind, "message": str(exc)}))
            return
        facts = {
            "release": self._runtime.release,
            "per_run_sampling": self._runtime.per_run_sampling,
            "quirks": dict(self._runtime.quirks),
            "load_s": time.monotonic() - started,
        }
        self._outbox.put(frames.pack(Kind.LOADED, facts))

    def _open(self, command: dict[str, Any]) -> Runtime:
        from rkserve.native.binding import open_runtime  # late: dlopen only after the fence

        runtime = open_runtime(Path(command["library"]), command["quirks"])
        load = dict(command["params"])
        load["sampling"] = Sampling(**load["sampling"])
        load["cpus"] = tuple(load["cpus"])
        runtime.load(LoadParams(**load))
        if command["text_mode"]:
            # The prompt arrives rendered: the model's own template must not wrap it once more.
            runtime.set_chat_template("", "", "")
        return runtime

    def _run(self, run_id: int, params: dict[str, Any], ids: tuple[int, ...]) -> None:
        with self._lock:
            if run_id in self._aborted:
                self._ended(run_id, {"end": "unstarted"})
                return
            self._current, self._tokens = run_id, 0
        try:
            self._ended(run_id, self._generate(run_id, params, ids))
        except NativeError as exc:
            self._ended(run_id, {"end": "failed", "error": str(exc)})
        finally:
            with self._lock:
                self._current = None
                # Run ids only grow: what is not above this one can never be asked for again.
                self._aborted = frozenset(late for late in self._aborted if late > run_id)

    def _generate(
        self, run_id: int, params: dict[str, Any], ids: tuple[int, ...]
    ) -> dict[str, Any]:
        runtime = self._runtime
        if runtime is None:
            raise LoadFailed("a run was asked for before a model was loaded")
        if params["clear"]:
            runtime.clear_kv_cache()
        if run_id in self._aborted:  # it came while the KV was being cleared
            return {"end": "unstarted"}
        put = self._outbox.put

        def sink(piece: Piece) -> Verdict:
            if self._tokens == 0 and run_id in self._aborted:
                # That abort may have come before the library had a run to end. Not from here: an
                # abort inside the callback is unproven on hardware.
                threading.Thread(target=self._abort, args=(run_id,), daemon=True).start()
            self._tokens += 1
            put(frames.pack_token(run_id, piece.token_id, piece.text))
            return Verdict.CONTINUE

        text = params.get("prompt_text")
        sampling = params.get("sampling")
        outcome = runtime.run(
            RunParams(
                input=TokenInput(ids) if text is None else PromptInput(text),
                keep_history=params["keep_history"],
                sampling=Sampling(**sampling) if sampling else None,
                max_new_tokens=params.get("max_new_tokens"),
            ),
            sink,
        )
        return {
            "end": outcome.end.value,
            "return_code": outcome.return_code,
            "perf": asdict(outcome.perf),
            "kv_positions": _positions(runtime),
        }

    def _ended(self, run_id: int, facts: dict[str, Any]) -> None:
        self._outbox.put(frames.pack(Kind.ENDED, {"run_id": run_id, **facts}))

    def _stop(self) -> None:
        if self._runtime is not None:
            try:
                self._runtime.destroy()
            except NativeError as exc:
                sys.stderr.write(f"rkserve: the handle was not freed in order: {exc}\n")
        self._outbox.close()
        os._exit(0)  # the main thread sits in read(); there is nothing left to do


def _positions(runtime: Runtime) -> int:
    """What the KV cache holds, or -1: the answer is complete and must not fail for a figure."""
    try:
        return runtime.kv_cache_size()
    except NativeError as exc:
        sys.stderr.write(f"rkserve: the KV cache's size is unknown: {exc}\n")
        return -1


def _crash(exc: BaseException) -> NoReturn:
    """End at once and say why: the board respawns an engine that ended, not one that is deaf."""
    traceback.print_exception(exc)
    sys.stderr.write(f"E rkserve: internal error: {exc!r}\n")
    sys.stderr.flush()
    os._exit(os.EX_SOFTWARE)


def _close_inherited() -> None:
    """Ray's event loop hands log files and sockets of the replica down to its children."""
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if fd > STDERR:
            with contextlib.suppress(OSError):  # the one that listed the folder is gone by now
                os.close(fd)


def main() -> None:
    """Serve the board at the other end of stdin and stdout."""
    import faulthandler

    _close_inherited()
    faulthandler.enable()  # a crash in the library leaves a stack in the board's log
    with contextlib.suppress(PermissionError):
        # Ray runs its workers at nice 15: no way to feed an NPU. Only root may undo it here.
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    # The vendor's library prints to stdout: keep the frames' pipe for frames alone.
    frames_fd = os.dup(1)
    os.dup2(2, 1)
    outbox = Outbox(frames_fd)
    engine = Engine(outbox)
    interval_s = float(sys.argv[1])
    threading.Thread(target=engine.beat, args=(interval_s,), name="beat", daemon=True).start()
    try:
        engine.serve(0)
    except BaseException as exc:  # noqa: BLE001 - said aloud, then the process ends
        _crash(exc)
    os._exit(0)  # threads inside C cannot be joined; the kernel frees what they hold


if __name__ == "__main__":
    main()
