"""Headers of GGUF files, and the model folders that are made of them."""

from __future__ import annotations

import json
import struct
import threading
from pathlib import Path
from typing import Any

import pytest

from rkserve.api.common.renderer import Renderer
from rkserve.core.errors import ConfigError
from rkserve.models import gguf
from rkserve.models.folder import open_model_folder
from rkserve.models.gguf import GgufFile, read_gguf, settings_of, sidecar_of, tokenizer_config
from tests.support.values.gguf_vocabularies import (
    ARRAY,
    BOOL,
    FLOAT32,
    INT32,
    STRING,
    UINT32,
    Pairs,
    byte_pairs,
    metadata_of,
)
from tests.support.values.tiny_gguf import write_gguf, write_tiny

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "Tiny_1.5B-q8.gguf"
    write_tiny(path, more={"tokenizer.chat_template": (STRING, TEMPLATE)})
    return path


def with_metadata(**more: Any) -> GgufFile:
    """Return the header of a llama of 32 dimensions, with other values; None leaves one out."""
    metadata = metadata_of(byte_pairs("qwen2")) | {
        name.replace("__", "."): value for name, value in more.items()
    }
    known = {key: value for key, value in metadata.items() if value is not None}
    return GgufFile(Path("m.gguf"), known, 0, 0)


def test_all_kinds_of_values_are_read(tmp_path: Path) -> None:
    pairs: Pairs = {
        "general.architecture": (STRING, "llama"),
        "text": (STRING, "ä\n"),
        "number": (UINT32, 7),
        "negative": (INT32, -7),
        "real": (FLOAT32, 0.5),
        "flag": (BOOL, True),
        "numbers": (ARRAY, (INT32, [1, -2])),
        "texts": (ARRAY, (STRING, ["a", ""])),
    }
    write_gguf(tmp_path / "m.gguf", pairs, {})
    found = read_gguf(tmp_path / "m.gguf")
    assert found.metadata == metadata_of(pairs)
    assert found.architecture == "llama"


def test_the_tensors_promise_the_size_of_the_file(tiny: Path) -> None:
    found = read_gguf(tiny)
    assert 0 <= found.size_bytes - found.promised_bytes < 32, "but for the padding of the last"
    found.check()


def test_a_file_cut_anywhere_is_refused_as_cut_short(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    for size in (*range(8, 400, 7), 5000, len(whole) // 2, len(whole) - 64):
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=f"is cut short: .*{size} bytes"):
            read_gguf(cut).check()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(b"", "is no GGUF file", id="empty"),
        pytest.param(b"PK\x03\x04 zip", "is no GGUF file: it begins with b'PK", id="foreign"),
        pytest.param(b"GGUF" + struct.pack("<I", 1), "version 1 of the format", id="version 1"),
        pytest.param(b"GGUF" + struct.pack(">I", 3), "it is big-endian", id="big-endian"),
        pytest.param(
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sI", 1, b"k", 99),
            "type 99 of a value",
            id="a later type",
        ),
        pytest.param(
            b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1s", 1, b"\xff") + bytes(99),
            "damaged",
            id="no UTF-8",
        ),
        pytest.param(
            b"GGUF"
            + struct.pack("<IQQ", 3, 0, 1)
            + struct.pack("<Q1sIIQ", 1, b"k", ARRAY, STRING, 1 << 60),
            "is cut short",
            id="a list longer than any memory",
        ),
    ],
)
def test_other_files_are_refused_in_words(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_gguf(path)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        pytest.param({"general__type": "adapter"}, "no language model .adapter.", id="adapter"),
        pytest.param({"general__architecture": "clip"}, "no language model .clip.", id="images"),
        pytest.param({"general__architecture": None}, "no architecture", id="nothing"),
    ],
)
def test_files_beside_models_are_no_models(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        with_metadata(**metadata).check()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("qwen2.5-0.5b-q4_k_m.gguf", "qwen2.5-0.5b-q4_k_m"),
        ("big-00001-of-00003.gguf", "big"),
        ("My Model (1).gguf", "My-Model-1-"),
        ("_x.gguf", "x"),
        ("\u4e2d.gguf", "model"),
    ],
)
def test_the_id_is_the_name_of_the_file(name: str, expected: str) -> None:
    assert gguf.model_id(Path("/somewhere") / name) == expected


def test_settings_follow_the_metadata() -> None:
    found = settings_of(with_metadata(llama__context_length=4100))
    assert found["context_length"] == 4096
    assert found["eos_token_ids"][0] == 2913
    assert (found["hidden_size"], "embedding" in found) == (32, False)
    assert found["kv_bytes_per_token"] == 1 * 4 * (8 + 8) * 2
    heads = {"llama__attention__head_count_kv": [1, 2], "llama__attention__key_length": 16}
    assert settings_of(with_metadata(**heads))["kv_bytes_per_token"] == 2 * (16 + 8) * 2
    assert settings_of(with_metadata(llama__context_length=1 << 20))["context_length"] == 8192


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_a_model_with_pooling_makes_embeddings(number: int, pooling: str) -> None:
    found = settings_of(with_metadata(llama__pooling_type=number))
    assert found["embedding"] == {"pooling": pooling, "dimensions": 32}


def test_a_reranker_with_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match="reranker with a head"):
        settings_of(with_metadata(llama__pooling_type=4))


def test_templates_and_named_tokens_are_those_of_the_metadata() -> None:
    metadata = dict(with_metadata(tokenizer__chat_template="a").metadata)
    found = tokenizer_config(metadata)
    assert found == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "chat_template": "a",
    }
    metadata["tokenizer.chat_template.tool_use"] = "b"
    assert tokenizer_config(metadata)["chat_template"] == [
        {"name": "default", "template": "a"},
        {"name": "tool_use", "template": "b"},
    ]


def test_a_file_is_opened_as_a_model_folder(tiny: Path, tmp_path: Path) -> None:
    folder = open_model_folder(tiny, tmp_path / "state")
    assert folder.id == "Tiny_1.5B-q8"
    assert folder.require_weights(cpu=True) == tiny
    assert folder.settings.context_length == 4096
    assert folder.path.is_relative_to(tmp_path / "state")
    folder.check_cpu()
    renderer = Renderer(folder)
    assert renderer.tokenizer is not None
    prompt = renderer.chat([{"role": "user", "content": "Hi"}])
    assert renderer.tokenizer.whole_text(prompt.ids) == "<|im_start|>Hi<|im_end|>"
    with pytest.raises(ConfigError, match=r"which CPUs compute: set `cpu: \{\}`"):
        folder.require_weights()


def test_the_folder_is_made_once_and_anew_for_another_file(tiny: Path, tmp_path: Path) -> None:
    first = open_model_folder(tiny, tmp_path / "state")
    made = (first.path / "tokenizer.json").stat()
    assert open_model_folder(tiny, tmp_path / "state").path == first.path
    assert (first.path / "tokenizer.json").stat() == made
    digest = first.content_digest(cpu=True)
    write_tiny(tiny, seed=1)
    again = open_model_folder(tiny, tmp_path / "state")
    assert again.path != first.path
    assert again.content_digest(cpu=True) != digest


def test_processes_that_make_it_at_once_make_one(tiny: Path, tmp_path: Path) -> None:
    found: list[Path] = []

    def make() -> None:
        found.append(gguf.made_folder(tiny, tmp_path / "state"))

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({*found}) == 1
    assert [one.name for one in found[0].parent.iterdir()] == [found[0].name]


def test_settings_beside_the_file_come_first(tiny: Path, tmp_path: Path) -> None:
    plain = open_model_folder(tiny, tmp_path / "state")
    sidecar_of(tiny).write_text("context_length: 512\nthinking: {enabled: false}\n", "utf-8")
    found = open_model_folder(tiny, tmp_path / "state")
    assert sidecar_of(tiny).name == "Tiny_1.5B-q8.rkserve.yaml"
    assert found.settings.context_length == 512
    assert found.settings.eos_token_ids == plain.settings.eos_token_ids
    sidecar_of(tiny).write_text("context: 512", "utf-8")
    with pytest.raises(ConfigError, match="unknown key 'context'"):
        open_model_folder(tiny, tmp_path / "state")
    sidecar_of(tiny).write_text("[", "utf-8")
    with pytest.raises(ConfigError, match="cannot be read"):
        open_model_folder(tiny, tmp_path / "state")


def test_an_unknown_tokenizer_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny(path, more={"tokenizer.ggml.pre": (STRING, "brand-new")})
    with pytest.raises(ConfigError, match=r"pre-tokenizer 'brand-new'.*Make a folder"):
        open_model_folder(path, tmp_path / "state")
    assert not list((tmp_path).rglob("tokenizer.json"))


def test_a_model_of_several_files_is_named_by_its_first(tmp_path: Path) -> None:
    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    write_tiny(first)
    with pytest.raises(ConfigError, match=f"{second} is missing"):
        open_model_folder(first, tmp_path / "state")
    write_tiny(second, seed=2)
    folder = open_model_folder(first, tmp_path / "state")
    assert folder.parts(cpu=True) == (first, second)
    before = folder.content_digest(cpu=True)
    write_tiny(second, seed=3)
    assert folder.content_digest(cpu=True) != before
    with pytest.raises(ConfigError, match=f"is part 2 of a model; name its first, {first.name}"):
        open_model_folder(second, tmp_path / "state")
    assert open_model_folder(tmp_path).require_weights(cpu=True) == first


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.gguf cannot be read: No such file"):
        open_model_folder(tmp_path / "nowhere.gguf", tmp_path / "state")


def test_a_state_folder_that_is_not_ours_is_refused(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        open_model_folder(tiny, tmp_path / "state")


def test_the_made_files_are_json(tiny: Path, tmp_path: Path) -> None:
    made = gguf.made_folder(tiny, tmp_path / "state")
    names = {"tokenizer.json", "tokenizer_config.json", "rkserve.yaml"}
    assert {one.name for one in made.iterdir()} == names
    assert json.loads((made / "tokenizer.json").read_text("utf-8"))["model"]["type"] == "BPE"
