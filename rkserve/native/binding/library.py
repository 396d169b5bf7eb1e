"""A shared library, its release if it is a ``librkllmrt.so``, and one handle of it.

An error names the fix, because the operator at the board reads it. The runtime has no version call,
and a wrong release corrupts memory: two independent findings must agree, the version string in the
file and the layout of the default parameters. A release is never configured by the user.

The users of a handle check states, runs and arguments. A Python function that C calls stores its
exception by ``note`` and returns an error code: nothing may unwind through a C frame.
"""

from __future__ import annotations

import platform
import re
import resource
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rkserve.core.errors import CallFailed, LibraryMissing, LoadFailed, NativeError, ReleaseRefused
from rkserve.native.binding.releases import (
    RELEASES,
    CallbackPointers,
    RuntimeRelease,
    unlisted,
)
from rkserve.native.decl.rkllm_detect import ffi
from rkserve.native.library_file import read_header, versions_in
from rkserve.native.runtime import Embed, LoadParams, Tokenize


def open_library(ffi: Any, path: Path, name: str = "librkllmrt.so") -> Any:
    """Open the library at ``path`` with the declarations of ``ffi``; ``name`` is for messages.

    Raises:
        LibraryMissing: the file is missing, is for another machine, or cannot be loaded; the
            message has the loader's text and the fix.
    """
    _check_header(path, name)
    try:
        return ffi.dlopen(str(path.absolute()))
    except OSError as exc:
        words = str(exc).partition(".  Additionally")[0]  # cffi adds a remark on search paths
        raise LibraryMissing(f"{path} cannot be loaded: {words}. {_fix(words, path)}") from exc


def _check_header(path: Path, wanted: str) -> None:
    try:
        header = read_header(path)
    except OSError as exc:
        raise LibraryMissing(
            f"{path} cannot be read: {exc.strerror}. Set the library's path to the {wanted} "
            "that belongs to the board's SDK."
        ) from exc
    if header is None:
        raise LibraryMissing(
            f"{path} is not a shared library (no ELF header). Copy {wanted} again; a download "
            "through git may have left a pointer file in its place."
        )
    if header.machine != platform.machine() or not header.is_64_bit:
        raise LibraryMissing(
            f"{path} is for {header.machine}, and this machine is {platform.machine()}. Use the "
            "library of the SDK's directory for this machine."
        )
    if header.cut_short:
        # Loading it would end the process by SIGBUS rather than with an error.
        raise LibraryMissing(
            f"{path} is cut short: it has {header.size_bytes} bytes and its header promises at "
            f"least {header.promised_bytes}. Copy {wanted} again."
        )


def _fix(words: str, path: Path) -> str:
    for needed, package in (("libgomp", "libgomp1"), ("libomp", "libomp5")):
        if needed in words:
            return (
                f"Install the package {package}, which holds {needed} (apt-get install {package})."
            )
    return f"Run `ldd {path}` to see which of the libraries that it needs is not there."


_DEFAULTS = "rkllm_createDefaultParam"
# The offsets of ``extend_param``. The default parameters are read into a struct that is larger than
# those of any release (see the header), so that both places lie within it.
_OFFSETS = tuple(dict.fromkeys(one.extend_param_offset for one in RELEASES.values()))
# base_domain_id, embed_flash, enabled_cpus_num, enabled_cpus_mask, n_batch, use_cross_attn
_EXTEND = struct.Struct("<ibb2xIBb")
_MAX_CPUS = 8
_MAX_DOMAIN = 15


@dataclass(frozen=True, slots=True)
class LibraryFindings:
    """The version strings of a library, its offset of ``extend_param``, and missing functions."""

    versions: tuple[str, ...]
    extend_param_offset: int | None
    missing: tuple[str, ...] = ()


def detect(path: Path, *, allow_unlisted: bool = False) -> RuntimeRelease:
    """Return the release of the library at ``path``.

    With ``allow_unlisted`` that may be a later one, which is driven as the listed release whose
    layout it has; the caller tries it in a process that may be lost.

    Raises:
        LibraryMissing: the library cannot be opened.
        ReleaseRefused: the release is not accepted, or version string and layout disagree.
    """
    return judge(path, examine(path), allow_unlisted=allow_unlisted)


def examine(path: Path) -> LibraryFindings:
    """Open the library and read its default parameters; no other function of it is called."""
    library = open_library(ffi, path)
    versions, offset = versions_in(path), None
    if _exports(library, ffi, _DEFAULTS):
        defaults = library.rkllm_createDefaultParam()  # a named local keeps its bytes alive
        offset = extend_param_offset(bytes(ffi.buffer(defaults.bytes)))
    known = _release_of(versions, offset)
    return LibraryFindings(versions, offset, _missing(path, ffi if known is None else known.ffi))


def _release_of(versions: tuple[str, ...], offset: int | None) -> RuntimeRelease | None:
    """Return the listed release of a version string, or an unlisted one by the layout."""
    if len(versions) != 1:
        return None
    return RELEASES.get(versions[0]) or unlisted(versions[0], offset)


def _missing(path: Path, declarations: Any) -> tuple[str, ...]:
    library = open_library(declarations, path)
    return tuple(name for name in dir(library) if not _exports(library, declarations, name))


def _exports(library: Any, declarations: Any, name: str) -> bool:
    try:
        getattr(library, name)
    except declarations.error:
        return False
    return True


def extend_param_offset(defaults: bytes) -> int | None:
    """Return the offset of ``extend_param`` in default parameters; None where it is ambiguous."""
    fits = [offset for offset in _OFFSETS if _fits(defaults, offset, strict=False)]
    if len(fits) > 1:
        # One of the places holds the bytes of pointers, which may look like anything.
        fits = [offset for offset in fits if _fits(defaults, offset, strict=True)]
    return fits[0] if len(fits) == 1 else None


def _fits(defaults: bytes, offset: int, *, strict: bool) -> bool:
    domain, flash, cpus, mask, batch, cross = _EXTEND.unpack_from(defaults, offset)
    plausible = 1 <= cpus <= _MAX_CPUS and mask != 0 and batch == 1
    if not strict:
        return bool(plausible)
    return bool(plausible and 0 <= domain <= _MAX_DOMAIN and flash in (0, 1) and cross in (0, 1))


def judge(path: Path, findings: LibraryFindings, *, allow_unlisted: bool = False) -> RuntimeRelease:
    """Return the accepted release on which version string and layout agree.

    Raises:
        ReleaseRefused: they disagree; the message has both findings and the accepted releases.
    """
    versions, offset = findings.versions, findings.extend_param_offset
    release = _release_of(versions, offset)
    agreed = release is not None and release.extend_param_offset == offset and not findings.missing
    if release is not None and agreed and (release.listed or allow_unlisted):
        return release
    named = " and ".join(versions) or "no version"
    alike = ", ".join(one.version for one in RELEASES.values() if one.extend_param_offset == offset)
    lacks = f" Missing functions: {', '.join(findings.missing)}." if findings.missing else ""
    raise ReleaseRefused(
        f"{path} is refused: its version string is {named}, and the layout of its default "
        f"parameters is that of {alike or 'no known release'}; the two must agree.{lacks} Accepted "
        f"releases: {', '.join(RELEASES)}.{_advice(versions)}"
        f"{_UNLISTED if agreed else ''}"
    )


def _advice(versions: tuple[str, ...]) -> str:
    if any(re.search(r"\d(b|rc|a|-)", version) for version in versions):
        return " The layout of a beta differs from that of its release: install the release."
    if any(version not in RELEASES for version in versions):
        return " Another release is accepted only after its header was read."
    return ""


_UNLISTED = (
    " This one is later and has a known layout: allow_unlisted tries it in a process of its own "
    "first, and drives it as that release."
)
_REFUSED = -1


class ModelCallbacks:
    """The tokenizer and embedding callbacks of one load; they never overrun C's buffers."""

    def __init__(
        self,
        ffi: Any,
        note: Callable[[BaseException], None],
        tokenize: Tokenize | None,
        embed: Embed | None,
    ) -> None:
        self._ffi, self._note = ffi, note
        self._tokenize, self._embed = tokenize, embed

    @property
    def tokenize(self) -> Any:
        """The C function of the tokenizer; NULL without one."""
        return self._c("LLMTokenizerCallback", self._on_tokenize, self._tokenize)

    @property
    def embed(self) -> Any:
        """The C function of the embedding layer; NULL without one."""
        return self._c("LLMGetEmbedCallback", self._on_embed, self._embed)

    def _c(self, ctype: str, function: Callable[..., int], wanted: object) -> Any:
        if wanted is None:
            return self._ffi.NULL
        return self._ffi.callback(ctype, function, error=_REFUSED, onerror=self._on_escape)

    def _on_tokenize(self, _userdata: Any, text: Any, length: int, tokens: Any, room: int) -> int:
        assert self._tokenize is not None
        ids = self._tokenize(self._ffi.unpack(text, length).decode())
        if len(ids) > room:
            raise NativeError(f"the tokenizer returned {len(ids)} ids; the library takes {room}")
        tokens[0 : len(ids)] = ids
        return len(ids)

    def _on_embed(self, _userdata: Any, tokens: Any, count: int, target: Any, room: int) -> int:
        assert self._embed is not None
        rows = self._embed(tuple(self._ffi.unpack(tokens, count)))
        if len(rows) != room:
            raise NativeError(
                f"the embeddings of {count} ids are {len(rows)} bytes; the library takes {room}"
            )
        self._ffi.memmove(target, rows, room)
        return 0

    def _on_escape(
        self,
        kind: Any,  # noqa: ARG002 - cffi's signature
        exc: BaseException,
        traceback: Any,  # noqa: ARG002 - cffi's signature
    ) -> None:
        self._note(exc)


# The runtime takes one descriptor per buffer; the vendor's demo sets this limit.
_OPEN_FILES = 102_400

# Concurrent inits are undefined behaviour, even of two handles.
_INIT_LOCK = threading.Lock()


class Handle:
    """A pointer that is NULL before ``init`` and after ``destroy``."""

    def __init__(self, path: Path, release: RuntimeRelease) -> None:
        self.release = release
        self.ffi: Any = release.ffi
        self.lib = open_library(self.ffi, path)
        self.pointer = self.ffi.NULL
        self.keep: list[Any] = []  # objects that the library uses until destroy
        # Held during is_running, and while the pointer is cleared for destroy.
        self._peek_lock = threading.Lock()

    def init(self, params: LoadParams, callbacks: CallbackPointers) -> None:
        """Create the handle. After ``LoadFailed`` it must not be used again.

        Raises:
            OverflowError, TypeError: a parameter does not fit; the library was not called.
        """
        keep: list[Any] = []
        pointer = self.ffi.new("LLMHandle *")
        with _INIT_LOCK:
            raise_file_limit()
            param = self.release.init_params(self.lib, params, keep)
            code = self.release.init(self.lib, pointer, param, callbacks, keep)
        if code != 0 or pointer[0] == self.ffi.NULL:
            raise LoadFailed(_init_failure(params.model_path, code))
        self.keep, self.pointer = keep, pointer[0]

    def call(self, function: str, *args: Any) -> None:
        """Call ``function`` of the library on the handle. Raises ``CallFailed``."""
        code = getattr(self.lib, function)(self.pointer, *args)
        if code != 0:
            raise CallFailed(function, code)

    def kv_sizes(self, n_batch: int) -> tuple[int, ...]:
        """Return the positions in each entry's KV cache. Raises ``CallFailed``."""
        sizes = self.ffi.new("int[]", n_batch)
        self.call("rkllm_get_kv_cache_size", sizes)
        return tuple(sizes)

    def is_running(self) -> bool:
        """Return the library's own report of a running run; False without a handle."""
        with self._peek_lock:
            if self.pointer == self.ffi.NULL:
                return False
            # The header of 1.2.x documents the opposite, wrongly.
            return bool(self.lib.rkllm_is_running(self.pointer) == 1)

    def destroy(self) -> None:
        """Free the handle. The pointer is cleared even if ``CallFailed`` is raised."""
        with self._peek_lock:
            pointer, self.pointer = self.pointer, self.ffi.NULL
        code = self.lib.rkllm_destroy(pointer)
        if code != 0:
            raise CallFailed("rkllm_destroy", code)
        self.keep = []


def raise_file_limit() -> None:
    """Raise the soft limit of open files towards what the library needs; never lower it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (file_limit(soft, hard), hard))


def file_limit(soft: int, hard: int) -> int:
    """Return the soft limit to set; -1 means no limit, as in ``resource``."""
    if soft == resource.RLIM_INFINITY:
        return soft
    return max(soft, _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES))


def _init_failure(model_path: str, code: int) -> str:
    if code == 0:
        return f"rkllm_init returned 0 but no handle for {model_path}"
    return f"rkllm_init returned {code} for {model_path}; see the library's lines in the log"
