"""Files on disks: durable writes, full disks, folders that no other account can prepare, and the
rule for names that become parts of paths: of adapters, their versions and prompt caches.
"""

from __future__ import annotations

import errno
import os
import pwd
import re
import shutil
import stat
from pathlib import Path

from rkserve.core.errors import RequestError

# Errors of a full disk, an exhausted quota, or a file size limit of the process.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

PRIVATE = 0o700


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of ``folder``. Raises ``OSError``."""
    return shutil.disk_usage(folder).free


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk. Raises ``OSError``.

    It follows no link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class UnsafeFolder(OSError):
    """A folder that another account could read, write or replace."""


def private_folder(folder: Path) -> None:
    """Create a folder with mode 0700, or check that an existing one belongs to this account alone.

    A folder of this account that others may only read gets mode 0700. Its contents are trustworthy:
    others could never write there.

    Raises:
        UnsafeFolder: it is a symbolic link or no folder, belongs to another account, may be written
            by others, or lies in a folder in which another account could replace it.
        OSError: it cannot be created or read.
    """
    folder = Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() would follow links
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode=PRIVATE)
    except FileExistsError:
        _refuse_links(folder)
    _refuse_parents(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise UnsafeFolder(
                f"{folder} belongs to {_account(found.st_uid)}, not to {_account(os.geteuid())}; "
                "use another folder, or change its owner"
            )
        mode = stat.S_IMODE(found.st_mode)
        if mode & 0o022:
            raise UnsafeFolder(
                f"other accounts may write to {folder} (mode {mode:04o}); look at what is in it, "
                f"then run chmod 700 {folder}"
            )
        if mode != PRIVATE:
            os.fchmod(descriptor, PRIVATE)
    finally:
        os.close(descriptor)


def open_private(path: Path, flags: int) -> int:
    """Open a file of a private folder, created with mode 0600; it follows no link.

    Raises:
        UnsafeFolder: the file is a symbolic link, no regular file, or another account's.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise UnsafeFolder(f"{path} is a symbolic link; remove it") from exc
        raise
    try:
        _check_file(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_private(path: Path, text: str) -> None:
    """Write a file of a private folder, as ``open_private`` opens it.

    Raises:
        UnsafeFolder: the file is not this account's own.
        OSError: it cannot be written.
    """
    with os.fdopen(open_private(path, os.O_WRONLY | os.O_CREAT), "w", encoding="utf-8") as file:
        file.truncate(0)  # not before its owner is checked
        file.write(text)


def _check_file(path: Path, descriptor: int) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        raise UnsafeFolder(f"{path} is no regular file; remove it")
    if found.st_uid != os.geteuid():
        raise UnsafeFolder(f"{path} belongs to {_account(found.st_uid)}; remove it")
    if stat.S_IMODE(found.st_mode) & 0o077:
        os.fchmod(descriptor, 0o600)


def _refuse_links(folder: Path) -> None:
    mode = folder.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise UnsafeFolder(f"{folder} is a symbolic link; name the folder itself")
    if not stat.S_ISDIR(mode):
        raise UnsafeFolder(f"{folder} is no folder")


def _refuse_parents(folder: Path) -> None:
    """Refuse a folder that others could rename, with the rules of OpenSSH for its own files."""
    trusted = {0, os.geteuid()}
    for parent in (*folder.parents, *folder.resolve().parents):
        found = parent.lstat()
        if found.st_uid not in trusted:
            raise UnsafeFolder(
                f"{folder} lies in {parent}, which belongs to {_account(found.st_uid)}; use "
                "another folder"
            )
        loose = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
        if loose and not stat.S_ISLNK(found.st_mode):
            raise UnsafeFolder(
                f"{folder} lies in {parent}, in which every account may rename it (mode "
                f"{stat.S_IMODE(found.st_mode):04o}); use another folder"
            )


def _account(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:  # containers have accounts without names
        return f"user {uid}"


# No ':', '@' or '/': the first two are separators in a request's model, the last one in paths.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
QUOTED_CHARACTERS = 40


def check_cache_name(name: str, param: str = "cache_name") -> str:
    """Return a valid prompt cache name. Raises ``RequestError`` with the rule."""
    if not NAME.fullmatch(name):
        shown = repr(name if len(name) <= QUOTED_CHARACTERS else f"{name[:QUOTED_CHARACTERS]}...")
        raise RequestError(
            f"Invalid '{param}': {shown}. The name of a prompt cache begins with a letter or a "
            "digit and has at most 64 letters, digits, '.', '_' and '-'.",
            param,
        )
    return name
