"""The engine process's frame pipe and the lock that keeps two processes off one NPU."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from rkserve.core.errors import LoadFailed
from rkserve.core.files import open_private, private_folder


class FrameWriter:
    """A queue of frames and the thread that writes them.

    ``put`` never blocks, so that the library's callback never waits for a pipe.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="writer", daemon=True)
        self._thread.start()

    def put(self, frame: bytes) -> None:
        """Queue a frame, or several as one string of bytes."""
        self._queue.put(frame)

    def close(self) -> None:
        """Write all queued frames, then end."""
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
                os._exit(0)  # the board has ended; the main thread sees EOF as well

    def _write_all(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(self._fd, view) :]


POLL_S = 0.05


@dataclass
class NpuLock:
    """An exclusive file lock that keeps two processes off one NPU."""

    path: Path
    fd: int = -1

    def take(self, timeout_s: float) -> None:
        """Wait for the lock.

        Raises:
            LoadFailed: another process still holds the lock after ``timeout_s``, or the file or
                its folder belongs to another account.
        """
        try:
            private_folder(self.path.parent)
            self.fd = open_private(self.path, os.O_RDWR | os.O_CREAT)
        except OSError as exc:
            raise LoadFailed(f"NPU lock {self.path} cannot be used: {exc}") from exc
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
                time.sleep(POLL_S)
        with contextlib.suppress(OSError):  # on a full disk the lock works without the pid in it
            os.ftruncate(self.fd, 0)
            os.pwrite(self.fd, str(os.getpid()).encode(), 0)
