"""The tokenizer and embedding callbacks of 1.3.0: Python functions that C calls for their values.

It knows the buffers of C and never writes past them. What a function raises is handed to ``note``
and C gets an error code: nothing may unwind through a C frame.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rkserve.core.errors import NativeError
from rkserve.native.runtime import Embed, Tokenize

_REFUSED = -1


class Hooks:
    """The two functions of one load, as C calls them."""

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
        """The tokenizer's C function; NULL without one."""
        return self._c("LLMTokenizerCallback", self._on_tokenize, self._tokenize)

    @property
    def embed(self) -> Any:
        """The embedding layer's C function; NULL without one."""
        return self._c("LLMGetEmbedCallback", self._on_embed, self._embed)

    def _c(self, ctype: str, function: Callable[..., int], wanted: object) -> Any:
        if wanted is None:
            return self._ffi.NULL
        return self._ffi.callback(ctype, function, error=_REFUSED, onerror=self._on_escape)

    def _on_tokenize(self, _userdata: Any, text: Any, length: int, tokens: Any, room: int) -> int:
        assert self._tokenize is not None
        ids = self._tokenize(self._ffi.unpack(text, length).decode())
        if len(ids) > room:
            raise NativeError(f"the tokenizer made {len(ids)} ids, and the library takes {room}")
        tokens[0 : len(ids)] = ids
        return len(ids)

    def _on_embed(self, _userdata: Any, tokens: Any, count: int, target: Any, room: int) -> int:
        assert self._embed is not None
        rows = self._embed(tuple(self._ffi.unpack(tokens, count)))
        if len(rows) != room:
            raise NativeError(
                f"the embeddings of {count} ids are {len(rows)} bytes, and the library expects "
                f"{room}"
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
