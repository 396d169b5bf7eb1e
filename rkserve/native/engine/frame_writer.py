"""Frames on their way out of the engine process. It knows a descriptor, and nothing of frames."""

from __future__ import annotations

import os
import threading
from queue import SimpleQueue


class Outbox:
    """``put`` never blocks, so the library's callback never waits for a pipe; a thread writes."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="writer", daemon=True)
        self._thread.start()

    def put(self, frame: bytes) -> None:
        """Queue a frame, or several in one piece."""
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
