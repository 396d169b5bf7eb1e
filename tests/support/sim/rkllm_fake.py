"""Builds tests/support/c/fake_rkllm.c in its variants, and scripts and questions it from a test."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cffi import FFI

from tests.support.paths import TESTS

DECLARATIONS = TESTS.parent / "rkserve" / "native" / "decl"

CALL, WAIT_ABORT, WAIT_GO, ROWS = 0, 1, 2, 3
NORMAL, WAITING, FINISH, ERROR = 0, 1, 2, 3

# What to do, the callback's state, token id and text; in a batch also a bit per ended entry.
Step = tuple[int, int, int, bytes | None] | tuple[int, int, int, bytes | None, int]


def build(out: Path, *flags: str) -> Path:
    """Compile the fake with ``flags`` to ``out``."""
    command = ["gcc", "-shared", "-fPIC", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread"]
    if sanitize := sanitized():
        command += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all"]
    source = [f"-I{DECLARATIONS}", str(TESTS / "support" / "c" / "fake_rkllm.c"), "-o", str(out)]
    subprocess.run([*command, *flags, *source], check=True)
    return out


def sanitized() -> str | None:
    """What the libraries under test are built with: a value of -fsanitize=; see sanitize.py."""
    return os.environ.get("RKSERVE_SANITIZE") or None


def version(text: str) -> str:
    """Return the compiler flag that puts a version string into the fake."""
    return f'-DFAKE_VERSION="{text}"'


def token(token_id: int, text: bytes | None = b"x") -> Step:
    """A NORMAL callback."""
    return (CALL, NORMAL, token_id, text)


def ended(token_id: int, *entries: int, text: bytes = b"x") -> Step:
    """A NORMAL callback of a batch whose ``entries`` have ended."""
    return (CALL, NORMAL, token_id, text, sum(1 << entry for entry in entries))


class Fake:
    """The script and the record of one fake library, which its binding loads as well."""

    def __init__(self, path: Path) -> None:
        self.ffi: Any = FFI()
        self.ffi.cdef((TESTS / "support" / "c" / "fake_rkllm.h").read_text(encoding="utf-8"))
        self.lib: Any = self.ffi.dlopen(str(path))
        self.path = path
        self._texts: list[Any] = []
        self.reset()

    def reset(self) -> None:
        """Forget script and record."""
        self.lib.fake_reset()

    @property
    def seen(self) -> Any:
        """What the library was given."""
        return self.lib.fake_record

    @property
    def script(self) -> Any:
        """What the library shall do."""
        return self.lib.fake_script

    def steps(self, *steps: Step) -> None:
        """Script the next runs."""
        self.script.n_steps = len(steps)
        for place, step in zip(self.script.steps, steps, strict=False):
            place.op, place.state, place.token_id, text = step[:4]
            place.text = self.ffi.NULL if text is None else self._text(text)
            place.ended = step[4] if len(step) > 4 else 0

    def rows(self, *shapes: tuple[int, int], go_on: bool = False) -> None:
        """Script the next runs to call back with so many rows and columns, each.

        With ``go_on`` they generate after that until they are aborted.
        """
        steps: list[Step] = [(ROWS, NORMAL, 0, None) for _ in shapes]
        self.steps(*steps, *([(WAIT_ABORT, 0, 0, None)] if go_on else []))
        for place, (rows, columns) in zip(self.script.steps, shapes, strict=False):
            place.rows, place.columns = rows, columns

    def calls(self, function: str) -> int:
        """How often the library's ``function`` was called since it was loaded."""
        return int(self.lib.fake_calls(function.encode()))

    def kept(self) -> str:
        """What the library was given to keep, read again now."""
        room = self.ffi.new("char[]", 1024)
        self.lib.fake_reread(room, 1024)
        return bytes(self.ffi.string(room)).decode()

    def replies(self) -> Sequence[int]:
        """What the result callback returned, call by call."""
        return list(self.seen.replies[0 : self.seen.n_replies])

    def string(self, name: str) -> bytes:
        """A recorded string."""
        return bytes(self.ffi.string(getattr(self.seen, name)))

    def _text(self, text: bytes) -> Any:
        self._texts.append(self.ffi.new("char[]", text))
        return self._texts[-1]
