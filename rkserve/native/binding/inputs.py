"""The inputs of a run as C structs: ids, text, embeddings, images, videos.

All memory that C reads is appended to a ``keep`` list, whose owner keeps it alive. Sizes are
checked beforehand in ``preconditions``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from rkserve.core.errors import Misuse
from rkserve.native.runtime import EmbedInput, MultimodalInput, PromptInput, RunInput, TokenInput

PutMedia = Callable[[Any, MultimodalInput, "list[Any]"], None]


def make_inputs(
    ffi: Any, library: Any, inputs: Sequence[RunInput], keep: list[Any], put_media: PutMedia
) -> Any:
    """Return the input array of one run."""
    entries = ffi.new("RKLLMInput[]", len(inputs))
    keep.append(entries)
    for place, given in enumerate(inputs):
        entry = entries[place]
        if isinstance(given, (PromptInput, MultimodalInput)):
            entry.role = c_string(ffi, given.role, keep)
            entry.enable_thinking = given.enable_thinking
        else:
            entry.role = c_string(ffi, "user", keep)
        if isinstance(given, MultimodalInput):
            entry.input_type = library.RKLLM_INPUT_MULTIMODAL
            entry.multimodal_input.prompt = c_string(ffi, given.text, keep)
            put_media(entry.multimodal_input, given, keep)
        else:
            _put_plain(ffi, library, entry, given, keep)
    return entries


def _put_plain(
    ffi: Any,
    library: Any,
    entry: Any,
    given: PromptInput | EmbedInput | TokenInput,
    keep: list[Any],
) -> None:
    if isinstance(given, PromptInput):
        entry.input_type = library.RKLLM_INPUT_PROMPT
        entry.prompt_input = c_string(ffi, given.text, keep)
    elif isinstance(given, EmbedInput):
        entry.input_type = library.RKLLM_INPUT_EMBED
        entry.embed_input.embed = c_floats(ffi, given.data, keep)
        entry.embed_input.n_tokens = given.n_tokens
    else:
        ids = ffi.new("int32_t[]", given.ids)
        keep.append(ids)
        entry.input_type = library.RKLLM_INPUT_TOKEN
        entry.token_input.input_ids = ids
        entry.token_input.n_tokens = len(given.ids)


def c_string(ffi: Any, text: str, keep: list[Any]) -> Any:
    """Return ``text`` as a C string. Raises ``Misuse`` for NUL and for invalid Unicode."""
    if "\0" in text:
        raise Misuse("the text contains a NUL character, at which the library would truncate it")
    try:
        value = ffi.new("char[]", text.encode())
    except UnicodeEncodeError as exc:
        raise Misuse(f"the text is not valid Unicode: {exc.reason}") from exc
    keep.append(value)
    return value


def c_path(ffi: Any, path: str, keep: list[Any]) -> Any:
    """Return a path as a C string, which need not be Unicode. Raises ``Misuse``."""
    try:
        raw = os.fsencode(path)
    except UnicodeEncodeError as exc:
        raise Misuse(f"{path!r} is not a path: {exc.reason}") from exc
    if not raw or b"\0" in raw:
        raise Misuse(f"{path!r} is empty or contains a NUL character")
    value = ffi.new("char[]", raw)
    keep.append(value)
    return value


def c_floats(ffi: Any, data: bytes, keep: list[Any]) -> Any:
    """Return raw float32 bytes as a C array, without a copy."""
    return _view(ffi, "float[]", data, keep)


def c_ints(ffi: Any, data: bytes, keep: list[Any]) -> Any:
    """Return raw int32 bytes as a C array, without a copy."""
    return _view(ffi, "int32_t[]", data, keep)


def _view(ffi: Any, ctype: str, data: bytes, keep: list[Any]) -> Any:
    view = ffi.from_buffer(ctype, data)  # keeps the bytes alive
    keep.append(view)
    return view
