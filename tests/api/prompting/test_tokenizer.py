"""The tokenizer, and control tokens that clients type."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rkserve.api.common.renderer import Renderer
from rkserve.api.json.fields import CHARS_PER_TOKEN
from rkserve.api.prompting.tokenizer import SLICE_CHARS, ControlTokenGuard, Tokenizer, pieces
from rkserve.core.errors import ConfigError
from rkserve.models.folder import ModelFolder
from tests.support.values.wire_folders import (
    CONTROL,
    VOCABULARY,
    make_folder,
    make_tokenizer,
    read_back,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    return make_folder(tmp_path_factory.mktemp("folders") / "tiny")


@pytest.fixture(scope="module")
def renderer(folder: ModelFolder) -> Renderer:
    return Renderer(folder)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


@given(st.recursive(st.text(max_size=6), lambda x: st.lists(x) | st.dictionaries(st.text(), x)))
def test_a_shield_gives_back_what_it_took(value: Any) -> None:
    shield, typed = ControlTokenGuard(["<|a|>", "<|a|>b", "0"]), list[str]()

    def shown(hidden: Any) -> Any:
        if isinstance(hidden, str):
            return "".join(piece.text for piece in pieces(hidden, typed))
        if isinstance(hidden, list):
            return [shown(item) for item in hidden]
        return {shown(key): shown(item) for key, item in hidden.items()}

    assert shown(shield.hide(value, typed)) == value


def test_the_longest_marker_is_taken_whole() -> None:
    typed: list[str] = []
    ControlTokenGuard(["<a>", "<a>b"]).hide("<a>b", typed)
    assert typed == ["<a>b"]


def test_a_control_token_of_one_character_has_no_spelling_and_is_left_out(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", bare=("¶", "<|¶|>"))
    ids = Renderer(folder).chat([user("a¶b <|¶|>")]).ids
    assert [i for i in ids if i < len(CONTROL) + 2] == [1, 2, 1]
    assert "ab <||>" in read_back(folder, ids)


def test_no_token_has_more_characters_than_the_tokenizer_says(renderer: Renderer) -> None:
    tokenizer = renderer.tokenizer
    assert tokenizer is not None
    texts = [tokenizer.whole_text([i]) for i in range(tokenizer.vocab_size)]
    assert max(map(len, texts)) <= tokenizer.longest < CHARS_PER_TOKEN


@pytest.mark.parametrize(
    "piece",
    [
        "word ",
        "a",
        " ",
        "\n",
        "the quick brown fox",
        "äöü日本",
        "🙂",
        "e\u0301",
        "=-",
        "12",
        "<|im_end|>",
    ],
)
def test_a_measured_text_has_as_many_tokens_at_least(renderer: Renderer, piece: str) -> None:
    tokenizer = renderer.tokenizer
    assert tokenizer is not None
    text = piece * (5 * SLICE_CHARS // len(piece))
    whole = tokenizer.encode(text, add_special_tokens=False)
    same, found = tokenizer.beginning(text, len(whole) + 1)
    assert same == text
    assert 0.9 * len(whole) <= found <= len(whole)
    cut, found = tokenizer.beginning(text, len(whole) // 3)
    assert len(cut) < len(text)
    assert (
        tokenizer.encode(cut, add_special_tokens=False)[: len(whole) // 3 - 16]
        == whole[: len(whole) // 3 - 16]
    )


def test_truncation_and_padding_left_in_the_file_are_off(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    assert folder.tokenizer_file is not None
    raw = folder.tokenizer_file.read_text(encoding="utf-8")
    cut = '"truncation":{"direction":"Right","max_length":4,"strategy":"LongestFirst","stride":0}'
    assert '"truncation": null' in raw
    folder.tokenizer_file.write_text(raw.replace('"truncation": null', cut), encoding="utf-8")
    assert len(Renderer(folder).text("The board answers when it is asked.").ids) > 4


@pytest.mark.parametrize("content", ["", "{}", "not JSON"])
def test_a_broken_tokenizer_stops_the_start(tmp_path: Path, content: str) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(file)


def test_the_vocabulary_counts_added_tokens(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "t.json")
    tokenizer = Tokenizer(tmp_path / "t.json")
    assert tokenizer.vocab_size == VOCABULARY
    assert tokenizer.control == set(CONTROL)  # <tool_call> is no special token
