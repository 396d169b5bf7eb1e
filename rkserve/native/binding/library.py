"""Opening a shared library so that a failure tells the person at the board what to do.

It knows ELF headers and the dynamic loader's words. Which release a library is, and what its
functions mean, is for ``detect`` and ``binding``.
"""

from __future__ import annotations

import mmap
import platform
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkserve.core.errors import LibraryMissing, ReleaseRefused
from rkserve.native.decl.rkllm_detect import ffi
from rkserve.native.releases import ACCEPTED, Abi

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


# The suffix matters: 1.2.1b1 has another layout than 1.2.1.
_VERSION = re.compile(rb"RKLLM SDK \(version:\s*(\d{1,9}\.\d{1,9}\.\d{1,9}[0-9A-Za-z.+~-]{0,40})")

SYMBOLS = (
    "rkllm_createDefaultParam",
    "rkllm_init",
    "rkllm_load_lora",
    "rkllm_load_prompt_cache",
    "rkllm_release_prompt_cache",
    "rkllm_destroy",
    "rkllm_run",
    "rkllm_run_async",
    "rkllm_abort",
    "rkllm_is_running",
    "rkllm_clear_kv_cache",
    "rkllm_get_kv_cache_size",
    "rkllm_set_chat_template",
    "rkllm_set_function_tools",
    "rkllm_set_cross_attn_params",
)

# Of the oversized parameters that are asked for, see the header, every byte that is looked at lies
# within the parameters of both interfaces.
_EXTEND_AT = {Abi.V1_2: 88, Abi.V1_3: 60}
# base_domain_id, embed_flash, enabled_cpus_num, enabled_cpus_mask, n_batch, use_cross_attn
_EXTEND = struct.Struct("<ibb2xIBb")
_MAX_CPUS = 8
_MAX_DOMAIN = 15


@dataclass(frozen=True, slots=True)
class LibraryFindings:
    """What a library shows of itself: its version strings, its layout, functions it lacks."""

    versions: tuple[str, ...]
    abi: Abi | None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Detected:
    """An accepted release and its binary interface."""

    release: str
    abi: Abi


def detect(path: Path) -> Detected:
    """Find out the release of the library at ``path``.

    Raises:
        LibraryMissing: it cannot be opened.
        ReleaseRefused: it is of no accepted release, or its string and its layout disagree.
    """
    return judge(path, examine(path))


def examine(path: Path) -> LibraryFindings:
    """Look at the library; it is opened for that, and asked for its default parameters only."""
    library = open_library(ffi, path)
    missing = tuple(symbol for symbol in SYMBOLS if not _exports(library, symbol))
    abi = None
    if SYMBOLS[0] not in missing:
        defaults = library.rkllm_createDefaultParam()  # named: its bytes live as long as it does
        abi = layout_of(bytes(ffi.buffer(defaults.bytes)))
    return LibraryFindings(versions_in(path), abi, missing)


def _exports(library: Any, symbol: str) -> bool:
    try:
        getattr(library, symbol)
    except ffi.error:
        return False
    return True


def versions_in(path: Path) -> tuple[str, ...]:
    """Return the distinct versions that the file's bytes name, sorted."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return tuple(sorted({found.decode() for found in _VERSION.findall(data)}))


def layout_of(defaults: bytes) -> Abi | None:
    """Tell from default parameters which interface laid them out; None where that is not clear."""
    fits = [abi for abi in Abi if _fits(defaults, abi, strict=False)]
    if len(fits) > 1:
        # At one of the two places lie the bytes of pointers, which may look like anything.
        fits = [abi for abi in fits if _fits(defaults, abi, strict=True)]
    return fits[0] if len(fits) == 1 else None


def _fits(defaults: bytes, abi: Abi, *, strict: bool) -> bool:
    domain, flash, cpus, mask, batch, cross = _EXTEND.unpack_from(defaults, _EXTEND_AT[abi])
    plausible = 1 <= cpus <= _MAX_CPUS and mask != 0 and batch == 1
    if not strict:
        return bool(plausible)
    return bool(plausible and 0 <= domain <= _MAX_DOMAIN and flash in (0, 1) and cross in (0, 1))


def judge(path: Path, findings: LibraryFindings) -> Detected:
    """Return the release where both findings agree on an accepted one.

    Raises:
        ReleaseRefused: they do not; the message holds both, and the releases that are accepted.
    """
    versions, abi = findings.versions, findings.abi
    if len(versions) == 1 and not findings.missing:
        expected = ACCEPTED.get(versions[0])
        if expected is not None and expected is abi:
            return Detected(versions[0], expected)
    named = f"the version {' and '.join(versions)}" if versions else "no version"
    laid_out = f"those of RKLLM {abi.value}" if abi else "those of no known release"
    lacks = f" It lacks {', '.join(findings.missing)}." if findings.missing else ""
    raise ReleaseRefused(
        f"{path} is refused: its version string names {named}, and its default parameters are laid "
        f"out as {laid_out}; the two must agree.{lacks} Accepted are exactly "
        f"{', '.join(ACCEPTED)}.{_advice(versions)}"
    )


def _advice(versions: tuple[str, ...]) -> str:
    if any(re.search(r"\d(b|rc|a|-)", version) for version in versions):
        return " A beta is laid out differently from its release: install the release."
    if any(version not in ACCEPTED for version in versions):
        return " Any other release, such as 1.3.1, is accepted only once its header was read."
    return ""
