"""Recognition of SoC, quantization, toolkit, context and settings."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rkserve.catalog.recognise import (
    Found,
    ModelTraits,
    TokenizerFiles,
    context_in,
    misreads_end,
    plain_name,
    read_files,
    read_traits,
    releases_of,
    settings_of,
    template_by_name,
    warnings,
)
from rkserve.core.errors import ConfigError
from rkserve.models.folder import open_model_folder
from rkserve.native.binding.releases import RELEASES
from tests.support.paths import PROJECT

SIM_CHAT = PROJECT / "models" / "sim-chat"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        pytest.param(
            "Qwen2.5-3B-Instruct-rk3588-w8a8-opt-0-hybrid-ratio-0.0",
            ("Qwen2.5-3B-Instruct", "RK3588", "w8a8", None, None),
            id="with a hybrid ratio",
        ),
        pytest.param(
            "Qwen3-1.7B_w4a16_g128_rk3576_ctx16k_v1.2.3",
            ("Qwen3-1.7B", "RK3576", "w4a16_g128", "1.2.3", 16384),
            id="everything",
        ),
        pytest.param(
            "Phi-3-mini-4k-instruct-RK3588S-1.1.4",
            ("Phi-3-mini-4k-instruct", "RK3588", None, "1.1.4", 4096),
            id="a context in the model's name",
        ),
        pytest.param("gemma-2-2b", ("gemma-2-2b", None, None, None, None), id="nothing"),
        pytest.param("a b/\u00fc", ("a-b", None, None, None, None), id="unfit letters"),
    ],
)
def test_names_are_read(tmp_path: Path, name: str, found: tuple[Any, ...]) -> None:
    file = tmp_path / "x.rkllm"
    file.write_bytes(b"\1" * 1_000_000)
    traits = read_traits(file, ((name, "its name"),))
    read = [traits.platform, traits.dtype, traits.toolkit, traits.max_context]
    assert (plain_name(name), *(one and one.value for one in read)) == found
    assert all(one.source == "its name" for one in read if one is not None)


def test_the_header_of_a_simulated_model_comes_before_its_name() -> None:
    traits = read_traits(SIM_CHAT / "model.rkllm", (("x-rk3576-1.3.0", "its name"),))
    assert traits.platform == Found("any", "the file's header")
    assert traits.toolkit == Found("1.2.3", "the file's header")
    assert traits.simulated


@pytest.mark.parametrize("name", ["model-77k", "x-4000", "ctx0", "2048x", "1.4096"])
def test_other_numbers_are_no_context(name: str) -> None:
    assert context_in(name) is None


def test_files_that_are_no_model_are_refused(tmp_path: Path) -> None:
    whole = (SIM_CHAT / "model.rkllm").read_bytes()
    for content, words in (
        (whole[:-1], "of which"),
        (whole[:50], "cut off"),
        (b"GGUF" + bytes(2_000_000), "GGUF"),
        (b"\1" * 999_999, "cut off"),
        (b"", "empty"),
        (b"<html>", "HTML"),
    ):
        file = tmp_path / "x.rkllm"
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            read_traits(file, ())
    with pytest.raises(ConfigError, match="cannot be read"):
        read_traits(tmp_path / "absent.rkllm", ())


@pytest.mark.parametrize(
    ("toolkit", "releases"),
    [
        pytest.param("1.1.4", (), id="before 1.2"),
        pytest.param("1.2.0", tuple(RELEASES), id="older than all releases"),
        pytest.param("1.3.0", tuple(RELEASES)[tuple(RELEASES).index("1.3.0") :], id="1.3"),
        pytest.param("1.9.0", (), id="newer than all releases"),
        pytest.param(None, tuple(RELEASES), id="unknown"),
    ],
)
def test_a_release_runs_models_of_older_toolkits(
    toolkit: str | None, releases: tuple[str, ...]
) -> None:
    assert releases_of(toolkit) == releases


def traits(platform: str | None, dtype: str | None, toolkit: str | None) -> ModelTraits:
    soc, kind, version = (
        None if one is None else Found(one, "x") for one in (platform, dtype, toolkit)
    )
    return ModelTraits(2_000_000, soc, kind, version, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        pytest.param(traits("RK3588", "w8a8", "1.2.3"), [], id="fits"),
        pytest.param(traits("any", "W8A8", "1.2.3"), [], id="simulated"),
        pytest.param(traits(None, None, "1.2.3"), ["the SoC is unknown"], id="no SoC"),
        pytest.param(traits("RK3588", "w8a8", None), ["toolkit's version is unknown"], id="none"),
        pytest.param(traits("RK3588", "w4a16", "1.2.3"), ["quantized as w4a16"], id="dtype"),
        pytest.param(traits("RK3566", "w8a8", "1.2.3"), ["converted for RK3566"], id="no NPU"),
        pytest.param(traits("RK3588", "w8a8", "1.1.4"), ["no accepted release"], id="old"),
    ],
)
def test_what_may_not_run_is_warned_of(given: ModelTraits, words: list[str]) -> None:
    found = list(warnings(given))
    assert len(found) == len(words)
    assert all(part in line for part, line in zip(words, found, strict=True))


def test_old_toolkits_may_have_their_end_token_misread() -> None:
    assert misreads_end(traits("RK3588", "w8a8", "1.2.3"))
    assert misreads_end(traits("RK3588", "w8a8", None))
    assert not misreads_end(traits("RK3588", "w8a8", "1.3.0"))


CONFIG = {
    "hidden_size": 1536,
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "eos_token_id": 151643,
}
TOKENS = {
    "added_tokens": [
        {"id": 151643, "content": "<|endoftext|>"},
        {"id": 151645, "content": "<|im_end|>"},
    ]
}
KNOWN = traits("RK3588", "w8a8", "1.2.3")


def test_settings_of_a_usual_model() -> None:
    files = TokenizerFiles(
        template="{% if tools %}<tool_call>{% endif %}<|im_end|><think>",
        template_problem="",
        tokenizer=TOKENS,
        tokenizer_config={"eos_token": "<|im_end|>"},
        generation={
            "eos_token_id": [151645, 151643],
            "do_sample": True,
            "temperature": 0.6,
            "top_k": 20,
            "top_p": 7,
            "repetition_penalty": 1.05,
        },
        config=CONFIG,
    )
    found = settings_of(KNOWN, files, "Qwen2.5-1.5B-Instruct")
    assert {key: one.value for key, one in found.items()} == {
        "context_length": 4096,
        "eos_token_ids": [151645, 151643],
        "tool_format": "hermes",
        "thinking": {"marks": ["<think>", "</think>"]},
        "hidden_size": 1536,
        "kv_bytes_per_token": 28672,
        "sampling": {"temperature": 0.6, "top_k": 20, "repeat_penalty": 1.05},
    }
    assert found["context_length"].assumed
    assert found["eos_token_ids"].source == "tokenizer_config.json, generation_config.json"


def files_with(**changes: Any) -> TokenizerFiles:
    empty: dict[str, Any] = {
        "template": "",
        "template_problem": "",
        "tokenizer": {},
        "tokenizer_config": {},
        "generation": {},
        "config": {},
    }
    return TokenizerFiles(**{**empty, **changes})


@pytest.mark.parametrize(
    ("changes", "name", "found"),
    [
        pytest.param({}, "x", {"context_length": 4096}, id="nothing is known"),
        pytest.param(
            {"config": {"max_position_embeddings": 2048}},
            "x",
            {"context_length": 2048},
            id="a short context",
        ),
        pytest.param(
            {"config": {"text_config": {"hidden_size": 64}, "hidden_size": True}},
            "x",
            {"context_length": 4096, "hidden_size": 64},
            id="a block for text",
        ),
        pytest.param(
            {"tokenizer": {"added_tokens": "?"}, "generation": {"eos_token_id": "end"}},
            "x",
            {"context_length": 4096},
            id="odd types",
        ),
        pytest.param(
            {},
            "Qwen3-Embedding-0.6B",
            {"context_length": 4096, "embedding": {"pooling": "last"}},
            id="embeddings",
        ),
        pytest.param(
            {}, "Qwen3-Reranker-0.6B", {"context_length": 4096, "rerank": {}}, id="reranker"
        ),
    ],
)
def test_settings_of_other_models(
    changes: dict[str, Any], name: str, found: dict[str, Any]
) -> None:
    read = settings_of(KNOWN, files_with(**changes), name)
    assert {key: one.value for key, one in read.items()} == found


@pytest.mark.parametrize(
    ("name", "family"),
    [
        pytest.param("Qwen2.5-VL-3B", "qwen2.5-vl", id="published"),
        pytest.param("SmolVLM-500M", None, id="tags are not published"),
    ],
)
def test_an_image_encoder_is_used_where_all_its_values_are_published(
    name: str, family: str | None
) -> None:
    found = settings_of(KNOWN, files_with(), name, "vision.rknn").get("vision")
    wanted = None if family is None else {"family": family, "encoder": "vision.rknn"}
    assert (found and found.value) == wanted


def test_a_template_that_refuses_a_conversation_is_reported(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SIM_CHAT, folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no users') }}")
    assert "no users" in read_files(open_model_folder(folder)).template_problem


@pytest.mark.parametrize(
    ("file", "content"),
    [
        pytest.param("tokenizer.json", "{}", id="an empty tokenizer"),
        pytest.param("tokenizer_config.json", "{", id="cut JSON"),
        pytest.param("config.json", "[]", id="no object"),
        pytest.param("generation_config.json", "[" * 100_000, id="deep JSON"),
        pytest.param("chat_template.jinja", "{% if", id="no Jinja"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, file: str, content: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(SIM_CHAT, folder)
    (folder / file).write_text(content)
    with pytest.raises(ConfigError, match=file.replace("chat_template.jinja", "chat template")):
        read_files(open_model_folder(folder))


def test_the_files_of_the_simulated_model_are_read() -> None:
    files = read_files(open_model_folder(SIM_CHAT))
    settings = settings_of(read_traits(SIM_CHAT / "model.rkllm", ()), files, "sim-chat")
    own = open_model_folder(SIM_CHAT).settings
    assert tuple(settings["eos_token_ids"].value) == own.eos_token_ids[:1]
    assert settings["tool_format"].value == "hermes"
    assert json.loads(json.dumps(settings["thinking"].value)) == settings["thinking"].value


def test_families_have_built_in_templates() -> None:
    assert template_by_name("Llama-3.2-1B") == "llama3"
    assert template_by_name("Qwen3-0.6B") == "chatml"
    assert template_by_name("unknown") is None
