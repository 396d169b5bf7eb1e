"""Which release a ``librkllmrt.so`` is, found out before anything is asked of it.

The library has no version call, and a wrong guess corrupts memory. So two independent findings
must agree: the version string in its bytes, and how it lays out the default parameters. Users
never configure a release. It knows nothing of handles and models.
"""

from __future__ import annotations

import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkserve.core.errors import ReleaseRefused
from rkserve.native.binding.library import open_library
from rkserve.native.decl.rkllm_detect import ffi
from rkserve.native.releases import ACCEPTED, Abi

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
class Findings:
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


def examine(path: Path) -> Findings:
    """Look at the library; it is opened for that, and asked for its default parameters only."""
    library = open_library(ffi, path)
    missing = tuple(symbol for symbol in SYMBOLS if not _exports(library, symbol))
    abi = None
    if SYMBOLS[0] not in missing:
        defaults = library.rkllm_createDefaultParam()  # named: its bytes live as long as it does
        abi = layout_of(bytes(ffi.buffer(defaults.bytes)))
    return Findings(versions_in(path), abi, missing)


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


def judge(path: Path, findings: Findings) -> Detected:
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
