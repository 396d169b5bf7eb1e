"""Files: durable writes, private folders, names in paths, and cached digests of large files.

A file counts as unchanged while its device, inode, size and both of its times are. An account that
can forge those can replace the file anyway.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import pwd
import re
import stat
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rkserve.core.errors import RequestError

if TYPE_CHECKING:
    import hashlib

# Errors of a full disk, an exhausted quota, or a file size limit of the process.
FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

PRIVATE = 0o700
T = TypeVar("T")


def free_bytes(folder: Path) -> int:
    """Return the free bytes of the disk of ``folder``. Raises ``OSError``."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk. Raises ``OSError``.

    It follows no link.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(folder: Path) -> None:
    """Create a folder with mode 0700 unless it exists, and its parents; a power cut keeps them.

    Raises ``OSError``.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
    for one in reversed(missing):
        sync(one.parent.resolve())  # its name stands there, perhaps behind a link


@lru_cache(maxsize=1)
def boot_id() -> str:
    """Return the id of this machine's start, empty if it has none: processes with the same one have
    the same ``time.monotonic``.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


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
        sync(folder.parent.resolve())
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


def replace_private(path: Path, text: str) -> None:
    """Replace a file of a private folder, completely or not at all. Raises as ``write_private``."""
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    write_private(fresh, text)
    sync(fresh)
    fresh.replace(path)
    sync(path.parent)


def replace_text(path: Path, text: str) -> None:
    """Replace a text file, completely or not at all, also across a power cut. Raises ``OSError``.

    Other accounts may read the file, as any that this process makes.
    """
    fresh = path.with_name(f"{path.name}.new")
    fresh.unlink(missing_ok=True)
    fresh.write_text(text, encoding="utf-8")
    sync(fresh)
    fresh.replace(path)
    sync(path.parent)


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
SIGNED_SUFFIX = ".manifest.json"  # of the signed manifest beside a file of weights
# It may travel in the query of an upload, for which HAProxy has 16 KB.
MANIFEST_MAX_CHARS = 8192
MAX_SIGNED_VERSION = 2**31 - 1  # a signed mistake leaves room for later versions
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


log = logging.getLogger(__name__)

DIGEST = re.compile(r"[0-9a-f]{64}")  # a sha256 in hexadecimal
BLOCK_BYTES = 64 * 1024
BLOCKS = 64
# Adapters, weights and prompt caches of one process; a digest that is forgotten is computed anew.
REMEMBERED = 4096

Stamp = tuple[int, int, int, int, int]


def file_digest(path: Path) -> str:
    """Return the sha256 of a whole file, in hexadecimal. Raises ``OSError``."""
    return _of_unchanged(path, _whole)


def content_digest(path: Path) -> str:
    """Return a digest of a file's size and of blocks spread evenly over it, both ends included.

    It distinguishes files of gigabytes without reading them whole: models differ everywhere, or in
    size. It does not protect against changes between the blocks. Raises ``OSError``.
    """
    return _of_unchanged(path, _sampled)


def _of_unchanged(path: Path, digest: Callable[[str, Stamp], str]) -> str:
    before = stamp(path)
    found = digest(str(path), before)
    if stamp(path) != before:
        raise OSError(f"{path} was changed while it was read")
    return found


def stamp(path: Path) -> Stamp:
    """Return a value that changes with the file. Raises ``OSError`` if it is no regular file."""
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(f"{path} is not a regular file")
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def ids_digest(ids: Iterable[int]) -> str:
    """Return a digest of token ids."""
    return _sha256(",".join(map(str, ids)).encode()).hexdigest()[:32]


class JsonRecord:
    """A small JSON file that a process leaves to the next one.

    It is a convenience: no method raises. All touch the disk; a ``path`` of None keeps nothing.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def read(self, parse: Callable[[Any], T]) -> T | None:
        """Return what ``parse`` makes of the content; None where there is none.

        A damaged file is removed; ``parse`` raises ``ValueError``, ``KeyError`` or ``TypeError``.
        """
        if self._path is None:
            return None
        try:
            return parse(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as exc:
            log.warning("the record %s is ignored and removed: %s", self._path, exc)
            self.remove()
            return None

    def write(self, value: Any) -> None:
        """Replace the content, completely or not at all."""
        if self._path is None:
            return
        try:
            replace_private(self._path, json.dumps(value))
        except OSError as exc:
            log.warning("%s could not be written: %s", self._path, exc)

    def remove(self) -> None:
        """Remove the file, if there is one."""
        try:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
        except OSError as exc:
            log.warning("%s could not be removed: %s", self._path, exc)


class CachedDigest:
    """The sha256 of one large file, cached in ``record`` across processes while the file is
    unchanged; without a record it is cached in memory only.

    Any thread may use it; concurrent callers share one computation.
    """

    def __init__(self, file: Path, record: Path | None) -> None:
        self.file = file
        self._record = JsonRecord(record)
        self._known: tuple[Stamp, str] | None = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    @property
    def known(self) -> str | None:
        """The digest as last computed; None before that. It reads nothing."""
        return None if self._known is None else self._known[1]

    def get(self) -> str:
        """Return the digest of the file as it is now; a changed file is read again.

        Raises ``OSError``: the file cannot be read, or ``stop`` was called.
        """
        with self._lock:
            stamped = stamp(self.file)
            if self._known is None:
                self._known = self._record.read(_read_digest)
            if self._known is None or self._known[0] != stamped:
                digest = _hash(str(self.file), self._stopped)
                if stamp(self.file) != stamped:
                    raise OSError(f"{self.file} was changed while it was read")
                self._known = stamped, digest
                self._record.write({"stamp": stamped, "digest": digest})
            return self._known[1]

    def stop(self) -> None:
        """Cancel a running computation, because the process is about to end."""
        self._stopped.set()


def _read_digest(found: Any) -> tuple[Stamp, str]:
    """Parse a record. Raises ``ValueError``, ``KeyError`` or ``TypeError`` for a foreign one."""
    device, inode, size, mtime, ctime = (int(one) for one in found["stamp"])
    if not DIGEST.fullmatch(found["digest"]):
        raise ValueError("it holds no sha256")
    return (device, inode, size, mtime, ctime), found["digest"]


def _sha256(content: bytes = b"") -> hashlib._Hash:
    import hashlib  # late: it loads OpenSSL, and a starting engine process computes no digest

    return hashlib.sha256(content)


@lru_cache(maxsize=REMEMBERED)
def _whole(path: str, _stamp: Stamp) -> str:
    return _hash(path)


def _hash(path: str, stopped: threading.Event | None = None) -> str:
    digest = _sha256()
    # 1 MiB at a time: hashlib lets other threads run while it works on pieces of this size.
    with Path(path).open("rb") as file:
        while piece := file.read(1 << 20):
            if stopped is not None and stopped.is_set():
                raise OSError(f"reading {path} was cancelled because the process is ending")
            digest.update(piece)
    return digest.hexdigest()


@lru_cache(maxsize=REMEMBERED)
def _sampled(path: str, stamped: Stamp) -> str:
    size = stamped[2]
    digest = _sha256(str(size).encode())
    last = max(0, size - BLOCK_BYTES)
    with Path(path).open("rb") as file:
        for n in range(BLOCKS):
            file.seek(last * n // (BLOCKS - 1), os.SEEK_SET)
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()
