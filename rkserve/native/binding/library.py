"""Opening a shared library so that a failure tells the person at the board what to do.

It knows ELF headers and the dynamic loader's words. Which release a library is, and what its
functions mean, is for ``detect`` and ``binding``.
"""

from __future__ import annotations

import platform
import struct
from pathlib import Path
from typing import Any

from rkserve.core.errors import LibraryMissing

_ELF_MAGIC = b"\x7fELF"
_ELF_64_BIT = 2
# e_machine, by what uname calls it.
_MACHINES = {3: "i686", 40: "armv7l", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
_HEADER_LEN = 64
# e_machine; and where the table of sections is, how long an entry, how many: it ends the file.
_MACHINE_AT, _SECTIONS_AT, _SECTION_COUNT_AT = 18, 40, 58


def open_library(ffi: Any, path: Path, name: str = "librkllmrt.so") -> Any:
    """Open the library at ``path`` with the declarations of ``ffi``; ``name`` is what it should be.

    Raises:
        LibraryMissing: there is no such file, it is not for this machine, or the loader cannot
            load it; the message holds the loader's words and the fix.
    """
    _check_header(path, name)
    try:
        return ffi.dlopen(str(path.absolute()))
    except OSError as exc:
        words = str(exc).partition(".  Additionally")[0]  # cffi's afterthought about search paths
        raise LibraryMissing(f"{path} cannot be loaded: {words}. {_fix(words, path)}") from exc


def _check_header(path: Path, wanted: str) -> None:
    try:
        with path.open("rb") as file:
            header = file.read(_HEADER_LEN)
            size = file.seek(0, 2)
    except OSError as exc:
        raise LibraryMissing(
            f"{path} cannot be read: {exc.strerror}. Set the library's path to the {wanted} "
            "that belongs to the board's SDK."
        ) from exc
    if len(header) < _HEADER_LEN or not header.startswith(_ELF_MAGIC):
        raise LibraryMissing(
            f"{path} is not a shared library (no ELF header). Copy {wanted} again; a download "
            "through git may have left a pointer file in its place."
        )
    (sections,) = struct.unpack_from("<Q", header, _SECTIONS_AT)
    entry_len, entries = struct.unpack_from("<HH", header, _SECTION_COUNT_AT)
    (machine,) = struct.unpack_from("<H", header, _MACHINE_AT)
    name = _MACHINES.get(machine, f"machine {machine}")
    if name != platform.machine() or header[4] != _ELF_64_BIT:
        raise LibraryMissing(
            f"{path} is for {name}, and this machine is {platform.machine()}. Use the library of "
            "the SDK's directory for this machine."
        )
    if sections + entry_len * entries > size:
        # Loading it would end the process by SIGBUS rather than with an error.
        raise LibraryMissing(
            f"{path} is cut short: it has {size} bytes and its header promises at least "
            f"{sections + entry_len * entries}. Copy {wanted} again."
        )


def _fix(words: str, path: Path) -> str:
    for needed, package in (("libgomp", "libgomp1"), ("libomp", "libomp5")):
        if needed in words:
            return (
                f"Install the package {package}, which holds {needed} (apt-get install {package})."
            )
    return f"Run `ldd {path}` to see which of the libraries that it needs is not there."
