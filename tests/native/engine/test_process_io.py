"""The engine process's writer and its lock on the NPU."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from rkserve.core.errors import LoadFailed
from rkserve.native.engine.process_io import FrameWriter, NpuLock

FRAMES = [bytes([number % 256]) * 100 for number in range(2000)]


def test_a_full_pipe_blocks_no_sender_and_frames_keep_their_order() -> None:
    read_fd, write_fd = os.pipe()
    writer = FrameWriter(write_fd)
    for frame in FRAMES:  # more than the pipe takes: nobody has read yet
        writer.put(frame)
    closing = threading.Thread(target=writer.close)
    closing.start()
    found = b""
    while len(found) < sum(map(len, FRAMES)):
        found += os.read(read_fd, 1 << 16)
    closing.join()
    assert found == b"".join(FRAMES)
    os.close(read_fd)
    os.close(write_fd)


def test_closing_writes_all_that_was_queued_before() -> None:
    read_fd, write_fd = os.pipe()
    writer = FrameWriter(write_fd)
    writer.put(b"one")
    writer.put(b"two")
    writer.close()
    os.close(write_fd)
    assert os.read(read_fd, 100) == b"onetwo"
    os.close(read_fd)


def test_the_second_process_is_told_who_has_the_npu(tmp_path: Path) -> None:
    first, second = NpuLock(tmp_path / "npu" / "lock"), NpuLock(tmp_path / "npu" / "lock")
    first.take(0.0)
    with pytest.raises(LoadFailed, match=f"pid {os.getpid()}, lock .* within 0 s"):
        second.take(0.0)
    os.close(first.fd)
    os.close(second.fd)


def test_the_lock_is_waited_for(tmp_path: Path) -> None:
    first, second = NpuLock(tmp_path / "lock"), NpuLock(tmp_path / "lock")
    first.take(0.0)
    release = threading.Timer(0.1, os.close, (first.fd,))
    release.start()
    began_s = time.monotonic()
    second.take(30.0)
    assert time.monotonic() - began_s >= 0.05
    assert second.path.read_text() == str(os.getpid())
    os.close(second.fd)


def test_a_folder_that_cannot_be_used_is_an_error_of_the_load(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LoadFailed, match=r"NPU lock .* cannot be used"):
        NpuLock(tmp_path / "file" / "lock").take(0.0)
