"""Vocabularies as GGUF metadata, and llama.cpp's own tokenizer for such a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import cffi

from rkserve.models.gguf_tokenizer import BLANK
from rkserve.native.library_file import llama_cpp_library
from rkserve.native.llama_cpp import LlamaLibrary
from rkserve.native.llama_cpp import ffi as declared
from tests.support.values.tiny_gguf import CHAT, write_gguf

UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
Pairs = dict[str, tuple[int, Any]]
# What a header has before llama.cpp looks at the vocabulary.
LLAMA: Pairs = {
    "general.architecture": (STRING, "llama"),
    "llama.context_length": (UINT32, 64),
    "llama.embedding_length": (UINT32, 32),
    "llama.block_count": (UINT32, 1),
    "llama.feed_forward_length": (UINT32, 32),
    "llama.attention.head_count": (UINT32, 4),
    "llama.attention.layer_norm_rms_epsilon": (FLOAT32, 1e-5),
}


def byte_pairs(pre: str, **more: tuple[int, Any]) -> Pairs:
    """Return the vocabulary of ``models/sim-chat``, split as ``pre`` says."""
    found = json.loads((CHAT / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary: dict[str, int] = found["model"]["vocab"]
    kinds = dict.fromkeys(vocabulary, NORMAL)
    for added in found["added_tokens"]:
        vocabulary[added["content"]] = added["id"]
        kinds[added["content"]] = CONTROL if added["special"] else USER_DEFINED
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [one if isinstance(one, str) else " ".join(one) for one in found["model"]["merges"]]
    return LLAMA | {
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, pre),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, [kinds[one] for one in tokens])),
        "tokenizer.ggml.merges": (ARRAY, (STRING, merges)),
        "tokenizer.ggml.bos_token_id": (UINT32, vocabulary["<|endoftext|>"]),
        "tokenizer.ggml.eos_token_id": (UINT32, vocabulary["<|im_end|>"]),
        **_keyed(more),
    }


def sentence_pieces(kind: str = "llama", /, **more: tuple[int, Any]) -> Pairs:
    """Return a vocabulary of pieces: those of ``models/sim-chat`` that are text, runs of blanks and
    of line ends, and all bytes. A piece's score falls with its rank.
    """
    special = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL}
    bytes_ = {f"<0x{byte:02X}>": BYTE for byte in range(256)}
    marks = {
        "<start_of_turn>": CONTROL,
        "<end_of_turn>": CONTROL,
        "<|endoftext|>": CONTROL,
        "<tag>": USER_DEFINED,
    }
    runs = {mark * n: NORMAL for mark in (BLANK, "\n") for n in range(1, 9)}
    pieces = dict.fromkeys(_texts_of_byte_pairs(), NORMAL)
    kinds = {**special, **bytes_, **marks, **runs, **pieces}
    tokens = list(kinds)
    merges = [
        f"{one[:at]} {one[at:]}"
        for one in tokens
        for at in range(1, len(one))
        if kinds[one] == NORMAL and one[:at] in kinds and one[at:] in kinds
    ]
    return LLAMA | {
        "tokenizer.ggml.model": (STRING, kind),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, tokens)),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, list(kinds.values()))),
        "tokenizer.ggml.scores": (ARRAY, (FLOAT32, [-float(n) for n in range(len(tokens))])),
        "tokenizer.ggml.merges": (ARRAY, (STRING, merges)),
        "tokenizer.ggml.bos_token_id": (UINT32, 1),
        "tokenizer.ggml.eos_token_id": (UINT32, 2),
        "tokenizer.ggml.unknown_token_id": (UINT32, 0),
        **_keyed(more),
    }


def _keyed(more: Mapping[str, tuple[int, Any]]) -> Pairs:
    return {f"tokenizer.ggml.{name}": pair for name, pair in more.items()}


def _texts_of_byte_pairs() -> Iterable[str]:
    found = json.loads((CHAT / "tokenizer.json").read_text(encoding="utf-8"))
    for token in found["model"]["vocab"]:
        text = token.replace("\u0120", BLANK)
        if text.isascii() or text.removeprefix(BLANK).isascii():
            yield text
    yield from "\u00e9\u00df\u4e2d\u6587\u041f\u0440\u0438"


def metadata_of(pairs: Pairs) -> dict[str, Any]:
    """Return the values of pairs as a reader gives them."""
    return {key: value[1] if kind == ARRAY else value for key, (kind, value) in pairs.items()}


class LlamaVocabulary:
    """llama.cpp's tokenizer of one file without tensors."""

    def __init__(self, path: Path, pairs: Pairs | None = None) -> None:
        if pairs is not None:
            write_gguf(path, pairs, {})
        self._library = LlamaLibrary(llama_cpp_library())
        lib = self._library.lib
        params = self._library.model_params()
        params.vocab_only = True
        model = lib.llama_model_load_from_file(str(path).encode(), params)
        assert model != declared.NULL, self._library.errors()
        self._size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
        self._is_end, self._vocab = lib.llama_vocab_is_eog, lib.llama_model_get_vocab(model)
        self._ffi: Any = cffi.FFI()
        self._ffi.cdef(
            "int32_t llama_tokenize(const void *vocab, const char *text, int32_t length,"
            " int32_t *tokens, int32_t most, bool add_special, bool parse_special);"
        )
        self._lib: Any = self._ffi.dlopen(str(llama_cpp_library()))

    def encode(self, text: str) -> list[int]:
        """Return the ids of a whole text, in which control tokens are what they say."""
        raw = text.encode()
        most = len(raw) + 8
        ids = self._ffi.new("int32_t[]", most)
        vocab = self._ffi.cast("void *", int(declared.cast("intptr_t", self._vocab)))
        count = self._lib.llama_tokenize(vocab, raw, len(raw), ids, most, True, True)
        assert count >= 0, f"{text!r} has {-count} tokens"
        return list(ids[0:count])

    def ends(self) -> set[int]:
        """Return the ids that end an answer."""
        return {i for i in range(self._size) if self._is_end(self._vocab, i)}
