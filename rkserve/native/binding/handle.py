"""One handle of an opened library: init, destroy, and calls that return a code.

The users of a handle check states, runs and arguments. A Python function that C calls stores its
exception by ``note`` and returns an error code: nothing may unwind through a C frame.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rkserve.core.errors import CallFailed, LoadFailed, NativeError
from rkserve.native.binding.library import open_library
from rkserve.native.binding.releases import CallbackPointers, RuntimeRelease
from rkserve.native.runtime import Embed, LoadParams, Tokenize

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
        traceback: Any,  # noqa: ARG002
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
