"""Simulated stand-ins: they are loaded, and answer in the model's own vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rkserve.catalog.simulate import simulate
from rkserve.core.errors import ConfigError
from rkserve.local import open_board
from rkserve.models.folder import open_model_folder
from rkserve.native.sim.models import EMBED_DIM
from tests.support.paths import PROJECT

SIM_CHAT = PROJECT / "models" / "sim-chat"
BANK = PROJECT / "rkserve" / "native" / "sim" / "bank.txt"
FAST = {"time_scale": 0.01, "load_s": 0.0}


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A model folder without simulated weights."""
    folder = tmp_path / "real" / "chat"
    shutil.copytree(SIM_CHAT, folder)
    (folder / "model.rkllm").write_bytes(b"\1" * 1_000_000)
    settings = (folder / "rkserve.yaml").read_text()
    (folder / "rkserve.yaml").write_text(settings.replace("hidden_size: 64", "hidden_size: 1536"))
    return folder


def test_a_model_in_chatml_answers(real: Path, tmp_path: Path) -> None:
    made = simulate(open_model_folder(real), tmp_path / "sim")
    assert made == tmp_path / "sim" / "chat"
    assert open_model_folder(made).settings.hidden_size == EMBED_DIM
    with open_board(made, simulated=FAST) as board:
        answer = board.generate("Count to 5", temperature=0)
    assert (answer.text, answer.finish_reason) == ("1, 2, 3, 4, 5.", "stop")
    with pytest.raises(ConfigError, match="exists already"):
        simulate(open_model_folder(real), tmp_path / "sim")


def test_another_vocabulary_and_template_are_spoken(real: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    lines = BANK.read_text().splitlines()
    tokenizer.train_from_iterator([*lines, *(f" {line}" for line in lines)], trainer)
    special = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.save(str(real / "tokenizer.json"))
    (real / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|eot_id|>"}))
    end = tokenizer.token_to_id("<|eot_id|>")
    (real / "rkserve.yaml").write_text(f"chat_template: llama3\neos_token_ids: [{end}]\n")
    made = simulate(open_model_folder(real), tmp_path / "sim")
    with open_board(made, simulated=FAST) as board:
        answer = board.generate("Hello", temperature=0, max_tokens=24)
    assert any(word in answer.text for line in lines for word in line.split()[:1])
    assert "<|" not in answer.text


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def with_encoder(folder: Path) -> None:
    (folder / "rkserve.yaml").write_text("vision: {family: qwen2-vl}\n")


def without_a_byte(folder: Path) -> None:
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["\u0100\u0100\u0100x"] = content["model"]["vocab"].pop("\u0100")
    file.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(without_tokenizer, r"no tokenizer\.json", id="no tokenizer"),
        pytest.param(with_encoder, "needs an encoder", id="vision"),
        pytest.param(without_a_byte, "no token for the byte 0x00", id="a byte"),
    ],
)
def test_models_that_cannot_be_simulated_are_refused(
    real: Path, tmp_path: Path, change: Callable[[Path], None], words: str
) -> None:
    change(real)
    with pytest.raises(ConfigError, match=words):
        simulate(open_model_folder(real), tmp_path / "sim")
    assert not (tmp_path / "sim" / "chat").exists()
