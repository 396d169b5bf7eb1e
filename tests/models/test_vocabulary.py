"""What the tokens of a vocabulary say in bytes, however it writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rkserve.core.errors import ConfigError
from rkserve.models.vocabulary import read_vocabulary
from tests.support.paths import PROJECT

SIM_CHAT = PROJECT / "models" / "sim-chat" / "tokenizer.json"


def written(place: Path, **found: Any) -> Path:
    file = place / "tokenizer.json"
    file.write_text(json.dumps(found))
    return file


@pytest.mark.parametrize("text", ["The sea.", "größer als 5 €", "日本語 \N{GRINNING FACE}\n\tx"])
def test_the_tokens_of_a_text_say_that_text(text: str) -> None:
    vocabulary = read_vocabulary(SIM_CHAT)
    ids = Tokenizer.from_file(str(SIM_CHAT)).encode(text).ids
    assert b"".join(vocabulary.said(token_id) for token_id in ids).decode() == text


def test_every_id_has_its_piece_and_markup_says_nothing() -> None:
    vocabulary = read_vocabulary(SIM_CHAT)
    assert len(vocabulary) == Tokenizer.from_file(str(SIM_CHAT)).get_vocab_size()
    assert None not in vocabulary.pieces
    ids = Tokenizer.from_file(str(SIM_CHAT)).get_vocab()
    end, think = ids["<|im_end|>"], ids["<think>"]
    assert (vocabulary.piece(end), vocabulary.said(end)) == (b"<|im_end|>", b"")
    assert vocabulary.said(think) == b"<think>"  # visible markup


@pytest.mark.parametrize("token_id", [-1, 10**6])
def test_an_id_beyond_the_vocabulary_says_nothing(token_id: int) -> None:
    vocabulary = read_vocabulary(SIM_CHAT)
    assert (vocabulary.piece(token_id), vocabulary.said(token_id)) == (b"", b"")


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
