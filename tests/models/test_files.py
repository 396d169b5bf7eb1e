"""Tensor lists of trainers, whole or in shards, and the bytes of the tokens of a vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rkserve.core.errors import ConfigError, RequestError
from rkserve.models.files import (
    Parameter,
    adapter_flaw,
    read_parameters,
    read_vocabulary,
)
from rkserve.native.sim.models import render_adapter
from tests.support.paths import PROJECT

ADAPTER = render_adapter("tone", base="sim-chat", size=500)


@pytest.mark.parametrize(
    ("content", "flaw"),
    [
        pytest.param(ADAPTER, "", id="one of the model"),
        pytest.param(render_adapter("tone"), "", id="one of any model"),
        pytest.param(b"\x07RKLORA" * 100, "", id="of a form that is not known"),
        pytest.param(b"", "it is empty", id="nothing"),
        pytest.param(bytes(900), "nothing but zeros", id="zeros"),
        pytest.param(b"GGUF" + bytes(500), "a GGUF model", id="another format"),
        pytest.param(b"RKSIMLLM" + bytes(500), "a base model", id="a model"),
        pytest.param(b"<!doctype html>", "a page of HTML", id="a page"),
        pytest.param(ADAPTER[:-1], "of 500 bytes of which 499", id="cut"),
        pytest.param(ADAPTER[:100], "cut after 100 bytes", id="cut in its header"),
        pytest.param(ADAPTER[:-1] + b"x", "wrong checksum", id="a bit"),
        pytest.param(
            render_adapter("tone", base="qwen"), "the base model 'qwen', not 'sim-chat'", id="other"
        ),
    ],
)
def test_what_certainly_is_no_adapter_of_the_model_is_named(
    content: bytes, flaw: str, tmp_path: Path
) -> None:
    file = tmp_path / "adapter.rkllm"
    file.write_bytes(content)
    found = adapter_flaw(file, "sim-chat")
    assert flaw in found
    assert bool(flaw) is bool(found)


def shard(name: str, shape: list[int], of: object, dtype: str = "bfloat16") -> dict[str, Any]:
    return {"name": name, "shape": shape, "dtype": dtype, "shard": of}


@pytest.mark.parametrize(
    ("entries", "whole"),
    [
        pytest.param([([2, 8], 0), ([3, 8], 1)], (5, 8), id="by index"),
        pytest.param([([3, 8], 1), ([2, 8], 0)], (5, 8), id="in any order"),
        pytest.param(
            [([4, 2], {"index": n, "count": 3, "dim": 1}) for n in range(3)], (4, 6), id="along 1"
        ),
        pytest.param([([2], "1/2"), ([5], "2/2")], (7,), id="numbered"),
        pytest.param([([2], "00001-of-00002"), ([5], "00002-of-00002")], (7,), id="as files"),
        pytest.param([([2, 8], None)], (2, 8), id="none"),
        pytest.param([([2, 8], {"index": 0, "count": 1})], (2, 8), id="one of one"),
    ],
)
def test_shards_of_a_tensor_are_put_together(
    entries: list[tuple[list[int], object]], whole: tuple[int, ...]
) -> None:
    given = [shard("lm_head", shape, of) for shape, of in entries]
    assert read_parameters(given, "p") == (Parameter("lm_head", whole, "bfloat16"),)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        pytest.param([shard("w", [2], {"index": 0, "count": 3})], "1 of 3 shards", id="missing"),
        pytest.param([shard("w", [2], 1)], "shard 0 .* is missing", id="the first is missing"),
        pytest.param([shard("w", [2], 0), shard("w", [2], 0)], "in it twice", id="twice"),
        pytest.param([shard("w", [2], 0), shard("w", [2], None)], "in it twice", id="a whole one"),
        pytest.param([shard("w", [2, 3], 0), shard("w", [2, 4], 1)], "fit", id="other sizes"),
        pytest.param([shard("w", [2], 0), shard("w", [2], 1, "float32")], "fit", id="other dtype"),
        pytest.param([shard("w", [2], {"index": 0, "dim": 1})], "fit", id="no such dimension"),
        pytest.param([shard("w", [2], {"index": 3, "count": 3})], "shard", id="beyond"),
        pytest.param([shard("w", [2], {"index": 0, "rank": 1})], "shard", id="an unknown key"),
        pytest.param([shard("w", [2], "3/2")], "shard", id="a number too many"),
        pytest.param([shard("w", [2], -1)], "shard", id="below 0"),
        pytest.param([shard("w", [2], True)], "shard", id="a flag"),
        pytest.param([shard("w", [2], 10**400)], "shard", id="huge"),
        pytest.param([shard("w", [2], "x" * 10_000)], "shard", id="junk"),
        pytest.param([shard("w", [2], [0])], "shard", id="a list"),
    ],
)
def test_shards_that_make_no_whole_tensor_are_refused(given: list[Any], why: str) -> None:
    with pytest.raises(RequestError, match=why) as caught:
        read_parameters(given, "parameters_info")
    assert caught.value.param == "parameters_info"


def test_the_shards_of_a_whole_file_are_compared_with_its_length() -> None:
    parts = [shard("tone@v2", [size], of, "uint8") for size, of in ((4, "1/2"), (3, "2/2"))]
    found = read_parameters(parts, "parameters_info")
    assert found == (Parameter("tone@v2", (7,), "uint8"),)


SIM_CHAT = PROJECT / "models" / "sim-chat" / "tokenizer.json"


def written(place: Path, **found: Any) -> Path:
    file = place / "tokenizer.json"
    file.write_text(json.dumps(found))
    return file


@pytest.mark.parametrize("text", ["The sea.", "größer als 5 €", "日本語 \N{GRINNING FACE}\n\tx"])
def test_the_tokens_of_a_text_say_that_text(text: str) -> None:
    vocabulary = read_vocabulary(SIM_CHAT)
    ids = Tokenizer.from_file(str(SIM_CHAT)).encode(text).ids
    assert b"".join(vocabulary.bytes_of(token_id) for token_id in ids).decode() == text


def test_every_id_has_its_piece_and_markup_says_nothing() -> None:
    vocabulary = read_vocabulary(SIM_CHAT)
    assert len(vocabulary) == Tokenizer.from_file(str(SIM_CHAT)).get_vocab_size()
    assert None not in vocabulary.pieces
    ids = Tokenizer.from_file(str(SIM_CHAT)).get_vocab()
    end, think = ids["<|im_end|>"], ids["<think>"]
    assert (vocabulary.piece(end), vocabulary.bytes_of(end)) == (b"<|im_end|>", b"")
    assert vocabulary.bytes_of(think) == b"<think>"  # visible markup


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_an_id_beyond_the_vocabulary_says_nothing(token_id: int) -> None:
    vocabulary = read_vocabulary(SIM_CHAT)
    assert (vocabulary.piece(token_id), vocabulary.bytes_of(token_id)) == (b"", b"")


def test_sentencepiece_writes_blanks_and_bytes_in_its_own_way(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        model={"type": "BPE", "vocab": {"\u2581the": 0, "<0xE2>": 1, "ion": 2, "gap": 5}},
        decoder={"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]},
        added_tokens=[{"id": 6, "content": "</s>", "special": True}],
    )
    found = read_vocabulary(file)
    assert found.pieces == (b" the", b"\xe2", b"ion", None, None, b"gap", b"</s>")
    assert found.special == {6}


def test_a_unigram_model_has_a_list_of_pieces_with_scores(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        model={"type": "Unigram", "vocab": [["<unk>", 0.0], ["\u2581a", -1.5]]},
        decoder={"type": "Metaspace"},
        added_tokens=None,
    )
    assert read_vocabulary(file).pieces == (b"<unk>", b" a")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param("", id="empty"),
        pytest.param("[]", id="no object"),
        pytest.param('{"model": {}}', id="no vocabulary"),
        pytest.param('{"model": {"vocab": {"a": 0}}}', id="no decoder"),
        pytest.param(
            '{"model": {"vocab": {"a": 0}}, "decoder": {"type": "WordPiece"}}', id="other"
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_name(content: str, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        read_vocabulary(file)
