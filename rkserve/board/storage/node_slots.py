"""Slots of a node, which give replicas their board names: the first free one, by a file lock.

A lock ends with its process, so a replaced replica finds the slot of its predecessor free and keeps
the board's name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path

from rkserve.core.errors import LoadFailed
from rkserve.core.files import open_private, private_folder


@dataclass(frozen=True, slots=True)
class NodeSlot:
    """A claimed slot; keep it as long as the replica lives."""

    index: int
    fd: int

    def release(self) -> None:
        """Release it for another replica."""
        os.close(self.fd)


def claim_slot(state_dir: Path, group: str, slots: int) -> NodeSlot:
    """Claim the lowest free of ``slots``.

    Raises:
        LoadFailed: all are held, or the folder is not private or cannot be written.
    """
    holders: list[str] = []
    try:
        private_folder(state_dir)
        for index in range(slots):
            fd = open_private(state_dir / f"{group}-{index}.slot", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holders.append(_holder(fd))
                os.close(fd)
                continue
            _sign(fd)
            return NodeSlot(index, fd)
    except OSError as exc:
        raise LoadFailed(f"the state folder {state_dir} cannot be used: {exc}") from exc
    raise LoadFailed(
        f"all {slots} slots of group {group} on this node are held, by the processes "
        f"{', '.join(holders)} ({state_dir})"
    )


def _sign(fd: int) -> None:
    # The lock works without the name, for example on a full disk.
    with contextlib.suppress(OSError):
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)


def _holder(fd: int) -> str:
    return os.pread(fd, 32, 0).decode(errors="replace").strip() or "?"
