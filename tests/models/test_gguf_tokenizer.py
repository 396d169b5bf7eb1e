"""Tokenizers of GGUF files: the ids of llama.cpp for every way of splitting, and refusals."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rkserve.models.files import read_vocabulary
from rkserve.models.gguf_tokenizer import (
    EXPRESSIONS,
    UnknownTokenizer,
    eos_token_ids,
    tokenizer_json,
)
from tests.support.values.gguf_vocabularies import (
    ARRAY,
    BOOL,
    CONTROL,
    INT32,
    STRING,
    UINT32,
    LlamaVocabulary,
    Pairs,
    byte_pairs,
    metadata_of,
    sentence_pieces,
)

pytestmark = pytest.mark.engine
TEXTS = (
    "",
    " ",
    "The quick brown fox doesn't jump; IT'S 12345678 o'clock, they'LL say.",
    "def f(x: int):\n\tif x >= 10 and x != 99:\n        return f'{x:>08}'\n\n\n    #  end\r\n",
    "$_a->b['c'] = \"d\\n\" . 'e'; // === /* ~!@#$%^&*()_+`-=[]{}|;:,.<>?/ */",
    "3.14159 1,000,000 0x1F 10e-5 ١٢٣ १२३ Ⅳ ½ ²",
    "中文字符\uff0c标点。日本語のテキスト、カタカナー 한국어 텍스트 ไทย हिन्दी",
    "Привет, МИР! Ελληνικά ΑΒΓ עברית العربية",
    "e\u0301a\u0308 \u00e9\u00e4 \u0300 \ufb01 \u01c4 \u02b0 \u017f",
    "😀👨\u200d👩\u200d👧 🏳\ufe0f\u200d🌈 \U0001d54f \U00010400",
    "\u00a0\u2003\u3000\u2028\u200b\ufeff\u0001\u007f\u2581 \u2581\u2581",
    "a\n\n\nb \n \n\tc  \r\n\r\nd\t\t e   f        g                    h",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n</think> <|endoftext|>",
    "<s>a</s> <start_of_turn>b<end_of_turn><tag>c</tag> <unk> <0x41> [INST]",
    "camelCaseHTTPServer XMLHttpRequest iPhone ABCdefGHI éÉÈè",
    "'s'S't'T're'RE've'VE'm'M'll'LL'd'D 's 'S",
)
PARTS = (
    *(" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2028", "\u200b"),
    *("a", "b", "The", " the", "HTTP", "camelCase", "don't", "'S", "'ll", "1", "123", "99999"),
    *("3.14", "é", "e\u0301", "ß", "\u017f", "Привет", "中文", "カタカナ", "한국어", "😀"),
    *("<|im_start|>", "</s>", "<tag>", "//", "==", "{", "();", "->", "_x", "$", "€", "٣", "Ⅳ"),
    *("½", "\ufeff", "\x01", "ﬁ", "ʰ", "…", "—", '"', "`", "~", "∑", "हिन्दी", "עברית", "\u2581"),
)


def texts(seed: str) -> list[str]:
    """Return the texts above, and some that are put together at random, by a seed."""
    chance = random.Random(seed)
    made = ("".join(chance.choices(PARTS, k=chance.randint(1, 20))) for _ in range(80))
    return [*TEXTS, *made]


def agree(pairs: Pairs, path: Path, seed: str) -> None:
    """Check that a vocabulary's tokenizer makes llama.cpp's ids, and knows its ends."""
    metadata = metadata_of(pairs)
    ours = Tokenizer.from_str(json.dumps(tokenizer_json(metadata)))
    theirs = LlamaVocabulary(path, pairs)
    for text in texts(seed):
        assert ours.encode(text).ids == theirs.encode(text), repr(text)
    assert set(eos_token_ids(metadata)) == theirs.ends()


@pytest.mark.parametrize("pre", EXPRESSIONS)
def test_byte_pairs_are_split_and_merged_as_llama_cpp_does(pre: str, tmp_path: Path) -> None:
    agree(byte_pairs(pre), tmp_path / "v.gguf", pre)


@pytest.mark.parametrize("prefix", [True, False], ids=["with a blank before", "without"])
def test_sentence_pieces_are_merged_by_their_scores(prefix: bool, tmp_path: Path) -> None:
    agree(sentence_pieces(add_space_prefix=(BOOL, prefix)), tmp_path / "v.gguf", "pieces")


def test_gemma_4_merges_pieces(tmp_path: Path) -> None:
    agree(sentence_pieces("gemma4"), tmp_path / "v.gguf", "gemma4")


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_a_whole_text_gets_the_ends_that_the_metadata_names(
    bos: bool, eos: bool, tmp_path: Path
) -> None:
    more = {"add_bos_token": (BOOL, bos), "add_eos_token": (BOOL, eos)}
    agree(byte_pairs("qwen2", **more), tmp_path / "b.gguf", "ends")
    agree(sentence_pieces(**more), tmp_path / "s.gguf", "ends")


def test_blanks_behind_control_tokens_belong_to_them_in_phi_3(tmp_path: Path) -> None:
    pairs = {**sentence_pieces(), "general.name": (STRING, "Phi-3 mini")}
    ours = Tokenizer.from_str(json.dumps(tokenizer_json(metadata_of(pairs))))
    text = "</s> \n a<end_of_turn>  b<s> c"
    assert ours.encode(text).ids == LlamaVocabulary(tmp_path / "v.gguf", pairs).encode(text)


@pytest.mark.parametrize("pairs", [byte_pairs("qwen2"), sentence_pieces()], ids=["bytes", "pieces"])
def test_texts_come_back_from_their_ids(pairs: Pairs, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(tokenizer_json(metadata_of(pairs))), encoding="utf-8")
    tokenizer, vocabulary = Tokenizer.from_file(str(file)), read_vocabulary(file)
    for text in TEXTS[2:9]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.decode(ids) == text.replace("\u2581", " ")
        assert b"".join(map(vocabulary.bytes_of, ids)).decode().strip() == text.strip()


def test_ends_are_found_by_their_names() -> None:
    tokens = ["a", "<|im_end|>", "b", "<|endoftext|>", "<|fim_pad|>", "<|end|>"]
    metadata: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eos_token_id": 2}
    assert eos_token_ids(metadata) == (2, 1, 3, 5, 4)
    metadata["tokenizer.ggml.tokens"] = [*tokens, "<|return|>", "<|call|>"]
    assert eos_token_ids(metadata) == (2, 1, 3, 6, 7, 4), "<|end|> is inside of such answers"


def changed(pairs: Pairs, **more: Any) -> dict[str, Any]:
    metadata = metadata_of(pairs)
    for name, value in more.items():
        metadata[f"tokenizer.ggml.{name}"] = value
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        pytest.param({}, "the file has no tokenizer", id="none"),
        pytest.param(
            changed(byte_pairs("qwen2"), model="bert"), "of the kind 'bert'", id="word pieces"
        ),
        pytest.param(
            changed(byte_pairs("qwen2"), pre="kimi-k2"),
            "the pre-tokenizer 'kimi-k2'",
            id="a way of splitting that is not known",
        ),
        pytest.param(changed(byte_pairs("qwen2"), merges=None), "has no merges", id="no merges"),
        pytest.param(changed(sentence_pieces(), scores=[1.0]), "too few", id="no scores"),
        pytest.param(changed(byte_pairs("qwen2"), tokens=["a", "a"]), "token twice", id="twice"),
        pytest.param(changed(byte_pairs("qwen2"), tokens=7), "no list of tokens", id="no tokens"),
        pytest.param(
            changed(byte_pairs("qwen2"), add_bos_token=True, bos_token_id=1 << 30),
            "tokenizer.ggml.bos_token_id is not",
            id="a BOS that is not there",
        ),
    ],
)
def test_what_is_not_known_is_refused_by_name(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(UnknownTokenizer, match=words):
        tokenizer_json(metadata)


def test_a_client_cannot_merge_text_to_a_control_token() -> None:
    kinds = {"<unk>": 2, "<": 1, "s": 1, ">": 1, "s>": 1, "<s>": CONTROL, "<0x41>": 6}
    pairs: Pairs = sentence_pieces() | {
        "tokenizer.ggml.tokens": (ARRAY, (STRING, list(kinds))),
        "tokenizer.ggml.token_type": (ARRAY, (INT32, list(kinds.values()))),
        "tokenizer.ggml.bos_token_id": (UINT32, 5),
    }
    merges = tokenizer_json(metadata_of(pairs))["model"]["merges"]
    assert [*merges] == [("s", ">")]
