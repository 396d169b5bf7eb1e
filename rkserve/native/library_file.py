"""A shared library as a file: its ELF header, and the releases named in it. Nothing is loaded.

It is read before the library is opened, because the loader ends the process on a file that is cut
short, and by checks that must not load a library into their own process.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from rkserve.core.errors import LibraryMissing

LLAMA_CPP = "xllamacpp"  # the wheel
LLAMA_CPP_RELEASE = "2026.10.11549"  # the one that the extra names
CPU_EXTRA = "pip install 'rkserve[cpu]'"

_ELF_MAGIC = b"\x7fELF"
_ELF_64_BIT = 2
# e_machine, by what uname calls it.
_MACHINES = {3: "i686", 40: "armv7l", 62: "x86_64", 183: "aarch64", 243: "riscv64"}
_HEADER_LEN = 64
# e_machine; and where the table of sections is, how long an entry, how many: it ends the file.
_MACHINE_AT, _SECTIONS_AT, _SECTION_COUNT_AT = 18, 40, 58
# The suffix matters: 1.2.1b1 has another layout than 1.2.1.
_VERSION = re.compile(rb"RKLLM SDK \(version:\s*(\d{1,9}\.\d{1,9}\.\d{1,9}[0-9A-Za-z.+~-]{0,40})")


@dataclass(frozen=True, slots=True)
class LibraryHeader:
    """The header of an ELF file. ``promised_bytes`` is the size that the file has at least."""

    machine: str
    is_64_bit: bool
    size_bytes: int
    promised_bytes: int

    @property
    def cut_short(self) -> bool:
        """True if the file ends before its last section."""
        return self.promised_bytes > self.size_bytes


def read_header(path: Path) -> LibraryHeader | None:
    """Return the header of a library, None for a file of another kind. Raises ``OSError``."""
    with path.open("rb") as file:
        header = file.read(_HEADER_LEN)
        size = file.seek(0, 2)
    if len(header) < _HEADER_LEN or not header.startswith(_ELF_MAGIC):
        return None
    (sections,) = struct.unpack_from("<Q", header, _SECTIONS_AT)
    entry_len, entries = struct.unpack_from("<HH", header, _SECTION_COUNT_AT)
    (machine,) = struct.unpack_from("<H", header, _MACHINE_AT)
    return LibraryHeader(
        machine=_MACHINES.get(machine, f"machine {machine}"),
        is_64_bit=header[4] == _ELF_64_BIT,
        size_bytes=size,
        promised_bytes=sections + entry_len * entries,
    )


def versions_in(path: Path) -> tuple[str, ...]:
    """Return the distinct versions in the file's bytes, sorted."""
    return tuple(sorted({found.decode() for found in search(path, _VERSION)}))


def search(path: Path, pattern: re.Pattern[bytes]) -> list[bytes]:
    """Return all matches of a pattern in the file's bytes. Raises ``OSError``, ``ValueError``."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return pattern.findall(data)


def llama_cpp_library() -> Path:
    """Return the file of llama.cpp's library in its wheel. Raises ``LibraryMissing``."""
    found = find_spec(LLAMA_CPP)
    for folder in (found.submodule_search_locations or ()) if found is not None else ():
        files = sorted(Path(folder).glob(f"{LLAMA_CPP}*.so"))
        if files:
            return files[0]
    raise LibraryMissing(
        f"llama.cpp is not installed: the wheel {LLAMA_CPP} is missing. Install it with "
        f"{CPU_EXTRA}."
    )


def llama_cpp_release() -> str:
    """Return the release of the wheel with llama.cpp, empty if it is not installed."""
    # Its imports, email and zipfile among them, would take a sixth of the time in which an engine
    # process imports everything.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(LLAMA_CPP)
    except PackageNotFoundError:
        return ""


def knows_architecture(library: Path, name: str) -> bool:
    """Return whether llama.cpp's library names an architecture of models. Raises ``OSError``."""
    return bool(search(library, re.compile(re.escape(name.encode()) + rb"\0")))
