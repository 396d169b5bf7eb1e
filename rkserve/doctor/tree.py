"""Bounded reads of small files below a root: ``/``, or a tree of a board from a report.

A missing file is None. Whatever else goes wrong is noted in ``unread`` and is None too: a tree may
hold pipes, folders in the places of files, links that lead out of it, and garbage.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from rkserve.doctor.facts import UnreadSource

MAX_BYTES = 1 << 18
MAX_NAMES = 4096
ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR})


@dataclass(frozen=True, slots=True)
class Tree:
    """Files below ``root``; paths are without the leading slash."""

    root: Path
    unread: list[UnreadSource] = field(default_factory=list)

    @property
    def is_this_machine(self) -> bool:
        """True if the root is that of this machine."""
        return self.root == Path("/")

    def text(self, path: str) -> str | None:
        """Return a file's text without blanks around it, None without one."""
        try:
            raw = self._read(path)
        except OSError as exc:
            self.note(path, exc)
            return None
        return raw.decode("utf-8", "replace").strip("\0 \n\t")

    def private_text(self, path: str) -> str | None:
        """Return a file's text as it is, None where this user may not read it or it is absent."""
        try:
            return self._read(path).decode("utf-8", "replace")
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        """Return a whole number, None where there is none."""
        text = self.text(path)
        if text is None:
            return None
        if re.fullmatch(r"-?\d{1,18}", text, re.ASCII):
            return int(text)
        shown = ascii(text[:24]) if text else "it is empty"
        self.unread.append(UnreadSource(path=f"/{path}", reason=f"{shown} is no number"))
        return None

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder, sorted; none if it is absent."""
        try:
            return sorted(os.listdir(self._inside(folder)))[:MAX_NAMES]  # noqa: PTH208 - names, without a Path for each
        except OSError as exc:
            self.note(folder, exc)
            return []

    def exists(self, path: str) -> bool:
        """Return whether something is at a path, also where a link to it leads nowhere."""
        return os.path.lexists(self.root / path)

    def link(self, path: str) -> str | None:
        """Return the last name of a link's target, None if it is no link."""
        try:
            return (self.root / path).readlink().name
        except OSError:
            return None

    def stat(self, path: str) -> os.stat_result | None:
        """Return owner and mode of a file, None if it is absent."""
        try:
            return self._inside(path).stat()
        except OSError as exc:
            self.note(path, exc)
            return None

    def note(self, path: str, exc: OSError) -> None:
        """Note a failed read, unless the file is merely absent."""
        if exc.errno not in ABSENT:
            reason = exc.strerror or type(exc).__name__
            self.unread.append(UnreadSource(path=f"/{path}", reason=reason))

    def _inside(self, path: str) -> Path:
        """Return a path below the root. Raises ``OSError`` for a link that leads out of it."""
        found = self.root / path
        if self.is_this_machine:
            return found
        try:
            real = found.resolve()
        except RuntimeError as exc:  # a loop of links, up to Python 3.12
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP)) from exc
        if not real.is_relative_to(self.root.resolve()):
            raise OSError(errno.EXDEV, "it is a link that leads out of the tree")
        return found

    def _read(self, path: str) -> bytes:
        # Non-blocking, because a pipe in the file's place must not hold the caller.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        descriptor = os.open(self._inside(path), flags)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(errno.EISDIR, "it is no regular file")
            chunks, left = [], MAX_BYTES
            while left > 0 and (chunk := os.read(descriptor, left)):
                chunks.append(chunk)
                left -= len(chunk)
        finally:
            os.close(descriptor)
        return b"".join(chunks)
