"""Writes the modules by which cffi knows the headers of rkserve/native/decl; ``--check`` compares.

To parse C takes cffi 80 ms on a desktop's core and a few times that on a board's, each time that an
engine starts, and memory that it keeps. What it finds is written down here instead.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from cffi import FFI

DECL = Path(__file__).resolve().parents[1] / "rkserve" / "native" / "decl"


def module_of(header: Path) -> Path:
    """Return the module that a header is written down in."""
    return DECL / f"{header.stem}.py"


def written(header: Path) -> str:
    """Return the module of a header."""
    ffi = FFI()
    ffi.cdef(header.read_text(encoding="utf-8"))
    ffi.set_source(f"rkserve.native.decl.{header.stem}", None)
    with TemporaryDirectory() as folder:
        target = Path(folder) / "module.py"
        with redirect_stdout(None):
            ffi.emit_python_code(str(target))
        return target.read_text(encoding="utf-8").replace(
            "# auto-generated file", "# Written by scripts/make_declarations.py. Do not edit."
        )


def main() -> int:
    """Write the modules, or say which are not what their headers say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only compare")
    check = parser.parse_args().check
    wrong = []
    for header in sorted(DECL.glob("*.h")):
        target, text = module_of(header), written(header)
        if check and (not target.is_file() or target.read_text(encoding="utf-8") != text):
            wrong.append(target.name)
        elif not check:
            target.write_text(text, encoding="utf-8")
    if wrong:
        print(f"not what their headers say: {', '.join(wrong)}; run make docs")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
