"""Model folders: what is found in them, and which ones are refused in which words."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rkserve.core.errors import ConfigError
from rkserve.core.run_params import Sampling
from rkserve.models.folder import by_id, open_model_folder
from tests.support.paths import PROJECT
from tests.support.values.tiny_gguf import tiny_folder


def folder(path: Path, **files: str) -> Path:
    """Make a model folder; a file's name has ``__`` for its dot."""
    path.mkdir()
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content, encoding="utf-8")
    return path


def test_the_shipped_model_is_complete() -> None:
    found = open_model_folder(PROJECT / "models" / "sim-chat")
    assert found.id == "sim-chat"
    assert found.require_weights().name == "model.rkllm"
    assert found.tokenizer_file is not None
    assert found.chat_template is not None
    assert found.settings.context_length == 4096
    assert found.settings.eos_token_ids


def test_a_folder_needs_nothing_but_its_name(tmp_path: Path) -> None:
    found = open_model_folder(folder(tmp_path / "Bare-1.5B"))
    assert (found.id, found.weights, found.tokenizer_file) == ("Bare-1.5B", None, None)
    assert (found.tokenizer_config, found.chat_template) == ({}, None)
    assert found.settings.context_length == 4096
    with pytest.raises(ConfigError, match=r"no \*\.rkllm file"):
        found.require_weights()


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        pytest.param({"only__rkllm": ""}, "only.rkllm", id="the only one"),
        pytest.param({"a__rkllm": "", "model__rkllm": ""}, "model.rkllm", id="model.rkllm wins"),
    ],
)
def test_the_weights_are_found(tmp_path: Path, files: dict[str, str], chosen: str) -> None:
    found = open_model_folder(folder(tmp_path / "m", **files))
    assert found.require_weights().name == chosen
    with pytest.raises(ConfigError, match=r"no \*\.gguf file"):
        found.require_weights(cpu=True)


def test_one_folder_has_a_model_for_npus_and_one_for_cpus(tmp_path: Path) -> None:
    found = open_model_folder(folder(tmp_path / "m", model__gguf="c", a__rkllm="n"))
    assert (found.require_weights().name, found.require_weights(cpu=True).name) == (
        "a.rkllm",
        "model.gguf",
    )
    assert found.content_digest() != found.content_digest(cpu=True)
    several = open_model_folder(folder(tmp_path / "n", a__gguf="a", b__gguf="b", c__rkllm="c"))
    assert several.require_weights().name == "c.rkllm"  # of no concern to NPUs
    with pytest.raises(ConfigError, match=r"a\.gguf, b\.gguf\); name one of them model\.gguf"):
        several.require_weights(cpu=True)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        pytest.param({}, "has no tokenizer.json", id="text prompts"),
        pytest.param(
            {
                "tokenizer__json": "{}",
                "rkserve__yaml": "vision: {family: qwen2-vl}",
                "vision__rknn": "",
            },
            "with images or an encoder, for NPUs only",
            id="images",
        ),
    ],
)
def test_a_model_that_no_cpu_can_serve_is_refused(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        open_model_folder(folder(tmp_path / "m", **files)).check_cpu()


@pytest.mark.parametrize(
    ("name", "files", "words"),
    [
        pytest.param("m", {"a__rkllm": "", "b__rkllm": ""}, "a.rkllm, b.rkllm", id="two models"),
        pytest.param("my model", {}, "may hold only letters", id="a name with a space"),
        pytest.param(
            "m",
            {"rkserve__yaml": "context_length: 100"},
            r"rkserve\.yaml: context_length: must be a multiple of 32 from 32 to 16384, not 100\.$",
            id="no multiple",
        ),
        pytest.param(
            "m",
            {"rkserve__yaml": "context_lenght: 64"},
            r"context_lenght: unknown key 'context_lenght'; did you mean 'context_length'\?$",
            id="an unknown key",
        ),
        pytest.param(
            "m",
            {"rkserve__yaml": "sampling: {top_k: 0}"},
            r"sampling\.top_k: must be a whole number of at least 1, not 0\.$",
            id="a sampling value out of range",
        ),
        pytest.param(
            "m",
            {"rkserve__yaml": "eos_token_ids: [1, -1]"},
            r"eos_token_ids\[1\]: must be a whole number of at least 0, not -1\.$",
            id="an id that no token has",
        ),
        pytest.param(
            "m",
            {"rkserve__yaml": "embedding: {pooling: max}"},
            r"embedding\.pooling: must be last or mean or cls, not 'max'\.$",
            id="a pooling that is none",
        ),
        pytest.param("m", {"rkserve__yaml": "a: [1"}, "cannot be read", id="no YAML"),
        pytest.param("m", {"rkserve__yaml": "- 1"}, "block of keys, not a list", id="a list"),
    ],
)
def test_a_bad_folder_is_refused_with_the_file_and_the_key(
    tmp_path: Path, name: str, files: dict[str, str], words: str
) -> None:
    made = folder(tmp_path / name, **files)
    with pytest.raises(ConfigError, match=words) as caught:
        open_model_folder(made)
    assert name in str(caught.value)


def test_a_missing_folder_says_which_key_to_check(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere does not exist.*`model`"):
        open_model_folder(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"\xff\xfe\x00", "can't decode"), (b"[" * 20_000, "nested too deeply")],
    ids=["binary", "deep"],
)
def test_settings_that_are_no_text_are_a_configuration_error(
    tmp_path: Path, content: bytes, why: str
) -> None:
    made = folder(tmp_path / "m")
    (made / "rkserve.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        open_model_folder(made)


def test_settings_are_read_and_the_rest_keeps_its_default(tmp_path: Path) -> None:
    text = "context_length: 2048\neos_token_ids: [7, 9]\nsampling: {temperature: 0.1}\n"
    settings = open_model_folder(folder(tmp_path / "m", rkserve__yaml=text)).settings
    assert (settings.context_length, settings.eos_token_ids) == (2048, (7, 9))
    assert settings.sampling.values() == Sampling(temperature=0.1)


def test_a_model_makes_embeddings_where_its_folder_says_so(tmp_path: Path) -> None:
    plain = open_model_folder(folder(tmp_path / "m"))
    assert plain.settings.embedding is None
    said = open_model_folder(folder(tmp_path / "e", rkserve__yaml="embedding: {pooling: mean}"))
    assert said.settings.embedding is not None
    assert (said.settings.embedding.pooling, said.settings.embedding.normalize) == ("mean", True)
    shipped = open_model_folder(PROJECT / "models" / "sim-embed")
    assert shipped.settings.embedding is not None
    assert shipped.settings.embedding.dimensions == 64


def test_an_empty_settings_file_is_no_error(tmp_path: Path) -> None:
    found = open_model_folder(folder(tmp_path / "m", rkserve__yaml="# nothing yet\n"))
    assert found.settings.sampling.values() == Sampling()


@pytest.mark.parametrize(
    ("files", "template"),
    [
        pytest.param(
            {"tokenizer_config__json": json.dumps({"chat_template": "T"})}, "T", id="in the config"
        ),
        pytest.param(
            {
                "tokenizer_config__json": json.dumps(
                    {
                        "chat_template": [
                            {"name": "tool_use", "template": "U"},
                            {"name": "default", "template": "D"},
                        ]
                    }
                )
            },
            "D",
            id="the default of several",
        ),
        pytest.param(
            {
                "tokenizer_config__json": json.dumps({"chat_template": "T"}),
                "chat_template__jinja": "J",
            },
            "J",
            id="a file of its own wins",
        ),
        pytest.param({"tokenizer_config__json": "{}"}, None, id="none"),
    ],
)
def test_the_chat_template_is_found(
    tmp_path: Path, files: dict[str, str], template: str | None
) -> None:
    assert open_model_folder(folder(tmp_path / "m", **files)).chat_template == template


@pytest.mark.parametrize("content", ["{", "[]"], ids=["no JSON", "no object"])
def test_a_bad_tokenizer_config_is_named(tmp_path: Path, content: str) -> None:
    found = open_model_folder(folder(tmp_path / "m", tokenizer_config__json=content))
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json"):
        _ = found.chat_template


# -- caches, adapters, the window -----------------------------------------------------------------


def test_settings_of_the_board_s_memory_have_their_defaults(tmp_path: Path) -> None:
    settings = open_model_folder(folder(tmp_path / "m")).settings
    assert (settings.max_adapters, settings.n_keep) == (4, -1)
    assert (settings.kv_bytes_per_token, settings.prompt_cache) == (None, None)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param("max_adapters: 0", "a whole number of at least 1, not 0", id="no adapters"),
        pytest.param("kv_bytes_per_token: 0", "a whole number of at least 1", id="no bytes"),
        pytest.param("n_keep: -2", "a whole number of at least -1, not -2", id="a negative window"),
        pytest.param("prompt_cache: maybe", "true or false, not 'maybe'", id="neither yes nor no"),
    ],
)
def test_a_bad_setting_of_the_board_s_memory_is_named(
    tmp_path: Path, line: str, words: str
) -> None:
    key = line.partition(":")[0]
    with pytest.raises(ConfigError, match=f"{key}: must be {words}"):
        open_model_folder(folder(tmp_path / "m", rkserve__yaml=line))


@pytest.mark.parametrize(
    ("name", "weights", "said", "allowed"),
    [
        pytest.param("Qwen3-0.6B", "model", None, True, id="a family that can"),
        pytest.param("Qwen3-5B", "model", None, True, id="five billion parameters"),
        pytest.param("Qwen2.5-1.5B", "model", None, True, id="2.5"),
        pytest.param("Qwen3-chat", "qwen3_500m", None, True, id="500 million parameters"),
        pytest.param("qwen3.5-4b", "model", None, False, id="known by the folder"),
        pytest.param("Qwen3_5-4B", "model", None, False, id="spelt otherwise"),
        pytest.param("chat", "qwen35-4b-w8a8", None, False, id="known by the model's file"),
        pytest.param("qwen3.5-4b", "model", True, True, id="the folder knows better"),
        pytest.param("Qwen3-0.6B", "model", False, False, id="switched off"),
    ],
)
def test_prompt_caches_are_off_where_the_family_cannot_save_them(
    tmp_path: Path, name: str, weights: str, said: bool | None, allowed: bool
) -> None:
    files = {f"{weights}__rkllm": ""}
    if said is not None:
        files["rkserve__yaml"] = f"prompt_cache: {str(said).lower()}"
    assert open_model_folder(folder(tmp_path / name, **files)).prompt_cache is allowed


def test_models_are_told_apart_by_their_files(tmp_path: Path) -> None:
    digests = {
        open_model_folder(folder(tmp_path / name, model__rkllm=content)).content_digest()
        for name, content in (("a", "one"), ("b", "one"), ("c", "two"))
    }
    assert len(digests) == 2


def test_a_model_without_its_file_has_no_digest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.rkllm file"):
        open_model_folder(folder(tmp_path / "m")).content_digest()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("ignore_eos_token: 7", "ignore_eos_token: must be true or false, not 7"),
        ("sampling: {mirostat: 3}", "sampling.mirostat: must be a whole number from 0 to 2, not 3"),
        (
            "sampling: {mirostat_tau: 21}",
            "sampling.mirostat_tau: must be a number above 0, up to 20",
        ),
    ],
)
def test_bad_settings_of_the_runtime_are_named(tmp_path: Path, line: str, words: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "rkserve.yaml").write_text(f"{line}\n")
    with pytest.raises(ConfigError, match=re.escape(words)):
        open_model_folder(tmp_path / "m")


# -- vocabularies ---------------------------------------------------------------------------------


def other_tokens(folder: Path) -> None:
    """Exchange two ordinary tokens of a tokenizer.json."""
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(content), encoding="utf-8")


def test_a_gguf_file_of_another_model_than_its_tokenizer_is_refused(tmp_path: Path) -> None:
    made = tiny_folder(tmp_path / "tiny")
    open_model_folder(made).check_cpu()
    other_tokens(made)
    with pytest.raises(ConfigError, match=r"different models: token \d+ is b'a' and b'b'"):
        open_model_folder(made).check_cpu()


def test_folders_of_one_name_are_one_model_with_one_vocabulary(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = (open_model_folder(tiny_folder(tmp_path / n / "m")) for n in ("a", "b"))
    assert by_id([first, second]) == {"m": first}
    other_tokens(second.path)
    with pytest.raises(ConfigError, match=r"one model by their name, and token \d+ is b'a' in"):
        by_id([first, second])
    second.path.joinpath("tokenizer.json").unlink()
    for pair in ([first, second], [second, first]):
        with pytest.raises(ConfigError, match="Copy it into the second") as caught:
            by_id(pair)
        assert caught.value.message.startswith(f"{first.path} and {second.path}")
