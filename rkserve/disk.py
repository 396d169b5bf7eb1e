"""Disks: having them hold what was written, and telling when they are full.

It knows files and folders, and nothing of what they are for.
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

# What a disk, a quota or a limit of the process says when no more can be written.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def free_bytes(folder: Path) -> int:
    """Return what can be written on the disk of ``folder``. Raises ``OSError``."""
    return shutil.disk_usage(folder).free


def sync(path: Path) -> None:
    """Have the disk hold a file or a folder, whatever happens to the power. Raises ``OSError``.

    It follows no link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
